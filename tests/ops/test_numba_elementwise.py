"""The loops of RMSNorm and of the SwiGLU product against the reference in float64."""

from importlib import import_module

import pytest
import torch
from calls import cast, gradients
from oracles import normal

from gsm_kernels import listening, rms_norm, swiglu
from gsm_kernels.testing import assert_close

pytest.importorskip("numba")

SHAPES = [(1, 1, 128), (2, 5, 7), (3, 2), (0, 4), (2, 33, 4, 65), (700, 32)]


def norm_call(shape) -> dict:
    return {"x": normal(*shape), "weight": normal(shape[-1], seed=1), "eps": 1e-3}


def product_call(shape) -> dict:
    return {"gate": 2 * normal(*shape), "up": 2 * normal(*shape, seed=1), "limit": 1.5}


def strided(x):
    return x.mT.contiguous().mT if isinstance(x, torch.Tensor) and x.ndim > 1 else x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("op", "call"), [(rms_norm, norm_call), (swiglu, product_call)])
def test_values_and_gradients_equal_the_reference_in_float64_whatever_the_strides(op, call, shape, dtype):
    given = cast(call(shape), dtype)
    with listening() as heard:
        out, grads = gradients(lambda **call: op(**{name: strided(x) for name, x in call.items()}), given)
    expected, expected_grads = gradients(op, cast(given, torch.float64))
    assert heard == [(op.name, "numba")] and out[0].dtype == dtype
    assert_close(out[0], expected[0])
    for name, wanted in expected_grads.items():
        assert_close(grads[name], wanted, name=f"gradient of {name}", gradient=True)


@pytest.mark.parametrize(("op", "call"), [(rms_norm, norm_call), (swiglu, product_call)])
def test_the_number_of_threads_changes_no_bit(op, call, monkeypatch):
    monkeypatch.setattr(import_module(f"gsm_kernels.{op.name}.numba"), "LEAST", 1 << 10)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(gradients(op, cast(call((1001, 71)), torch.float32)))
    finally:
        torch.set_num_threads(before)
    (out, grads), (expected, expected_grads) = found
    assert torch.equal(out[0], expected[0])
    assert all(torch.equal(grad, expected_grads[name]) for name, grad in grads.items())


def test_what_is_not_a_number_is_not_hidden_and_stays_in_its_place():
    x = cast(norm_call((3, 40)), torch.float32)
    x["x"][1, 2] = torch.nan
    y = cast(product_call((3, 40)), torch.float32)
    y["gate"][0, 1], y["up"][2, 3] = torch.nan, torch.nan
    with torch.no_grad():
        normed, product = rms_norm(**x), swiglu(**y)
    assert normed[1].isnan().all() and normed[[0, 2]].isfinite().all()
    assert product.isnan().nonzero().tolist() == [[0, 1], [2, 3]]


def test_large_numbers_do_not_overflow():
    gate = torch.tensor([-1e6, -200.0, -88.0, 0.0, 88.0, 1e30])
    gate.requires_grad_()
    out = swiglu(gate, torch.ones(6), 1e4)
    out.sum().backward()
    torch.testing.assert_close(out.detach(), torch.tensor([0.0, 0.0, 0.0, 0.0, 88.0, 1e4]), atol=1e-30, rtol=1e-6)
    torch.testing.assert_close(gate.grad, torch.tensor([0.0, 0.0, 0.0, 0.5, 1.0, 0.0]), atol=1e-30, rtol=1e-6)
