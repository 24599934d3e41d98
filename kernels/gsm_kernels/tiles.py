"""The tile of a kernel: on a GPU, the fastest of a few candidates, timed once and kept on disk.

The first candidate follows from arithmetic. It is taken without a GPU, in Triton's interpreter, and by calls with fewer
programs than a GPU has multiprocessors. The first larger call of each kind builds all candidates, times those that
spill no more registers than the first, and keeps the choice in Triton's cache folder. All later calls and processes
take it, so that they compute the same bits. If several processes time at once, the first to finish decides for all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .device import triton_version
from .dispatch import KernelBuildError
from .launch import building, compiled, device_of, launch, launching, missing

PROCESSORS = 132  # multiprocessors of an H100
GAIN = 0.97  # largest share of the first candidate's time that is worth another tile
ROUNDS = 7  # timed runs of a candidate
PAUSE = 1_000_000  # cycles of the GPU before a run, about half a millisecond: the host must not be timed
Tile = dict[str, int]  # options of a launch: sizes, and warps and stages


def fastest(
    kernel: str, candidates: Sequence[Tile], run: Callable[[Tile], None], like: Tensor, programs: int, *sizes: Hashable
) -> Tile:
    """Return the candidate for a call of `programs` programs on the device of `like`.

    `run` launches the kernel with a candidate; it must write the same results each time. `sizes` are the other numbers
    that the kernel is compiled for.
    """
    if not like.is_cuda or programs < PROCESSORS or len(candidates) == 1:
        return candidates[0]
    key = (kernel, like.device, like.dtype, *sizes, str(candidates))
    if key not in _choices:
        gpu = torch.cuda.get_device_name(like.device)
        call = f"{kernel} on {gpu}, Triton {triton_version()}, {like.dtype}, {sizes}, {list(candidates)}"
        path = folder() / f"{hashlib.sha256(call.encode()).hexdigest()[:16]}.json"
        place = _kept(path, len(candidates))
        if place is None:
            with device_of((like,)):
                if building() or torch.cuda.is_current_stream_capturing():
                    return candidates[0]  # nothing may run now; a later call times
                place = _time(path, call, candidates, run)
        _choices[key] = place
    return candidates[_choices[key]]


def launch_fastest(
    name: str, kernel: Any, grid: Callable[[Tile], tuple[int, ...]], args: tuple, tiles: Sequence[Tile], **options: Any
) -> None:
    """Launch a kernel with the fastest of its tiles. The grid depends on the tile."""

    def run(tile: Tile) -> None:
        launch(kernel, grid(tile), *args, **options, **tile)

    run(fastest(name, tiles, run, args[0], math.prod(grid(tiles[0])), *options.values()))


def folder() -> Path:
    """Return the folder of the choices."""
    from triton import knobs

    return Path(knobs.cache.dir) / "gsm_tiles"


def describe() -> list[str]:
    """Return a sentence for each choice that this machine keeps, or the reason why it keeps none."""
    if missing() is not None or not torch.cuda.is_available():
        return ["every kernel takes its first tile, because tiles are timed where Triton's kernels run on a GPU"]
    sentences = sorted(row["sentence"] for path in folder().glob("*.json") if (row := _read(path)))
    return sentences or ["none is timed yet: the first large call of a kernel times its candidates"]


def milliseconds(run: Callable[[], None]) -> float:
    """Return the median time of a launch, after one that is not timed."""
    run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(ROUNDS)]
    for start, end in events:
        torch.cuda._sleep(PAUSE)
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def spills(run: Callable[[], None]) -> float:
    """Return the registers that a launch's kernel spills to memory, or infinity if it cannot be built."""
    built: list[Any] = []
    try:
        with launching(lambda kernel, _, args, options: built.append(compiled(kernel, args, options))):
            run()
    except KernelBuildError:
        return math.inf
    return max(kernel.n_spills for kernel in built)


def _time(path: Path, call: str, candidates: Sequence[Tile], run: Callable[[Tile], None]) -> int:
    """Return the place of the fastest candidate, and write it to the file, unless another process has."""
    runs = [partial(run, candidate) for candidate in candidates]
    spilled = [spills(one) for one in runs]
    fit = [number < math.inf and number <= spilled[0] for number in spilled]
    times = [milliseconds(one) if fits else math.inf for one, fits in zip(runs, fit, strict=True)]
    best = times.index(min(times))
    place = best if times[best] < GAIN * times[0] else 0
    sentence = f"{call}: number {place + 1} is taken, after {', '.join(f'{time:.3f}' for time in times)} ms"
    with contextlib.suppress(OSError):  # a folder that cannot be written: the next process times again
        _keep(path, {"tile": place, "sentence": sentence}, len(candidates))
    kept = _kept(path, len(candidates))
    return place if kept is None else kept


def _keep(path: Path, row: dict[str, Any], count: int) -> None:
    """Write a choice, unless another process was first. A damaged file is replaced; an unreadable one stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(row, file)
    try:
        os.chmod(file.name, 0o644)  # other users share the folder
        if os.access(path, os.R_OK) and _kept(path, count) is None:
            os.replace(file.name, path)
        else:
            os.link(file.name, path)
    finally:
        Path(file.name).unlink(missing_ok=True)


def _kept(path: Path, count: int) -> int | None:
    """Return the place of the candidate that a file names, of `count` candidates; None if it names none."""
    place = _read(path).get("tile")
    return place if place in range(count) else None


def _read(path: Path) -> dict[str, Any]:
    """Return the contents of a file, empty if it is missing or damaged."""
    try:
        row = json.loads(path.read_text())
        sound = isinstance(row["tile"], int) and row["sentence"].isprintable()
        return row if sound else {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


_choices: dict[Hashable, int] = {}
