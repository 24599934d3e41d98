"""Files with other bytes than were written."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import torch
from stored import same

import gsm
from adversary import inside
from adversary.outcome import Case, Wrong
from adversary.world import World
from gsm.checkpoint import read_weights


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


def check_weights(model: torch.nn.Module, world: World) -> None:
    """Raise Wrong if a loaded model has other weights than the run's checkpoint."""
    for name, value in model.state_dict().items():
        if not torch.equal(value, world.saved["state_dict"][f"model.{name}"]):
            raise Wrong(f"{name} is not what the checkpoint holds")


def flipped(draw: random.Random, world: World) -> Case:
    """Damage the checkpoint of a run on the disk, then use it."""
    use = draw.choice(["load_model", "resume", "branch", "start_from"])
    name = draw.choice(sorted(path.name for path in world.last.iterdir()))
    how, content = mutate(draw, (world.last / name).read_bytes())

    def run(folder: Path) -> None:
        last = folder / "run/checkpoints" / world.last.name
        shutil.copytree(world.last, last)
        (last / name).write_bytes(content)
        if use == "load_model":
            check_weights(gsm.load_model(last), world)
        elif use == "start_from":
            inside.build(world.config("started", f"start_from={last}", f"folder={folder / 'new'}"))
            if not same(read_weights(last), world.saved["state_dict"]):
                raise Wrong("it started from other weights than were written")
        else:
            start = [f"start_from={last}", "start_fresh=false"] if use == "branch" else []
            resume = [*start, f"folder={folder / ('new' if start else 'run')}"]
            if not same(inside.resumed(world.config("resumed", *resume)), world.saved):
                raise Wrong("it goes on from another content than was written")

    return Case(run, f"{name}, {how}, {use}", (name, "checkpoints"), outside=(world.home / "cache",))
