"""One row for every operation and direction: its time, its share of the floor, and its peers in the same run.

On a GPU at the sizes that goals are set for; on a CPU the attention of small models, forward. First all rows are
measured alone, which takes a minute or two, then again in turns with their peers, which takes most of the time to
compile: wherever that ends, the file holds our times of everything.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gsm_kernels
from gsm_kernels.dispatch import listening

from . import kernels_report, machine, peers, timing
from .peers import NO_SINK, Absent
from .results import Asked, Errors, Results, sentence
from .workloads import Call, Case, bound, difference, gates, on_a_cpu

OURS = "ours"
# Relative error in bfloat16 beyond which a peer computes something else; gradients pass through a rounded result.
TOLERANCE = {"forward": 2e-2, "backward": 5e-2, "both": 5e-2}
ALONE = 2.0  # seconds of a row that is measured alone, at most


def run(
    only: str = "",
    peers: bool = True,
    without: Sequence[str] = (),
    seconds: float = 10.0,
    rounds: int = 30,
    cases: Sequence[Case] | None = None,
    **asked: Any,
) -> Path:
    """Measure, writing each row as it is known, then print the table and draw the picture; return the JSON file.

    Args: as in configs/benchmark/kernels.yaml and configs/benchmark.yaml, which say what they mean; and `cases`, what
    is measured (None: what suits the device). A row that did not end, or failed, is tried again behind the others, and
    without any peer.

    Raises:
        ValueError: there is no such device or case, or the file is none of results.
        Exception: the first that went wrong outside of the contest, once the other rows were measured; machine.Lost at
            once, where the GPU takes no more work from this process.
    """
    how = Asked(**asked)
    if how.results:
        return kernels_report.show(Path(how.results))
    where = machine.chosen(how.device)
    cases = cases if cases is not None else gates() if where.type == "cuda" else on_a_cpu()
    wanted = [case for case in cases if case.name.startswith(only)]
    if not wanted:
        raise ValueError(f"no case begins with '{only}'; there are {', '.join(case.name for case in cases)}")
    file = how.open("kernels", where)
    plan = _Plan(file, wanted, where, rounds)
    alone = [name for name in plan.rows if not file.has(name) or (how.force and not peers)]
    both = [name for name in plan.rows if how.force or not plan.is_complete(name)] if peers else []
    print(f"{file.facts['device']}: of {len(plan.rows)} rows, {len(alone)} to measure alone, ", end="")
    print(f"{len(both)} with their peers, to {file.path}", flush=True)
    try:
        plan.measure_alone(alone, min(seconds, ALONE))
        if not file.is_over():
            plan.measure_with_peers(both, tuple(without), seconds)
    finally:
        if file.rows:
            kernels_report.show(file.path)
    plan.errors.raise_first()
    return file.path


class _Plan:
    """The rows of a file. What goes wrong in a row is raised when the others are measured; machine.Lost at once, where
    the GPU takes no more work from this process."""

    def __init__(self, results: Results, cases: Iterable[Case], device: torch.device, rounds: int) -> None:
        self.results, self.device, self.rounds = results, device, rounds
        self.rows = {f"{case.name}, {direction}": (case, direction) for case in cases for direction in case.work}
        of_op = {op: machine.fingerprint(machine.sources_of(op)) for op in {case.op for case, _ in self.rows.values()}}
        results.sources |= {name: of_op[case.op] for name, (case, _) in self.rows.items()}
        self.errors = Errors()

    def is_complete(self, name: str) -> bool:
        """Whether the peers of this row had their chance."""
        return self.results.has(name) and not self.results.rows[name].get("alone")

    def measure_alone(self, names: Iterable[str], seconds: float) -> None:
        """These rows without peers, as far as there is time."""
        for name in self.results.in_time(names):
            with self.results.trying(name):
                self._add(name, {**self._measured(name, None, seconds), "peers": {}, "alone": True})
            machine.still_alive(name)

    def measure_with_peers(self, names: Iterable[str], without: Iterable[str], seconds: float) -> None:
        """Those of these rows that could be measured alone. Where that fails or ends the process, the row stays what it
        was alone, and the next time its peers are left out."""
        for name in self.results.in_time([name for name in names if self.results.has(name)]):
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
        self.results.add(name, row)
        print(kernels_report.line(self.results.rows[name]), flush=True)

    @functools.cached_property
    def roof(self) -> timing.Ceilings:
        """Of the device, measured when it is first asked for."""
        return timing.ceilings(self.device)


def measure(
    case: Case,
    direction: str,
    device: torch.device,
    roof: timing.Ceilings,
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
        found = timing.measured(contest.runs, device, rounds, seconds)
    ours = found.pop(OURS)
    median = ours["ms"]["median"]
    compared = {name: {**one, "ratio": one["ms"]["median"] / median} for name, one in found.items()}
    absent = {name: {"absent": reason} for name, reason in contest.absent.items()}
    row |= {**ours, "share_of_floor": row["floor_ms"] / median, "peers": compared | absent}
    return {**row, "clocks": machine.clocks(device)}


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
    runs: dict[str, Callable[[], Call]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def enter_all(self, without: Iterable[str] | None) -> None:
        """Ours, and unless that fails the peers, except those that are to be left out (None: all)."""
        with listening() as heard:
            self.enter(OURS, lambda _: getattr(gsm_kernels, self.op))
        if OURS not in self.runs:
            return
        self.chosen = heard[0][1]
        expected = self._judged(self.runs[OURS])
        for name, maker in peers.peers_of(self.op, self.call).items():
            if without is None:
                self.absent[name] = "left out, since the row has failed or did not end before"
            elif name == "eager" and self.chosen == "reference":
                self.absent[name] = "it is what ran"
            elif name not in set(without):
                self.enter(name, maker, None if NO_SINK in name else expected)

    def _judged(self, run: Callable[[], Call]) -> list[Tensor]:
        """What is compared: outputs of forward alone, else gradients."""
        return [x for name, x in run().items() if self.direction == "forward" or name.startswith("d ")]

    def enter(
        self, name: str, maker: Callable[[Call], Callable[..., Any]], expected: list[Tensor] | None = None
    ) -> None:
        """Take part, once results were compared with what is expected. Raises machine.Lost."""
        try:
            run = bound(maker(self.call), self.call, self.direction)
            found = self._judged(run)
            machine.still_alive(name)
            error = 0.0 if expected is None else difference(found, expected)
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
