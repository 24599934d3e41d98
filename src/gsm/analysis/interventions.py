"""A model without something, inside a ``with`` block: entries of the state, slots of the banks, a stage's retrieval.

    with without_stage(model, 1):
        model(tokens)                    # stage 1 brings nothing
    model(tokens)                        # as before

A removed part becomes zeros: an entry of zeros gets a logit of 0 and adds nothing to its reader. The model itself is
not changed: outside of the block, and after an exception, it computes as before. Blocks nest. Each is a patch of taps
(``gsm.patch``) in the calls of one model; intervene on the model as it was before ``torch.compile``.

B sequences, T positions, R rows, N answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gsm.models.base import LanguageModel
from gsm.models.checks import IGNORED
from gsm.models.gsm import GSM
from gsm.observe import patch
from gsm.shapes import last_rows


@contextmanager
def without_entries(model: GSM, removed_BT: Tensor, *, start: bool = True) -> Iterator[None]:
    """Remove the entries of the state that were written at some positions.

    Args:
        model: any GSM.
        removed_BT: bool, over the positions of the calls inside of the block; these calls keep no memory.
        start: whether the decoder of such a position also starts from zeros, with any ``decoder_start``. False: only
            the state, which later rows read, lacks the entries, and the row keeps its z.
    """

    def remove_entries(entry_BEC: Tensor) -> Tensor:
        slots = model.writer.slots
        removed_BE = last_rows(removed_BT, entry_BEC.shape[1] // slots).repeat_interleave(slots, dim=1)
        return entry_BEC.masked_fill(removed_BE[..., None], 0)

    def remove_starts(x: Tensor) -> Tensor:
        removed_BR = last_rows(removed_BT, x.shape[1])
        return x.masked_fill(removed_BR.view(*removed_BR.shape, *[1] * (x.ndim - 2)), 0)

    with ExitStack() as stack:
        stack.enter_context(patch(parts(model), remove_entries, model))
        if start:
            stack.enter_context(patch(starts(model), remove_starts, model))
        yield


def starts(model: GSM) -> tuple[str, str]:
    """Return the names of the taps of what the decoder starts from: its streams, and what its first site reads."""
    first = next(iter(model.decoder)).name
    return f"{first}/streams", f"{first}/stream"


def without_state(model: GSM) -> AbstractContextManager[None]:
    """Remove all entries of the state, at all positions: each row keeps its own z, and reads nothing else."""
    return patch(parts(model), torch.zeros_like, model)


def without_stage(model: GSM, stage: int, removed_BT: Tensor | None = None) -> AbstractContextManager[None]:
    """Remove the retrieval of a stage, for the writer and for the stages after it.

    Args:
        model: a GSM with stages.
        stage: its number, from 1.
        removed_BT: bool, the positions of the calls; None: all positions.

    Raises:
        ValueError: there is no such stage.
    """
    stages = len(model.aggregation.layers)
    if not 1 <= stage <= stages:
        raise ValueError(f"stage must be one of the model's, in [1, {stages}], got {stage}")

    def remove_increment(increment_BRD: Tensor) -> Tensor:
        if removed_BT is None:
            return torch.zeros_like(increment_BRD)
        return increment_BRD.masked_fill(last_rows(removed_BT, increment_BRD.shape[1])[..., None], 0)

    return patch(f"stage/{stage}/increment", remove_increment, model)


@contextmanager
def without_stages(model: GSM, removed_BT: Tensor | None = None) -> Iterator[None]:
    """Remove the retrieval of all stages, as ``without_stage``."""
    with ExitStack() as stack:
        for stage in range(1, len(model.aggregation.layers) + 1):
            stack.enter_context(without_stage(model, stage, removed_BT))
        yield


def ablations(model: GSM) -> dict[str, Callable[[], AbstractContextManager[None]]]:
    """Return the parts to remove everywhere, by name: the state's entries, each stage's retrieval, all retrievals."""
    ablated: dict[str, Callable[[], AbstractContextManager[None]]] = {"state": partial(without_state, model)}
    stages = range(1, len(model.aggregation.layers) + 1)
    ablated |= {f"stage {stage}": partial(without_stage, model, stage) for stage in stages}
    if len(stages) > 1:
        ablated["all stages"] = partial(without_stages, model)
    return ablated


def without_slots(model: GSM, removed_BF: Tensor) -> AbstractContextManager[None]:
    """Remove some slots of all banks of the encoder. Their latents become zeros for encoder layers, stages and
    indexers.

    Args:
        model: any GSM.
        removed_BF: bool, over the slots that the calls inside of the block add; these calls keep no memory. With one
            document in a sequence, slot f holds the tokens from f x ratio on. All other slots stay.
    """

    def remove_slots(latent_BGC: Tensor) -> Tensor:
        return latent_BGC.masked_fill(removed_BF[:, : latent_BGC.shape[1], None], 0)

    return patch("encoder/*/latent", remove_slots, model)


def parts(model: GSM) -> list[str]:
    """Return the taps of the state's parts: ``state/entries``, unless the reader needs other parts."""
    return [f"state/{part.name}" for part in model.writer.parts]


@dataclass(frozen=True)
class Answers:
    """A model's answers to questions: ``log_probability_N`` of the right token, and ``right_N``, whether this token is
    the likeliest. The order is that of sequences, then of positions."""

    log_probability_N: Tensor
    right_N: Tensor

    @property
    def accuracy(self) -> float:
        """The fraction of right answers."""
        return float(self.right_N.float().mean())

    @property
    def log_probability(self) -> float:
        """The mean, in nats."""
        return float(self.log_probability_N.mean())

    def __str__(self) -> str:
        return f"{self.accuracy:.3f} right, log-probability {self.log_probability:.3f}"


@torch.no_grad()
def answers(model: LanguageModel, token_BT: Tensor, target_BT: Tensor) -> Answers:
    """Return the answers at all targets but -100. Tokens and targets are int64 [B, T]; every sequence is one document.

    One call reads all sequences, so an intervention may remove other parts of each sequence.
    """
    with model.evaluating():
        logit_BTV = model.forward(token_BT).logits
    counted_BT = target_BT != IGNORED
    target_N, log_NV = target_BT[counted_BT], logit_BTV[counted_BT].log_softmax(dim=-1)
    return Answers(log_NV.gather(-1, target_N[:, None])[:, 0], log_NV.argmax(dim=-1) == target_N)
