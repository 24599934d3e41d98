"""The tests that a GPU changes, one by one, and compute-sanitizer: the stage `tests` of benchmarks/gpu.py.

Each test is a line of JSON in <results>/<device>-tests.jsonl, written as it ends (gpu_lines.py). What has passed is
not run again, unless what it depends on has changed: its file, and the operations that it or its file names. What has
failed is, behind all others; so is what began and did not end. Last, the smallest bfloat16 call of every operation runs
under compute-sanitizer, without PyTorch's caching allocator, which hides what is out of bounds.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gpu
import gpu_lines

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 300  # seconds of a test, and of an operation under a tool of compute-sanitizer
# A machine with a GPU may lack the plugin that knows `timeout`, have others, and other libraries that warn.
OPTIONS = ("-q", "--tb=short", "-p", "no:cacheprovider", "-o", "addopts=", "-W", "default", f"--rootdir={ROOT}")
WORKERS = max(1, min(12, (os.cpu_count() or 1) * 3 // 4))

TOOLS = ("memcheck", "racecheck", "initcheck")
SMALLEST = "tests/ops/test_triton.py::test_in_bfloat16_they_err_no_more_than_eager"
AT_ONCE = 4  # operations under compute-sanitizer, at most
UNSOUND = 99  # the exit status that it is told to end with
LEAST = 20  # seconds, with less of which nothing is begun


class Stage(NamedTuple):
    """The file of lines, what runs are compared by, the words that were given, and when nothing new begins, in seconds
    of the monotonic clock."""

    path: Path
    marks: Mapping[str, Any]
    only: str
    keep: bool
    force: bool
    workers: int
    end: float

    def known(self) -> dict[str, dict[str, Any]]:
        """The last line of every test."""
        return gpu_lines.known(gpu_lines.lines(self.path))

    def valid(self, test: str, line: Mapping[str, Any], table: Mapping[str, Mapping[str, str]]) -> bool:
        """Whether a line says of the test what it would say now."""
        same = line["marks"] == self.marks and line.get("sources") == gpu_lines.sources(table, test)
        return line["outcome"] != "begun" and (self.keep or same)

    def place(self, test: str, line: Mapping[str, Any], table: Mapping[str, Mapping[str, str]]) -> int | None:
        """None for a test that need not run; of the others, 1 for one that began and did not end, 2 for one that has
        failed, of the same sources, and 0 for those that come before these."""
        if line["outcome"] == "begun" or not self.valid(test, line, table):
            return int(line["outcome"] == "begun")
        return 2 if line["outcome"] not in gpu_lines.ENDED_WELL else 0 if self.force else None

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()


def files() -> list[Path]:
    """Those whose calls move to a GPU where there is one, or with a test that asks for it; operations first."""
    found = [*sorted(ROOT.glob("tests/ops/test_*.py")), *sorted(ROOT.glob("tests/test_*.py"))]
    marks = ("from triton_check", "mark.gpu")
    return [path for path in found if any(mark in path.read_text(encoding="utf-8") for mark in marks)]


def fingerprints(paths: Sequence[Path]) -> dict[str, dict[str, str]]:
    """For `gpu_lines.sources`: of a file with the helpers beside it, and the operations that its text names, or all if
    it names none; a file outside of tests/ops goes through the models, so that it depends on gsm too."""
    from gsm_benchmarks import machine
    from gsm_kernels import OPS

    of_op = {op.name: machine.sources_of(op.name) for op in OPS}
    helpers = [path for path in ROOT.glob("tests/ops/*.py") if not path.name.startswith("test_")]
    models = list((ROOT / "src/gsm").rglob("*.py"))
    table = {}
    for path in paths:
        text, inside = path.read_text(encoding="utf-8"), path.parent.name == "ops"
        own = [path, *(helpers if inside else models)]
        named = [op for op in of_op if inside and re.search(rf"\b{op}\b", text)] or list(of_op)
        groups = {"": [file for op in named for file in of_op[op]], **of_op}
        name = path.relative_to(ROOT).as_posix()
        table[name] = {op: machine.fingerprint([*own, *group]) for op, group in groups.items()}
    return table


def run_tests(stage: Stage, paths: Sequence[Path], table: Mapping[str, Mapping[str, str]]) -> None:
    """Every test that is left, once. Where pytest-xdist is, a process that a test takes down is replaced; without it
    that test is noted, and pytest starts again behind it. Raises ValueError if pytest does not start."""
    lines = stage.known()
    places = {test: stage.place(test, line, table) for test, line in lines.items()}
    done = {test for test, place in places.items() if place is None}
    how = {"path": str(stage.path), "only": stage.only, "table": table, "later": places}
    how |= {"seconds": {test: line["seconds"] for test, line in lines.items()}}
    while stage.left > LEAST:
        offset, how["done"] = stage.path.stat().st_size, sorted(done)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as plan:
            json.dump(how, plan)
            plan.flush()
            options = [*OPTIONS, "--no-summary", "--continue-on-collection-errors", "-p", "gpu_lines"]
            command = [sys.executable, "-m", "pytest", *options, *plugins(stage.workers), *map(str, paths)]
            environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "GSM_TEST_PLAN": plan.name}
            with gpu.group(gpu.start(command, environment)) as process:
                try:
                    status = process.wait(stage.left)
                except subprocess.TimeoutExpired:
                    return
        new = gpu_lines.lines(stage.path, offset)
        begun, ended = ({line[what] for line in new if what in line} for what in ("begun", "test"))
        for test in begun - ended:
            said = {"outcome": "crashed", "seconds": 0, "first": f"took its process down (exit status {status})"}
            gpu_lines.append(stage.path, {"test": test, **said, "sources": gpu_lines.sources(table, test)})
        done |= begun
        if any("ended" in line for line in new):
            return
        if not begun:
            raise ValueError(f"pytest has run no test, and ended with exit status {status}: see above")


def plugins(workers: int) -> tuple[str, ...]:
    """Options for the plugins that are installed: several processes that take tests in their order, of which one that
    crashes is replaced, and an end to that of a test which hangs, also where it waits for the GPU."""
    several = ("-p", "xdist", "-n", str(workers), "--dist", "load", "--maxschedchunk", "1") if workers > 1 else ()
    limited = ("-p", "pytest_timeout", "-o", "timeout_method=thread", "-o", f"timeout={LIMIT}")
    wanted = {"xdist": several, "pytest_timeout": limited}
    return tuple(word for name, words in wanted.items() if importlib.util.find_spec(name) for word in words)


class Piece(NamedTuple):
    """An operation under a tool, and the test that it is."""

    name: str
    tool: str
    test: str


def pieces(stage: Stage, table: Mapping[str, Mapping[str, str]]) -> list[Piece]:
    """Those that are left, tool by tool; those that failed or did not end last."""
    from gsm_kernels import OPS

    ops = [op.name for op in OPS if any(impl.name == "triton" for impl in op.fast)]
    every = [Piece(f"compute-sanitizer {tool}[{op}]", tool, f"{SMALLEST}[{op}]") for tool in TOOLS for op in ops]
    lines = stage.known()
    places = {p: stage.place(p.test, lines[p.name], table) if p.name in lines else 0 for p in every}
    left = [(place, piece) for piece, place in places.items() if place is not None and stage.only in piece.name]
    return [piece for _, piece in sorted(left, key=lambda pair: pair[0])]


def sanitize(stage: Stage, table: Mapping[str, Mapping[str, str]], sanitizer: str) -> None:
    """Every piece that is left, a few at once: most of their time goes into starting and compiling."""
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    waiting, running = iter(pieces(stage, table)), {}
    with contextlib.ExitStack() as whatever_happens:
        while stage.left > 0:
            free = min(AT_ONCE, stage.workers) - len(running)
            for piece in itertools.islice(waiting, free if stage.left > LEAST else 0):
                runner = [sanitizer, "--tool", piece.tool, "--error-exitcode", str(UNSOUND)]
                said = whatever_happens.enter_context(tempfile.TemporaryFile("w+"))
                command = [*runner, sys.executable, "-m", "pytest", *OPTIONS, piece.test]
                gpu_lines.append(stage.path, {"begun": piece.name})
                process = gpu.start(command, environment, stdout=said, stderr=subprocess.STDOUT)
                running[piece] = whatever_happens.enter_context(gpu.group(process)), said, time.monotonic()
            if not running:
                return
            time.sleep(0.2)
            for piece, (process, said, began) in list(running.items()):
                status, seconds = process.poll(), time.monotonic() - began
                if status is not None or seconds > LIMIT:
                    said.seek(0)
                    row = {"test": piece.name, **finding(status, said.read()), "seconds": round(seconds, 1)}
                    gpu_lines.append(stage.path, {**row, "sources": gpu_lines.sources(table, piece.test)})
                    print(f"{piece.name}: {row['outcome']}, {seconds:.0f} s", flush=True)
                    gpu.end(running.pop(piece)[0])


def finding(status: int | None, said: str) -> dict[str, Any]:
    """Outcome, first line and what the tool has said, from its exit status (None: it did not end) and output."""
    if status == 0:
        return {"outcome": "passed"}
    found = [line for line in said.splitlines() if line.startswith("=========")]
    last = (said.strip().splitlines() or [f"exit status {status}"])[-1]
    first = next((line for line in reversed(found) if "ERROR SUMMARY" in line), last) if status == UNSOUND else last
    first = f"did not end within {LIMIT} s" if status is None else first
    return {"outcome": "failed", "first": first, "tail": (found or said.splitlines())[: gpu_lines.TAIL]}


def summary(stage: Stage, table: Mapping[str, Mapping[str, str]]) -> str:
    """A table of files and tools, then what failed, as Markdown."""
    from gsm_benchmarks import results

    found, counts, seconds, failures = gpu_lines.lines(stage.path), {}, Counter(), []
    for test, line in gpu_lines.known(found).items():
        file, is_piece = re.split(r"::|\[", test)[0], test.startswith("compute-sanitizer")
        smallest = f"{SMALLEST}[{test.partition('[')[2]}"
        outcome = line["outcome"]
        if outcome != "begun" and not stage.valid(smallest if is_piece else test, line, table):
            outcome = "of other sources"
        elif outcome not in ("begun", *gpu_lines.ENDED_WELL):
            failures.append(f"* `{test}`: {outcome}, {line.get('first', '')}")
            outcome = "failed"
        counts.setdefault(file, Counter())[outcome] += 1
        seconds[file] += line["seconds"]
    columns = ("passed", "failed", "skipped", "begun", "of other sources")
    head = ("file or tool", *columns, "seconds")
    rows = [
        (file, *(str(counts[file][column] or "") for column in columns), f"{seconds[file]:.0f}")
        for file in sorted(counts)
    ]
    parts = [results.table([word.replace("begun", "not ended") for word in head], rows), "", *sorted(failures)]
    return "\n".join(parts)


def left_over(stage: Stage) -> str:
    """How many tests the last pytest had left when it ended."""
    lines = gpu_lines.lines(stage.path)
    starts = [number for number, line in enumerate(lines) if "left" in line]
    if not starts:
        return ""
    ended = {line["test"] for line in lines[starts[-1] :] if "test" in line and "::" in line["test"]}
    return f"{lines[starts[-1]]['left'] - len(ended)} tests are left."


def main(
    minutes: float = 7.5,
    only: str = "",
    keep: bool = False,
    force: bool = False,
    device: str = "cuda",
    workers: int = WORKERS,
) -> int:
    """Runs what is left, writes the summary, and returns 1 if anything has failed, else 0. Raises ValueError where
    there is no such device, or pytest does not start."""
    began = time.monotonic()
    from gsm_benchmarks import machine, results

    facts = machine.facts(machine.chosen(device))
    path = results.usual_path(facts, "tests").with_suffix(".jsonl")
    marks = {key: facts[key] for key in ("device", "versions")}
    stage = Stage(path, marks, only, keep, force, workers, began + 60 * minutes)
    paths = files()
    table, sanitizer = fingerprints(paths), gpu.sanitizer()
    today = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    gpu_lines.append(path, {"marks": marks, "commit": facts["commit"], "command": facts["command"], "at": today})
    try:
        run_tests(stage, paths, table)
        if sanitizer and device == "cuda":
            sanitize(stage, table, sanitizer)
    finally:
        text = summary(stage, table)
        results.publish(path, f"{results.measured_on(facts)} {left_over(stage)}", text)
    if stage.left <= LEAST:
        print(f"{minutes:g} minutes are over: the same command goes on")
    return int("\n* " in text)


if __name__ == "__main__":
    from gsm_benchmarks.__main__ import call

    sys.exit(call(main, sys.argv[1:]))
