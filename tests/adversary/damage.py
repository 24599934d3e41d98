"""Files with other bytes than were written; checkpoints with other entries."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import gsm
from adversary import inside
from adversary.outcome import Case, Wrong
from adversary.world import World


def mutate(draw: random.Random, content: bytes) -> tuple[str, bytes]:
    """Return the kind of a change, and the changed bytes."""
    kind = draw.choice(["bit", "bit", "bit", "cut", "zeros", "noise", "moved", "longer", "empty"])
    changed, size = bytearray(content), len(content)
    at, length = draw.randrange(size), draw.choice([1, 16, 512, 4096])
    if kind == "bit":
        changed[at] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del changed[at:]
    elif kind == "zeros":
        changed[at : at + length] = bytes(len(changed[at : at + length]))
    elif kind == "noise":
        changed[at : at + length] = draw.randbytes(len(changed[at : at + length]))
    elif kind == "moved":
        other = draw.randrange(size)
        changed[at : at + length] = content[other : other + len(changed[at : at + length])]
    elif kind == "longer":
        changed += draw.randbytes(length)
    else:
        changed.clear()
    return f"{kind} at {at} of {size}", bytes(changed)


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


def check_weights(model: torch.nn.Module, world: World) -> None:
    """Raise Wrong if a loaded model has other weights than the run's checkpoint."""
    for name, value in model.state_dict().items():
        if not torch.equal(value, world.saved["state_dict"][f"model.{name}"]):
            raise Wrong(f"{name} is not what the checkpoint holds")


def flipped(draw: random.Random, world: World) -> Case:
    """Damage the checkpoint of a run on the disk, then use it."""
    use = draw.choice(["load_model", "resume", "branch", "start_from"])
    how, content = mutate(draw, world.last.read_bytes())

    def run(folder: Path) -> None:
        last = folder / "run/checkpoints/last.ckpt"
        last.parent.mkdir(parents=True)
        last.write_bytes(content)
        if use == "load_model":
            check_weights(gsm.load_model(last), world)
        elif use == "start_from":
            inside.build(world.config("started", f"start_from={last}", f"folder={folder / 'new'}"))
            if not same(torch.load(last, weights_only=True)["state_dict"], world.saved["state_dict"]):
                raise Wrong("it started from other weights than were written")
        else:
            start = [f"start_from={last}", "start_fresh=false"] if use == "branch" else []
            resume = [*start, f"folder={folder / ('new' if start else 'run')}"]
            if not same(inside.resumed(world.config("resumed", *resume)), world.saved):
                raise Wrong("it goes on from another content than was written")

    return Case(run, f"last.ckpt, {how}, {use}", ("last.ckpt",), outside=(world.home / "cache",))


ODD: tuple[Any, ...] = (None, 3, -1, "text", [], {}, [1.5], True, float("nan"))
TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one longer": lambda value: torch.cat([value.flatten(), value.flatten()[:1]]),
    "a scalar": lambda value: value.flatten()[0].clone(),
    "turned": lambda value: value.mT.contiguous() if value.ndim > 1 and value.mT.shape != value.shape else value[None],
    "empty": lambda value: torch.empty(0),
    "half": lambda value: value.half(),
    "double": lambda value: value.double(),
    "int64": lambda value: value.long(),
    "complex": lambda value: value.to(torch.complex64),
    "nan": lambda value: torch.full_like(value, float("nan")) if value.is_floating_point() else value.half() / 0,
    "inf": lambda value: torch.full_like(value, float("inf")) if value.is_floating_point() else value.half() / 0,
    "sparse": lambda value: value.to_sparse() if value.ndim else value.bool(),
    "in another order in memory": lambda value: value.T.contiguous().T if value.ndim == 2 else value.clone(),
}
# A configuration may be another; counters and random states are Lightning's and PyTorch's.
UNTOUCHED = ("config", "pytorch-lightning_version", "loops", "callbacks", "random")


def entries(draw: random.Random, world: World) -> Case:
    """Change one to three entries of a checkpoint, at any depth; then the run goes on to its end."""
    checkpoint = copy.deepcopy(world.halfway)
    titles = [_change(draw, checkpoint) for _ in range(draw.choice([1, 1, 1, 2, 3]))]
    poisoned = any(word in title for title in titles for word in ("nan", "inf"))

    def run(folder: Path) -> None:
        config = world.config("half", f"folder={folder / 'run'}")
        world.put(checkpoint, folder)
        inside.train(config)
        ended = torch.load(folder / "run/checkpoints/last.ckpt", weights_only=True)["state_dict"]
        if poisoned:
            if not all(value.isfinite().all() for value in ended.values()):
                raise Wrong("it trained to its end with weights that are not finite")
        elif not same(ended, world.saved["state_dict"]):
            raise Wrong("it trained on without a word, to other weights")

    names = ("last.ckpt", "not finite", "model.", "the unfinished run in")
    return Case(run, "; ".join(titles), names, 60, (world.home / "cache",))


def _change(draw: random.Random, checkpoint: dict[str, Any]) -> str:
    """Change one entry in place; return its place and the change. Half of them are the optimiser's."""
    start = draw.choice(["", "state_dict", "optimizer_states", "optimizer_states"])
    path: list[str] = [start]
    holder: Any = checkpoint.get(start)
    if not isinstance(holder, dict | list) or not holder:
        path, holder = [], checkpoint
    while True:
        keys = range(len(holder)) if isinstance(holder, list) else [key for key in holder if key not in UNTOUCHED]
        if not keys:
            return f"{'.'.join(path)} unchanged"
        key = draw.choice(keys)
        path.append(str(key))
        below = holder[key]
        # Of lists only those of mappings: others are values, and are replaced as a whole.
        mappings = isinstance(below, list) and below and isinstance(below[0], dict)
        if not (mappings or isinstance(below, dict) and below) or draw.random() < 0.1:
            return f"{'.'.join(path)} {_replace(draw, holder, key)}"
        holder = below


def _replace(draw: random.Random, holder: Any, key: Any) -> str:
    value = holder[key]
    how = draw.choice(["gone", "odd", "one more", *(TENSORS if isinstance(value, torch.Tensor) else ())])
    if how == "gone":
        del holder[key]
    elif how == "one more" and isinstance(holder, dict):
        holder[f"{key}_too"] = copy.deepcopy(value)
    elif how in TENSORS:
        holder[key] = TENSORS[how](value)
    else:
        holder[key] = draw.choice(ODD)
        return f"is {holder[key]!r}"
    return how
