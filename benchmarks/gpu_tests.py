"""The tests that a GPU changes, file by file: `python benchmarks/gpu_tests.py [force]`.

Every file is a process of its own, so that a kernel that runs astray spoils no other file. What passed is not run again
on the same commit; results go to benchmarks/results/<device>-<date>-tests.json as they come. Last, the smallest call of
every operation runs under compute-sanitizer, where the machine has it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
MINUTES = 7.5
# A machine with a GPU may lack the plugin that knows `timeout`, have others, and other libraries that warn.
OPTIONS = ("-q", "-p", "no:cacheprovider", "-o", "addopts=", "-W", "default")
ENVIRONMENT = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

UNSOUND = 99  # the exit status that compute-sanitizer is told to end with


class Job(NamedTuple):
    """One process: what its row is called, a file of tests, options for pytest, and what runs Python."""

    name: str
    path: Path
    options: tuple[str, ...] = ()
    runner: tuple[str, ...] = ()


def jobs() -> Iterator[Job]:
    """Every file, then the tools of compute-sanitizer that look for what results do not show."""
    yield from (Job(str(path.relative_to(ROOT)), path) for path in files())
    sanitizer, smallest = shutil.which("compute-sanitizer"), ROOT / "tests/ops/test_triton.py"
    for tool in ("memcheck", "racecheck") if sanitizer else ():
        runner = (str(sanitizer), "--tool", tool, "--error-exitcode", str(UNSOUND))
        yield Job(f"compute-sanitizer {tool}", smallest, ("-k", "outputs_and_gradients"), runner)
    if not sanitizer:
        print("compute-sanitizer is not on the PATH: reads out of range and races are not looked for")


def files() -> list[Path]:
    """Those of the operations, and any other with a test that asks for a GPU."""
    others = [path for path in ROOT.glob("tests/test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8")]
    return sorted(ROOT.glob("tests/ops/test_*.py")) + sorted(others)


def run_file(
    path: Path, options: Sequence[str] = (), seconds: float = 400, runner: Sequence[str] = ()
) -> dict[str, Any]:
    """Counts of passed, failed and skipped tests of a file, and the failed ones with their first line."""
    chosen = () if path.parent.name == "ops" else ("-m", "gpu")
    with tempfile.TemporaryDirectory() as folder:
        report, began = Path(folder) / "report.xml", time.monotonic()
        command = [
            *runner,
            sys.executable,
            "-m",
            "pytest",
            *OPTIONS,
            *chosen,
            f"--junitxml={report}",
            *options,
            str(path),
        ]
        try:
            ended = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return {"failed": {path.name: f"did not end within {seconds:.0f} s"}}
        row = {"seconds": round(time.monotonic() - began, 1), "exit": ended.returncode}
        if not report.exists():
            said = (ended.stderr + ended.stdout).strip().splitlines() or [f"exit status {ended.returncode}"]
            return {**row, "failed": {path.name: said[-1]}}
        row |= counted(report)
        if ended.returncode == UNSOUND:
            said = [line for line in ended.stdout.splitlines() if "ERROR SUMMARY" in line]
            row["failed"]["compute-sanitizer"] = said[-1] if said else "found errors"
        return row


def counted(report: Path) -> dict[str, Any]:
    """What a JUnit file says."""
    failed, skipped, passed = {}, 0, 0
    for case in ElementTree.parse(report).iter("testcase"):
        trouble = next((case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None)
        if trouble is not None:
            failed[case.get("name", "")] = (trouble.get("message") or "").partition("\n")[0][:300]
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return {"passed": passed, "skipped": skipped, "failed": failed}


def main(force: bool) -> int:
    """Runs what is left, prints a line for every file, and returns how many files failed."""
    from gsm_kernels.benchmark import machine
    from gsm_kernels.benchmark.results import Results, usual_path

    facts, began = machine.facts(machine.chosen("cuda")), time.monotonic()
    results = Results(usual_path(facts, "tests"), facts)
    for name, path, options, runner in jobs():
        left = 60 * MINUTES - (time.monotonic() - began)
        if not force and results.has(name) and not results.rows[name]["failed"]:
            continue
        if left < 30:
            print(f"{MINUTES:g} minutes are over: the same command goes on with {name}")
            break
        row = run_file(path, options, left, runner)
        results.add(name, row)
        print(f"{name}: {row.get('passed', 0)} passed, {len(row['failed'])} failed", *row["failed"].items(), sep="\n  ")
    return sum(bool(row["failed"]) for row in results.rows.values())


if __name__ == "__main__":
    if importlib.util.find_spec("pytest") is None:
        sys.exit(f"error: {sys.executable} has no pytest: install it, or lay its wheels into wheels/")
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "kernels")]
    try:
        sys.exit(min(main("force" in sys.argv[1:]), 1))
    except ValueError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command goes on with the file that was not finished")
