"""pool_groups against a loop over groups and channels."""

import pytest
import torch
from calls import gradients
from oracles import normal

from gsm_kernels import listening, pool_groups
from gsm_kernels.testing import assert_close


def oracle(value_BSC, gate_BSC, end_BF, ratio):
    def pooled(b, end):
        if end < 0:
            return torch.zeros(value_BSC.shape[2], dtype=value_BSC.dtype)
        members = slice(end - ratio + 1, end + 1)
        if ratio == 1:
            return value_BSC[b, end]
        return (torch.softmax(gate_BSC[b, members], 0) * value_BSC[b, members]).sum(0)

    return torch.stack([torch.stack([pooled(b, end) for end in ends]) for b, ends in enumerate(end_BF.tolist())])


@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("ends", [[[3, 7, 11], [4, 9, -1]], [[5], [-1]]])
def test_pooling_and_its_gradients_equal_the_loop(ratio, ends):
    gate = None if ratio == 1 else normal(2, 13, 6, seed=1)
    call = {"value_BSC": normal(2, 13, 6), "gate_BSC": gate, "end_BF": torch.tensor(ends), "ratio": ratio}
    with listening() as heard:
        out, grads = gradients(pool_groups, call)
    expected, expected_grads = gradients(oracle, call)
    assert heard == [("pool_groups", "reference")]
    assert_close(out[0], expected[0])
    for name, grad in expected_grads.items():
        assert_close(grads[name], grad, name=name, gradient=True)


def test_no_groups_and_no_tokens_give_empty_banks():
    none = torch.empty(2, 0, dtype=torch.int64)
    assert pool_groups(normal(2, 5, 4), normal(2, 5, 4), none, 2).shape == (2, 0, 4)
    assert pool_groups(normal(2, 0, 4), normal(2, 0, 4), none, 2).shape == (2, 0, 4)


def test_several_tokens_need_a_gate():
    with pytest.raises(ValueError, match="ratio = 2 needs gate_BSC"):
        pool_groups(normal(1, 4, 2), None, torch.tensor([[1]]), 2)
