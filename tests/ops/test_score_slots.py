"""score_slots against a loop, and against the scores that the selection was made by."""

import torch
from calls import selection

from gsm_kernels import index_top_k, score_slots


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
