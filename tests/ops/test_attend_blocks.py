"""attend_blocks: each implementation against a loop over rows and heads, and what the library flash-linear-attention is
given and gives."""

import inspect
import itertools

import pytest
import torch
from calls import blocks, cast
from closeness import assert_close, relative_error
from oracles import naive_blocks

from gsm_kernels import attend_blocks, listening, using
from gsm_kernels.attend_blocks import fla
from gsm_kernels.attend_blocks.inputs import Inputs


def test_what_is_gathered_and_what_is_masked():
    """Many rows make a mask, one gathers, and so do many where slots are many more than they see."""
    few, one, far = blocks(), blocks(rows=1, slots=40), blocks(rows=2, slots=600, block=2, chosen=1)
    for call, name in ((few, "sdpa"), (one, "reference"), (far, "reference")):
        with listening() as heard:
            attend_blocks(**call)
        assert heard == [("attend_blocks", name)]


def test_without_slots_nothing_is_seen():
    call = blocks()
    call |= {name: call[name][:, :0] for name in ("key_BFGC", "value_BFGC")}
    assert not attend_blocks(**call).any()


# What flash-linear-attention is given. Its kernels need a GPU: here loops stand in for them.


def stand_in():
    """A kernel of the library's signature: sequences end to end, blocks counted from the first token of each."""

    def run(q, k, v, *, block_indices, block_counts, block_size, scale, cu_seqlens):
        assert block_counts == block_indices.shape[-1] and block_counts & (block_counts - 1) == 0, "no power of two"
        assert scale == q.shape[-1] ** -0.5
        parts = []
        for first, end in itertools.pairwise(cu_seqlens.tolist()):
            here = slice(first, end)
            last = torch.arange(1, end - first + 1)[None]
            q_1, k_1, v_1, chosen = (x[:, here] for x in (q, k, v, block_indices))
            parts.append(naive_blocks(q_1, k_1, v_1, torch.zeros_like(last), last, chosen, block_size))
        return torch.cat(parts, dim=1)

    return run


@pytest.mark.parametrize("padding", [0, 3, 17])
@torch.no_grad()
def test_documents_become_sequences_end_to_end(padding, monkeypatch):
    monkeypatch.setattr(fla, "_kernel", stand_in)
    for seed in range(3):
        call = blocks(rows=17, padding=padding, seed=seed)
        assert_close(fla.attend_blocks(Inputs(**call)), naive_blocks(**call))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::ImportWarning")
def test_the_library_s_function_takes_what_it_is_given():
    pytest.importorskip("fla.ops")
    names = ("block_indices", "block_counts", "block_size", "scale", "cu_seqlens")
    inspect.signature(inspect.unwrap(fla._kernel())).bind(0, 0, 0, **dict.fromkeys(names, 0))


@pytest.mark.parametrize("name", ["reference", "sdpa"])
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::ImportWarning")
def test_the_library_s_own_naive_form_agrees(name):
    pytest.importorskip("fla.ops")
    from fla.ops.nsa.naive import naive_nsa_selection

    call = cast(blocks(one_document=True, rows=17, groups=2), torch.float32)
    first = [call[name] for name in ("query_BRHC", "key_BFGC", "value_BFGC", "chosen_BRGN")]
    expected = naive_nsa_selection(*first, call["block"])
    with using(name):
        assert relative_error(attend_blocks(**call), expected) < 2e-6
