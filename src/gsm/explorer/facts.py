"""The explorer's numbers for a text: one recorded forward pass, and the losses of forward passes without parts of the
model.

A row is a position at which the model has just read a token: it makes selections, writes a state entry, and predicts
the next token.

Letters: T tokens, H heads, E window or state entries, K selected slots, F slots of a bank, S ways (routes into the
state), P sources, G guesses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gsm.analysis.attention import (
    attention_map,
    attention_parts,
    entries_back,
    names_of,
    own_entries,
    slot_starts,
    with_recurrences,
)
from gsm.analysis.interventions import ablations
from gsm.analysis.rollout import TAPS, state_routes
from gsm.models.base import LanguageModel, Output
from gsm.models.checks import IGNORED
from gsm.models.gsm import GSM
from gsm.observe import Recording, record
from gsm.shapes import promoted

LONGEST = 4096  # largest number of tokens: rollout multiplies matrices of T x T
SOURCES = 32  # strongest sources per entry
GUESSES = 3  # most likely next tokens per row
AT_ONCE = 256  # rows of logits in memory at a time
WHOLE = "whole model"


@dataclass(frozen=True)
class Reading:
    """The attention weights of one layer or stage at every row. The weights of a row, with its sink, sum to 1.

    Attributes:
        name: ``encoder/<l>``, ``stage/<s>`` or ``decoder/<l>``.
        layer: number of the layer; for a stage, of its encoder layer.
        back_E: int64, distance in positions from the row back to each near entry.
        near_THE: float, weights of the near entries: those of the window, or of the state.
        own: how many of the near entries, at the end, are in the window of a decoder layer instead of the state.
        chosen_TK: int64, the selected slots, -1 for none; K is 0 without a bank.
        far_THK: float, weights of these slots.
        sink_TH: float, weights of the sink.
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
    """All numbers for one text.

    Attributes:
        token_T: int64.
        document_T: int64, equal for tokens of one document.
        target_T: int64, target of a row, -1 for none.
        ratio: tokens per slot.
        start_F: int64, the first token of each slot of a bank; negative for unused slots.
        readings: every attention, encoder first, then stages, then decoder.
        ways: routes into the state: ``encoder``, ``stage/1``, ...
        way_ST: float, share of each route in a row's entry; columns sum to 1.
        source_TP: int64, the tokens with the largest shares of an entry, the strongest first; -1 for none.
        share_STP: float, their shares by route.
        read_T: float, attention weight on a token's entry, summed over later rows; mean over decoder layers and heads.
        retrieved_T: float, weight on a token's slot in the stages, summed over rows and stages, divided by the tokens
            per slot; mean over heads.
        loss_T: losses in nats, by the removed part: none (``WHOLE``), the state, a stage, all stages; NaN without a
            target.
        guess_TG: int64, the most likely next tokens.
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
    """Compute the facts: run the whole model on a text, and run it without each of its parts.

    Args:
        model: a GSM, on any device.
        token_T: int64.
        document_T: int64, contiguous runs of equal ids; None: one document.
        target_T: int64, -100 for none; None: the next token, if it is in the same document.

    Raises:
        ValueError: the model has no shared state or a recurrent encoder layer, the number of tokens is out of range, or
            documents or targets differ from the tokens in length.
    """
    check(model, len(token_T))
    for name, x in (("documents", document_T), ("targets", target_T)):
        if x is not None and x.shape != token_T.shape:
            raise ValueError(f"{name} must have the shape of tokens, [{len(token_T):,}], got {list(x.shape)}")
    model = cast(GSM, model)
    token_T = token_T.to(model.embedding.weight.device)
    document_T = torch.zeros_like(token_T) if document_T is None else document_T.to(token_T)
    target_T = _next(token_T, document_T) if target_T is None else target_T.to(token_T)
    with model.evaluating():
        with record(*TAPS) as seen:
            whole = model.forward(token_T[None], documents=document_T[None])
        loss_T, (guess_TG, chance_TG) = {WHOLE: _losses(whole, target_T)}, _guesses(whole)
        for part, without in ablations(model).items():
            label = f"without {'the state' if part == 'state' else part}"  # on the page
            with without():
                loss_T[label] = _losses(model.forward(token_T[None], documents=document_T[None]), target_T)
    routes = state_routes(model, seen)
    share_TP, source_TP = routes.total_TT.topk(min(SOURCES, len(token_T)), dim=-1)
    names = names_of(model)
    later = [attention_map(model, seen, name).tril(-1).sum(dim=0) for name in names if name.startswith("decoder/")]
    fetched = [attention_parts(model, seen, name)[1].sum(dim=0) for name in names if name.startswith("stage/")]
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
    """Raise ValueError if the explorer cannot show a model, or a text of this many tokens.

    Args:
        model: the model.
        tokens: length of the text; None: check only the model.
        name: name of the model in the message.
    """
    if not isinstance(model, GSM):
        raise ValueError(f"model must be a GSM, got {name or type(model).__name__}; use evaluate.py for other models")
    if layers := with_recurrences(model):
        raise ValueError(
            "encoder_layer must be attention, because the page shows attention weights, got "
            f"{name or type(model).__name__} with recurrences in layers {layers}"
        )
    least = model.geometry.encoder_ratio + 1
    if tokens is not None and not least <= tokens <= LONGEST:
        raise ValueError(f"tokens must be in [{least}, {LONGEST}], got {tokens}")


def _next(token_T: Tensor, document_T: Tensor) -> Tensor:
    target_T = torch.full_like(token_T, IGNORED)
    same_T = document_T[1:] == document_T[:-1]
    target_T[:-1] = token_T[1:].where(same_T, IGNORED)
    return target_T


def _losses(out: Output, target_T: Tensor) -> Tensor:
    """Return the losses in nats, float32 [T]; NaN without a target."""
    parts = zip(out.hidden_BRD[0].split(AT_ONCE), target_T.split(AT_ONCE), strict=True)
    loss_T = [
        cross_entropy(promoted(out.head(hidden_RD)), target_R, ignore_index=IGNORED, reduction="none")
        for hidden_RD, target_R in parts
    ]
    return torch.cat(loss_T).masked_fill(target_T == IGNORED, math.nan)


def _guesses(out: Output) -> tuple[Tensor, Tensor]:
    """Return the most likely next tokens of each row, int64 [T, G], and their probabilities, [T, G]."""
    best = [promoted(out.head(part_RD)).softmax(dim=-1).topk(GUESSES) for part_RD in out.hidden_BRD[0].split(AT_ONCE)]
    return torch.cat([part.indices for part in best]), torch.cat([part.values for part in best])


def _reading(model: GSM, seen: Recording, name: str) -> Reading:
    weight_THE = seen[f"{name}/weights"][0]
    chosen_BTK = seen.get(f"{name}/top_k")
    chosen_TK = torch.zeros(len(weight_THE), 0).long() if chosen_BTK is None else chosen_BTK[0]
    near = weight_THE.shape[2] - 1 - chosen_TK.shape[1]
    kind, number = name.split("/")
    return Reading(
        name=name,
        layer=model.aggregation.layers[int(number) - 1] if kind == "stage" else int(number),
        back_E=entries_back(model, name, near),
        near_THE=weight_THE[..., :near],
        own=own_entries(model, name),
        chosen_TK=chosen_TK,
        far_THK=weight_THE[..., near:-1],
        sink_TH=weight_THE[..., -1],
    )
