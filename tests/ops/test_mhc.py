"""The hyper-connections against a transcription with ordinary autograd."""

import pytest
import torch
from calls import cast, hyper_connection
from check import assert_same, run_by, to_device
from oracles import naive_mhc

from gsm_kernels import mhc_boundary
from gsm_kernels.cpu import native


def test_equal_streams_stay_equal():
    """Columns sum to one: streams that are equal stay so when nothing is written."""
    call = hyper_connection()
    call["update_BRD"] = torch.zeros_like(call["update_BRD"])
    equal = call["streams_BRXD"][:, :, :1].expand(-1, -1, 4, -1)
    out = mhc_boundary(**{**call, "streams_BRXD": equal})[0]
    torch.testing.assert_close(out, equal, rtol=1e-4, atol=0)


@pytest.mark.parametrize("output", [0, 1])
@pytest.mark.parametrize("name", ["reference", "numba", "triton"])
def test_one_result_alone_gives_gradients(name, output):
    if name == "numba" and native.missing():
        pytest.skip(str(native.missing()))
    run, call = run_by(name, mhc_boundary), cast(hyper_connection(batch=1), torch.float32)
    assert_same(lambda **call: run(**call)[output], lambda **call: naive_mhc(**call)[output], to_device(call))


def test_the_next_site_reads_a_mixture_of_what_left():
    call = hyper_connection()
    call["scale"], call["bias"] = torch.zeros_like(call["scale"]), torch.zeros_like(call["bias"])
    streams, mixed = mhc_boundary(**call)
    torch.testing.assert_close(mixed, (0.5 + 1e-6) * streams.sum(2))


def test_both_results_keep_the_dtype_of_the_streams():
    call = cast(hyper_connection(), torch.bfloat16)
    assert [x.dtype for x in mhc_boundary(**call)] == [torch.bfloat16, torch.bfloat16]
