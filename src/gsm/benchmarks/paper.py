"""The paper's numbers beside ours. Devices differ, so what is compared is the ratio of GSM to the baseline."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gsm.benchmarks.comparisons import OURS, Rows, find, speed_up
from gsm.benchmarks.turns import short
from gsm_kernels.benchmark.report import table
from gsm_kernels.benchmark.results import mark

PAPER: dict[str, Any] = json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))
HEAD = ("", "baseline", "GSM", "GSM / baseline")
UNITS = {"tokens_per_second": "tokens/s", "peak_gib": "peak GiB a GPU", "seconds": "s a step"}
CLAIMS: dict[str, Callable[[float], bool]] = {  # of the ratio of GSM to the baseline: faster, or smaller
    "prefill": lambda ratio: ratio > 1,
    "decode": lambda ratio: ratio > 1,
    "cache": lambda ratio: ratio < 1,
}


def training(content: Mapping[str, Any]) -> str:
    """The paper's table of training efficiency beside the pairs of a file of training results; empty without a pair."""
    paper, rows = PAPER["training"], content["rows"]
    cells = [_cells(f"paper: {UNITS[name]}", paper["baseline"][name], paper[OURS][name]) for name in UNITS]
    for name, row in rows.items():
        baseline = alike(rows.values(), "baseline", row)
        if row["model"] == OURS and not row.get("failed") and baseline:
            known = [key for key in UNITS if None not in (_training(baseline, key), _training(row, key))]
            cells += [_cells(f"{name}: {UNITS[key]}", _training(baseline, key), _training(row, key)) for key in known]
    return f"{_devices(paper, content['device'])}\n\n{table(HEAD, cells)}" if len(cells) > len(UNITS) else ""


def inference(rows: Rows) -> str:
    """What the paper says of its figure, and whether it holds for rows that are alike, length by length; empty without
    a pair."""
    paper, device = PAPER["inference"], rows[0]["device"]
    cells = []
    for what, holds in CLAIMS.items():
        ratios = {tokens: ratio for tokens in _lengths(rows) if (ratio := _ratio(rows, what, tokens))}
        if ratios:
            shown = ", ".join(f"{short(tokens)} {ratio:.2f}" for tokens, ratio in sorted(ratios.items()))
            kept = sum(map(holds, ratios.values()))
            cells.append((paper["claims"][what], shown, f"{kept} of {len(ratios)} lengths"))
    head = ("the paper", f"GSM / baseline on {device}", "holds at")
    return f"{_devices(paper, device)}\n\n{table(head, cells)}" if cells else ""


def _devices(paper: Mapping[str, Any], device: str) -> str:
    return f"The paper's, {paper['where']}: {paper['device']}, {paper['what']}. Ours: {device}."


def alike(rows: Iterable[Mapping[str, Any]], model: str, row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The row of another model that was trained as this one was."""
    how = ("size", "batch_size", "context", "compiled", "recompute", "devices", "protocol")
    alike = (r for r in rows if mark(r) == mark(row) and all(r.get(key) == row.get(key) for key in how))
    same = (r for r in alike if r["model"] == model)
    return next((r for r in same if not r.get("failed")), None)


def _training(row: Mapping[str, Any], name: str) -> Any:
    return row["ms"]["median"] / 1e3 if name == "seconds" else row[name]


def _cells(what: str, baseline: float, ours: float) -> Sequence[str]:
    return what, f"{baseline:,.5g}", f"{ours:,.5g}", f"{ours / baseline:.3f}"


def _lengths(rows: Rows) -> list[int]:
    return sorted({row["tokens"] for row in rows})


def _ratio(rows: Rows, what: str, tokens: int) -> float | None:
    ours, other = (find(rows, model, tokens, "read") for model in (OURS, "baseline"))
    if ours is None or other is None:
        return None
    return ours[what]["bytes"] / other[what]["bytes"] if what == "cache" else speed_up(ours, other, what)
