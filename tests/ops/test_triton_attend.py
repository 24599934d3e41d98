"""attend and attend_band as Triton kernels, against the reference in float64; more in test_triton.py."""

import pytest
import torch
from calls import attention, band, cast, gradients
from check import (
    DEVICE,
    assert_as_good_as_eager,
    to_device,
    with_reference,
    with_triton,
)
from closeness import assert_close
from oracles import normal

from gsm_kernels import attend, attend_band


def picked(**sizes) -> dict:
    """Arguments of `attend`, small unless something is said; with a bias if an odd number is picked."""
    call, _ = attention(**{"rows": 4, "k": 2, **sizes})
    bias = {"bias_BRK": normal(*call["index_BRK"].shape, seed=7)}
    return call | bias if call["index_BRK"].shape[2] % 2 else call


def test_entries_of_another_dtype_than_the_queries_learn_too():
    """As in training under autocast: the sum of the gradients of several readers is not rounded."""
    call = to_device(cast(attention()[0], torch.float32))
    call |= {name: call[name].half().float() for name in ("window_BEC", "bank_BFC")}
    low = {**call, "query_BRHC": call["query_BRHC"].half()}
    out, grads = gradients(with_triton(attend), low)
    same = {**low, **{name: call[name].half() for name in ("window_BEC", "bank_BFC")}}
    expected, expected_grads = gradients(with_triton(attend), same)
    assert torch.equal(out[0], expected[0])
    for name in ("window_BEC", "bank_BFC"):
        assert grads[name].dtype == torch.float32
        assert torch.equal(grads[name].half(), expected_grads[name])
        assert not torch.equal(grads[name], expected_grads[name].float())


def test_window_and_bank_of_two_dtypes_are_read_as_the_queries_dtype():
    call = to_device(cast(picked(rows=70, entries=70, width=3, k=1), torch.float32))
    low = {**call, "query_BRHC": call["query_BRHC"].half(), "bank_BFC": call["bank_BFC"].half()}
    with torch.no_grad():
        out = with_triton(attend)(**low)
        assert torch.equal(out, with_triton(attend)(**{**low, "window_BEC": call["window_BEC"].half()}))


@pytest.mark.parametrize("op", [attend, attend_band], ids=lambda op: op.name)
def test_in_float16_they_err_no_more_than_eager(op):
    """The tiles, and what is rounded where, are those of bfloat16, which the interpreter does not have."""
    sizes = {"heads": 32, "channels": 128, "pairs": 16, "rows": 3, "entries": 60, "width": 40, "batch": 1}
    assert_as_good_as_eager(op, picked(k=67, **sizes) if op is attend else band(**sizes), torch.float16)


@pytest.mark.gpu
def test_beyond_two_to_the_31_numbers_the_last_rows_are_right():
    rows, heads, channels, width, k, tail = 262_145, 64, 128, 128, 32, 5
    position = torch.arange(rows, device=DEVICE)[None]
    angle = position[..., None] * 10.0 ** -torch.arange(16, device=DEVICE)
    half = {"device": DEVICE, "dtype": torch.bfloat16}
    call = {
        "query_BRHC": torch.randn(1, rows, heads, channels, **half),
        "window_BEC": torch.randn(1, rows, channels, **half),
        "position_BR": position,
        "width": width,
        "sink_H": torch.zeros(heads, device=DEVICE),
        "cos_BRP": angle.cos(),
        "sin_BRP": angle.sin(),
        "bank_BFC": torch.randn(1, rows // 2, channels, **half),
        "index_BRK": torch.randint(-1, rows // 2, (1, rows, k), device=DEVICE),
    }
    by_row = ("query_BRHC", "position_BR", "cos_BRP", "sin_BRP", "index_BRK")
    last = {name: value[:, -tail:] if name in by_row else value for name, value in call.items()}
    got = gradients(lambda **call: with_triton(attend)(**call)[:, -tail:], call)
    expected = gradients(with_reference(attend), last)
    assert_close(got[0][0], expected[0][0])
    for name, grad in expected[1].items():
        found = got[1][name][:, -tail:] if name == "query_BRHC" else got[1][name]
        assert_close(found, grad, name=name, gradient=True)
