"""Checkpoints that a test writes from plain containers and tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gsm import checkpoint


def store(run: Path, **content: Any) -> Path:
    """Write a step into the folder of a run, and return the step's folder.

    Args:
        run: the folder.
        content: as Lightning has it, or as `checkpoint.read` returns it; a step of no model where it lacks something.
    """
    facts: dict[str, Any] = {"global_step": 1, "state_dict": {}, "hyper_parameters": {"config": {"model": {}}}}
    content = facts | content
    for optimizer in content.get("optimizer_states", ()):  # by names, as read
        optimizer["param_groups"] = [{**group, "params": group["param_names"]} for group in optimizer["param_groups"]]
    folder = checkpoint.step_folder(run / "checkpoints", content["global_step"])
    checkpoint.write(folder, content)
    return folder


def store_model(folder: Path, **content: Any) -> Path:
    """Write a model alone into a folder, and return it."""
    weights, _, rest = checkpoint.split({"global_step": 1, **content, "optimizer_states": []})
    checkpoint.prepare(folder)
    checkpoint.write_tensors(folder / checkpoint.WEIGHTS, weights)
    checkpoint.model_files(rest, folder)
    return folder


def same(one: Any, two: Any) -> bool:
    """Whether nested containers with tensors are equal, NaN to NaN."""
    if isinstance(one, torch.Tensor):
        if not isinstance(two, torch.Tensor) or one.dtype != two.dtype or one.shape != two.shape:
            return False
        return one.contiguous().numpy().tobytes() == two.contiguous().numpy().tobytes()
    if isinstance(one, dict):
        return isinstance(two, dict) and one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(two) and len(one) == len(two) and all(map(same, one, two))
    return type(one) is type(two) and (one == two or one != one and two != two)
