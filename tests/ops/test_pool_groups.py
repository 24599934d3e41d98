"""The pooling of a compressor: against the mean written out group by group."""

import pytest
import torch
from calls import cast, packed_positions
from check import assert_same
from oracles import normal

from gsm.cache.slots import plan_slots
from gsm.layers.projections import pool_groups

ENDS = {"groups": torch.tensor([[3, 7, 11], [4, 9, -1]]), "no group": torch.full((2, 3), -1)}
CASES = {
    **{f"{name} of {ratio}": (12, ends, ratio) for name, ends in ENDS.items() for ratio in (1, 2, 3)},
    "no room for a group": (12, torch.empty(2, 0, dtype=torch.int64), 2),
    "groups of sixteen": (32, torch.tensor([[15, 31, -1], [-1, -1, 31]]), 16),
    "groups side by side": (7, torch.tensor([[2, 4, 6], [3, 5, -1]]), 3),
    "a single token": (4, torch.tensor([[3], [-1]]), 4),
    "fewer tokens than a group has": (3, torch.full((2, 3), -1), 4),
    "no token": (0, torch.full((2, 3), -1), 2),
}


def naive(seen_BEU, end_BG, ratio):
    value_BEC, *gate = seen_BEU.chunk(min(ratio, 2), -1)
    out_BGC = seen_BEU.new_zeros(*end_BG.shape, value_BEC.shape[2])
    for b, g in (end_BG >= 0).nonzero().tolist():
        last = int(end_BG[b, g])
        members = slice(last - ratio + 1, last + 1)
        weight = torch.softmax(gate[0][b, members], 0) if gate else 1.0
        out_BGC[b, g] = (weight * value_BEC[b, members]).sum(0)
    return out_BGC


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_it_equals_the_mean_written_out(case, dtype):
    tokens, end_BG, ratio = CASES[case]
    call = {"seen_BEU": normal(2, tokens, 10), "end_BG": end_BG, "ratio": ratio}
    assert_same(pool_groups, naive, cast(call, dtype))


def test_large_gates_overflow_neither_forward_nor_backward():
    seen_BEU = 1e4 * normal(2, 12, 10, dtype=torch.float32)
    out = pool_groups(seen_BEU.requires_grad_(), ENDS["groups"], 2)
    out.sum().backward()
    assert out.isfinite().all() and seen_BEU.grad is not None and seen_BEU.grad.isfinite().all()


@pytest.mark.parametrize("ratio", [1, 2, 5])
def test_the_groups_of_a_bank_share_no_token(ratio):
    """The gradient of a token is then one number, so that no order of additions changes it."""
    for seed in range(20):
        end_BG = plan_slots(packed_positions(3, 60, seed, padding=4), ratio, None).end_BG
        for end in end_BG:
            assert (end[end >= 0].diff() >= ratio).all()
