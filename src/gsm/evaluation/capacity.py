"""How a model answers under each load of ``gsm.data.capacity.Capacity``. B sequences, T positions."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gsm.data.capacity import Capacity
from gsm.data.synthetic import HELD_OUT, Generated
from gsm.models.base import LanguageModel
from gsm.models.checks import IGNORED

AT_ONCE = 16  # sequences


@torch.no_grad()
def measure(
    model: LanguageModel, task: Capacity, length: int, sequences: int = 128, seed: int = HELD_OUT
) -> dict[str, dict[str, float]]:
    """The fraction of questions that a model answers.

    Args:
        model: trained on the task; it is left in the mode that it was in.
        task: says the loads.
        length: T.
        sequences: of each load, the same for every model.
        seed: of the sequences; one of ``gsm.data.synthetic.UNSEEN``.

    Returns:
        By kind, by amount (as a string, since it goes into JSON).
    """
    found: dict[str, dict[str, float]] = {kind: {} for kind in task.loads}
    device = model.embedding.weight.device
    with model.evaluating():
        for load in task.each():
            generated = Generated(task.only(load), seed, lambda _: length)
            right = asked = 0
            for first in range(0, sequences, AT_ONCE):
                batch = generated.batch(range(first, min(first + AT_ONCE, sequences)))
                target_BT = batch["targets"].to(device)
                said_BT = model(batch["tokens"].to(device)).logits.argmax(-1)
                right += int((said_BT == target_BT).sum())  # what is not asked is no id
                asked += int((target_BT != IGNORED).sum())
            found[load.kind][str(load.amount)] = right / asked
    return found


def table(facts: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Kinds by amounts, in percent, as lines."""
    amounts = sorted({amount for found in facts.values() for amount in found}, key=int)
    lines = [f"  {'answered, %':<12}" + "".join(f"{amount:>7}" for amount in amounts)]
    for kind, found in facts.items():
        cells = (f"{100 * found[one]:.1f}" if one in found else "" for one in amounts)
        lines.append(f"  {kind:<12}" + "".join(f"{cell:>7}" for cell in cells))
    return lines
