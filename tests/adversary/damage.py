"""Files with other bytes than were written."""

from __future__ import annotations

import random
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
