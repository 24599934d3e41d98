"""Gradients of accumulated batches are those of one batch that holds all their targets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_task import CONTEXT, Bigram, a_batch, fit, make_task, make_trainer
from torch import Tensor

from gsm.training.means import OverBatches
from gsm.training.module import LanguageModeling


@pytest.mark.parametrize("own_loss", [True, False])
@pytest.mark.parametrize("without", [0, 5, CONTEXT])
def test_accumulated_batches_count_by_their_targets_and_for_the_indexer_by_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: int, own_loss: bool
):
    """A batch of few targets counted like a full one, then its indexers' loss less, though it had as many rows."""
    halves = [a_batch(rows=2, seed=1), a_batch(rows=2, seed=2)]
    halves[0]["targets"][:, :without] = -100
    halves[1]["targets"][:, :3] = halves[1]["targets"][:, 12:] = -100
    halves[1]["documents"][:, 12:] = -1
    whole = {name: torch.cat([half[name] for half in halves]) for name in halves[0]}
    found: list[list[Tensor]] = []

    def clip(self: LanguageModeling, *given: Any, whole: Callable[..., list[Tensor]] = LanguageModeling.clip) -> Any:
        found.append([part.weight.grad.clone() for part in (self.model.embedding, self.model.indexer)])
        return whole(self, *given)

    monkeypatch.setattr(LanguageModeling, "clip", clip)
    for batches in ([whole], halves):
        torch.manual_seed(0)
        trainer = make_trainer(tmp_path, 1, accumulate_grad_batches=len(batches), log_every_n_steps=1)
        fit(trainer, make_task(Counting(own_loss)), batches)
        found[-1] += [trainer.callback_metrics[f"train/{name}"] for name in ("loss", *(["indexer_kl"] * own_loss))]
    for one, two in zip(*found, strict=True):
        assert one.norm() > 0
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-7)


class Counting(Bigram):
    """A mean over no targets is 0, and padding is no row, as in the project's models.

    Its indexer has a loss of its own, or learns by the cross-entropy.
    """

    def __init__(self, own_loss: bool) -> None:
        super().__init__()
        self.own_loss = own_loss

    def forward(self, tokens: Tensor, documents: Tensor, targets: Tensor) -> SimpleNamespace:
        out = super().forward(tokens, documents, targets)
        loss = out.loss.nan_to_num() if (targets < 0).all() else out.loss
        score_BT = self.indexer(self.embedding(tokens).detach()).squeeze(-1)
        if self.own_loss:
            losses = {"indexer_kl": score_BT[documents >= 0].square().mean()}
        else:
            losses, loss = {}, loss + score_BT.square()[targets >= 0].sum() / (targets >= 0).sum().clamp(min=1)
        return SimpleNamespace(loss=loss, losses=losses, metrics={}, load_LE=None)


def test_batches_that_count_alike_are_left_exactly_as_they_are():
    over, losses = OverBatches(), torch.rand(3)
    assert all(torch.equal(over.weigh(loss, torch.tensor(33)), loss) for loss in losses)
    assert float(over.correction(3)) == 1.0 and over.correction(3) is None
