"""The Triton kernels of the indexer's loss, over every visible slot and over the selected ones."""

from dataclasses import replace

import pytest
import torch
from calls import cast, gradients, indexer
from check import DEVICE, assert_agrees, to_device, with_triton
from small import SHALLOW, build, random_tokens

from gsm.layers.residual import Plain
from gsm_kernels import indexer_kl, using
from gsm_kernels.indexer_kl import triton

STUDENT = ("index_query_BRJI", "index_weight_BRJ", "index_key_BFI")


def long_document(call: dict, seen: int) -> dict:
    """The call with one document that is so far along that each row sees the slots of `seen` rows before it."""
    slots, (batch, rows) = call["bank_BFC"].shape[1], call["position_BR"].shape
    last = torch.arange(rows).clamp(max=slots).expand(batch, -1).contiguous()
    position = torch.arange(1000, 1000 + rows).expand(batch, -1).contiguous()
    return {**call, "position_BR": position, "first_BR": (last - seen).clamp(min=0), "last_BR": last}


@pytest.mark.slow
def test_rows_see_more_than_a_tile_of_slots():
    """Ranges that begin and end inside tiles, and tiles that nobody sees."""
    call = long_document(indexer(rows=70, entries=170, ratio=1, batch=1, padding=0, channels=16, pairs=2), seen=9)
    assert_agrees(indexer_kl, call)


def test_a_sink_that_takes_all_mass_teaches_nothing():
    call = indexer(rows=2, batch=1, padding=0)
    call["sink_H"] = torch.full_like(call["sink_H"], 1e4)
    (one_above, _), grads = gradients(with_triton(indexer_kl), to_device(cast(call, torch.float32)))
    assert one_above == 1 and all((grads[name] == 0).all() for name in STUDENT)


def test_a_recomputed_block_computes_the_loss_once(monkeypatch):
    called, diverge = [], triton._diverge
    monkeypatch.setattr(triton, "_diverge", lambda *arguments: called.append(1) or diverge(*arguments))
    tokens, learned = random_tokens(1, 12), []
    geometry = replace(SHALLOW, entry_dim=16, index_dim=16)
    for recompute in (False, True):
        model = build("gsm", geometry=geometry, recompute=recompute, residual=Plain).float().to(DEVICE).train()
        called.clear()
        with using("triton"):
            model(tokens.to(DEVICE), documents=torch.zeros_like(tokens, device=DEVICE)).losses["indexer_kl"].backward()
        learned.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        assert called == [1]  # the model has one indexer
    assert learned[0] and learned[0].keys() == learned[1].keys()
    assert all(torch.equal(grad, learned[1][name]) for name, grad in learned[0].items())
