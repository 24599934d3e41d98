"""The hyper-connections against a transcription with ordinary autograd."""

import pytest
import torch
from calls import gradients, hyper_connection
from oracles import naive_mhc

from gsm_kernels import listening, mhc_boundary
from gsm_kernels.testing import assert_close


@pytest.mark.parametrize("rounds", [1, 2, 20])
@pytest.mark.parametrize(
    "sizes", [{}, {"streams": 1}, {"streams": 2, "rows": 1}, {"batch": 1, "width": 32}, {"rows": 0}]
)
def test_a_boundary_and_its_gradients_equal_the_transcription(sizes, rounds):
    call = {**hyper_connection(**sizes), "rounds": rounds}
    with listening() as heard:
        out, grads = gradients(mhc_boundary, call)
    expected, expected_grads = gradients(naive_mhc, call)
    assert heard == [("mhc_boundary", "reference")]
    for name, got, wanted in zip(("streams", "mixed"), out, expected, strict=True):
        assert_close(got, wanted, name=name)
    for name, grad in expected_grads.items():
        assert_close(grads[name], grad, name=f"gradient of {name}", gradient=True)


def test_a_boundary_passes_gradcheck():
    call = hyper_connection(batch=1, rows=2, streams=2, width=3)
    inputs = [x.requires_grad_() for x in call.values()]
    assert torch.autograd.gradcheck(lambda *x: mhc_boundary(*x, 3, 1e-6, 1e-3), inputs)


def test_equal_streams_stay_equal():
    """Columns sum to one: streams that are equal stay so when nothing is written."""
    call = hyper_connection()
    call["update_BRD"] = torch.zeros_like(call["update_BRD"])
    equal = call["streams_BRXD"][:, :, :1].expand(-1, -1, 4, -1)
    out = mhc_boundary(**{**call, "streams_BRXD": equal})[0]
    torch.testing.assert_close(out, equal, rtol=1e-4, atol=0)


def test_only_one_output_used_still_gives_gradients():
    for output in (0, 1):
        call = hyper_connection()
        grads, expected = [], []
        for function, into in ((mhc_boundary, grads), (naive_mhc, expected)):
            phi = call["phi"].clone().requires_grad_()
            function(**{**call, "phi": phi})[output].square().sum().backward()
            into.append(phi.grad)
        assert_close(grads[0], expected[0], name=f"gradient through output {output}", gradient=True)


def test_the_next_site_reads_a_mixture_of_what_left():
    call = hyper_connection()
    call["scale"], call["bias"] = torch.zeros_like(call["scale"]), torch.zeros_like(call["bias"])
    streams, mixed = mhc_boundary(**call)
    torch.testing.assert_close(mixed, (0.5 + 1e-6) * streams.sum(2))


def test_both_results_keep_the_dtype_of_the_streams():
    call = {k: v.to(torch.bfloat16) for k, v in hyper_connection().items()}
    assert [x.dtype for x in mhc_boundary(**call)] == [torch.bfloat16, torch.bfloat16]


def test_a_projection_of_the_wrong_size_is_named():
    call = hyper_connection()
    with pytest.raises(ValueError, match=r"4 streams need \[\(24, 24\), \(24,\), \(3,\)\]"):
        mhc_boundary(**{**call, "phi": call["phi"][:5]})
