"""Compare a checkpoint's weights and optimiser state with a model, entry by entry, before training goes on from it.

PyTorch loads any optimiser state without a check. A moment of another shape crashes the fused step. A moment in half
precision, or a missing moment, trains on without a word. So names, shapes and dtypes are compared with the model before
anything is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gsm.config.check import few
from gsm.config.load import CheckpointError, not_finite, read_checkpoint
from gsm.training.distributed import shards
from gsm.training.module import LanguageModeling
from gsm.training.resume import ENTRIES, STATE

COUNT = ((), torch.float32)  # shape and dtype of an optimiser's count of steps
HALVES = {"bf16-true": torch.bfloat16, "16-true": torch.float16}  # dtype of all parameters with this precision


def refuse_other_state(path: Path, task: LanguageModeling, precision: str | None, remedy: str) -> None:
    """Compare names, shapes and dtypes in a checkpoint with those of a model and of its optimiser's parameters.

    Args:
        path: path of the checkpoint; its tensors stay on the disk.
        task: module with the model, before it is divided, or converted to the trainer's precision.
        precision: the trainer's precision, as it was chosen.
        remedy: the values to use instead, for the error.

    Raises CheckpointError, which names the entries that do not fit.
    """
    checkpoint, model = read_checkpoint(path, mmap=True), task.model
    optimizer = task.optimizer.build(model.parameter_groups())
    names = {id(parameter): f"model.{name}" for name, parameter in model.named_parameters()}
    trained = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    ordered, tensors = trained, {}
    try:
        if shards.FOLDER in checkpoint:  # each rank reads its own share of the parts, by the names in the checkpoint
            ordered, kinds = checkpoint[shards.FOLDER].get("names", trained), shards.kinds(checkpoint, path)
        else:
            tensors = shards.take_apart(checkpoint, trained)[0]
            kinds = _described(tensors)
        if len(ordered) != len(trained):
            raise LookupError(f"it is of {len(ordered)} parameters, and this model trains {len(trained)}")
    except (shards.DamagedParts, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} holds no state of this model's optimiser: {error!r}") from error
    half, state = HALVES.get(precision or ""), model.state_dict().items()
    wanted = {
        f"{shards.WEIGHTS}model.{name}": (tuple(x.shape), half if half and x.is_floating_point() else x.dtype)
        for name, x in state
    }
    try:
        wrong = [*_wrong_tensors(kinds, wanted | _moments(checkpoint, wanted, ordered))]
        wrong += [
            f"{part} is missing" for part in ("loops", "callbacks", "lr_schedulers", STATE) if not checkpoint.get(part)
        ]
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{path} does not say where its training stood: {error!r}") from error
    if not wrong:
        wrong = [f"{name} is not finite" for name in not_finite(tensors)]
    if wrong:
        raise CheckpointError(f"training cannot go on from {path} because {few(wrong)}. Use {remedy}.")


def _described(tensors: Mapping[str, Tensor]) -> shards.Described:
    """Return shape and dtype of every tensor."""
    return {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}


def _moments(checkpoint: Mapping[str, Any], weights: shards.Described, ordered: list[str]) -> shards.Described:
    """Return shape and dtype of the optimiser's state: of the entries that the checkpoint lists for each parameter.

    A count of steps is one number in float32; any other entry is like its parameter.
    """
    (entries,) = checkpoint[ENTRIES]
    return {
        f"{shards.OPTIMIZER}{ordered[number]}/{entry}": (
            COUNT if entry == "step" else weights[f"{shards.WEIGHTS}{ordered[number]}"]
        )
        for number, names in entries.items()
        for entry in names
    }


def _wrong_tensors(stored: shards.Described, needed: shards.Described) -> Iterator[str]:
    """Name the tensors that are missing, unknown, or of another shape or dtype."""
    for key in sorted(stored.keys() | needed.keys()):
        weighs = key.startswith(shards.WEIGHTS)
        name, _, entry = key.removeprefix(shards.OPTIMIZER).rpartition("/")
        name = key.removeprefix(shards.WEIGHTS) if weighs else f"the optimiser's {entry} of {name}"
        if key not in needed:
            if not weighs or name.startswith("model."):
                yield f"{name} is {'no parameter of this model' if weighs else 'not what it keeps'}"
        elif key not in stored:
            yield f"{name} is missing"
        elif stored[key] != needed[key]:
            yield f"{name} is {_kind(*stored[key])}, but has to be {_kind(*needed[key])}"


def _kind(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
