"""attend and attend_band against a loop over rows, heads and entries."""

import pytest
import torch
from calls import attention, band, cast, gradients
from oracles import naive_attend, normal

from gsm_kernels import attend, attend_band, listening
from gsm_kernels.attend import reference
from gsm_kernels.testing import assert_close

RAGGED = {
    "several documents": {},
    "one row, as in decoding": {"rows": 1},
    "as many rows as entries": {"rows": 17, "entries": 17},
    "a window wider than the stream": {"width": 40},
    "a window of one": {"width": 1},
    "an empty bank": {"ratio": 50},
    "a bank that is gathered": {"ratio": 1, "k": 1, "rows": 40, "entries": 43, "batch": 2},
    "no slot selected": {"k": 0},
    "more rows than a block": {"rows": 37, "entries": 40, "heads": 2, "width": 18},
    "narrow blocks": {"rows": 33, "entries": 33, "heads": 1, "width": 3},
    "sixteen heads of 64": {"heads": 16, "channels": 64, "pairs": 4, "rows": 5},
    "nothing rotated": {"pairs": 0},
    "everything rotated": {"pairs": 16},
    "only padding in one row": {"padding": 17},
}


def oracle(call):
    names = ("query_BRHC", "window_BEC", "position_BR", "width", "sink_H", "cos_BRP", "sin_BRP")
    far = (call.get(name) for name in ("bank_BFC", "index_BRK", "bias_BRK"))
    return naive_attend(*(call[name] for name in names), *far)


def assert_agrees(op, call):
    out, grads = gradients(op, call)
    expected, expected_grads = gradients(lambda **call: oracle(call), call)
    assert_close(out[0], expected[0])
    for name, expected_grad in expected_grads.items():
        expected_grad = torch.zeros_like(call[name]) if expected_grad is None else expected_grad
        assert_close(grads[name], expected_grad, name=f"gradient of {name}", gradient=True)


@pytest.mark.parametrize("sizes", RAGGED.values(), ids=RAGGED.keys())
def test_attend_and_its_gradients_equal_the_loop(sizes):
    with listening() as heard:
        assert_agrees(attend, attention(**sizes)[0])
    assert heard == [("attend", "reference")]


@pytest.mark.parametrize("sizes", RAGGED.values(), ids=RAGGED.keys())
def test_with_a_bias_it_and_its_gradients_equal_the_loop(sizes):
    assert_agrees(attend, biased(**sizes))


def biased(**sizes):
    call, _ = attention(**sizes)
    return {**call, "bias_BRK": normal(*call["index_BRK"].shape, seed=7)}


def test_a_bias_of_zero_changes_nothing():
    for sizes in ({}, RAGGED["a bank that is gathered"], RAGGED["an empty bank"]):
        call, _ = attention(**sizes)
        zero = torch.zeros(call["index_BRK"].shape, dtype=torch.float64)
        assert_close(attend(**call, bias_BRK=zero), attend(**call))


def test_the_gradient_of_a_bias_is_that_of_finite_differences():
    call = biased(rows=5, heads=2, channels=4, pairs=1, k=3, batch=1)
    assert torch.autograd.gradcheck(
        lambda bias: attend(**{**call, "bias_BRK": bias}), call["bias_BRK"].requires_grad_()
    )


@pytest.mark.parametrize("sizes", RAGGED.values(), ids=RAGGED.keys())
def test_attend_band_and_its_gradients_equal_the_loop(sizes):
    with listening() as heard:
        assert_agrees(attend_band, band(**sizes))
    assert heard == [("attend_band", "reference")]


@pytest.mark.parametrize("bias", [False, True])
def test_chunks_of_rows_change_nothing(bias, monkeypatch):
    sizes = {"rows": 33, "entries": 36, "heads": 2, "width": 4}
    call = biased(**sizes) if bias else attention(**sizes)[0]
    whole, whole_grads = gradients(attend, call)
    monkeypatch.setattr(reference, "scratch_elements", lambda device: 1)
    pieces, piece_grads = gradients(attend, call)
    assert_close(pieces[0], whole[0])
    for name, grad in whole_grads.items():
        assert_close(piece_grads[name], grad, name=name, gradient=True)


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


def test_no_rows_give_no_output():
    call, _ = attention(rows=1)
    rows = {
        k: v[:, :0] for k, v in call.items() if k in ("query_BRHC", "position_BR", "cos_BRP", "sin_BRP", "index_BRK")
    }
    out, grads = gradients(attend, {**call, **rows})
    assert out[0].shape == (2, 0, 4, 32) and (grads["window_BEC"] == 0).all()


def test_entries_beyond_the_window_get_no_gradient():
    call = band(rows=1, width=3)
    _, grads = gradients(attend_band, call)
    assert (grads["window_BEC"][:, :-3] == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 0}, "width = 0 must be at least 1"),
        ({"window_BEC": torch.zeros(2, 3, 32)}, "3 window entries do not hold the 11 rows"),
        ({"sink_H": torch.zeros(3)}, "sink_H has shape .* H = 4 by query_BRHC"),
        ({"bank_BFC": torch.zeros(2, 6)}, "bank_BFC needs 3 dimensions"),
        ({"cos_BRP": torch.zeros(2, 11, 17), "sin_BRP": torch.zeros(2, 11, 17)}, "32 channels do not hold 17 rotated"),
    ],
)
def test_shapes_that_do_not_fit_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        attend(**{**attention()[0], **change})
