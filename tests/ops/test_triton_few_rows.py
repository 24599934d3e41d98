"""Attention of a few rows without gradients: their columns are split among programs, and the result is the same."""

import pytest
import torch
from calls import attention, band, cast
from check import DEVICE, launches_of, to_device, with_reference, with_triton
from closeness import TOLERANCE, assert_close, relative_error

from gsm_kernels import attend, attend_band
from gsm_kernels.attend import triton

CASES = {
    "one row": dict(rows=1, batch=1),
    "one row of each of several sequences": dict(rows=1, batch=5),
    "rows of documents that begin inside the window": dict(rows=4, batch=2, width=29),
    "a window that reaches before the stream": dict(rows=2, entries=3, width=40, k=33),
    "no multiple of a share": dict(rows=1, batch=2, entries=90, width=70, k=37, heads=5, channels=64, pairs=8),
    "many heads": dict(rows=1, batch=1, heads=64, channels=32, pairs=4, width=33),
    "nothing is rotated": dict(rows=1, pairs=0),
    "padding": dict(rows=3, padding=3),
}
SEVERAL_SHARES = {"width": 40, "k": 21}
each = pytest.mark.parametrize("sizes", CASES.values(), ids=CASES.keys())


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """The kernels that were launched."""
    return launches_of(triton, monkeypatch)


def names(launched) -> list[str]:
    return [one.kernel for one in launched]


def both(op, call, dtype=torch.float32):
    low = to_device(cast(call, dtype))
    with torch.no_grad():
        return with_triton(op)(**low), with_reference(op)(**cast(low, torch.float64)), with_reference(op)(**low)


@each
def test_a_selection_is_read_in_shares(sizes, launched):
    out, expected, eager = both(attend, attention(**{**SEVERAL_SHARES, **sizes})[0])
    assert_close(out, expected, eager=eager)
    assert names(launched) == ["split", "join"]


@each
def test_a_band_is_read_in_shares(sizes, launched):
    call = band(**{"width": 40, **{name: size for name, size in sizes.items() if name != "k"}})
    out, expected, eager = both(attend_band, call)
    assert_close(out, expected, eager=eager)
    assert names(launched) == (["split", "join"] if call["width"] > 32 else ["forward"])


def test_a_bias_is_added_to_the_picks(launched):
    call = attention(rows=1, width=20, k=21)[0]
    bias = torch.randn(*call["index_BRK"].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out, expected, eager = both(attend, {**call, "bias_BRK": bias})
    assert_close(out, expected, eager=eager)
    assert names(launched) == ["split", "join"]


@pytest.mark.parametrize(("rows", "kernels"), [(1, ["split", "join"]), (70, ["forward"])])
def test_a_memory_may_be_wider_than_the_rows_that_read_it(rows, kernels, launched):
    """A memory takes the dtype of the embedding; under autocast, queries are in half precision."""
    call = to_device(cast(attention(rows=rows, entries=70, width=40, k=21, batch=2)[0], torch.float32))
    low = {**call, "query_BRHC": call["query_BRHC"].half()}
    expected = {**cast(call, torch.float64), "query_BRHC": low["query_BRHC"].double()}
    with torch.no_grad():
        out = with_triton(attend)(**low)
        assert relative_error(out, with_reference(attend)(**expected)) < 2e-3  # entries are rounded to float16
    assert names(launched) == kernels


def test_a_row_that_sees_nothing_without_a_sink_gives_zeros():
    call = to_device(cast(attention(rows=1, width=20, k=21)[0], torch.float32))
    call |= {
        "position_BR": torch.full_like(call["position_BR"], -1),
        "index_BRK": torch.full_like(call["index_BRK"], -1),
    }
    call["sink_H"] = torch.full_like(call["sink_H"], -torch.inf)
    with torch.no_grad():
        assert not with_triton(attend)(**call).any()


def test_many_rows_and_rows_that_learn_take_the_ordinary_kernel(launched):
    call = to_device(cast(attention(rows=1, width=40)[0], torch.float32))
    with_triton(attend)(**{**call, "query_BRHC": call["query_BRHC"].requires_grad_()})
    with torch.no_grad():
        many = to_device(cast(attention(rows=70, entries=70, batch=2, width=3, k=1)[0], torch.float32))
        with_triton(attend)(**many)
    assert names(launched) == ["forward", "forward"]


@pytest.mark.gpu
@each
def test_in_bfloat16_it_errs_no_more_than_eager(sizes):
    out, expected, eager = both(attend, attention(**{**SEVERAL_SHARES, **sizes})[0], torch.bfloat16)
    limit = max(1.5 * relative_error(eager, expected), TOLERANCE[torch.bfloat16].forward)
    assert relative_error(out, expected) <= limit


@pytest.mark.gpu
def test_a_graph_replays_it_for_new_contents():
    call = to_device(cast(attention(rows=1, batch=1, entries=128, width=64, k=16)[0], torch.bfloat16))
    assert DEVICE == "cuda"
    with torch.no_grad():
        with_triton(attend)(**call)  # compiled before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = with_triton(attend)(**call)
        call["query_BRHC"].copy_(torch.randn_like(call["query_BRHC"]))
        graph.replay()
        assert torch.equal(out, with_triton(attend)(**call))
