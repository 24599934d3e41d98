"""Commands that are killed at a random moment and given again: they end with the files of an undisturbed run.

What is killed is train.py, or one of the processes that it has started; whoever is left has to end by itself.
``GSM_TEST_KILLS=4 pytest tests/test_kills.py -m ''`` kills each kind of command four times; ``GSM_TEST_SEED`` chooses
when.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from short_runs import TINY, be_the_script, called, logged, no_death, scalars
from stored import same

KILLS, SEED = int(os.environ.get("GSM_TEST_KILLS", "1")), int(os.environ.get("GSM_TEST_SEED", "0"))
LONGEST = 900  # seconds that a command may take; on busy cores it takes a hundred
RUNS = (
    "{train: {}, extend: {after: train, trainer.max_steps: 2, optimizer.learning_rate: 0.01}, "
    "loss: {after: extend, evaluate: {context: 64}}}"
)
KINDS = {
    "single": ["arm=gsm"],
    "experiment": ["arms={slow: [], fast: ['optimizer.learning_rate=0.01']}"],
    "runs": ["arm=gsm", "seeds=[0]", f"runs={RUNS}"],
    "ranks": ["arm=gsm", "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "data.batch_size=2"],
    "encoding": ["arm=gsm", "data.tokenizer=bpe", "size.vocabulary=300", "trainer.max_steps=1"],
}
IN_CI = "single"
# Keys of JSON in which two equal runs differ: times, speed, memory, and checksums of files that hold them.
OWN = {
    "changed",
    "checkpoint",
    "commit",
    "crc32",
    "current",  # Lightning's counters of a pass over the data, which a resumed run begins anew
    "files",
    "peak_memory_bytes",
    "seconds",
    "started",
    "tokens_per_second",
    "train_seconds",
}
CLOCK = re.compile(rb"\b\d+(:\d\d)+\b")  # how long runs have trained, on the page of results


class Command:
    """train.py in a session of its own, by which its processes are found when it has died.

    Args:
        processes: the fixture of this name.
        kind: of ``KINDS``.
        text: a folder.
        home: a folder for all that it writes.
    """

    def __init__(self, processes: Any, kind: str, text: Path, home: Path):
        home.mkdir(exist_ok=True)
        self.log = home / "said.log"
        places = [f"data.path={text}", f"data.cache_dir={home / 'cache'}", f"logs={home / 'logs'}"]
        steps = ["trainer.val_check_interval=6", "trainer.max_steps=6"]
        words = [*TINY, *steps, *places, "name=killed", *KINDS[kind]]
        self.process = processes.Process(target=in_a_session, args=(home, self.log, words))
        self.process.start()

    def wait(self, seconds: float) -> bool:
        """Wait until it and all that it has started have ended; return False if they have not after so long."""
        until = time.monotonic() + seconds
        while self.process.is_alive() or session(self.process.pid):
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True

    def kill(self, draw: random.Random) -> str:
        """Kill it, or in one of four cases a process that it has started; return which."""
        children = [one for one in session(self.process.pid) if one != self.process.pid and "python" in called(one)]
        itself = self.process.is_alive() and (draw.random() < 0.75 or not children)
        victim = self.process.pid if itself or not children else draw.choice(children)
        said = "the command" if victim == self.process.pid else f"its child {called(victim)}"
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        return said

    def end(self) -> None:
        """Kill all that is left."""
        for process in session(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.join()

    def finish(self, straight: bool = True) -> None:
        """Wait for its end. ``straight``: it must succeed, too."""
        try:
            assert self.wait(LONGEST), f"still there: {list(map(called, session(self.process.pid)))}"
            assert self.process.exitcode == 0 or not straight, self.log.read_text()
        finally:
            self.end()


def in_a_session(home: Path, log: Path, words: list[str]) -> None:
    """In a child process: be train.py."""
    os.setsid()
    be_the_script(home, [log, log], "train.py", tuple(words), {**os.environ, "OMP_NUM_THREADS": "1"})


def session(leader: int) -> list[int]:
    """Return the living processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            state, _, _, its = path.read_text().rpartition(")")[2].split()[:4]
            if int(its) == leader and state != "Z":
                found.append(int(path.parent.name))
    return found


def files_of(home: Path) -> dict[str, Any]:
    """Return the content of all files that no kill may change, by path; of curves what was computed."""
    contents: dict[str, Any] = {}
    for path in sorted(path for path in home.rglob("*") if path.is_file()):
        name = str(path.relative_to(home))
        if path.suffix in (".log", ".lock") or path.parent.name == ".locks" or path.name == ".lock":
            continue
        if path.name.startswith("events."):
            contents[str(Path(name).with_name("events"))] = scalars(path.parent)
        elif path.name == "metrics.jsonl":
            contents[name] = logged(path.parent)
        elif path.suffix == ".json":
            contents[name] = without_own(json.loads(text_of(path, home)))
        elif path.suffix == ".jsonl":
            contents[name] = [without_own(json.loads(line)) for line in text_of(path, home).splitlines() if line]
        elif path.suffix == ".html":
            contents[name] = CLOCK.sub(b"TIME", text_of(path, home))
        else:
            contents[name] = text_of(path, home)
    return contents


def text_of(path: Path, home: Path) -> bytes:
    return path.read_bytes().replace(str(home).encode(), b"HOME")


def without_own(value: Any) -> Any:
    """Return a value without the keys of OWN, at every depth."""
    if isinstance(value, dict):
        return {key: without_own(below) for key, below in value.items() if key not in OWN}
    return [without_own(below) for below in value] if isinstance(value, list) else value


def difference(one: Mapping[str, Any], other: Mapping[str, Any], path: str = "") -> str:
    """Return the places where contents differ, with the two values in short; empty if they are the same."""
    places = []
    for key in sorted(one.keys() | other.keys(), key=str):
        place, mine, its = f"{path}{key}", one.get(key, "nothing"), other.get(key, "nothing")
        if isinstance(mine, dict) and isinstance(its, dict):
            places.append(difference(mine, its, f"{place}: "))
        elif not same(mine, its):
            start = len(os.path.commonprefix([str(mine), str(its)]))
            shown = [f"{str(value)[max(0, start - 40) : start + 80]}" for value in (mine, its)]
            places.append(f"{place} ({shown[0]} for {shown[1]})")
    return "; ".join(filter(None, places))


def long_text(folder: Path) -> Path:
    """Write some megabytes, which take seconds to learn a tokenizer from and to encode."""
    folder.mkdir()
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 9))) for _ in range(3000)]
    for number in range(8):
        (folder / f"part{number}.txt").write_text("\n".join(" ".join(draw.choices(words, k=12)) for _ in range(9000)))
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in Linux' /proc")
@pytest.mark.timeout(2 * LONGEST * (2 + 3 * KILLS))
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind == IN_CI else pytest.mark.nightly) for kind in KINDS]
)
def test_a_killed_command_that_is_given_again_ends_as_if_nothing_was(
    kind: str, home: Path, processes: Any, tmp_path: Path
):
    text = long_text(tmp_path / "text") if kind == "encoding" else home / "text"
    first = processes.Process(target=no_death)  # it waits for the imports that all others have
    first.start()
    first.join()
    begun = time.monotonic()
    Command(processes, kind, text, tmp_path / "straight").finish()
    seconds, left = time.monotonic() - begun, files_of(tmp_path / "straight")
    for number in range(KILLS):
        place, draw = tmp_path / f"killed{number}", random.Random(f"{kind} {SEED + number}")
        for _ in range(draw.choice([1, 1, 2])):
            command, moment = Command(processes, kind, text, place), draw.random() * seconds
            victim = "nobody" if command.wait(moment) else command.kill(draw)
            print(f"{kind}: {victim} was killed after {moment:.1f} of {seconds:.1f} seconds", flush=True)
            command.finish(straight=victim == "nobody")
        Command(processes, kind, text, place).finish()
        assert not difference(files_of(place), left)


def test_every_difference_of_two_runs_is_seen():
    curve = {"val/loss": {3: 2.0, 6: 1.0}, "train/loss": {6: 1.5}}
    whole = {"a/metrics.jsonl": curve, "a/model.safetensors": b"one", "results.md": b"a"}
    assert not difference(whole, whole)
    for other in (
        {**whole, "results.md": b"b"},
        {**whole, "a/model.safetensors": b"two"},
        {**whole, "a/metrics.jsonl": {**curve, "val/loss": {3: 2.0}}},
        {**whole, "a/.state.json.1.partial": b""},
        {name: value for name, value in whole.items() if name != "results.md"},
    ):
        assert difference(other, whole) and difference(whole, other), other.keys()
