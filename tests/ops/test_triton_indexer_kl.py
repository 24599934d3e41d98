"""The Triton kernels of the indexer's loss, over every visible slot and over the selected ones."""

import pytest
import torch
from calls import cast, gradients, indexer
from check import assert_agrees, to_device, with_triton

from gsm_kernels import indexer_kl

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
