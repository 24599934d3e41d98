"""Tables of runs, for experiments and notebooks: their summaries are read and put together over seeds.

from gsm.experiments.table import read_runs, summarise

print(summarise(read_runs("logs/ablate_residual"), ["bits_per_byte", "data.train_tokens"]).text())
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gsm.config.check import ConfigError, few, flat
from gsm.config.decisive import LOCAL, decides
from gsm.config.options import saved
from gsm.files import read_json
from gsm.intervals import Cell, over_pairs, over_seeds
from gsm.tables import WIDTH, Grid, grid_csv, grid_markdown, grid_text, number_text

CONTENTS = "experiment.json"  # the arms of an experiment in their order, and the columns of its table
COLUMNS = ("bits_per_byte", "val_loss")
PROPERTIES = ("parameters", "learning_rate", "cache_bytes", "state_bytes")  # no seed of an arm changes them
FOOTNOTE = (
    "mean +- sample standard deviation over the seeds; of differences, mean and 95 % interval (paired Student's t) "
    "over the seeds that both arms have, from three on"
)
# The meanings of columns, and the better direction where it is the same for every experiment.
MEANINGS = {
    "accuracy": "fraction of the held-out questions answered; higher is better",
    "bits_per_byte": "of held-out text; lower is better",
    "cache_bytes": "everything that the model remembers of a sequence; lower is better",
    "overlap.chance": "the same of two independent selections: K / visible entries, mean over the same rows",
    "overlap.mean": "fraction of a stage's selected bank entries that its encoder layer selects too, mean over stages",
    "state_bytes": "the shared state; lower is better",
    "tokens_per_second": "of training; higher is better",
    "val_loss": "held-out loss in nats per token; lower is better",
    "val_perplexity": "of held-out text; lower is better",
}


@dataclass(frozen=True)
class RunSummary:
    """A run: its arm and seed, its folder, and the content of its ``summary.json``."""

    arm: str
    seed: int
    folder: Path
    summary: dict[str, Any]
    task: str = ""  # the name that `with_tasks` gives its data
    settings: dict[str, str] | None = None  # that decide its training, without its seed; None: see `settings`

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
    """

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    runs: tuple[RunSummary, ...] = field(repr=False)
    tuned: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

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
        grids = [[["arm", "runs", *self._keys, *self.columns]]]
        for row in self.rows:
            cells = {name: self._without_spread(name, cell) for name, cell in row.cells.items()}
            grids[0].append([row.arm, str(row.runs), *self._values(row.arm), *map(str, cells.values())])
        seeds = sorted({run.seed for run in self.runs})
        for column in self.columns[:1] if len(seeds) > 1 else ():
            first = {(run.arm, run.seed): run.value(column) for run in self.runs if run.value(column) is not None}
            rows = [[row.arm, *(number_text(first.get((row.arm, seed))) for seed in seeds)] for row in self.rows]
            grids.append([[column, *(f"seed {seed}" for seed in seeds)], *rows])
        counts = {arm: max(cell.count for cell in cells.values()) for arm, cells in self.differences().items()}
        if max(counts.values(), default=0) > 1:
            rows = [
                [arm, str(counts[arm]), *(str(cells[name]) for name in self.measured)]
                for arm, cells in self.differences().items()
                if counts[arm]
            ]
            grids.append([[f"minus {self.rows[0].arm}", "seeds", *self.measured], *rows])
        return grids

    @staticmethod
    def _without_spread(name: str, cell: Cell) -> Cell:
        return replace(cell, spread=None) if name in PROPERTIES and cell.spread == 0 else cell

    def verdicts(self) -> list[str]:
        """Return a sentence on the first column: arms that differ from the first, by a paired t-test at 95 %."""
        column = self.columns[0]
        direction = MEANINGS.get(column, "").rpartition("; ")[2]
        words = {"lower is better": ("better", "worse"), "higher is better": ("worse", "better")}.get(direction)
        groups: dict[str, list[str]] = {}
        for arm, cells in self.differences().items():
            cell = cells[column]
            if cell.count:
                differs = (words or ("lower", "higher"))[(cell.mean or 0) > 0]
                seeds = "one seed" if cell.count == 1 else f"{cell.count} seeds"
                unknown = "too few seeds to tell" if cell.spread is None else "no difference shown"  # no interval
                verdict = differs if cell.differs else unknown
                groups.setdefault(verdict, []).append(f"{arm} ({cell}, {seeds})")
        verdicts = "; ".join(f"{verdict}: {', '.join(arms)}" for verdict, arms in groups.items())
        title = f"{column} ({direction})" if words else column
        return [f"{title}, beside {self.rows[0].arm}: {verdicts}"] if groups else []

    def meanings(self) -> list[str]:
        """Return a line for each column that needs one."""
        return [f"{column}: {MEANINGS[column]}" for column in self.columns if column in MEANINGS]

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
        return [self.tuned.get(arm, {}).get(key, "-") for key in self._keys]

    def empty_columns(self) -> list[str]:
        """Return the columns without a value in any run, if there are runs."""
        return [c for c in self.columns if self.runs and all(row.cells[c].count == 0 for row in self.rows)]


def read_runs(folder: str | os.PathLike[str]) -> list[RunSummary]:
    """Return the runs below ``logs/<name>``, finished or not, arms in the experiment's order, then by seed.

    Runs without a readable summary are left out.
    """
    runs, order = [], list(read_contents(folder).get("arms", ()))
    for file in sorted(Path(folder).glob("*/seed*/summary.json")):
        number = re.fullmatch(r"seed(-?\d+)", file.parent.name)
        summary = read_json(file)
        if number and summary is not None:
            runs.append(RunSummary(file.parent.parent.name, int(number[1]), file.parent, summary))
    place = {arm: number for number, arm in enumerate(order)}
    return sorted(runs, key=lambda run: (place.get(run.arm, len(place)), run.arm, run.seed))


def read_contents(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return ``arms``, ``table`` and ``tuned`` of the experiment's last command; empty where its runs were started one
    by one.

    They are not read from ``.hydra``, which has no tuned values.
    """
    return read_json(Path(folder) / CONTENTS) or {}


def with_tasks(runs: Iterable[RunSummary]) -> list[RunSummary]:
    """Return the same runs with the names of their tasks: of the data's yaml, else of its class.

    One text has one name with any tokenizer; one for each, where a run leaves the first tokens of documents out of the
    loss and the bytes (``documents: isolated``): a longer token takes more of both.
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


def yamls(run: RunSummary) -> dict[str, Path]:
    """Return Hydra's configuration of a run; for a run of several parts, the files of the parts that trained."""
    names = [part for part in mapping(run.summary.get("runs")) if Path(part).name == part]
    files = {part: run.folder / part / ".hydra/config.yaml" for part in names or [""]}
    return {part: file for part, file in files.items() if file.is_file()}


def settings(run: RunSummary) -> dict[str, str]:
    """Return the values that decide the training of a run, by key, as texts; empty where no yaml beside it has them.

    Its seed is left out, also in paths. Keys of several parts begin with the part's name.
    """
    if run.settings is not None:
        return run.settings
    values: dict[str, str] = {}
    for part, file in yamls(run).items():
        try:
            config = flat(mapping(saved(file)))
        except ConfigError:
            config = {}
        for key, value in config.items():
            counts = decides(key) and key not in LOCAL and key.rpartition(".")[2] != "seed"
            if counts or key in ("start_from", "start_fresh"):
                text = value if isinstance(value, str) else json.dumps(value, default=str)
                values[f"{part}: {key}" if part else key] = re.sub(rf"\bseed{run.seed}\b", "seed", text)
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
        raise ValueError("columns is empty, but a table needs at least one key of summary.json, such as bits_per_byte")
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
