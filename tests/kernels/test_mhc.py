"""The hyper-connections against a transcription with ordinary autograd."""

import pytest
import torch
from calls import gradients, hyper_connection
from oracles import naive_mhc, normal

from gsm_kernels import listening, mhc_enter, mhc_leave
from gsm_kernels.testing import assert_close


@pytest.mark.parametrize("rounds", [1, 2, 20])
@pytest.mark.parametrize("sizes", [{}, {"streams": 1}, {"streams": 2, "rows": 1}, {"batch": 1, "width": 32}, {"rows": 0}])
def test_leaving_and_its_gradients_equal_the_transcription(sizes, rounds):
    call = {**hyper_connection(**sizes), "rounds": rounds}
    with listening() as heard:
        out, grads = gradients(mhc_leave, call)
    expected, expected_grads = gradients(naive_mhc, call)
    assert heard == [("mhc_leave", "reference")]
    for name, got, wanted in zip(("streams", "read"), out, expected, strict=True):
        assert_close(got, wanted, name=name)
    for name, grad in expected_grads.items():
        assert_close(grads[name], grad, name=f"gradient of {name}", gradient=True)


def test_leaving_passes_gradcheck():
    call = hyper_connection(batch=1, rows=2, streams=2, width=3)
    inputs = [x.requires_grad_() for x in call.values()]
    assert torch.autograd.gradcheck(lambda *x: mhc_leave(*x, 3, 1e-6, 1e-3), inputs)


def test_equal_streams_stay_equal():
    """Columns sum to one: streams that are equal stay so when nothing is written."""
    call = hyper_connection()
    call["update_BRD"] = torch.zeros_like(call["update_BRD"])
    equal = call["streams_BRXD"][:, :, :1].expand(-1, -1, 4, -1)
    out = mhc_leave(**{**call, "streams_BRXD": equal})[0]
    torch.testing.assert_close(out, equal, rtol=1e-4, atol=0)


def test_only_one_output_used_still_gives_gradients():
    for output in (0, 1):
        call = hyper_connection()
        grads, expected = [], []
        for function, into in ((mhc_leave, grads), (naive_mhc, expected)):
            phi = call["phi"].clone().requires_grad_()
            function(**{**call, "phi": phi})[output].square().sum().backward()
            into.append(phi.grad)
        assert_close(grads[0], expected[0], name=f"gradient through output {output}", gradient=True)


def test_entering_is_the_weighted_sum():
    call = {"streams_BTXD": normal(2, 5, 4, 6), "read_BTX": normal(2, 5, 4, seed=1)}
    out, grads = gradients(mhc_enter, call)
    expected, expected_grads = gradients(lambda streams_BTXD, read_BTX: (read_BTX[..., None] * streams_BTXD).sum(2), call)
    assert_close(out[0], expected[0])
    for name, grad in expected_grads.items():
        assert_close(grads[name], grad, name=name, gradient=True)


def test_the_read_vector_stays_in_float32():
    call = {k: v.to(torch.bfloat16) for k, v in hyper_connection().items()}
    streams, read = mhc_leave(**call)
    assert streams.dtype == torch.bfloat16 and read.dtype == torch.float32


def test_a_projection_of_the_wrong_size_is_named():
    call = hyper_connection()
    with pytest.raises(ValueError, match=r"4 streams need \[\(24, 24\), \(24,\), \(3,\)\]"):
        mhc_leave(**{**call, "phi": call["phi"][:5]})
