"""attend and attend_band as compiled loops, against the reference in float64."""

import multiprocessing
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from calls import attention, band, cast, gradients
from oracles import normal
from torch import Tensor

from gsm_kernels import attend, attend_band, listening, using
from gsm_kernels.cpu import attend as numba
from gsm_kernels.cpu import native
from gsm_kernels.testing import assert_close

pytestmark = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))


def biased(**sizes):
    call, _ = attention(**sizes)
    return {**call, "bias_BRK": normal(*call["index_BRK"].shape, seed=7)}


def of(kind: str, **sizes):
    """The operation and its arguments."""
    if kind == "band":
        return attend_band, band(**sizes)
    return attend, biased(**sizes) if kind == "biased" else attention(**sizes)[0]


def run(op, call, choice="numba"):
    with using(choice), listening() as heard:
        out, grads = gradients(op, call)
    assert heard == [(op.name, choice)]
    return {"output": out[0], **{f"gradient of {name}": grad for name, grad in grads.items()}}


def assert_agrees(op, call):
    """With the same numbers in float64."""
    found, expected = run(op, call), run(op, cast(call, torch.float64), "reference")
    for name, wanted in expected.items():
        wanted = torch.zeros_like(found[name]) if wanted is None else wanted
        assert_close(found[name], wanted, name=name, gradient=name != "output")


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


def long_call(kind: str, **sizes):
    op, call = of(kind, rows=1100, entries=1150, width=150, heads=3, channels=16, pairs=4, k=6, ratio=3, **sizes)
    return op, cast(call, torch.float32)


def test_two_threads_may_call_at_once():
    op, call = long_call("biased")
    with using("numba"), ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: gradients(op, call), range(2))
    assert torch.equal(first[0][0], second[0][0])
    assert all(torch.equal(grad, second[1][name]) for name, grad in first[1].items())


def test_a_forked_worker_has_threads_of_its_own(monkeypatch):
    """PyTorch's own threads do not survive a fork: the worker runs nothing but the loops on two."""
    call = cast(attention()[0], torch.float32)

    def decode(into) -> None:
        with using("numba"):
            into.put(attend(**call).flatten().tolist())

    monkeypatch.setattr(numba, "THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    fork = multiprocessing.get_context("fork")
    here, there = fork.SimpleQueue(), fork.SimpleQueue()
    decode(here)
    worker = fork.Process(target=decode, args=(there,))
    worker.start()
    worker.join(60)
    worker.kill()
    assert worker.exitcode == 0 and there.get() == here.get()


def test_a_row_that_sees_nothing_returns_zero():
    call = cast(attention(padding=3)[0], torch.float32)
    call["index_BRK"][0, -3:] = -1
    for sink in (0.0, -torch.inf):
        with using("numba"):
            out = attend(**{**call, "sink_H": torch.full_like(call["sink_H"], sink)})
        assert (out[0, -3:] == 0).all() and (out[0, :-3] != 0).any() and out.isfinite().all()


def test_the_default_dtype_does_not_matter():
    """The loops write float32: into memory for anything else they would write too much."""
    op, call = of("biased")
    expected = run(op, cast(call, torch.float32))
    torch.set_default_dtype(torch.float16)
    try:
        found = run(op, cast(call, torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(found[name], wanted) for name, wanted in expected.items())


def test_an_entry_picked_twice_counts_twice():
    call = cast(attention(k=4)[0], torch.float32)
    call["index_BRK"] = torch.zeros_like(call["index_BRK"])
    assert_agrees(attend, call)


def test_a_slot_that_is_not_there_is_no_entry():
    """Reading it would read memory of others."""
    call = cast(attention()[0], torch.float32)
    slots, beyond = call["bank_BFC"].shape[1], call["index_BRK"].clone()
    beyond[beyond < 0] = slots + 1000
    found, expected = run(attend, {**call, "index_BRK": beyond}), run(attend, call)
    assert all(torch.equal(found[name], wanted) for name, wanted in expected.items())


def test_huge_logits_stay_finite():
    call = cast(attention()[0], torch.float32)
    found = run(attend, {**call, "query_BRHC": call["query_BRHC"] * 1e4})
    assert all(x.isfinite().all() for x in found.values())


@pytest.mark.parametrize("name", ["query_BRHC", "window_BEC", "bank_BFC", "sink_H"])
def test_what_is_not_a_number_is_not_hidden(name):
    call = cast(attention()[0], torch.float32)
    call[name] = torch.full_like(call[name], torch.nan)
    with using("numba"):
        assert attend(**call).isnan().any()


def test_float64_is_for_the_reference():
    with listening() as heard:
        attend(**attention()[0])
        attend(**cast(attention()[0], torch.float32))
    assert heard == [("attend", "reference"), ("attend", "numba")]
    with using("numba"), pytest.raises(RuntimeError, match="too coarse for float64"):
        attend_band(**band())


def test_the_package_is_imported_without_numba():
    code = "import sys, gsm_kernels; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
