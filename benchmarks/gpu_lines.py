"""A line of JSON for each test as it begins and as it ends, so that nothing is lost when the run is killed.

As a pytest plugin (`-p gpu_lines`), with the file named in GSM_TEST_PLAN, it leaves out what has ended before, puts
first what decides most, and writes the lines; of several processes (pytest-xdist) only the one that leads writes.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

TAIL = 30  # lines of a failure that are kept
LAST = ("random", "two_to_the_31", "longest")  # what takes minutes
ALONE = ("two_to_the_31",)  # what takes a good part of the GPU's memory
FIRST = ("bfloat16", "low_precision")  # what models compute in
ENDED_WELL = ("passed", "skipped")


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Writes a line, below one that was torn if there is such."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(line).encode() + b"\n")


def lines(path: Path, offset: int = 0) -> list[dict[str, Any]]:
    """Those behind a number of bytes; a torn one is left out. Empty without the file."""
    found = []
    for line in path.read_bytes()[offset:].splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [line for line in found if isinstance(line, dict)]


def known(found: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The last that was written of each test: its line with the `marks` of the run that wrote it. The outcome of one
    that has begun, and of which no end was written, is `begun`; its seconds are those of the time before."""
    tests: dict[str, dict[str, Any]] = {}
    marks: Any = None
    for line in found:
        if "marks" in line:
            marks = line["marks"]
        elif "begun" in line:
            before = tests.get(line["begun"], {})
            tests.pop(line["begun"].partition("::")[0], None)  # which has failed as a whole before
            tests[line["begun"]] = {"outcome": "begun", "seconds": before.get("seconds", 0), "marks": marks}
        elif "test" in line:
            tests[line["test"]] = {**line, "marks": marks}
    return tests


def sources(table: Mapping[str, Mapping[str, str]], test: str) -> str | None:
    """The fingerprint of what a test depends on, from one for each operation and file: that of an operation which the
    test has as a parameter, or the file's own."""
    name, _, rest = test.partition("::")
    of = table.get(name, {})
    return next((of[word] for word in rest.partition("[")[2].rstrip("]").split("-") if word in of), of.get(""))


def pytest_configure(config: pytest.Config) -> None:
    """Called by pytest."""
    if "GSM_TEST_PLAN" in os.environ:
        plan = json.loads(Path(os.environ["GSM_TEST_PLAN"]).read_text(encoding="utf-8"))
        config.pluginmanager.register(Lines(plan, writes=not hasattr(config, "workerinput")))


class Lines:
    """The hooks of pytest that order tests and write lines.

    Args:
        plan: `path` of the lines; `only`, which the name of a test has to hold; `done`, tests that are left out;
            `later`, tests that come behind the others, by how far; `seconds` that a test took before; `table` as in
            `sources`.
        writes: whether this process writes.
    """

    def __init__(self, plan: Mapping[str, Any], writes: bool) -> None:
        self.plan, self.writes, self.path = plan, writes, Path(plan["path"])
        self.running: dict[str, dict[str, Any]] = {}
        self.alone = self.said = False

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """What is left, in its order: the same in every process, also in one that replaces another. Called where tests
        run: the process that leads others does not collect."""
        done, kept, gone = set(self.plan["done"]), [], []
        for item in items:
            wanted = item.path.parent.name == "ops" or item.get_closest_marker("gpu") is not None
            left = wanted and self.plan["only"] in item.nodeid and item.nodeid not in done
            (kept if left else gone).append(item)
        of_file: Counter[Path] = Counter()
        places = {}
        for item in kept:
            place = self.plan["later"].get(item.nodeid, 0), rank(item), self.plan["seconds"].get(item.nodeid, 0)
            places[item] = *place, of_file[item.path]  # by turns of all files, where nothing else decides
            of_file[item.path] += 1
        items[:] = sorted(kept, key=places.__getitem__)
        config.hook.pytest_deselected(items=gone)
        self.alone = self.writes
        self._left(len(items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        """Called where pytest-xdist leads; each of its processes has found the same."""
        self._left(len(ids))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported is a test that failed."""
        if report.failed:
            self._end(report.nodeid, {"outcome": "failed", "seconds": 0.0, **told(report)})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Of the tests that take much memory, one runs at a time, whatever process it is in."""
        if not any(word in item.name for word in ALONE):
            return (yield)
        with open(os.environ["GSM_TEST_PLAN"]) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                return (yield)
            finally:
                hand_back()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self.running[nodeid] = {"outcome": "passed", "seconds": 0.0}
        self._write({"begun": nodeid})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A part of a test has ended: its setup, the call, its teardown, or its process (`???`)."""
        found = self.running.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
        found["seconds"] = round(found["seconds"] + report.duration, 2)
        if report.outcome != "passed" and found["outcome"] != "failed":
            found |= {"outcome": report.outcome, **told(report)}
        astray = report.failed and self.alone and lost()
        if astray or report.when not in ("setup", "call"):
            self._end(report.nodeid, self.running.pop(report.nodeid))
        if astray:
            os._exit(1)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """All that was left has run, unless somebody has interrupted it."""
        self._write({"ended": int(exitstatus)})

    def _left(self, number: int) -> None:
        if not self.said:
            self._write({"left": number})
        self.said = True

    def _end(self, test: str, found: Mapping[str, Any]) -> None:
        self._write({"test": test, **found, "sources": sources(self.plan["table"], test)})

    def _write(self, line: Mapping[str, Any]) -> None:
        if self.writes:
            append(self.path, line)


def rank(item: pytest.Item) -> int:
    """0 for what decides most, 3 for what takes longest."""
    if any(word in item.nodeid for word in LAST):
        return 3
    if any(word in item.name for word in FIRST):
        return 0
    return 1 if item.get_closest_marker("gpu") is not None else 2


def hand_back() -> None:
    """What this process keeps of the GPU's memory for later calls is there for others."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()
        with contextlib.suppress(RuntimeError):  # the GPU is lost: another hook sees to that
            torch.cuda.empty_cache()


def lost() -> bool:
    """Whether the GPU takes no more work from this process, after a kernel that ran astray."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def told(report: pytest.TestReport | pytest.CollectReport) -> dict[str, Any]:
    """The first line of a failure, or the reason why a test was skipped; of a failure also its last lines."""
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        return {"first": str(reason).partition("\n")[0][:300]}
    crash = getattr(report.longrepr, "reprcrash", None)
    tail = report.longreprtext.splitlines()[-TAIL:]
    said = (crash.message if crash else "\n".join(tail[-1:])).strip()
    return {"first": said.partition("\n")[0][:300], "tail": tail}
