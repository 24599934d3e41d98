"""attend and attend_band against a loop over rows, heads and entries."""

import torch
from calls import attention, band, cast, gradients
from oracles import naive_attend

from gsm_kernels import attend, attend_band
from gsm_kernels.testing import assert_close


def oracle(call):
    names = ("query_BRHC", "window_BEC", "position_BR", "width", "sink_H", "cos_BRP", "sin_BRP")
    far = (call.get(name) for name in ("bank_BFC", "index_BRK", "bias_BRK"))
    return naive_attend(*(call[name] for name in names), *far)


def test_a_bias_of_zero_changes_nothing():
    for sizes in ({}, {"ratio": 1, "k": 1, "rows": 40, "entries": 43}, {"ratio": 50}):
        call, _ = attention(**sizes)
        zero = torch.zeros(call["index_BRK"].shape, dtype=torch.float64)
        assert_close(attend(**call, bias_BRK=zero), attend(**call))


def test_a_row_that_sees_nothing_returns_zero():
    call, _ = attention(padding=3)
    call["index_BRK"][0, -3:] = -1
    out = attend(**call)
    assert (out[0, -3:] == 0).all() and (out[0, :-3] != 0).any()


def test_an_entry_selected_twice_counts_twice():
    """The dense product over a small bank once lost duplicates that the gather kept."""
    call, _ = attention(k=4)
    call["index_BRK"] = torch.zeros_like(call["index_BRK"])
    assert_close(attend(**call), oracle(call))


def test_huge_logits_stay_finite():
    call, _ = attention()
    call["query_BRHC"] = call["query_BRHC"] * 1e4
    out, grads = gradients(attend, cast(call, torch.float32))
    assert out[0].isfinite().all() and all(grad.isfinite().all() for grad in grads.values())


def test_entries_beyond_the_window_get_no_gradient():
    call = band(rows=1, width=3)
    _, grads = gradients(attend_band, call)
    assert (grads["window_BEC"][:, :-3] == 0).all()
