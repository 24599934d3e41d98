"""The results of experiments in two forms: Markdown beside its pictures, and one HTML page that needs no other file
(``page.html.jinja``)."""

from __future__ import annotations

import base64
import math
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from omegaconf import OmegaConf

from gsm import paths
from gsm.config.address import noted
from gsm.config.check import flat
from gsm.config.command_line import own_configs
from gsm.config.options import opening
from gsm.experiments.table import FOOTNOTE, RunSummary, Table, configs, mapping, read_contents, settings
from gsm.files import read_json
from gsm.tables import Grid
from gsm.training.callbacks.progress import clock
from gsm.training.report import has_state, kernels, opens

TEMPLATE = Path(__file__).with_suffix(".html.jinja")
PICTURES = (
    "Pictures: lines and bars are means over the seeds, bands go from the lowest to the highest seed, whiskers are a "
    "standard deviation, dots single seeds."
)


@dataclass(frozen=True)
class Picture:
    """A picture, as a file beside the Markdown and as a part of the page."""

    png: bytes
    svg: str


@dataclass(frozen=True)
class Report:
    """The facts of a comparison of experiments.

    Attributes:
        place: the folder of the files; paths are relative to it.
        folders: of the experiments, ``logs/<name>``.
        table: of their finished runs, labelled.
        names: of the arms, by those of the command line.
        notes: sentences below the table.
        pictures: by the names of their files.
        missing: a sentence in place of pictures; empty where there are pictures.
        runs: every run that has a summary, finished or not.
        states: the state of each run's folder; empty for a finished run.
    """

    place: Path
    folders: Sequence[Path]
    table: Table
    names: Mapping[str, str]
    notes: Sequence[str]
    pictures: Mapping[str, Picture]
    missing: str
    runs: Sequence[RunSummary]
    states: Mapping[Path, str]

    @property
    def title(self) -> str:
        """The experiment's name; for several, the name of the folder above them."""
        return self.place.resolve().name

    def markdown(self) -> str:
        """Return tables, notes and pictures."""
        parts = [self.text(), *([PICTURES] if self.pictures else [])]
        return "\n\n".join([*parts, *(f"![{_words(name)}]({name})" for name in self.pictures)]) + "\n"

    def text(self) -> str:
        """Return tables and notes, Markdown."""
        parts = [f"# {self.title}", *(f"{sentence}." for sentence in (*self.table.verdicts(), *self.table.baselines()))]
        parts += [self.table.markdown().rstrip(), f"{FOOTNOTE[0].upper()}{FOOTNOTE[1:]}."]
        notes = [*self.legend(), *self.notes]
        return "\n\n".join([*parts, *(["\n".join(f"* {note}" for note in notes)] if notes else [])])

    def legend(self) -> list[str]:
        """Return a line on the names of arms that the command line takes, and one for each column."""
        named = ((arm, name) for arm, name in self.names.items() if arm in self._trained)
        arms = "; ".join(f"{arm} is {name}" for arm, name in named if arm != name and " " not in arm)
        return [*([f"arms on the command line: {arms}"] if arms else []), *self.table.meanings()]

    def html(self) -> str:
        """Return the page: the same with further facts from the runs' folders. It is self-contained."""
        environment = Environment(
            autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
        )
        environment.filters["plus_minus"] = lambda cell: str(cell).replace(" +- ", " ± ")
        environment.filters["breaking"] = lambda path: Markup(".<wbr>").join(str(path).split("."))  # which escapes
        first = self._first[:1]
        experiments = (mapping(run.summary.get("choices")).get("experiment") for run in self.table.runs)
        questions = dict.fromkeys(_question(str(name)) for name in experiments if name)
        return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
            report=self,
            question=" ".join(filter(None, questions)),
            finished=sum(not state for state in self.states.values()),
            grids=self.table.grids(),
            verdicts=self.table.verdicts(),
            baselines=self.table.baselines(),
            legend=self.legend(),
            footnote=f"{FOOTNOTE[0].upper()}{FOOTNOTE[1:]}.",
            pictures=[(_words(name), Markup(picture.svg)) for name, picture in self.pictures.items()],
            about=PICTURES,
            evaluations=[evaluation for folder in self.folders for evaluation in _evaluations(folder, self.place)],
            differences=self._differences(),
            arms=self._arms(),
            configuration=[(run.arm, name, _yaml(config)) for run in first for name, config in configs(run).items()],
            environment=self._environment(),
            data=[
                [key, _text(value)] for run in first for key, value in flat(mapping(run.summary.get("data"))).items()
            ],
            commands=[line for folder in self.folders for line in _commands(read_contents(folder))],
            listed=list(self._listed()),
            seconds=clock(sum(_seconds(run) for run in self.runs)),
        )

    @cached_property
    def _first(self) -> list[RunSummary]:
        """The first finished run of every arm in the table."""
        return [next(run for run in self.table.runs if run.arm == row.arm) for row in self.table.rows if row.runs]

    @cached_property
    def _trained(self) -> set[str]:
        """The arms that have a run, by their names on the command line."""
        return {run.arm for run in self.runs}

    def _arms(self) -> list[tuple[str, str]]:
        """Return the overrides of each arm that has a run, as in the experiment's last command."""
        described = [(folder, read_contents(folder)) for folder in self.folders]
        return [
            (
                self.names.get(arm, arm) if len(described) == 1 else f"{folder.name}/{arm}",
                shlex.join(map(str, overrides)),
            )
            for folder, contents in described
            for arm, overrides in mapping(contents.get("arms")).items()
            if arm in self._trained and isinstance(overrides, list)
        ]

    def _differences(self) -> Grid:
        """Return the differences of configuration between the arms' first finished runs, by key, below a heading."""
        facts = [_known(run) for run in self._first]
        keys = dict.fromkeys(key for facts_of_run in facts for key in facts_of_run)
        rows = [[key, *(facts_of_run.get(key, "-") for facts_of_run in facts)] for key in keys]
        return [["key", *(run.arm for run in self._first)], *(row for row in rows if len({*row[1:]}) > 1)]

    def _environment(self) -> Grid:
        """Return versions, devices and commits, each with its runs."""
        by_value: dict[tuple[str, str], list[str]] = {}
        for run in self.table.runs:
            versions = {f"version of {name}": x for name, x in flat(mapping(run.summary.get("versions"))).items()}
            chosen = {op: str(choice) for op, choice in mapping(run.summary.get("kernels")).items()}
            facts: dict[str, Any] = {key: run.summary.get(key) for key in ("device", "commit")}
            facts |= {"kernels": kernels(chosen) or None, **versions}
            for key, value in facts.items():
                runs = by_value.setdefault((key, "unknown" if value is None else _text(value)), [])
                runs.append(run.folder.name)
        grid = [["what", "value", "runs"]]
        for (key, value), runs in by_value.items():
            grid.append([key, value, "all" if len(runs) == len(self.table.runs) else ", ".join(runs)])
        return grid

    def _listed(self) -> Iterable[dict[str, str]]:
        """Yield every run, in the table's order: its state, steps, duration, folder, and its training command."""
        by_folder = {run.folder: run for run in self.runs}
        order = {run.folder: number for number, run in enumerate(self.table.runs)}
        for folder, state in sorted(self.states.items(), key=lambda one: order.get(one[0], len(order))):
            run = by_folder.get(folder)
            steps, tokens = (run.value(key) if run else None for key in ("steps", "tokens"))
            yield {
                "name": self._relative(folder),
                "state": state or "finished",
                "steps": "-" if steps is None else f"{steps:,.0f}",
                "tokens": "-" if tokens is None else f"{tokens:,.0f}",
                "took": clock(_seconds(run)) if run and _seconds(run) else "-",
                "link": quote(self._relative(folder)) + "/",  # also the colon, so that no name becomes a scheme
                "command": "\n".join(_commands(noted(folder))),
                "opens": "\n".join(self._opens(run)) if run and run.finished else "",
            }

    @staticmethod
    def _opens(run: RunSummary) -> list[str]:
        writes = mapping(run.summary.get("fingerprint")).get("tokenizer") is not None
        return opens(run.folder, explored=has_state(run.summary), writes=writes)

    def _relative(self, folder: Path) -> str:
        return os.path.relpath(folder, self.place)


def _words(name: str) -> str:
    """Return the name of a picture's file in words."""
    return Path(name).stem.replace("_", " ")


def _text(value: Any) -> str:
    """Return a value of a configuration or a summary as text."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:,}" if isinstance(value, int) and abs(value) >= 10_000 else str(value)


def _question(experiment: str) -> str:
    """Return the first paragraph of an experiment's yaml, up to its duration; empty without such a yaml."""
    if not experiment.replace("_", "").isalnum():  # it becomes a part of a path
        return ""
    files = (folder / "experiment" / f"{experiment}.yaml" for folder in paths.config_folders())
    return opening(next((_read(file) for file in files if file.is_file()), ""))[0]


def _commands(description: Mapping[str, Any]) -> list[str]:
    """Return the command of an experiment's description, or of a run's configuration; none where it has none."""
    overrides = description.get("overrides")
    if not isinstance(overrides, list):
        return []
    before, flag = own_configs()
    return [before + shlex.join(["python", "train.py", *flag, *map(str, overrides)])]


def _yaml(config: Mapping[str, Any]) -> str:
    """Return a configuration as a yaml, without what its folder tells."""
    return OmegaConf.to_yaml(OmegaConf.create({k: v for k, v in config.items() if k not in ("address", "choices")}))


def _known(run: RunSummary) -> dict[str, str]:
    """Return the choices and the values that decide the training of a run, by key."""
    return {group: str(choice) for group, choice in mapping(run.summary.get("choices")).items()} | settings(run)


def _seconds(run: RunSummary) -> float:
    """Return the seconds that a run has trained; for several parts, their sum."""
    names = [f"runs.{part}.train_seconds" for part in mapping(run.summary.get("runs"))] or ["train_seconds"]
    return math.fsum(run.value(name) or 0.0 for name in names)


def _evaluations(folder: Path, place: Path) -> Iterable[dict[str, Any]]:
    """Yield the tables, notes and pictures of evaluations of several runs together, from the files beside them."""
    for file in sorted(path for path in folder.glob("*.json") if path.is_file()):
        content = read_json(file)
        grids = (content or {}).get("tables")
        tables = [grid for grid in grids if _is_grid(grid)] if isinstance(grids, list) else []
        if content is None or not tables:
            continue
        picture, notes = file.with_suffix(".png"), content.get("notes")
        yield {
            "name": file.stem,
            "tables": tables,
            "notes": [str(note) for note in notes] if isinstance(notes, list) else [],
            "picture": base64.b64encode(picture.read_bytes()).decode() if picture.is_file() else "",
            "file": os.path.relpath(file, place),
            "link": quote(os.path.relpath(file, place)),
        }


def _is_grid(content: Any) -> bool:
    rows = content if isinstance(content, list) else []
    return bool(rows) and all(isinstance(row, list) and row and len(row) == len(rows[0]) for row in rows)


def _read(file: Path) -> str:
    """Return a text file; empty where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
