"""The hyper-connections' kernels: numbers of streams, ragged sizes, rounds, strides, and on a GPU the largest size."""

import pytest
import torch
from calls import cast, gradients, hyper_connection
from check import (
    assert_agrees,
    launches_of,
    to_device,
    with_reference,
    with_triton,
)
from closeness import TOLERANCE, assert_close

from gsm_kernels import mhc_boundary, using
from gsm_kernels.mhc import triton


def call_of(rounds=2, **sizes) -> dict:
    """A call whose numbers are as large as a model's, whatever the width."""
    call = hyper_connection(**sizes)
    return {**call, "phi": call["phi"] * call["phi"].shape[1] ** -0.5, "rounds": rounds}


FEW = [  # streams, width, tokens; of four streams, a width of 60 makes four tiles of columns, the last one ragged
    (4, 60, 1), (4, 60, 2), (4, 60, 5), (4, 60, 17), (8, 24, 3), (2, 300, 1), (1, 520, 3),
    pytest.param(4, 160, 64, marks=pytest.mark.nightly),
]  # fmt: skip


@pytest.mark.parametrize(("streams", "width", "tokens"), FEW)
def test_the_columns_of_few_tokens_are_divided_among_programs(streams, width, tokens, monkeypatch):
    launched = launches_of(triton, monkeypatch)
    call = call_of(streams=streams, width=width, batch=1, rows=tokens)
    backward = ["products", "coefficient_gradients", "stream_gradients", "add_parts"]
    assert_agrees(mhc_boundary, call)
    assert [one.kernel for one in launched] == ["project", "finish", *backward]
    launched.clear()
    monkeypatch.setattr(triton, "PROGRAMS", 1)  # undivided, as more tokens would be
    assert_agrees(mhc_boundary, call)
    assert [one.kernel for one in launched] == ["project", "finish", *backward]
    launched.clear()
    monkeypatch.setattr(triton, "FEW", 0)
    assert_agrees(mhc_boundary, call)
    assert [one.kernel for one in launched] == ["forward", *backward]


def test_many_tokens_and_narrow_streams_are_one_kernel_s(monkeypatch):
    wide = torch.empty(1, 1, 4, 2048, dtype=torch.bfloat16, device="meta")
    assert [triton.shares_of(wide.expand(-1, tokens, -1, -1)) for tokens in (1, 16, 17, 64, 65)] == [32, 32, 32, 16, 0]
    assert triton.shares_of(torch.empty(1, 1, 4, 32, device="meta")) == 4
    assert triton.shares_of(torch.empty(1, 1, 2, 32, device="meta")) == triton.shares_of(wide[:, :0]) == 0
    monkeypatch.setattr(triton, "FEW", 1024)
    assert [triton.shares_of(wide.expand(-1, tokens, -1, -1)) for tokens in (512, 16384)] == [2, 1]


def test_streams_that_are_one_memory_as_after_the_embedding():
    call = to_device(cast(call_of(batch=1), torch.float32))
    call["streams_BRXD"] = call["streams_BRXD"][:, :, :1].expand(-1, -1, 4, -1)
    call["update_BRD"] = call["update_BRD"].mT.contiguous().mT
    with using("reference"):
        expected = mhc_boundary(**call)
    for got, wanted in zip(with_triton(mhc_boundary)(**call), expected, strict=True):
        assert_close(got, wanted)


def test_an_update_in_half_precision_joins_streams_in_float32():
    call = to_device(cast(call_of(batch=1), torch.float32))
    call["update_BRD"] = call["update_BRD"].half()
    out, grads = gradients(with_triton(mhc_boundary), call)
    expected, expected_grads = gradients(with_reference(mhc_boundary), call)
    assert [x.dtype for x in out] == [torch.float32, torch.float32] and grads["update_BRD"].dtype == torch.float16
    for got, wanted in zip(out, expected, strict=True):
        assert_close(got, wanted)
    for name, wanted in expected_grads.items():
        assert_close(grads[name], wanted, name=f"gradient of {name}", gradient=True)


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31():
    """The last tokens of a sequence whose streams have more than 2^31 numbers are like those of a short one."""
    call = to_device(cast(call_of(20, batch=1, rows=17, width=2048), torch.bfloat16))
    long = dict(call)
    for name in ("streams_BRXD", "update_BRD"):
        padding = call[name].new_zeros(1, 2**18, *call[name].shape[2:])
        long[name] = torch.cat((padding, call[name]), 1).requires_grad_()
        call[name].requires_grad_()
    assert long["streams_BRXD"].numel() > 2**31
    results = []
    for arguments in (long, call):
        out = [x[:, -17:] for x in with_triton(mhc_boundary)(**arguments)]
        total = torch.stack([(x * x).sum() for x in out]).sum()
        grads = torch.autograd.grad(total, (arguments["streams_BRXD"], arguments["update_BRD"]))
        results.append([*out, *(grad[:, -17:] for grad in grads)])
    for got, wanted in zip(*results, strict=True):
        error = (got - wanted).abs().max() / wanted.abs().max()
        assert error <= TOLERANCE[torch.bfloat16].backward
