"""The indexer's Triton kernels: selection on whole numbers, where scores are exact and tie, and scores of slots."""

import pytest
import torch
from calls import cast, integral, scoring, selection
from check import (
    assert_agrees,
    gradients,
    to_device,
    with_reference,
    with_triton,
)
from oracles import normal

from gsm_kernels import index_top_k, inverse, score_slots
from gsm_kernels.index_top_k import triton
from gsm_kernels.inverse import add_segments, inverse_index
from gsm_kernels.rows import Rows, lines_of, row_chunks

nightly = pytest.mark.nightly  # Triton's interpreter is


@pytest.fixture(autouse=True)
def in_spans(monkeypatch):
    """As where there are many rows: few are enough for the kernel that chooses among spans first."""
    monkeypatch.setattr(triton, "ALONE", 0)


def searching(batch=1, rows=3, slots=300, heads=2, width=16, k=7, seed=0, low=0, scale=1.0) -> dict:
    """A search of one long document: every row sees the slots from `low` to a place of its own."""
    last = torch.randint(low, slots + 1, (batch, rows), generator=torch.Generator().manual_seed(seed))
    last[0, 0] = slots
    call = {
        "query_BRJI": normal(batch, rows, heads, width, seed=seed),
        "weight_BRJ": normal(batch, rows, heads, seed=seed + 1),
        "key_BFI": normal(batch, slots, width, seed=seed + 2),
        "first_BR": torch.full_like(last, low),
        "last_BR": last,
        "k": k,
    }
    return to_device(
        cast(
            integral({k: scale * x if torch.is_tensor(x) and x.is_floating_point() else x for k, x in call.items()}),
            torch.float32,
        )
    )


def assert_same_slots(op, call: dict) -> None:
    assert torch.equal(with_triton(op)(**call), with_reference(op)(**call))


def as_pool(call: dict, blocks: int, block: int) -> dict:
    return {**{name: x for name, x in call.items() if name != "k"}, "blocks": blocks, "block": block}


@pytest.mark.parametrize(
    "scale", [0.5, pytest.param(3.0, marks=nightly)], ids=["nearly all scores tie", "few scores tie"]
)
@pytest.mark.parametrize("groups", [pytest.param(8, marks=nightly), 16, pytest.param(64, marks=nightly)])
def test_groups_lose_no_slot(monkeypatch, groups, scale):
    """Slots enough for groups of neighbours, as a long context has them."""
    monkeypatch.setattr(triton, "GROUPS", groups)
    assert_same_slots(index_top_k, searching(batch=2, low=11, scale=scale))


@pytest.mark.parametrize("groups", [16, 8192])
def test_a_pool_narrows_the_choice(monkeypatch, groups):
    monkeypatch.setattr(triton, "GROUPS", groups)
    call = searching(slots=150, low=5)
    pool = torch.randint(-1, 40, (1, 3, 6), generator=torch.Generator().manual_seed(0))
    assert_same_slots(index_top_k, {**call, **to_device({"pool_BRN": pool}), "block": 3})


def test_every_chunk_has_its_rows_once(monkeypatch):
    monkeypatch.setattr("gsm_kernels.rows.SCRATCH", 1000)
    for batch, rows, per_row in [(3, 9, 1), (3, 9, 100), (2, 300, 7), (1, 1, 10_000), (2, 0, 5), (0, 4, 5)]:
        parts = list(row_chunks((batch, rows), per_row))
        row = torch.arange(batch * rows)[:, None].view(batch, rows, 1)
        assert torch.equal(
            torch.cat([lines_of(row, part) for part in parts] + [row.flatten(0, 1)[:0]]), row.flatten(0, 1)
        )
        assert all(p.lines * per_row <= 1000 or p.lines == 1 for p in parts)


@pytest.mark.parametrize("groups", [128, 8192])
def test_rows_that_see_fewer_spans_than_they_choose(monkeypatch, groups):
    """What no span was chosen for names no group, and takes no room from those that there are."""
    monkeypatch.setattr(triton, "GROUPS", groups)
    call = searching(rows=9, slots=256, k=4)
    call["first_BR"].zero_()
    call["last_BR"][:] = torch.tensor([0, 1, 3, 4, 5, 9, 17, 33, 256])
    assert triton.span_size(256 // triton.group_size(256), 4) > 1
    assert_same_slots(index_top_k, call)


@pytest.mark.parametrize("sizes", [{"k": 2}, {"rows": 1, "k": 2}, {"k": 20, "rows": 4}], ids=str)
def test_few_rows_choose_among_all_groups_at_once(monkeypatch, sizes):
    monkeypatch.setattr(triton, "ALONE", 132)
    assert_same_slots(index_top_k, to_device(cast(selection(**sizes), torch.float32)))


def test_a_span_is_as_long_as_leaves_least_to_look_at():
    for groups, k, span in ((8192, 128, 8), (8192, 512, 4), (8192, 8, 32), (256, 128, 1), (1024, 128, 1), (16, 1, 4)):
        assert triton.span_size(groups, k) == span, (groups, k)


def test_a_slot_gets_the_sum_of_its_places():
    """Slots chosen by several rows, twice by one, and by none, which keeps what it had."""
    index = torch.tensor([[[2, 0], [-1, 2]], [[2, 2], [1, -1]]])
    values = torch.tensor([1.0, 2, 4, 8, 16, 32, 64, 128])[:, None].expand(8, 3).contiguous()
    moved = to_device({"into": torch.ones(8, 3), "values": values, "index": index})
    add_segments(moved["into"], moved["values"], inverse_index(moved["index"], 4))
    assert moved["into"][:, 2].tolist() == [3, 1, 10, 1, 1, 65, 49, 1]


@pytest.mark.parametrize("most", [2, 16, 512])
def test_a_slot_that_every_row_picks_is_added_up_in_parts(monkeypatch, most):
    """No program reads more than MOST places; the sums are those of one program."""
    monkeypatch.setattr(inverse, "MOST", most)
    index = torch.randint(-1, 7, (2, 40, 3))
    index[:, :, 0] = 5  # in every row
    values = torch.randint(-8, 8, (240, 6)).float()
    moved = to_device({"into": torch.zeros(14, 6), "values": values, "index": index})
    found = inverse_index(moved["index"], 7)
    parts = found.first.diff()
    assert parts.sum() <= found.slot.numel() and (found.start.diff() <= parts * most).all()
    add_segments(moved["into"], moved["values"], found)
    slot = torch.where(index < 0, 14, index + torch.tensor([0, 7])[:, None, None]).flatten()
    expected = torch.zeros(15, 6).index_add_(0, slot, values)[:14]
    assert torch.equal(moved["into"].cpu(), expected)


def times_sorted(monkeypatch) -> list[int]:
    times, sort = [], torch.sort
    monkeypatch.setattr(torch, "sort", lambda *args, **options: (times.append(1), sort(*args, **options))[1])
    return times


def test_a_selection_is_sorted_once_for_all_who_read_it(monkeypatch):
    """Again where its numbers have changed, and nothing is kept of what they were."""
    call = to_device(cast(scoring(rows=5), torch.float32))
    gradients(with_triton(score_slots), call)  # what is built ahead of it sorts, too, and nobody reads that
    inverse.forget()
    times = times_sorted(monkeypatch)
    for _ in range(3):
        gradients(with_triton(score_slots), call)
    assert len(times) == 1
    for number in range(2, 5):
        call["index_BRK"].copy_(call["index_BRK"].flip(1))
        assert_agrees(score_slots, call)
        assert len(times) == number and len(inverse._cache[call["index_BRK"]][1]) == 1
    inverse.forget()
    gradients(with_triton(score_slots), call)
    assert len(times) == 5


def test_what_a_compiled_graph_puts_into_one_tensor_after_the_other_is_sorted_each_time(monkeypatch):
    """It says nothing of it, neither by another tensor nor by its version. Inference tensors have none to ask for."""
    times, index = times_sorted(monkeypatch), torch.tensor([[[0, 1]], [[1, 1]]])
    for _ in range(2):
        inverse_index(index, 2)
    assert len(times) == 2
    with torch.inference_mode():
        index = torch.tensor([[[0, 1]]])
    with inverse.keeping():
        assert inverse_index(index, 2).order.tolist() == [0, 1]


def test_of_many_chunks_only_some_are_kept(monkeypatch):
    times, index = times_sorted(monkeypatch), torch.zeros(1, 20, 1, dtype=torch.int64)
    for _ in range(2):
        with inverse.keeping():
            for row in range(20):
                assert inverse_index(index, 3, Rows(0, 1, row, 1)).start.tolist() == [0, 1, 1, 1]
    assert len(times) == 20 + 20 - inverse.KEPT


SEARCHED = [  # heads, width, k, rows and slots; a tile has 16 rows or 64, and groups begin at 8,193 slots
    *((1, 1, 1, 16, 15), (2, 16, 7, 100, 64), (5, 24, 20, 9, 255), (16, 128, 128, 99, 512), (64, 8, 50, 64, 1000)),
    *((8, 64, 100, 96, 2048), (3, 100, 33, 5, 4000), (12, 80, 128, 31, 8192), (8, 64, 128, 96, 16_384)),
    *((7, 33, 5, 3, 9001), (8, 64, 128, 16, 20_000), (13, 127, 65, 77, 16_385)),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "width", "k", "rows", "slots"), SEARCHED)
def test_in_bfloat16_searches_of_all_sizes_find_the_same_slots(heads, width, k, rows, slots):
    """On whole numbers bfloat16 is exact as well."""
    for low in (0, 7):
        call = searching(rows=rows, slots=slots, heads=heads, width=width, k=k, seed=slots, low=low)
        assert_same_slots(index_top_k, cast(call, torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 200])
def test_the_longest_bank(rows):
    assert_same_slots(index_top_k, searching(rows=rows, slots=262_145, heads=8, width=64, k=128))
