"""attend_blocks: each implementation against a loop over rows and heads, and what the library flash-linear-attention is
given and gives."""

import inspect
import itertools

import pytest
import torch
from calls import blocks, cast, gradients

from gsm_kernels import attend_blocks, listening, using
from gsm_kernels.attend_blocks import fla, reference, sdpa
from gsm_kernels.attend_blocks.inputs import Inputs
from gsm_kernels.testing import assert_close, relative_error

CALLS = {
    "several documents": {},
    "one row, as in decoding": {"rows": 1},
    "as many rows as slots": {"rows": 17, "padding": 3},
    "one key head": {"groups": 1},
    "a key head for every query head": {"groups": 4},
    "only padding in one row": {"padding": 17},
    "one document": {"one_document": True, "rows": 17},
    "blocks of one slot": {"block": 1},
    "blocks larger than documents": {"block": 16},
    "its own block alone": {"chosen": 0},
}


def written_out(query_BRHC, key_BFGC, value_BFGC, first_BR, last_BR, chosen_BRGN, block, own=False):
    """The docstring's equation, row by row."""
    out, shared = [], query_BRHC.shape[2] // key_BFGC.shape[2]
    for b, r, h in itertools.product(*map(range, query_BRHC.shape[:3])):
        chosen = set(chosen_BRGN[b, r, h // shared].tolist())
        first, last = int(first_BR[b, r]), int(last_BR[b, r])
        seen = [slot for slot in range(first, last) if (slot - first) // block in chosen]
        key, value = key_BFGC[b, seen, h // shared], value_BFGC[b, seen, h // shared]
        weight = torch.exp(key @ query_BRHC[b, r, h] / query_BRHC.shape[3] ** 0.5)
        out.append(weight / weight.sum() @ value if seen else 0 * query_BRHC[b, r, h])
    return torch.stack(out).view(query_BRHC.shape)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param(name, sizes, id=f"{case}-{name}")
        for case, sizes in CALLS.items()
        for name in ("reference", "sdpa")
        if name == "reference" or sdpa.refuses(Inputs(**blocks(**sizes))) is None
    ],
)
def test_it_and_its_gradients_equal_the_loop(name, sizes):
    call = blocks(**sizes)
    expected, expected_grads = gradients(written_out, call)
    with using(name), listening() as heard:
        out, grads = gradients(attend_blocks, call)
    assert heard == [("attend_blocks", name)]
    assert_close(out[0], expected[0])
    for argument, wanted in expected_grads.items():  # absolute too: a row that sees one slot moves no logit
        torch.testing.assert_close(grads[argument], wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["reference", "sdpa"])
def test_chunks_of_rows_change_nothing(name, monkeypatch):
    call = blocks(rows=33, slots=40)
    with using(name):
        whole, whole_grads = gradients(attend_blocks, call)
        for module in (reference, sdpa):
            monkeypatch.setattr(module, "scratch_elements", lambda device: 1)
        pieces, piece_grads = gradients(attend_blocks, call)
    assert_close(pieces[0], whole[0])
    for argument, grad in whole_grads.items():
        assert_close(piece_grads[argument], grad, name=argument, gradient=True)


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


def test_what_does_not_fit_is_named():
    call = blocks()
    with pytest.raises(ValueError, match="block = 0 must be at least 1"):
        attend_blocks(**call | {"block": 0})
    with pytest.raises(ValueError, match="17 slots cannot be those of 11 rows"):
        attend_blocks(**call | {"own": True})
    three = {name: call[name][:, :, :1].repeat(1, 1, 3, 1) for name in ("key_BFGC", "value_BFGC", "chosen_BRGN")}
    with pytest.raises(ValueError, match="3 key and value heads must divide 4 query heads"):
        attend_blocks(**call | three)


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
            parts.append(written_out(q_1, k_1, v_1, torch.zeros_like(last), last, chosen, block_size))
        return torch.cat(parts, dim=1)

    return run


@pytest.mark.parametrize("padding", [0, 3, 17])
@torch.no_grad()
def test_documents_become_sequences_end_to_end(padding, monkeypatch):
    monkeypatch.setattr(fla, "_kernel", stand_in)
    for seed in range(3):
        call = blocks(rows=17, padding=padding, seed=seed)
        assert_close(fla.attend_blocks(Inputs(**call)), written_out(**call))


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what is missing without a GPU")
def test_the_library_says_why_it_cannot_be_used():
    with (
        using("fla"),
        pytest.raises(RuntimeError, match="attend_blocks: cannot run as 'fla': fla runs on CUDA devices"),
    ):
        attend_blocks(**blocks())
    assert fla.refuses(Inputs(**blocks())) == "needs tensors on a GPU, got cpu"
    few = fla._wrong_sizes(Inputs(**blocks()))
    assert few == "needs a power of two of at least 16 query heads for a key head, got 2"
    small = fla._wrong_sizes(Inputs(**blocks(heads=16, groups=1)))
    assert small is not None and small.endswith("a power of two, got 8 and 3")
    assert fla._wrong_sizes(Inputs(**blocks(heads=16, groups=1, channels=32, block=16))) is None


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
