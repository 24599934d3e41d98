"""index_top_k and candidate_pool against sorting every row in Python."""

import pytest
import torch
from calls import cast, integral, selection
from oracles import naive_top_k

from gsm_kernels import index_top_k, listening, using


@pytest.fixture(params=["reference in float64", "reference in float32", "numba in float32"])
def given(request):
    """Makes a call whole, in a dtype, and forces an implementation."""
    name, _, dtype = request.param.split()
    if name == "numba":
        pytest.importorskip("numba")
    with using(name), listening() as heard:
        yield lambda call: cast(integral(call), getattr(torch, dtype))
    assert {implementation for _, implementation in heard} == {name}


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


def test_a_pool_smaller_than_k_does_not_leak(given):
    call = given(selection(k=20, ratio=1, entries=40, rows=30))
    pool = torch.zeros(2, 30, 1, dtype=torch.int64)
    assert torch.equal(index_top_k(**call, pool_BRN=pool, block=2), naive_top_k(*call.values(), pool, 2))
    assert (index_top_k(**call, pool_BRN=pool - 1) == -1).all(), "an empty pool selects nothing"


def test_no_gradient_flows():
    call = selection()
    call["query_BRJI"].requires_grad_()
    assert not index_top_k(**call).requires_grad


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
