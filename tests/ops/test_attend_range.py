"""attend_range: masks that are not made, empty calls, and the sequences that PyTorch's function is given."""

import inspect
from itertools import pairwise

import pytest
import torch
from calls import gradients, ranges
from check import assert_agrees, assert_near
from closeness import assert_close
from oracles import naive_range

from gsm_kernels import attend_range, listening, using
from gsm_kernels.attend_range import sdpa, varlen
from gsm_kernels.attend_range.inputs import Inputs


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


def stand_in():
    """PyTorch's function in loops, from its documentation: sequences end together, and a window has earlier slots."""

    def run(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size, enable_gqa):
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and enable_gqa and window_size[1] == 0
        parts = []
        for (begin, end), (low, high) in zip(pairwise(cu_seq_q.tolist()), pairwise(cu_seq_k.tolist()), strict=True):
            rows, slots = end - begin, high - low
            assert rows <= max_q and slots <= max_k
            last = torch.arange(slots - rows, slots)[None] + 1
            first = torch.zeros_like(last) if window_size[0] < 0 else (last - 1 - window_size[0]).clamp(min=0)
            parts.append(naive_range(query[None, begin:end], key[None, low:high], value[None, low:high], first, last))
        return torch.cat(parts, 1)[0]

    return run


@pytest.mark.parametrize("width", [None, 1, 3])
@pytest.mark.parametrize(
    "sizes", [{"padding": 0}, {"padding": 4}, {"one_document": True}, {"one_document": True, "rows": 11}], ids=str
)
def test_pytorch_s_sequences_are_our_ranges(width, sizes, monkeypatch):
    monkeypatch.setattr(varlen, "_kernel", stand_in)
    for seed in range(3):
        call = ranges(**{"rows": 17, "width": width, "seed": seed, **sizes})
        assert call["whole"] or varlen.are_documents(Inputs(**call))
        got = gradients(lambda **call: varlen.attend_range(Inputs(**call)), call)
        assert_near(got, gradients(lambda **call: naive_range(*list(call.values())[:5]), call))


def test_ranges_that_are_no_documents_are_seen():
    call = ranges(rows=17, padding=0)
    later = call["first_BR"].clone()
    later[0, -1] += 1
    assert not varlen.are_documents(Inputs(**{**call, "first_BR": later}))
    assert not varlen.are_documents(Inputs(**{**call, "width": 2}))


def test_pytorch_s_function_takes_what_it_is_given():
    inspect.signature(varlen._kernel()).bind(*range(7), window_size=(3, 0), enable_gqa=True)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [None, 20])
def test_on_a_gpu_pytorch_s_sequences_agree(width):
    for sizes in ({"padding": 30}, {"one_document": True}):
        call = ranges(rows=300, slots=300, heads=8, channels=64, width=width, **sizes)
        assert_agrees(attend_range, call, torch.bfloat16, "varlen")
