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
from adversary.outcome import ENDS, FAILED, RIGHT, Case, Result, attempt, of_size  # noqa: E402
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
OF_KILLS = {KILLS: "killed at a random moment, then the same command", "3": "the same: a curve loses its last step"}
WORDS = {"cases", "seed", "class", "minutes", "output", "json", "keep", "kills"}
DANGEROUS = tuple(CLASSES)  # none of which may have a failure


def drawn(number: str, seed: int, world: World) -> Case:
    """The case of a class and a seed."""
    return CLASSES[number][2](random.Random(f"{number} {seed}"), world)


def tried(number: str, seed: int, world: World, keep: Path | None = None) -> Result:
    """One case, from its seed to its end."""
    result = attempt(drawn(number, seed, world), number, seed, keep)
    return of_size(result) if number == "5" else result


def main(words: list[str]) -> int:
    """`cases=2000 seed=0 class=2 minutes=60 output=FILE json=FILE keep=FOLDER kills=10`; returns 1 where one fails.

    What the file of `json=` holds, a line of each case that has ended, is not tried again.
    """
    given = dict(word.split("=", 1) for word in words)
    if given.keys() - WORDS:
        print(f"unknown: {', '.join(given.keys() - WORDS)}; there are {', '.join(sorted(WORDS))}")
        return 2
    torch.set_num_threads(1)  # what is forked must not wait for threads that stay behind
    chosen = given["class"].split(",") if "class" in given else list(CLASSES)
    cases = int(given.get("cases", 1 if "seed" in given and "class" in given else 200))
    kills_wanted = int(given.get("kills", 0))
    seed, until = int(given.get("seed", 0)), time.monotonic() + 60 * float(given.get("minutes", 600))
    begun = time.monotonic()
    path = Path(given["json"]) if "json" in given else None
    known, results = read(path) if path else {}, []
    keep = Path(given["keep"]) if "keep" in given else None

    def settle(number: str, seed: int, attempt: Callable[[], Result]) -> None:
        if time.monotonic() > until and (number, seed) not in known:
            return
        results.append(known.get((number, seed)) or attempt())
        if (number, seed) not in known:
            _say(results[-1])
            if path:
                with path.open("a") as file:
                    file.write(json.dumps({"drawn": number, **vars(results[-1])}) + "\n")

    with tempfile.TemporaryDirectory(prefix="adversary-") as home:
        tempfile.tempdir = home
        (Path(home) / "world").mkdir()
        world = World(Path(home).resolve() / "world")
        shares = {number: CLASSES[number][1] for number in chosen if number in CLASSES}
        least = min(1, cases)  # of each class
        counts = {number: max(least, round(cases * share / sum(shares.values()))) for number, share in shares.items()}
        plan = sorted((part / count, number, part) for number, count in counts.items() for part in range(count))
        for _, number, offset in plan:  # the classes in turn, so that each has its share where time runs out
            settle(number, seed + offset, lambda n=number, s=seed + offset: tried(n, s, world, keep))
        if kills_wanted:
            killer = kills.Killer(world, keep)
            for number in range(seed, seed + kills_wanted):
                settle(KILLS, number, lambda n=number: killer.tried(n))
    asked = f"cases={cases} seed={seed}" + (f" kills={kills_wanted}" if kills_wanted else "")
    text = table(results, asked, time.monotonic() - begun)
    print(text)
    if "output" in given:
        Path(given["output"]).write_text(text)
    return int(any(result.end == FAILED and result.number in (*DANGEROUS, KILLS) for result in results))


def read(path: Path) -> dict[tuple[str, int], Result]:
    """The results that a file holds, by the class that a case was drawn from and its seed."""
    found = map(json.loads, path.read_text().splitlines() if path.is_file() else [])
    return {(line.pop("drawn"), line["seed"]): Result(**line) for line in found}


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
    described = {**{number: what for number, (what, *_) in CLASSES.items()}, **OF_KILLS, "all": ""}
    for number, what in described.items():
        found = results if number == "all" else by_class.get(number, [])
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
            *_by_kind([result for result in results if result.number in OF_KILLS]),
            f"## Failures ({len(failures)})",
            "",
            *(failures or ["None."]),
            "",
        ]
    )


def _by_kind(killed: list[Result]) -> list[str]:
    """The kills, by what was killed."""
    if not killed:
        return []
    rows = ["| killed | times | all equal | class 3 | failed | seconds |", f"|{'---|' * 6}"]
    for kind in kills.KINDS:
        found = [result for result in killed if result.title.startswith(f"{kind}:")]
        ends = Counter(RIGHT if result.end == RIGHT else result.number for result in found)
        took = sum(result.seconds for result in found)
        rows.append(f"| {kind} | {len(found)} | {ends[RIGHT]} | {ends['3']} | {ends[KILLS]} | {took:,.0f} |")
    return ["## Kills", "", *rows, ""]


def _plain(text: str) -> str:
    """In one line of a list."""
    return " ".join(text.replace("|", "/").replace("<", "&lt;").split())[:400]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
