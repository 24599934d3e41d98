"""index_top_k and candidate_pool against sorting every row in Python."""

import pytest
import torch
from calls import cast, selection
from oracles import naive_pool, naive_top_k

from gsm_kernels import candidate_pool, index_top_k, listening, using
from gsm_kernels.index_top_k import reference

RAGGED = {
    "fewer slots than k": {"k": 20},
    "several documents": {"k": 2},
    "one row": {"rows": 1, "k": 2},
    "no bank": {"ratio": 50},
    "one slot per token": {"ratio": 1, "k": 3, "entries": 40, "rows": 30},
}


def integral(call: dict) -> dict:
    """Small whole numbers: scores are exact and tie all the time."""
    return {k: v.round() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in call.items()}


@pytest.fixture(params=["reference in float64", "reference in float32", "numba in float32"])
def given(request):
    """Makes a call whole, in a dtype, and forces an implementation."""
    name, _, dtype = request.param.split()
    if name == "numba":
        pytest.importorskip("numba")
    with using(name), listening() as heard:
        yield lambda call: cast(integral(call), getattr(torch, dtype))
    assert {implementation for _, implementation in heard} == {name}


@pytest.mark.parametrize("sizes", RAGGED.values(), ids=RAGGED.keys())
def test_it_is_the_sorted_top_k_with_ties_to_the_lowest(sizes, given):
    call = given(selection(**sizes))
    index = index_top_k(**call)
    assert index.dtype == torch.int64 and torch.equal(index, naive_top_k(*call.values()))


@pytest.mark.parametrize("spread", [1, 1e6])
def test_among_many_slots_it_is_the_sorted_top_k_with_and_without_ties(spread, given):
    call = selection(k=5, ratio=1, entries=300, rows=40, padding=0, heads=3)
    call = given({**call, "key_BFI": call["key_BFI"] * spread})
    assert torch.equal(index_top_k(**call), naive_top_k(*call.values()))


def test_equal_scores_go_to_the_lowest_slots_and_minus_zero_is_zero():
    key = torch.tensor([[[-1.0], [1.0], [-1.0], [-2.0], [-1.0], [3.0]]])
    first, last = torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), 6)
    query = torch.ones(1, 1, 1, 1)
    negative = index_top_k(query, -torch.ones(1, 1, 1), key, first, last, 3)
    positive = index_top_k(query, torch.ones(1, 1, 1), key, first, last, 4)
    assert negative.tolist() == [[[0, 2, 3]]] and positive.tolist() == [[[0, 1, 2, 5]]]


@pytest.mark.parametrize("seed", range(3))
def test_a_pool_narrows_the_choice(seed, given):
    call = given(selection(k=3, ratio=1, entries=40, rows=30, seed=seed))
    pool = torch.randint(-1, 4, (2, 30, 2), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(index_top_k(**call, pool_BRN=pool, block=3), naive_top_k(*call.values(), pool, 3))


def test_a_pool_smaller_than_k_does_not_leak(given):
    call = given(selection(k=20, ratio=1, entries=40, rows=30))
    pool = torch.zeros(2, 30, 1, dtype=torch.int64)
    assert torch.equal(index_top_k(**call, pool_BRN=pool, block=2), naive_top_k(*call.values(), pool, 2))
    assert (index_top_k(**call, pool_BRN=pool - 1) == -1).all(), "an empty pool selects nothing"


@pytest.mark.parametrize("sizes", RAGGED.values(), ids=RAGGED.keys())
@pytest.mark.parametrize("block", [2, 3])
def test_candidate_pool_is_the_best_blocks_and_the_newest(sizes, block, given):
    call = given(selection(**sizes))
    call.pop("k")
    pool = candidate_pool(**call, blocks=2, block=block)
    assert torch.equal(pool, naive_pool(*call.values(), 2, block))


def test_chunks_of_rows_change_nothing(monkeypatch, given):
    call = given(selection(k=3, ratio=1, entries=40, rows=30))
    whole = index_top_k(**call)
    monkeypatch.setattr(reference, "scratch_elements", lambda device: 1)
    assert torch.equal(index_top_k(**call), whole)


def test_the_number_of_threads_changes_nothing(given):
    before, call = torch.get_num_threads(), given(selection(k=3, ratio=1, entries=400, rows=300))
    try:
        torch.set_num_threads(1)
        alone = index_top_k(**call)
        torch.set_num_threads(3)
        assert torch.equal(index_top_k(**call), alone)
    finally:
        torch.set_num_threads(before)


def test_no_gradient_flows():
    call = selection()
    call["query_BRJI"].requires_grad_()
    assert not index_top_k(**call).requires_grad


def test_a_k_of_zero_is_refused():
    with pytest.raises(ValueError, match="k = 0 and block = 8 must be at least 1"):
        index_top_k(**{**selection(), "k": 0})


@pytest.mark.parametrize("name", ["reference", "numba"])
def test_ranges_in_32_bits_are_those_in_64(name):
    given = cast(selection(), torch.float32)
    short = {**given, **{key: given[key].int() for key in ("first_BR", "last_BR")}}
    with using(name):
        assert torch.equal(index_top_k(**short).long(), index_top_k(**given))


@pytest.mark.parametrize("name", ["reference", "numba"])
def test_a_score_that_is_not_a_number_leaves_its_rows_without_a_choice(name):
    given = cast(selection(), torch.float32)
    given["key_BFI"][0, 1, 0] = torch.nan
    sees = (given["first_BR"][0] <= 1) & (given["last_BR"][0] > 1)
    with using(name):
        chosen_BRK = index_top_k(**given)
    assert sees.any() and (chosen_BRK[0, sees] == -1).all()
