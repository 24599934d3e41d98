"""Class 2: files that are not what was written; class 4: entries of a checkpoint that are others."""

from __future__ import annotations

import copy
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import gsm
from adversary import inside
from adversary.outcome import Case, Wrong
from adversary.payloads import _same_weights
from adversary.world import World


def mutate(draw: random.Random, content: bytes) -> tuple[str, bytes]:
    """Other bytes than these, and how they differ."""
    kind = draw.choice(["bit", "bit", "bit", "byte", "cut", "zeros", "noise", "moved", "longer", "empty"])
    changed, size = bytearray(content), len(content)
    at, length = draw.randrange(size), draw.choice([1, 16, 512, 4096])
    if kind == "bit":
        changed[at] ^= 1 << draw.randrange(8)
    elif kind == "byte":
        changed[at] = draw.randrange(256)
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
    """Equality of nested containers with tensors, NaN being what it is."""
    if isinstance(one, torch.Tensor):
        if not isinstance(two, torch.Tensor) or one.dtype != two.dtype or one.shape != two.shape:
            return False
        return one.contiguous().numpy().tobytes() == two.contiguous().numpy().tobytes()
    if isinstance(one, dict):
        return isinstance(two, dict) and one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(two) and len(one) == len(two) and all(map(same, one, two))
    return type(one) is type(two) and (one == two or one != one and two != two)


def flipped(draw: random.Random, world: World) -> Case:
    """One file of a run or of its cache, damaged on the disk, then used."""
    return draw.choice([_checkpoint, _checkpoint, _cache, _cache, _parts])(draw, world)


def _checkpoint(draw: random.Random, world: World) -> Case:
    use = draw.choice(["load_model", "resume", "resume by path", "start_from"])
    how, content = mutate(draw, _content(world))

    def run(folder: Path) -> None:
        last = folder / "run/checkpoints/last.ckpt"
        last.parent.mkdir(parents=True)
        last.write_bytes(content)
        if use == "load_model":
            _same_weights(gsm.load_model(last), world.saved["state_dict"])
        elif use == "start_from":
            config = world.config("started", f"start_from={last}", f"folder={folder / 'new'}")
            inside.build(config)
            if not same(torch.load(last, weights_only=True)["state_dict"], world.saved["state_dict"]):
                raise Wrong("it started from other weights than were written")
        else:
            resume = [f"resume={last}", f"folder={folder / 'new'}"] if "path" in use else [f"folder={folder / 'run'}"]
            if not same(inside.resumed(world.config("resumed", *resume)), world.saved):
                raise Wrong("it goes on from another content than was written")

    return Case(run, f"last.ckpt, {how}, {use}", ("last.ckpt",), outside=(world.home / "cache",))


def _parts(draw: random.Random, world: World) -> Case:
    """A checkpoint in parts, of which one is damaged, missing, another's, or in another's place."""
    use = draw.choice(["load_model", "resume", "start_from"])
    how = draw.choice(["mutated", "mutated", "mutated", "exchanged", "missing", "all missing", "older"])
    files, state = draw.random() < 0.5, draw.getstate()

    def run(folder: Path) -> None:
        draw.setstate(state)
        last = folder / "run/checkpoints/last.ckpt"
        last.parent.mkdir(parents=True)
        inside.in_parts(world.saved, world.last, last, files)
        _harm_parts(draw, how, last, world)
        if use == "load_model":
            _same_weights(gsm.load_model(last), world.saved["state_dict"])
        elif use == "start_from":
            inside.build(world.config("started", f"start_from={last}", f"folder={folder / 'new'}"))
        else:
            inside.resumed(world.config("resumed", f"folder={folder / 'run'}"))
        if not same(inside.whole(last), world.saved):
            raise Wrong("it was taken for another content than was written")

    title = f"parts, {'a file each, ' if files else ''}{how}, {use}"
    return Case(run, title, ("last.ckpt", "shards"), outside=(world.home / "cache",))


def _harm_parts(draw: random.Random, how: str, last: Path, world: World) -> None:
    parts = sorted(path for path in last.parent.rglob("*") if path.is_file() and path != last)
    chosen = draw.choice([*parts, last] if how == "mutated" else parts)  # the last says where each tensor is
    if how == "mutated":
        chosen.write_bytes(mutate(draw, chosen.read_bytes())[1])
    elif how == "exchanged":
        one, two = draw.choice(parts), draw.choice(parts)
        content = one.read_bytes()
        one.write_bytes(two.read_bytes())
        two.write_bytes(content)
    elif how == "missing":
        chosen.unlink()
    elif how == "all missing":
        shutil.rmtree(chosen.parent)
    else:  # parts of another step below the same index
        other = last.parent.parent / "other/last.ckpt"
        other.parent.mkdir()
        changed = world.checkpoint()
        for value in changed["state_dict"].values():
            value.add_(1)
        inside.in_parts(changed, world.last, other, files=len(parts) > 1)
        place = other.parent / chosen.relative_to(last.parent)
        if place.is_file():
            chosen.write_bytes(place.read_bytes())


def _content(world: World) -> bytes:
    return world.last.read_bytes()


def _cache(draw: random.Random, world: World) -> Case:
    files = sorted(path for path in (world.home / "cache").rglob("*") if path.is_file() and path.stat().st_size)
    chosen = draw.choice(files)
    chosen = draw.choice([chosen, *(file for file in files if file.suffix == ".bin" or file.name == "index.json")])
    how, content = mutate(draw, chosen.read_bytes())
    kept = draw.random() < 0.5  # a disk that forgets a bit does not change the file's time

    def run(folder: Path) -> None:
        cache = world.own_cache(folder)
        damaged = cache / chosen.relative_to(world.home / "cache")
        times = damaged.stat()
        damaged.write_bytes(content)
        if kept:
            os.utime(damaged, ns=(times.st_atime_ns, times.st_mtime_ns))
        found = inside.ids(world.config("cached", f"data.cache_dir={cache}", f"folder={folder / 'run'}"))
        if not same(found, world.ids):
            raise Wrong("other tokens than the text has")

    title = f"cache {chosen.name}, {how}{', time of change kept' if kept else ''}, data"
    return Case(run, title, ("cache", chosen.name))


# Class 4.

ODD: tuple[Any, ...] = (None, 3, -1, "text", [], {}, [1.5], True, float("nan"))


def entries(draw: random.Random, world: World) -> Case:
    """One to three entries of the optimiser, or of the weights, are others; then the run goes on to its end."""
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

    return Case(
        run,
        "; ".join(titles),
        ("last.ckpt", "not finite", "model.", "the unfinished run in"),
        60,
        (world.home / "cache",),
    )


def _change(draw: random.Random, checkpoint: dict[str, Any]) -> str:
    """Changes one entry in place, and says which."""
    where = draw.choice(["weight", "moment", "moment", "moment", "state", "group", "whole", "anywhere", "anywhere"])
    if where == "anywhere":
        return _anywhere(draw, checkpoint)
    if where == "weight" and isinstance(checkpoint.get("state_dict"), dict) and checkpoint["state_dict"]:
        weights = checkpoint["state_dict"]
        name = draw.choice(sorted(weights))
        return _other(draw, weights, name, f"weight {name}")
    states = checkpoint.get("optimizer_states")
    if where == "whole" or not (isinstance(states, list) and states and isinstance(states[0], dict)):
        key = draw.choice(["optimizer_states", "state_dict", "lr_schedulers", "optimizer_entries"])
        return _replaced(draw, checkpoint, key, key)
    state, groups = states[0].get("state"), states[0].get("param_groups")
    if where == "group" and isinstance(groups, list) and groups and isinstance(groups[0], dict):
        group = draw.choice(groups)
        key = draw.choice(["params", "lr", "betas", "eps", "weight_decay"])
        how = draw.choice(["gone", "odd"])
        if how == "gone":
            group.pop(key, None)
        else:
            group[key] = draw.choice(ODD)
        return f"param_groups {key} {how} {group.get(key)!r}"
    if not isinstance(state, dict) or not state:
        return _replaced(draw, states[0], "state", "state")
    number = draw.choice(sorted(state, key=str))
    if where == "state" or not isinstance(state[number], dict) or not state[number]:
        if draw.random() < 0.3:
            extra = draw.choice([999, -1, "0", 1.5])
            state[extra] = copy.deepcopy(state[number])
            return f"state of one more parameter {extra!r}"
        return _replaced(draw, state, number, f"state {number}")
    key = draw.choice(sorted(state[number]))
    return _other(draw, state[number], key, f"moment {key} of {number}")


def _anywhere(draw: random.Random, checkpoint: dict[str, Any]) -> str:
    """Something is gone, or of another kind, at any depth; not in the configuration, which may be another."""
    place, holder = "", checkpoint
    while True:
        keys = [key for key in holder if key not in ("config", "pytorch-lightning_version")]
        if not keys:
            return f"{place} as it was"
        key = draw.choice(keys)
        place += f".{key}"
        if not isinstance(holder[key], dict) or not holder[key] or draw.random() < 0.3:
            return _replaced(draw, holder, key, place[1:])
        holder = holder[key]


def _replaced(draw: random.Random, holder: dict, key: Any, name: str) -> str:
    if draw.random() < 0.4:
        holder.pop(key, None)
        return f"{name} gone"
    holder[key] = draw.choice(ODD)
    return f"{name} is {holder[key]!r}"


def _other(draw: random.Random, holder: dict, key: Any, name: str) -> str:
    """Another tensor in its place, or none."""
    value = holder[key]
    if not isinstance(value, torch.Tensor):
        return _replaced(draw, holder, key, name)
    changes: dict[str, Callable[[], Any]] = {
        "one longer": lambda: torch.cat([value.flatten(), value.flatten()[:1]]),
        "a scalar": lambda: value.flatten()[0].clone(),
        "flat": lambda: value.flatten(),
        "one dimension more": lambda: value[None],
        "turned": lambda: value.T.contiguous() if value.T.shape != value.shape else value[None],
        "empty": lambda: torch.empty(0),
        "half": lambda: value.half(),
        "double": lambda: value.double(),
        "bfloat16": lambda: value.bfloat16(),
        "int64": lambda: value.long(),
        "bool": lambda: value.bool(),
        "complex": lambda: value.to(torch.complex64),
        "nan": lambda: torch.full_like(value, float("nan")) if value.is_floating_point() else value.half() / 0,
        "inf": lambda: torch.full_like(value, float("inf")) if value.is_floating_point() else value.half() / 0,
        "sparse": lambda: value.to_sparse() if value.ndim else value.bool(),
        "in another order in memory": lambda: value.T.contiguous().T if value.ndim == 2 else value.clone(),
        "missing": lambda: None,
        "odd": lambda: draw.choice(ODD),
        "one more": lambda: None,
    }
    how = draw.choice(list(changes))
    if how == "missing":
        del holder[key]
    elif how == "one more":
        holder[f"{key}_too"] = value.clone()
    else:
        holder[key] = changes[how]()
    return f"{name} {how}"
