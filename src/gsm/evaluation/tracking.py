"""A test of state tracking: the share of words whose last state a model knows, by group and length.

With steps, the model writes every state itself, and reads its own state, right or wrong, before the next letter. B
words at a time, N letters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gsm.data.state_tracking import StateTracking, Word
from gsm.data.synthetic import HELD_OUT
from gsm.models.base import LanguageModel
from gsm.tables import grid_lines

CHUNK = 1024  # letters read at a time


def measure(
    model: LanguageModel, task: StateTracking, length: int, words: int = 128, seed: int = HELD_OUT
) -> dict[str, Any]:
    """Return the fraction of words whose last state the model knows, by group and by length (a string, as in JSON).

    Args:
        model: trained on the task.
        task: has groups, letters and answers, and the lengths to test with.
        length: tokens of the sequences in training.
        words: number for each length and group, the same for every model.
        seed: of the words; one of ``gsm.data.synthetic.UNSEEN``.
    """
    accuracies: dict[str, dict[str, float]] = {}
    for number, name in enumerate(task.groups):
        for count in task.test_lengths(length):
            held_out = [task.word(number, np.random.default_rng([seed, count, i]), count) for i in range(words)]
            right_B = last_states(model, held_out, task.answers == "steps")
            accuracies.setdefault(name, {})[str(count)] = float(right_B.double().mean())
    return accuracies


@torch.no_grad()
def last_states(model: LanguageModel, words: list[Word], steps: bool) -> Tensor:
    """Return whether the model knows the last state of each word, bool [B], on the CPU.

    Args:
        model: stays in its mode.
        words: all of one length.
        steps: it writes the state behind each letter before it reads the next; else it reads letters alone.
    """
    device = model.embedding.weight.device
    letter_BN, state_BN = (torch.from_numpy(np.stack(ids)).to(device) for ids in zip(*words, strict=True))
    memory = model.start(len(words), capacity=letter_BN.shape[1] * (1 + steps))
    with model.evaluating():
        if not steps:
            return (model.prefill(letter_BN, memory, CHUNK).logits[:, -1].argmax(-1) == state_BN[:, -1]).cpu()
        token_BT, written_B = letter_BN[:, :1], state_BN[:, -1]
        for place in range(letter_BN.shape[1]):
            if place:
                token_BT = torch.stack([written_B, letter_BN[:, place]], dim=1)
            out = model(token_BT, memory=memory, rows=1)
            assert out.memory is not None  # one was given
            memory, written_B = out.memory, out.logits[:, -1].argmax(-1)
    return (written_B == state_BN[:, -1]).cpu()


def table(facts: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return groups by lengths, in percent, as lines: how often the last state of a word is known."""
    lengths = sorted({length for shares in facts.values() for length in shares}, key=int)
    rows = [[name, *(f"{100 * shares[length]:.1f}" for length in lengths)] for name, shares in facts.items()]
    return grid_lines([["last state known, %", *(f"{length} letters" for length in lengths)], *rows])
