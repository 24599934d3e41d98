"""Timing things against each other: in turns in one process, so that clocks that drift drift for all of them.

On a GPU, by its events: before every lap it is kept busy for a moment, so that the lap's kernels wait in its queue and
not on the host, and its L2 cache is filled with something else, as it is in a model where other operations lie between.
On a CPU, by the wall clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

FEWEST = 3  # rounds, however long they take
WARM_UP = 2  # rounds that do not count
PAUSE = 1_000_000  # cycles of the GPU before a lap: about half a millisecond, in which the host runs ahead

Run = Callable[[], object]


class Spread(NamedTuple):
    """Milliseconds: the median, the quartiles and the fastest of so many laps."""

    median: float
    low: float
    high: float
    fastest: float
    laps: int


def spread(times: Iterable[float]) -> Spread:
    """The spread of at least one time."""
    sorted_times = sorted(times)
    if len(sorted_times) == 1:
        only = sorted_times[0]
        return Spread(only, only, only, only, 1)
    low, median, high = statistics.quantiles(sorted_times, n=4, method="inclusive")
    return Spread(median, low, high, sorted_times[0], len(sorted_times))


def take_turns(
    runs: Mapping[str, Run], device: torch.device, rounds: int = 30, seconds: float = 15.0
) -> dict[str, Spread]:
    """Time every run once a round, and the one that begins changes from round to round.

    Args:
        runs: what is timed; each has run before, so that nothing is compiled now.
        device: that they run on.
        rounds: how many count.
        seconds: after which no round begins any more, once there were FEWEST.
    """
    lap = _GPU(device).lap if device.type == "cuda" else _lap
    names, times = list(runs), {name: [] for name in runs}
    began = time.perf_counter()
    for number in range(-WARM_UP if device.type == "cuda" else 0, rounds):
        if number >= FEWEST and time.perf_counter() - began > seconds:
            break
        first = number % len(names)
        laps = {name: lap(runs[name]) for name in (*names[first:], *names[:first])}
        for name, milliseconds in laps.items():
            if number >= 0:
                times[name].append(milliseconds())
    return {name: spread(found) for name, found in times.items()}


def extra_bytes(run: Run, device: torch.device) -> int | None:
    """The most memory that a run holds besides what it was given and what it returns; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    kept = run()
    torch.cuda.synchronize(device)
    returned = sum(x.nbytes for x in (kept if isinstance(kept, list | tuple) else [kept]) if isinstance(x, Tensor))
    return max(0, torch.cuda.max_memory_allocated(device) - before - returned)


def _lap(run: Run) -> Callable[[], float]:
    start = time.perf_counter()
    run()
    milliseconds = 1e3 * (time.perf_counter() - start)
    return lambda: milliseconds


class _GPU:
    """Laps of a GPU; what one took is known once the queue has come that far."""

    def __init__(self, device: torch.device) -> None:
        size = max(256 << 20, 2 * torch.cuda.get_device_properties(device).L2_cache_size)
        self.other = torch.empty(size, dtype=torch.uint8, device=device)

    def lap(self, run: Run) -> Callable[[], float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(PAUSE)
        self.other.zero_()
        start.record()
        run()
        end.record()

        def milliseconds() -> float:
            end.synchronize()
            return start.elapsed_time(end)

        return milliseconds
