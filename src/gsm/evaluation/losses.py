"""Losses of a model on sequences: over all targets, by position in the document, and by the distance from the last
occurrence of the same bigram in the document.

B sequences, T positions, N rows of all sequences, S sequences with sums of their own, P buckets, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gsm.errors import within
from gsm.evaluation.divided import Ranks
from gsm.evaluation.records import Record
from gsm.models.base import LanguageModel, Output
from gsm.models.checks import IGNORED
from gsm.shapes import promoted
from gsm.span import document_positions

SCRATCH = 1 << 24  # logits at a time: 64 MB of float32


@torch.no_grad()
def measure(
    model: LanguageModel,
    sequences: Iterable[Mapping[str, Tensor]],
    *,
    batch_size: int = 8,
    token_bytes_V: Any = None,
    document_S: Any = None,
    ranks: Ranks | None = None,
) -> list[Record]:
    """Return the losses of a model on sequences as records; the model stays in its mode.

    The position of a target is the number of tokens before the token that it is predicted from, of the same document in
    the same sequence: the most that a model can remember there.

    The bigram of a target is the target and the token before it. If it has occurred before in the same document of the
    same sequence, a model can recall the target (Arora et al., 2023, "Zoology"). The distance of a bigram is the number
    of tokens since it last occurred.

    Args:
        model: the model, on the device that it is to run on.
        sequences: ``tokens``, ``targets`` (-100: none) and ``documents``, int64 [T] each, of equal length.
        batch_size: sequences at a time.
        token_bytes_V: bytes of text of each id, for bits per byte.
        document_S: int64, the document that each sequence begins in.
        ranks: that divide the batches among themselves; each has all sequences, and gets all records.

    Returns:
        Records of every ``sequence``, with the ``document`` that it begins in: its ``loss`` in nats, weighted by
        targets, and its ``bits``, weighted by bytes of text. Also its ``loss`` ``by`` position, in the buckets 0, 1, 2
        to 3, 4 to 7, ..., each with its ``first`` and ``last`` position; and ``by`` bigram, in the same buckets of the
        bigram's distance: 0 for a new bigram, others for one that was ``seen`` before. Empty buckets have no record.

    Raises:
        ValueError: there are no sequences or no targets, or a value is out of range.
    """
    within(1, batch_size=batch_size)
    bytes_V = None if token_bytes_V is None else torch.as_tensor(token_bytes_V, dtype=torch.float64)
    with model.evaluating():
        sums = (ranks or Ranks()).divided(_batches(sequences, batch_size), lambda batch: _sums(model, batch, bytes_V))
    if not sums:
        raise ValueError("sequences must have at least one, got none")
    *parts, bytes_S = (torch.cat(part) for part in zip(*sums, strict=True))
    if not parts[1].sum():
        raise ValueError("targets must have at least one that counts, got only ignored ones; use longer documents")
    records: list[Record] = []
    has_bytes = bool(bytes_S.sum() > 0)
    for number, count in enumerate(bytes_S.tolist()):
        unit = {"sequence": number} | ({} if document_S is None else {"document": int(document_S[number])})
        nats, targets = float(parts[0][number].sum()), int(parts[1][number].sum())
        records.append({**unit, "quantity": "loss", "value": nats, "weight": targets})
        if has_bytes:
            records.append({**unit, "quantity": "bits", "value": nats / math.log(2), "weight": int(count)})
        for by, loss_SP, count_SP in (("position", *parts[:2]), ("bigram", *parts[2:])):
            for p in count_SP[number].nonzero().flatten().tolist():
                span = {"by": by, "first": (1 << p) >> 1, "last": max(0, (1 << p) - 1)}
                span |= {"seen": p > 0} if by == "bigram" else {}
                value, weight = float(loss_SP[number, p]), int(count_SP[number, p])
                records.append({**unit, **span, "quantity": "loss", "value": value, "weight": weight})
    return records


def token_losses(model: LanguageModel, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the cross-entropy of every target in nats, at least float32 [B, T]; 0 without a target.

    Logits are made for a part of the rows at a time.

    Args:
        model: the model.
        batch: ``tokens``, ``targets`` and ``documents``, int64 [B, T], on the model's device.
    """
    out = model(batch["tokens"], documents=batch["documents"])
    return row_losses(out, batch["targets"], model.vocabulary)


def row_losses(out: Output, targets_BR: Tensor, vocabulary: int) -> Tensor:
    """Return the cross-entropy of every target in nats, at least float32 [B, R]; 0 without a target.

    Args:
        out: output of a model for these rows.
        targets_BR: int64 [B, R], -100 for none.
        vocabulary: V, which decides how many rows have logits at a time.

    Raises:
        ValueError: a loss is not finite.
    """
    hidden_ND, target_N = out.hidden_BRD.flatten(0, 1), targets_BR.flatten()
    step = max(1, SCRATCH // vocabulary)
    losses = [
        cross_entropy(promoted(out.head(rows_ND)), wanted_N, ignore_index=IGNORED, reduction="none")
        for rows_ND, wanted_N in zip(hidden_ND.split(step), target_N.split(step), strict=True)
    ]
    loss_N = torch.cat(losses)
    if not loss_N.isfinite().all():
        raise ValueError("the model's losses are not finite. Look for NaN or infinity in its weights")
    return loss_N.view_as(targets_BR)


def distances(token_BT: Tensor, target_BT: Tensor, documents_BT: Tensor) -> Tensor:
    """Return how many tokens ago each bigram (token, target) last occurred in its document within the sequence.

    0 stands for a new bigram, and for a target that is not the next token. Arguments and result: int64 [B, T].
    """
    index_BT = torch.arange(token_BT.shape[1], device=token_BT.device).expand_as(token_BT)
    next_BT = torch.cat([token_BT[:, 1:], target_BT[:, -1:]], dim=1)
    start_BT, size = index_BT - document_positions(documents_BT), int(max(token_BT.max(), target_BT.max())) + 1
    bigram_BT, order_BT = ((start_BT * size + token_BT) * size + next_BT).sort(dim=1, stable=True)
    since_BT = torch.zeros_like(order_BT)
    since_BT[:, 1:] = order_BT.diff(dim=1).where(bigram_BT[:, 1:] == bigram_BT[:, :-1], 0)
    return torch.zeros_like(since_BT).scatter(1, order_BT, since_BT).where(target_BT == next_BT, 0)


def buckets(position_BT: Tensor) -> Tensor:
    """Return the geometric bucket of each position: 0 for 0, 1 for 1, 2 for 2 and 3, 3 for 4 to 7, ..."""
    return torch.frexp(position_BT.double()).exponent.long()


def _batches(sequences: Iterable[Mapping[str, Tensor]], size: int) -> Iterator[dict[str, Tensor]]:
    """Yield sequences stacked, up to ``size`` at a time."""
    iterator = iter(sequences)
    while rows := list(islice(iterator, size)):
        yield {name: torch.stack([row[name] for row in rows]) for name in ("tokens", "targets", "documents")}


def _sums(model: LanguageModel, batch: dict[str, Tensor], bytes_V: Tensor | None) -> tuple[Tensor, ...]:
    """Return for each sequence of a batch the summed loss and the number of targets by bucket of positions and by
    bucket of bigrams, float64 [S, P], and its bytes [S]."""
    device = model.embedding.weight.device
    loss_BT = token_losses(model, {name: value.to(device) for name, value in batch.items()}).double().cpu()
    counted_BT = batch["targets"] != IGNORED
    empty_SP, sums = torch.zeros(len(loss_BT), 64, dtype=torch.float64), []
    since_BT = distances(batch["tokens"], batch["targets"], batch["documents"])
    for bucket_BT in map(buckets, (document_positions(batch["documents"]), since_BT)):
        for value_BT in (loss_BT.where(counted_BT, 0), counted_BT.double()):
            sums.append(empty_SP.scatter_add(1, bucket_BT, value_BT))
    if bytes_V is None:
        return *sums, empty_SP[:, 0]
    return *sums, (bytes_V[batch["targets"].clamp(min=0)] * counted_BT).sum(1)
