"""Sequences that are divided among ranks: what all ranks compute together is what one computes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from small import GEOMETRY, SHALLOW, assert_same, build
from torch import Tensor

from gsm.cache.pieces import Context
from gsm.models.base import LanguageModel
from gsm.models.checks import IGNORED
from gsm.training.module import next_tokens

TOLERANCE = 1e-9


def batch_of(length: int, documents: str, seed: int = 0) -> dict[str, Tensor | None]:
    """Two sequences, whose documents end at any place or are one."""
    generator = torch.Generator().manual_seed(seed)
    tokens_BT = torch.randint(GEOMETRY.vocabulary, (2, length), generator=generator)
    document_BT = None
    if documents != "one":
        starts_BT = torch.rand(2, length, generator=generator) < (0.15 if documents == "packed" else 0.05)
        document_BT = starts_BT.cumsum(1)
        if documents == "padded":
            document_BT[0, length - length // 3 :] = -1
            document_BT[1, : length // 5] = -1
    targets_BT = next_tokens(tokens_BT, document_BT)
    if document_BT is not None:
        targets_BT = targets_BT.where(document_BT >= 0, IGNORED)
    targets_BT[0, : length // 4] = IGNORED  # so that ranks have different numbers of them
    return {"tokens": tokens_BT, "documents": document_BT, "targets": targets_BT}


def total(model: LanguageModel, out: Any, share: Tensor | float = 1.0) -> Tensor:
    """What a trainer makes of an output, on one of several ranks."""
    return out.loss * share + sum(out.losses.values())


def gradients(model: LanguageModel) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def compare(case: str, batch: dict[str, Any], **options: Any) -> None:
    """On a rank: loss, losses, gradients and outputs of all ranks together are those of one."""
    model = build(case, geometry=SHALLOW, **options).train()
    out = model(**batch)
    total(model, out).backward()
    want, want_loss = gradients(model), {"loss": out.loss, **out.losses}
    group = dist.group.WORLD
    assert group is not None
    arguments = model.divided(Context(group), **batch)
    pieces = arguments["memory"].ledger.pieces
    got = model(**arguments)
    assert_same(
        got.hidden_BRD, pieces.cut(out.hidden_BRD.flatten(2), 0.0).view_as(got.hidden_BRD), case, TOLERANCE
    ) if batch["documents"] is None and pieces.tokens == pieces.count * pieces.length else None
    count = (arguments["targets"] != IGNORED).sum()
    everywhere = count.clone()
    dist.all_reduce(everywhere)
    share = count.double() * group.size() / everywhere
    total(model, got, share).backward()
    found = gradients(model)
    assert found.keys() == want.keys(), case
    for name, loss in want_loss.items():
        mean = (got.loss * share if name == "loss" else got.losses[name]).detach() / group.size()
        dist.all_reduce(mean)
        assert_same(mean, loss, f"{case}: {name}", TOLERANCE)
    for name, gradient in want.items():
        mean = found[name] / group.size()
        dist.all_reduce(mean)
        assert_same(mean, gradient, f"{case}: {name}", TOLERANCE)


def compare_all(
    cases: Sequence[str], lengths: Sequence[int], documents: Sequence[str], folder: str = "", **options: Any
) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for case in cases:
        for length in lengths:
            for kind in documents:
                try:
                    compare(case, batch_of(length, kind), **options)
                except Exception as error:
                    raise AssertionError(f"{case}, {length} tokens, documents {kind}: {error}") from error
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, 3])
def test_ranks(processes, world):
    assert (
        ranks.together(processes, world, compare_all, ["gsm", "baseline"], [24, 41], ["one", "packed", "padded"])
        == [0] * world
    )
