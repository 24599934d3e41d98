"""linear_cross_entropy against the logits, all at once, through PyTorch's own loss."""

import pytest
import torch
import torch.nn.functional as F
from calls import gradients
from oracles import normal

from gsm_kernels import linear_cross_entropy, listening
from gsm_kernels.linear_cross_entropy import reference
from gsm_kernels.testing import assert_close


def example(rows=23, width=7, vocabulary=11, ignored=3):
    target = torch.randint(0, vocabulary, (rows,), generator=torch.Generator().manual_seed(0))
    target[:ignored] = -100
    return {"hidden_ND": normal(rows, width), "weight_VD": normal(vocabulary, width, seed=1), "target_N": target}


def oracle(hidden_ND, weight_VD, target_N):
    return F.cross_entropy(hidden_ND @ weight_VD.T, target_N)


@pytest.mark.parametrize("scratch", [1, 50, 1 << 22])
def test_loss_and_gradients_equal_all_logits_at_once(scratch, monkeypatch):
    monkeypatch.setattr(reference, "scratch_elements", lambda device: scratch)
    monkeypatch.setattr(reference, "FEWEST_ROWS", 1)
    with listening() as heard:
        out, grads = gradients(linear_cross_entropy, example())
    expected, expected_grads = gradients(oracle, example())
    assert heard == [("linear_cross_entropy", "reference")]
    assert_close(out[0], expected[0])
    for name, grad in expected_grads.items():
        assert_close(grads[name], grad, name=name, gradient=True)


@pytest.mark.parametrize("rows", [0, 4])
def test_nothing_but_ignored_targets_is_zero_with_zero_gradient(rows):
    out, grads = gradients(linear_cross_entropy, example(rows=rows, ignored=rows))
    assert out[0] == 0 and all((grad == 0).all() for grad in grads.values())


@pytest.mark.parametrize("frozen", ["hidden_ND", "weight_VD"])
def test_one_side_may_be_frozen(frozen):
    call, other = example(), {"hidden_ND": "weight_VD", "weight_VD": "hidden_ND"}[frozen]
    leaf, expected = (call[other].clone().requires_grad_() for _ in range(2))
    linear_cross_entropy(**{**call, other: leaf}).backward()
    oracle(**{**call, other: expected}).backward()
    assert_close(leaf.grad, expected.grad, gradient=True)


def test_a_confident_wrong_logit_does_not_overflow():
    call = example()
    call["hidden_ND"] = call["hidden_ND"] * 1e4
    out, grads = gradients(linear_cross_entropy, {k: v.float() if k != "target_N" else v for k, v in call.items()})
    assert out[0].isfinite() and all(grad.isfinite().all() for grad in grads.values())
