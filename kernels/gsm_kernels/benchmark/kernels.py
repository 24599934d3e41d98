"""One row for every operation and direction: its time, its share of the floor, and its peers in the same run.

On a GPU at the sizes that goals are set for; on a CPU the attention of small models, forward. First all rows are
measured alone, which takes a minute or two, then again in turns with their peers, which takes most of the time to
compile: wherever that ends, the file holds our times of everything.
"""

from __future__ import annotations

import functools
import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gsm_kernels

from ..dispatch import listening
from ..testing import relative_error
from . import attention_peers, ceilings, machine, peers, timing
from .peer import Absent
from .report import line, markdown
from .results import Errors, Results, sentence, usual_path
from .workloads import Call, Case, gates, on_a_cpu

OURS = "ours"
FIXED = ("cos_BRP", "sin_BRP")  # floating-point arguments without a gradient
# Relative error in bfloat16 beyond which a peer computes something else; gradients pass through a rounded result.
TOLERANCE = {"forward": 2e-2, "backward": 5e-2, "both": 5e-2}
ALONE = 2.0  # seconds of a row that is measured alone, at most


def run(
    device: str = "auto",
    cases: Sequence[Case] | None = None,
    only: str = "",
    peers: bool = True,
    without: Iterable[str] = (),
    output: str = "",
    force: bool = False,
    minutes: float = 7.5,
    seconds: float = 10.0,
    rounds: int = 30,
) -> Path:
    """Measure, writing each row as it is known; return the file.

    Args:
        device: cpu, cuda; auto: a GPU if there is one.
        cases: what is measured; None: what suits the device.
        only: measure those alone whose name begins so.
        peers: whether rows are measured again with their peers, once each was measured alone.
        without: peers that are left out. A row that did not end, or failed, is tried again behind the others, and
            without any peer.
        output: the file; left out: benchmarks/results/<device>-kernels.json.
        force: also what the file holds already.
        minutes: after which nothing new is begun; the same command then goes on.
        seconds: of a row with its peers, after which no round of it is begun.
        rounds: of a row, at most.

    Raises:
        ValueError: there is no such device or case, or the file is no file of results.
        Exception: the first that went wrong outside of the contest, once the other rows were measured; machine.Lost at
            once, where the GPU takes no more work from this process.
    """
    where = machine.chosen(device)
    cases = cases if cases is not None else gates() if where.type == "cuda" else on_a_cpu()
    wanted = [case for case in cases if case.name.startswith(only)]
    if not wanted:
        raise ValueError(f"no case begins with '{only}'; there are {', '.join(case.name for case in cases)}")
    facts = machine.facts(where)
    results = Results(Path(output) if output else usual_path(facts, "kernels"), facts)
    plan = _Plan(results, wanted, where, time.monotonic(), minutes, rounds)
    alone = [name for name in plan.rows if not plan.has(name) or (force and not peers)]
    both = [name for name in plan.rows if force or not plan.is_complete(name)] if peers else []
    print(f"{facts['device']}: of {len(plan.rows)} rows, {len(alone)} to measure alone, ", end="")
    print(f"{len(both)} with their peers, to {results.path}", flush=True)
    try:
        if plan.measure_alone(alone, min(seconds, ALONE)):
            plan.measure_with_peers(both, tuple(without), seconds)
    finally:
        if results.rows:
            results.path.with_suffix(".md").write_text(markdown(results.path), encoding="utf-8")
    plan.errors.raise_first()
    return results.path


class _Plan:
    """The rows of a file, till the minutes are over. What goes wrong in a row is raised when the others are measured;
    machine.Lost at once, where the GPU takes no more work from this process."""

    def __init__(
        self, results: Results, cases: Iterable[Case], device: torch.device, began: float, minutes: float, rounds: int
    ) -> None:
        self.results, self.device, self.began, self.minutes, self.rounds = results, device, began, minutes, rounds
        self.rows = {f"{case.name}, {direction}": (case, direction) for case in cases for direction in case.work}
        self.sources = {op: machine.fingerprint(machine.sources_of(op)) for op in {case.op for case in cases}}
        self.errors = Errors()

    def has(self, name: str) -> bool:
        """Whether the file has this row, measured alone at least."""
        return self.results.has(name, sources=self.sources[self.rows[name][0].op])

    def is_complete(self, name: str) -> bool:
        """Whether the peers of this row had their chance."""
        return self.has(name) and not self.results.rows[name].get("alone")

    def measure_alone(self, names: Iterable[str], seconds: float) -> bool:
        """These rows without peers; whether there was time for all."""
        for name in self._in_time(names):
            with self.results.trying(name):
                self._add(name, {**self._measured(name, None, seconds), "peers": {}, "alone": True})
            machine.still_alive(name)
        return not self._is_over()

    def measure_with_peers(self, names: Iterable[str], without: Iterable[str], seconds: float) -> None:
        """Those of these rows that could be measured alone. Where that fails or ends the process, the row stays what it
        was alone, and the next time its peers are left out."""
        for name in self._in_time([name for name in names if self.has(name)]):
            before = self.results.rows[name]
            why = before.get("unfinished") or ("it did not end" if self.results.times(name) else None)
            spared = before.get("alone") and why is not None
            with self.results.trying(name):
                row = self._measured(name, None if spared else without, seconds)
                if row.get("failed"):
                    row = {**before, "unfinished": row["failed"]}
                self._add(name, {**row, "unfinished": why} if spared else row)
            machine.still_alive(name)

    def _measured(self, name: str, without: Iterable[str] | None, seconds: float) -> dict[str, Any]:
        """As `measure`; of what went wrong outside of the contest, a row that says so."""
        case, direction = self.rows[name]
        try:
            return measure(case, direction, self.device, self.roof, without, self.rounds, seconds)
        except Exception as error:  # whatever it is, the row says it, and it is raised when the others are measured
            self.errors.note(error)
            known = {"case": case.name, "direction": direction, "ceilings": self.roof._asdict()}
            return {**known, **_nothing(sentence(error))}

    def _add(self, name: str, row: Mapping[str, Any]) -> None:
        self.results.add(name, {**row, "sources": self.sources[self.rows[name][0].op]})
        print(line(self.results.rows[name]), flush=True)

    def _in_time(self, names: Iterable[str]) -> Iterator[str]:
        """Those that were tried least first, till the time is over."""
        left = sorted(names, key=self.results.times)
        for number, name in enumerate(left):
            if self._is_over():
                print(f"{self.minutes:g} minutes are over and {len(left) - number} rows left: the same command goes on")
                return
            yield name

    def _is_over(self) -> bool:
        return time.monotonic() - self.began > 60 * self.minutes

    @functools.cached_property
    def roof(self) -> ceilings.Ceilings:
        """Of the device, measured when it is first asked for."""
        return ceilings.measure(self.device)


def measure(
    case: Case,
    direction: str,
    device: torch.device,
    roof: ceilings.Ceilings,
    without: Iterable[str] | None = (),
    rounds: int = 30,
    seconds: float = 10.0,
) -> dict[str, Any]:
    """The row of one case in one direction, as plain containers; `without` None: without any peer.

    Raises:
        machine.Lost: the GPU takes no more work from this process.
    """
    gc.collect()  # what the row before has left
    torch.manual_seed(0)
    torch.compiler.reset()  # which compiles a function for so many calls alone, and then no more
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with timing.own_stream(device):
        contest, work = Contest(case.op, case.make(device, dtype), direction), case.work[direction].at(dtype)
        contest.enter_all(without)
        row = {"case": case.name, "direction": direction, **work._asdict(), "floor_ms": roof.floor(*work)}
        row |= {"ceilings": roof._asdict(), "implementation": contest.chosen}
        row |= {"reason": getattr(gsm_kernels, case.op).explain()[1]}
        if OURS not in contest.runs:
            return {**row, **_nothing(contest.absent[OURS])}
        extra = {name: _mib(timing.extra_bytes(run, device)) for name, run in contest.runs.items()}
        times = timing.kernel_turns(contest.runs, device, rounds, seconds)
    found = {name: {**_shown(timed), "extra_mib": extra[name]} for name, timed in times.items()}
    ours, median = found.pop(OURS), times[OURS].spread.median
    compared = {name: {**one, "ratio": one["ms"]["median"] / median} for name, one in found.items()}
    absent = {name: {"absent": reason} for name, reason in contest.absent.items()}
    row |= {**ours, "share_of_floor": row["floor_ms"] / median, "peers": compared | absent}
    return {**row, "clocks": machine.clocks(device)}


def _shown(timed: timing.Timed) -> dict[str, Any]:
    """How long it takes, how that was timed, and how long the host takes to launch it."""
    return {"ms": timed.spread._asdict(), "timed": timed.how, "host_ms": timed.host_ms}


def _nothing(reason: str) -> dict[str, Any]:
    """What a row holds of which nothing was measured."""
    unknown = dict.fromkeys(["ms", "share_of_floor", "extra_mib", "clocks"])
    return {"implementation": "none", **unknown, "peers": {}, "failed": reason}


@dataclass
class Contest:
    """Who takes part in a row.

    Attributes:
        op, call, direction: what everybody computes.
        chosen: the implementation that ours is.
        runs: who takes part, compiled and compared with ours.
        absent: why others do not.
    """

    op: str
    call: Call
    direction: str
    chosen: str = "none"
    runs: dict[str, Callable[[], Any]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def enter_all(self, without: Iterable[str] | None) -> None:
        """Ours, and unless that fails the peers, except those that are to be left out (None: all)."""
        with listening() as heard:
            self.enter(OURS, lambda _: getattr(gsm_kernels, self.op))
        if OURS not in self.runs:
            return
        self.chosen = heard[0][1]
        expected = _tensors(self.runs[OURS]())
        for name, maker in peers.peers_of(self.op, self.call).items():
            if without is None:
                self.absent[name] = "left out, since the row has failed or did not end before"
            elif name == "eager" and self.chosen == "reference":
                self.absent[name] = "it is what ran"
            elif name not in set(without):
                self.enter(name, maker, None if attention_peers.NO_SINK in name else expected)

    def enter(
        self, name: str, maker: Callable[[Call], Callable[..., Any]], expected: list[Tensor] | None = None
    ) -> None:
        """Take part, once results were compared with what is expected. Raises machine.Lost."""
        try:
            run = bound(maker(self.call), self.call, self.direction)
            found = _tensors(run())
            machine.still_alive(name)
            error = 0.0 if expected is None else _difference(found, expected)
            if error > TOLERANCE[self.direction]:
                raise Absent(f"its result differs by {error:.1e}")
            self.runs[name] = run
        except machine.Lost:
            raise
        except Absent as reason:
            self.absent[name] = str(reason)
        except torch.cuda.OutOfMemoryError:
            self.absent[name] = "out of memory"
        except Exception as error:  # whatever other people's kernels and compilers raise is a result like any other
            machine.still_alive(f"{name} ({sentence(error)})")
            self.absent[name] = sentence(error)


def bound(function: Callable[..., Any], call: Mapping[str, Any], direction: str) -> Callable[[], Any]:
    """A function of nothing that runs one direction on these arguments; for `backward` the forward has run already."""
    if direction == "forward":
        return lambda: _without_gradient(function, call)
    leaves = {key: _leaf(key, value) for key, value in call.items()}
    wanted = [x for x in leaves.values() if isinstance(x, Tensor) and x.requires_grad]

    def forward() -> tuple[list[Tensor], list[Tensor]]:
        outputs = [x for x in _tensors(function(**leaves)) if x.requires_grad]
        return outputs, [torch.ones_like(x) if x.ndim == 0 else _like(x) for x in outputs]

    def backward(outputs: list[Tensor], gradients: list[Tensor]) -> Any:
        return torch.autograd.grad(outputs, wanted, gradients, retain_graph=True, allow_unused=True)

    if direction == "both":
        return lambda: backward(*forward())
    ready = forward()
    return lambda: backward(*ready)


def _without_gradient(function: Callable[..., Any], call: Mapping[str, Any]) -> Any:
    with torch.no_grad():
        return function(**call)


def _leaf(name: str, value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().requires_grad_(name not in FIXED) if floating else value


def _like(x: Tensor) -> Tensor:
    """Random numbers, the same for all who return this shape."""
    generator = torch.Generator(x.device).manual_seed(x.numel())
    return torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)


def _tensors(result: Any) -> list[Tensor]:
    return [x for x in ([result] if isinstance(result, Tensor) else result) if x is not None]


def _difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest relative error, or share of other slots; infinite where something is missing."""
    if [x.shape for x in found] != [x.shape for x in expected]:
        return math.inf
    pairs = zip(found, expected, strict=True)
    errors = [relative_error(x, y) if y.is_floating_point() else _other_slots(x, y) for x, y in pairs]
    return max((math.inf if math.isnan(error) else error for error in errors), default=0.0)


def _other_slots(found_BRK: Tensor, expected_BRK: Tensor) -> float:
    """Share of slots, -1 = none, that are not among the expected ones of their row; each is there once."""
    none_K = -1 - torch.arange(found_BRK.shape[-1], device=found_BRK.device)
    both = torch.cat([torch.where(x < 0, none_K, x) for x in (found_BRK, expected_BRK)], -1).sort(-1).values
    shared = (both[..., 1:] == both[..., :-1]).sum().item()
    return 1 - shared / max(1, found_BRK.numel())


def _mib(size: int | None) -> float | None:
    return None if size is None else size / 2**20
