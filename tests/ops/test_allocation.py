"""No operation may allocate anything of size rows x entries, or rows x vocabulary."""

import weakref

import pytest
import torch
from calls import cast, with_leaves
from oracles import angles
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gsm_kernels
from gsm_kernels import launch
from gsm_kernels.attend import triton as attend_triton
from gsm_kernels.index_top_k.triton import Search
from gsm_kernels.indexer_kl import triton as kl_triton


class Largest(TorchDispatchMode):
    """Remembers the number of elements in the largest storage that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [
            x.untyped_storage().nbytes() // x.element_size() for x in tree_leaves(result) if isinstance(x, torch.Tensor)
        ]
        self.elements = max(self.elements, *sizes, 0)
        return result


def long_call(rows: int, heads=2, channels=8, k=16, ratio=2):
    position = torch.arange(rows)[None]
    cos, sin = angles(position, 2, torch.float32)
    slots = rows // ratio
    return {
        "query_BRHC": torch.randn(1, rows, heads, channels),
        "window_BEC": torch.randn(1, rows, channels),
        "position_BR": position,
        "width": 16,
        "sink_H": torch.zeros(heads),
        "cos_BRP": cos,
        "sin_BRP": sin,
        "bank_BFC": torch.randn(1, slots, channels),
        "index_BRK": torch.randint(-1, slots, (1, rows, k)),
    }


def largest(function, call) -> int:
    call = with_leaves(call)
    with Largest() as seen:
        out = function(**call)
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            out.sum().backward()
    return seen.elements


def test_attention_grows_with_rows_times_window_and_selection():
    rows, heads = 8192, 2
    limit = 4 * rows * heads * (16 + 16)
    assert largest(gsm_kernels.attend, long_call(rows, heads)) <= limit < rows * rows // 16


def search_call(rows: int, slots: int) -> dict:
    return {
        "query_BRJI": torch.randn(1, rows, 1, 4),
        "weight_BRJ": torch.randn(1, rows, 1),
        "key_BFI": torch.randn(1, slots, 4),
        "first_BR": torch.zeros(1, rows, dtype=torch.int64),
        "last_BR": torch.full((1, rows), slots),
        "k": 16,
    }


def kl_call(rows: int) -> dict:
    call = long_call(rows)
    last = (call["position_BR"] + 1) // 2
    index = call.pop("index_BRK")
    call |= {"first_BR": torch.zeros_like(last), "last_BR": last, "index_BRK": index}
    call |= {"index_query_BRJI": torch.randn(1, rows, 4, 8), "index_weight_BRJ": torch.randn(1, rows, 4)}
    return call | {"index_key_BFI": torch.randn(1, rows // 2, 8)}


def test_top_k_stays_within_its_scratch_memory():
    assert largest(gsm_kernels.index_top_k, search_call(128, 32768)) <= 1 << 21 < 128 * 32768


def test_the_indexer_loss_stays_within_its_scratch_memory():
    rows = 2048
    seen = largest(lambda **call: gsm_kernels.indexer_kl(**call).loss, kl_call(rows))
    assert seen <= 1 << 21 < 2 * rows * (rows // 2) * 4


def test_the_head_never_holds_all_logits():
    rows, vocabulary = 4096, 8192
    call = {"hidden_ND": torch.randn(rows, 4), "weight_VD": torch.randn(vocabulary, 4)}
    call["target_N"] = torch.randint(0, vocabulary, (rows,))
    assert largest(gsm_kernels.linear_cross_entropy, cast(call, torch.float32)) <= 1 << 21 < rows * vocabulary


def watched(function, alive: list):
    """The function; at every call nothing of what an earlier call returned may be there any more."""

    def run(*args, **kwargs):
        assert not [ref for ref in alive if ref() is not None], (
            "a chunk's buffers are there while the next one's are made"
        )
        result = function(*args, **kwargs)
        alive.extend(weakref.ref(x) for x in (result if isinstance(result, tuple) else (result,)))
        return result

    return run


def test_the_kernels_free_a_chunk_s_buffers_before_the_next_chunk(monkeypatch):
    """Or the peak would be twice what is meant; nothing is launched here."""
    alive = [], [], []
    monkeypatch.setattr(attend_triton, "PAIR_BYTES", 1 << 12)
    monkeypatch.setattr(attend_triton, "_query_gradient", watched(attend_triton._query_gradient, alive[0]))
    monkeypatch.setattr("gsm_kernels.rows.SCRATCH", 1 << 16)
    monkeypatch.setattr(Search, "best_of_groups", watched(Search.best_of_groups, alive[1]))
    monkeypatch.setattr(kl_triton, "_compare", watched(kl_triton._compare, alive[2]))
    attention = cast(long_call(512, channels=16), torch.float32)
    indexer = cast(search_call(512, 1 << 14), torch.float32)
    with launch.launching(lambda *call: None), gsm_kernels.using("triton"):
        gsm_kernels.attend(**with_leaves(attention)).sum().backward()
        gsm_kernels.index_top_k(**indexer)
        alive[1].clear()
        gsm_kernels.indexer_kl(**with_leaves(cast(kl_call(512), torch.float32)))
    assert min(map(len, alive)) > 2, "there were several chunks"


@pytest.mark.parametrize("op", ["attend"])
def test_the_meter_can_fail(op):
    """A dense masked attention over the same inputs is caught."""
    call = long_call(4096)

    def dense(query_BRHC, window_BEC, **_):
        return torch.einsum("brhc,bec->bhre", query_BRHC, window_BEC)

    assert largest(dense, call) > 4 * 4096 * 2 * 32
