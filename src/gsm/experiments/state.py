"""Whether what a checkpoint holds of the weights and of the optimiser can be taken up by this model, entry by entry.

PyTorch takes an optimiser's state as it finds it: a moment of another shape crashes the fused step, one in half
precision or a missing one trains on without a word. So names, shapes and dtypes are compared before anything is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn

from gsm.config.check import few
from gsm.config.load import CheckpointError, not_finite, read_checkpoint
from gsm.models.base import LanguageModel
from gsm.training.distributed import shards
from gsm.training.module import LanguageModeling
from gsm.training.optimizer import AdamW
from gsm.training.resume import ENTRIES, STATE, random_states, restore_random_states

HALVES = {"bf16-true": torch.bfloat16, "16-true": torch.float16}  # what all parameters are with such a precision
Described = dict[str, tuple[tuple[int, ...], torch.dtype]]


def refuse_other_state(path: Path, task: LanguageModeling, trainer: lightning.Trainer, precision: str | None) -> None:
    """Compares names, shapes and dtypes in a checkpoint with those of a model and of its optimiser's parameters.

    Args:
        path: of the checkpoint; its tensors stay on the disk.
        task: with the model, before it is divided, or converted to the trainer's precision.
        trainer: that is to go on.
        precision: the trainer's, as it was chosen.

    Raises CheckpointError, which names what does not fit.
    """
    checkpoint, model, settings = read_checkpoint(path, mmap=True), task.model, task.optimizer
    half = HALVES.get(precision or "")
    known = {f"model.{name}": value for name, value in model.state_dict().items()}
    names = {id(parameter): f"model.{name}" for name, parameter in model.named_parameters()}
    optimizer = settings.build(model.parameter_groups())
    groups = optimizer.param_groups
    own = [names[id(parameter)] for group in groups for parameter in group["params"]]
    ordered = checkpoint.get(shards.FOLDER, {}).get("names", own)  # parts go by the names that they were given
    called = dict(zip(own, ordered, strict=False))
    kept = {called.get(name, name): entries for name, entries in _kept(model, settings).items()}
    try:
        found = _described(checkpoint, path, ordered)
    except (shards.Broken, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} holds no state of this model's optimiser: {error!r}") from error
    try:
        wrong = [*_wrong_weights(found, known, half), *_wrong_moments(found, known, half)]
        wrong += [
            *_wrong_entries(checkpoint, found, ordered, kept),
            *_wrong_settings(checkpoint, optimizer),
        ]
        wrong += _wrong_places(checkpoint, trainer)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{path} does not say where its training stood: {error!r}") from error
    if not wrong and shards.FOLDER not in checkpoint:  # of parts, each rank reads its share alone
        tensors, _ = shards.take_apart(checkpoint, ordered)
        wrong = [f"{name} is not finite" for name in not_finite(tensors)]
    if wrong:
        raise CheckpointError(
            f"{path} cannot be gone on from: {few(wrong)}; resume=PATH goes on from another checkpoint, resume=never "
            "starts over"
        )


def _described(checkpoint: Mapping[str, Any], path: Path, ordered: list[str]) -> Described:
    """Shape and dtype of every tensor, under the names of a checkpoint's parts (`gsm.training.distributed.shards`)."""
    if shards.FOLDER in checkpoint:
        kinds = shards.Reader(shards.folder_of(checkpoint, path)).kinds()
        return {name: (tuple(kind.size), kind.properties.dtype) for name, kind in kinds.items()}
    tensors, _ = shards.take_apart(checkpoint, ordered)
    other = [name for name, value in tensors.items() if value.layout is not torch.strided]
    if other:
        raise TypeError(f"{few(other)} is sparse")
    return {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}


def _wrong_weights(found: Described, known: Mapping[str, Tensor], half: torch.dtype | None) -> Iterator[str]:
    saved = {name.removeprefix(shards.WEIGHTS): kind for name, kind in found.items() if name.startswith(shards.WEIGHTS)}
    for name in sorted(known.keys() | {name for name in saved if name.startswith("model.")}):
        if name not in saved or name not in known:
            yield f"{name} is {'missing' if name in known else 'no parameter of this model'}"
        else:
            yield from _other(name, saved[name], tuple(known[name].shape), _dtype(known[name], half))


def _wrong_moments(found: Described, known: Mapping[str, Tensor], half: torch.dtype | None) -> Iterator[str]:
    for key, kind in found.items():
        if key.startswith(shards.OPTIMIZER):
            name, _, entry = key.removeprefix(shards.OPTIMIZER).rpartition("/")
            counts = entry == "step"
            shape, dtype = ((), torch.float32) if counts else (tuple(known[name].shape), _dtype(known[name], half))
            yield from _other(f"the optimiser's {entry} of {name}", kind, shape, dtype)


def _wrong_settings(checkpoint: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """What the optimiser and its schedule are set to, which is what the configuration says, and where they stand."""
    step = checkpoint["global_step"]
    (state,), schedules = checkpoint["optimizer_states"], checkpoint["lr_schedulers"]
    here = optimizer.state_dict()["param_groups"]
    if len(checkpoint.get(ENTRIES, [state])) != 1:
        yield f"{ENTRIES} is of {len(checkpoint[ENTRIES])} optimisers"
    if len(state["param_groups"]) != len(here):
        yield f"the optimiser has {len(state['param_groups'])} groups of parameters, but has to have {len(here)}"
    for saved, own in zip(state["param_groups"], here, strict=False):
        if type(saved.get("lr")) is not float or not math.isfinite(saved["lr"]):
            yield f"the optimiser's lr of {own.get('name')} is {saved.get('lr')!r:.40}, but has to be a number"
        for key in sorted(own.keys() - {"lr", "initial_lr"}):
            if saved.get(key) != own[key] and not (isinstance(own[key], tuple) and list(own[key]) == saved.get(key)):
                there, wanted = f"{saved.get(key)!r:.40}", f"{own[key]!r:.40}"
                yield f"the optimiser's {key} of {own.get('name')} is {there}, but has to be {wanted}"
    (schedule,) = schedules
    if schedule["base_lrs"] != [group["lr"] for group in here]:
        yield f"the schedule's base_lrs is {schedule['base_lrs']!r:.60}"
    if schedule["last_epoch"] != step:
        yield f"the schedule stands at {schedule['last_epoch']!r:.20}, but the run at step {step!r:.20}"
    for part, kind in (("loops", Mapping), ("callbacks", Mapping)):
        if not isinstance(checkpoint[part], kind) or not checkpoint[part]:
            yield f"{part} is missing"


def _kept(model: LanguageModel, settings: AdamW) -> dict[str, set[str]]:
    """The names of what the optimiser keeps for each parameter that it trains: found in a step of small ones."""
    names = {id(parameter): f"model.{name}" for name, parameter in model.named_parameters()}
    small: dict[Tensor, str] = {}

    def like(parameter: nn.Parameter) -> nn.Parameter:
        made = nn.Parameter(torch.zeros([1] * parameter.ndim), requires_grad=parameter.requires_grad)
        made.grad = torch.zeros_like(made)
        small[made] = names[id(parameter)]
        return made

    groups = {name: [like(parameter) for parameter in group] for name, group in model.parameter_groups().items()}
    optimizer = settings.build(groups)
    optimizer.step()
    return {small[made]: set(state) for made, state in optimizer.state.items()}


def _wrong_entries(
    checkpoint: Mapping[str, Any], found: Described, ordered: list[str], kept: Mapping[str, set[str]]
) -> Iterator[str]:
    """Entries of the optimiser that are missing, or that it does not have.

    It has none for a parameter that never had a gradient. Which those are the checkpoint says (an older one does not).
    """
    there: dict[str, set[str]] = {name: set() for name in ordered}
    for key in found:
        if key.startswith(shards.OPTIMIZER):
            name, _, entry = key.removeprefix(shards.OPTIMIZER).rpartition("/")
            there.setdefault(name, set()).add(entry)
    told = checkpoint.get(ENTRIES)
    without = {name for number, name in enumerate(ordered) if told and not told[0].get(number)}
    for name in sorted(there.keys() | kept.keys()):
        has, wanted = there.get(name, set()), kept.get(name, set())
        if not has and (name in without or checkpoint["global_step"] == 0):
            continue
        yield from (f"the optimiser's {entry} of {name} is missing" for entry in sorted(wanted - has))
        yield from (f"the optimiser's {entry} of {name} is not what it keeps" for entry in sorted(has - wanted))


def _wrong_places(checkpoint: Mapping[str, Any], trainer: lightning.Trainer) -> Iterator[str]:
    """What the trainer, its callbacks and the generators of random numbers could not take up."""
    yield from _unlike(trainer.fit_loop.state_dict(), checkpoint["loops"]["fit_loop"], "loops.fit_loop")
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if callback.state_key in checkpoint["callbacks"]:
            yield from _unlike(callback.state_dict(), checkpoint["callbacks"][callback.state_key], "callbacks")
    states = checkpoint.get(STATE, {}).get("random")
    if states is not None:
        cpu, here = torch.device("cpu"), random_states(torch.device("cpu"))
        try:
            restore_random_states(states, cpu)
        except Exception as error:  # whatever PyTorch, Python and numpy say to it
            yield f"{STATE}.random cannot be taken up ({error!r:.80})"
        finally:
            restore_random_states(here, cpu)


def _unlike(own: Any, saved: Any, place: str) -> Iterator[str]:
    """Where numbers or mappings of one's own stand for something else in what was saved, or for nothing."""
    if isinstance(own, Mapping):
        if not isinstance(saved, Mapping):
            yield f"{place} is {saved!r:.40}"
            return
        for key, value in own.items():
            if key in saved:
                yield from _unlike(value, saved[key], f"{place}.{key}")
            else:
                yield f"{place}.{key} is missing"
    elif isinstance(own, bool | int | float) and not isinstance(saved, bool | int | float):
        yield f"{place} is {saved!r:.40}, but has to be a number"


def _other(name: str, kind: tuple[Any, torch.dtype], shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[str]:
    if kind != (shape, dtype):
        yield f"{name} is {_shown(*kind)}, but has to be {_shown(shape, dtype)}"


def _dtype(value: Tensor, half: torch.dtype | None) -> torch.dtype:
    return half if half is not None and value.is_floating_point() else value.dtype


def _shown(shape: Any, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
