"""State tracking put to a model: how often it knows the last state of a word, by group and length.

With steps, the model writes every state itself: what it wrote, right or wrong, is all that it has to go on. B words at
a time, N letters.
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

CHUNK = 1024  # letters read at a time


def measure(
    model: LanguageModel, task: StateTracking, length: int, words: int = 128, seed: int = HELD_OUT
) -> dict[str, Any]:
    """The fraction of words whose last state a model knows.

    Args:
        model: trained on the task.
        task: says groups, letters and answers, and the lengths to test with.
        length: tokens of the sequences that the model was trained with.
        words: how many of each length and group, the same for every model.
        seed: of the words; one of ``gsm.data.synthetic.UNSEEN``.

    Returns:
        By group, by length (as a string, since it goes into JSON).
    """
    found: dict[str, dict[str, float]] = {}
    for number, name in enumerate(task.groups):
        for count in task.test_lengths(length):
            held_out = [task.word(number, np.random.default_rng([seed, count, i]), count) for i in range(words)]
            right_B = last_states(model, held_out, task.answers == "steps")
            found.setdefault(name, {})[str(count)] = float(right_B.double().mean())
    return found


@torch.no_grad()
def last_states(model: LanguageModel, words: list[Word], steps: bool) -> Tensor:
    """Whether the model knows the last state of each word, bool [B], on the CPU.

    Args:
        model: is left in the mode that it was in.
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
    """Groups by lengths, in percent, as lines: how often the last state of a word is known."""
    lengths = sorted({length for found in facts.values() for length in found}, key=int)
    lines = [f"  {'last state known, %':<20}" + "".join(f"{length + ' letters':>14}" for length in lengths)]
    for name, found in facts.items():
        lines.append(f"  {name:<20}" + "".join(f"{100 * found[length]:>14.1f}" for length in lengths))
    return lines
