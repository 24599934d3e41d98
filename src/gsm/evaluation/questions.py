"""Questions of a synthetic task, measured apart: how often each kind is answered. B batch, T positions."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gsm.data.recall import Task
from gsm.data.synthetic import HELD_OUT, Generated
from gsm.models.base import LanguageModel
from gsm.models.checks import IGNORED

BATCH = 16  # sequences read at a time


@torch.no_grad()
def measure(
    model: LanguageModel, kinds: Mapping[str, Task], length: int, sequences: int = 128, seed: int = HELD_OUT
) -> dict[str, float]:
    """The fraction of questions that a model answers, by kind.

    Args:
        model: is left in the mode that it was in.
        kinds: by name, the task that asks such questions alone.
        length: tokens of a sequence.
        sequences: how many of each kind, the same for every model.
        seed: of the sequences; one of ``gsm.data.synthetic.UNSEEN``.
    """
    found: dict[str, float] = {}
    device = model.embedding.weight.device
    for name, task in kinds.items():
        made, right, count = Generated(task, seed, lambda _: length), 0, 0
        for first in range(0, sequences, BATCH):
            batch = made.batch(range(first, min(first + BATCH, sequences)))
            token_BT, target_BT = batch["tokens"].to(device), batch["targets"].to(device)
            with model.evaluating():
                logits_BTV = model(token_BT).logits
            asked_BT = target_BT != IGNORED
            right += int((logits_BTV.argmax(-1) == target_BT)[asked_BT].sum())
            count += int(asked_BT.sum())
        found[name] = right / count
    return found


def table(found: Mapping[str, float]) -> list[str]:
    """Kinds in percent, as lines: how many of their questions are answered."""
    return ["  questions answered, %", *(f"  {name:<20}{100 * value:>14.1f}" for name, value in found.items())]


def grid(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Kinds by amounts, in percent, as lines."""
    amounts = sorted({amount for by_amount in found.values() for amount in by_amount}, key=int)
    lines = [f"  {'answered, %':<12}" + "".join(f"{amount:>7}" for amount in amounts)]
    for kind, by_amount in found.items():
        cells = (f"{100 * by_amount[one]:.1f}" if one in by_amount else "" for one in amounts)
        lines.append(f"  {kind:<12}" + "".join(f"{cell:>7}" for cell in cells))
    return lines
