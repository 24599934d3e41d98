"""Scores of RULER's needle tasks, and their tables, in percent as the paper prints them.

An answer is right as far as it contains what was asked for. A chain of thought is judged by what follows its last
`Final answer:` alone; one without is wrong, and how many there were is reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gsm.data.adaptation import MARK

CONTROL = re.compile(r"[\x00-\x1f]")
# What the benchmark takes; what is otherwise is a deviation, and printed as one.
STANDARD = {"template": "ruler", "sentences": "punkt", "keys": "wonderwords", "digits": 7, "increment": None}
ESSAYS = "PaulGrahamEssays.json"


def final_answer(text: str, answers: str) -> str | None:
    """The part of an output that is judged; None where a chain of thought (answers "cot") does not come to an end."""
    _, mark, answer = text.rpartition(MARK)
    return text if answers != "cot" else answer if mark else None


def score(text: str | None, outputs: Sequence[str]) -> float:
    """The share of `outputs` that a text contains, in whatever case, control characters being line ends; 0 for None."""
    if text is None:
        return 0.0
    text = CONTROL.sub("\n", text.strip()).strip().lower()
    return sum(output.lower() in text for output in outputs) / len(outputs)


def accuracy(samples: Iterable[Mapping[str, Any]]) -> float:
    """Mean score in percent."""
    scores = [sample["score"] for sample in samples]
    return 100 * sum(scores) / len(scores)


def averages(cells: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The paper's means: of each length over tasks, of each task over lengths, and of all lengths, unweighted.

    Args:
        cells: each with `task`, `length` and `accuracy`; every task at every length.
    """
    cells = list(cells)
    tasks, lengths = (list(dict.fromkeys(cell[name] for cell in cells)) for name in ("task", "length"))
    by_length = {str(n): _mean(c["accuracy"] for c in cells if c["length"] == n) for n in sorted(lengths)}
    by_task = {task: _mean(c["accuracy"] for c in cells if c["task"] == task) for task in tasks}
    return {"by_length": by_length, "by_task": by_task, "average": _mean(by_length.values())}


def table(result: Mapping[str, Any]) -> str:
    """Tasks by lengths of one model, with the means over both, and what is not as in the benchmark."""
    settings, cells, means = result["settings"], result["cells"].values(), result["averages"]
    found = {(cell["task"], str(cell["length"])): cell["accuracy"] for cell in cells}
    lengths = list(means["by_length"])
    rows = [[task, *(found[task, n] for n in lengths), mean] for task, mean in means["by_task"].items()]
    rows.append(["mean", *means["by_length"].values(), means["average"]])
    title = f"RULER, % of {settings['examples']} a cell, answers {settings['answers']}"
    notes = [f"without {MARK!r}: {100 * result['unmarked']:.1f} %"] if settings["answers"] == "cot" else []
    otherwise = deviations(settings)
    notes += [f"not as in the benchmark: {'; '.join(otherwise)}"] if otherwise else []
    return "\n".join([title, *markdown(["task", *map(shown, map(int, lengths)), "Avg."], rows), *notes])


def deviations(settings: Mapping[str, Any]) -> list[str]:
    """What was chosen otherwise than in the benchmark, as `name: value`."""
    named = [
        f"{name}: {settings[name]}" for name, value in STANDARD.items() if name in settings and settings[name] != value
    ]
    haystack = settings.get("haystack", ESSAYS)
    return [*([f"haystack: {haystack}"] if haystack != ESSAYS else []), *named]


def shown(length: int) -> str:
    """4096 as 4K."""
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str | float]]) -> list[str]:
    """A table with numbers of two decimals, its columns aligned."""
    text = [list(head), *([cell if isinstance(cell, str) else f"{cell:.2f}" for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in text) for column in range(len(head))]
    lines = [
        "| "
        + " | ".join(
            f"{cell:<{w}}" if n == 0 else f"{cell:>{w}}" for n, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        + " |"
        for row in text
    ]
    rule = "|" + "|".join("-" * (w + 1) + ("-" if n == 0 else ":") for n, w in enumerate(widths)) + "|"
    return [lines[0], rule, *lines[1:]]


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)
