"""Training, pruned prefill, chunked prefill and decode are one computation (oracle 1): equal to 1e-9 for every model
and variant, with a memory that grows (capacity None) and with a static one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from small import (
    LENGTHS,
    MEMORIES,
    SHALLOW,
    M,
    assert_same,
    build,
    cases,
    mostly_slow,
    random_tokens,
)
from torch import Tensor

from gsm.cache.memory import Memory, map_nodes
from gsm.layers.block import Block
from gsm.models.base import LanguageModel


@pytest.mark.parametrize("case", mostly_slow(cases(), *MEMORIES))
@torch.no_grad()
def test_pruned_prefill_equals_the_full_forward_for_any_rows(case):
    """The full forward has a longer text: a row's logits do not depend on later tokens."""
    model, tokens = build(case, geometry=SHALLOW), random_tokens(2, LENGTHS[-1])
    full = model(tokens).logits
    for length in LENGTHS:
        for rows in (1, 2, M + 3):
            if rows <= length:
                pruned = model(tokens[:, :length], rows=rows).logits
                assert_same(pruned, full[:, length - rows : length], f"{case}, {length} tokens, {rows} rows")


@torch.no_grad()
def test_a_memory_references_no_tensor_of_the_caller():
    model, documents = build("gsm-writer=additive"), torch.zeros(1, 1, dtype=torch.int64)
    memory = model(random_tokens(1, 1), documents=documents, memory=model.start()).memory
    documents.fill_(1)
    assert memory.document_B.item() == 0


@pytest.mark.parametrize("case", mostly_slow(cases(), *MEMORIES))
@pytest.mark.parametrize("capacity", [None, 41])
def test_prefill_in_chunks_equals_one_prefill(case: str, capacity: int | None):
    """Logits, memories and the number of rows of every block are equal."""
    model, tokens = build(case, geometry=SHALLOW), random_tokens(2, 41)
    start = partial(model.start, batch=2, capacity=capacity)
    with rows_of_blocks(model) as at_once:
        whole = model.prefill(tokens, start())
    assert not whole.hidden_BRD.requires_grad, "prefill records gradients"
    for chunk in (1, 7, 16, 40):
        with rows_of_blocks(model) as rows:
            part = model.prefill(tokens, start(), chunk=chunk)
        assert rows == at_once, f"in chunks of {chunk}"
        assert_same(part.logits, whole.logits, f"prefill in chunks of {chunk}")
        assert part.memory is not None and whole.memory is not None
        assert part.memory.breakdown() == whole.memory.breakdown()
        for kept, wanted in zip(tensors(part.memory), tensors(whole.memory), strict=True):
            assert_same(kept, wanted, f"memory after prefill in chunks of {chunk}")


def tensors(memory: Memory) -> list[Tensor]:
    """All that a memory is made of."""
    found: list[Tensor] = []
    map_nodes(memory, (Tensor,), lambda one: found.append(one) or one)
    return found


@contextmanager
def rows_of_blocks(model: LanguageModel) -> Iterator[Counter[str]]:
    """Rows that each block computes inside, by its name."""
    counted: Counter[str] = Counter()
    blocks = {name: part for name, part in model.named_modules() if isinstance(part, Block)}

    def counting(name: str, one: Block):
        return one.register_forward_pre_hook(lambda _, given: counted.update({name: given[1].rows}))

    hooks = [counting(name, one) for name, one in blocks.items()]
    try:
        yield counted
    finally:
        for hook in hooks:
            hook.remove()


def test_rows_below_one_with_a_memory():
    model, tokens = build("gsm-writer=additive"), random_tokens(1, 5)
    out = model(tokens, memory=model.start(), rows=0)
    assert out.logits.shape == (1, 0, model.vocabulary) and out.memory.used == 5


@pytest.mark.parametrize("capacity", [None, 20])
@torch.no_grad()
def test_rows_that_an_earlier_call_pruned_are_refused(capacity: int | None):
    """Their prerequisites were not computed, so without the error they would be silently wrong."""
    model, tokens = build("gsm-writer=additive"), random_tokens(1, 12)
    memory = model(tokens[:, :6], memory=model.start(capacity=capacity), rows=1 - 4).memory
    with pytest.raises(ValueError, match="^rows .*9.* 6"):
        model(tokens[:, 6:10], memory=memory)
    out = model(tokens[:, 6:10], memory=memory, rows=1)
    assert_same(out.logits, model(tokens[:, :10], rows=1).logits, "the row that was wanted")
    assert_same(model(tokens[:, 10:], memory=out.memory).logits, model(tokens, rows=2).logits, "and those after it")


@pytest.mark.parametrize("case", ["gsm-retriever=separate_indexer", "gsm-feed_forward=moe", "baseline"])
@pytest.mark.parametrize("how", [True, "selective"])
def test_recomputing_activations_changes_no_gradient(case: str, how: bool | str):
    tokens = random_tokens(2, 20)
    gradients = []
    for recompute in (False, how):
        model = build(case, geometry=SHALLOW, recompute=recompute).train()
        out = model(tokens, targets=tokens)
        (out.loss + sum(out.losses.values())).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, plain in gradients[0].items():
        assert_same(gradients[1][name], plain, f"gradient of {name}", 1e-12)
