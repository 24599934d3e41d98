"""The Triton kernels of the indexer's loss, over every visible slot and over the selected ones."""

import random
from collections.abc import Iterator

import pytest
import torch
from calls import cast, gradients, indexer
from triton_check import assert_as_good_as_eager, assert_same, each_size, to_device, with_reference, with_triton

from gsm_kernels import indexer_kl

STUDENT = ("index_query_BRJI", "index_weight_BRJ", "index_key_BFI")
SIZES = {
    "several documents": {"rows": 5},
    "one row": {"rows": 1, "padding": 0},
    "no bank": {"ratio": 50, "rows": 2},
    "no rows": {"rows": 0, "padding": 0},
    "more rows than a tile": {"rows": 36, "entries": 43, "heads": 2, "ratio": 1, "batch": 1, "padding": 1},
    "a width that is no power of two": {"heads": 20, "channels": 48, "pairs": 3, "rows": 3, "batch": 1},
    "more slots asked for than there are": {"k": 12, "rows": 3},
    "a window wider than a tile": {"width": 70, "rows": 3, "entries": 80, "batch": 1, "padding": 0},
}
LARGE = {"rows": 300, "entries": 420, "heads": 32, "channels": 128, "pairs": 16, "width": 128, "k": 40}
both = pytest.mark.parametrize("dense", [True, False], ids=["visible", "selected"])


def long_document(call: dict, seen: int) -> dict:
    """The call with one document that is so far along that each row sees the slots of `seen` rows before it."""
    slots, (batch, rows) = call["bank_BFC"].shape[1], call["position_BR"].shape
    last = torch.arange(rows).clamp(max=slots).expand(batch, -1).contiguous()
    position = torch.arange(1000, 1000 + rows).expand(batch, -1).contiguous()
    return {**call, "position_BR": position, "first_BR": (last - seen).clamp(min=0), "last_BR": last}


def assert_agrees(call: dict) -> None:
    """As `triton_check` has it, for a recall that may be NaN: with selected slots, or where no row sees a slot."""

    def run(op):
        def run(**call):
            loss, recall = op(**call)
            recalls.append(recall)
            # A loss near zero is the difference of cross-entropy and entropy, about a nat each, with their roundings:
            # below a nat the limit is an absolute one.
            return 1 + loss

        return run

    recalls, low = [], to_device(cast(call, torch.float32))
    grads = assert_same(run(with_triton(indexer_kl)), run(with_reference(indexer_kl)), low)
    assert all(grad is None for name, grad in grads.items() if name not in STUDENT)
    torch.testing.assert_close(recalls[-1], recalls[0].to(torch.float32), equal_nan=True)


@both
@each_size(SIZES, "several documents", "one row", "no bank", "no rows")
def test_loss_recall_and_gradients_are_the_reference_s(sizes, dense):
    assert_agrees({**indexer(**sizes), "dense": dense})


@pytest.mark.slow
def test_rows_see_more_than_a_tile_of_slots():
    """Ranges that begin and end inside tiles, and tiles that nobody sees."""
    call = long_document(indexer(rows=70, entries=170, ratio=1, batch=1, padding=0, channels=16, pairs=2), seen=9)
    assert_agrees(call)


def test_a_pool_restricts_teacher_and_indexer():
    call = indexer(ratio=1, rows=12, entries=20, batch=1)
    pool = torch.randint(-1, 3, (1, 12, 2), generator=torch.Generator().manual_seed(0))
    assert_agrees({**call, "pool_BRN": pool, "block": 3})


@both
def test_chunks_of_rows_change_nothing(monkeypatch, dense):
    monkeypatch.setattr("gsm_kernels.rows.SCRATCH", 1)
    assert_agrees({**indexer(rows=4), "dense": dense})


def test_a_sink_that_takes_all_mass_teaches_nothing():
    call = indexer(rows=2, batch=1, padding=0)
    call["sink_H"] = torch.full_like(call["sink_H"], 1e4)
    (loss, _), grads = gradients(with_triton(indexer_kl), to_device(cast(call, torch.float32)))
    assert loss == 0 and all((grads[name] == 0).all() for name in STUDENT)


def test_an_odd_width_is_refused_with_the_numbers():
    call = to_device(cast(indexer(channels=160), torch.float32))
    with pytest.raises(RuntimeError, match="even width up to 128, got 4 of width 160"):
        with_triton(indexer_kl)(**call)


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
        assert_agrees(call)
