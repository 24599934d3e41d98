"""rotate against one pair at a time."""

import pytest
import torch
from calls import gradients
from closeness import assert_close
from oracles import angles, normal, turned

from gsm_kernels import rotate


@pytest.mark.parametrize("pairs", [0, 3, 4])
@pytest.mark.parametrize("inverse", [False, True])
def test_rotation_and_its_gradient_equal_the_pairwise_formula(pairs, inverse):
    cos, sin = angles(torch.arange(10).view(2, 5), pairs)
    call = {"x": normal(2, 5, 3, 8), "cos_BRP": cos, "sin_BRP": sin}

    def oracle(x, cos_BRP, sin_BRP):
        sign = -1 if inverse else 1
        rows = [turned(x[b, r, h], cos[b, r], sin[b, r], sign) for b in range(2) for r in range(5) for h in range(3)]
        return torch.stack(rows).view(x.shape)

    out, grads = gradients(lambda **call: rotate(**call, inverse=inverse), call)
    expected, expected_grads = gradients(oracle, call)
    assert_close(out[0], expected[0])
    assert_close(grads["x"], expected_grads["x"], gradient=True)


def test_a_head_dimension_is_optional_and_the_inverse_undoes():
    cos, sin = angles(torch.arange(10).view(2, 5), 2)
    x = normal(2, 5, 8)
    out = rotate(x, cos, sin)
    assert torch.equal(out, rotate(x[:, :, None], cos, sin)[:, :, 0])
    assert_close(rotate(out, cos, sin, inverse=True), x)


# torch's own tracer instantiates autograd.Function, and torch warns about that.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_and_eager_arithmetic_agree():
    """Eager code multiplies complex numbers, compiled code real ones."""
    cos, sin = angles(torch.arange(10).view(2, 5), 3)
    x = normal(2, 5, 3, 8).transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(rotate, fullgraph=True, backend="aot_eager")
    weight = normal(*x.shape, seed=1)
    (out, grad), (wanted, wanted_grad) = (
        (out, torch.autograd.grad((out * weight).sum(), x)[0]) for out in (f(x, cos, sin) for f in (compiled, rotate))
    )
    assert_close(out, wanted)
    assert_close(grad, wanted_grad, gradient=True)


def test_too_many_angles_are_refused():
    cos, sin = angles(torch.arange(10).view(2, 5), 5)
    with pytest.raises(ValueError, match="^rotate: .*8.*5"):
        rotate(normal(2, 5, 8), cos, sin)
