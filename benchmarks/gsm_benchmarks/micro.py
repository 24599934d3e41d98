"""Six measurements of the device itself that decide how kernels are built, each a few milliseconds of its time.

They are upper bounds: a kernel that does nothing but read, gather, multiply or wait for its launch. Every one computes
something that is checked. Rates are medians of laps in turns, with the L2 cache filled with something else before each
(`timing`): what is read again and again comes from memory the first time, which is 1 to 2 % of the bytes here.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gsm_kernels import launch
from gsm_kernels.index_top_k.triton import Search
from gsm_kernels.indexer import Indexer
from gsm_kernels.rows import Rows

from . import timing
from .build import used
from .machine import Lost
from .results import rate, sentence
from .timing import spread

LINE = 2048  # int32 of a block of `read`: four accesses of 16 bytes for each of 128 threads
WORDS = 64  # int32 of an entry: 256 bytes, 128 channels in bfloat16
INNER = 128  # K of the products
SHAPES = tuple((rows, columns) for rows in (16, 32, 64, 128) for columns in (64, 128))
GROUPS, PICKS = 8192, 128  # of `choose`: group maxima of a row, and how many are chosen
# What the lines hold the numbers against, of the 1.5B model: chunks of rows and launches of index_top_k at 64K tokens,
# and milliseconds that it may take; bytes of keys and entries that it and attention gather there; mHC boundaries of a
# token.
CHUNKS, LAUNCHES, SEARCH_MS = 47, 188, 4.0
GATHERED = 65536 * (4 * PICKS * 128 + PICKS * 256)
BOUNDARIES = 56


class Sizes(NamedTuple):
    """How much of everything.

    Attributes:
        programs: of each kernel but `choose`.
        buffers: bytes that `read` takes, by what they are called, and how often it does.
        slots, rows: of the bank that is gathered from, and rows of a program.
        turns: products of a program.
        launches: of the empty kernel.
        lines: rows of a chunk that choose.
    """

    programs: int
    buffers: Mapping[str, tuple[int, int]]
    slots: int
    rows: int
    turns: int
    launches: int
    lines: int


# 16 programs of four warps fill each of 132 processors.
FULL = Sizes(
    132 * 16, {"8 MB": (8 << 20, 192), "24 MB": (24 << 20, 64), "4 GB": (4 << 30, 1)}, 32768, 8, 256, 512, 1408
)
TOY = Sizes(3, {"8 MB": (1 << 15, 3), "24 MB": (1 << 16, 2), "4 GB": (1 << 17, 1)}, 64, 2, 2, 8, 3)


class Run(NamedTuple):
    """Something that is launched, how much it does in bytes or FLOPs, and whether it did it right."""

    launch: Callable[[], object]
    amount: float
    right: Callable[[], bool]


class Micro(NamedTuple):
    """A measurement.

    Attributes:
        name: of its row.
        runs: what is launched, by name; what is compiled ahead is what these would launch.
        measure: its numbers.
        says: one line of these numbers, with what they decide.
    """

    name: str
    runs: Callable[[torch.device, Sizes], dict[str, Run]]
    measure: Callable[[dict[str, Run], torch.device, Sizes], dict[str, Any]]
    says: Callable[[Mapping[str, Any]], str]


def reads(device: torch.device, sizes: Sizes) -> dict[str, Run]:
    """Buffers of the L2 cache read again and again past L1, and one of memory, once."""
    from .micro_kernels import read

    def one(bytes_: int, turns: int) -> Run:
        source = _words((bytes_ // 4,), device)
        out = torch.zeros(sizes.programs, LINE, dtype=torch.int32, device=device)
        args, options = (source, out, source.numel() // LINE, turns), {"BLOCK": LINE, "CACHE": ".cg", "num_warps": 4}
        return Run(
            lambda: launch.launch(read, (sizes.programs,), *args, **options),
            bytes_ * turns,
            lambda: _wrapped(out.sum()) == _wrapped(turns * source.sum()),
        )

    return {name: one(*size) for name, size in sizes.buffers.items()}


def gathers(device: torch.device, sizes: Sizes) -> dict[str, Run]:
    """Entries of 256 bytes gathered from a bank in the L2 cache: each row's at random, or nearly those of the row
    before, and with or without L1."""
    from .micro_kernels import gather

    bank, shape = _words((sizes.slots, WORDS), device), (sizes.programs, sizes.rows, PICKS)
    random = torch.randint(sizes.slots, shape, dtype=torch.int32, device=device)
    # One choice in eight is another one than in the row before.
    kept = torch.rand(shape, device=device) >= 1 / 8
    kept[:, 0] = False
    row = torch.arange(sizes.rows, device=device)[:, None].expand(shape)
    since = torch.where(kept, 0, row).cummax(1).values
    alike = random.gather(1, since)

    def one(index: Tensor, cache: str) -> Run:
        out = torch.zeros(sizes.programs, WORDS, dtype=torch.int32, device=device)
        options = {"K": PICKS, "WORDS": WORDS, "PICKS": 64, "CACHE": cache, "num_warps": 4}
        return Run(
            lambda: launch.launch(gather, (sizes.programs,), bank, index, out, sizes.rows, **options),
            index.numel() * WORDS * 4,
            lambda: _wrapped(out.sum()) == _wrapped((bank.sum(1)[index.long()]).sum()),
        )

    choices = {"random": random, "alike": alike}
    return {f"{name} {cache}": one(index, cache) for name, index in choices.items() for cache in (".ca", ".cg")}


def products(device: torch.device, sizes: Sizes) -> dict[str, Run]:
    """Matrix products of one tile again and again. Its operands are in shared memory, from where `mma` takes them to
    registers each time."""
    return {f"{rows} x {columns}": _product(rows, columns, device, sizes) for rows, columns in SHAPES}


def _product(rows: int, columns: int, device: torch.device, sizes: Sizes) -> Run:
    from .micro_kernels import multiply

    args, options = _tile(rows, columns, device, sizes)
    left, right, out, turns = args

    def right_enough() -> bool:
        expected = turns * (left.double() @ right.double())
        return bool(torch.allclose(out.double(), expected.expand_as(out), rtol=1e-3, atol=1e-3 * turns))

    flops = 2 * rows * columns * INNER * turns * sizes.programs
    return Run(lambda: launch.launch(multiply, (sizes.programs,), *args, **options), flops, right_enough)


def _tile(rows: int, columns: int, device: torch.device, sizes: Sizes) -> tuple[tuple, dict[str, Any]]:
    dtype = torch.float32 if launch.INTERPRETED else torch.bfloat16
    left, right = (torch.randn(size, device=device, dtype=dtype) for size in ((rows, INNER), (INNER, columns)))
    out = torch.zeros(sizes.programs, rows, columns, device=device)
    return (left, right, out, sizes.turns), {"M": rows, "N": columns, "K": INNER, "num_warps": 4}


def counts(device: torch.device, sizes: Sizes) -> dict[str, Run]:
    """A kernel that adds one to a number, and on a GPU the same one that begins before the last one has ended."""
    from .micro_kernels import count

    def one(early: bool) -> Run:
        total = torch.zeros(1, dtype=torch.int32, device=device)
        options: dict[str, Any] = {"EARLY": early, "num_warps": 1} | ({"launch_pdl": True} if early else {})

        def run() -> None:
            launch.launch(count, (1,), total, **options)

        def right() -> bool:
            before = total.item()
            for _ in range(sizes.launches):
                run()
            return total.item() == before + sizes.launches

        return Run(run, 1, right)

    return {"plain": one(False)} | ({} if launch.INTERPRETED else {"early": one(True)})


def choices(device: torch.device, sizes: Sizes) -> dict[str, Run]:
    """The selection of `index_top_k` alone: k groups of every row of a chunk, and PyTorch's top-k of the same."""
    best = torch.randn(sizes.lines, GROUPS, device=device)
    first = torch.zeros(1, sizes.lines, dtype=torch.int64, device=device)
    search, part = Search(Indexer(best, best, best), first, first + 4 * GROUPS), Rows(0, 1, 0, sizes.lines)
    out = torch.zeros(sizes.lines, PICKS, dtype=torch.int32, device=device)

    def right() -> bool:  # by their values: which of two equal ones is chosen, PyTorch leaves open
        return torch.equal(best.gather(1, out.long()).sort(-1).values, best.topk(PICKS, -1).values.flip(-1))

    return {
        "choose": Run(lambda: search.choose(best, part, 4, out), sizes.lines, right),
        "torch.topk": Run(lambda: best.topk(PICKS, -1, sorted=False), sizes.lines, lambda: True),
    }


def _rates(runs: dict[str, Run], device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """The median time of each, and what it does in a second. Raises ArithmeticError where it did not do it."""
    for name, run in runs.items():
        run.launch()
        if not run.right():
            raise ArithmeticError(f"{name} computed something else")
    times = timing.take_turns({name: run.launch for name, run in runs.items()}, device, 10, 2.0)
    return {
        name: {"ms": spread(laps)._asdict(), "rate": 1e3 * runs[name].amount / spread(laps).median}
        for name, laps in times.items()
    }


def _multiplied(runs: dict[str, Run], device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """As `_rates`, and which instruction multiplies, and how many registers a thread has."""
    from .micro_kernels import multiply

    found = _rates(runs, device, sizes)
    for rows, columns in SHAPES if device.type == "cuda" else ():
        args, options = _tile(rows, columns, device, sizes)
        options |= {"grid": (1,), "enable_fp_fusion": True}
        found[f"{rows} x {columns}"] |= used(multiply.warmup(*args, **options))
    return found


def _gaps(runs: dict[str, Run], device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Microseconds from one empty kernel to the next: in a CUDA graph, and one launched after the other."""
    found: dict[str, Any] = {}
    for name, run in runs.items():
        try:
            if not run.right():  # it has been launched often by now
                raise ArithmeticError("a launch was lost")
            found[f"eager, {name}"] = {"us": _microseconds(run.launch, sizes.launches, device)}
            if device.type == "cuda":
                found[f"graph, {name}"] = {"us": _replayed(run, sizes.launches, device)}
        except Exception as error:
            if name == "plain" or isinstance(error, Lost):
                raise
            found[name] = {"failed": sentence(error)}  # what the compiler or the driver does not know yet
    return found


def _replayed(run: Run, launches: int, device: torch.device) -> float:
    """Microseconds of one of so many launches that are a graph. Raises RuntimeError where they cannot be captured."""
    with timing.Graphs(device) as gpu:
        replay = gpu.captured(lambda: [run.launch() for _ in range(launches)])
        if replay is None:
            raise RuntimeError("it cannot be captured")
        return _microseconds(replay, 1, device) / launches


def _hosts(runs: dict[str, Run], device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Microseconds that the host takes for one launch: by `launch`, by Triton alone, and by PyTorch."""
    from .micro_kernels import count

    total = torch.zeros(1, dtype=torch.int32, device=device)
    options: dict[str, Any] = {"EARLY": False, "num_warps": 1, "enable_fp_fusion": True}
    calls = {
        "launch": runs["plain"].launch,
        "triton": lambda: count[(1,)](total, **options),
        "torch": lambda: total.add_(1),
    }
    found = {}
    for name, call in calls.items():
        call()
        found[name] = {"us": statistics.median(_host_us(call, sizes.launches, device) for _ in range(5))}
    return found


def _microseconds(run: Callable[[], object], times: int, device: torch.device) -> float:
    """Of one of so many runs, which follow each other on the device: the median of seven."""
    if device.type != "cuda":
        return statistics.median(_host_us(run, times, device) for _ in range(3))
    found = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            run()
        end.record()
        end.synchronize()
        found.append(1e3 * start.elapsed_time(end) / times)
    return statistics.median(found[1:])


def _host_us(call: Callable[[], object], times: int, device: torch.device) -> float:
    start = timing.now(device)
    for _ in range(times):
        call()
    return 1e3 * timing.now(torch.device("cpu")).since(start, parts=times).wall  # what was launched may still run


def _words(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int32, device=device)


def _wrapped(total: Tensor) -> int:
    """A sum as it is in 32 bits."""
    return int(total.item()) & 0xFFFFFFFF


def _say_reads(found: Mapping[str, Any]) -> str:
    near, all_, far = (found[name]["rate"] for name in ("8 MB", "24 MB", "4 GB"))
    return (
        f"L2 reads {rate(near, 'B/s')} of 8 MB and {rate(all_, 'B/s')} of 24 MB, memory {rate(far, 'B/s')}: keeping "
        f"scratch and banks in L2 is worth {near / far:.1f} x, and what a search and an attention at 64K gather "
        f"({GATHERED / 1e9:.1f} GB) takes {1e3 * GATHERED / near:.2f} ms at least"
    )


def _say_gathers(found: Mapping[str, Any]) -> str:
    rates = ", ".join(f"{name} {rate(one['rate'], 'B/s')}" for name, one in found.items())
    gain = found["alike .ca"]["rate"] / found["alike .cg"]["rate"]
    verdict = "pays: gathers go through it" if gain > 1.1 else "pays nothing: gathers stay past it"
    return f"gathers of 256 bytes: {rates}; L1 is worth {gain:.2f} x where rows choose alike, and {verdict}"


def _say_products(found: Mapping[str, Any]) -> str:
    def shown(name: str) -> str:
        return f"{name} {rate(found[name]['rate'], 'FLOP/s')} ({found[name].get('matrix', 'interpreted')})"

    gain = found["64 x 64"]["rate"] / found["16 x 64"]["rate"]
    return (
        f"products, M x N of K = {INNER}: {', '.join(map(shown, found))}; 64 rows multiply {gain:.1f} x as fast as 16: "
        f"padding a tile to 64 rows pays where at least {64 / gain:.0f} of them are real"
    )


def _say_gaps(found: Mapping[str, Any]) -> str:
    us = {name: one["us"] for name, one in found.items() if "us" in one}
    least = min(us[name] for name in us if name.startswith("graph") or len(us) == 1)
    times = ", ".join(f"{name} {time_:.2f} us" for name, time_ in us.items())
    more = f"one more at each of {BOUNDARIES} boundaries is {BOUNDARIES * least:.0f} us a token"
    return f"an empty kernel takes {times}: {more}"


def _say_hosts(found: Mapping[str, Any]) -> str:
    times = ", ".join(f"{name} {one['us']:.1f} us" for name, one in found.items())
    every = found["launch"]["us"] * LAUNCHES / 1e3
    return f"the host takes {times} a launch: the {LAUNCHES} of a search at 64K are {every:.1f} ms without a graph"


def _say_choices(found: Mapping[str, Any]) -> str:
    def shown(name: str) -> str:
        one = found[name]
        return f"{name} {1e3 * one['ms']['median']:.0f} us a chunk, {1e9 / one['rate']:.0f} ns a row"

    spent = CHUNKS * found["choose"]["ms"]["median"]
    return f"{shown('choose')}; {shown('torch.topk')}: {spent:.2f} ms of the {SEARCH_MS} that a search at 64K may take"


MICROS = (
    Micro("L2 reads", reads, _rates, _say_reads),
    Micro("gathers", gathers, _rates, _say_gathers),
    Micro("products by M", products, _multiplied, _say_products),
    Micro("launch gap", counts, _gaps, _say_gaps),
    Micro("host time of a launch", counts, _hosts, _say_hosts),
    Micro("choose alone", choices, _rates, _say_choices),
)


def measure(micro: Micro, device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """The row of one of them, with its line."""
    torch.manual_seed(0)
    found = micro.measure(micro.runs(device, sizes), device, sizes)
    return {"found": found, "line": micro.says(found)}
