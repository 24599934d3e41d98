"""Autotuning: choose the fastest of a few tile sizes for a kernel, once per GPU, and store the choice on disk.

The first candidate is the default. Triton's interpreter uses it, and so do calls with fewer programs than the GPU has
multiprocessors. The first larger call of each kind times all candidates that can be built, and stores the choice in
Triton's cache folder. All later calls and processes read it, so that they compute the same bits. If several processes
time at once, the first to finish decides for all.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .device import triton_version
from .launch import building, device_of, launch, missing

PROCESSORS = 132  # multiprocessors of an H100
GAIN = 0.97  # another tile is chosen if its time is below this share of the first candidate's
ROUNDS = 7  # timed runs of a candidate
PAUSE = 1_000_000  # cycles that the GPU waits before a run, about 0.5 ms, so that the launch is not timed
Tile = tuple[tuple[str, int], ...]  # names and values of launch options: block sizes, num_warps, num_stages


def launch_fastest(
    name: str,
    kernel: Any,
    grid: Callable[[dict[str, int]], tuple[int, ...]],
    args: tuple,
    tiles: tuple[Tile, ...],
    **options: Any,
) -> None:
    """Launch a kernel with the fastest of its tiles.

    Args:
        name: name of the kernel in stored choices.
        kernel: the `@triton.jit` function.
        grid: takes the options of a tile; returns the grid.
        args: the arguments; the first is a tensor.
        tiles: the candidates, the default first. They must give the same results.
        options: launch options that all tiles share.
    """
    first = grid(dict(tiles[0]))

    def run(tile: Tile) -> None:
        launch(kernel, first if tile is tiles[0] else grid(dict(tile)), *args, **options, **dict(tile))

    run(fastest(name, tiles, run, args[0], math.prod(first), *options.values()))


def fastest(
    kernel: str, tiles: tuple[Tile, ...], run: Callable[[Tile], None], like: Tensor, programs: int, *sizes: Hashable
) -> Tile:
    """Return the tile for a call; time the candidates if no choice is stored yet.

    Args:
        kernel: name of the kernel.
        tiles: the candidates, the default first.
        run: launches the kernel with a tile.
        like: a tensor on the device of the call, with its dtype.
        programs: number of programs with the default tile.
        sizes: constants of the kernel; each combination has its own choice.
    """
    if not like.is_cuda or programs < PROCESSORS or len(tiles) == 1:
        return tiles[0]
    key = kernel, like.device, like.dtype, sizes, tiles
    if key not in _choices:
        gpu = torch.cuda.get_device_name(like.device)
        call = f"{kernel} on {gpu}, Triton {triton_version()}, {like.dtype}, {sizes}, {tiles}"
        path = folder() / hashlib.sha256(call.encode()).hexdigest()[:16]
        place = _place(path, len(tiles))
        if place is None:
            with device_of((like,)):
                if building() or torch.cuda.is_current_stream_capturing():
                    return tiles[0]  # nothing can be timed now; a later call does it
                place = _time(path, call, [partial(run, tile) for tile in tiles])
        _choices[key] = tiles[place]
    return _choices[key]


def folder() -> Path:
    """Return the folder of stored choices. Each is a file with the index of the tile and a description."""
    from triton import knobs

    return Path(knobs.cache.dir) / "gsm_tiles"


def describe() -> list[str]:
    """Return a description of each choice stored on this machine, or the reason why there is none."""
    if missing() is not None or not torch.cuda.is_available():
        return ["every kernel takes its first tile: tiles are timed only on a GPU that runs the Triton kernels"]
    sentences = sorted(filter(None, (_read(path).partition(" ")[2] for path in folder().glob("*"))))
    return sentences or ["none is timed yet: the first large call of a kernel times its candidates"]


def milliseconds(run: Callable[[], None]) -> float:
    """Return the median time of a launch after a warm-up, in milliseconds; infinity if the kernel cannot be built."""
    try:
        run()
    except Exception:  # the tile may exceed the GPU's resources; if all tiles fail, the chosen one raises the error
        return math.inf
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(ROUNDS)]
    for start, end in events:
        torch.cuda._sleep(PAUSE)
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def _time(path: Path, call: str, runs: list[Callable[[], None]]) -> int:
    """Return the index of the fastest run and write it to the file. If another process wrote it first, return that."""
    times = [milliseconds(run) for run in runs]
    best = times.index(min(times))
    place = best if times[best] < GAIN * times[0] else 0
    sentence = f"{call}: number {place + 1} is taken, after {', '.join(f'{time:.3f}' for time in times)} ms"
    with contextlib.suppress(OSError):  # the file exists already, or the folder is not writable
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:
            file.write(f"{place} {sentence}")
            file.flush()
            os.chmod(file.name, 0o644)  # other users share the folder
            os.link(file.name, path)
    first = _place(path, len(runs))
    return place if first is None else first


def _place(path: Path, count: int) -> int | None:
    """Return the index stored in a file, or None if it stores none below `count`."""
    word = _read(path).partition(" ")[0]
    return int(word) if word.isdecimal() and int(word) < count else None


def _read(path: Path) -> str:
    """Return the text of a file, or "" if it is missing or unreadable."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text()
    return ""


_choices: dict[Hashable, Tile] = {}
