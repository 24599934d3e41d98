"""Gradients of accumulated batches are those of one batch that holds all their targets."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import lightning
import pytest
import torch
from test_task import CONTEXT, Bigram, a_batch, fit, make_task, make_trainer
from torch import Tensor, nn

from gsm.means import OverTargets
from gsm.task import LanguageModeling


class Seen(lightning.Callback):
    """Keeps the model's gradients as the optimiser gets them."""

    def on_before_zero_grad(self, trainer: lightning.Trainer, pl_module: LanguageModeling, *_) -> None:
        gradient = pl_module.model.embedding.weight.grad
        self.gradient = gradient if gradient is None else gradient.clone()


@pytest.mark.parametrize("without", [0, 5, CONTEXT])
def test_accumulated_batches_count_by_their_targets(tmp_path: Path, without: int):
    """A batch of few targets counted like a full one, so that a step was not the same however it was divided."""
    halves = [a_batch(rows=2, seed=1), a_batch(rows=2, seed=2)]
    halves[0]["targets"][:, :without] = -100
    halves[1]["targets"][:, :3] = -100
    whole = {name: torch.cat([half[name] for half in halves]) for name in halves[0]}
    found = []
    for batches in ([whole], halves):
        torch.manual_seed(0)
        seen = Seen()
        fit(make_trainer(tmp_path, 1, [seen], accumulate_grad_batches=len(batches)), make_task(Counting()), batches)
        found.append(seen.gradient)
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-8)


class Counting(Bigram):
    """A mean over no targets is 0, as in the project's models."""

    def forward(self, tokens: Tensor, documents: Tensor, targets: Tensor) -> SimpleNamespace:
        out = super().forward(tokens, documents, targets)
        return SimpleNamespace(**{**vars(out), "loss": out.loss.nan_to_num() if (targets < 0).all() else out.loss})


def test_batches_that_count_alike_are_left_exactly_as_they_are():
    over, parameter = OverTargets(), nn.Parameter(torch.zeros(5))
    losses = torch.rand(3)
    assert all(torch.equal(over.weigh(loss, torch.tensor(33)), loss) for loss in losses)
    parameter.grad = before = torch.rand(5)
    over.correct([parameter], 3)
    assert torch.equal(parameter.grad, before)
