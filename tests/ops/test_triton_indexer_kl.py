"""The Triton kernels of the indexer's loss, over every visible slot and over the selected ones."""

import random
from collections.abc import Iterator

import pytest
import torch
from calls import cast, gradients, indexer
from check import assert_agrees, assert_as_good_as_eager, to_device, with_triton

from gsm_kernels import indexer_kl

STUDENT = ("index_query_BRJI", "index_weight_BRJ", "index_key_BFI")
LARGE = {"rows": 300, "entries": 420, "heads": 32, "channels": 128, "pairs": 16, "width": 128, "k": 40}
both = pytest.mark.parametrize("dense", [True, False], ids=["visible", "selected"])


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


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [LARGE, {**LARGE, "heads": 64, "ratio": 1}, {**LARGE, "heads": 4, "channels": 64}])
def test_in_bfloat16_it_errs_no_more_than_eager(sizes):
    assert_as_good_as_eager(indexer_kl, indexer(**sizes))


LEARNT = [  # heads, channels and pairs, which kernels are compiled for; from how many rows on and up to how many
    (1, 32, 8, (1, 16)),
    (4, 48, 3, (17, 60)),
    (9, 2, 1, (17, 60)),
    (20, 128, 16, (17, 200)),
    (39, 32, 8, (17, 200)),
]


def random_calls(dense: bool) -> Iterator[dict]:
    draw = random.Random(0)
    for heads, channels, pairs, rows in LEARNT:
        for seed in range(20):
            sizes = {"rows": draw.randint(*rows), "k": draw.randint(1, 50), "ratio": draw.randint(1, 2)}
            sizes |= {"heads": heads, "channels": channels, "pairs": pairs, "entries": sizes["rows"] + 30}
            yield {**indexer(**sizes, seed=seed), "dense": dense}


@pytest.mark.gpu
@both
def test_random_shapes(dense):
    for call in random_calls(dense):
        assert_agrees(indexer_kl, call)
