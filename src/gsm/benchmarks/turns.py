"""Cases measured in turns: the runs of all that fit beside each other alternate, so that what disturbs a machine for a
while disturbs all of them, and their ratios stay what they are."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gsm.benchmarks.requests import KINDS, MEMORIES, Protocol, Request, Served
from gsm.benchmarks.room import available_bytes

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
        request, over = self.request, self.spent > self.served.protocol.seconds
        if request is None or over and (request.times or not timed):
            return
        start = time.monotonic()
        self._attempt(lambda: request.run(timed))
        self.spent += time.monotonic() - start

    def row(self) -> Row:
        """What was found, and how much memory a request takes, for the next one."""
        row = {"model": self.case.model, "tokens": self.case.tokens, "kind": self.case.kind}
        if self.request is not None:
            found = self.request.row()
            if self.case.kind == "read":
                self.served.room.learn(self.request.extra, self.case.tokens)
            return {**row, **found}
        return {**row, **self.served.facts(), "failed": self.failed}

    def _prepare(self) -> None:
        self.request = KINDS[self.case.kind](self.served, self.case.tokens)

    def _attempt(self, call: Callable[[], None]) -> None:
        try:
            call()
        except RuntimeError as error:
            if not (isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)):
                raise
            self.request = None
            _free()
            self._refuse()

    def _refuse(self) -> None:
        there = available_bytes(self.served.device)
        self.failed = self.served.room.refusal(self.case.tokens, there, MEMORIES[self.case.kind])


def take_turns(cases: Sequence[Case], served: Callable[[str], Served]) -> Iterator[tuple[Case, Row]]:
    """The row of every case; of one that does not fit, a row that says what would.

    Args:
        cases: of one length.
        served: the models by name.
    """
    waiting = list(cases)
    while waiting:
        turn, waiting = _turn(waiting, served)
        protocol = turn[0].served.protocol
        for number in range(protocol.warm_up + protocol.runs):
            first = number % len(turn)
            for entrant in (*turn[first:], *turn[:first]):
                entrant.run(number >= protocol.warm_up)
        yield from [(entrant.case, entrant.row()) for entrant in turn]
        turn = []
        _free()


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


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
