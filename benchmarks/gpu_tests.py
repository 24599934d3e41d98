"""The tests that a GPU changes, file by file: `python benchmarks/gpu_tests.py [force] [output=FILE]`.

Every file is a process of its own, so that a kernel that runs astray spoils no other file; where pytest-xdist is
installed it is several, since most of the time goes into compiling kernels. What passed is not run again on the same
commit; results go to benchmarks/results/<device>-<date>-tests.json as they come. Last, the smallest call of every
operation runs under compute-sanitizer, where the machine has it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
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
WORKERS = min(12, (os.cpu_count() or 1) * 3 // 4)

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
    """Those whose calls move to a GPU where there is one, or with a test that asks for it; operations first."""
    found = [*sorted(ROOT.glob("tests/ops/test_*.py")), *sorted(ROOT.glob("tests/test_*.py"))]
    marks = ("from triton_check", "mark.gpu")
    return [path for path in found if any(mark in path.read_text(encoding="utf-8") for mark in marks)]


def run_file(
    path: Path, options: Sequence[str] = (), seconds: float = 400, runner: Sequence[str] = ()
) -> dict[str, Any]:
    """Counts of passed, failed and skipped tests of a file, and the failed ones with their first line. Raises
    KeyboardInterrupt, as `timeout` does, if it does not end within so many seconds."""
    chosen = () if path.parent.name == "ops" else ("-m", "gpu")
    with tempfile.TemporaryDirectory() as folder:
        report, began = Path(folder) / "report.xml", time.monotonic()
        pytest = (sys.executable, "-m", "pytest", *OPTIONS, *(() if runner else plugins()), f"--junitxml={report}")
        status, said = ended([*runner, *pytest, *chosen, *options, str(path)], seconds)
        row = {"seconds": round(time.monotonic() - began, 1), "exit": status}
        lines = said.strip().splitlines()
        if not report.exists():
            return {**row, "failed": {path.name: lines[-1] if lines else f"exit status {status}"}}
        row |= counted(report)
        if status == UNSOUND:
            found = [line for line in lines if "ERROR SUMMARY" in line]
            row["failed"]["compute-sanitizer"] = found[-1] if found else "found errors"
        elif status and not row["failed"]:
            row["failed"][path.name] = lines[-1] if lines else f"exit status {status}"
        return row


def plugins() -> tuple[str, ...]:
    """Options for the plugins that are installed: several processes, of which one that crashes is replaced, and an end
    to that of a test which hangs, also where it waits for the GPU."""
    several = ("-p", "xdist", "-n", str(WORKERS), "--dist", "worksteal") if WORKERS > 1 else ()
    limited = ("-p", "pytest_timeout", "-o", "timeout_method=thread", "-o", "timeout=300")
    wanted = {"xdist": several, "pytest_timeout": limited}
    return tuple(word for name, words in wanted.items() if importlib.util.find_spec(name) for word in words)


def ended(command: Sequence[str], seconds: float) -> tuple[int, str]:
    """Exit status and output of a process; nothing that it has started goes on. Raises KeyboardInterrupt if it does not
    end in time."""
    heard = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, process_group=0, **heard) as process:
        try:
            said, _ = process.communicate(timeout=seconds)
            return process.returncode, said
        except subprocess.TimeoutExpired as error:
            raise KeyboardInterrupt from error
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


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


def main(force: bool, output: str) -> int:
    """Runs what is left, prints a line for every file, and returns how many files failed."""
    from gsm_kernels.benchmark import machine
    from gsm_kernels.benchmark.results import Results, usual_path

    facts, began = machine.facts(machine.chosen("cuda")), time.monotonic()
    results = Results(Path(output) if output else usual_path(facts, "tests"), facts)
    for name, path, options, runner in sorted(jobs(), key=lambda job: results.times(job.name)):
        left = 60 * MINUTES - (time.monotonic() - began)
        if not force and results.has(name):
            continue
        if left < 30:
            print(f"{MINUTES:g} minutes are over: the same command goes on with {name}")
            break
        with results.trying(name):
            row = run_file(path, options, left, runner)
            results.add(name, row)
        said = f"{row.get('passed', 0)} passed, {len(row['failed'])} failed, {row['seconds']:.0f} s"
        print(f"{name}: {said}", *row["failed"].items(), sep="\n  ", flush=True)
    return sum(bool(row["failed"]) for row in results.rows.values())


if __name__ == "__main__":
    if importlib.util.find_spec("pytest") is None:
        sys.exit(f"error: {sys.executable} has no pytest: install it, or lay its wheels into wheels/")
    words = {name: value for name, _, value in (word.partition("=") for word in sys.argv[1:])}
    if unknown := words.keys() - {"force", "output"}:
        sys.exit(f"error: cannot read '{unknown.pop()}'; there are force, output=FILE")
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "kernels")]
    try:
        sys.exit(min(main("force" in words, words.get("output", "")), 1))
    except ValueError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command goes on with the file that was not finished")
