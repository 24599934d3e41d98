"""Commands that are killed at a random moment and given again: in the end all is as if nothing had been.

Five kinds: a single run, an experiment of two arms, one of runs after one another, two ranks, and a text that is
encoded by several processes. What is killed is the command, or one of the processes that it has started; whoever is
left has to end by itself. Weights, optimisers, curves, results and the cache are compared with those of an undisturbed
run.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import random
import re
import runpy
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from short_runs import TINY, below, called, lines, scalars

from adversary.damage import same
from adversary.outcome import FAILED, RIGHT, Result
from adversary.world import QUICK, World

TRAIN = Path(__file__).parents[2] / "train.py"
SUBREAPER = 36  # of Linux' prctl: orphans below this process become its children, and so are seen
PATIENCE = 120  # seconds that who is left by a killed command may take to end: busy cores start a process in forty
LONGEST = 900  # that a command may take, a few times what it takes on busy cores
PAUSE = 0.02  # seconds between two looks
SAVED = ("state_dict", "optimizer_states", "lr_schedulers", "global_step")  # of a checkpoint; the rest holds paths
# What no two runs share: of a summary what was measured with a clock, the repository's commit, and the digest of a
# checkpoint, which holds times and places; of the cache's notes when a file was written, and the checksum over that.
OWN = {
    "files",
    "tokens_per_second",
    "train_seconds",
    "seconds",
    "peak_memory_bytes",
    "commit",
    "checkpoint",
    "changed",
    "crc32",
}
CLOCK = re.compile(rb"\b\d+(:\d\d)+\b")  # how long runs have trained, on the page of results
ARMS = """# @package _global_
# Does the rate matter?
name: two_arms
arms:
  slow: []
  fast: [optimizer.learning_rate=0.01]
"""
EXTEND = "{after:train,trainer.max_steps:2,optimizer.learning_rate:0.01}"
RUNS = f"{{train:{{}},extend:{EXTEND},loss:{{after:extend,evaluate:{{context:64}}}}}}"


KINDS: dict[str, tuple[str, ...]] = {
    "single": (),
    "experiment": ("experiment=two_arms",),
    "runs": ("seeds=[0]", f"runs={RUNS}"),
    "two ranks": ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "data.batch_size=2"),
    "encoding": ("data.tokenizer=bpe", "size.vocabulary=300", "trainer.max_steps=1"),
}


class Killer:
    """Draw kills from seeds, and try them. The kinds take turns.

    Args:
        world: the text. A second text, of some megabytes, is made for commands that are killed while they encode it.
        keep: a place for the folders of cases that fail.
    """

    def __init__(self, world: World, keep: Path | None = None) -> None:
        self.world, self.keep = world, keep
        self._straight: dict[str, tuple[dict[str, Any], float]] = {}  # the files of an undisturbed run, and its seconds
        ctypes.CDLL(None).prctl(SUBREAPER, 1)
        logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of every run that went on
        (world.home / "own/experiment").mkdir(parents=True)
        (world.home / "own/experiment/two_arms.yaml").write_text(ARMS)
        _write_long_text(world.home / "long")

    def tried(self, seed: int) -> Result:
        """Kill one command once or twice, and give it again."""
        name, draw, begun = list(KINDS)[seed % len(KINDS)], random.Random(f"kills {seed}"), time.monotonic()
        left, seconds = self._straight_of(name)
        home = self.world.home / f"killed{seed}"
        moments = [draw.random() * seconds for _ in range(draw.choice([1, 1, 2]))]
        killed, fault = [], ""
        for moment in moments:
            victim, fault = self._killed(name, home, moment, draw.random())
            killed.append(f"{victim} after {moment:.2f}")
            if fault:
                break
        fault = fault or self._compared(name, home, left)
        if fault and self.keep:
            shutil.copytree(home, self.keep / home.name, symlinks=True)
        shutil.rmtree(home)
        title = f"{name}: killed {' and '.join(killed)} of {seconds:.2f} seconds"
        return Result("kills", seed, title, FAILED if fault else RIGHT, fault, time.monotonic() - begun)

    def _killed(self, name: str, home: Path, moment: float, pick: float) -> tuple[str, str]:
        """Give the command, and kill at the moment. Return the victim, and an error: a process that had not left."""
        command = self._start(name, home)
        if command.wait(moment):
            return "nobody", f"not killed yet it ended with {command.last_words()}." if command.code else ""
        victim = command.kill(pick)
        # A parent that lost its child may have others to start; a child that lost its parent may not.
        patience = PATIENCE if victim == "the command" else LONGEST
        if command.wait(patience):
            return victim, ""
        return victim, f"{patience} seconds after {victim} was killed there was still {command.end()}."

    def _compared(self, name: str, home: Path, left: Mapping[str, Any]) -> str:
        """Give the command again, to its end, and return how its files differ from those of the undisturbed run."""
        command = self._start(name, home)
        if not command.wait(LONGEST):
            return f"given again it had not ended after {LONGEST} seconds: {command.end()}"
        if command.code:
            return f"it did not go on: {command.last_words()}"
        return difference(files_of(home), left)

    def _straight_of(self, name: str) -> tuple[dict[str, Any], float]:
        """The undisturbed run of a kind, made when it is first needed."""
        if name not in self._straight:
            home, begun = self.world.home / f"straight {name}".replace(" ", "_"), time.monotonic()
            command = self._start(name, home)
            if not command.wait(LONGEST) or command.code:
                raise RuntimeError(command.log.read_text())
            self._straight[name] = files_of(home), time.monotonic() - begun
        return self._straight[name]

    def _start(self, name: str, home: Path) -> Command:
        home.mkdir(exist_ok=True)
        text = self.world.home / ("long" if name == "encoding" else "text")
        places = [f"data.path={text}", f"data.cache_dir={home / 'cache'}", f"logs={home / 'logs'}"]
        own = f"--config-dir={self.world.home / 'own'}"
        return Command([own, *TINY, *QUICK, *places, "name=killed", *KINDS[name]], home / "said.log")


class Command:
    """train.py, in a process that was forked from this one, with its imports done; what it starts it starts afresh."""

    def __init__(self, words: list[str], log: Path) -> None:
        self.log = log
        self.code: int | None = None
        self.process = os.fork()
        if not self.process:
            _be_the_command(words, log)

    def wait(self, seconds: float) -> bool:
        """Until it and all that it has started have ended; False if they have not after so long."""
        until = time.monotonic() + seconds
        while True:
            try:
                ended, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if ended == self.process:
                self.code = os.waitstatus_to_exitcode(status)
            if not ended:
                if time.monotonic() > until:
                    return False
                time.sleep(PAUSE)

    def kill(self, pick: float) -> str:
        """Kills the command, or in one of four cases a process that it has started; says which."""
        started = [process for process in below(os.getpid()) if process != self.process and "python" in called(process)]
        itself = self.code is None and (pick < 0.75 or not started)
        victim = self.process if itself else started[int(pick % 0.25 * 4 * len(started))]
        said = "the command" if itself else f"its child {called(victim)}"
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        return said

    def end(self) -> str:
        """Kills all that is left; says what it was."""
        left = below(os.getpid())
        said = ", ".join(map(called, left))
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.wait(PATIENCE)
        return said

    def last_words(self) -> str:
        """What it has said last."""
        return (self.log.read_text(errors="replace").strip().splitlines() or ["nothing was said"])[-1]


def _be_the_command(words: list[str], log: Path) -> None:
    """What a forked process does, which never returns."""
    code: object = 1
    try:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ["OMP_NUM_THREADS"] = "1"  # for what it starts; this process has one thread already
        sys.argv = [str(TRAIN), *words]
        runpy.run_path(str(TRAIN), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code or 0
        if isinstance(code, str):
            print(code)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _write_long_text(folder: Path) -> None:
    """Some megabytes, which take seconds to learn a tokenizer from and to encode."""
    folder.mkdir()
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 9))) for _ in range(3000)]
    for number in range(8):
        (folder / f"part{number}.txt").write_text("\n".join(" ".join(draw.choices(words, k=12)) for _ in range(9000)))


def files_of(home: Path) -> dict[str, Any]:
    """Return the contents that no kill may change, by path: lines of curves, trained parts of checkpoints."""
    contents: dict[str, Any] = {}
    for path in sorted(path for path in home.rglob("*") if path.is_file()):
        name = str(path.relative_to(home))
        if {".replaced", ".hydra"} & set(path.parts) or path.suffix in (".log", ".lock") or path.name == ".lock":
            continue
        if path.name.startswith("events."):
            contents[str(Path(name).with_name("events"))] = scalars(path.parent)
        elif path.name == "metrics.csv":
            contents[name] = lines(path.parent)
        elif path.suffix == ".safetensors":
            contents[name] = path.read_bytes()
        else:
            content = path.read_bytes().replace(str(home).encode(), b"HOME")
            content = CLOCK.sub(b"TIME", content) if path.suffix == ".html" else content
            contents[name] = _without(json.loads(content), OWN) if path.suffix == ".json" else content
    return contents


def _without(value: Any, keys: set[str]) -> Any:
    """The same without these keys, at every depth."""
    if isinstance(value, dict):
        return {key: _without(below, keys) for key, below in value.items() if key not in keys}
    return [_without(below, keys) for below in value] if isinstance(value, list) else value


def difference(one: Mapping[str, Any], other: Mapping[str, Any], path: str = "") -> str:
    """Return the places where contents differ, with the two values in short; empty if they are the same."""
    places = []
    for key in sorted(one.keys() | other.keys(), key=str):
        place, mine, its = f"{path}{key}", one.get(key, "nothing"), other.get(key, "nothing")
        if isinstance(mine, dict) and isinstance(its, dict):
            places.append(difference(mine, its, f"{place}: "))
        elif not same(mine, its):
            places.append(f"{place} ({str(mine)[:80]} for {str(its)[:80]})")
    return "; ".join(filter(None, places))
