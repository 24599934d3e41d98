"""attend and attend_band as Triton kernels, against the reference in float64; more in test_triton.py."""

import random
from collections.abc import Iterator

import pytest
import torch
from calls import attention, band, cast, gradients, outputs
from oracles import normal
from triton_check import (
    DEVICE,
    assert_agrees,
    assert_as_good_as_eager,
    each_size,
    ordinary,
    to_device,
    with_reference,
    with_triton,
)

from gsm_kernels import Op, attend, attend_band, using
from gsm_kernels.attend import triton
from gsm_kernels.testing import assert_close

SHAPES = {
    "tiles that are not full": {"rows": 5, "entries": 71, "width": 50, "heads": 8},
    "one row, as in decoding": {"rows": 1, "entries": 40, "width": 33},
    "no row": {"rows": 0},
    "as many rows as entries": {"rows": 7, "entries": 7},
    "a window wider than the stream": {"width": 4096},
    "a window of one": {"width": 1},
    "only padding in one row": {"padding": 17},
    "three sequences": {"batch": 3, "rows": 2},
    "one head": {"heads": 1, "rows": 33, "entries": 36, "batch": 1, "k": 1},
    "six heads": {"heads": 6, "k": 3},
    "64 heads": {"heads": 64, "rows": 2},
    "16 channels, all rotated": {"channels": 16, "pairs": 8},
    "64 channels, nothing rotated": {"channels": 64, "pairs": 0},
    "128 channels, 32 heads": {"channels": 128, "pairs": 16, "heads": 32, "rows": 3},
}
NEAR = {"programs that come round": {"rows": 40, "entries": 44, "width": 12, "heads": 8, "batch": 1}}
FAR = {
    "an empty bank": {"ratio": 50},
    "no slot selected": {"k": 0},
    "more picks than a tile": {"k": 70, "ratio": 1},
}


QUICK = ("tiles that are not full", "one row, as in decoding", "no row", "a window of one", "three sequences")


def picked(**sizes) -> dict:
    """Arguments of `attend`, small unless something is said; with a bias if an odd number is picked."""
    call, _ = attention(**{"rows": 4, "k": 2, **sizes})
    bias = {"bias_BRK": normal(*call["index_BRK"].shape, seed=7)}
    return call | bias if call["index_BRK"].shape[2] % 2 else call


@each_size(SHAPES | FAR, *QUICK, "an empty bank", "no slot selected")
def test_attend_and_its_gradients_are_the_reference_s(sizes):
    assert_agrees(attend, picked(**sizes))


@each_size(SHAPES | NEAR, *QUICK, *NEAR)
def test_attend_band_and_its_gradients_are_the_reference_s(sizes):
    assert_agrees(attend_band, band(**sizes))


@pytest.mark.parametrize("sizes", FAR.values(), ids=FAR.keys())
def test_with_a_bias_they_are_too(sizes):
    assert_agrees(attend, picked(**sizes) | {"bias_BRK": normal(2, 4, sizes.get("k", 2), seed=7)})


def test_the_gradients_are_the_same_in_several_chunks_of_rows(monkeypatch):
    call = to_device(cast(picked(k=3, rows=5, heads=16), torch.float32))
    _, whole = gradients(with_triton(attend), call)
    chunks, add_pairs = [], triton._add_pairs
    monkeypatch.setattr(triton, "_add_pairs", lambda *args: (chunks.append(args[-1]), add_pairs(*args)))
    monkeypatch.setattr(triton, "PAIR_BYTES", 1)
    _, chunked = gradients(with_triton(attend), call)
    assert chunks == [slice(0, 2), slice(2, 4), slice(4, 5)]
    for name, grad in whole.items():
        assert_close(chunked[name], grad, name=name, gradient=True)


def test_a_row_that_sees_nothing_returns_zeros():
    call = cast(picked(padding=17), torch.float32)
    call["index_BRK"][0] = -1
    out = outputs(with_triton(attend)(**to_device(call)))[0]
    assert not out[0].any() and out[1].all()


def test_strides_do_not_matter():
    call = to_device(cast(picked(k=3), torch.float32))
    strided = {k: v.mT.contiguous().mT if isinstance(v, torch.Tensor) and v.ndim > 1 else v for k, v in call.items()}
    (out, grads), (other, other_grads) = gradients(with_triton(attend), call), gradients(with_triton(attend), strided)
    assert torch.equal(out[0], other[0])
    assert all(torch.equal(grad, other_grads[name]) for name, grad in grads.items())


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"channels": 8, "pairs": 2}, "made for 16, 32, 64, 128 or 256 channels, got 8"),
        ({"channels": 256}, "at most 128 channels in float32"),
        ({"heads": 65}, "made for 1 to 64 heads, got 65"),
    ],
)
def test_what_they_are_not_made_for_is_refused_with_the_number(sizes, reason):
    with using("triton"), pytest.raises(RuntimeError, match=reason):
        attend_band(**to_device(cast(band(**sizes), torch.float32)))


def test_entries_of_another_dtype_than_the_queries_learn_too():
    """As under autocast, where a linear map has made the queries, and an embedding the stream."""
    call = to_device(cast(attention()[0], torch.float32))
    call |= {name: call[name].half().float() for name in ("window_BEC", "bank_BFC")}
    low = {**call, "query_BRHC": call["query_BRHC"].half()}
    out, grads = gradients(with_triton(attend), low)
    same = {**low, **{name: call[name].half() for name in ("window_BEC", "bank_BFC")}}
    expected, expected_grads = gradients(with_triton(attend), same)
    assert torch.equal(out[0], expected[0])
    for name in ("window_BEC", "bank_BFC"):
        assert grads[name].dtype == torch.float32
        assert torch.equal(grads[name], expected_grads[name].float())


@pytest.mark.parametrize("op", [attend, attend_band], ids=lambda op: op.name)
def test_in_float16_they_err_no_more_than_eager(op):
    """The tiles, and what is rounded where, are those of bfloat16, which the interpreter does not have."""
    sizes = {"heads": 32, "channels": 128, "pairs": 16, "rows": 3, "entries": 60, "width": 40, "batch": 1}
    assert_as_good_as_eager(op, picked(k=67, **sizes) if op is attend else band(**sizes), torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [64, 128])
@pytest.mark.parametrize("heads", [32, 64])
def test_in_bfloat16_they_err_no_more_than_eager(heads, channels):
    sizes = {"heads": heads, "channels": channels, "pairs": 16, "rows": 150, "entries": 500, "width": 256}
    assert_as_good_as_eager(attend, picked(k=129, **sizes))
    assert_as_good_as_eager(attend_band, band(**sizes))


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("heads", [1, 4, 8, 12, 16, 32, 64])
def test_in_bfloat16_all_heads_and_channels_are_the_reference_s(heads, channels):
    sizes = {"heads": heads, "channels": channels, "rows": 150, "entries": 200, "width": 70}
    assert_agrees(attend, picked(k=81, **sizes), torch.bfloat16)
    assert_agrees(attend_band, band(**sizes), torch.bfloat16)


def random_calls(heads: int, channels: int) -> Iterator[tuple[Op, dict]]:
    """A window, picks, rows and entries that are multiples of 16 are compiled for: one call in five has all of them."""
    draw = random.Random(heads + channels)
    for seed in range(60):
        size = ordinary if seed % 5 else lambda number: -(-number // 16) * 16
        rows = size(draw.randint(1, 199))
        sizes = {
            "batch": draw.randint(1, 3),
            "rows": rows,
            "entries": size(rows + draw.randint(30, 130)),
            "width": size(draw.randint(1, 150)),
            "k": size(draw.randint(1, 99)),
            "ratio": draw.randint(1, 4),
            "heads": heads,
            "channels": channels,
            "seed": seed,
        }
        yield attend, picked(**sizes)
        yield attend_band, band(**sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [32, 128])
@pytest.mark.parametrize("heads", [4, 32])
def test_in_bfloat16_random_shapes_are_the_reference_s(heads, channels):
    for op, call in random_calls(heads, channels):
        assert_agrees(op, call, torch.bfloat16)


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
