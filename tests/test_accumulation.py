"""Gradients of accumulated batches are those of one batch that holds all their targets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_task import CONTEXT, Bigram, a_batch, fit, make_task, make_trainer
from torch import Tensor, nn

from gsm.training.means import OverTargets
from gsm.training.module import LanguageModeling


@pytest.mark.parametrize("without", [0, 5, CONTEXT])
def test_accumulated_batches_count_by_their_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: int):
    """A batch of few targets counted like a full one, so that a step was not the same however it was divided."""
    halves = [a_batch(rows=2, seed=1), a_batch(rows=2, seed=2)]
    halves[0]["targets"][:, :without] = -100
    halves[1]["targets"][:, :3] = -100
    whole = {name: torch.cat([half[name] for half in halves]) for name in halves[0]}
    found: list[Tensor] = []

    def clip(self: LanguageModeling, *given: Any, whole: Callable[..., list[Tensor]] = LanguageModeling.clip) -> Any:
        found.append(self.model.embedding.weight.grad.clone())
        return whole(self, *given)

    monkeypatch.setattr(LanguageModeling, "clip", clip)
    for batches in ([whole], halves):
        torch.manual_seed(0)
        fit(make_trainer(tmp_path, 1, accumulate_grad_batches=len(batches)), make_task(Counting()), batches)
    assert found[0].norm() > 0
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)


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
