"""attend_range against a loop over rows and heads, each implementation alone; xformers' masks against our ranges."""

import pytest
import torch
from calls import gradients, ranges

from gsm_kernels import attend_range, listening, using
from gsm_kernels.attend_range import reference, sdpa, xformers
from gsm_kernels.attend_range.inputs import Inputs
from gsm_kernels.device import needs_one_half_type
from gsm_kernels.slots import visible
from gsm_kernels.testing import assert_close

CALLS = {
    "several documents": {},
    "one row, as in decoding": {"rows": 1},
    "as many rows as slots": {"rows": 17, "padding": 0},
    "one key head": {"groups": 1},
    "a key head for every query head": {"groups": 4},
    "only padding in one row": {"padding": 17},
    "a window": {"width": 5},
    "a window, one row": {"width": 5, "rows": 1},
    "a window of one": {"width": 1},
    "a window wider than the stream": {"width": 40},
    "a window and more rows than a block": {"width": 18, "rows": 37, "slots": 40},
    "a window and padding": {"width": 3, "rows": 33, "slots": 40, "padding": 20},
    "one document": {"one_document": True, "rows": 17},
    "the end of one document": {"one_document": True},
    "one document through a window": {"one_document": True, "rows": 17, "width": 4},
}


def naive(query_BRHC, key_BFGC, value_BFGC, first_BR, last_BR, width=None, whole=False):
    """The docstring's equation, row by row."""
    out, shared = [], query_BRHC.shape[2] // key_BFGC.shape[2]
    for b, r, h in torch.cartesian_prod(*(torch.arange(n) for n in query_BRHC.shape[:3])).tolist():
        seen = slice(int(first_BR[b, r]), int(last_BR[b, r]))
        key, value = key_BFGC[b, seen, h // shared], value_BFGC[b, seen, h // shared]
        weight = torch.exp(key @ query_BRHC[b, r, h] / query_BRHC.shape[3] ** 0.5)
        out.append(weight / weight.sum() @ value if len(weight) else 0 * query_BRHC[b, r, h])
    return torch.stack(out).view(query_BRHC.shape)


@pytest.mark.parametrize("name", ["reference", "sdpa"])
@pytest.mark.parametrize("sizes", CALLS.values(), ids=CALLS.keys())
def test_it_and_its_gradients_equal_the_loop(name, sizes):
    call = ranges(**sizes)
    expected, expected_grads = gradients(naive, call)
    with using(name), listening() as heard:
        out, grads = gradients(attend_range, call)
    assert heard == [("attend_range", name)]
    assert_close(out[0], expected[0])
    for argument, wanted in expected_grads.items():  # absolute too: a row that sees one slot moves no logit
        torch.testing.assert_close(grads[argument], wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_chunk_of_one_document_is_read_without_a_mask(groups, monkeypatch):
    call = ranges(one_document=True, groups=groups)
    monkeypatch.setattr(sdpa, "visible", None)  # what a mask is made by
    with using("sdpa"), torch.no_grad():
        out = attend_range(**call)
    assert call["query_BRHC"].shape[1] < call["key_BFGC"].shape[1]
    assert_close(out, naive(**call))


@pytest.mark.parametrize("name", ["reference", "sdpa"])
@pytest.mark.parametrize("width", [None, 4])
def test_chunks_of_rows_change_nothing(name, width, monkeypatch):
    call = ranges(rows=33, slots=40, width=width)
    with using(name):
        whole, whole_grads = gradients(attend_range, call)
        for module in (reference, sdpa):
            monkeypatch.setattr(module, "scratch_elements", lambda device: 1)
        pieces, piece_grads = gradients(attend_range, call)
    assert_close(pieces[0], whole[0])
    for argument, grad in whole_grads.items():
        assert_close(piece_grads[argument], grad, name=argument, gradient=True)


@pytest.mark.parametrize("name", ["reference", "sdpa"])
def test_a_row_that_sees_nothing_returns_zero_and_gives_no_gradient(name):
    call = ranges(padding=17)
    with using(name):
        out, grads = gradients(attend_range, call)
    assert (out[0][0] == 0).all() and (out[0][1] != 0).any()
    assert all((grad[0] == 0).all() for grad in grads.values())


@pytest.mark.parametrize("width", [None, 4])
def test_keys_may_be_wider_than_queries_as_from_a_memory_under_autocast(width):
    call = ranges(rows=5, width=width)
    call = {name: x.float() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in call.items()}
    half = {**call, "query_BRHC": call["query_BRHC"].bfloat16()}
    with listening() as heard:
        out = attend_range(**half)
    assert heard == [("attend_range", "sdpa")] and out.dtype == torch.bfloat16
    assert_close(out, attend_range(**{**call, "query_BRHC": half["query_BRHC"].float()}).bfloat16())


def test_without_slots_there_is_nothing_to_see():
    call = ranges(rows=3)
    nothing = {"first_BR": call["first_BR"] * 0, "last_BR": call["last_BR"] * 0}
    empty = {name: call[name][:, :0] for name in ("key_BFGC", "value_BFGC")}
    with listening() as heard:
        out, _ = gradients(attend_range, {**call, **nothing, **empty})
    assert heard == [("attend_range", "reference")] and (out[0] == 0).all()


@pytest.mark.parametrize("name", ["reference", "sdpa"])
def test_a_windowed_call_multiplies_no_more_than_a_few_windows_a_row(name):
    """It once would have made a mask of all rows and slots; here that would be 256 times as much."""
    from torch.utils.flop_counter import FlopCounterMode

    rows, width = 4096, 16
    call = ranges(batch=1, rows=rows, slots=rows, heads=1, groups=1, width=width, one_document=True)
    call = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    with using(name), FlopCounterMode(display=False) as counter:
        attend_range(**call)
    assert 0 < counter.get_total_flops() <= 4 * 8 * rows * 3 * width


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 0}, "width = 0 must be at least 1"),
        ({"key_BFGC": torch.zeros(2, 17, 3, 8), "value_BFGC": torch.zeros(2, 17, 3, 8)}, "3 key and value heads must"),
        ({"value_BFGC": torch.zeros(2, 16, 2, 8)}, "so F = 16, but F = 17 by key_BFGC"),
        ({"key_BFGC": torch.zeros(2, 6, 2, 8), "value_BFGC": torch.zeros(2, 6, 2, 8), "width": 4}, "6 slots do not"),
    ],
)
def test_shapes_that_do_not_fit_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        attend_range(**{**ranges(), **change})


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what is missing without a GPU")
def test_on_a_cpu_xformers_is_refused_with_its_reason():
    name, why = attend_range.explain()
    assert name == "sdpa" and why.startswith("xformers: xformers runs on CUDA devices alone; numba: ")
    with (
        using("xformers"),
        pytest.raises(RuntimeError, match="cannot run as 'xformers': xformers runs on CUDA devices"),
    ):
        attend_range(**ranges())


def test_xformers_says_which_calls_it_cannot_take():
    call = ranges(rows=17, channels=12, padding=0)
    cuda = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    assert "runs on CUDA" in str(xformers.refuses(Inputs(**call)))
    assert "runs on CUDA" in str(xformers.refuses(Inputs(**cuda)))
    half, full = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2)
    assert needs_one_half_type(half, half, half) is None
    assert "all in float16, got bfloat16, float32" in str(needs_one_half_type(half, full, full))
    assert "got float32" in str(needs_one_half_type(full, full, full))


@pytest.mark.parametrize("width", [None, 1, 3])
def test_packed_documents_are_read_from_the_ranges(width):
    call = ranges(rows=17, padding=0, width=width)
    lengths = xformers.document_lengths(call["first_BR"], call["last_BR"], width)
    if width == 1:  # rows that see themselves alone are documents of one
        assert lengths == [1] * 34
    else:
        starts = (call["last_BR"] - call["first_BR"] == 1).flatten().nonzero().flatten().tolist()
        assert lengths is not None and sum(lengths) == 34 and starts == [sum(lengths[:n]) for n in range(len(lengths))]
    padded = ranges(rows=17, padding=2, width=width)
    assert xformers.document_lengths(padded["first_BR"], padded["last_BR"], width) is None


@pytest.mark.parametrize("width", [None, 1, 3])
@pytest.mark.parametrize("sizes", [{"padding": 0}, {"one_document": True}], ids=["documents", "one document"])
@pytest.mark.parametrize("rows", [17, 5])
def test_the_masks_of_xformers_are_our_ranges(width, sizes, rows):
    """An independent oracle: xformers' masks can be written out on a CPU, though its attention cannot run there."""
    pytest.importorskip("xformers.ops.fmha.attn_bias")
    call = ranges(rows=rows, width=width, **sizes)
    first, last, whole = call["first_BR"], call["last_BR"], call["whole"]
    mask = xformers.mask_of(Inputs(**call))
    if rows == 5 and not whole:
        assert mask is None
        return
    ours = visible(first, last, slice(0, 17))
    if whole:
        assert torch.equal(mask.materialize((rows, 17)) == 0, ours[0])
        return
    assert torch.equal(mask.materialize((34, 34)) == 0, torch.block_diag(*ours.long()).bool())
