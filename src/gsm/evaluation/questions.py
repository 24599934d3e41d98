"""The share of answered questions of a synthetic task, for each kind of question. B batch, T positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from gsm.data.recall import Task
from gsm.data.synthetic import HELD_OUT, Generated
from gsm.evaluation import tracking
from gsm.models.base import LanguageModel
from gsm.models.checks import IGNORED
from gsm.tables import grid_lines

BATCH = 16  # sequences read at a time


@torch.no_grad()
def measure(
    model: LanguageModel, kinds: Mapping[str, Task], length: int, sequences: int = 128, seed: int = HELD_OUT
) -> dict[str, float]:
    """Return the fraction of questions that a model answers, by kind.

    Args:
        model: stays in its mode.
        kinds: by name, the task that asks only such questions.
        length: tokens of a sequence.
        sequences: number for each kind, the same for every model.
        seed: of the sequences; one of ``gsm.data.synthetic.UNSEEN``.
    """
    fractions: dict[str, float] = {}
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
        fractions[name] = right / count
    return fractions


def table(fractions: Mapping[str, float]) -> list[str]:
    """Return kinds with their answered questions in percent, as lines."""
    rows = [[name, f"{100 * value:.1f}"] for name, value in fractions.items()]
    return grid_lines([["questions", "answered, %"], *rows])


def grid(fractions: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return kinds by amounts, in percent, as lines."""
    amounts = sorted({amount for by_amount in fractions.values() for amount in by_amount}, key=int)
    rows = [
        [kind, *(f"{100 * by_amount[amount]:.1f}" if amount in by_amount else "" for amount in amounts)]
        for kind, by_amount in fractions.items()
    ]
    return grid_lines([["answered, %", *amounts], *rows])


class TaskMeasure(NamedTuple):
    """The measure of a synthetic task beside its loss, and the lines that show its result.

    Attributes:
        measure: called with the model, the task, the tokens and the number of sequences, and a seed of
            ``gsm.data.synthetic.UNSEEN``; returns plain containers for ``summary.json``.
        table: lines of text.
    """

    measure: Callable[..., Any]
    table: Callable[[Any], list[str]]


def _by_load(model: LanguageModel, task: Any, length: int, sequences: int, seed: int) -> dict[str, dict[str, float]]:
    return {kind: measure(model, tasks, length, sequences, seed) for kind, tasks in task.apart().items()}


def _by_question(model: LanguageModel, task: Any, length: int, sequences: int, seed: int) -> dict[str, float]:
    return measure(model, task.apart(), length, sequences, seed)


# Measures by their key in ``summary.json``; a task names its key as ``measured``.
MEASURES = {
    "by_length": TaskMeasure(tracking.measure, tracking.table),
    "by_question": TaskMeasure(_by_question, table),
    "by_load": TaskMeasure(_by_load, grid),
}
