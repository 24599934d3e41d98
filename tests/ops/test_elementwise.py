"""RMSNorm and the SwiGLU product against PyTorch's own operations."""

import pytest
import torch
import torch.nn.functional as F
from calls import gradients
from oracles import normal

from gsm_kernels import listening, rms_norm, swiglu
from gsm_kernels.testing import assert_close


def plain_swiglu(gate, up, limit):
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def plain_norm(x, weight, eps=1e-6):
    return F.rms_norm(x, weight.shape, weight, eps)


CALLS = {
    "rms_norm": (rms_norm, plain_norm, {"x": normal(2, 5, 8), "weight": normal(8, seed=1)}),
    "rms_norm with a large eps": (rms_norm, plain_norm, {"x": normal(7, 8), "weight": normal(8, seed=1), "eps": 0.5}),
    "swiglu": (swiglu, plain_swiglu, {"gate": normal(2, 5, 8), "up": normal(2, 5, 8, seed=1), "limit": 10.0}),
    "swiglu, clamped": (swiglu, plain_swiglu, {"gate": normal(2, 50, 8), "up": normal(2, 50, 8, seed=1), "limit": 0.7}),
    "swiglu without rows": (swiglu, plain_swiglu, {"gate": normal(0, 8), "up": normal(0, 8), "limit": 1.0}),
}


@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_equal_pytorchs(name):
    op, plain, call = CALLS[name]
    with listening() as heard:
        out, grads = gradients(op, call)
    expected, expected_grads = gradients(plain, call)
    assert heard == [(op.name, "reference")]
    assert_close(out[0], expected[0], name=name)
    for argument, grad in expected_grads.items():
        assert_close(grads[argument], grad, name=f"{name}: gradient of {argument}", gradient=True)


def test_bfloat16_is_widened_inside():
    x, weight = normal(64, 256).bfloat16(), normal(256, seed=1).bfloat16()
    out = rms_norm(x, weight)
    assert out.dtype == torch.bfloat16
    assert_close(out, plain_norm(x.double(), weight.double()), name="rms_norm of bfloat16")


def test_a_weight_of_the_wrong_width_is_named():
    with pytest.raises(ValueError, match=r"weight of shape \(3,\) does not fit the last of \(2, 4\)"):
        rms_norm(torch.zeros(2, 4), torch.ones(3))
