"""Jobs: what an experiment starts as processes of their own, and the runner that works them off, here or on a cluster.

A process writes to a file, not to a pipe: a parent that is killed leaves none behind that waits for a
reader. What is to be seen at once is read from the file as it grows.
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
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from gsm.signals import SIGNALS

PARENT = "GSM_PARENT"
THROUGH = (sys.executable, "-m", "gsm.experiments.jobs")  # what becomes a program that knows nothing of its parent
PDEATHSIG = 1  # of Linux' prctl
PAUSE = 0.1  # seconds between two looks


@dataclass(frozen=True, eq=False)
class Job:
    """One process: what starts it, where its output goes, and which job has to be finished before.

    Attributes:
        name: no other has it.
        command: as words.
        log: the file that its output is added to; made with its folder.
        after: the job whose weights it takes; None: it waits for nothing.
        starter: whether the command starts others that do the work, as torchrun does, which may itself be a Python.
    """

    name: str
    command: tuple[str, ...]
    log: Path
    after: Job | None = None
    starter: bool = field(default=False, kw_only=True)

    def finished(self) -> bool:
        """Whether its results are there already."""
        return False

    def conclude(self) -> None:
        """Called by whoever has run it, after exit code 0. Raises OSError."""


class Child:
    """The process of a job, started by making this.

    Args:
        job: what to start.
        environment: what differs from this process.
        follow: show the output here too, as it comes.
    """

    def __init__(self, job: Job, environment: Mapping[str, str] | None = None, follow: bool = False) -> None:
        job.log.parent.mkdir(parents=True, exist_ok=True)
        self.log, self.follow, self.since = job.log, follow, time.monotonic()
        self._starts_others = job.starter
        self._signals = 0
        self._ending = False
        with job.log.open("ab") as file:
            self._begin = self._shown = file.tell()
            file.write(f"$ {shlex.join(job.command)}\n".encode())
            file.flush()
            self._process = subprocess.Popen(
                (*THROUGH, *job.command) if self._starts_others else job.command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {}), **self._known()},
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
            if self._starts_others and number == signal.SIGINT:
                number = signal.SIGTERM  # srun answers the first Ctrl-C by telling how its tasks are
            self._process.send_signal(number)
        self._signals = len(signals)

    def end(self) -> None:
        """Asks it to end, once."""
        if not self._ending:
            self._process.terminate()
        self._ending = True

    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self.since

    def tail(self) -> list[str]:
        """The last lines that it has written."""
        return tail(self.log, self._begin)

    def _known(self) -> dict[str, str]:
        """What it is told by its environment: its parent, so that it leaves with it; torchrun, which signals it passes
        on to those that it starts (the default of its --signals-to-handle)."""
        known = {PARENT: str(os.getpid())}
        if self._starts_others:
            known["PET_SIGNALS_TO_HANDLE"] = ",".join(number.name for number in SIGNALS)
        return known


def tail(log: Path, begin: int = 0, lines: int = 15) -> list[str]:
    """The last lines of a file, of those from the byte ``begin`` on; none where there is no file."""
    if not log.is_file():
        return []
    with log.open("rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace").splitlines()[-lines:]


def work_off(
    jobs: Sequence[Job],
    at_once: int,
    start: Callable[[Job], Child],
    ended: Callable[[Job, int | None, Child | None], None],
    stops: Callable[[Job], bool] = lambda job: False,
) -> int | None:
    """Runs jobs, the first ones first, each after the one that it waits for, ``at_once`` at a time.

    What turns out to be finished when its turn comes is not started, and what waits for a job that failed never is.

    Args:
        jobs: a job that one of them waits for is finished, or one of them.
        at_once: 1 or more.
        start: starts one.
        ended: is called with a job, its exit code and its process. Without a process: code 0 stands for one that was
            finished, None for one that could not be started.
        stops: is asked, while a job runs, whether it is to end now.

    Returns:
        None when all have ended by themselves. After a signal, its number: it went to the processes, the last of which
        has ended too, and no other was started.
    """
    waiting, running, failed = list(jobs), dict[Job, Child](), set[Job]()
    with _signals() as signals:
        while running or (waiting and not signals):
            for job in list(waiting):
                if job.after in failed:
                    waiting.remove(job)
                    failed.add(job)
                    ended(job, None, None)
                elif len(running) < at_once and not signals and job.after not in {*waiting, *running}:
                    waiting.remove(job)
                    if job.finished():
                        ended(job, 0, None)
                    else:
                        running[job] = start(job)
            for job, child in list(running.items()):
                child.forward(signals)
                code = child.poll()
                if code is None:
                    if stops(job):
                        child.end()
                    continue
                del running[job]
                if code:
                    failed.add(job)
                else:
                    job.conclude()
                ended(job, code, child)
            time.sleep(PAUSE if running else 0)
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


if __name__ == "__main__":
    leave_with_parent()
    os.execvp(sys.argv[1], sys.argv[1:])  # the signal that it leaves by outlives this
