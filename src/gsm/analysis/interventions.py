"""Run a model without some of its parts, inside a ``with`` block: state entries, bank slots or a stage's retrieval.

    with without_stage(model, 1):
        model(tokens)                    # the increment of stage 1 is zero
    model(tokens)                        # as before

A removed part is replaced by zeros. A zero entry still takes part in the softmax, with a logit of 0, but adds no value.
The model is unchanged outside of the block, also after an exception. Blocks can be nested. They patch taps
(``gsm.patch``), so call the model that was not passed to ``torch.compile``.

B sequences, T positions, R rows, N answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from gsm.models.base import LanguageModel
from gsm.models.checks import IGNORED
from gsm.models.gsm import GSM, check_gsm
from gsm.observe import patch
from gsm.shapes import last_rows


@contextmanager
def without_entries(model: GSM, removed_BT: Tensor, *, start: bool = True) -> Iterator[None]:
    """Remove the entries of the state that were written at some positions.

    Args:
        model: any GSM.
        removed_BT: bool, True at positions to remove. Calls inside the block have these positions and no memory.
        start: whether the decoder also starts from zeros at these positions, with any ``decoder_start``. If False, only
            the state lacks the entries, and the decoder still starts from z.
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
    """Return the names of two taps of the first decoder layer: its residual streams, and their read-out."""
    first = next(iter(model.decoder)).name
    return f"{first}/streams", f"{first}/stream"


def without_state(model: GSM) -> AbstractContextManager[None]:
    """Remove all entries of the state. The decoder still starts from z."""
    return patch(parts(model), torch.zeros_like, model)


def without_stage(model: GSM, stage: int, removed_BT: Tensor | None = None) -> AbstractContextManager[None]:
    """Remove the increment of a stage, for the writer and for later stages.

    Args:
        model: a GSM with stages.
        stage: number of the stage, counted from 1.
        removed_BT: bool, True at positions to remove; None: all positions.

    Raises:
        ValueError: if there is no such stage.
    """
    stages = _stages(model)
    if stage not in stages:
        raise ValueError(f"stage must be in [1, {len(stages)}], the stages of the model, got {stage}")

    def remove_increment(increment_BRD: Tensor) -> Tensor:
        if removed_BT is None:
            return torch.zeros_like(increment_BRD)
        return increment_BRD.masked_fill(last_rows(removed_BT, increment_BRD.shape[1])[..., None], 0)

    return patch(f"stage/{stage}/increment", remove_increment, model)


@contextmanager
def without_stages(model: GSM, removed_BT: Tensor | None = None) -> Iterator[None]:
    """Remove the increments of all stages; ``removed_BT`` as in ``without_stage``."""
    with ExitStack() as stack:
        for stage in _stages(model):
            stack.enter_context(without_stage(model, stage, removed_BT))
        yield


class Ablations(dict[str, Callable[[], AbstractContextManager[None]]]):
    """The result of ``ablations``; the KeyError for another name lists them."""

    def __missing__(self, name: str) -> NoReturn:
        raise KeyError(f"part must be one of {', '.join(self)}, got {name!r}")


def ablations(model: GSM) -> Ablations:
    """Return, by name, functions that remove a part at all positions: the state's entries, each stage, and all
    stages of a model with several.

    Raises:
        ValueError: if the model is no GSM.
    """
    stages, ablated = _stages(model), Ablations({"state": partial(without_state, model)})
    ablated |= {f"stage {stage}": partial(without_stage, model, stage) for stage in stages}
    if len(stages) > 1:
        ablated["all stages"] = partial(without_stages, model)
    return ablated


def without_slots(model: GSM, removed_BF: Tensor) -> AbstractContextManager[None]:
    """Remove some slots of all banks of the encoder: their entries are zeros for encoder layers, stages and indexers.

    Args:
        model: any GSM.
        removed_BF: bool, True at slots to remove. Calls inside the block have these slots and no memory. With one
            document per sequence, slot f holds the tokens f x ratio to (f + 1) x ratio - 1.
    """

    def remove_slots(latent_BGC: Tensor) -> Tensor:
        return latent_BGC.masked_fill(removed_BF[:, : latent_BGC.shape[1], None], 0)

    return patch("encoder/*/latent", remove_slots, model)


def parts(model: GSM) -> list[str]:
    """Return the names of the taps of the state's parts; with the paper's reader only ``state/entries``."""
    check_gsm(model)
    return [f"state/{part.name}" for part in model.writer.parts]


def _stages(model: GSM) -> range:
    check_gsm(model)
    return range(1, len(model.aggregation.layers) + 1)


@dataclass(frozen=True)
class Answers:
    """A model's answers to N questions, ordered by sequence and then by position.

    Attributes:
        log_probability_N: the log-probability of the right token, in nats.
        right_N: bool, whether the right token is the likeliest.
    """

    log_probability_N: Tensor
    right_N: Tensor

    @property
    def accuracy(self) -> float:
        """The fraction of questions with ``right_N``."""
        return float(self.right_N.float().mean())

    @property
    def log_probability(self) -> float:
        """The mean log-probability of the right tokens, in nats."""
        return float(self.log_probability_N.mean())

    def __str__(self) -> str:
        return f"{self.accuracy:.3f} right, log-probability {self.log_probability:.3f}"


@torch.no_grad()
def answers(model: LanguageModel, token_BT: Tensor, target_BT: Tensor) -> Answers:
    """Return the model's answers at all positions whose target is not -100.

    All sequences are read in one call, so that an intervention can remove different parts of each.

    Args:
        model: any model.
        token_BT: int64, the sequences, each one document.
        target_BT: int64, the right next token of each position; -100 for none.
    """
    with model.evaluating():
        logit_BTV = model.forward(token_BT).logits
    counted_BT = target_BT != IGNORED
    target_N, log_NV = target_BT[counted_BT], logit_BTV[counted_BT].log_softmax(dim=-1)
    return Answers(log_NV.gather(-1, target_N[:, None])[:, 0], log_NV.argmax(dim=-1) == target_N)
