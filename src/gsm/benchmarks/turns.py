"""Cases measured in turns: the runs of all that fit beside each other alternate, so that what disturbs a machine for a
while disturbs all of them, and their ratios stay what they are."""

from __future__ import annotations

import gc
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gsm.benchmarks.requests import KINDS, MEMORIES, Protocol, Request, Served
from gsm.benchmarks.room import available_bytes, out_of_memory
from gsm_kernels.benchmark.results import Errors, sentence

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """What is measured: ``read``, a whole request; ``unpruned``, a prompt of which every layer computes every row;
    ``decode``, given tokens alone, after a synthetic memory."""

    model: str
    tokens: int
    kind: str

    def name(self, protocol: Protocol) -> str:
        """The name of its row."""
        at_once = f"{protocol.batch} x " if protocol.batch > 1 else ""
        return f"{self.model} {protocol.size}, {at_once}{short(self.tokens)}, {self.kind}"


class Entrant:
    """A case in its turn: a request that runs, or the reason why it does not."""

    def __init__(self, case: Case, served: Served) -> None:
        self.case, self.served = case, served
        self.request: Request | None = None
        self.failed: str | None = None
        self.error: Exception | None = None
        self.spent = 0.0  # seconds

    def fits(self) -> bool:
        """Whether there is memory for it now."""
        need = self.served.room.needed(self.case.tokens, MEMORIES[self.case.kind])
        return need <= available_bytes(self.served.device)

    def begin(self) -> None:
        """Makes the request ready; refuses one for which there is no memory, before the machine suffers from it."""
        if self.fits():
            self._attempt(self._prepare)
        else:
            self._refuse()

    def run(self, timed: bool) -> None:
        """One run, unless it has failed, or its time is over and it has been timed."""
        over = self.spent > self.served.protocol.seconds
        if self.request is None or over and (self.request.times or not timed):
            return
        start = time.monotonic()
        self._attempt(lambda: self._run(timed))
        self.spent += time.monotonic() - start

    def row(self) -> Row:
        """What was found, and how much memory a request takes, for the next one."""
        row = {"model": self.case.model, "tokens": self.case.tokens, "kind": self.case.kind}
        if self.request is not None:
            self._attempt(lambda: self._find(row))
        if self.request is None:
            return {**row, **self.served.facts(), "failed": self.failed}
        if self.case.kind == "read":
            self.served.room.learn(self.request.extra, self.case.tokens)
        return row

    def _prepare(self) -> None:
        self.request = KINDS[self.case.kind](self.served, self.case.tokens)

    def _run(self, timed: bool) -> None:
        assert self.request is not None  # ``run`` has looked, and must not hold on to it
        self.request.run(timed)

    def _find(self, row: Row) -> None:
        assert self.request is not None  # as above
        row |= self.request.row()

    def _attempt(self, call: Callable[[], None]) -> None:
        """Runs a call; of what goes wrong, only what has lost the GPU concerns the others."""
        errors = Errors()
        with errors.kept(f"{self.case.model}, {short(self.case.tokens)}, {self.case.kind}"):
            if _finds_room(call):
                return
        self.request, self.error = None, errors.first
        _free()
        if self.error is None:
            self._refuse(tried=True)
        else:
            self.failed = sentence(self.error)

    def _refuse(self, tried: bool = False) -> None:
        there = available_bytes(self.served.device)
        self.failed = self.served.room.refusal(self.case.tokens, there, MEMORIES[self.case.kind], tried)


def take_turns(cases: Sequence[Case], served: Callable[[str], Served]) -> Iterator[tuple[Case, Row]]:
    """The row of every case; of one that does not fit, a row that says what would.

    Args:
        cases: of one length.
        served: the models by name, each made when it is first asked for, and kept.

    Raises:
        Exception: the first that is no lack of memory, after all rows, of which its own says it too.
        machine.Lost: at once, where the GPU takes no more work from this process.
    """
    waiting, errors = [], Errors()
    for case in cases:
        failed = "the model could not be made: see the error above"
        with errors.kept(case.model):
            fits = _finds_room(partial(served, case.model))
            failed = None if fits else "out of memory: the weights do not fit; try a smaller size or dtype"
        if failed is None:
            waiting.append(case)
        else:
            _free()
            yield case, {**vars(case), "failed": failed}
    while waiting:
        turn, waiting = _turn(waiting, served)
        _alternate(turn)
        mark = uuid.uuid4().hex  # of rows whose runs alternated: ratios are taken run by run
        yield from ((entrant.case, {**entrant.row(), "turn": mark}) for entrant in turn)
        errors.first = errors.first or next((entrant.error for entrant in turn if entrant.error), None)
        turn = []
        _free()
    errors.raise_first()


def short(tokens: int) -> str:
    """256, 4K, 256K."""
    return f"{tokens // 1024}K" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


def _turn(cases: Sequence[Case], served: Callable[[str], Served]) -> tuple[list[Entrant], list[Case]]:
    """Those that there is memory for at once, at least one of them, and those that wait until these are done."""
    turn, later = [], []
    for case in cases:
        entrant = Entrant(case, served(case.model))
        if any(other.request for other in turn) and not entrant.fits():
            later.append(case)
        else:
            entrant.begin()
            turn.append(entrant)
    return turn, later


def _alternate(turn: Sequence[Entrant]) -> None:
    """All runs; the one that begins changes from round to round."""
    protocol = turn[0].served.protocol
    for number in range(protocol.warm_up + protocol.runs):
        first = number % len(turn)
        for entrant in (*turn[first:], *turn[:first]):
            entrant.run(number >= protocol.warm_up)


def _finds_room(call: Callable[[], object]) -> bool:
    """Runs a call; whether there was memory for it. Afterwards no error holds on to what the call had taken."""
    try:
        call()
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return False
    return True


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
