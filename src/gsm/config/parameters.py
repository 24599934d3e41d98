"""Prints where the parameters of each size are, beside what the paper says: ``python -m gsm.config.parameters [size
...]``.

The models are built on the meta device: no size is too large for a laptop.
"""

from __future__ import annotations

import sys

import torch

from gsm.config.load import build_model
from gsm.paths import variants

# Section A.1 of the paper: nominal scales, and of the pair with experts the parameters of baseline and GSM.
PAPER = {
    "0p5b": {"total": "0.5 B, difference not given"},
    "1p5b": {"total": "1.5 B, difference 32 M (8.033 - 8.001 B)"},
    "8b_a1p5b": {"total": "8.001 and 8.033 B, difference 32 M", "active": "1.497 and 1.529 B"},
}


def main(sizes: list[str]) -> None:
    """Prints two tables per size: GSM and the baseline by part, their difference, and the paper's numbers; then all
    models in total, with the heads and the rank of queries by which comparators are matched."""
    for size in sizes or variants("size"):
        with torch.device("meta"):
            models = {name: build_model(name, size) for name in variants("model")}
        reports = {name: model.parameter_report() for name, model in models.items()}
        print(f"\n{size:<22}{'baseline':>15}{'gsm':>15}{'difference':>14}{'paper':>28}")
        paper = PAPER.get(size, {})
        baseline, model = reports["baseline"], reports["gsm"]
        for part in model.parts:
            _row(part, baseline.parts.get(part, 0), model.parts[part])
        _row("total", baseline.total, model.total, paper.get("total", "-"))
        _row("active for a token", baseline.active, model.active, paper.get("active", "-"))
        print(f"\n{'against the baseline':<22}{'total':>15}{'difference':>15}")
        for name, report in reports.items():
            difference = report.total - baseline.total
            note = models[name].parameter_note
            print(
                f"{name:<22}{report.total:>15,}{difference:>+15,}{difference / baseline.total:>+14.2%}  {note}".rstrip()
            )


def _row(name: str, baseline: int, gsm: int, paper: str = "") -> None:
    print(f"{name:<22}{baseline:>15,}{gsm:>15,}{gsm - baseline:>+14,}    {paper}".rstrip())


if __name__ == "__main__":
    main(sys.argv[1:])
