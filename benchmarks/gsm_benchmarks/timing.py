"""Time runs against each other, in turns in one process: a clock that drifts then drifts for all of them.

On a GPU, by its events. Before every lap the GPU is kept busy for a moment, so that the kernels of the lap wait in its
queue and not for the host. Its L2 cache is filled with other data, as it is in a model between two operations. The
moment lasts longer than the host takes to launch the lap. On a CPU, by the wall clock.

`ceilings` measures the rates that the device reaches at most; times are compared with these (Williams et al. 2009, the
roofline).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .machine import watching

FEWEST = 3  # rounds, however long they take
WARM_UP = 2  # rounds that do not count
PAUSE = 1_000_000  # cycles of the GPU before a lap: about half a millisecond, in which the host runs ahead
COVERED = 0.7  # share of a pause that launches may take: on a busy host they take longer than they did alone
LONGEST = 50.0  # milliseconds of a pause
USUAL_CLOCK = 2_000_000  # kHz, where PyTorch does not know it: an H100's highest is 1,980,000

Run = Callable[[], object]
T = TypeVar("T")


class Spread(NamedTuple):
    """Milliseconds: the median, the quartiles and the fastest, and the number of laps."""

    median: float
    low: float
    high: float
    fastest: float
    laps: int


class Moment(NamedTuple):
    """Milliseconds by the clock on the wall, and of processor time of this process; a lap of a GPU has none."""

    wall: float
    processor: float

    def since(self, start: Moment, parts: int = 1) -> Moment:
        """Return the time since the start, divided by the number of parts."""
        return Moment((self.wall - start.wall) / parts, (self.processor - start.processor) / parts)


def now(device: torch.device) -> Moment:
    """Return this moment, once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Moment(1e3 * time.perf_counter(), 1e3 * time.process_time())


def spread(times: Iterable[float]) -> Spread:
    """The spread of at least one time."""
    sorted_times = sorted(times)
    if len(sorted_times) == 1:
        only = sorted_times[0]
        return Spread(only, only, only, only, 1)
    low, median, high = statistics.quantiles(sorted_times, n=4, method="inclusive")
    return Spread(median, low, high, sorted_times[0], len(sorted_times))


def rotated(items: Sequence[T], number: int) -> list[T]:
    """Return the order of a round: another item begins in each."""
    first = number % len(items)
    return [*items[first:], *items[:first]]


def take_turns(
    runs: Mapping[str, Run],
    device: torch.device,
    rounds: int = 30,
    seconds: float = 15.0,
    pauses: Mapping[str, int] | None = None,
) -> dict[str, list[Moment]]:
    """Time every run once a round; return its laps, round by round. Processor time is steadier where others use the
    machine.

    Args:
        runs: to be timed; each has run before, so that nothing is compiled now.
        device: that they run on.
        rounds: how many count.
        seconds: after which no round begins any more, once there were FEWEST.
        pauses: cycles of a GPU before the laps of a run, where they are not PAUSE.
    """
    pauses = pauses or {}
    lap = _Laps(device).lap if device.type == "cuda" else _lap
    times: dict[str, list[Moment]] = {name: [] for name in runs}
    began = time.perf_counter()
    for number in range(-WARM_UP if device.type == "cuda" else 0, rounds):
        if number >= FEWEST and time.perf_counter() - began > seconds:
            break
        laps = {name: lap(runs[name], pauses.get(name, PAUSE)) for name in rotated(list(runs), number)}
        for name, moment in laps.items():
            if number >= 0:
                times[name].append(moment())
    return times


class Ceilings(NamedTuple):
    """FLOP/s of a matrix product in `dtype`, and bytes/s of a copy, read and written ones counted."""

    flops: float
    bytes: float
    dtype: str

    def floor(self, flops: float, moved: float) -> float:
        """Return the milliseconds that these FLOPs and bytes take at least."""
        return 1e3 * max(flops / self.flops, moved / self.bytes)


def ceilings(device: torch.device) -> Ceilings:
    """Measure a product of two matrices of 8192 x 8192 and a copy of 1 GiB; smaller ones on a CPU. Data-sheet rates are
    never reached.

    Matrices are random: on zeros a GPU draws less power and runs faster than it ever does on data.
    """
    gpu = device.type == "cuda"
    size, copied = (8192, 1 << 30) if gpu else (1024, 1 << 27)
    dtype = torch.bfloat16 if gpu else torch.float32
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    source = torch.randint(-128, 127, (copied,), device=device, dtype=torch.int8)
    target = torch.empty_like(source)
    runs = {"product": lambda: torch.mm(left, right, out=product), "copy": lambda: target.copy_(source)}
    times = take_turns(runs, device)
    product_ms, copy_ms = (statistics.median(lap.wall for lap in times[name]) for name in runs)
    return Ceilings(2e3 * size**3 / product_ms, 2e3 * copied / copy_ms, str(dtype).removeprefix("torch."))


def measured(runs: Mapping[str, Run], device: torch.device, rounds: int, seconds: float) -> dict[str, dict[str, Any]]:
    """Return the part of a row that runs in turns have shown, as plain containers.

    `ms` is a spread. `host_ms` are the milliseconds in which the host launches the run, and `extra_mib` the most memory
    beside arguments and results; both are None on a CPU.
    """
    extra: dict[str, float | None] = dict.fromkeys(runs)
    host, pauses = dict(extra), None
    if device.type == "cuda":
        extra = {name: _extra_mib(run, device) for name, run in runs.items()}
        host = {name: _host_ms(run, device) for name, run in runs.items()}
        clock_khz = getattr(torch.cuda.get_device_properties(device), "clock_rate", 0) or USUAL_CLOCK
        pauses = {name: max(PAUSE, int(min(ms / COVERED, LONGEST) * clock_khz)) for name, ms in host.items()}
    times = take_turns(runs, device, rounds, seconds, pauses)
    return {
        name: {"ms": spread(lap.wall for lap in laps)._asdict(), "host_ms": host[name], "extra_mib": extra[name]}
        for name, laps in times.items()
    }


def _host_ms(run: Run, device: torch.device) -> float:
    """Return the fastest of three calls, without the wait for the GPU."""
    times = []
    for _ in range(3):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


def _extra_mib(run: Run, device: torch.device) -> float:
    with watching(device) as peak:
        returned = run()
        torch.cuda.synchronize(device)
    returned_bytes = sum(x.nbytes for x in tree_leaves(returned) if isinstance(x, Tensor))
    return max(0, (peak.extra or 0) - returned_bytes) / 2**20


def _lap(run: Run, pause: int) -> Callable[[], Moment]:
    start = now(torch.device("cpu"))
    run()
    lap = now(torch.device("cpu")).since(start)
    return lambda: lap


class _Laps:
    """Laps of a GPU; the time of a lap is known once the queue has come that far."""

    def __init__(self, device: torch.device) -> None:
        size = max(256 << 20, 2 * torch.cuda.get_device_properties(device).L2_cache_size)
        self.other = torch.empty(size, dtype=torch.uint8, device=device)

    def lap(self, run: Run, pause: int) -> Callable[[], Moment]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(pause)
        self.other.zero_()
        start.record()
        run()
        end.record()

        def moment() -> Moment:
            end.synchronize()
            return Moment(start.elapsed_time(end), 0.0)

        return moment
