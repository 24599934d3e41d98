"""score_slots against a loop, and against the scores that the selection was made by."""

import pytest
import torch
from calls import gradients, scoring, selection
from oracles import naive_scores

from gsm_kernels import index_top_k, listening, score_slots
from gsm_kernels.score_slots import reference
from gsm_kernels.testing import assert_close

RAGGED = {
    "several documents": {},
    "one row": {"rows": 1, "padding": 0},
    "no bank": {"ratio": 50},
    "many rows": {"rows": 40, "entries": 43, "ratio": 1},
    "no slot selected": {"k": 0},
}


def oracle(query_BRJI, weight_BRJ, key_BFI, index_BRK):
    score = torch.zeros(index_BRK.shape, dtype=torch.float64)
    for b, r, k in (index_BRK >= 0).nonzero().tolist():
        score[b, r, k] = naive_scores(query_BRJI, weight_BRJ, key_BFI, b, r)[index_BRK[b, r, k]]
    return score


@pytest.mark.parametrize("sizes", RAGGED.values(), ids=RAGGED.keys())
def test_scores_and_their_gradients_equal_the_loop(sizes):
    call = scoring(**sizes)
    with listening() as heard:
        (score,), grads = gradients(score_slots, call)
    (expected,), expected_grads = gradients(oracle, call)
    assert heard == [("score_slots", "reference")]
    assert_close(score, expected)
    for name, grad in expected_grads.items():
        wanted = torch.zeros_like(call[name]) if grad is None else grad
        assert_close(grads[name], wanted, name=f"gradient of {name}", gradient=True)


def test_chunks_of_rows_change_nothing(monkeypatch):
    call = scoring(rows=33, entries=36)
    (whole,), whole_grads = gradients(score_slots, call)
    monkeypatch.setattr(reference, "scratch_elements", lambda device: 1)
    (pieces,), piece_grads = gradients(score_slots, call)
    assert_close(pieces, whole)
    for name, grad in whole_grads.items():
        assert_close(piece_grads[name], grad, name=name, gradient=True)


def test_the_selected_slots_have_the_highest_scores():
    call = selection(ratio=1, k=3, rows=17)
    call["first_BR"] = torch.zeros_like(call["first_BR"])
    every = torch.arange(call["key_BFI"].shape[1]).expand(*call["last_BR"].shape, -1)
    searched = (call["query_BRJI"], call["weight_BRJ"], call["key_BFI"])
    visible = score_slots(*searched, torch.where(every < call["last_BR"][..., None], every, -1))
    hidden = every >= call["last_BR"][..., None]
    best = visible.masked_fill(hidden, -torch.inf).topk(3).values
    chosen = index_top_k(**call)
    scores = score_slots(*searched, chosen).masked_fill(chosen < 0, -torch.inf)
    assert torch.equal(scores.sort(descending=True).values, best) and (chosen >= 0).any()
