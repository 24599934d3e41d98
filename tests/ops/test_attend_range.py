"""attend_range against a loop over rows and heads, each implementation alone; xformers' masks against our ranges."""

import pytest
import torch
from calls import gradients, ranges
from closeness import assert_close
from oracles import naive_range

from gsm_kernels import attend_range, listening, using
from gsm_kernels.attend_range import sdpa, xformers
from gsm_kernels.attend_range.reference import Inputs
from gsm_kernels.slots import visible


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_chunk_of_one_document_is_read_without_a_mask(groups, monkeypatch):
    call = ranges(one_document=True, groups=groups)
    monkeypatch.setattr(sdpa, "visible", None)  # what a mask is made by
    with using("sdpa"), torch.no_grad():
        out = attend_range(**call)
    assert call["query_BRHC"].shape[1] < call["key_BFGC"].shape[1]
    assert_close(out, naive_range(**call))


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


def test_a_windowed_call_multiplies_no_more_than_a_few_windows_a_row():
    """It once would have made a mask of all rows and slots; here that would be 256 times as much."""
    from torch.utils.flop_counter import FlopCounterMode

    rows, width = 4096, 16
    call = ranges(batch=1, rows=rows, slots=rows, heads=1, groups=1, width=width, one_document=True)
    call = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    with FlopCounterMode(display=False) as counter:
        attend_range(**call)
    assert 0 < counter.get_total_flops() <= 4 * 8 * rows * 3 * width


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
    ours = visible(17, first, last)
    if whole:
        assert torch.equal(mask.materialize((rows, 17)) == 0, ours[0])
        return
    assert torch.equal(mask.materialize((34, 34)) == 0, torch.block_diag(*ours.long()).bool())
