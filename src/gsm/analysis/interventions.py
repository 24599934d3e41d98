"""A model without something, inside a ``with`` block: entries of the state, slots of the banks, a stage's retrieval.

    with without_stage(model, 1):
        model(tokens)                    # stage 1 brings nothing
    model(tokens)                        # as before

What is taken away becomes zeros: an entry of zeros gets a logit of 0 and gives nothing to whoever reads it. Nothing
of the model is changed; outside of the block, and after an exception, it computes what it computed before. Blocks
nest. A compiled model keeps what it was compiled with: intervene on the model as it was before ``torch.compile``.

B sequences, T positions, R rows, N answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gsm.layers.attended import SharedState
from gsm.layers.residual import Streams
from gsm.layers.sparse import SparseAttention
from gsm.models.base import LanguageModel
from gsm.models.checks import IGNORED
from gsm.models.gsm import GSM
from gsm.shapes import last


@contextmanager
def edited(module: nn.Module, edit: Callable[[Any], Any]) -> Iterator[None]:
    """What the module gives back goes through ``edit`` inside of the block."""
    handle = module.register_forward_hook(lambda module, given, out: edit(out))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def without_entries(model: GSM, gone_BT: Tensor, *, start: bool = True) -> Iterator[None]:
    """The state without what was written at some positions.

    Args:
        model: any GSM.
        gone_BT: bool, over the positions of the calls inside of the block, which keep no memory.
        start: the decoder of such a position also starts from zeros, whatever its ``decoder_start``. If not, only the
            state lacks them, which later rows read, and the row keeps its z.
    """

    def gone(entry_BEC: Tensor) -> Tensor:
        slots = model.writer.slots
        gone_BE = last(gone_BT, entry_BEC.shape[1] // slots).repeat_interleave(slots, dim=1)
        return entry_BEC.masked_fill(gone_BE[..., None], 0)

    def edit(out: tuple[Tensor, SharedState, Any]) -> tuple[Tensor, SharedState, Any]:
        z_BRD, state, caches = out
        return z_BRD, state.map(gone), caches

    def begin(decoder: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        streams, *others = given
        gone_BR1 = last(gone_BT, streams.mixed_BTD.shape[1])[..., None]
        nothing = streams.value_BTXD.masked_fill(gone_BR1[..., None], 0), streams.mixed_BTD.masked_fill(gone_BR1, 0)
        return Streams(*nothing), *others

    handle = model.decoder.register_forward_pre_hook(begin) if start else None
    try:
        with edited(model.writer, edit):
            yield
    finally:
        if handle is not None:
            handle.remove()


@contextmanager
def without_state(model: GSM) -> Iterator[None]:
    """The state without all that was written, at whatever positions: rows keep their own z, and read nothing else."""
    with edited(model.writer, lambda out: (out[0], out[1].map(torch.zeros_like), out[2])):
        yield


@contextmanager
def without_stage(model: GSM, stage: int, gone_BT: Tensor | None = None) -> Iterator[None]:
    """A stage that retrieves nothing, for the writer and for the stages after it.

    Args:
        model: a GSM with stages.
        stage: its number, from 1.
        gone_BT: bool, at which positions of the calls; None: at all.

    Raises:
        ValueError: there is no such stage.
    """
    stages = list(model.aggregation)
    if not 1 <= stage <= len(stages):
        raise ValueError(f"stage must lie between 1 and {len(stages)}, the stages of this model; got {stage}")

    def edit(out: tuple[Tensor, Any, Any]) -> tuple[Tensor, Any, Any]:
        increment_BRD, *rest = out
        gone = torch.ones_like(increment_BRD[..., :1], dtype=torch.bool)
        gone = gone if gone_BT is None else last(gone_BT, increment_BRD.shape[1])[..., None]
        return increment_BRD.masked_fill(gone, 0), *rest

    with edited(stages[stage - 1], edit):
        yield


@contextmanager
def without_stages(model: GSM, gone_BT: Tensor | None = None) -> Iterator[None]:
    """All stages without what they retrieve, as ``without_stage``."""
    with ExitStack() as stack:
        for stage in range(1, len(model.aggregation.layers) + 1):
            stack.enter_context(without_stage(model, stage, gone_BT))
        yield


def ablations(model: GSM) -> dict[str, Callable[[], AbstractContextManager[None]]]:
    """What can be taken away everywhere, by name: the state's entries, what each stage retrieves, and what all do."""
    found: dict[str, Callable[[], AbstractContextManager[None]]] = {"state": partial(without_state, model)}
    stages = range(1, len(model.aggregation.layers) + 1)
    found |= {f"stage {stage}": partial(without_stage, model, stage) for stage in stages}
    if len(stages) > 1:
        found["all stages"] = partial(without_stages, model)
    return found


@contextmanager
def without_slots(model: GSM, gone_BF: Tensor) -> Iterator[None]:
    """All banks of the encoder without some slots: their latents become zeros, for encoder layers, stages and indexers.

    Args:
        model: any GSM.
        gone_BF: bool, over the slots that the calls inside of the block add, which keep no memory: of one document a
            sequence, slot f holds the tokens from f x ratio on. What is not named stays.
    """

    def edit(latent_BGC: Tensor) -> Tensor:
        return latent_BGC.masked_fill(gone_BF[:, : latent_BGC.shape[1], None], 0)

    with ExitStack() as stack:
        for block in model.encoder:
            if isinstance(block.attention, SparseAttention) and block.attention.compressor is not None:
                stack.enter_context(edited(block.attention.compressor.norm, edit))  # the last thing that it does
        yield


@dataclass(frozen=True)
class Answers:
    """What a model says to its questions: ``log_probability_N`` of the right token, and whether it is the likeliest,
    ``right_N``; in the order of sequences, and of positions in each."""

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
    """The answers where there is a target, not -100; int64 [B, T] each, every sequence one document.

    The sequences are read in one call, so that what is taken away can be another thing in each.
    """
    with model.evaluating():
        logit_BTV = model.forward(token_BT).logits
    asked_BT = target_BT != IGNORED
    target_N, log_NV = target_BT[asked_BT], logit_BTV[asked_BT].log_softmax(dim=-1)
    return Answers(log_NV.gather(-1, target_N[:, None])[:, 0], log_NV.argmax(dim=-1) == target_N)
