"""A run in phases: each trains from the weights of the one before, or measures what was trained.

    phases:
      train:                                                        # as the experiment has it
      extend: {data.context: 65536, trainer.max_steps: 100}         # what differs from that
      tune: {/data: ruler, data.answers: cot}                       # a group, with a slash as in a defaults list
      ruler: {evaluate: {ruler: {examples: 20}}}                    # arguments of evaluate.py

`python train.py experiment=...` of one arm and seed then trains nothing itself: it starts `python train.py phases=null
folder=<folder>/extend start_from=<folder>/train/checkpoints/last.ckpt ...` and `python evaluate.py checkpoint=...`, one
after another, each in a folder of its own below the run's, and puts their numbers into the run's `summary.json`. It can
be stopped and given again at any time: what is finished is skipped. What two arms of an experiment train alike is
trained once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override, Quote, QuotedString

from gsm import paths
from gsm.config.check import ConfigError, flat
from gsm.config.command_line import again, read_arguments
from gsm.config.compose import compose
from gsm.evaluation.commands import commands, scoring
from gsm.experiments import folder, report, trainers, weights
from gsm.experiments.arms import NAME, NOT_FOR_ARMS, WORDS, check_overrides, key
from gsm.experiments.children import Child, work_off
from gsm.files import read_json, write_json

EVALUATE = "evaluate"  # the key of a phase that measures
SAID = ("checkpoint", "output")  # of evaluate.py's arguments, those that a phase has already
GIVEN = {"phases", "folder", "start_from", "resume", "force"}  # said anew for each phase
NOT_FOR_PHASES = {*NOT_FOR_ARMS, *GIVEN}
LAST = "checkpoints/last.ckpt"
PLAIN = re.compile(r"[A-Za-z_/][\w./-]*")  # what Hydra's grammar takes for one word


@dataclass(frozen=True)
class Phase:
    """One phase: the overrides that it trains with, or (``measures``) the arguments of evaluate.py."""

    name: str
    lines: tuple[str, ...]
    measures: bool = False


def read_phases(phases: Any) -> list[Phase]:
    """The phases of a configuration, checked. Raises ConfigError."""
    if not isinstance(phases, Mapping) or not phases:
        raise ConfigError(
            f"phases is {phases!r}, but maps names to overrides, for example {{extend: {{data.context: 1024}}}}"
        )
    found = [_read(str(name), asked or {}) for name, asked in phases.items()]
    if not any(not phase.measures for phase in found):
        raise ConfigError(f"phases has {', '.join(phases)} alone, which measure: one has to train")
    return found


def _read(name: str, asked: Any) -> Phase:
    if not NAME.fullmatch(name):
        raise ConfigError(f"phases has the name '{name}', but a name begins with a letter and has no spaces or slashes")
    measures = isinstance(asked, Mapping) and EVALUATE in asked
    if measures and len(asked) > 1:
        raise ConfigError(
            f"phases.{name} has evaluate beside other keys: let one phase train and the next one evaluate"
        )
    asked = asked[EVALUATE] if measures else asked
    if not isinstance(asked, Mapping) and not (isinstance(asked, list) and all(isinstance(x, str) for x in asked)):
        raise ConfigError(
            f"phases.{name} is {asked!r}, but maps keys to values, or lists overrides such as [data.context=1024]"
        )
    if measures:
        lines = commands.words(_entries(name, asked)) if isinstance(asked, Mapping) else asked
        return _measuring(name, lines)
    lines = [_line(name, k, v) for k, v in _entries(name, asked).items()] if isinstance(asked, Mapping) else asked
    check_overrides(f"phases.{name}", lines, NOT_FOR_PHASES, "the run's")
    return Phase(name, tuple(lines))


def _measuring(name: str, lines: Sequence[str]) -> Phase:
    """A phase that measures; what evaluate.py would not take is refused now, not when everything is trained."""
    chosen, words = commands.choose(lines)
    for word in words:
        if word.partition("=")[0] in SAID:
            raise ConfigError(f"phases.{name}.evaluate has {word}, which is the run's to say: leave it out")
    try:
        read_arguments([*words, f"{SAID[0]}=..."], chosen.evaluate, chosen.name)
    except ConfigError as error:
        raise ConfigError(f"phases.{name}.evaluate: {error}") from error
    return Phase(name, tuple(lines), True)


def _entries(name: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Every value under the path to it, in the order of the yaml.

    Where `a.b: 1` and `a: {b: 2}` are both there, the second counts: it is what the command line makes of
    ++phases.<name>.a.b=2.
    """
    empty = [key for key, value in asked.items() if isinstance(value, Mapping) and not flat(value)]
    if empty:
        raise ConfigError(f"phases.{name} has {empty[0]} without a value: give it one, or leave it out")
    return flat(asked) | flat({key: value for key, value in asked.items() if "." not in key})


def _line(phase: str, name: str, value: Any) -> str:
    """An entry of a phase as an override; a group has a slash in front, so that values below it can be given too."""
    if isinstance(value, str) and _is_group(name):
        raise ConfigError(f"phases.{phase}.{name} is '{value}', but {name} is a group: write /{name}: {value}")
    return f"{name.removeprefix('/')}={_quoted(value)}"


def _is_group(name: str) -> bool:
    return (paths.configs() / name).is_dir()


class Phased:
    """The phases of one run, composed.

    Args:
        config: the run's composed configuration.
        overrides: the command line that it was composed from.
        directories: folders of yaml files besides ``configs/``.

    Raises:
        ConfigError: a phase cannot be read, or cannot be composed.
    """

    def __init__(self, config: Mapping[str, Any], overrides: Sequence[str], directories: Sequence[Path] = ()) -> None:
        self.config, self.overrides, self.home = config, overrides, Path(config["folder"])
        self.together = Path(config["logs"]) / str(config["name"])  # with the other arms
        self.phases = read_phases(config["phases"])
        self._lines = {phase.name: self._overrides(phase) for phase in self.phases if not phase.measures}
        self._configs = {name: self._composed(name, lines, directories) for name, lines in self._lines.items()}

    def done(self, phase: Phase, start: str | None) -> Path | None:
        """Where a phase is finished that begins with these weights: in this run, or in another arm's; None: nowhere."""
        own = self.home / phase.name
        if phase.measures:
            return own if start and _known(own) == self._measured(phase, start) else None
        config = {**self._configs[phase.name], "start_from": start}
        beside = sorted(self.together.glob(f"*/seed{self.config['seed']}/{phase.name}"))
        for place in [own, *(path for path in beside if path.resolve() != own.resolve())]:
            if (place / LAST).is_file() and folder.finished({**config, "folder": str(place)}):
                return place
        return None

    def without_effect(self) -> list[str]:
        """Overrides of the run that every phase which trains says otherwise."""
        said = [{key(line) for line in phase.lines} for phase in self.phases if not phase.measures]
        return [line for line in self.overrides if key(line) in set.intersection(*said)]

    def finished(self) -> bool:
        """Whether all of them are, and the run's summary says so. Raises as ``folder.finished`` does."""
        if _summary(self.home).get("status") != "finished":
            return False
        start = self.config.get("start_from")
        for phase in self.phases:
            place = self.done(phase, start)
            if place is None:
                return False
            start = start if phase.measures else str(place / LAST)
        return True

    def command(self, phase: Phase, start: str | None, script: Sequence[str]) -> list[str]:
        """What starts a phase, as words."""
        place = self.home / phase.name
        if phase.measures:
            chosen, _ = commands.choose(phase.lines)
            words = [*phase.lines, f"checkpoint={start}"]
            prefix = "ruler." if chosen is commands.RULER else ""
            output = chosen.place(place)
            return [sys.executable, str(paths.ROOT / "evaluate.py"), *words, f"{prefix}output={output}"]
        places = [f"folder={_quoted(str(place))}", f"start_from={_quoted(start)}"]
        return [*script, *self._lines[phase.name], *places]

    def conclude(self, phase: Phase, start: str | None) -> None:
        """After an evaluation: what it was and what it has found, in its folder. Raises OSError."""
        place = self.home / phase.name
        chosen, _ = commands.choose(phase.lines)
        known = {"status": "finished", **self._measured(phase, start), "metrics": chosen.metrics(place)}
        write_json(place / "summary.json", known)

    def locked(self, phase: Phase, start: str | None) -> contextlib.AbstractContextManager[None]:
        """Lets one arm at a time train what several train alike."""
        if phase.measures:
            return contextlib.nullcontext()
        name = folder.identity({**self._configs[phase.name], "start_from": start})
        return _one_at_a_time(self.together / ".alike" / f"{phase.name}-{name[:16]}.lock")

    def _overrides(self, phase: Phase) -> list[str]:
        """The run's, without what is said anew, or said of a group that the phase chooses itself."""
        chosen = [key(line) for line in phase.lines if _is_group(key(line))]
        gone = tuple(f"{group}{mark}" for name in chosen for group in (name, name.replace("/", ".")) for mark in "./")
        kept = [
            line
            for line in self.overrides
            if not (key(line).partition(".")[0] in GIVEN or key(line) in chosen or key(line).startswith(gone))
        ]
        return [*kept, "phases=null", *phase.lines]

    def _composed(self, name: str, lines: Sequence[str], directories: Sequence[Path]) -> dict[str, Any]:
        place = f"folder={_quoted(str(self.home / name))}"
        try:
            config = compose([*lines, place], directories)
            trainers.refuse_remainder(config)
            return config
        except ConfigError as error:
            raise ConfigError(f"phase {name}: {error}") from error

    def _measured(self, phase: Phase, start: str | None) -> dict[str, Any]:
        return {"command": list(phase.lines), "checkpoint": weights.digest(start)}


def run(phased: Phased, script: Sequence[str]) -> dict[str, Any]:
    """Works off the phases of a run and returns what its ``summary.json`` holds.

    Args:
        phased: what to do.
        script: the command that trains one run, as words; overrides are added to it.

    Raises:
        ConfigError: another process works on this run, or the first phase measures and nothing says what.
        SystemExit: with the code of a phase that has failed, or 128 + the number of a signal that has stopped it.
    """
    config, home = phased.config, phased.home
    if str(config["resume"]) not in ("auto", "never"):
        raise ConfigError("resume=PATH is for a single phase: say start_from= for the weights of a checkpoint")
    with folder.locked(home):
        if config["force"] or config["resume"] == "never":
            folder.prepare({**config, "resume": "never"})
        for line in phased.without_effect():
            print(f"{line} changes nothing: every phase sets that; ++phases.<name>.{line} would", flush=True)
        start, places = config.get("start_from"), {}
        for phase in phased.phases:
            if phase.measures and start is None:
                raise ConfigError(f"phase {phase.name} measures, but nothing was trained before: say start_from=")
            _note(phased, status="running", phase=phase.name)
            places[phase.name] = _worked_off(phased, phase, start, script)
            start = start if phase.measures else str(places[phase.name] / LAST)
        return _note(phased, **_gathered(phased, places))


def _worked_off(phased: Phased, phase: Phase, start: str | None, script: Sequence[str]) -> Path:
    """Where the phase is finished, after it was trained or measured, if it was not before."""
    with phased.locked(phase, start):
        place = phased.done(phase, start)
        if place is not None:
            print(f"phase {phase.name}: finished in {report.shown(place)}", flush=True)
            return place
        command, place = phased.command(phase, start, script), phased.home / phase.name
        print(f"phase {phase.name}:", flush=True)
        code, stopped = carry_out(command, place / ("evaluate.log" if phase.measures else "train.log"))
        if stopped is not None or code:
            _give_up(phased, phase, code, stopped)
        if phase.measures:
            phased.conclude(phase, start)
        print(flush=True)
        return place


def carry_out(command: Sequence[str], log: Path) -> tuple[int, int | None]:
    """Runs a command, with its output in a file and here; its exit code, and the signal that has stopped it."""
    codes: list[int] = []
    begin = partial(Child, command, log, {}, follow=True)
    stopped = work_off([begin], 1, lambda number, child, code: codes.append(code))
    return codes[0], stopped


def _give_up(phased: Phased, phase: Phase, code: int, stopped: int | None) -> None:
    """Says which phase did not come to its end, and leaves with its code."""
    how = "was stopped" if stopped is not None else f"failed with exit code {code}"
    status = "failed" if stopped is None else "interrupted"
    _note(phased, status=status, phase=phase.name, reason=f"phase {phase.name} {how}")
    print(f"\nphase {phase.name} of {report.shown(phased.home)} {how}; to go on there:\n  {again()}", flush=True)
    raise SystemExit(code if stopped is None and code > 0 else 128 + (stopped or -code))


def _gathered(phased: Phased, places: Mapping[str, Path]) -> dict[str, Any]:
    """What the run's summary says in the end: all of the last training, and the metrics of every evaluation."""
    summaries = {name: _summary(place) for name, place in places.items()}
    trained = [phase.name for phase in phased.phases if not phase.measures]
    metrics = {
        f"{name}/{metric}": value
        for name, summary in summaries.items()
        for metric, value in summary.get("metrics", {}).items()
    }
    where = {name: os.path.relpath(place, phased.home) for name, place in places.items()}
    steps = {name: {**summaries[name], "folder": where[name]} for name in places}
    return {**summaries[trained[-1]], **metrics, "phases": steps, "curves": where[trained[0]], "phase": None}


def _note(phased: Phased, **facts: Any) -> dict[str, Any]:
    """Writes the run's summary."""
    config = phased.config
    known = {"experiment": config["name"], "arm": str(config["arm"]), "seed": config["seed"], "reason": None, **facts}
    known[scoring.TRAINED] = [phase.name for phase in phased.phases if not phase.measures]
    write_json(phased.home / "summary.json", known)
    return known


def _known(place: Path) -> dict[str, Any] | None:
    """What a finished evaluation was."""
    summary = _summary(place)
    if summary.get("status") != "finished":
        return None
    return {name: summary.get(name) for name in ("command", "checkpoint")}


def _summary(place: Path) -> dict[str, Any]:
    """What lies in a folder's summary; empty if there is none."""
    return read_json(place / "summary.json") or {}


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Waits for another process that holds this file, and holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another arm trains the same phase at the moment; waiting for it", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _quoted(value: Any) -> str:
    """A value as an override on the command line has it."""
    return Override._get_value_element_as_str(_strings_quoted(value))


def _strings_quoted(value: Any) -> Any:
    if isinstance(value, list):
        return [_strings_quoted(item) for item in value]
    plain = not isinstance(value, str) or (PLAIN.fullmatch(value) and value not in WORDS)
    return value if plain else QuotedString(text=value, quote=Quote.single)
