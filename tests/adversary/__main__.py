"""Draws cases, tries them, and writes the table."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from collections import Counter, defaultdict
from datetime import date
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # read where a kernel is decorated
sys.path.insert(0, str(Path(__file__).parents[1]))

import json  # noqa: E402
import random  # noqa: E402
from collections.abc import Callable  # noqa: E402

import torch  # noqa: E402

from adversary import calls, damage, inside, kills, payloads, tasks, texts, values  # noqa: E402
from adversary.outcome import ENDS, FAILED, Case, Result, attempt, of_size  # noqa: E402
from adversary.world import World  # noqa: E402

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "benchmarks/results/adversary.md"
# class: what it is, its share of the cases, and what draws one.
CLASSES: dict[str, tuple[str, float, Callable[[random.Random, World], Case]]] = {
    "1": ("a checkpoint that asks for more than parts", 0.22, payloads.case),
    "2": ("damaged checkpoints and caches", 0.33, damage.flipped),
    "4": ("other entries of optimiser and weights", 0.14, damage.entries),
    "5": ("bad values of every key", 0.15, values.case),
    "10": ("hostile calls on a static memory", 0.13, calls.case),
    "7": ("hostile text files (and classes 8 and 9)", 0.01, texts.case),
    "11": ("sizes without bound, groups left out", 0.03, values.sizes),
    "12": ("places", 0.02, values.places),
    "13": ("task files", 0.03, tasks.case),
}
KILLS = "kills"
DANGEROUS = tuple(CLASSES)  # none of which may have a failure


def drawn(number: str, seed: int, world: World) -> Case:
    """The case of a class and a seed."""
    return CLASSES[number][2](random.Random(f"{number} {seed}"), world)


def tried(number: str, seed: int, world: World, keep: Path | None = None) -> Result:
    """One case, from its seed to its end."""
    result = attempt(drawn(number, seed, world), number, seed, keep)
    return of_size(result) if number == "5" else result


def main(words: list[str]) -> int:
    """`cases=2000 seed=0 class=2 minutes=60 output=FILE json=FILE keep=FOLDER kills=10`; returns 1 where one fails."""
    known = {"cases", "seed", "class", "minutes", "output", "json", "keep", "kills"}
    given = dict(word.split("=", 1) for word in words)
    if given.keys() - known:
        print(f"unknown: {', '.join(given.keys() - known)}; there are {', '.join(sorted(known))}")
        return 2
    torch.set_num_threads(1)  # what is forked must not wait for threads that stay behind
    chosen = given["class"].split(",") if "class" in given else list(CLASSES)
    cases = int(given.get("cases", 1 if "seed" in given and "class" in given else 200))
    seed, until = int(given.get("seed", 0)), time.monotonic() + 60 * float(given.get("minutes", 600))
    begun = time.monotonic()
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="adversary-") as home:
        tempfile.tempdir = home
        (Path(home) / "world").mkdir()
        world = World(Path(home).resolve() / "world")
        shares = {number: CLASSES[number][1] for number in chosen if number in CLASSES}
        counts = {number: max(1, round(cases * share / sum(shares.values()))) for number, share in shares.items()}
        plan = sorted((part / count, number, part) for number, count in counts.items() for part in range(count))
        for _, number, offset in plan:  # the classes in turn, so that each has its share where time runs out
            if time.monotonic() > until:
                break
            results.append(tried(number, seed + offset, world, Path(given["keep"]) if "keep" in given else None))
            _say(results[-1])
        for result in kills.runs(world, int(given.get("kills", 0)), seed):
            results.append(result)
            _say(result)
    text = table(results, f"cases={cases} seed={seed}", time.monotonic() - begun)
    print(text)
    if "output" in given:
        Path(given["output"]).write_text(text)
    if "json" in given:
        Path(given["json"]).write_text(json.dumps([vars(result) for result in results]))
    return int(any(result.end == FAILED and result.number in (*DANGEROUS, KILLS) for result in results))


def _say(result: Result) -> None:
    if result.end == FAILED or "-v" in os.environ.get("ADVERSARY", ""):
        print(f"class={result.number} seed={result.seed}: {result.end}: {result.title}: {result.said}", flush=True)


def table(results: list[Result], command: str, seconds: float) -> str:
    """What was tried and how it ended, with every failure."""
    by_class: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_class[result.number].append(result)
    versions = ", ".join(f"{name} {value}" for name, value in inside.versions().items())
    rows = [f"| class | what | cases | {' | '.join(ENDS)} | seconds |", f"|{'---|' * (len(ENDS) + 4)}"]
    for number in [*CLASSES, KILLS, "all"]:
        found = results if number == "all" else by_class.get(number, [])
        what = {KILLS: "killed at a random moment, then the same command", "all": ""}.get(number) or CLASSES.get(
            number, ("",)
        )[0]
        ends = Counter(result.end for result in found)
        if found:
            took = sum(result.seconds for result in found)
            rows.append(
                f"| {number} | {what} | {len(found):,} | {' | '.join(f'{ends[end]:,}' for end in ENDS)} | {took:,.0f} |"
            )
    failures = [
        f"- `class={r.number} seed={r.seed}` {_plain(r.title)}: {_plain(r.said)}" for r in results if r.end == FAILED
    ]
    return "\n".join(
        [
            "# What an adversary tried",
            "",
            f'`make adversary ARGS="{command}"` on {date.today()}: commit {inside.commit()}, {versions},',
            f"{os.cpu_count()} CPU cores, processor {platform.machine()},",
            f"one case at a time, {seconds:,.0f} seconds. tests/adversary/ says what a case is and how it may end.",
            "",
            *rows,
            "",
            "A case of class 5 that takes memory or time without bound counts as class 11.",
            "",
            f"## Failures ({len(failures)})",
            "",
            *(failures or ["None."]),
            "",
        ]
    )


def _plain(text: str) -> str:
    """In one line of a list."""
    return " ".join(text.replace("|", "/").replace("<", "&lt;").split())[:400]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
