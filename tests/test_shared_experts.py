"""Experts that are divided among ranks: rows travel to them and back, and nothing else changes."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from small import SHALLOW, assert_same, build, mostly_nightly
from test_pieces import batch_of, gradients, over_ranks
from torch import nn

from gsm import checkpoint
from gsm.layers.experts import Experts


def compare(case: str, documents: str) -> None:
    """On a rank: with a share of the experts, its sequences have the outputs and gradients that they have with all."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    group = dist.group.WORLD
    assert group is not None
    model = build(case, geometry=SHALLOW).train()
    batch = batch_of(24 + dist.get_rank(), documents)  # of another length on every rank
    want = model(**batch)
    (want.loss + sum(want.losses.values())).backward()
    expected = {name: over_ranks(gradient, group) for name, gradient in gradients(model).items()}
    shares: dict[str, int] = {}
    for name, part in model.named_modules():
        if isinstance(part, Experts):
            own = part.experts // group.size()
            first, part.group = own * group.rank(), group
            for key, weight in list(part.named_parameters()):
                setattr(part, key, nn.Parameter(weight.detach()[first : first + own].clone()))
                shares[f"{name}.{key}"] = first
    got = model(**batch)
    assert_same(got.hidden_BRD, want.hidden_BRD, "outputs", 1e-9)
    (got.loss + sum(got.losses.values())).backward()
    found = gradients(model)
    assert found.keys() == expected.keys() and shares
    for name, gradient in found.items():
        if name in shares:
            here = expected[name][shares[name] : shares[name] + len(gradient)] / group.size()
            assert_same(gradient, here, name, 1e-9)
        else:
            assert_same(over_ranks(gradient, group), expected[name], name, 1e-9)
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_ranks_with_a_share_of_the_experts_compute_the_same_as_with_all(processes: Any, world: int):
    assert ranks.together(processes, world, compare, "gsm-feed_forward=moe", "padded") == [0] * world


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "given"),
    mostly_nightly(
        [
            (2, {"experts": 2}),
            (4, {"experts": 2}),
            (4, {"experts": 4}),
            (4, {"experts": 2, "context": 2}),
            (4, {"experts": 4, "context": 2}),
        ],
        (4, {"experts": 2, "context": 2}),
    ),
)
@pytest.mark.parametrize(
    "case", mostly_nightly(["gsm-feed_forward=moe", "baseline-feed_forward=moe"], "gsm-feed_forward=moe")
)
def test_ranks_train_as_one_does(processes: Any, tmp_path: Path, case: str, world: int, given: dict[str, int]):
    assert ranks.together(processes, 1, ranks.trained, case, "auto", tmp_path, 5) == [0]
    arguments = (case, "fsdp", tmp_path, 5, torch.float64, True, given)
    assert ranks.together(processes, world, ranks.trained, *arguments) == [0] * world
    alone, together = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("auto", "fsdp"))
    assert together["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert together["norm"] == pytest.approx(alone["norm"], rel=1e-6)
    for name, weight in alone["weights"].items():
        assert_same(together["weights"][name], weight, name, 1e-9)
    whole = checkpoint.read(tmp_path / "saved")
    for name, weight in together["weights"].items():
        assert_same(whole["state_dict"][f"model.{name}"], weight, name, 0.0)
