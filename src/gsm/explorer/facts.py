"""What the explorer shows of a text: the numbers of one recorded forward, and the losses of a few more without parts.

A row is a token that the model has just read: what it selects and writes stands there, and what it predicts is next.

T tokens, H heads, E window or state entries, K selected slots, F slots of a bank, S ways, P sources, G guesses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gsm.analysis.attention import attention_map, attention_parts, entries_back, names_of, slot_starts
from gsm.analysis.interventions import ablations
from gsm.analysis.rollout import TAPS, state_routes
from gsm.models.base import LanguageModel, Output
from gsm.models.checks import IGNORED
from gsm.models.gsm import GSM
from gsm.observe import Seen, record
from gsm.shapes import promoted
from gsm.slots.state_reader.base import StateAttention

LONGEST = 4096  # tokens: rollout multiplies matrices of T x T
SOURCES = 32  # the strongest of each entry
GUESSES = 3
AT_ONCE = 256  # rows whose logits are held at a time
WHOLE = "whole model"


@dataclass(frozen=True)
class Reading:
    """One attention, at every row of the text; the weights of a row, with its sink, sum to 1.

    Attributes:
        name: ``encoder/<l>``, ``stage/<s>`` or ``decoder/<l>``.
        layer: the encoder layer that a stage stands on, the layer itself of others.
        back_E: int64, how many positions before its row each near entry was written.
        near_THE: float, weights of the window's entries, or of the state's.
        own: how many of the near entries, the last ones, are a decoder layer's own rather than the state's.
        chosen_TK: int64, the slots that are read, -1 for none; K is 0 where no bank is.
        far_THK: float, their weights.
        sink_TH: float.
    """

    name: str
    layer: int
    back_E: Tensor
    near_THE: Tensor
    own: int
    chosen_TK: Tensor
    far_THK: Tensor
    sink_TH: Tensor


@dataclass(frozen=True)
class Facts:
    """All that is shown of one text.

    Attributes:
        token_T: int64.
        document_T: int64, equal for tokens of one document.
        target_T: int64, what a row has to predict, -1 where nothing is asked of it.
        ratio: tokens of a slot.
        start_F: int64, the first token of each slot of a bank; negative for one that is not used.
        readings: every attention, encoder first, then stages, then decoder.
        ways: by which the state is filled: ``encoder``, ``stage/1``, ...
        way_ST: float, how much of a row's entry came by each way; columns sum to 1.
        source_TP: int64, the tokens that an entry has most of, the strongest first; -1 for none.
        share_STP: float, how much it has of them by each way.
        read_T: float, the weight of a token's entry for later rows, summed over them; a mean over decoder layers and
            heads.
        retrieved_T: float, the weight that stages give a token's slot, summed over rows and stages, divided among the
            tokens of the slot; a mean over heads.
        loss_T: in nats, by what is missing: nothing (``WHOLE``), the state, a stage, all; NaN where nothing is asked.
        guess_TG: int64, the likeliest next tokens.
        chance_TG: float, their probabilities.
    """

    token_T: Tensor
    document_T: Tensor
    target_T: Tensor
    ratio: int
    start_F: Tensor
    readings: tuple[Reading, ...]
    ways: tuple[str, ...]
    way_ST: Tensor
    source_TP: Tensor
    share_STP: Tensor
    read_T: Tensor
    retrieved_T: Tensor
    loss_T: dict[str, Tensor]
    guess_TG: Tensor
    chance_TG: Tensor


@torch.no_grad()
def gather(
    model: LanguageModel, token_T: Tensor, document_T: Tensor | None = None, target_T: Tensor | None = None
) -> Facts:
    """Reads a text with a model, whole and without its parts.

    Args:
        model: a GSM, on any device.
        token_T: int64.
        document_T: int64, contiguous runs of equal ids; None: one document.
        target_T: int64, -100 where nothing is asked; None: the next token, where it is of the same document.

    Raises:
        ValueError: the model has no shared state, there are too few or too many tokens, or documents or targets are of
            another length.
    """
    check(model, len(token_T))
    for name, x in (("documents", document_T), ("targets", target_T)):
        if x is not None and x.shape != token_T.shape:
            raise ValueError(f"{name} has the shape {list(x.shape)}, but the text has {len(token_T):,} tokens")
    model = cast(GSM, model)
    token_T = token_T.to(model.embedding.weight.device)
    document_T = torch.zeros_like(token_T) if document_T is None else document_T.to(token_T)
    target_T = _next(token_T, document_T) if target_T is None else target_T.to(token_T)
    with model.evaluating():
        with record(*TAPS) as seen:
            whole = model.forward(token_T[None], documents=document_T[None])
        loss_T, (guess_TG, chance_TG) = {WHOLE: _losses(whole, target_T)}, _guesses(whole)
        for name, without in _named(model):
            with without:
                loss_T[name] = _losses(model.forward(token_T[None], documents=document_T[None]), target_T)
    routes = state_routes(model, seen)
    share_TP, source_TP = routes.total_TT.topk(min(SOURCES, len(token_T)), dim=-1)
    names = names_of(model)
    decoder = [name for name in names if name.startswith("decoder/")]
    stages = [name for name in names if name.startswith("stage/")]
    later = [attention_map(model, seen, name).tril(-1).sum(dim=0) for name in decoder]
    fetched = [attention_parts(model, seen, name)[1].sum(dim=0) for name in stages]
    return Facts(
        token_T=token_T,
        document_T=document_T,
        target_T=target_T.masked_fill(target_T == IGNORED, -1),
        ratio=model.geometry.encoder_ratio,
        start_F=slot_starts(model, seen["position"])[0],
        readings=tuple(_reading(model, seen, name) for name in names),
        ways=routes.names,
        way_ST=routes.way_ST,
        source_TP=source_TP.masked_fill(share_TP <= 0, -1),
        share_STP=routes.share_STT.gather(-1, source_TP.expand(len(routes.names), -1, -1)),
        read_T=torch.stack(later).mean(dim=0),
        retrieved_T=torch.stack(fetched).sum(dim=0) if fetched else torch.zeros_like(later[0]),
        loss_T=loss_T,
        guess_TG=guess_TG,
        chance_TG=chance_TG,
    )


def check(model: LanguageModel, tokens: int | None = None, name: str = "") -> None:
    """Raises ValueError for what the explorer cannot show, with the remedy; ``name``: what the model was chosen by."""
    if not isinstance(model, GSM):
        raise ValueError(
            f"the explorer shows a shared state, and {name or type(model).__name__} has none: give it a GSM "
            "(evaluate.py measures any model)"
        )
    least = model.geometry.encoder_ratio + 1
    if tokens is not None and not least <= tokens <= LONGEST:
        raise ValueError(f"the text has {tokens:,} tokens, but the explorer reads {least} to {LONGEST:,}")


def _next(token_T: Tensor, document_T: Tensor) -> Tensor:
    target_T = torch.full_like(token_T, IGNORED)
    goes_on_T = document_T[1:] == document_T[:-1]
    target_T[:-1] = token_T[1:].where(goes_on_T, IGNORED)
    return target_T


def _named(model: GSM) -> Iterator[tuple[str, AbstractContextManager[None]]]:
    """What can be taken away, as the page calls it."""
    for what, without in ablations(model).items():
        yield f"without {'the state' if what == 'state' else what}", without()


def _losses(out: Output, target_T: Tensor) -> Tensor:
    """In nats, float32 [T]."""
    parts = zip(out.hidden_BRD[0].split(AT_ONCE), target_T.split(AT_ONCE), strict=True)
    loss_T = [
        cross_entropy(promoted(out.head(hidden_RD)), target_R, ignore_index=IGNORED, reduction="none")
        for hidden_RD, target_R in parts
    ]
    return torch.cat(loss_T).masked_fill(target_T == IGNORED, math.nan)


def _guesses(out: Output) -> tuple[Tensor, Tensor]:
    """The likeliest tokens behind each row, int64 [T, G], and their probabilities."""
    found = [promoted(out.head(part_RD)).softmax(dim=-1).topk(GUESSES) for part_RD in out.hidden_BRD[0].split(AT_ONCE)]
    return torch.cat([one.indices for one in found]), torch.cat([one.values for one in found])


def _reading(model: GSM, seen: Seen, name: str) -> Reading:
    weight_THE = seen[f"{name}/weights"][0]
    chosen_BTK = seen.get(f"{name}/top_k")
    chosen_TK = torch.zeros(len(weight_THE), 0).long() if chosen_BTK is None else chosen_BTK[0]
    near = weight_THE.shape[2] - 1 - chosen_TK.shape[1]
    kind, number = name.split("/")
    layer, own = int(number), 0
    if kind == "stage":
        layer = model.aggregation.layers[layer - 1]
    if kind == "decoder":
        block = list(model.decoder)[layer - model.geometry.encoder_layers - 1]
        own = cast(StateAttention, block.attention).own_size
    return Reading(
        name=name,
        layer=layer,
        back_E=entries_back(model, name, near),
        near_THE=weight_THE[..., :near],
        own=own,
        chosen_TK=chosen_TK,
        far_THK=weight_THE[..., near:-1],
        sink_TH=weight_THE[..., -1],
    )
