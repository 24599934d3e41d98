"""index_top_k: ties, gradients, short ranges and scores that are not numbers. test_conformance.py has its results."""

import pytest
import torch
from calls import cast, selection
from check import DEVICE, run_by

from gsm_kernels import index_top_k, using


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


@pytest.mark.parametrize("name", ["reference", "numba"])
def test_a_score_that_is_not_a_number_leaves_its_rows_without_a_choice(name):
    given = cast(selection(), torch.float32)
    given["key_BFI"][0, 1, 0] = torch.nan
    sees = (given["first_BR"][0] <= 1) & (given["last_BR"][0] > 1)
    with using(name):
        chosen_BRK = index_top_k(**given)
    assert sees.any() and (chosen_BRK[0, sees] == -1).all()
