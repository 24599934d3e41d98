"""Tables of runs, for experiments and notebooks: their summaries are read and put together over seeds.

from gsm.experiments.table import read_runs, summarise

print(summarise(read_runs("logs/ablate_residual"), ["bits_per_byte", "data.train_tokens"]).text())
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gsm import plots
from gsm.config.address import CONFIG, CONTENTS, noted, of_all_seeds
from gsm.config.check import ConfigError, few, flat
from gsm.files import read_json
from gsm.intervals import Cell, over_pairs, over_seeds
from gsm.tables import WIDTH, Grid, grid_csv, grid_markdown, grid_text, number_text

TRIALS = "trials.jsonl"  # the trials of an experiment, one in a line: arm, seed, and the folders of its runs by name
COLUMNS = ("bits_per_byte", "val_loss")
USUAL = ("accuracy", *COLUMNS)  # of an experiment without table=: those that its runs have
PROPERTIES = ("parameters", "learning_rate", "cache_bytes", "state_bytes")  # no seed of an arm changes them
FOOTNOTE = (
    "mean +- sample standard deviation over the seeds; of differences, mean and 95 % interval (paired Student's t) "
    "over the seeds that both arms have, from three on"
)
NGRAMS = {"unigram": "unigram", "bigram": "bigram", "five_gram": "5-gram"}  # <key>_bits_per_byte: name
# The better direction of columns, where it is the same for every experiment.
BETTER = {
    "accuracy": "higher",
    "bits_per_byte": "lower",
    "cache_bytes": "lower",
    "state_bytes": "lower",
    "tokens_per_second": "higher",
    "val_loss": "lower",
    "val_perplexity": "lower",
}


@dataclass(frozen=True)
class RunSummary:
    """One arm with one seed: its run, or its runs after one another, with the content of their ``summary.json``.

    Attributes:
        folder: of the last run that trains.
        summary: of that run, with the numbers of all that measure: ``<name of the run>/<metric>``.
        parts: the folder of every run, by name; a single one has no name. It is relative to `experiment`: another
            experiment may have trained it.
        task: the name that `with_tasks` gives its data.
        settings: the values that decide its training, without the seed; None: those of its configuration (`settings`).
        experiment: the folder ``logs/<name>`` that lists it.
    """

    arm: str
    seed: int
    folder: Path
    summary: dict[str, Any]
    parts: Mapping[str, str] = field(default_factory=dict)
    task: str = ""
    settings: dict[str, str] | None = None
    experiment: Path = Path()

    @property
    def curves(self) -> Path:
        """The file with its learning curves; of several runs those of the first that trains."""
        return self.experiment / self.summary.get("curves", self.folder.resolve()) / "metrics.jsonl"

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end."""
        return self.summary.get("status") == "finished"

    def value(self, column: str) -> float | None:
        """Return a finite number of the summary; dots go down, as in ``data.train_tokens``. None without one."""
        value = self.number(column)
        return value if value is not None and math.isfinite(value) else None

    def number(self, column: str) -> float | None:
        """Return the same, finite or not."""
        value: Any = self.summary
        for part in column.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


@dataclass(frozen=True)
class Row:
    """An arm: its number of runs, and a cell for each column."""

    arm: str
    runs: int
    cells: dict[str, Cell]


@dataclass(frozen=True)
class Table:
    """Arms and columns, and the runs that they were made from.

    Attributes:
        tuned: by arm, the values that its runs were tuned to, by key, as texts.
        heads: of a page (`labelled`), the columns in words; empty: the heads are their keys.
    """

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    runs: tuple[RunSummary, ...] = field(repr=False)
    tuned: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    heads: Mapping[str, str] = field(default_factory=dict)

    def labelled(self, arms: Mapping[str, str], labels: Mapping[str, Any]) -> Table:
        """Return the table of a page.

        Args:
            arms: the name on the page of every arm (``names_of``).
            labels: of columns, by their keys; a column without one gets the words of its key.
        """
        return replace(
            self,
            rows=tuple(replace(row, arm=arms[row.arm]) for row in self.rows),
            runs=tuple(replace(run, arm=arms[run.arm]) for run in self.runs),
            tuned={arms.get(arm, arm): values for arm, values in self.tuned.items()},
            heads={name: str(labels.get(name) or plots.label(name)) for name in self.columns},
        )

    @property
    def measured(self) -> list[str]:
        """The columns without ``PROPERTIES``; all of them, where there is no other."""
        return [name for name in self.columns if name not in PROPERTIES] or list(self.columns)

    def text(self, width: int = WIDTH) -> str:
        """Return plain ASCII; columns beyond ``width`` characters go below, beside their arms again."""
        return "\n\n".join(grid_text(grid, width) for grid in self.grids())

    def markdown(self) -> str:
        """Return the same as tables in Markdown."""
        return "\n\n".join(map(grid_markdown, self.grids())) + "\n"

    def grids(self) -> list[Grid]:
        """Return means over seeds; with several seeds, also the first column seed by seed, and the differences, where
        two arms share two seeds or more.

        ``PROPERTIES`` have no spread where seeds agree, and no difference unless they are all that the table has.
        """
        grids = [[["arm", "runs", *self._keys, *map(self._head, self.columns)]]]
        for row in self.rows:
            cells = {name: self._without_spread(name, cell) for name, cell in row.cells.items()}
            grids[0].append([row.arm, str(row.runs), *self._values(row.arm), *map(str, cells.values())])
        seeds = sorted({run.seed for run in self.runs})
        for column in self.columns[:1] if len(seeds) > 1 else ():
            first = {(run.arm, run.seed): run.value(column) for run in self.runs if run.value(column) is not None}
            rows = [[row.arm, *(number_text(first.get((row.arm, seed))) for seed in seeds)] for row in self.rows]
            grids.append([[self._head(column), *(f"seed {seed}" for seed in seeds)], *rows])
        counts = {arm: max(cell.count for cell in cells.values()) for arm, cells in self.differences().items()}
        if max(counts.values(), default=0) > 1:
            rows = [
                [arm, str(counts[arm]), *(str(cells[name]) for name in self.measured)]
                for arm, cells in self.differences().items()
                if counts[arm]
            ]
            grids.append([[f"minus {self.rows[0].arm}", "seeds", *map(self._head, self.measured)], *rows])
        return grids

    def _head(self, column: str) -> str:
        return self.heads.get(column, column)

    @staticmethod
    def _without_spread(name: str, cell: Cell) -> Cell:
        return replace(cell, spread=None) if name in PROPERTIES and cell.spread == 0 else cell

    def verdicts(self) -> list[str]:
        """Return a sentence on the first column: arms that differ from the first, by a paired t-test at 95 %."""
        column = self.columns[0]
        words = {"lower": ("better", "worse"), "higher": ("worse", "better")}.get(BETTER.get(column, ""))
        groups: dict[str, list[str]] = {}
        for arm, cells in self.differences().items():
            cell = cells[column]
            if cell.count:
                differs = (words or ("lower", "higher"))[(cell.mean or 0) > 0]
                seeds = "one seed" if cell.count == 1 else f"{cell.count} seeds"
                unknown = "too few seeds to tell" if cell.spread is None else "not measurably different"
                verdict = differs if cell.differs else unknown
                groups.setdefault(verdict, []).append(f"{arm} ({cell}, {seeds})")
        verdicts = "; ".join(f"{verdict}: {', '.join(arms)}" for verdict, arms in groups.items())
        title = f"{self._head(column)}{f' ({BETTER[column]} is better)' if words else ''}"
        return [f"{title}, beside {self.rows[0].arm}: {verdicts}"] if groups else []

    def baselines(self) -> list[str]:
        """Return a sentence on n-gram models of the same training tokens, beside bits per byte: of the first task."""
        runs = [run for run in self.runs if run.task == self.runs[0].task]
        means = {name: over_seeds(run.value(f"{name}_bits_per_byte") for run in runs).mean for name in NGRAMS}
        known = {name: mean for name, mean in means.items() if mean is not None}
        if not known or not {"bits_per_byte", "val_loss"} & set(self.columns):
            return []
        worse: dict[str, list[str]] = {}  # by the simplest of the models that are better
        for row in self.rows:
            own = over_seeds(run.value("bits_per_byte") for run in runs if run.arm == row.arm).mean
            better = next((name for name, mean in known.items() if own is not None and own > mean), None)
            if better:
                worse.setdefault(NGRAMS[better], []).append(row.arm)
        parts = [", ".join(f"{NGRAMS[name]} {number_text(mean)}" for name, mean in known.items())]
        parts += [f"worse than the {name}: {', '.join(arms)}" for name, arms in worse.items()]
        return [f"bits per byte of n-gram models of the same training tokens: {'; '.join(parts)}"]

    def meanings(self) -> list[str]:
        """Return a line for each column that its key does not explain."""
        words = {column: self.heads.get(column, plots.label(column)) for column in self.columns}
        return [
            f"{column}: {text}{f'; {BETTER[column]} is better' if column in BETTER else ''}"
            for column, text in words.items()
            if re.findall(r"[^\W_]+", text) != re.findall(r"[^\W_]+", column)
        ]

    def csv(self) -> str:
        """Return one line for each run, with numbers in full."""
        rows: list[list[Any]] = [["arm", "seed", *self._keys, *self.columns]]
        for run in self.runs:
            tuned = [text.partition(" ")[0] for text in self._values(run.arm)]
            rows.append([run.arm, run.seed, *tuned, *map(run.value, self.columns)])
        return grid_csv(rows)

    def plain(self) -> dict[str, Any]:
        """Return the same as containers, for JSON: ``arms`` by name, with ``columns`` and ``seeds``, and
        ``differences``."""
        arms: dict[str, Any] = {}
        for row in self.rows:
            cells = {name: _named(cell, "spread") for name, cell in row.cells.items()}
            own = (run for run in self.runs if run.arm == row.arm)
            seeds = {str(run.seed): {column: run.value(column) for column in self.columns} for run in own}
            tuned = {"tuned": dict(self.tuned[row.arm])} if row.arm in self.tuned else {}
            arms[row.arm] = {"runs": row.runs, **tuned, "columns": cells, "seeds": seeds}
        differences = {
            arm: {name: _named(cell, "half_of_95_percent_interval") for name, cell in columns.items()}
            for arm, columns in self.differences().items()
        }
        return {
            "columns": list(self.columns),
            "spread": "sample standard deviation over seeds",
            "arms": arms,
            "differences": {"to": self.rows[0].arm if self.rows else None, "arms": differences},
        }

    def differences(self, base: str | None = None) -> dict[str, dict[str, Cell]]:
        """Return every other arm minus ``base``, column by column, over their common seeds, on the same task.

        Runs of one seed see the same data in the same order: the effect of a seed on both is not in their difference.

        Args:
            base: name of an arm; None: the first. Cells are empty for an arm without runs.
        """
        if not self.rows:
            return {}
        base = self.rows[0].arm if base is None else base
        run_of = {(run.arm, run.seed, run.task): run for run in self.runs}
        pairs = {
            row.arm: [
                (run, run_of[base, seed, task])
                for (arm, seed, task), run in run_of.items()
                if arm == row.arm and (base, seed, task) in run_of
            ]
            for row in self.rows
            if row.arm != base
        }
        return {
            arm: {c: over_pairs((run.value(c), other.value(c)) for run, other in both) for c in self.columns}
            for arm, both in pairs.items()
        }

    @property
    def _keys(self) -> list[str]:
        """The keys that arms were tuned over."""
        return list(dict.fromkeys(key for values in self.tuned.values() for key in values))

    def _values(self, arm: str) -> list[str]:
        """Return the values that an arm was tuned to, in the order of `_keys`."""
        return [self.tuned.get(arm, {}).get(key) or self._own_value(arm, key) for key in self._keys]

    def _own_value(self, arm: str, key: str) -> str:
        """Return the value of a key with which an arm trains untuned; "-" where its runs have none, or several."""
        found: set[str] = set()
        for run in self.runs:
            if run.arm == arm:
                values = {**settings(run), **mapping(run.summary.get("choices"))}
                found |= {
                    str(value) for name, value in values.items() if name.rpartition(": ")[2] == key.removeprefix("/")
                }
        return found.pop() if len(found) == 1 else "-"

    def empty_columns(self) -> list[str]:
        """Return the columns without a value in any run, if there are runs."""
        return [c for c in self.columns if self.runs and all(row.cells[c].count == 0 for row in self.rows)]


def read_runs(folder: str | os.PathLike[str]) -> list[RunSummary]:
    """Return the runs in ``logs/<name>``, finished or not, arms in the experiment's order, then by seed.

    The experiment lists its trials in ``trials.jsonl``; a run that was started by itself has its arm in its summary. A
    trial without any folder is left out.
    """
    folder, order = Path(folder), list(read_contents(folder).get("arms", ()))
    trials = {json.dumps(line): line for line in read_lines(folder / TRIALS)}.values()
    listed = {name for line in trials for name in line["runs"].values()}
    runs = [read_trial(folder, line) for line in trials if any((folder / x).is_dir() for x in line["runs"].values())]
    for place in sorted({file.parent for name in ("summary.json", CONFIG) for file in folder.glob(f"*/{name}")}):
        known = {} if place.name in listed else read_json(place / "summary.json") or noted(place)
        if isinstance(known.get("seed"), int):
            line = {"arm": str(known.get("arm")), "seed": known["seed"], "runs": {"": place.name}}
            runs.append(read_trial(folder, line))
    rank = {arm: number for number, arm in enumerate(order)}
    return sorted(runs, key=lambda run: (rank.get(run.arm, len(rank)), run.arm, run.seed))


def list_trial(folder: Path, line: Mapping[str, Any]) -> None:
    """Add a trial to an experiment's list, unless it stands there. Several commands may do so at once."""
    folder.mkdir(parents=True, exist_ok=True)
    if line not in read_lines(folder / TRIALS):
        with (folder / TRIALS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the trials in an experiment's list. A line that a killed process has not finished is left out."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [line for line in found if {"arm", "seed", "runs"} <= mapping(line).keys()]


def read_trial(folder: Path, line: Mapping[str, Any]) -> RunSummary:
    """Return one trial of ``logs/<name>``, by its line in the list."""
    parts = {name: read_json(folder / place / "summary.json") or {} for name, place in line["runs"].items()}
    trained = [name for name, part in parts.items() if "metrics" not in part and part.get("model")] or [*parts][:1]
    last = trained[-1]
    summary = dict(parts[last])
    for name, part in parts.items():
        summary |= {f"{name}/{key}": value for key, value in mapping(part.get("metrics")).items()}
    if "" not in parts:
        undone = {name: part for name, part in parts.items() if part.get("status") != "finished"}
        begun = next((name for name in reversed(undone) if undone[name]), next(iter(undone), None))
        summary |= {
            "status": "finished",
            "reason": summary.get("reason"),
            "run": begun,
            "curves": line["runs"][trained[0]],
        }
        if begun is not None:
            summary |= {key: parts[begun].get(key) for key in ("status", "reason")}
        summary["runs"] = parts
        summary["settings"] = "+".join(str(parts[name].get("settings")) for name in trained)
    summary |= {"arm": line["arm"], "seed": line["seed"]}
    place = Path(os.path.normpath(folder / line["runs"][last]))
    return RunSummary(line["arm"], line["seed"], place, summary, dict(line["runs"]), experiment=folder)


def read_contents(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return ``arms``, ``labels``, ``table``, ``overrides`` and ``tuned`` of the experiment's last command.

    Empty where its runs were started one by one.
    """
    return read_json(Path(folder) / CONTENTS) or {}


def names_of(arms: Iterable[str], labels: Mapping[str, Any]) -> dict[str, str]:
    """Return the name of each arm on a page: its label, with what stands behind a space as it is.

    Raises ConfigError for a label that two arms have.
    """
    names: dict[str, str] = {}
    for arm in dict.fromkeys(arms):
        own, space, rest = arm.partition(" ")
        name = f"{labels.get(own, own)}{space}{rest}"
        if twin := next((earlier for earlier, text in names.items() if text == name), None):
            key = own if own in labels else twin.partition(" ")[0]
            raise ConfigError(f"labels.{key} must be the label of one arm, got {name} again")
        names[arm] = name
    return names


def measured(columns: Sequence[str], runs: Iterable[RunSummary]) -> list[str]:
    """Return the columns that a run has a number for."""
    runs = list(runs)
    return [column for column in columns if any(run.value(column) is not None for run in runs)]


def known_columns(runs: Iterable[RunSummary]) -> set[str]:
    """Return the keys of the summaries for which a run has a number; dots go down."""
    return {name for run in runs for name in flat(run.summary) if run.value(name) is not None}


def with_tasks(runs: Iterable[RunSummary]) -> list[RunSummary]:
    """Return the same runs with the names of their tasks: of the data's yaml, else of its class.

    Runs on one text have one name, whatever their tokenizers, except with ``documents: isolated``: there the first
    token of a document is left out of loss and bytes, and a longer token takes more of both. So each tokenizer has a
    name of its own.
    """
    names: dict[str, str] = {}
    runs, texts, tokenizers, isolated = list(runs), [], [], set[str]()
    for run in runs:
        choices, prints = (mapping(run.summary.get(key)) for key in ("choices", "fingerprint"))
        name = str(choices.get("data") or prints.get("task") or "")
        texts.append(str(prints.get("corpus") or name))
        tokenizers.append(str(prints.get("tokenizer") or ""))
        names.setdefault(texts[-1], name)
        isolated |= {texts[-1]} if prints.get("documents") == "isolated" else set()
    return [
        replace(run, task=run.task or f"{names[text]} {tokenizer if text in isolated else ''}".rstrip())
        for run, text, tokenizer in zip(runs, texts, tokenizers, strict=True)
    ]


def read_otherwise(runs: Iterable[RunSummary]) -> list[str]:
    """Return a sentence for each text whose first tokens several tokenizers leave out: bits per byte do not compare."""
    arms: dict[str, dict[str, str]] = {}
    for run in runs:
        text, _, tokenizer = run.task.partition(" ")
        arms.setdefault(text, {}).setdefault(tokenizer, run.arm)
    return [
        f"no difference between {' and '.join(own.values())}: their tokenizers differ, and data.documents=isolated "
        "leaves the first token of each document out of the loss and the bytes. Use data.documents=isolated_all_targets"
        for own in arms.values()
        if len(own) > 1
    ]


def mapping(content: Any) -> Mapping[str, Any]:
    """Return a mapping from a file that anyone may have written; an empty one where it is something else."""
    return content if isinstance(content, Mapping) else {}


def configs(run: RunSummary) -> dict[str, Mapping[str, Any]]:
    """Return the configuration of a run; of several after one another, of those that train, by name."""
    found = {name: noted(run.experiment / place) for name, place in run.parts.items()}
    return {name: config for name, config in found.items() if "address" in config}


def settings(run: RunSummary) -> dict[str, str]:
    """Return the values that decide the training of a run, without its seed, by key, as texts.

    Keys of several runs after one another begin with the name of the run.
    """
    if run.settings is not None:
        return run.settings
    values: dict[str, str] = {}
    for part, config in configs(run).items():
        for key, value in of_all_seeds(config).items():
            values[f"{part}: {key}" if part else key] = value if isinstance(value, str) else json.dumps(value)
    return values


def told_apart(runs: Iterable[RunSummary]) -> list[RunSummary]:
    """Return the same runs; those with other settings than the first of their arm have an arm of their own.

    Its name is `<arm> (<key>=<value>)`. Of two versions of the code only the keys that both know are compared.
    """
    first: dict[str, tuple[RunSummary, dict[str, str]]] = {}
    named = []
    for run in runs:
        own = settings(run)
        base, others = first.setdefault(run.arm, (run, own))
        keys, one_code = own.keys() & others.keys(), run.summary.get("sources") == base.summary.get("sources")
        keys |= own.keys() ^ others.keys() if keys and one_code and run.settings is None else set()
        unlike = [f"{key}={own.get(key)}" for key in sorted(keys) if own.get(key) != others.get(key)]
        named.append(replace(run, arm=f"{run.arm} ({few(unlike)})") if unlike else run)
    return named


def summarise(
    runs: Iterable[RunSummary], columns: Sequence[str] = COLUMNS, arms: Collection[str] | None = None
) -> Table:
    """Return the table of finished runs, arm by arm; the others are left out.

    Runs of an arm with other settings than its first run are an arm of their own behind it (`told_apart`).

    Args:
        runs: of ``read_runs``.
        columns: keys of ``summary.json``, at least one; dots go down.
        arms: names, in this order, also without a finished run; None: the arms of the runs.
    """
    if not columns:
        raise ValueError("columns must have a key of summary.json, such as bits_per_byte, got none")
    runs = with_tasks(run for run in runs if run.finished and (arms is None or run.arm in arms))
    names = list(dict.fromkeys(run.arm for run in runs)) if arms is None else list(arms)
    runs.sort(key=lambda run: (names.index(run.arm), run.seed))
    of_arm = {name: [name] for name in names}
    for before, run in zip(runs, apart := told_apart(runs), strict=True):
        of_arm[before.arm].append(run.arm)
    runs, names = apart, list(dict.fromkeys(name for own in of_arm.values() for name in own))
    rows = []
    for name in names:
        own = [run for run in runs if run.arm == name]
        rows.append(Row(name, len(own), {column: over_seeds(run.value(column) for run in own) for column in columns}))
    return Table(tuple(columns), tuple(rows), tuple(runs))


def _named(cell: Cell, spread: str) -> dict[str, Any]:
    return {"count": cell.count, "mean": cell.mean, spread: cell.spread}
