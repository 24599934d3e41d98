"""attend and attend_band as compiled loops, against the reference in float64."""

import pytest
import torch
from calls import attention, cast, gradients
from closeness import assert_close
from oracles import normal
from torch import Tensor

from gsm_kernels import attend, listening, using
from gsm_kernels.cpu import native

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))


def biased(**sizes):
    call, _ = attention(**sizes)
    return {**call, "bias_BRK": normal(*call["index_BRK"].shape, seed=7)}


def run(op, call, choice="numba"):
    with using(choice), listening() as heard:
        out, grads = gradients(op, call)
    assert heard == [(op.name, choice)]
    return {"output": out[0], **{f"gradient of {name}": grad for name, grad in grads.items()}}


def test_a_memory_may_have_another_dtype_than_the_rows_that_read_it():
    call = cast(biased(), torch.float32)
    for names in (("bank_BFC",), ("window_BEC",), ("query_BRHC", "sink_H"), ("window_BEC", "bank_BFC", "bias_BRK")):
        mixed = {**call, **{name: call[name].to(torch.bfloat16) for name in names}}
        found, expected = run(attend, mixed), run(attend, cast(mixed, torch.float64), "reference")
        for name, wanted in expected.items():  # what flows through a bfloat16 is rounded, whatever dtype it ends in
            assert_close(found[name].to(torch.bfloat16), wanted, name=name, gradient=True)


def test_what_is_not_contiguous_is_read_as_it_is_meant():
    """A memory's bank is the first slots of a larger one."""
    call = cast(biased(), torch.float32)

    def spread(x):
        wide = torch.full((x.shape[0], x.shape[1] + 5, *x.shape[2:]), torch.nan).to(x.dtype)
        wide[:, : x.shape[1]] = x
        return wide[:, : x.shape[1]]

    memory = {name: spread(call[name]) for name in ("bank_BFC", "window_BEC", "position_BR", "index_BRK")}
    turned = {name: call[name].mT.contiguous().mT for name in ("query_BRHC", "bias_BRK", "cos_BRP", "sin_BRP")}
    short = {name: call[name].to(torch.int32) for name in ("position_BR", "index_BRK")}
    expected = run(attend, call)
    for changed in (memory, turned, short):
        for name, found in run(attend, {**call, **changed}).items():
            assert torch.equal(found, expected[name]), name


def test_a_decoded_token_copies_neither_window_nor_bank(monkeypatch):
    call = cast(attention(rows=1, k=4)[0], torch.bfloat16)
    call["bank_BFC"] = call["bank_BFC"].repeat(1, 2, 1)[:, : call["bank_BFC"].shape[1]]
    touched = []
    for name in ("contiguous", "to"):
        inner = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda x, *rest, inner=inner: touched.append(x.shape) or inner(x, *rest))
    with torch.no_grad(), using("numba"):
        attend(**call)
    assert call["query_BRHC"].shape in touched
    assert call["bank_BFC"].shape not in touched and call["window_BEC"].shape not in touched


def test_a_slot_that_is_not_there_is_no_entry():
    """Reading it would read memory of others."""
    call = cast(attention()[0], torch.float32)
    slots, beyond = call["bank_BFC"].shape[1], call["index_BRK"].clone()
    beyond[beyond < 0] = slots + 1000
    found, expected = run(attend, {**call, "index_BRK": beyond}), run(attend, call)
    assert all(torch.equal(found[name], wanted) for name, wanted in expected.items())
