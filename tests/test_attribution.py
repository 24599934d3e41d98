"""Rollout, gradients and interventions: each says what it claims to say, and they agree."""

from __future__ import annotations

import pytest
import torch
from small import GEOMETRY, W, assert_same, build, random_tokens

import gsm
from gsm.analysis.attribution import (
    agreement,
    gradient_attribution,
    replacement_attribution,
    spearman,
    z_of,
)
from gsm.analysis.rollout import TAPS, decoder_rollout, encoder_rollout, state_routes
from gsm.models.gsm import GSM

T = 30
CASES = ("gsm-residual=plain", "gsm-retriever=separate_indexer", "gsm-retriever=dense", "gsm-writer=multi_slot")


def gsm_of(case: str) -> GSM:
    model = build(case)
    assert isinstance(model, GSM)
    return model


def routes_of(case: str):
    model = gsm_of(case)
    with torch.no_grad(), gsm.record(*TAPS) as seen:
        model(random_tokens(2, T))
    return model, seen, state_routes(model, seen, sequence=1)


@pytest.mark.parametrize("case", CASES)
def test_shares_sum_to_one_and_nothing_comes_from_later(case: str):
    model, seen, routes = routes_of(case)
    assert routes.names == ("encoder", "stage/1", "stage/2")
    assert_same(routes.total_TT.sum(1), torch.ones(T, dtype=torch.float64), "rows of the state")
    for name, map_TT in (("state", routes.total_TT), ("decoder", decoder_rollout(model, seen, 1))):
        assert_same(map_TT.triu(1), torch.zeros_like(map_TT), f"what {name} has from later positions")
    assert_same(decoder_rollout(model, seen, 1).sum(1), torch.ones(T, dtype=torch.float64), "rows of the decoder")
    assert (routes.share_STT[0].diagonal() > 0).all(), "every entry has something of its own token"


@pytest.mark.parametrize(("writer", "ways"), [("encoder_only", [1, 0, 0]), ("retrieval_only", [0, 1, 1])])
def test_a_way_that_the_writer_does_not_take_has_no_share(writer: str, ways: list[int]):
    _, _, routes = routes_of(f"gsm-writer={writer}")
    assert (routes.way_ST[:, -1] > 0).int().tolist() == ways


def test_without_banks_nothing_arrives_from_beyond_the_windows():
    model = gsm_of("gsm-encoder_reading=window_only")
    with torch.no_grad(), gsm.record(*TAPS) as seen:
        model(random_tokens(1, T))
    reach = GEOMETRY.encoder_layers * (W - 1)
    map_TT = encoder_rollout(model, seen)[-1]
    back_TT = torch.arange(T)[:, None] - torch.arange(T)
    assert_same(map_TT[back_TT > reach], torch.zeros(int((back_TT > reach).sum()), dtype=torch.float64), "too far back")
    assert (map_TT[(back_TT >= 0) & (back_TT <= reach)] > 0).all()
    assert state_routes(model, seen).total_TT[-1, 0] > 0, "but the stages reach the beginning"


def test_the_length_of_the_gradient_is_that_of_the_whole_jacobian():
    model, row = gsm_of("gsm-residual=plain"), 12
    token_T = random_tokens(1, 14)[0]
    with gsm.record("embedding", "state/z", detach=False) as seen:
        model(token_T[None])
    slopes = [torch.autograd.grad(z, seen["embedding"], retain_graph=True)[0][0] for z in seen["state/z"][0, row]]
    slope_ZTD, x_TD = torch.stack(slopes), seen["embedding"][0].detach()
    whole_RT, along_RT = gradient_attribution(model, token_T, [row], directions=200)
    for got_T, want_T in (
        (whole_RT[0], slope_ZTD.square().sum(dim=(0, 2)).sqrt()),
        (along_RT[0], (slope_ZTD * x_TD).sum(dim=2).square().sum(dim=0).sqrt()),
    ):
        assert torch.allclose(got_T, want_T, rtol=0.3, atol=1e-12)


def test_only_earlier_tokens_move_an_entry():
    model, token_T = gsm_of("gsm-residual=plain"), random_tokens(1, T)[0]
    moved_RN = replacement_attribution(model, token_T, [10, 20], [5, 15, 25], (token_T[[5, 15, 25]] + 1)[None] % 23)
    assert_same(moved_RN[[0, 0, 1], [1, 2, 2]], torch.zeros(3, dtype=torch.float64), "later tokens")
    assert (moved_RN[[0, 1, 1], [0, 0, 1]] > 1e-6).all()


def test_a_rank_correlation_is_that_of_the_textbook():
    assert spearman(torch.tensor([1.0, 2, 3, 4]), torch.tensor([10.0, 20, 30, 1000])) == pytest.approx(1)
    assert spearman(torch.tensor([1.0, 2, 3, 4]), torch.tensor([4.0, 3, 2, 1])) == pytest.approx(-1)
    ranks = torch.tensor([[1, 2.5, 2.5, 4], [1, 4, 2, 3]])
    tied = spearman(torch.tensor([0.0, 5, 5, 7]), torch.tensor([1.0, 9, 2, 3]))
    assert tied == pytest.approx(float(torch.corrcoef(ranks)[0, 1]))


def test_a_token_is_never_replaced_by_itself():
    """Of two tokens, a quarter of the second draws had brought the first one back, which moves nothing."""
    found = agreement(gsm_of("gsm-residual=plain"), random_tokens(1, 12)[0] % 2, [11], alphabet=[0, 1], substitutes=1)
    assert (found.attributed["replaced"] > 0).all()


def test_rollout_and_gradients_agree_with_what_replaced_tokens_do():
    model = gsm_of("gsm-residual=plain")
    found = agreement(model, random_tokens(1, 30)[0], rows=[23, 29], substitutes=2, directions=4)
    least = {name: float(value_R.min()) for name, value_R in found.correlation_R.items()}
    assert least["rollout"] > 0.3 and least["gradient"] > 0.4 and least["input_gradient"] > 0.3
    assert str(found).count("from 0.") == 3
    assert z_of(model, random_tokens(2, 5), [1, 3]).shape == (2, 2, GEOMETRY.dim)
