"""Processes that a parent starts and watches: their output goes to a file, their signals come from the parent.

The file, not a pipe, is what a child writes to: a parent that is killed or stopped leaves no child behind that waits
for a reader. What is to be seen at once is read from the file as it grows.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from gsm.signals import SIGNALS

PARENT = "GSM_PARENT"
PDEATHSIG = 1  # of Linux' prctl
PAUSE = 0.1  # seconds between two looks


class Child:
    """One process, started by making this.

    Args:
        command: as a list of words.
        log: the file that its output is added to; made with its folder.
        environment: what differs from this process.
        follow: show the output here too, as it comes.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str], follow: bool) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log, self.follow, self.since = log, follow, time.monotonic()
        self._signals = 0
        with log.open("ab") as file:
            self._begin = self._shown = file.tell()
            file.write(f"$ {shlex.join(command)}\n".encode())
            file.flush()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment, PARENT: str(os.getpid())},
                process_group=0,  # so that Ctrl-C reaches it once, through the parent
            )

    def poll(self) -> int | None:
        """Shows what is new; the exit code once it has ended, negative for the signal that ended it."""
        code = self._process.poll()
        if self.follow:
            with self.log.open("rb") as file:
                file.seek(self._shown)
                new = file.read()
            self._shown += len(new)
            sys.stdout.write(new.decode(errors="replace"))
            sys.stdout.flush()
        return code

    def forward(self, signals: Sequence[int]) -> None:
        """Sends those of the parent's signals that it has not got yet."""
        for number in signals[self._signals :]:
            self._process.send_signal(number)
        self._signals = len(signals)

    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self.since

    def tail(self) -> list[str]:
        """The last lines that it has written."""
        return tail(self.log, self._begin)


def tail(log: Path, begin: int = 0, lines: int = 15) -> list[str]:
    """The last lines of a file, of those from the byte ``begin`` on. Raises OSError."""
    with log.open("rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace").splitlines()[-lines:]


def work_off(tasks: Sequence[Callable[[], Child]], jobs: int, ended: Callable[[int, Child, int], None]) -> int | None:
    """Runs processes in this order, ``jobs`` at a time.

    Args:
        tasks: each starts one.
        jobs: 1 or more.
        ended: is called with a task's number, its process and exit code.

    Returns:
        None when all have ended by themselves. After a signal, its number: it went to the processes, the last of which
        has ended too, and no other was started.
    """
    waiting = list(enumerate(tasks))
    running: dict[int, Child] = {}
    with _signals() as signals:
        while running or waiting and not signals:
            while waiting and len(running) < jobs and not signals:
                number, start = waiting.pop(0)
                running[number] = start()
            for number, child in list(running.items()):
                child.forward(signals)
                code = child.poll()
                if code is not None:
                    del running[number]
                    ended(number, child, code)
            time.sleep(PAUSE)
        return signals[0] if signals else None


def leave_with_parent() -> None:
    """In a child, on Linux: asks for SIGTERM when the parent is no more, however it went. Elsewhere it trains on."""
    parent = os.environ.pop(PARENT, None)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it was gone before one could ask
        raise SystemExit(128 + signal.SIGTERM)


@contextlib.contextmanager
def leaving_with_this() -> Iterator[None]:
    """Whoever is started meanwhile, not by ``Child``, but by Lightning as another rank, leaves with this process too.

    One that was still on its way, when the leading rank was killed, would look for it for half an hour.
    """
    before = os.environ.get(PARENT)
    os.environ[PARENT] = str(os.getpid())
    try:
        yield
    finally:
        if before is None:
            del os.environ[PARENT]
        else:
            os.environ[PARENT] = before


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """The signals that arrive meanwhile, in a list that grows."""
    arrived: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    before = {number: signal.signal(number, remember) for number in SIGNALS}
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
