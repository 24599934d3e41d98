"""Models from a name, or from a checkpoint."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import hydra
import torch
from hydra.errors import InstantiationException
from lightning.fabric.utilities.exceptions import MisconfigurationException

from gsm import paths
from gsm.config import exported
from gsm.config.check import ConfigError, check, few
from gsm.config.compose import compose, parse
from gsm.config.trust import vetted
from gsm.data.tokenizer import Tokenizer
from gsm.files import Damaged, verify_archive
from gsm.models.base import LanguageModel
from gsm.models.checks import DEVICES
from gsm.training.distributed import shards
from gsm.training.resume import ENTRIES, FORMAT, STATE

LAST = "checkpoints/last.ckpt"  # in the folder of a run
NUMBER = (int, float)
NONE = type(None)
# What a checkpoint consists of: the kind of every entry, or in curly brackets what lies below it (under ..., of
# any name), in square brackets what all in a list are. What `NEEDED` names has to be there.
SHAPE: dict[Any, Any] = {
    "hyper_parameters": {
        "config": {
            "model": Mapping,
            "data": Mapping,
            "trainer": {"max_steps": int},
            "global_batch": (int, NONE),
            "size": Mapping,
            "choices": {...: (str, NONE)},
            "callbacks": (Mapping, NONE),
            "start_from": (str, NONE),
        }
    },
    "state_dict": {...: torch.Tensor},
    shards.FOLDER: shards.SHAPE,
    "global_step": int,
    "optimizer_states": [{"state": {...: Mapping}, "param_groups": [{"params": list}]}],
    ENTRIES: [{...: [str]}],
    "lr_schedulers": [{"base_lrs": [NUMBER], "last_epoch": int}],
    "loops": {"fit_loop": Mapping},
    "callbacks": {...: Mapping},
    STATE: {
        "random": {"torch": torch.Tensor, "python": (list, tuple), "numpy": (list, tuple), "cuda": torch.Tensor},
        "world": int,
    },
    "format": int,
    "tokenizer": (Mapping, NONE),
    "fingerprint": (Mapping, NONE),
    "origin": (str, NONE),
    "started_from": (str, NONE),
}
NEEDED = ("hyper_parameters", "config", "model", "global_step")


class CheckpointError(ConfigError):
    """A file is no checkpoint of this project, or not one that can be used; the message says why."""


def build_model(
    name: str = "gsm",
    size: str = "nano",
    overrides: Iterable[str] = (),
    seed: int | None = None,
    directories: Sequence[Path] = (),
) -> LanguageModel:
    """A fresh model, as a training run would start with.

    Args:
        name: a variant of the group ``model``: ``"gsm"``, ``"baseline"``, ...
        size: a variant of the group ``size``: ``"nano"``, ``"tiny"``, ...
        overrides: as on the command line: ``["model/retriever=separate_indexer", "model.state_size=64"]``.
        seed: of the weights; None draws them from PyTorch's global generator. A seed leaves that generator alone.
        directories: folders of yaml files besides ``configs/``, for variants of one's own.

    Raises:
        ConfigError: an unknown name or key, or a value that the model refuses.
    """
    # It is no run: named, so that nobody has to find out what it would be called.
    config = compose([f"model={name}", f"size={size}", "arm=model", *overrides], directories)
    return instantiate_model(config, seed)


def load_model(
    path: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    directories: Sequence[Path] = (),
    overrides: Iterable[str] = (),
) -> LanguageModel:
    """The trained model of a checkpoint, in evaluation mode. A stranger's file runs no code (``gsm.config.trust``).

    Args:
        path: a ``.ckpt`` file; the folder of a run, which stands for its ``checkpoints/last.ckpt``; or the name of a
            checkpoint that comes with the package: ``"nano"``.
        device: where the weights go.
        directories: folders of yaml files besides ``configs/``, for a model with parts of one's own.
        overrides: values of the model that are to differ from the checkpoint's: ``["model.candidate_pool=false"]``.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is truncated or damaged, no checkpoint of this project, names parts that no yaml names, or
            its configuration no longer fits the code.
        ConfigError: an override that changes no value of the model.
    """
    checkpoint = read_checkpoint(path)
    model = model_of(checkpoint, path, directories, overrides)
    load_sound_weights(model, checkpoint, path)
    return model.to(device).eval()


def model_of(
    checkpoint: Mapping[str, Any],
    path: str | os.PathLike[str],
    directories: Sequence[Path] = (),
    overrides: Iterable[str] = (),
) -> LanguageModel:
    """The model of a checkpoint that was read, with fresh weights. Arguments and errors as of ``load_model``."""
    node = _changed(vetted_node(checkpoint, "model", path, directories), list(overrides))
    try:
        check({"model": node}, {"model": node}, [])
        with as_in_file():
            return instantiate_model({"model": node})
    except ConfigError as error:
        raise CheckpointError(
            f"the configuration in {path} no longer fits this version of the code: {error}"
        ) from error


def _changed(node: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The node of a checkpoint's model with other values, each a place below ``model``. Raises ConfigError."""
    node = copy.deepcopy(node)
    for one in parse(overrides):
        *above, last = one.key_or_group.split(".")
        place: Any = node if above[:1] == ["model"] else None
        for key in above[1:]:
            place = place.get(key) if isinstance(place, dict) else None
        takes = isinstance(place, dict) and last in place and not last.startswith("_")
        if not takes or one.is_delete() or one.is_sweep_override():
            raise ConfigError(
                f"a checkpoint cannot be changed by '{one.input_line}': give a value that its model has, such as "
                f"model.{next(key for key, value in node.items() if key[:1] != '_' and not isinstance(value, dict))}="
            )
        place[last] = one.value()
    return node


@contextlib.contextmanager
def as_in_file() -> Iterator[None]:
    """What parts say to values of a file is the file's fault, whatever they stumble on. Raises ConfigError."""
    try:
        yield
    except InstantiationException as error:
        raise ConfigError(f"its values fit no part: {error.__cause__!r:.200}") from error


def vetted_node(
    checkpoint: Mapping[str, Any], part: str, path: str | os.PathLike[str], directories: Sequence[Path] = ()
) -> dict[str, Any]:
    """The node of a checkpoint's configuration from which its ``model`` or its ``data`` may be built.

    Raises CheckpointError, a ConfigError, for one that asks for more than the yamls know.
    """
    try:
        return vetted(checkpoint["hyper_parameters"]["config"].get(part), part, directories)
    except ConfigError as error:
        raise CheckpointError(f"the configuration in {path} is not trusted: {error}") from error


def misfits(model: LanguageModel, checkpoint: Mapping[str, Any]) -> list[str]:
    """The parameters that a model and a checkpoint do not share, or not with the same shape; empty if all fit."""
    there, here = _weights(checkpoint), model.state_dict()
    return sorted(there.keys() ^ here.keys()) or [
        f"{name} {tuple(there[name].shape)} for {tuple(own.shape)}"
        for name, own in here.items()
        if there[name].shape != own.shape
    ]


def not_finite(tensors: Mapping[str, Any]) -> list[str]:
    """The names of those that hold infinities or NaN: whoever computes with them fails later, and far away."""
    return [name for name, x in tensors.items() if x.is_floating_point() and not bool(x.isfinite().all())]


def load_sound_weights(model: LanguageModel, checkpoint: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Gives a model the weights of its checkpoint. Raises CheckpointError where they do not fit or are not finite."""
    if wrong := misfits(model, checkpoint):
        raise CheckpointError(f"the weights in {path} do not fit the model in its configuration: {few(wrong)}")
    if broken := not_finite(_weights(checkpoint)):
        raise CheckpointError(f"the weights in {path} are of a model that broke: {few(broken)} hold what is not finite")
    load_weights(model, checkpoint)


def load_weights(model: LanguageModel, checkpoint: Mapping[str, Any]) -> None:
    """Gives a model the weights of a checkpoint that fits."""
    model.load_state_dict(_weights(checkpoint))


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a checkpoint. Raises as ``load_model`` does."""
    return tokenizer_of(read_checkpoint(path, mmap=True), path)


def tokenizer_of(saved: Mapping[str, Any], path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a checkpoint that was read. Raises CheckpointError, a ConfigError, if it holds none."""
    state = saved.get("tokenizer")
    if not state:
        raise CheckpointError(f"{path} holds no tokenizer, so its model cannot read or write text")
    try:
        return Tokenizer.from_state(state)
    except Exception as error:  # the library raises whatever it meets, a bare Exception among it
        raise CheckpointError(f"the tokenizer in {path} cannot be read: {error}") from error


def read_checkpoint(path: str | os.PathLike[str], mmap: bool = False, verify: bool | None = None) -> dict[str, Any]:
    """A checkpoint of this project as plain containers and tensors on the CPU; runs no code from the file.

    Args:
        path: of the file, or the folder of a run.
        mmap: leave tensors on the disk until they are looked at, and out where they were written in parts: for a look
            at the configuration alone; that they are there is seen to.
        verify: compare the tensors with their checksums too; None: unless they are left on the disk.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is truncated, damaged or no checkpoint of this project, or its parts are.
    """
    path = checkpoint_file(path)
    if not path.is_file():
        beside = sorted(file.name for file in path.parent.glob("*.ckpt")) if path.parent.is_dir() else []
        come_along = f"; those that come along are called {', '.join(paths.trained())}"
        raise FileNotFoundError(
            f"no checkpoint at {path}" + (f"; there are {', '.join(beside)} beside it" if beside else come_along)
        )
    verify = not mmap if verify is None else verify
    try:
        if path.name == exported.WEIGHTS:
            checkpoint = exported.read(path)
        else:
            verify_archive(path, tensors=verify)
            checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except ConfigError:  # a library is missing
        raise
    except Damaged as error:
        raise CheckpointError(f"{path} is truncated or damaged, or no checkpoint: {error}") from error
    except Exception as error:  # whatever torch.load's readers meet: RuntimeError, EOFError, UnpicklingError, KeyError
        kind = type(error).__name__
        raise CheckpointError(f"{path} is truncated, or no checkpoint: PyTorch cannot read it ({kind})") from error
    wrong = list(_misshapen(checkpoint, SHAPE, ""))
    if not wrong and not {"state_dict", shards.FOLDER} & checkpoint.keys():
        wrong = ["state_dict is missing"]
    if wrong:
        kind = "an exported model" if path.name == exported.WEIGHTS else "a file of PyTorch"
        raise CheckpointError(f"{path} is {kind}, but no checkpoint of a run of this project: {few(wrong)}")
    if checkpoint.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is of format {checkpoint.get('format', 1)}, and this version reads format {FORMAT}: use the "
            "version of the project that has written it"
        )
    try:
        shards.check(checkpoint, path, verify=verify)
        return dict(checkpoint) if mmap else shards.whole(checkpoint, path, weights_alone=True)
    except shards.Broken as error:
        raise CheckpointError(str(error)) from error


def checkpoint_file(path: str | os.PathLike[str]) -> Path:
    """The file itself; of a folder that ``export.py`` wrote its weights; the last checkpoint of a run's folder, which
    need not be there yet; or where there is no such file or folder, the checkpoint of that name that comes with the
    package (``gsm.paths.trained``)."""
    path = Path(path)
    if path.suffix == ".ckpt" or path.is_file():
        return path
    there = exported.weights_in(path)
    if there and not (path / LAST).is_file():
        return there
    return path / LAST if path.exists() else paths.trained().get(str(path), path / LAST)


def _misshapen(value: Any, shape: Any, place: str) -> Iterator[str]:
    """What a checkpoint has otherwise than `SHAPE` says, in words."""
    kinds: Any = Mapping if isinstance(shape, dict) else list if isinstance(shape, list) else shape
    fits = isinstance(value, kinds) and (type(value) is not bool or kinds not in (int, NUMBER))
    if not fits:
        yield f"{place or 'its content'} is {value!r:.40}"
    if fits and isinstance(shape, list):
        for number, below in enumerate(cast(list, value)):
            yield from _misshapen(below, shape[0], f"{place}[{number}]")
    if fits and isinstance(shape, dict):
        entries = cast(Mapping, value)
        missing = [key for key in shape if key in NEEDED and key not in entries]
        yield from (f"{place}.{key} is missing".removeprefix(".") for key in missing)
        for key, below in entries.items():
            known = shape.get(key, shape.get(...))
            if known is not None:
                yield from _misshapen(below, known, f"{place}.{key}" if place else str(key))


def usable(device: str) -> str:
    """The device's name, once PyTorch has used it; ``auto``: a GPU if there is one. Raises ConfigError."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        if torch.device(device).type not in DEVICES:
            raise ConfigError(f"device is '{device}', where nothing of this was tried; say cpu, cuda or auto")
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).splitlines() or ["no reason given"])[0].rstrip(".")
        raise ConfigError(
            f"device is '{device}', but PyTorch cannot use it ({reason}); say cpu, cuda or auto"
        ) from error
    return device


def instantiate_model(config: Mapping[str, Any], seed: int | None = None) -> LanguageModel:
    """The model of a composed configuration. Raises ConfigError with the model's own words where it refuses."""
    if seed is None:
        return instantiate(config["model"], "model")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return instantiate(config["model"], "model")


def instantiate(node: Mapping[str, Any], place: str, **arguments: Any) -> Any:
    """What ``_target_`` makes; where its constructor refuses, a ConfigError with the constructor's own sentence."""
    with refusals(place):
        return hydra.utils.instantiate(node, **arguments)


def instantiate_data(node: Mapping[str, Any], tokenizer: Tokenizer | None) -> Any:
    """Data that are read with this tokenizer rather than their own, where they are text. Raises ConfigError."""
    if "tokenizer" not in node or tokenizer is None:
        return instantiate(node, "data")
    others = {key: value for key, value in node.items() if key not in ("tokenizer", "end_of_text")}
    return construct(instantiate({**others, "_partial_": True}, "data"), "data", tokenizer=tokenizer)


def construct(make: Callable[..., Any], place: str, **arguments: Any) -> Any:
    """What a part that was left partial makes of objects which no yaml holds; it refuses as in ``instantiate``."""
    try:
        with refusals(place):
            return make(**arguments)
    except TypeError as error:  # of the values that it was given before, or of their number
        raise ConfigError(f"{place}: {error}") from error


@contextlib.contextmanager
def refusals(place: str) -> Iterator[None]:
    """Turns what a part says against its values into a ConfigError that also names the place."""
    try:
        yield
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, ValueError | TypeError | OSError | ImportError | MisconfigurationException):
            raise ConfigError(f"{place}: {cause}") from error
        raise
    except (ValueError, OSError, ImportError, MisconfigurationException) as error:
        raise ConfigError(f"{place}: {error}") from error


def _weights(checkpoint: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The model's own, by their names in it."""
    saved = checkpoint["state_dict"].items()
    return {key.removeprefix("model."): value for key, value in saved if key.startswith("model.")}
