"""The stage that answers first on a GPU that nothing has run on: does every kernel build, compute the right numbers,
and how far is it from its floor; and what of the device decides how the next kernels are built.

Three minutes on a cold machine with 16 cores: 50 kernels take 28 seconds of a core to compile, the longest 3 (both
measured), so about 15 with imports and the driver. Derived: 28 rows of 2 to 5 seconds, most of it the oracle, which is
the reference in float32; ceilings and six measurements of about 2 seconds each.

Pieces are kept one by one: a process that is ended at any moment loses the piece that it was at, and the next one goes
on behind the others. A piece that takes too long ends the process by itself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gsm_kernels
from gsm_kernels import launch
from gsm_kernels.dispatch import listening, using
from gsm_kernels.testing import TOLERANCE

from . import machine, micro, results, timing, workloads
from .build import Build
from .results import Asked, Results, Row, read, sentence, table
from .workloads import Call, Case, Work, bound, difference, last_rows

MINUTES = 3.0  # unless others are asked for
BUILD_SECONDS, BUILD_SHARE = 90.0, 0.5  # of the stage at most, where it has less time in all
PIECE_SECONDS = 45  # after which a piece on a GPU has hung
EAGER_SECONDS = 4.0  # that a float32 pass of the reference may take; else fewer rows are compared
SHARE = 16  # these are one in so many
ROUNDS, LAP_SECONDS = 7, 1.0
FIRST = ("build", "ceilings")  # what other pieces need
TIMES_EAGER = 1.5  # how much further than eager bfloat16 from the oracle is still right
OTHER_SLOTS = 1e-3  # share of slots that may differ: scores that are nearly equal, summed in another order
HEAD = ("piece", "verdict", "error", "eager's", "ms", "of the floor", "MiB more", "host ms", "ran", "s")


@dataclass(frozen=True)
class Piece:
    """One operation at one size.

    Attributes:
        gate: as it is measured on a GPU.
        built: launches the same kernels, specialised in the same way, and fits a CPU.
        toy: on a CPU, in Triton's interpreter or by the reference.
        rows: whether fewer rows of the same call can be compared.
    """

    gate: Case
    built: Case
    toy: Case
    rows: bool = False


def pieces() -> tuple[Piece, ...]:
    """What is measured, the smallest work first, then what decoding does."""
    w, small = workloads, {"heads": 2, "channels": 16}
    search = {"heads": 2, "width": 16}
    chosen = w.index_top_k("index_top_k 64K", 1, 65536)
    return (
        Piece(w.rms_norm("rms_norm 16K", 16384), w.rms_norm("", 64), w.rms_norm("", 4, 64)),
        Piece(w.swiglu("swiglu 16K", 16384), w.swiglu("", 64), w.swiglu("", 4, 64)),
        Piece(w.pool_groups("pool_groups 16K", 16384), w.pool_groups("", 512), w.pool_groups("", 8, 16)),
        Piece(w.mhc_boundary("mhc_boundary 16K", 16384), w.mhc_boundary("", 128), w.mhc_boundary("", 80, 32)),
        Piece(
            w.linear_cross_entropy("linear_cross_entropy 16K", 16384),
            w.linear_cross_entropy("", 16, width=16),  # its width is the BLAS's affair
            w.linear_cross_entropy("", 4, 16, 64),
        ),
        Piece(w.score_slots("score_slots 4 x 4K", 4, 4096), w.score_slots("", 1, 512), w.score_slots("", 1, 4), True),
        Piece(
            w.attend_band("attend_band 64K", 1, 65536),
            w.attend_band("", 1, 512),
            w.attend_band("", 1, 8, width=4, **small),
            True,
        ),
        Piece(
            w.attend("attend 64K", 1, 65536),
            w.attend("", 1, 512),
            w.attend("", 1, 8, width=4, picks=2, **small),
            True,
        ),
        Piece(chosen, last_rows(chosen, 192), w.index_top_k("", 1, 16, **search), True),
        Piece(
            w.candidate_pool("candidate_pool 64K", 1, 65536),
            last_rows(w.candidate_pool("", 1, 65536), 192),
            w.candidate_pool("", 1, 8),
            True,
        ),
        Piece(
            w.indexer_kl("indexer_kl 4 x 4K", 4, 4096),
            last_rows(w.indexer_kl("", 1, 4096), 64),
            w.indexer_kl("", 1, 4, **small),
            True,
        ),
        _borrowed(w.attend_range("attend_range 4 x 4K", 4, 4096), w.attend_range("", 1, 8, 2, 1, 16)),
        _borrowed(
            w.attend_blocks("attend_blocks 4 x 4K", 4, 4096), w.attend_blocks("", 1, 8, 2, 1, 16, block=2, blocks=2)
        ),
        _borrowed(w.delta_rule("delta_rule 4 x 4K", 4, 4096), w.delta_rule("", 1, 8, 2, 16)),
        _borrowed(
            w.delta_rule("delta_rule by channel 4 x 4K", 4, 4096, by_channel=True),
            w.delta_rule("", 1, 8, 2, 16, by_channel=True),
        ),
        _borrowed(w.slot_attention("slot_attention 4 x 4K", 4, 4096), w.slot_attention("", 1, 8, 2, 16, 4)),
        _borrowed(w.grouped_linear("grouped_linear 16K", 16384), w.grouped_linear("", 16, 4, 16, 16)),
        Piece(
            last_rows(w.attend("attend 64K", 1, 65536), 1, _attended(32, 128)),
            last_rows(w.attend("", 1, 512), 1, _attended(32, 128)),
            last_rows(w.attend("", 1, 32, **small), 1, _attended(2, 16)),
        ),
        _alone(w.mhc_boundary("mhc_boundary, one token", 1), w.mhc_boundary("", 1, 32)),
        _alone(w.rms_norm("rms_norm, one token", 1), w.rms_norm("", 1, 64)),
        Piece(
            last_rows(chosen, 1, _searched(32768)),
            last_rows(w.index_top_k("", 1, 65536), 1, _searched(32768)),
            last_rows(w.index_top_k("", 1, 32, **search), 1, _searched(16)),
        ),
    )


def _borrowed(gate: Case, toy: Case) -> Piece:
    """An operation without kernels of ours: PyTorch's or fla's run, where they are, and nothing is built ahead."""
    return Piece(gate, toy, toy)


def run(
    only: str = "",
    workers: int = 0,
    **asked: Any,
) -> Path:
    """Build, check and time every kernel, then measure the device; write each piece as it is known; return the file.

    Args: as in configs/benchmark/smoke.yaml and configs/benchmark.yaml, which say what they mean. On a CPU kernels are
    built for a Hopper, and the rest is a rehearsal at toy sizes: in Triton's interpreter where TRITON_INTERPRET=1 is
    set, else by the reference.

    Raises:
        ValueError: there is no such device or piece, or the file is no file of results.
        machine.Lost: the GPU takes no more work from this process.
    """
    how = Asked(**{"minutes": MINUTES, **asked})
    if how.results:
        return show(Path(how.results))
    where = machine.chosen(how.device)
    file = how.open("smoke", where)
    stage = Stage(file, where, workers or len(os.sched_getaffinity(0)))
    names = [name for name in stage.measures if name.startswith(only)]
    if not names:
        raise ValueError(f"no piece begins with '{only}'; there are {', '.join(stage.measures)}")
    left = stage.left(names, how.force)
    print(f"{file.facts['device']}: {len(left)} pieces to do, {len(names)} in all, to {file.path}", flush=True)
    try:
        for name in file.in_time(left, left.__getitem__):
            stage.do(name)
    finally:
        if file.rows:
            show(file.path)
    return file.path


class Stage:
    """The pieces of one run, and what measures them."""

    def __init__(self, results: Results, device: torch.device, workers: int) -> None:
        self.results, self.device, self.workers = results, device, workers
        self.wanted: list[str] = []
        self.measures: dict[str, Callable[[], dict[str, Any]]] = {"build": self._build, "ceilings": self._ceilings}
        own, sources = Path(__file__).parent, results.sources
        sources["ceilings"] = machine.fingerprint([own / "timing.py"])
        for piece in pieces():
            for direction in piece.gate.work:
                name = f"{piece.gate.name}, {direction}"
                self.measures[name] = lambda piece=piece, direction=direction: self._operation(piece, direction)
                sources[name] = machine.fingerprint(machine.sources_of(piece.gate.op))
        micros = [own / name for name in ("micro.py", "micro_kernels.py", "timing.py")]
        for one in micro.MICROS:
            self.measures[one.name] = lambda one=one: self._micro(one)
            depends = machine.sources_of("index_top_k") if one.name == "choose alone" else [Path(launch.__file__)]
            sources[one.name] = machine.fingerprint([*micros, *depends])

    def has(self, name: str) -> bool:
        """Whether the file has this piece, of the sources that there are now; of building, for all that is wanted."""
        covered = name != "build" or set(self._launching()) <= set(self.results.rows.get(name, {}).get("of", ()))
        return covered and self.results.has(name)

    def left(self, names: list[str], force: bool) -> dict[str, int]:
        """Those of these pieces that are to be done, and before them what they need: their kernels, and the ceilings;
        with how often each was tried. These two count as tried twice less, since what was built is kept."""
        self.wanted = [name for name in names if force or not self.has(name)]
        needed = [name for name in FIRST if self.wanted and name not in self.wanted and not self.has(name)]
        return {name: self.results.times(name) - (2 if name in FIRST else 0) for name in (*needed, *self.wanted)}

    def do(self, name: str) -> None:
        """One piece. Raises machine.Lost if the GPU is gone after it."""
        began = time.monotonic()
        with (
            self.results.trying(name),
            _hanging(self.device, PIECE_SECONDS + (BUILD_SECONDS if name == "build" else 0)),
        ):
            try:
                row = self.measures[name]()
            except Exception as error:  # whatever it is, the row says it, and the other pieces are still to come
                row = {"failed": sentence(error)}
            gc.collect()
            row = {"name": name, **row, "seconds": round(time.monotonic() - began, 1)}
            self.results.add(name, row)
            print(f"{line(row)} [{row['seconds']} s]", flush=True)
        machine.still_alive(name)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def _full(self) -> bool:
        return self.device.type == "cuda"

    def _build(self) -> dict[str, Any]:
        major, minor = torch.cuda.get_device_capability() if self._full else launch.HOPPER
        seconds, of = min(BUILD_SECONDS, BUILD_SHARE * (self.results.end - time.monotonic())), self._launching()
        row, before = built(of, 10 * major + minor, self.workers, seconds), self.results.rows.get("build", {})
        if before.get("sources") != self.results.facts["sources"] or not before.get("kernels"):
            return row
        # What was built before is in the cache now; how long it took is known from then.
        known = {(one["kernel"], one["hash"]): one for one in before["kernels"] if "hash" in one}
        again = {(one["kernel"], one.get("hash")) for one in row["kernels"] if not one.get("found")}
        kept = [one for key, one in known.items() if key not in again]
        new = [one for one in row["kernels"] if (one["kernel"], one.get("hash")) not in known or not one.get("found")]
        return {**row, **summary([*kept, *new]), "of": sorted({*before["of"], *of})}

    def _launching(self) -> list[str]:
        """The pieces that are wanted and launch kernels; of none in particular, all."""
        launching = [name for name in self.measures if name not in FIRST]
        return [name for name in launching if name in self.wanted] or launching

    def _ceilings(self) -> dict[str, Any]:
        size = () if self._full else (256, 1 << 20)
        return {"ceilings": timing.ceilings(self.device, *size)._asdict(), "clocks": machine.clocks(self.device)}

    def _roof(self) -> timing.Ceilings:
        """As this file has them, else measured now."""
        row = self.results.rows["ceilings"] if self.has("ceilings") else self._ceilings()
        return timing.Ceilings(**row["ceilings"])

    def _operation(self, piece: Piece, direction: str) -> dict[str, Any]:
        case = piece.gate if self._full else replace(piece.toy, name=piece.gate.name)
        with timing.own_stream(self.device):
            return operation(case, direction, self.device, self._roof(), piece.rows and self._full)

    def _micro(self, one: micro.Micro) -> dict[str, Any]:
        if not self._full and not launch.INTERPRETED:
            return {"line": "needs a GPU, or TRITON_INTERPRET=1", "implementation": "none"}
        if self._full:
            return micro.measure(one, self.device, micro.FULL)
        row = micro.measure(one, self.device, micro.TOY)  # times of the interpreter decide nothing
        return {**row, "line": f"rehearsed at toy size, interpreted; right: {', '.join(row['found'])}"}


def operation(
    case: Case, direction: str, device: torch.device, roof: timing.Ceilings, fewer: bool = False
) -> dict[str, Any]:
    """The row of an operation in one direction: what ran, how long it takes, and how far it is from the oracle.

    Args:
        fewer: whether to compare one row in SHARE, the last ones, where the reference is too slow for all.
    """
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    op, call, work = getattr(gsm_kernels, case.op), case.make(device, dtype), case.work[direction].at(dtype)
    forced = "triton" if launch.INTERPRETED and case.has_kernels else "auto"
    row: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), **work._asdict()}
    with using(forced), _compiling() as late, listening() as heard:
        run = bound(op, call, direction, dtype)
        ours = run()
        ran = next(implementation for name, implementation in heard if name == case.op)
        row |= {"implementation": ran, "compiled_late": late}  # what `build` did not have
        own = "ours" if case.has_kernels else ""
        row |= timing.measured({"ours": run}, device, ROUNDS, LAP_SECONDS, replayed=own)["ours"]
    if device.type == "cuda":
        floor = roof.floor(*work)
        row |= {"floor_ms": floor, "share_of_floor": floor / row["ms"]["median"]}
        row |= {} if ran == "triton" or not case.has_kernels else {"failed": f"{ran} ran: {_why(op, call)}"}
    else:
        row["implementation"] += ", interpreted at toy size" if ran == "triton" else " at toy size"
    try:
        return row | _compared(case, call, direction, dtype, forced, ours, fewer)
    except Exception as error:  # how long it takes is known, whatever became of the oracle
        return {**row, "failed": f"not compared: {sentence(error)}"}


def _compared(
    case: Case, call: Call, direction: str, dtype: torch.dtype, forced: str, ours: Call, fewer: bool
) -> dict[str, Any]:
    """Ours and eager in `dtype` against eager in a wider one: the errors of each tensor, and the verdict."""
    op, compared = getattr(gsm_kernels, case.op), "all rows"
    device = next(x.device for x in call.values() if isinstance(x, Tensor))
    rows = max((x.shape[1] for name, x in call.items() if "_BR" in name), default=0)
    few = last_rows(case, max(1, rows // SHARE)) if fewer else None
    slow = few is not None and SHARE * _seconds_of_oracle(op, few.make(device, dtype), direction) > EAGER_SECONDS
    both = None
    if not slow:
        try:
            both = [_eager(op, x, direction, dtype) for x in (_wider(call), call)]
        except torch.OutOfMemoryError:
            if few is None:
                raise
    if both is None and few is not None:  # behind the handler: until it ends, an error holds on to what was taken
        gc.collect()
        torch.cuda.empty_cache()
        call, compared = few.make(device, dtype), f"the last 1/{SHARE} of the rows"
        with using(forced):
            ours = bound(op, call, direction, dtype)()
        both = [_eager(op, x, direction, dtype) for x in (_wider(call), call)]
    assert both is not None
    oracle, eager = both
    errors = {name: (difference([ours[name]], [x]), difference([eager[name]], [x])) for name, x in oracle.items()}
    broken = {name: kinds for name, x in ours.items() if (kinds := _not_finite(x, oracle[name]))}
    limits = {name: _limit(x, dtype, name, errors[name][1]) for name, x in oracle.items()}
    worst = max(errors, key=lambda name: errors[name][0] / limits[name])
    right = not broken and errors[worst][0] <= limits[worst]
    verdict = "right" if right else f"wrong: {worst}" + "".join(f"; {n} has {kinds}" for n, kinds in broken.items())
    return {"verdict": verdict, "worst": worst, "errors": errors, "limit": limits[worst], "compared": compared}


def _eager(op: Any, call: Call, direction: str, dtype: torch.dtype) -> Call:
    """What the reference makes, from a graph that is freed while it is used: in float32 it takes a lot of memory."""
    with using("reference"):
        found = bound(op, call, "forward" if direction == "forward" else "both", dtype)()
    return {name: x for name, x in found.items() if direction != "backward" or name.startswith("d ")}


def _seconds_of_oracle(op: Any, call: Call, direction: str) -> float:
    """Of a second pass; the first sets up libraries."""
    wide, times = _wider(call), []
    for _ in range(2):
        start = time.monotonic()
        _eager(op, wide, direction, torch.float32)
        machine.still_alive("the oracle")
        times.append(time.monotonic() - start)
    return times[-1]


def _wider(call: Call) -> Call:
    """The same numbers in float32; float32 in float64."""
    half = any(isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16) for x in call.values())
    wide = torch.float32 if half else torch.float64
    return {name: x.to(wide) if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in call.items()}


def _limit(x: Tensor, dtype: torch.dtype, name: str, eager: float) -> float:
    if not x.is_floating_point():
        return max(OTHER_SLOTS, TIMES_EAGER * eager)
    tolerance = TOLERANCE[dtype]
    return max(tolerance.backward if name.startswith("d ") else tolerance.forward, TIMES_EAGER * eager)


def _not_finite(x: Tensor, expected: Tensor) -> str:
    """`3 NaN, 2 Inf` that are not expected."""
    if not x.is_floating_point() or not expected.isfinite().all():
        return ""
    found = {"NaN": int(x.isnan().sum()), "Inf": int(x.isinf().sum())}
    return ", ".join(f"{number} {kind}" for kind, number in found.items() if number)


def _why(op: Any, call: Call) -> str:
    """Why the kernels did not take a call."""
    reasons = (impl.missing() or impl.refuses(**call) for impl in op.fast if impl.name == "triton")
    return next(filter(None, reasons), None) or op.explain()[1]


@contextlib.contextmanager
def _compiling() -> Iterator[list[str]]:
    """The names of kernels that Triton compiles inside the block, and does not find in its cache."""
    found: list[str] = []
    try:
        from triton import knobs
    except ImportError:
        yield found
        return
    before = knobs.compilation.listener

    def listener(*, metadata: Mapping[str, Any], cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            found.append(str(metadata.get("name")))

    knobs.compilation.listener = listener
    try:
        yield found
    finally:
        knobs.compilation.listener = before


@contextlib.contextmanager
def _hanging(device: torch.device, seconds: float) -> Iterator[None]:
    """On a GPU, ends the process after so many seconds inside the block, wherever it waits, and shows where."""
    if device.type != "cuda":
        yield
        return
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def built(of: list[str], capability: int, workers: int, seconds: float) -> dict[str, Any]:
    """The row of the kernels of these pieces, compiled by another process, which has never heard of a GPU or the
    interpreter."""
    words = f"from {__name__} import compile_ahead; compile_ahead({of}, {capability}, {workers}, {seconds})"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    folders = [str(Path(__file__).parents[1]), str(machine.KERNELS.parent), environment.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    kernels: list[dict[str, Any]] = []
    command = [sys.executable, "-c", words]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            for text in process.stdout or ():
                if text.startswith("{"):  # a compiler may say other things
                    kernels.append(json.loads(text))
                    if kernels[-1].get("failed"):
                        print("{of}: {kernel} cannot be built: {failed}".format(**kernels[-1]), flush=True)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise RuntimeError(f"the process that compiles ended with status {process.returncode}")
    row = {"of": of, **summary(kernels), "capability": capability, "workers": workers}
    given_up = [one for one in kernels if "TimeoutError" in one.get("failed", "")]
    return row | ({"failed": f"{len(given_up)} kernels took too long"} if given_up else {})


def summary(kernels: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the rows of kernels: which took longest, how many seconds of a core all took, and which could not be built."""
    longest = sorted(kernels, key=lambda row: -row["seconds"])[:5]
    return {
        "kernels": kernels,
        "longest": {f"{one['of']}: {one['kernel']}": one["seconds"] for one in longest},
        "processor": round(sum(one.get("processor", 0.0) for one in kernels), 1),
        "unbuilt": [f"{one['of']}: {one['kernel']}" for one in kernels if one.get("failed")],
    }


def compile_ahead(of: list[str], capability: int, workers: int, seconds: float) -> None:
    """Compile the kernels that these pieces launch, and print a line of JSON for each."""
    cpu = torch.device("cpu")
    with Build(capability, workers, seconds, show=lambda row: print(json.dumps(row), flush=True)) as build:
        # What takes longest goes first.
        for piece in sorted(pieces(), key=lambda piece: piece.gate.op not in ("attend", "mhc_boundary", "attend_band")):
            if piece.gate.has_kernels and any(name.startswith(f"{piece.gate.name}, ") for name in of):
                build.add(piece.gate.name, piece.built.launch)
        for one in micro.MICROS:
            if one.name in of:
                build.add(one.name, lambda one=one: [run.launch() for run in one.runs(cpu, micro.TOY).values()])


def line(row: Row) -> str:
    """One piece in one line."""
    name = row["name"]
    if row.get("failed"):
        return f"{name}: failed: {row['failed']}"
    if "kernels" in row:
        spilled = [f"{one['of']}: {one['kernel']}" for one in row["kernels"] if one.get("stack")]
        longest = ", ".join(f"{what} {seconds:.0f} s" for what, seconds in row["longest"].items())
        found = sum(one.get("found", False) for one in row["kernels"])
        return (
            f"build: {len(row['kernels'])} kernels for sm_{row['capability']} by {row['workers']} processes, {found} "
            f"were there, {row['processor']:.0f} s of a core, {len(row['unbuilt'])} not built; longest {longest}; with "
            f"registers in memory: {', '.join(spilled) or 'none'}"
        )
    if "ceilings" in row:
        roof = row["ceilings"]
        return (
            f"ceilings: {roof['flops'] / 1e12:.3g} TFLOP/s in {roof['dtype']}, {roof['bytes'] / 1e12:.3g} TB/s copied"
        )
    if "line" in row:
        return f"{name}: {row['line']}"
    ours, eager = row["errors"][row["worst"]]
    late = f", compiled late: {', '.join(row['compiled_late'])}" if row["compiled_late"] else ""
    share = f", {row['share_of_floor']:.0%} of {row['floor_ms']:.3g} ms" if "floor_ms" in row else ""
    return (
        f"{name}: {row['verdict']} ({row['worst']} {ours:.1e}, eager {eager:.1e}, {row['compared']}), "
        f"{row['ms']['median']:.4g} ms{share}, {row['implementation']}{late}"
    )


def show(path: Path) -> Path:
    """Publish the table of a file of this stage, and in two lines, for whom it is too long, which pieces are wrong or
    have failed. Raises ValueError if it is no such file."""
    content = read(path, field="name")
    rows = list(content["rows"].values())
    cells = [_cells(row) for row in rows if "errors" in row or row.get("failed")]
    said = "\n".join(f"* {line(row)}" for row in rows if not row.get("failed") and "errors" not in row)
    results.publish(path, results.measured_on(content), table(HEAD, cells), said)
    wrong = [row["name"] for row in rows if str(row.get("verdict", "")).startswith("wrong")]
    failed = [row["name"] for row in rows if row.get("failed")]
    print(f"wrong: {'; '.join(wrong) or 'none'}\nfailed: {'; '.join(failed) or 'none'}")
    return path


def _cells(row: Row) -> tuple[str, ...]:
    seconds = f"{row['seconds']:g}"
    if "errors" not in row:
        return row["name"], f"failed: {row['failed']}", *[""] * (len(HEAD) - 3), seconds
    ours, eager = row["errors"][row["worst"]]
    verdict = f"failed: {row['failed']}" if row.get("failed") else row["verdict"]
    extra, host = (f"{row[key]:.3g}" if row[key] is not None else "" for key in ("extra_mib", "host_ms"))
    numbers = f"{ours:.1e} ({row['worst']})", f"{eager:.1e}", f"{row['ms']['median']:.4g}"
    share = f"{row['share_of_floor']:.0%}" if "floor_ms" in row else ""
    return row["name"], verdict, *numbers, share, extra, host, row["implementation"], seconds


def _alone(gate: Case, toy: Case) -> Piece:
    """Forward alone, whose gate a CPU can take."""
    gate, toy = (replace(case, work={"forward": case.work["forward"]}) for case in (gate, toy))
    return Piece(gate, gate, toy)


def _attended(heads: int, channels: int) -> dict[str, Work]:
    """Of one row, as a token is decoded: its entries, and its query and output."""
    entries = workloads.WIDTH + workloads.PICKS
    moved = 2 * channels * entries + 4 * heads * channels
    return {"forward": Work(4 * heads * channels * entries, moved)}


def _searched(slots: int) -> dict[str, Work]:
    """Of one row's slots, whose keys are read."""
    width = workloads.INDEX_WIDTH
    return {"forward": Work(2 * workloads.INDEX_HEADS * width * slots, 2 * width * slots)}
