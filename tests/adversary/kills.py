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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from short_runs import TINY, below, called, lines, scalars

from adversary import inside
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
OWN = {"tokens_per_second", "train_seconds", "seconds", "peak_memory_bytes", "commit", "checkpoint", "changed", "crc32"}
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


@dataclass(frozen=True)
class Kind:
    """A command of train.py's.

    Attributes:
        words: what it is given besides what all are.
        until: what it says when the time is over that moments are drawn from; empty: that is its whole length.
    """

    words: tuple[str, ...] = ()
    until: str = ""


KINDS = {
    "single": Kind(),
    "experiment": Kind(("experiment=two_arms",)),
    "runs": Kind(("seeds=[0]", f"runs={RUNS}")),
    "two ranks": Kind(("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "data.batch_size=2")),
    "encoding": Kind(
        ("data.tokenizer=bpe", "size.vocabulary=300", "data.prepare_workers=2", "trainer.max_steps=1"),
        until="Encoding the validation split",
    ),
}


@dataclass
class Straight:
    """A run that nothing happened to: what it left, and the seconds that it took, until the moments' end and in all."""

    left: Mapping[str, Any]
    moments: float
    whole: float


class Killer:
    """Draws kills from seeds, and tries them. The kinds take turns.

    Args:
        world: where the text lies. A second one, of some megabytes, is made for those that are killed encoding it.
        keep: where the folders of those that fail are left.
    """

    def __init__(self, world: World, keep: Path | None = None) -> None:
        self.world, self.keep = world, keep
        self._straight: dict[str, Straight] = {}
        ctypes.CDLL(None).prctl(SUBREAPER, 1)
        logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it would tell of every run that went on
        (world.home / "own/experiment").mkdir(parents=True)
        (world.home / "own/experiment/two_arms.yaml").write_text(ARMS)
        _write_long_text(world.home / "long")

    def tried(self, seed: int) -> Result:
        """One command, killed once or twice."""
        name, draw, begun = list(KINDS)[seed % len(KINDS)], random.Random(f"kills {seed}"), time.monotonic()
        straight, home = self._straight_of(name), self.world.home / f"killed{seed}"
        drawn = [(draw.random(), draw.random()) for _ in range(draw.choice([1, 1, 2]))]
        while not any(first := self._killed(name, home, straight, *drawn[0])):
            shutil.rmtree(home)  # it had ended: the machine is faster than it was, and now that is known
        killed = [first, *(self._killed(name, home, straight, *one) for one in drawn[1:])]
        said = " ".join(left for _, left in killed if left)
        number, said = ("kills", said) if said else self._compared(name, home, straight)
        if said and self.keep:
            shutil.copytree(home, self.keep / home.name, symlinks=True)
        shutil.rmtree(home)
        title = f"{name}: killed {' and '.join(what for what, _ in killed if what)} of {straight.moments:.2f} seconds"
        return Result(number, seed, title, FAILED if said else RIGHT, said, time.monotonic() - begun)

    def _killed(self, name: str, home: Path, straight: Straight, moment: float, pick: float) -> tuple[str, str]:
        """Gives the command, and kills at the moment, a part of its length.

        What was killed, and what is wrong: who had not left in time. Nothing was killed where it had ended by then.
        """
        new, begun = not home.exists(), time.monotonic()
        command = self._start(name, home)
        if command.wait(moment * straight.moments):
            part = (time.monotonic() - begun) / straight.whole
            if new and not command.code:
                straight.moments, straight.whole = part * straight.moments, part * straight.whole
            return "", f"not killed yet it ended with {command.last_words()}." if command.code else ""
        victim = command.kill(pick)
        said = f"{victim} after {moment * straight.moments:.2f}"
        # Who has lost a child may have others to start; who has lost a parent may not.
        patience = PATIENCE if victim == "the command" else LONGEST
        if command.wait(patience):
            return said, ""
        return said, f"{patience} seconds after {victim} was killed there was still {command.end()}."

    def _compared(self, name: str, home: Path, straight: Straight) -> tuple[str, str]:
        """Gives the command again, to its end: the class of what is not as in the undisturbed run, and what it is."""
        command = self._start(name, home)
        if not command.wait(LONGEST):
            return "kills", f"given again it had not ended after {LONGEST} seconds: {command.end()}"
        if command.code:
            return "kills", f"it did not go on: {command.last_words()}"
        return difference(found(home), straight.left)

    def _straight_of(self, name: str) -> Straight:
        """The undisturbed run of a kind, made when it is first needed."""
        if name not in self._straight:
            home, begun, moments = self.world.home / f"straight {name}".replace(" ", "_"), time.monotonic(), None
            command = self._start(name, home)
            while not command.wait(PAUSE):
                if moments is None and KINDS[name].until and KINDS[name].until in command.log.read_text():
                    moments = time.monotonic() - begun
            whole = time.monotonic() - begun
            if command.code:
                raise RuntimeError(command.log.read_text())
            self._straight[name] = Straight(found(home), moments or whole, whole)
        return self._straight[name]

    def _start(self, name: str, home: Path) -> Command:
        home.mkdir(exist_ok=True)
        text = self.world.home / ("long" if name == "encoding" else "text")
        places = [f"data.path={text}", f"data.cache_dir={home / 'cache'}", f"logs={home / 'logs'}"]
        own = f"--config-dir={self.world.home / 'own'}"
        return Command([own, *TINY, *QUICK, *places, "name=killed", *KINDS[name].words], home / "said.log")


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
        inside.small_shards()
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


def found(home: Path) -> dict[str, Any]:
    """What has to be the same whatever happened, by its path: of a curve its lines, of a checkpoint what is trained."""
    kept: dict[str, Any] = {}
    for path in sorted(path for path in home.rglob("*") if path.is_file()):
        name = str(path.relative_to(home))
        if {".replaced", ".hydra"} & set(path.parts) or path.suffix in (".log", ".lock") or path.name == ".lock":
            continue
        if path.name.startswith("events."):
            points = scalars(path.parent)
            curve = [f"{step},{tag},{value}" for tag in points for step, value in points[tag]]
            kept[str(Path(name).with_name("events"))] = curve
        elif path.name == "metrics.csv":
            kept[name] = lines(path.parent)
        elif path.suffix == ".ckpt":
            saved = torch.load(path, weights_only=True)
            kept[name] = {part: saved[part] for part in SAVED}
        else:
            content = path.read_bytes().replace(str(home).encode(), b"HOME")
            content = CLOCK.sub(b"TIME", content) if path.suffix == ".html" else content
            kept[name] = _without(json.loads(content), OWN) if path.suffix == ".json" else content
    return kept


def _without(value: Any, keys: set[str]) -> Any:
    """The same without these keys, at every depth."""
    if isinstance(value, dict):
        return {key: _without(below, keys) for key, below in value.items() if key not in keys}
    return [_without(below, keys) for below in value] if isinstance(value, list) else value


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, str]:
    """What is not as in the other, a sentence, or nothing; and its class: 3 where a curve's last step alone is lost."""
    unlike = [name for name in sorted(one.keys() | other.keys()) if not same(one.get(name), other.get(name))]
    lost = [name for name in unlike if _lost_its_end(one.get(name), other.get(name))]
    drawn = [name for name in unlike if name.endswith(".png")] if lost else []  # pictures of these curves
    more = [name for name in unlike if name not in (*lost, *drawn)]
    if more or not lost:
        return "kills", "; ".join(_said(name, one.get(name), other.get(name)) for name in more)
    missing = len(other[lost[-1]]) - len(one[lost[-1]])
    return "3", f"the last step's lines are missing, {missing} of {lost[-1]}"


def _lost_its_end(one: Any, other: Any) -> bool:
    """Whether a curve is the other without lines of the last step."""
    if not (isinstance(one, list) and isinstance(other, list)) or not all(isinstance(line, str) for line in other):
        return False
    last = max((line.split(",")[0] for line in other), key=lambda step: int(step) if step.isdigit() else -1)
    missing = [line for line in other if line not in one]
    return one == [line for line in other if line in one] and all(line.split(",")[0] == last for line in missing)


def _said(name: str, one: Any, other: Any) -> str:
    if one is None or other is None:
        return f"{name} is {'missing' if one is None else 'left'}"
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [key for key in sorted(one.keys() | other.keys()) if not same(one.get(key), other.get(key))]
        return f"{name} has another {', '.join(f'{key} ({_brief(one, key)} for {_brief(other, key)})' for key in keys)}"
    if isinstance(one, list) and isinstance(other, list):
        missing, extra = ([line for line in two if line not in three] for two, three in ((other, one), (one, other)))
        return f"{name} lacks {len(missing)} lines {missing[:1]} and has {len(extra)} others {extra[:1]}"
    return f"{name} differs"


def _brief(value: Mapping[str, Any], key: str) -> str:
    return str(value.get(key, "nothing"))[:40]
