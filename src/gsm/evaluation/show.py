"""What was measured, as plain ASCII of at most 80 columns: one model, or arms side by side."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gsm.evaluation.published import published_overlap

WIDTH = 78
ARMS_IN_A_ROW = 4
MEASURES = ("loss", "perplexity", "bits_per_byte")
DIGITS = {"loss": 4, "perplexity": 2, "bits_per_byte": 4}


def one(facts: Mapping[str, Any]) -> str:
    """A single model: its numbers with standard errors, and a picture of its loss by position."""
    text = facts["text"]
    lines = [
        f"  loss          {value(text['loss'], 4)}{plus(text['loss_error'], 4)} nats per token",
        f"  perplexity    {value(text['perplexity'], 2)}",
        f"  bits per byte {value(text['bits_per_byte'], 4)}{plus(text['bits_per_byte_error'], 4)}",
        "",
        f"  {'position':<17}{'targets':>9}{'loss':>8}{'+-':>8}  (place in the {text['place']})",
    ]
    lines += picture(text["by_position"])
    if "overlap" in facts:
        lines += ["", *overlap(facts["overlap"])]
    if "ablated" in facts:
        lines += ["", *ablated(facts["ablated"])]
    return "\n".join(lines)


def picture(by_position: Sequence[Mapping[str, Any]], width: int = WIDTH - 47) -> list[str]:
    """A row and a bar for each bucket; bars begin at 0 nats."""
    highest = max((bucket["loss"] for bucket in by_position), default=0.0) or 1.0
    return [
        f"  {span(bucket):<17}{bucket['targets']:>9,}{bucket['loss']:>8.3f}{value(bucket['error'], 3):>8}  "
        + "#" * round(width * bucket["loss"] / highest)
        for bucket in by_position
    ]


def overlap(facts: Mapping[str, Any] | None) -> list[str]:
    """Lengths by stages, in percent of K: how much of what a stage selects its encoder layer has selected too; below
    each length that the paper has too, its own row."""
    if facts is None:
        return ["  overlap with the encoder: none, for the stages or the encoder select nothing"]
    rows = facts["by_length"]
    stages = range(1, max((len(row["stages"]) for row in rows), default=0) + 1)
    lines = [f"  {'overlap with the encoder, %':<30}" + "".join(f"{f'stage {stage}':>9}" for stage in stages)]
    for row in rows:
        cells = [value(None if cell is None else 100 * cell, 1) for cell in row["stages"]]
        lines.append(f"  {row['length']:>10,} tokens" + " " * 13 + "".join(f"{cell:>9}" for cell in cells))
        if theirs := published_overlap().get(row["length"]):
            lines.append(f"  {'the paper, 0.5B GSM':>30}" + "".join(f"{cell:>9.1f}" for cell in theirs))
    return lines


def ablated(facts: Mapping[str, Mapping[str, float]] | None) -> list[str]:
    """The loss without each part that was taken away, and what that adds."""
    if facts is None:
        return ["  ablated: nothing, for this model has no shared state"]
    lines = [f"  {'with zeros for the':<26}{'loss':>8}{'added':>9}"]
    for name, row in facts.items():
        told = "state, but a row's own z" if name == "state" else f"retrieval of {name}"
        lines.append(f"  {told:<26}{row['loss']:>8.4f}{row['added']:>+9.4f}")
    return lines


def by_length(facts: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Groups by lengths, in percent: how often the last state of a word is known."""
    lengths = sorted({length for found in facts.values() for length in found}, key=int)
    lines = [f"  {'last state known, %':<20}" + "".join(f"{length + ' letters':>14}" for length in lengths)]
    for name, found in facts.items():
        lines.append(f"  {name:<20}" + "".join(f"{value(100 * found[length], 1):>14}" for length in lengths))
    return lines


def several(results: Sequence[Mapping[str, Any]]) -> str:
    """Arms: mean over their runs, and standard deviation between them; then the loss by position."""
    arms = group(results)
    name = min(19, max(len(arm) for arm in ("arm", *arms)))
    lines = [f"  {'arm':<{name}}{'runs':>6}{'loss':>17}{'perplexity':>17}{'bits per byte':>19}"]
    for arm, runs in arms.items():
        cells = [mean(runs, measure) for measure in MEASURES]
        lines.append(f"  {arm[:name]:<{name}}{len(runs):>6}{cells[0]:>17}{cells[1]:>17}{cells[2]:>19}")
    places = {run["text"]["place"] for run in results}
    lines += ["", f"Loss by place in the {' or '.join(sorted(places))}:"]
    names = list(arms)
    for first in range(0, len(names), ARMS_IN_A_ROW):
        lines += by_position({arm: arms[arm] for arm in names[first : first + ARMS_IN_A_ROW]})
    return "\n".join(lines)


def by_position(arms: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """A row for each bucket, a column for each arm, means over runs."""
    spans: dict[str, None] = {}
    columns: dict[str, dict[str, list[float]]] = {arm: {} for arm in arms}
    for arm, runs in arms.items():
        for bucket in (bucket for run in runs for bucket in run["text"]["by_position"]):
            spans.setdefault(span(bucket))
            columns[arm].setdefault(span(bucket), []).append(bucket["loss"])
    ordered = sorted(spans, key=lambda name: int(name.partition(" ")[0].replace(",", "")))
    rows = [f"  {'position':<17}" + "".join(f"{arm[:14]:>15}" for arm in arms)]
    for name in ordered:
        cells = [value(statistics.fmean(columns[arm][name]) if name in columns[arm] else None, 3) for arm in arms]
        rows.append(f"  {name:<17}" + "".join(f"{cell:>15}" for cell in cells))
    return rows


def group(results: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Results by arm, in their order; by experiment too where there are several."""
    experiments = {result["experiment"] for result in results}
    arms: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        arm = result["arm"] if len(experiments) == 1 else f"{result['experiment']}/{result['arm']}"
        arms.setdefault(arm, []).append(result)
    return arms


def mean(runs: Sequence[Mapping[str, Any]], measure: str) -> str:
    """``mean +- standard deviation``; of a single run, its number."""
    numbers = [run["text"][measure] for run in runs]
    if None in numbers:
        return "-"
    spread = statistics.stdev(numbers) if len(numbers) > 1 else None
    return value(statistics.fmean(numbers), DIGITS[measure]) + plus(spread, DIGITS[measure])


def span(bucket: Mapping[str, Any]) -> str:
    """``5`` or ``4 to 7``."""
    first, last = bucket["first"], bucket["last"]
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def value(number: float | None, digits: int) -> str:
    """A number with so many digits after the point; ``-`` where there is none."""
    return "-" if number is None else f"{number:.{digits}f}"


def plus(error: float | None, digits: int) -> str:
    """`` +- 0.01``, or nothing."""
    return "" if error is None else f" +- {error:.{digits}f}"
