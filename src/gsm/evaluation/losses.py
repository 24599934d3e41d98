"""Held-out loss of any model: per token, as a whole, and by how much of its document a token could look back on.

B sequences, T positions, N rows of all sequences, S sequences with sums of their own, P buckets of positions, D width,
V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gsm.models.base import IGNORED, LanguageModel, Output
from gsm.shapes import promoted

Place = Literal["document", "sequence"]
SCRATCH = 1 << 24  # logits at a time: 64 MB of float32


@dataclass(frozen=True)
class Bucket:
    """The targets at positions ``first`` to ``last``.

    Attributes:
        first, last: positions, the last one included: 0, 1, 2 to 3, 4 to 7, ...
        targets: how many there are.
        loss, error: mean in nats per token, and its standard error (None: not known from a single sequence).
    """

    first: int
    last: int
    targets: int
    loss: float
    error: float | None


@dataclass(frozen=True)
class Losses:
    """What ``evaluate`` measured. Errors are standard errors over sequences, None where there is only one.

    Attributes:
        loss, loss_error: mean over all targets, nats per token.
        perplexity: exp(loss).
        bits_per_byte, bits_per_byte_error: of the text that the targets stand for (None: no bytes were given).
        targets, sequences: how many were measured.
        place: what positions are counted in, ``document`` or ``sequence``.
        by_position: buckets that hold targets, in order.
    """

    loss: float
    loss_error: float | None
    perplexity: float
    bits_per_byte: float | None
    bits_per_byte_error: float | None
    targets: int
    sequences: int
    place: Place
    by_position: tuple[Bucket, ...]

    def facts(self) -> dict[str, Any]:
        """The same as plain containers, for JSON."""
        return {**asdict(self), "by_position": [asdict(bucket) for bucket in self.by_position]}


@torch.no_grad()
def evaluate(
    model: LanguageModel,
    sequences: Iterable[Mapping[str, Tensor]],
    *,
    batch_size: int = 8,
    token_bytes_V: Any = None,
    place: Place = "document",
) -> Losses:
    """Measures a model on sequences; it is left in the mode that it was in.

    The position of a target is how many tokens stand before the one that it is predicted from: those of the same
    document in the same sequence (``document``), which is all that a model can remember there, or all of the sequence.

    The standard error of a mean s / n, both summed over sequences, is sqrt(S / (S - 1) sum (s_i - n_i s / n)^2) / n. It
    takes sequences for independent: where many come from one document, it is too small.

    Args:
        model: the model, on the device that it is to run on.
        sequences: ``tokens``, ``targets`` (-100: none) and ``documents``, int64 [T] each, of equal length.
        batch_size: sequences at a time.
        token_bytes_V: bytes of text that each id stands for, for bits per byte.
        place: what positions are counted in.

    Raises:
        ValueError: there are no sequences or no targets, or a value is out of range.
    """
    if batch_size < 1 or place not in ("document", "sequence"):
        raise ValueError(f"batch_size {batch_size} must be at least 1, and place {place!r} document or sequence")
    bytes_V = None if token_bytes_V is None else torch.as_tensor(token_bytes_V, dtype=torch.float64)
    was_training = model.training
    model.eval()
    try:
        sums = [_sums(model, batch, bytes_V, place) for batch in _batches(sequences, batch_size)]
    finally:
        model.train(was_training)
    if not sums:
        raise ValueError("there are no sequences to evaluate on; give at least one")
    loss_SP, count_SP, bytes_S = (torch.cat(part) for part in zip(*sums, strict=True))
    return _conclude(loss_SP, count_SP, bytes_S, bytes_V is not None, place)


def token_losses(model: LanguageModel, batch: Mapping[str, Tensor]) -> Tensor:
    """Cross-entropy of every target in nats, at least float32 [B, T]; 0 where there is none.

    Logits are made for a part of the rows at a time.

    Args:
        model: the model.
        batch: ``tokens``, ``targets`` and ``documents``, int64 [B, T], on the model's device.
    """
    out = model(batch["tokens"], documents=batch["documents"])
    return row_losses(out, batch["targets"], model.vocabulary)


def row_losses(out: Output, targets_BR: Tensor, vocabulary: int) -> Tensor:
    """The same of what a model of such a vocabulary has returned for these rows, at least float32 [B, R]."""
    hidden_ND, target_N = out.hidden_BRD.flatten(0, 1), targets_BR.flatten()
    step = max(1, SCRATCH // vocabulary)
    losses = [
        cross_entropy(promoted(out.head(rows_ND)), wanted_N, ignore_index=IGNORED, reduction="none")
        for rows_ND, wanted_N in zip(hidden_ND.split(step), target_N.split(step), strict=True)
    ]
    return torch.cat(losses).view_as(targets_BR)


def positions(documents_BT: Tensor, place: Place) -> Tensor:
    """Position of every token in its sequence, or among those of its document in this sequence, int64 [B, T]."""
    index_BT = torch.arange(documents_BT.shape[1], device=documents_BT.device).expand_as(documents_BT)
    if place == "sequence":
        return index_BT
    begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return index_BT - torch.where(begins_BT, index_BT, 0).cummax(dim=1).values


def buckets(position_BT: Tensor) -> Tensor:
    """Geometric bucket of each position: 0 for 0, 1 for 1, 2 for 2 and 3, 3 for 4 to 7, ..."""
    return torch.frexp(position_BT.double()).exponent.long()


def _batches(sequences: Iterable[Mapping[str, Tensor]], size: int) -> Iterator[dict[str, Tensor]]:
    """Sequences stacked, up to ``size`` at a time."""
    iterator = iter(sequences)
    while rows := list(islice(iterator, size)):
        yield {name: torch.stack([row[name] for row in rows]) for name in ("tokens", "targets", "documents")}


def _sums(
    model: LanguageModel, batch: dict[str, Tensor], bytes_V: Tensor | None, place: Place
) -> tuple[Tensor, Tensor, Tensor]:
    """For each sequence of a batch: summed loss and number of targets by bucket, float64 [S, P], and bytes [S]."""
    device = model.embedding.weight.device
    loss_BT = token_losses(model, {name: value.to(device) for name, value in batch.items()}).double().cpu()
    counted_BT = batch["targets"] != IGNORED
    bucket_BT = buckets(positions(batch["documents"], place))
    empty_SP = torch.zeros(len(loss_BT), 64, dtype=torch.float64)
    loss_SP = empty_SP.scatter_add(1, bucket_BT, loss_BT.where(counted_BT, 0))
    count_SP = empty_SP.scatter_add(1, bucket_BT, counted_BT.double())
    if bytes_V is None:
        return loss_SP, count_SP, empty_SP[:, 0]
    return loss_SP, count_SP, (bytes_V[batch["targets"].clamp(min=0)] * counted_BT).sum(1)


def _conclude(loss_SP: Tensor, count_SP: Tensor, bytes_S: Tensor, has_bytes: bool, place: Place) -> Losses:
    """The means over sequences, all and by bucket."""
    if not count_SP.sum():
        raise ValueError("no sequence has a target to evaluate (all are ignored); give longer documents")
    loss, error = _ratio(loss_SP.sum(1), count_SP.sum(1))
    has_bytes = has_bytes and bool(bytes_S.sum() > 0)
    bits, bits_error = _ratio(loss_SP.sum(1) / math.log(2), bytes_S) if has_bytes else (None, None)
    found = [
        Bucket((1 << p) >> 1, max(0, (1 << p) - 1), int(count_SP[:, p].sum()), *_ratio(loss_SP[:, p], count_SP[:, p]))
        for p in range(count_SP.shape[1])
        if count_SP[:, p].any()
    ]
    return Losses(
        loss=loss,
        loss_error=error,
        perplexity=math.exp(min(loss, 700.0)),
        bits_per_byte=bits,
        bits_per_byte_error=bits_error,
        targets=int(count_SP.sum()),
        sequences=len(count_SP),
        place=place,
        by_position=tuple(found),
    )


def _ratio(sum_S: Tensor, weight_S: Tensor) -> tuple[float, float | None]:
    """sum / weight over all sequences, and its standard error; sequences of weight 0 say nothing."""
    told = weight_S > 0
    sum_S, weight_S = sum_S[told], weight_S[told]
    mean = sum_S.sum() / weight_S.sum()
    count = len(sum_S)
    if count < 2:
        return float(mean), None
    residual_S = sum_S - mean * weight_S
    return float(mean), float((count / (count - 1) * residual_S.square().sum()).sqrt() / weight_S.sum())
