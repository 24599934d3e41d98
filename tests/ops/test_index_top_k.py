"""index_top_k: ties, gradients, short ranges and scores that are not numbers. test_conformance.py has its results."""

import pytest
import torch
from calls import cast, selection
from check import DEVICE, run_by, to_device
from oracles import naive_pool, naive_top_k

from gsm_kernels import candidate_pool, index_top_k, using
from gsm_kernels.index_top_k import triton


@pytest.mark.parametrize("name", ["reference", "numba", "triton"])
def test_equal_scores_go_to_the_lowest_slots_and_minus_zero_is_zero(name):
    run, key = run_by(name, index_top_k), torch.tensor([[[-1.0], [1.0], [-1.0], [-2.0], [-1.0], [3.0]]])
    first, last = torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), 6)
    query = torch.ones(1, 1, 1, 1)
    call = {"query_BRJI": query, "key_BFI": key, "first_BR": first, "last_BR": last}
    call = {argument: x.to(DEVICE) for argument, x in call.items()}
    weight = torch.ones(1, 1, 1, device=DEVICE)
    negative, positive = run(**call, weight_BRJ=-weight, k=3), run(**call, weight_BRJ=weight, k=4)
    assert negative.tolist() == [[[0, 2, 3]]] and positive.tolist() == [[[0, 1, 2, 5]]]


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


def broken() -> dict:
    """A search with a score that is not a number, by its key, and all of a row's, by its weight."""
    call = cast(selection(), torch.float32)
    call["key_BFI"][0, 1, 0], call["weight_BRJ"][1, 0] = torch.nan, torch.nan
    return to_device(call)


@pytest.mark.parametrize(
    ("name", "group", "span"),
    [("reference", 1, 1), ("numba", 1, 1), ("triton", 1, 1), ("triton", 2, 1), ("triton", 1, 4)],
)
def test_a_slot_whose_score_is_not_a_number_is_never_chosen(name, group, span, monkeypatch):
    monkeypatch.setattr(triton, "ALONE", 0)
    monkeypatch.setattr(triton, "group_size", lambda slots: group)
    monkeypatch.setattr(triton, "span_size", lambda groups, k: span)
    call = broken()
    chosen_BRK = run_by(name, index_top_k)(**call)
    sees = (call["first_BR"][0] <= 1) & (call["last_BR"][0] > 1)
    others = sees & (call["last_BR"][0] - call["first_BR"][0] > 1)
    assert sees.any() and not (chosen_BRK[0] == 1).any() and (chosen_BRK[0, others, 0] >= 0).all()
    assert others.any() and (chosen_BRK[1, 0] == -1).all()
    assert torch.equal(chosen_BRK, naive_top_k(*call.values()).to(DEVICE))


@pytest.mark.parametrize("name", ["reference", "numba", "triton"])
def test_a_score_that_is_not_a_number_is_no_maximum_of_its_block(name):
    call = broken()
    call["blocks"] = call.pop("k")
    assert torch.equal(run_by(name, candidate_pool)(**call, block=2), naive_pool(*call.values(), 2).to(DEVICE))
