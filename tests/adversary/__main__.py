"""Draws cases, tries them, and writes the table."""

from __future__ import annotations

import os
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import date
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # read where a kernel is decorated

import torch  # noqa: E402

from adversary import damage, inside, kills, payloads, values  # noqa: E402
from adversary.outcome import ENDS, FAILED, Case, Result, attempt  # noqa: E402
from adversary.world import World  # noqa: E402

# class: its subject, its share of the cases, and the function that draws one.
CLASSES: dict[str, tuple[str, float, Callable[[random.Random, World], Case]]] = {
    "payloads": ("a checkpoint that asks for more than parts", 0.22, payloads.case),
    "damage": ("damaged checkpoints", 0.33, damage.flipped),
    "values": ("bad values of every key", 0.15, values.case),
}
KILLS = "kills"
SUBJECTS = {kind: subject for kind, (subject, *_) in CLASSES.items()} | {
    KILLS: "killed at a random moment, then the same command"
}
WORDS = {"cases", "seed", "class", "minutes", "output", "keep", "kills"}


def main(words: list[str]) -> int:
    """`cases=2000 seed=0 class=damage minutes=60 output=FILE keep=FOLDER kills=10`; return 1 if a case failed."""
    options = dict(word.split("=", 1) for word in words)
    chosen = options.get("class", ",".join(CLASSES)).split(",")
    if options.keys() - WORDS or set(chosen) - set(CLASSES):
        print(f"error: words are {', '.join(sorted(WORDS))}, and classes {', '.join(CLASSES)}")
        return 2
    torch.set_num_threads(1)  # a forked process must not wait for threads that stay behind
    cases = int(options.get("cases", 1 if "seed" in options and "class" in options else 200))
    keep = Path(options["keep"]) if "keep" in options else None
    begun, seed = time.monotonic(), int(options.get("seed", 0))
    until = begun + 60 * float(options.get("minutes", 600))
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="adversary-") as home:
        tempfile.tempdir = home
        (Path(home) / "world").mkdir()
        world = World(Path(home).resolve() / "world")
        for kind, number in plan(chosen, cases):
            if time.monotonic() < until:
                case = CLASSES[kind][2](random.Random(f"{kind} {seed + number}"), world)
                results.append(_shown(attempt(case, kind, seed + number, keep)))
        killer = kills.Killer(world, keep) if int(options.get(KILLS, 0)) else None
        for number in range(int(options.get(KILLS, 0))):
            if killer and time.monotonic() < until:
                results.append(_shown(killer.tried(seed + number)))
    text = table(results, " ".join(word for word in words if not word.startswith("output=")), time.monotonic() - begun)
    print(text)
    if "output" in options:
        Path(options["output"]).write_text(text)
    return int(any(result.end == FAILED for result in results))


def plan(chosen: list[str], cases: int) -> list[tuple[str, int]]:
    """Return classes and numbers of cases, the classes in turn, so that each has its share where time runs out."""
    total = sum(CLASSES[kind][1] for kind in chosen)
    counts = {kind: max(min(1, cases), round(cases * CLASSES[kind][1] / total)) for kind in chosen}
    order = sorted((number / count, kind, number) for kind, count in counts.items() for number in range(count))
    return [(kind, number) for _, kind, number in order]


def _shown(result: Result) -> Result:
    if result.end == FAILED:
        print(_line(result), flush=True)
    return result


def _line(result: Result) -> str:
    words = " ".join(f"{result.title}: {result.said}".replace("|", "/").replace("<", "&lt;").split())
    return f"- `class={result.kind} seed={result.seed}` {words[:500]}"


def table(results: list[Result], command: str, seconds: float) -> str:
    """Return the ends of all cases by class, and every failure, in markdown."""
    versions = ", ".join(f"{name} {value}" for name, value in inside.versions().items())
    rows = [f"| class | subject | cases | {' | '.join(ENDS)} | seconds |", f"|{'---|' * (len(ENDS) + 4)}"]
    for kind, subject in {**SUBJECTS, "all": ""}.items():
        some = [result for result in results if kind in (result.kind, "all")]
        ends = Counter(result.end for result in some)
        if some:
            cells = [kind, subject, len(some), *(ends[end] for end in ENDS), round(sum(one.seconds for one in some))]
            rows.append(f"| {' | '.join(map(str, cells))} |")
    failures = [_line(result) for result in results if result.end == FAILED]
    return "\n".join(
        [
            "# Ends of an adversary's cases",
            "",
            f'`make adversary ARGS="{command}"` on {date.today()}: commit {inside.commit()}, {versions},',
            f"{os.cpu_count()} CPU cores, processor {platform.machine()}, one case at a time, {seconds:,.0f} seconds.",
            "",
            *rows,
            "",
            f"## Failures ({len(failures)})",
            "",
            *(failures or ["None."]),
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
