"""The tile of a kernel: on a GPU, the fastest of a few candidates, timed once and kept on disk.

The first candidate follows from arithmetic. It is taken without a GPU, in Triton's interpreter, and by calls with fewer
programs than a GPU has multiprocessors. The first larger call of each kind times all candidates that can be built, and
keeps the choice in Triton's cache folder. All later calls and processes take it, so that they compute the same bits. If
several processes time at once, the first to finish decides for all.
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
GAIN = 0.97  # largest share of the first candidate's time that is worth another tile
ROUNDS = 7  # timed runs of a candidate
PAUSE = 1_000_000  # cycles of the GPU before a run, about half a millisecond: the host must not be timed
Tile = tuple[tuple[str, int], ...]  # options of a launch by name: sizes, and warps and stages


def launch_fastest(
    name: str,
    kernel: Any,
    grid: Callable[[dict[str, int]], tuple[int, ...]],
    args: tuple,
    tiles: tuple[Tile, ...],
    **options: Any,
) -> None:
    """Launch a kernel with the fastest of its tiles. The grid depends on the tile, the results do not."""
    first = grid(dict(tiles[0]))

    def run(tile: Tile) -> None:
        launch(kernel, first if tile is tiles[0] else grid(dict(tile)), *args, **options, **dict(tile))

    run(fastest(name, tiles, run, args[0], math.prod(first), *options.values()))


def fastest(
    kernel: str, tiles: tuple[Tile, ...], run: Callable[[Tile], None], like: Tensor, programs: int, *sizes: Hashable
) -> Tile:
    """Return the tile for a call of `programs` programs on the device of `like`; `sizes` are the kernel's constants."""
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
                    return tiles[0]  # nothing may run now; a later call times
                place = _time(path, call, [partial(run, tile) for tile in tiles])
        _choices[key] = tiles[place]
    return _choices[key]


def folder() -> Path:
    """Return the folder of the choices: a file each, with the tile's place and a sentence."""
    from triton import knobs

    return Path(knobs.cache.dir) / "gsm_tiles"


def describe() -> list[str]:
    """Return a sentence for each choice that this machine keeps, or the reason why it keeps none."""
    if missing() is not None or not torch.cuda.is_available():
        return ["every kernel takes its first tile, because tiles are timed where Triton's kernels run on a GPU"]
    sentences = sorted(filter(None, (_read(path).partition(" ")[2] for path in folder().glob("*"))))
    return sentences or ["none is timed yet: the first large call of a kernel times its candidates"]


def milliseconds(run: Callable[[], None]) -> float:
    """Return the median time of a launch, after one that is not timed; infinity if its kernel cannot be built."""
    try:
        run()
    except Exception:  # Triton's own, for a tile that needs more than the GPU has; the launch of the choice raises it
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
    """Return the place of the fastest run, and write it to the file; where another process was first, its place."""
    times = [milliseconds(run) for run in runs]
    best = times.index(min(times))
    place = best if times[best] < GAIN * times[0] else 0
    sentence = f"{call}: number {place + 1} is taken, after {', '.join(f'{time:.3f}' for time in times)} ms"
    with contextlib.suppress(OSError):  # there is a file, or none can be written: then the next process times again
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:
            file.write(f"{place} {sentence}")
            file.flush()
            os.chmod(file.name, 0o644)  # other users share the folder
            os.link(file.name, path)
    first = _place(path, len(runs))
    return place if first is None else first


def _place(path: Path, count: int) -> int | None:
    """Return the place that a file names, of `count` tiles; None if it names none."""
    word = _read(path).partition(" ")[0]
    return int(word) if word.isdecimal() and int(word) < count else None


def _read(path: Path) -> str:
    """Return the text of a file, empty if it is missing or unreadable."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text()
    return ""


_choices: dict[Hashable, Tile] = {}
