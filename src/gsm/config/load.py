"""Models from a name, or from a checkpoint."""

from __future__ import annotations

import contextlib
import copy
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.errors import InstantiationException
from lightning.fabric.utilities.exceptions import MisconfigurationException

from gsm.checkpoint import CheckpointError
from gsm.config.check import ConfigError, check, few, flat
from gsm.config.compose import compose, parse
from gsm.config.stored import read_checkpoint
from gsm.config.trust import vetted
from gsm.data.tokenizer import Tokenizer
from gsm.models.base import LanguageModel
from gsm.models.checks import DEVICES

# Arguments of data that older checkpoints have and this version has not; those in CHANGING changed the data.
WITHDRAWN = {"on_corrupt", "longest_line", "digits", "increment", "num_workers", "prepare_workers"}
CHANGING = ("digits", "increment")


def build_model(
    name: str = "gsm",
    size: str = "nano",
    overrides: Iterable[str] = (),
    seed: int | None = None,
    directories: Sequence[Path] = (),
) -> LanguageModel:
    """Build a fresh model, as a training run does.

    Args:
        name: a variant of the group ``model``: ``"gsm"``, ``"baseline"``, ...
        size: a variant of the group ``size``: ``"nano"``, ``"tiny"``, ...
        overrides: as on the command line: ``["model/retriever=separate_indexer", "model.state_size=64"]``.
        seed: of the weights; None draws them from PyTorch's global generator. A seed leaves that generator alone.
        directories: folders of yaml files besides ``configs/``, for variants of one's own.

    Raises:
        ConfigError: an unknown name or key, or a value out of range.
    """
    # Any arm will do: its default would be derived from the overrides of a command.
    config = compose([f"model={name}", f"size={size}", "arm=model", *overrides], directories)
    return instantiate_model(config, seed)


def load_model(
    path: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    directories: Sequence[Path] = (),
    overrides: Iterable[str] = (),
) -> LanguageModel:
    """Return the trained model of a checkpoint, in evaluation mode. A stranger's file runs no code
    (``gsm.config.trust``).

    Args:
        path: the folder of a run, which stands for its last step; of one of its steps, ``checkpoints/step_...``; of an
            export; or the name of a model that comes with the package: ``"nano"``.
        device: where the weights go.
        directories: folders of yaml files besides ``configs/``, for a model with parts of one's own.
        overrides: other values of the model than the checkpoint's: ``["model.candidate_pool=false"]``.

    Raises:
        FileNotFoundError: there is no such folder.
        CheckpointError: it is truncated, damaged or no checkpoint of this project; it names a part that no yaml names;
            or its configuration does not fit this version of the code.
        ConfigError: an override of a key that the model does not have.
    """
    saved = read_checkpoint(path)
    model = model_of(saved, path, directories, overrides)
    load_sound_weights(model, saved, path)
    if saved.get("tokenizer"):
        model._read_tokenizer = partial(tokenizer_of, {"tokenizer": saved["tokenizer"]}, path)
    return model.to(device).eval()


def model_of(
    saved: Mapping[str, Any],
    path: str | os.PathLike[str],
    directories: Sequence[Path] = (),
    overrides: Iterable[str] = (),
) -> LanguageModel:
    """Build the model of a checkpoint, with fresh weights. Arguments and errors as of ``load_model``."""
    node = _changed(vetted_node(saved, "model", path, directories), list(overrides))
    try:
        check({"model": node}, {"model": node})
        with as_in_file():
            return instantiate_model({"model": node})
    except ConfigError as error:
        raise CheckpointError(
            f"the configuration in {path} no longer fits this version of the code: {error}"
        ) from error


def _changed(node: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the configuration of a model with other values. Raises ConfigError."""
    node = copy.deepcopy(node)
    for override in parse(overrides):
        *above, last = override.key_or_group.split(".")
        place: Any = node if above[:1] == ["model"] else None
        for key in above[1:]:
            place = place.get(key) if isinstance(place, dict) else None
        takes = isinstance(place, dict) and last in place and not last.startswith("_")
        if not takes or override.is_delete() or override.is_sweep_override():
            raise ConfigError(
                "overrides must set values that the checkpoint's model has, such as model."
                f"{next(key for key, value in node.items() if key[:1] != '_' and not isinstance(value, dict))}=, "
                f"got {override.input_line}"
            )
        place[last] = override.value()
    return node


@contextlib.contextmanager
def as_in_file() -> Iterator[None]:
    """Raise ConfigError where a part cannot be built from the values of a file."""
    try:
        yield
    except InstantiationException as error:
        raise ConfigError(f"its values fit no part: {error.__cause__!r:.200}") from error


def vetted_node(
    saved: Mapping[str, Any], part: str, path: str | os.PathLike[str], directories: Sequence[Path] = ()
) -> dict[str, Any]:
    """Return the configuration of the ``model`` or the ``data`` of a checkpoint, if it is harmless.

    Raises CheckpointError, a ConfigError, if it names a part that no yaml names.
    """
    try:
        return vetted(saved["hyper_parameters"]["config"].get(part), part, directories)
    except ConfigError as error:
        raise CheckpointError(f"the configuration in {path} is not trusted: {error}") from error


def misfits(model: LanguageModel, saved: Mapping[str, Any]) -> list[str]:
    """Return the parameters that a model and a checkpoint do not share, or that differ in shape."""
    weights, expected = _weights(saved), model.state_dict()
    return sorted(weights.keys() ^ expected.keys()) or [
        f"{name} {tuple(weights[name].shape)} for {tuple(parameter.shape)}"
        for name, parameter in expected.items()
        if weights[name].shape != parameter.shape
    ]


def not_finite(tensors: Mapping[str, Any]) -> list[str]:
    """Return the names of the tensors that hold infinities or NaN."""
    return [name for name, x in tensors.items() if x.is_floating_point() and not bool(x.isfinite().all())]


def load_sound_weights(model: LanguageModel, saved: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Load the weights of a checkpoint into a model. Raises CheckpointError if they do not fit or are not finite."""
    if wrong := misfits(model, saved):
        raise CheckpointError(f"the weights in {path} do not fit the model in its configuration: {few(wrong)}")
    if broken := not_finite(_weights(saved)):
        raise CheckpointError(f"the weights in {path} must be finite, got NaN or infinity in {few(broken)}")
    load_weights(model, saved)


def load_weights(model: LanguageModel, saved: Mapping[str, Any]) -> None:
    """Load the weights of a checkpoint that fits."""
    model.load_state_dict(_weights(saved))


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Return the tokenizer of a checkpoint. Raises as ``load_model`` does."""
    return tokenizer_of(read_checkpoint(path, weights=False), path)


def tokenizer_of(saved: Mapping[str, Any], path: str | os.PathLike[str]) -> Tokenizer:
    """Return the tokenizer in the content of a checkpoint. Raises CheckpointError if there is none."""
    state = saved.get("tokenizer")
    if not state:
        raise CheckpointError(f"{path} holds no tokenizer, so its model cannot read or write text")
    if state.get("kind") != "bytes" and not state.get("json"):
        raise CheckpointError(f"{path} holds a model without its tokenizer.json: save the tokenizer beside the weights")
    try:
        return Tokenizer.from_state(state)
    except Exception as error:  # the library raises whatever it meets, a bare Exception among it
        raise CheckpointError(f"the tokenizer in {path} cannot be read: {error}") from error


def usable(device: str) -> str:
    """Return the name of a device that PyTorch can use; ``auto`` is a GPU if there is one. Raises ConfigError."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        if torch.device(device).type not in DEVICES:
            raise ConfigError(f"device must be cpu, cuda or auto, got {device}")
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).splitlines() or ["no reason given"])[0].rstrip(".")
        raise ConfigError(f"device must be cpu, cuda or auto, and usable by PyTorch, got {device}: {reason}") from error
    return device


def instantiate_model(config: Mapping[str, Any], seed: int | None = None) -> LanguageModel:
    """Build the model of a composed configuration. Raises ConfigError for a value out of range, and for a model that
    does not fit into memory.

    Args:
        config: its ``model``, and its ``size`` for the names of keys in errors.
        seed: as in ``build_model``.
    """
    values = {name: config[name] for name in ("size", "model") if name in config}  # most numbers are the size's
    try:
        with refusals("model", values), torch.random.fork_rng(enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            return hydra.utils.instantiate(config["model"])
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, NotImplementedError) or not isinstance(cause, RuntimeError | OverflowError | MemoryError):
            raise
        reason = str(cause).partition("\n")[0].rstrip(".")
        raise ConfigError(f"model is too large for this machine: {reason}; use a smaller size=") from error


def sketch(config: Mapping[str, Any]) -> None:
    """Build the model without memory for its weights, to check its values before a run. Raises ConfigError."""
    unknown = InstantiationException, NotImplementedError  # from a user's part that computes with its weights
    with torch.device("meta"), contextlib.suppress(*unknown):
        instantiate_model(config)


def instantiate(node: Mapping[str, Any], place: str, **arguments: Any) -> Any:
    """Build the object that ``_target_`` names. Raises ConfigError with the message of the constructor's error."""
    with refusals(place, {place: node}):
        return hydra.utils.instantiate(node, **arguments)


def instantiate_data(node: Mapping[str, Any], tokenizer: Tokenizer | None) -> Any:
    """Build a data module. Raises ConfigError.

    Args:
        node: its configuration.
        tokenizer: reads text in place of the one in ``node``; None: that one does.
    """
    older = WITHDRAWN if node["_target_"].startswith("gsm.") else set()  # a user's data may have such arguments
    for key in CHANGING:
        if key in older and node.get(key) is not None:
            raise ConfigError(
                f"data.{key} must be left out, as RULER's template has this number now, got {node[key]}; commit "
                "6d55fff reads this checkpoint"
            )
    node = {key: value for key, value in node.items() if key not in older}
    if "tokenizer" not in node or tokenizer is None:
        return instantiate(node, "data")
    values = {key: value for key, value in node.items() if key not in ("tokenizer", "end_of_text")}
    return construct(instantiate({**values, "_partial_": True}, "data"), "data", tokenizer=tokenizer)


def construct(make: Callable[..., Any], place: str, **arguments: Any) -> Any:
    """Complete a partial part with arguments that no yaml can hold, such as callbacks. Raises as ``instantiate``."""
    try:
        with refusals(place):
            return make(**arguments)
    except TypeError as error:  # from a value of the yaml, or from their number
        raise ConfigError(f"{place}: {error}") from error


@contextlib.contextmanager
def refusals(place: str, values: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Turn the error of a constructor into a ConfigError with the full path of the key, or else with the place.

    Args:
        place: the part of the configuration that is built.
        values: the configuration, below the places that a path begins with.
    """
    try:
        yield
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, ValueError | TypeError | OSError | ImportError | MisconfigurationException):
            raise ConfigError(_with_path(str(cause), place, values or {})) from error
        raise
    except (ValueError, OSError, ImportError, MisconfigurationException) as error:
        raise ConfigError(_with_path(str(error), place, values or {})) from error


def _with_path(sentence: str, place: str, values: Mapping[str, Any]) -> str:
    """Return a constructor's `key must be ..., got value` with the path of the first such key and value."""
    named = re.match(r"(\w+) must .*, got (.+?)(?:;|$)", sentence)
    for path, value in flat(values).items() if named else ():
        if named and path.rpartition(".")[2] == named[1] and str(value) == named[2]:
            return path + sentence.removeprefix(named[1])
    return f"{place}: {sentence}"


def _weights(saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights of the model, by their names in it."""
    weights = saved["state_dict"].items()
    return {key.removeprefix("model."): value for key, value in weights if key.startswith("model.")}
