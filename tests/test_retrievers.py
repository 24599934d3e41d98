"""Retrievers without a search: they select no, random or all entries. (test_three_ways compares modes.)"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from small import GEOMETRY, RATIO, K, M, W, assert_same, build, random_tokens, variant

import gsm
from gsm.costs.model import cost
from gsm.layers.search import Selection
from gsm.models.schedule import local_reach
from gsm.slots.retriever.base import Retriever
from gsm.slots.retriever.random_topk import NO_ENTRY, draw, mixed

ROWS = mixed(torch.arange(4000))[None]


def drawn(model, tokens, documents=None, stage=1):
    """Return the slots that a stage selects."""
    with torch.no_grad(), gsm.record(f"stage/{stage}/top_k") as seen:
        model(tokens, documents=documents)
    return seen[f"stage/{stage}/top_k"]


def visible(rows: int) -> torch.Tensor:
    """Slots that each row of one document sees."""
    return (torch.arange(rows) + 1) // RATIO


def randomly(seed: int):
    retriever = variant("retriever", "random_topk")
    return build("gsm-writer=additive", retriever=partial(retriever, seed=seed))


def test_all_entries_and_all_pairs_are_drawn_equally_often():
    slots, k = 20, 5
    chosen = draw(ROWS, torch.full_like(ROWS, slots), slots, k)
    member = torch.zeros(ROWS.shape[1], slots).scatter(1, chosen[0], 1.0)
    assert (member.sum(dim=1) == k).all(), "an entry is drawn twice"
    pairs = member.T @ member
    once, twice = k / slots, k * (k - 1) / (slots * (slots - 1))
    for counts, chance in ((pairs.diag(), once), (pairs[~torch.eye(slots, dtype=torch.bool)], twice)):
        deviation = (len(member) * chance * (1 - chance)) ** 0.5
        assert ((counts - len(member) * chance).abs() < 4.5 * deviation).all()


def test_a_row_draws_only_visible_entries():
    count = torch.arange(12)[None]
    chosen = draw(ROWS[:, :12], count, 11, 4)[0]
    for seen, row in zip(count[0].tolist(), chosen.tolist(), strict=True):
        got = [slot for slot in row if slot != NO_ENTRY]
        assert len(got) == min(seen, 4) and row == sorted(set(got)) + [NO_ENTRY] * (4 - len(got))
        assert all(slot < seen for slot in got)


def test_draws_differ_between_rows_stages_and_seeds_and_repeat_otherwise():
    tokens = random_tokens(1, 60)
    first, again, other = (drawn(randomly(seed), tokens)[0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    late = first[40:]
    assert len({tuple(row) for row in late.tolist()}) > 15
    for different in (other[40:], drawn(randomly(0), tokens, stage=2)[0, 40:]):
        assert (late != different).any(dim=1).sum() > 15


def test_a_document_draws_the_same_wherever_it_stands():
    model, tokens = build("gsm-retriever=random_topk"), random_tokens(1, 41)
    alone = drawn(model, tokens[:, 11:])
    packed = drawn(model, tokens, documents=(torch.arange(41) >= 11).long()[None])[:, 11:]
    assert torch.equal(packed, torch.where(alone < 0, -1, alone + 11 // RATIO)) and (alone >= 0).any()


def test_dense_reads_every_visible_entry():
    chosen = drawn(build("gsm-retriever=dense"), random_tokens(1, 31))[0]
    for row, seen in zip(chosen.tolist(), visible(31).tolist(), strict=True):
        assert row == list(range(seen)) + [-1] * (len(row) - seen)


def test_dense_equals_a_selection_of_everything():
    wide = {"geometry": replace(GEOMETRY, top_k=40), "state_size": M}
    dense, shared = (build(f"gsm-retriever={name}", **wide) for name in ("dense", "shared_topk"))
    tokens = random_tokens(2, 40)
    assert_same(dense(tokens).logits, shared(tokens).logits, "dense against Top-K of all entries")


@pytest.mark.parametrize(("name", "reaches"), [("window_only", False), ("random_topk", True), ("dense", True)])
@torch.no_grad()
def test_with_window_only_reading_history_passes_only_through_the_retriever(name, reaches):
    model = build("gsm-encoder_reading=window_only", retriever=variant("retriever", name))
    depth = {"encoder_layers": GEOMETRY.encoder_layers, "decoder_layers": GEOMETRY.decoder_layers}
    length = local_reach(**depth, window=W, state_size=M) + 12
    tokens = random_tokens(1, length)
    full, out, logits = model(tokens).logits, None, []
    for chunk in tokens.split(7, dim=1):
        out = model(chunk, memory=out.memory if out else model.start(capacity=length))
        logits.append(out.logits)
    assert_same(torch.cat(logits, dim=1), full, f"{name}: in chunks")
    changed = tokens.clone()
    changed[:, :6] = (tokens[:, :6] + 1) % GEOMETRY.vocabulary
    moved = (model(changed).logits - full)[:, -6:].abs().max()
    assert (moved > 1e-6) == reaches, f"{name}: tokens beyond everything local move the last logits by {moved:.1e}"


def test_the_cost_of_a_new_retriever_is_known_without_a_list():
    class Newest(Retriever):
        """The last K visible entries."""

        def forward(self, x_BRU, view, position_BR, angles, own):
            slot_BRK = view.bank.last_BR[..., None] - torch.arange(self.top_k, 0, -1)
            return Selection(torch.where(slot_BRK >= view.bank.first_BR[..., None], slot_BRK, -1)), own

    model, like = build("gsm-writer=additive", retriever=Newest), build("gsm-retriever=random_topk")
    assert cost(model).training_flops(41) == cost(like).training_flops(41)
    assert (drawn(model, random_tokens(1, 31))[0] >= 0).sum() == visible(31).clamp(max=K).sum()
