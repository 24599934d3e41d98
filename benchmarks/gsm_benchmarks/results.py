"""A file of results that grows row by row, and the table that is made of it."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gsm.evaluation.divided import Ranks
from gsm.files import write_json
from gsm.paths import ROOT
from gsm.tables import grid_markdown

from . import machine

FOLDER = ROOT / "logs/benchmarks"  # results worth keeping are copied to benchmarks/results
CARRIED = ("device", "threads", "versions", "sources", "commit")  # facts that a row carries; a GPU has no threads

Row = Mapping[str, Any]
Show = Callable[[Path], object]


def mark(row: Row) -> tuple[Any, ...]:
    """Return the facts in which rows agree that may be compared: the device, its threads, the versions, the sources."""
    return *(row.get(key) for key in CARRIED[:3]), row.get("sources") or row.get("commit")


class Results:
    """Rows by name in a JSON file, with the facts of the machine.

    A row of another device, number of threads, versions, sources, model or protocol is measured again, and a failed
    row is, too, behind the others.

    Args:
        path: of the file; it need not exist.
        facts: from `machine.facts`.

    Attributes:
        rows: by name.
        given: `models.Model.given` of the model of a row, by the name of the row.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path, self.facts = path, dict(facts)
        self.rows: dict[str, dict[str, Any]] = read(path)["rows"] if path.exists() else {}
        self.given: dict[str, dict[str, Any]] = {}
        self._error: Exception | None = None

    def has(self, name: str, protocol: Row) -> bool:
        """Whether there is a row of this name that need not be measured again."""
        row = self.rows.get(name)
        if row is None or row.get("failed") or row.get("protocol") != protocol:
            return False
        return mark(row) == mark(self.facts) and row.get("given", {}) == self.given.get(name, {})

    def left(self, names: Iterable[str], protocol: Row) -> list[str]:
        """Return the names of rows that are to be measured; rows that have failed before come last."""
        wanted = []
        for name in names:
            if not self.has(name, protocol):
                wanted.append(name)
            else:
                print(f"{name}: measured already")
        return sorted(wanted, key=lambda name: bool(self.rows.get(name, {}).get("failed")))

    def fill(
        self,
        rows: Mapping[str, tuple[Row, Callable[[], Row]]],
        protocol: Row,
        *,
        show: Show,
        ranks: Ranks = Ranks(),  # noqa: B008  # it cannot change
    ) -> Path:
        """Measure the rows that are missing, one after the other; return the file.

        Args:
            rows: of each row, by name, its constants, and the function that measures the rest.
            protocol: of all rows.
            show: called with the file at the end, also after an interruption.
            ranks: that measure every row together; the first one says which, writes and shows.

        Raises:
            Exception: the first that a measurement raised, once the other rows were measured. Of several ranks at once.
        """
        left = ranks.of_first(lambda: self.left(rows, protocol))
        if ranks.rank:
            for name in left:
                rows[name][1]()
            return self.path
        with self.showing(show):
            for name in left:
                about, measure = rows[name]
                about = {**about, "protocol": protocol}
                print(f"{name}: {', '.join(f'{key} {value}' for key, value in protocol.items())}", flush=True)
                with self.measuring({name: about}):
                    self.add(name, {**about, **measure()})
        return self.path

    @contextmanager
    def measuring(self, rows: Mapping[str, Row]) -> Iterator[None]:
        """Inside the block, these rows are measured. An error makes each that is missing a failed row.

        Raises RuntimeError where a GPU takes no more work from this process, and every error where other ranks measure
        with this one: they have ended.
        """
        before = {name: self.rows.get(name) for name in rows}
        try:
            yield
        except Exception as error:  # the other rows may still succeed; the error is raised after them
            traceback.print_exception(error)
            traceback.clear_frames(error.__traceback__)  # frames would hold on to tensors
            self._error = self._error or error
            for name, row in rows.items():
                if self.rows.get(name) is before[name]:
                    self.add(name, {**row, "failed": sentence(error)})
            if torch.distributed.is_initialized():
                raise
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()

    @contextmanager
    def showing(self, show: Show) -> Iterator[None]:
        """Show the file behind the block, also after an interruption, and raise the first error of `measuring`."""
        try:
            yield
        finally:
            if self.rows:
                show(self.path)
        if self._error is not None:
            raise self._error

    def add(self, name: str, row: Row) -> None:
        """Put a row in place and write the file."""
        overrides = {"given": self.given[name]} if self.given.get(name) else {}
        self.rows[name] = {**{key: self.facts[key] for key in CARRIED if key in self.facts}, **overrides, **row}
        write_json(self.path, {**self.facts, "rows": self.rows})


def sentence(error: Exception) -> str:
    """Return the kind of an error, and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def read(path: Path, field: str | None = None) -> dict[str, Any]:
    """Return the content of a file of results.

    Raises ValueError where it is no such file, or a row lacks the field: then it is a file of another benchmark.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no file of results: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("rows"), dict):
        raise ValueError(f"{path} is no file of results: it holds no rows")
    other = [name for name, row in content["rows"].items() if field and field not in row]
    if other:
        raise ValueError(f"{path} is a file of another benchmark: its row '{other[0]}' has no {field}")
    return content


@dataclass(frozen=True)
class Asked:
    """The arguments of every benchmark that measures; configs/benchmark.yaml describes them."""

    device: str = "auto"
    output: str = ""
    results: str = ""

    def open(self, benchmark: str, device: torch.device) -> Results:
        """Return the file of a benchmark, which need not exist. Raises ValueError if there is one without rows."""
        facts = machine.facts(device)
        return Results(Path(self.output) if self.output else usual_path(facts, benchmark), facts)


def usual_path(facts: Mapping[str, Any], benchmark: str) -> Path:
    """Return `<device>-<benchmark>.json` in logs/benchmarks, in lower case, digits and dashes."""
    device = re.sub(r"[^a-z0-9.]+", "-", facts["device"].lower()).strip("-")
    return FOLDER / f"{device}-{benchmark}.json"


def publish(path: Path, *sections: str, pictures: Mapping[str, Callable[[], bytes]] | None = None) -> Path:
    """Write the sections as Markdown beside a file of results and print them; return the file.

    `pictures` are functions that return a PNG, by the end of its file's name. They are drawn where matplotlib is
    installed.
    """
    text = "\n\n".join([f"# {path.stem}", *filter(None, sections)]) + "\n"
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(f"\n{text}")
    for name, draw in (pictures or {}).items():
        try:
            path.with_name(f"{path.stem}{name}.png").write_bytes(draw())
        except (ImportError, ValueError) as error:  # matplotlib is missing, or nothing was measured
            print(error)
    return path


def measured_on(content: Mapping[str, Any]) -> str:
    """Return the device, versions, commit and command of a file of results."""
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    return f"{content['device']}, {versions}, commit {content['commit']}, `{content['command']}`."


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; the last cells of a row may be left out."""
    return grid_markdown([head, *rows])


def rate(number: float, unit: str) -> str:
    """Return three digits with T or G."""
    return f"{number / 1e12:.3g} T{unit}" if number >= 1e11 else f"{number / 1e9:.3g} G{unit}"


def quartiles(spread: Mapping[str, float]) -> str:
    """Return a median with its quartiles."""
    return f"{spread['median']:.4g} ({spread['low']:.4g} to {spread['high']:.4g})"
