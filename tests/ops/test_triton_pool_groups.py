"""The pooling kernels: groups anywhere in their sequence, missing ones, halves of one projection."""

import pytest
import torch
from calls import gradients
from calls import groups as packed
from check import (
    DEVICE,
    assert_same,
    launches_of,
    to_device,
    with_reference,
    with_triton,
)
from closeness import assert_close
from oracles import normal, packed_positions

from gsm.cache.slots import plan_slots
from gsm_kernels import pool_groups, using
from gsm_kernels.pool_groups import triton


def halves(op, ratio=2):
    """Values and gates as a compressor has them, side by side in one tensor."""

    def pooled(both_BSX, end_BF):
        value, gate = both_BSX.chunk(2, -1)
        return op(value_BSC=value, gate_BSC=gate, end_BF=end_BF, ratio=ratio)

    return pooled


def test_halves_of_one_projection_are_read_where_they_lie(monkeypatch):
    launched = launches_of(triton, monkeypatch)
    call = to_device({"both_BSX": normal(2, 23, 12).float(), "end_BF": packed()["end_BF"]})
    assert_same(halves(with_triton(pool_groups)), halves(with_reference(pool_groups)), call)
    forward, backward = (
        [x.untyped_storage().data_ptr() for x in one.args if isinstance(x, torch.Tensor)] for one in launched
    )
    assert forward[0] == forward[1] == backward[1] == backward[2], "value and gate are views of one tensor"


@pytest.mark.parametrize("ratio", [1, 2, 5])
def test_the_groups_of_a_bank_share_no_token(ratio):
    """Backward writes each token's gradient once, by its one group: groups that overlapped would race."""
    for seed in range(20):
        end_BG = plan_slots(packed_positions(3, 60, seed, padding=4), ratio, None).end_BG
        for end in end_BG:
            assert (end[end >= 0].diff() >= ratio).all()


@pytest.mark.parametrize("frozen", ["value_BSC", "gate_BSC"])
def test_one_side_may_be_frozen(frozen):
    call = to_device({k: v.float() if k.endswith("BSC") else v for k, v in packed().items() if k != "ratio"})
    other = {"value_BSC": "gate_BSC", "gate_BSC": "value_BSC"}[frozen]
    fixed = {k: v for k, v in call.items() if k != other}

    def learned(op):
        return gradients(lambda leaf: op(**{**fixed, other: leaf}, ratio=2), {"leaf": call[other]})[1]["leaf"]

    assert_close(learned(with_triton(pool_groups)), learned(with_reference(pool_groups)), gradient=True)


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31():
    tokens, channels = (1 << 31) // 128 + 8, 128
    value = torch.ones(1, tokens, channels, dtype=torch.bfloat16, device=DEVICE)
    value[:, -4:] = normal(4, channels).to(value)
    end = torch.tensor([[tokens - 3, tokens - 1]], device=DEVICE)
    with using("triton"):
        got = pool_groups(value, value, end, 2)
    last = value[:, -4:].double()
    assert_close(got, pool_groups(last, last, end - tokens + 4, 2))
