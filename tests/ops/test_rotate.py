"""rotate: heads, the way back, and compiled arithmetic. test_conformance.py has its results."""

import pytest
import torch
from closeness import assert_close
from oracles import angles, normal

from gsm_kernels import rotate


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
