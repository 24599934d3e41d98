"""Runs that are killed at a random moment, and the same command after it: as if nothing had been."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from short_runs import lines

from adversary import inside
from adversary.damage import same
from adversary.outcome import FAILED, RIGHT, Result
from adversary.world import World


def runs(world: World, count: int, seed: int) -> Iterator[Result]:
    """So many single runs, each killed once or twice, and then let go on."""
    if not count:
        return
    begun = time.monotonic()
    world.finish(world.config("timed"))
    whole = time.monotonic() - begun
    for number in range(seed, seed + count):
        draw, begun = random.Random(f"kills {number}"), time.monotonic()
        config, moments = (
            world.config(f"killed{number}"),
            [draw.uniform(0, whole) for _ in range(draw.choice([1, 1, 2]))],
        )
        said = ""
        try:
            for moment in moments:
                _killed(world, config, moment)
            world.finish(config)
            said = _differs(Path(config["folder"]), world.run)
        except RuntimeError as error:
            said = f"it did not go on: {str(error).splitlines()[-1]}"
        title = "killed after " + " and ".join(f"{moment:.2f}" for moment in moments) + f" of {whole:.2f} seconds"
        yield Result("kills", number, title, FAILED if said else RIGHT, said, time.monotonic() - begun)


def _killed(world: World, config: dict, moment: float) -> None:
    child = os.fork()
    if not child:
        try:
            with (world.home / "killed.log").open("w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            torch.set_num_threads(1)
            inside.train(config)
        finally:
            os._exit(0)
    time.sleep(moment)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _differs(folder: Path, other: Path) -> str:
    """What is not as in a run that nothing happened to; empty if nothing is."""
    for name in ("last", "best"):
        one, two = (torch.load(f / f"checkpoints/{name}.ckpt", weights_only=True) for f in (folder, other))
        for part in ("state_dict", "optimizer_states", "global_step"):
            if not same(one[part], two[part]):
                return f"{name}.ckpt has another {part}"
    if lines(folder) != lines(other):
        missing = sorted(set(lines(other)) - set(lines(folder)))
        return f"the curve differs: {len(missing)} lines are missing, such as {missing[:1]}"
    left = inside.left(folder)
    return f"it left {left[0]}" if left else ""
