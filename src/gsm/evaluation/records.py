"""Measurements as flat records, and tables of them.

A record is a dictionary. Its keys tell what was measured (``length``, ``task``, ...), ``quantity`` names the number,
``value`` is a sum over one unit (a question, a window, a sequence), and ``weight`` the number of things in this sum: a
mean is always ``sum(value) / sum(weight)``. A file of records has a line of JSON for each:

    import pandas as pd
    pd.read_json("logs/default/gsm-seed0-1f3a9c07/answers.jsonl", lines=True)
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from gsm.config.check import ConfigError
from gsm.evaluation.divided import Ranks
from gsm.intervals import Interval, over_questions, over_seeds, over_windows
from gsm.provenance import commit
from gsm.tables import Grid

Record = dict[str, Any]
Progress = Callable[[Iterable[Any], int, str], Iterable[Any]]  # passes this number of parts on, and may report them
START = b'{"settings": '  # of a file
END = "\n\n"  # of a part: an empty line, which readers of JSON lines skip


def silent(parts: Iterable[Any], count: int, note: str = "") -> Iterable[Any]:
    """Return the parts, and report nothing."""
    return parts


@dataclass
class Measured:
    """What one measure has found of one checkpoint.

    Attributes:
        settings: what the numbers depend on: ``model`` (weights, precision, device, versions) and ``questions``.
        run: ``checkpoint``, ``experiment``, ``arm``, ``seed`` and ``step``.
        records: those that were asked for.
        file: keeps the records; None: nothing does. Of several ranks the first one has it.
        ranks: that measure together.
    """

    settings: dict[str, Any]
    run: dict[str, Any] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    file: Path | None = None
    ranks: Ranks = Ranks()

    @classmethod
    def begun(
        cls,
        file: Path | None,
        settings: Mapping[str, Any],
        run: Mapping[str, Any] | None = None,
        ranks: Ranks | None = None,
    ) -> Measured:
        """Return a measure without records. Its settings pass through JSON, to be equal to those read from a file."""
        return cls(json.loads(json.dumps(settings)), dict(run or {}), [], file, ranks or Ranks())

    def fill(
        self,
        parts: Iterable[Record],
        compute: Callable[[Any], Iterable[Record]],
        progress: Progress = silent,
        together: bool = False,
    ) -> None:
        """Measure the parts that the file lacks, append each to the file once it is done, and take the records of all
        parts. Another process that measures into the file waits meanwhile.

        Args:
            parts: the units of computation: of each the keys that all of its records share. Ranks divide them among
                themselves; a repeated part is computed once.
            compute: returns the other keys of every record of a part, at least one record.
            progress: passes on the parts that are left, as many at a time as there are ranks.
            together: all ranks compute every part, and ``compute`` divides it.

        Raises:
            ConfigError: the file holds something else.
            OSError: it cannot be written.
        """
        wanted = {tuple(part.values()): part for part in parts}
        with self._opened() as (file, before):
            same = (record for one in before if one.settings == self.settings for record in one.records)
            known = by(same, *next(iter(wanted.values())))
            known = self.ranks.of_first(lambda: {values: known[values] for values in wanted if values in known})
            left = [part for values, part in wanted.items() if values not in known]
            if [one.settings for one in before][-1:] != [self.settings]:
                _append(file, [{"settings": self.settings, "commit": commit()}])
            size = 1 if together else self.ranks.world
            rounds = [left[first : first + size] for first in range(0, len(left), size)]
            for some in progress(rounds, len(rounds), ""):
                found = map(compute, some) if together else self.ranks.divided(some, lambda part: list(compute(part)))
                for part, records in zip(some, found, strict=True):
                    known[tuple(part.values())] = lines = [{**part, **record} for record in records]
                    _append(file, lines)
        self.records += [record for values in wanted for record in known[values]]

    def where(self, **keys: Any) -> list[Record]:
        """Return the records with these values."""
        return where(self.records, **keys)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[BinaryIO | None, list[Measured]]]:
        """Open the file behind its last complete part, with the records before, and keep other processes from it.
        Raises ConfigError where it holds something else, OSError where it cannot be written."""
        if self.file is None:
            yield None, []
            return
        with self.file.open("a+b") as file:
            with contextlib.suppress(OSError):  # some network file systems have no locks
                fcntl.flock(file, fcntl.LOCK_EX)
            before = read(self.file)
            file.seek(0)
            file.truncate(_complete(file.read()))
            yield file, before


def _append(file: BinaryIO | None, lines: Sequence[Record]) -> None:
    """Add a part to an open file."""
    if file is not None:
        file.write(("\n".join(map(json.dumps, lines)) + END).encode())
        file.flush()


def read(file: Path) -> list[Measured]:
    """Return the records of a file by their settings, those of the last command last; empty if there is no file.

    A part that a killed process has begun is left out. Raises ConfigError for a line that is no record, as in a file of
    another program.
    """
    if not file.is_file():
        return []
    raw, found, key = file.read_bytes(), dict[str, Measured](), ""
    if not raw.startswith(START[: len(raw)]):
        raise ConfigError(f"{file}, line 1 must be the settings of records, got {raw[:40]!r}; use another output=")
    for number, line in enumerate(raw[: _complete(raw)].splitlines(), 1):
        try:
            record = json.loads(line or "null")
            if record is None:
                continue
            if settings := record.get("settings"):
                key = json.dumps(settings, sort_keys=True)
                found[key] = found.pop(key, Measured(settings, file=file))
            else:
                found[key].records.append(record)
        except (ValueError, AttributeError, KeyError) as error:
            raise ConfigError(f"{file}, line {number} must be a record: {error!r}. Remove the file") from error
    return list(found.values())


def _complete(raw: bytes) -> int:
    return raw.rfind(END.encode()) + len(END) if END.encode() in raw else 0


def where(records: Iterable[Record], **keys: Any) -> list[Record]:
    """Return the records with these values."""
    return [record for record in records if all(record.get(key) == value for key, value in keys.items())]


def mean(records: Sequence[Record], strata: Sequence[str] = ()) -> float | None:
    """Return ``sum(value) / sum(weight)``; with strata the unweighted mean of this over the values of these keys. None
    without a record."""
    groups = by(records, *strata).values()
    return statistics.fmean(map(_mean, groups)) if records else None


def _mean(records: Sequence[Record]) -> float:
    return math.fsum(record["value"] for record in records) / math.fsum(record["weight"] for record in records)


def error(records: Sequence[Record]) -> float | None:
    """Return the standard error of the mean m of n units: sqrt(n / (n - 1) sum (value - m weight)^2) / sum(weight).

    None for a single unit. Units count as independent, so the error is too small if many come from one document.
    """
    records = [record for record in records if record["weight"]]
    if (count := len(records)) < 2:
        return None
    middle = _mean(records)
    squares = math.fsum((record["value"] - middle * record["weight"]) ** 2 for record in records)
    return math.sqrt(count / (count - 1) * squares) / math.fsum(record["weight"] for record in records)


def by(records: Iterable[Record], *keys: str) -> dict[tuple[Any, ...], list[Record]]:
    """Return the records by the values of these keys, in their order."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record.get(key) for key in keys), []).append(record)
    return groups


Arms = Mapping[str, Mapping[Any, Measured]]  # by name and seed
Rows = Mapping[str, Mapping[str, Any]]  # by their title, the values that the records of a row have
Cell = Callable[[Sequence[Sequence[Record]]], str]  # takes the records of a row, of every seed


def by_arm(runs: Sequence[Measured]) -> dict[str, dict[Any, Measured]]:
    """Return measurements by arm and seed, in their order.

    Arms of several experiments have the experiment's name in front. A second run of the same arm and seed counts as
    another seed.
    """
    several = len({one.run["experiment"] for one in runs}) > 1
    arms: dict[str, dict[Any, Measured]] = {}
    for one in runs:
        arm, seed = one.run["arm"], one.run["seed"]
        seeds = arms.setdefault(f"{one.run['experiment']}/{arm}" if several else arm, {})
        seeds[seed if seed not in seeds else (seed, len(seeds))] = one
    return arms


def runs_of(arms: Arms) -> list[Measured]:
    """Return the measurements of all arms, in their order."""
    return [one for seeds in arms.values() for one in seeds.values()]


def pivot(
    title: str,
    arms: Arms,
    rows: Rows,
    cell: Cell,
    columns: Sequence[str] = (),
    published: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Grid:
    """Return rows by arms, and published numbers behind them.

    Args:
        title: of the rows.
        arms: ``by_arm``.
        rows: the records of each.
        cell: returns the text of a cell, such as ``over_arms``.
        columns: titles of the published numbers.
        published: by the title of a row, a text for each of these columns; without them: ``-``.
    """
    grid = [[title, *arms, *columns]]
    for label, keys in rows.items():
        cells = [cell([one.where(**keys) for one in seeds.values()]) for seeds in arms.values()]
        grid.append([label, *cells, *(published.get(label) or ["-"] * len(columns))])
    return grid


def over_arms(digits: int, scale: float = 1.0, strata: Sequence[str] = ()) -> Cell:
    """Return a cell with the mean over seeds and their sample standard deviation."""

    def cell(seeds: Sequence[Sequence[Record]]) -> str:
        means = [mean(records, strata) for records in seeds]
        return over_seeds(None if value is None else scale * value for value in means).text(digits)

    return cell


def over_units(seeds: Sequence[Sequence[Record]]) -> tuple[float, float, float]:
    """Return the mean over units, and the ends of its 95 % interval by the bootstrap over units.

    All seeds must have the same units. A unit has the mean of its values over the seeds."""
    values = [statistics.fmean(record["value"] for record in unit) for unit in zip(*seeds, strict=True)]
    weights = [record["weight"] for record in seeds[0]]
    return math.fsum(values) / math.fsum(weights), *over_windows(values, weights)


def minus(
    title: str, arms: Arms, rows: Rows, unit: Sequence[str], strata: Sequence[str] = (), **text: Any
) -> list[Grid]:
    """Return a list with the table of each later arm minus the first; empty for a single arm.

    Intervals are 95 %, from the paired bootstrap over units.

    The value of a unit is its mean over the seeds that both arms have. All strata weigh the same. A cell is ``-``
    where the two arms share no seed.

    Args:
        title: stands before the name of the first arm.
        unit, strata: keys that tell units and strata apart.
        text: arguments of ``Interval.text``.
    """
    (base, first), *later = arms.items()
    if not later:
        return []
    grid = [[f"{title}{base}, with 95 % interval", *(name for name, _ in later)]]
    for label, keys in rows.items():
        line = [label]
        for _, other in later:
            seeds = [seed for seed in first if seed in other]
            ours, theirs = ([arm[seed].where(**keys) for seed in seeds] for arm in (first, other))
            there = seeds and all([*ours, *theirs])
            line.append(difference(ours, theirs, unit, strata).text(**text) if there else "-")
        grid.append(line)
    return [grid]


def difference(
    first: Sequence[Sequence[Record]],
    second: Sequence[Sequence[Record]],
    unit: Sequence[str],
    strata: Sequence[str] = (),
) -> Interval:
    """Return the second minus the first of two lists of runs on the same units. Raises ConfigError for others."""
    scores = [_scores(runs, unit, strata) for runs in (first, second)]
    for name in {**scores[0], **scores[1]}:
        if scores[0].get(name, {}).keys() != scores[1].get(name, {}).keys():
            raise ConfigError(f"{', '.join(unit)} must be the same for arms side by side, got others in {name}")
    return over_questions(*({str(name): list(units.values()) for name, units in each.items()} for each in scores))


def _scores(
    runs: Sequence[Sequence[Record]], unit: Sequence[str], strata: Sequence[str]
) -> dict[Any, dict[Any, float]]:
    """Return by stratum and unit, both sorted, the unit's share of the mean, over the mean weight of units."""
    scores: dict[Any, dict[Any, float]] = {}
    for name, records in by((record for run in runs for record in run), *strata).items():
        weight = statistics.fmean(record["weight"] for record in records)
        units = by(records, *unit)
        scores[name] = {
            key: statistics.fmean(record["value"] for record in units[key]) / weight for key in sorted(units)
        }
    return scores


def points(arms: Arms, key: str, scale: float = 1.0, **keys: Any) -> dict[str, list[dict[Any, float]]]:
    """Return by arm, for each of its runs, the mean by the values of ``key``: the points of a picture."""
    return {
        arm: [
            {value: scale * _mean(records) for (value,), records in by(one.where(**keys), key).items()}
            for one in seeds.values()
        ]
        for arm, seeds in arms.items()
    }
