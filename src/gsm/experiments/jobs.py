"""The processes of an experiment: started in order, sent the parent's signals, ended with the parent.

A process writes to a file and to no pipe, so a parent that is killed leaves none behind that waits for a reader. Output
to be shown at once is read from the file as it grows.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from gsm.config.handed import hand_on
from gsm.signals import PARENT, answered

if TYPE_CHECKING:  # it takes seconds to import
    from gsm.experiments.runs import Run

PAUSE = 0.1  # seconds between two looks


class Child:
    """The process of a run; the constructor starts it.

    Args:
        run: with its command, and the file for its output.
        environment: variables that differ from this process.
        follow: show the output here too, as it comes.
    """

    def __init__(self, run: Run, environment: Mapping[str, str] | None = None, follow: bool = False) -> None:
        self.log, self.follow, self.since = run.find_log(), follow, time.monotonic()
        self._signals = 0
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as file:
            self._shown = file.tell()
            composed = hand_on(run.config) if run.config else {}
            file.write(f"$ {run.typed}\n".encode())
            file.flush()
            self._process = subprocess.Popen(
                run.command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {}), PARENT: str(os.getpid()), **composed},
                process_group=0,  # so that Ctrl-C reaches it once, through the parent
            )

    def poll(self) -> int | None:
        """Show new output; return the exit code once it has ended, negative for the signal that ended it."""
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
        """Send the signals of the parent that it has not got yet."""
        for number in signals[self._signals :]:
            self._process.send_signal(number)
        self._signals = len(signals)

    def seconds(self) -> float:
        """Return the time since its start."""
        return time.monotonic() - self.since


def tail(log: Path, lines: int = 15) -> list[str]:
    """Return the last lines of a run's output since its latest start; none where there is no file."""
    if not log.is_file():
        return []
    text = log.read_bytes().decode(errors="replace")
    return text[text.rfind("\n$ ") + 1 :].splitlines()[-lines:]


def work_off(
    runs: Sequence[Run],
    at_once: int,
    start: Callable[[Run], Child],
    ended: Callable[[Run, int | None, Child | None], None],
) -> int | None:
    """Start runs in order, at most ``at_once`` at a time, each after the run that it depends on.

    Skip a run that is finished when its turn comes, and a run that depends on a failed one.

    Args:
        runs: with every run that one of them depends on, unless that is finished.
        at_once: 1 or more.
        start: starts a run, and returns its process.
        ended: is called with each run, its exit code and its process. A skipped run has no process; its code is 0 if it
            was finished, None if it depends on a failed one.

    Returns:
        None once all have ended by themselves. After a signal, its number: all processes received it and have ended,
        and no further run was started.
    """
    waiting, failed = list(runs), set()
    running: dict[Run, Child] = {}
    with _signals() as signals:
        while running or (waiting and not signals):
            for run in list(waiting):
                if run.after in failed:
                    waiting.remove(run)
                    failed.add(run)
                    ended(run, None, None)
                elif len(running) < at_once and not signals and run.after not in {*waiting, *running}:
                    waiting.remove(run)
                    if run.finished():
                        ended(run, 0, None)
                    else:
                        running[run] = start(run)
            for run, child in list(running.items()):
                child.forward(signals)
                code = child.poll()
                if code is None:
                    continue
                del running[run]
                if code:
                    failed.add(run)
                else:
                    run.conclude()
                ended(run, code, child)
            time.sleep(PAUSE if running else 0)
        return signals[0] if signals else None


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Yield the signals that arrive meanwhile, in a list that grows."""
    arrived: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    before = {number: signal.signal(number, remember) for number in answered()}
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
