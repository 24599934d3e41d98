"""Time things against each other: in turns in one process, so that clocks that drift drift for all of them.

On a GPU, by its events: before every lap it is kept busy for a moment, so that the lap's kernels wait in its queue and
not on the host, and its L2 cache is filled with something else, as it is in a model where other operations lie between.
On a CPU, by the wall clock.

Launches that take the host longer than that moment would be timed instead of the kernels. `kernel_turns` finds out how
long they take; what takes too long becomes a CUDA graph, whose replay takes one launch, and where no graph can be made
of it, because it waits for the device, the moment before its laps is as long as its launches.

`ceilings` measures what the device can do at most, against which times are held (Williams et al. 2009, the roofline).
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .machine import Lost, watching

FEWEST = 3  # rounds, however long they take
WARM_UP = 2  # rounds that do not count
PAUSE = 1_000_000  # cycles of the GPU before a lap: about half a millisecond, in which the host runs ahead
COVERED = 0.7  # share of a pause that launches may take: on a busy host they take longer than they did alone
LONGEST = 50.0  # milliseconds of a pause
USUAL_CLOCK = 2_000_000  # kHz, where PyTorch does not know it: an H100's highest is 1,980,000

Run = Callable[[], object]
T = TypeVar("T")


class Spread(NamedTuple):
    """Milliseconds: the median, the quartiles and the fastest of so many laps."""

    median: float
    low: float
    high: float
    fastest: float
    laps: int


class Timed(NamedTuple):
    """What `kernel_turns` found of a run.

    Attributes:
        spread: of its laps, in milliseconds.
        how: `clock` (of the host), `events` (of the GPU, around the run), `replay` (around the replay of its graph), or
            `long pause` (around the run, after a pause as long as its launches).
        host_ms: milliseconds that the host takes to launch it; None on a CPU.
    """

    spread: Spread
    how: str
    host_ms: float | None


class Prepared(NamedTuple):
    """What a lap calls, after so many cycles of pause; see `Timed`."""

    run: Run
    how: str
    host_ms: float
    pause: int = PAUSE


class Moment(NamedTuple):
    """Milliseconds by the clock on the wall, and of processor time of this process."""

    wall: float
    processor: float

    def since(self, start: Moment, parts: int = 1) -> Moment:
        """What went by, of each of so many equal parts."""
        return Moment((self.wall - start.wall) / parts, (self.processor - start.processor) / parts)


def now(device: torch.device) -> Moment:
    """This moment, when the device has done everything."""
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
    """The order of a round: the one that begins changes from round to round."""
    first = number % len(items)
    return [*items[first:], *items[:first]]


def take_turns(
    runs: Mapping[str, Run],
    device: torch.device,
    rounds: int = 30,
    seconds: float = 15.0,
    pauses: Mapping[str, int] | None = None,
) -> dict[str, list[float]]:
    """Time every run once a round; return the milliseconds of its laps, round by round.

    Args:
        runs: what is timed; each has run before, so that nothing is compiled now.
        device: that they run on.
        rounds: how many count.
        seconds: after which no round begins any more, once there were FEWEST.
        pauses: cycles of a GPU before the laps of a run, where they are not PAUSE.
    """
    pauses = pauses or {}
    lap = _Laps(device).lap if device.type == "cuda" else _lap
    times: dict[str, list[float]] = {name: [] for name in runs}
    began = time.perf_counter()
    for number in range(-WARM_UP if device.type == "cuda" else 0, rounds):
        if number >= FEWEST and time.perf_counter() - began > seconds:
            break
        laps = {name: lap(runs[name], pauses.get(name, PAUSE)) for name in rotated(list(runs), number)}
        for name, milliseconds in laps.items():
            if number >= 0:
                times[name].append(milliseconds())
    return times


def take_moments(runs: Mapping[str, Run], rounds: int, seconds: float) -> dict[str, list[Moment]]:
    """The same on a CPU, by both clocks: where others use the machine, processor time says more."""
    laps: dict[str, list[Moment]] = {name: [] for name in runs}
    cpu, began = torch.device("cpu"), time.perf_counter()
    for number in range(rounds):
        if number >= FEWEST and time.perf_counter() - began > seconds:
            break
        for name in rotated(list(runs), number):
            start = now(cpu)
            runs[name]()
            laps[name].append(now(cpu).since(start))
    return laps


class Ceilings(NamedTuple):
    """FLOP/s of a matrix product in `dtype`, and bytes/s of a copy, read and written ones counted."""

    flops: float
    bytes: float
    dtype: str

    def floor(self, flops: float, moved: float) -> float:
        """Milliseconds that so many FLOPs and bytes take at least."""
        return 1e3 * max(flops / self.flops, moved / self.bytes)


def ceilings(device: torch.device, size: int | None = None, copied: int | None = None) -> Ceilings:
    """Measure a product of two matrices of size x size and a copy of so many bytes; left out, 8192 and 1 GiB on a GPU,
    less on a CPU. Data-sheet rates are never reached.

    Matrices are random: on zeros a GPU draws less power and runs faster than it ever does on data.
    """
    gpu = device.type == "cuda"
    size, copied = size or (8192 if gpu else 1024), copied or (1 << 30 if gpu else 1 << 27)
    dtype = torch.bfloat16 if gpu else torch.float32
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    source = torch.randint(-128, 127, (copied,), device=device, dtype=torch.int8)
    target = torch.empty_like(source)
    runs = {"product": lambda: torch.mm(left, right, out=product), "copy": lambda: target.copy_(source)}
    times = take_turns(runs, device)
    product_ms, copy_ms = (statistics.median(times[name]) for name in runs)
    return Ceilings(2e3 * size**3 / product_ms, 2e3 * copied / copy_ms, str(dtype).removeprefix("torch."))


def kernel_turns(
    runs: Mapping[str, Run], device: torch.device, rounds: int = 30, seconds: float = 15.0, replayed: str = "ours"
) -> dict[str, Timed]:
    """As `take_turns`, and on a GPU without the launches, as far as that can be. A run is called some times more than
    there are rounds, and must do the same work each time.

    Only the run called `replayed` may become a graph: a capture that fails, as other people's code may make it, can
    leave the process's random numbers and memory in a state that spoils all rows after it.
    """
    if device.type != "cuda":
        times = take_turns(runs, device, rounds, seconds)
        return {name: Timed(spread(laps), "clock", None) for name, laps in times.items()}
    with Graphs(device) as gpu:
        ready = {name: prepare(run, gpu, may_replay=name == replayed) for name, run in runs.items()}
        pauses = {name: one.pause for name, one in ready.items()}
        found = take_turns({name: one.run for name, one in ready.items()}, device, rounds, seconds, pauses)
    return {name: Timed(spread(found[name]), one.how, one.host_ms) for name, one in ready.items()}


def prepare(run: Run, gpu: Graphs, may_replay: bool = True) -> Prepared:
    """How the laps of a run are timed, by the time that the host takes to launch it."""
    host_ms = gpu.host_ms(run)
    if host_ms <= COVERED * PAUSE / gpu.clock_khz:
        return Prepared(run, "events", host_ms)
    replay = gpu.captured(run) if may_replay else None
    if replay is not None:
        return Prepared(replay, "replay", host_ms)
    return Prepared(run, "long pause", host_ms, int(min(host_ms / COVERED, LONGEST) * gpu.clock_khz))


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Inside the block, work goes to a stream of a GPU that can be captured, which its default stream cannot. A forward
    has to run in it as well as its backward, which runs where the forward ran."""
    if device.type != "cuda":
        yield
        return
    own, before = _stream(device), torch.cuda.current_stream(device)
    own.wait_stream(before)
    with torch.cuda.stream(own):
        yield
    before.wait_stream(own)  # not after an error: a GPU that is lost would raise another one


def measured(
    runs: Mapping[str, Run], device: torch.device, rounds: int = 30, seconds: float = 15.0, replayed: str = "ours"
) -> dict[str, dict[str, Any]]:
    """What rows hold of runs that take turns (`kernel_turns`), as plain containers: `ms`, `timed`, `host_ms`, and
    `extra_mib`, the most memory besides what a run was given and what it returns; None on a CPU."""
    extra = {name: _extra_mib(run, device) if device.type == "cuda" else None for name, run in runs.items()}
    return {
        name: {"ms": one.spread._asdict(), "timed": one.how, "host_ms": one.host_ms, "extra_mib": extra[name]}
        for name, one in kernel_turns(runs, device, rounds, seconds, replayed).items()
    }


def _extra_mib(run: Run, device: torch.device) -> float:
    with watching(device) as peak:
        returned = run()
        torch.cuda.synchronize(device)
    kept = sum(x.nbytes for x in tree_leaves(returned) if isinstance(x, Tensor))
    return max(0, (peak.extra or 0) - kept) / 2**20


def _lap(run: Run, pause: int) -> Callable[[], float]:
    start = time.perf_counter()
    run()
    milliseconds = 1e3 * (time.perf_counter() - start)
    return lambda: milliseconds


class _Laps:
    """Laps of a GPU; what one took is known once the queue has come that far."""

    def __init__(self, device: torch.device) -> None:
        size = max(256 << 20, 2 * torch.cuda.get_device_properties(device).L2_cache_size)
        self.other = torch.empty(size, dtype=torch.uint8, device=device)

    def lap(self, run: Run, pause: int) -> Callable[[], float]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(pause)
        self.other.zero_()
        start.record()
        run()
        end.record()

        def milliseconds() -> float:
            end.synchronize()
            return start.elapsed_time(end)

        return milliseconds


class Graphs:
    """What `prepare` asks of this GPU; the graphs and their memory are there until the context ends."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.clock_khz: float = getattr(torch.cuda.get_device_properties(device), "clock_rate", 0) or USUAL_CLOCK
        self.graphs: list[torch.cuda.CUDAGraph] = []

    def __enter__(self) -> Graphs:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        for graph in self.graphs:
            graph.reset()
        if self.graphs and error is None:  # a GPU that is lost would raise another one
            torch.cuda.empty_cache()

    def host_ms(self, run: Run) -> float:
        """The fastest of three calls, or of fewer where they take longer than a pause can be."""
        times: list[float] = []
        while len(times) < 3 and sum(times) < LONGEST:
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - start))
        return min(times)

    def captured(self, run: Run) -> Run | None:
        """The replay of the run's graph; None where it waits for the device, or cannot be captured for another reason.

        A capture that fails leaves things behind, so what waits is found out before, as far as PyTorch knows."""
        now = torch.cuda.current_stream(self.device)
        stream = now if now != torch.cuda.default_stream(self.device) else _stream(self.device)
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        stream.wait_stream(now)
        try:
            with torch.cuda.stream(stream), _waiting_is_an_error():
                run()  # in this stream, for which libraries set up workspaces
            with torch.cuda.stream(stream), torch.cuda.graph(graph, pool=pool, stream=stream):
                run()
        except Exception as error:  # whatever keeps it from being captured, it can be timed without
            end_capture(self.device, pool, error)
            return None
        now.wait_stream(stream)
        self.graphs.append(graph)
        return graph.replay


@contextlib.contextmanager
def _waiting_is_an_error() -> Iterator[None]:
    """Inside the block, PyTorch raises RuntimeError where it would wait for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def end_capture(device: torch.device, pool: tuple[int, int], error: Exception) -> None:
    """Mends what a capture that failed with this error leaves behind.

    PyTorch's allocator waits for its end, and keeps its pool; its random numbers for a GPU stay those of a capture, so
    that every later draw would fail, until another capture ends well. Raises machine.Lost if they still do.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    for mend in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
        with contextlib.suppress(RuntimeError):  # it was ended, or never began
            mend(index, pool)
    torch.cuda.synchronize(device)
    try:
        with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=_stream(device)):
            torch.zeros(1, device=device)
        torch.rand(1, device=device)
    except RuntimeError as still:
        raise Lost(f"a capture that failed ({error}) has spoilt this process: the same command goes on") from still


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all: memory that was used in a stream is used again in the same one alone."""
    return torch.cuda.Stream(device)
