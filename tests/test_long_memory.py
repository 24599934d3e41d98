"""Calls after 64K and 256K tokens, in memories with random contents: reading the tokens would take minutes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small import GEOMETRY, MEMORIES, SHALLOW, M, assert_same, build, random_tokens

from gsm.cache.ledger import Ledger
from gsm.cache.memory import BankCache, DenseCache, Memory, _tensors, map_nodes
from gsm.cache.store import Column, RecurrentState, Window
from gsm.models.baseline import Baseline
from gsm.models.gsm import GSM
from gsm.observe import record

LONG = [65_536, 262_144]


def after(model: Any, tokens: int, batch: int = 1) -> Memory:
    """Return the growing memory of one document of this length, with random contents."""
    memory = model.start(batch)

    def random(empty_BEC: torch.Tensor, entries: int) -> torch.Tensor:
        return empty_BEC.new_empty(batch, entries, empty_BEC.shape[2]).normal_()

    def filled(node: Any) -> Any:
        if isinstance(node, BankCache):
            key = None if node.key is None else filled(node.key)
            count_B = torch.full_like(node.count_B, tokens // node.entry.ratio)
            return BankCache(filled(node.pending), filled(node.entry), key, count_B)
        if isinstance(node, DenseCache):
            return DenseCache(filled(node.entry), torch.full_like(node.count_B, tokens))
        if isinstance(node, Window):
            return replace(node, entry_BEC=random(node.entry_BEC, node.size))
        if isinstance(node, Column):
            return replace(node, value_BFC=random(node.value_BFC, tokens // node.ratio))
        if isinstance(node, RecurrentState):
            node.value_BHRC.normal_(std=node.value_BHRC.shape[-1] ** -0.5)
        return node

    memory.ledger.claim(tokens)
    memory = map_nodes(memory, (BankCache, DenseCache, Window, Column, RecurrentState, Ledger), filled)
    memory.document_B.fill_(0)
    memory.position_B.fill_(tokens - 1)
    return memory


@pytest.mark.parametrize("case", MEMORIES)
@torch.no_grad()
def test_such_a_memory_has_the_shapes_and_counts_of_a_real_one(case):
    model = build(case, geometry=SHALLOW)
    for tokens in (2 * M, 31):
        real = model.prefill(random_tokens(2, tokens), model.start(2), chunk=20).memory
        memory = after(model, tokens, batch=2)
        assert memory.ledger == real.ledger
        for (kind, got), (other, want) in zip(_tensors(memory, ""), _tensors(real, ""), strict=True):
            assert (kind, got.shape, got.dtype) == (other, want.shape, want.dtype)
            assert got.dtype != torch.int64 or torch.equal(got, want), f"a count of {kind or 'the memory'}"


def only(memory: Memory, tokens: int) -> Memory:
    """A growing memory of the last ``tokens`` tokens alone, as if their document had begun there."""

    def cut(node):
        if isinstance(node, Column):
            return Column(node.kind, node.ratio, node.value_BFC[:, node.value_BFC.shape[1] - tokens // node.ratio :])
        if isinstance(node, BankCache):
            key = None if node.key is None else cut(node.key)
            entry = cut(node.entry)
            return BankCache(node.pending, entry, key, torch.full_like(node.count_B, tokens // entry.ratio))
        if isinstance(node, DenseCache):
            return DenseCache(cut(node.entry), torch.full_like(node.count_B, tokens))
        return node

    return map_nodes(memory, (BankCache, DenseCache, Column, Ledger), cut)


@pytest.mark.parametrize("case", MEMORIES)
@pytest.mark.parametrize("read", [LONG[0], pytest.param(LONG[1], marks=pytest.mark.nightly)])
@torch.no_grad()
def test_a_document_that_begins_late_sees_nothing_of_what_lies_before_it(case, read):
    model, tokens, seen = build(case, geometry=SHALLOW), random_tokens(1, 4), 60
    long = after(model, read)
    long.position_B.fill_(seen - 1)
    long.ledger.single_document = False
    want = model(tokens, memory=only(long, seen)).logits
    static = model.start(capacity=read + 4)
    for (_, buffer), (_, value) in zip(_tensors(static, ""), _tensors(long, ""), strict=True):
        buffer[:, : value.shape[1]].copy_(value) if value.ndim > 1 else buffer.copy_(value)
    static.ledger.follow(long.ledger)
    for memory, kind in ((long, "growing"), (static, "static")):
        got = []
        for token in tokens.split(1, dim=1):
            out = model(token, memory=memory)
            memory = out.memory
            got.append(out.logits)
        assert_same(torch.cat(got, dim=1), want, f"{case}: {kind}, {seen} of {read} tokens")


@pytest.mark.parametrize("read", LONG)
@pytest.mark.parametrize("case", ["gsm-retriever=separate_indexer", "baseline-residual=mhc"])
@torch.no_grad()
def test_of_a_long_document_a_step_reads_what_it_has_selected(case, read):
    model, token = build(case), random_tokens(1, 1)
    assert isinstance(model, GSM | Baseline)
    memory = after(model, read)
    with record("*/top_k") as seen:
        want = model(token, memory=memory).logits
    chosen = torch.cat([chosen_BRK.flatten() for chosen_BRK in seen.values()])
    assert (chosen >= 0).all() and chosen.max() > GEOMETRY.top_k + read // 8, "nothing far in was selected"
    # The union of all selections, and a thousand slots that nobody has selected, in their order.
    few = torch.cat([chosen, torch.arange(5, 1005)]).unique()

    def fewer(node):
        if isinstance(node, Column):
            slots = few[few < node.value_BFC.shape[1]]
            return Column(node.kind, node.ratio, node.value_BFC[:, slots])
        if isinstance(node, BankCache):
            key, entry = None if node.key is None else fewer(node.key), fewer(node.entry)
            return BankCache(node.pending, entry, key, torch.full_like(node.count_B, entry.value_BFC.shape[1]))
        return node

    short = map_nodes(memory, (BankCache, Column, Ledger), fewer)
    assert_same(model(token, memory=short).logits, want, f"{case}: {len(few)} slots of {read} tokens")
