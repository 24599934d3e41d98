"""The query input of a stage: the equations, and which of them contain the previous retrieval."""

from __future__ import annotations

import pytest
import torch
from small import build, random_tokens

import gsm
from gsm.slots.stage_query import Accumulated, Current, Sum


@pytest.mark.parametrize("query", [Accumulated(), Current(), Sum()])
def test_the_first_stage_s_query_comes_from_the_layer_s_input(query):
    h_BRD = torch.randn(2, 3, 5)
    assert query(h_BRD, None) is h_BRD and query.width(5, 1) == 5


@pytest.mark.parametrize(
    ("query", "equation"),
    [
        (Accumulated(), lambda h, r: torch.cat([h, r], dim=-1)),
        (Current(), lambda h, r: h),
        (Sum(), lambda h, r: h + r),
    ],
)
def test_later_stages_follow_their_equation(query, equation):
    h_BRD, r_BRD = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    u_BRU = query(h_BRD, r_BRD)
    assert torch.equal(u_BRU, equation(h_BRD, r_BRD)) and u_BRU.shape[-1] == query.width(5, 2)


@pytest.mark.parametrize(("name", "knows"), [("accumulated", True), ("current", False), ("sum", True)])
@torch.no_grad()
def test_a_later_stage_s_query_depends_on_the_retrieval_except_in_current(name, knows):
    model, tokens, weights = build(f"gsm-stage_query={name}"), random_tokens(1, 20), []
    for _ in range(2):
        with gsm.record("stage/2/weights") as seen:
            model(tokens)
        weights.append(seen["stage/2/weights"])
        next(iter(model.aggregation)).output.up.weight.normal_()
    assert torch.equal(*weights) != knows
