"""The loops of RMSNorm and of the SwiGLU product against the reference in float64."""

import pytest
import torch
from calls import cast, norm, product

from gsm_kernels import rms_norm, swiglu

pytest.importorskip("numba")


def test_what_is_not_a_number_is_not_hidden_and_stays_in_its_place():
    x = cast(norm(3, 40, eps=1e-3), torch.float32)
    x["x"][1, 2] = torch.nan
    y = cast(product(3, 40), torch.float32)
    y["gate"][0, 1], y["up"][2, 3] = torch.nan, torch.nan
    with torch.no_grad():
        normed, gated = rms_norm(**x), swiglu(**y)
    assert normed[1].isnan().all() and normed[[0, 2]].isfinite().all()
    assert gated.isnan().nonzero().tolist() == [[0, 1], [2, 3]]


def test_large_numbers_do_not_overflow():
    gate = torch.tensor([-1e6, -200.0, -88.0, 0.0, 88.0, 1e30])
    gate.requires_grad_()
    out = swiglu(gate, torch.ones(6), 1e4)
    out.sum().backward()
    torch.testing.assert_close(out.detach(), torch.tensor([0.0, 0.0, 0.0, 0.0, 88.0, 1e4]), atol=1e-30, rtol=1e-6)
    torch.testing.assert_close(gate.grad, torch.tensor([0.0, 0.0, 0.0, 0.5, 1.0, 0.0]), atol=1e-30, rtol=1e-6)
