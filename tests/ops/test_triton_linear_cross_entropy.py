"""The cross-entropy kernel among its products: chunks, blocks and padding, ignored rows, half precision."""

import pytest
import torch
from calls import gradients, logits
from check import (
    DEVICE,
    assert_agrees,
    launches_of,
    to_device,
    with_reference,
    with_triton,
)
from closeness import assert_close, relative_error
from oracles import naive_cross_entropy, normal

from gsm_kernels import linear_cross_entropy, using
from gsm_kernels.linear_cross_entropy import triton


@pytest.fixture(autouse=True)
def several_blocks_a_row(monkeypatch):
    """The interpreter computes lanes that hold nothing, too. test_triton.py runs the block that GPUs use."""
    if DEVICE == "cpu":
        monkeypatch.setattr(triton, "BLOCK", 32)


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("vocabulary", [1, 11, 64, 100])
def test_any_vocabulary_in_any_chunks(vocabulary, chunk, monkeypatch):
    monkeypatch.setattr(triton, "chunk_rows", lambda vocabulary: chunk)
    assert_agrees(linear_cross_entropy, logits(vocabulary=vocabulary, rows=9))


@pytest.mark.parametrize("frozen", ["hidden_ND", "weight_VD"])
def test_one_side_may_be_frozen(frozen):
    call, other = logits(), {"hidden_ND": "weight_VD", "weight_VD": "hidden_ND"}[frozen]
    call = to_device({k: v.float() if k != "target_N" else v for k, v in call.items()})
    fixed = {k: v for k, v in call.items() if k != other}

    def learned(op):
        return gradients(lambda leaf: op(**fixed, **{other: leaf}), {"leaf": call[other]})[1]["leaf"]

    found = learned(with_reference(linear_cross_entropy))
    assert_close(found, learned(lambda **call: naive_cross_entropy(*(call[name] for name in logits()))), gradient=True)
    assert_close(learned(with_triton(linear_cross_entropy)), found)


def test_without_gradients_the_logits_are_left_alone(monkeypatch):
    launched = launches_of(triton, monkeypatch)
    call = to_device({k: v.float() if k != "target_N" else v for k, v in logits().items()})
    with torch.no_grad():
        quiet = with_triton(linear_cross_entropy)(**call)
    (loss,), _ = gradients(with_triton(linear_cross_entropy), call)
    assert [one.options["GRADIENT"] for one in launched] == [False, True] and torch.equal(quiet, loss)


def test_backward_twice_gives_the_same_gradient_twice():
    call = to_device({k: v.float() if k != "target_N" else v for k, v in logits().items()})
    weight = call["weight_VD"].requires_grad_()
    loss = with_triton(linear_cross_entropy)(**call)
    first, second = (torch.autograd.grad(3 * loss, weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_a_target_outside_the_vocabulary_is_seen_in_the_loss():
    call = to_device({k: v.float() if k != "target_N" else v for k, v in logits().items()})
    call["target_N"][5] = 11
    assert with_triton(linear_cross_entropy)(**call).isnan()


def half(call: dict) -> dict:
    """Rows in the half-precision type that the interpreter knows, the weight in float32: mixed-precision training."""
    return to_device({**call, "hidden_ND": call["hidden_ND"].half(), "weight_VD": call["weight_VD"].float()})


def test_a_float32_weight_is_rounded_to_the_rows_dtype_and_gets_a_float32_gradient():
    call = half(logits(rows=40, vocabulary=100, width=16))
    (loss,), grads = gradients(with_triton(linear_cross_entropy), call)
    rounded = {"hidden_ND": call["hidden_ND"].double(), "weight_VD": call["weight_VD"].half().double()}
    (expected,), expected_grads = gradients(with_reference(linear_cross_entropy), {**call, **rounded})
    assert_close(loss, expected)  # to float32's tolerance: the logits are not rounded
    assert grads["weight_VD"].dtype == torch.float32 and grads["hidden_ND"].dtype == torch.float16
    assert relative_error(grads["weight_VD"], expected_grads["weight_VD"]) < 1e-3
    assert_close(grads["hidden_ND"], expected_grads["hidden_ND"], gradient=True)


def test_small_probabilities_survive_float16():
    """e^-20 is no number of float16: words that are that improbable would get no gradient."""
    call = half(logits(rows=8, vocabulary=12, ignored=0))
    call["hidden_ND"] = torch.cat([torch.ones_like(call["hidden_ND"][:, :1]), 0 * call["hidden_ND"][:, 1:]], 1)
    call["weight_VD"][:, 0] = torch.linspace(0, -20, 12)
    call["target_N"] = torch.zeros_like(call["target_N"])
    _, grads = gradients(with_triton(linear_cross_entropy), call)
    wide = {k: v.double() if k != "target_N" else v for k, v in call.items()}
    wide["weight_VD"] = call["weight_VD"].half().double()
    _, expected = gradients(with_reference(linear_cross_entropy), wide)
    assert relative_error(grads["weight_VD"][-1], expected["weight_VD"][-1]) < 1e-3


# torch's own tracer instantiates autograd.Function, and torch warns about that.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_mixed_dtypes_compile_into_one_graph():
    torch.compiler.reset()
    call = half(logits())
    compiled = torch.compile(lambda **call: linear_cross_entropy(**call), fullgraph=True, backend="aot_eager")
    with using("triton"):
        (loss,), grads = gradients(compiled, call)
    (expected,), expected_grads = gradients(with_triton(linear_cross_entropy), call)
    assert_close(loss, expected)
    assert all(torch.equal(grads[name], grad) for name, grad in expected_grads.items())


@pytest.mark.parametrize("vocabulary", [4096, 50304, 129280, 262144])
def test_a_chunk_has_as_many_rows_as_fit_into_a_gibibyte(vocabulary):
    rows = triton.chunk_rows(vocabulary)
    assert 4 * rows * vocabulary <= 1 << 30
    assert rows == 4096 or 4 * 2 * rows * vocabulary > 1 << 30


@pytest.mark.gpu
def test_sums_over_chunks_are_those_of_one_chunk(monkeypatch):
    call = to_device({**logits(rows=2048, width=256, vocabulary=8192), "hidden_ND": normal(2048, 256).bfloat16()})
    call["weight_VD"] = call["weight_VD"].bfloat16()
    _, whole = gradients(with_triton(linear_cross_entropy), call)
    monkeypatch.setattr(triton, "chunk_rows", lambda vocabulary: 256)
    _, parts = gradients(with_triton(linear_cross_entropy), call)
    assert all(relative_error(parts[name], grad) < 4e-3 for name, grad in whole.items())


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31(monkeypatch):
    """One chunk of 2^31 logits and more; its last rows are those of a call of their own."""
    rows, width, vocabulary = 43000, 64, 50304
    monkeypatch.setattr(triton, "chunk_rows", lambda vocabulary: rows)
    call = to_device({k: v.float() if k != "target_N" else v for k, v in logits(rows, width, vocabulary).items()})
    call["target_N"][:-8] = -100
    _, grads = gradients(with_triton(linear_cross_entropy), call)
    last = {**call, "hidden_ND": call["hidden_ND"][-8:], "target_N": call["target_N"][-8:]}
    _, expected = gradients(with_reference(linear_cross_entropy), last)
    assert_close(grads["hidden_ND"][-8:], expected["hidden_ND"], gradient=True)
    assert_close(grads["weight_VD"], expected["weight_VD"], gradient=True)
