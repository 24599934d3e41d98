"""A static memory: buffers that keep their place and their shape, which a captured graph can be replayed on.

That it computes the same as a growing one is tested with the growing one, in test_three_ways and test_memory.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small import GEOMETRY, MEMORIES, RATIO, SHALLOW, assert_same, build, choices, comparators, random_tokens
from torch.utils._pytree import tree_leaves

from gsm.cache.memory import _tensors
from gsm.models import base
from gsm.models.base import LanguageModel
from gsm.models.gsm import GSM

SEPARATE = "gsm-retriever=separate_indexer"


def without_values(case: str) -> LanguageModel:
    """A model on PyTorch's meta device, where tensors have shapes alone: whoever asks for a value fails."""
    return build(case, geometry=SHALLOW).to("meta")


def tokens_without_values(length: int) -> torch.Tensor:
    return torch.zeros(2, length, dtype=torch.int64, device="meta")


@torch.no_grad()
def decode_step_without_values(case: str) -> None:
    model = without_values(case)
    memory = model.start(2, capacity=64)
    out = model(tokens_without_values(1), memory=memory)
    assert out.logits.shape == (2, 1, GEOMETRY.vocabulary) and out.memory is memory


@pytest.mark.parametrize("case", [*MEMORIES, *choices("gsm", "feed_forward")])
def test_a_decode_step_never_synchronises(case):
    decode_step_without_values(case)


@pytest.mark.parametrize("case", [name for name in comparators() if name != "nsa"])  # whose blocks are a bank
@torch.no_grad()
def test_a_growing_memory_of_every_token_does_not_synchronise(case):
    model = without_values(case)
    memory = model(tokens_without_values(3), memory=model.start(2)).memory
    assert model(tokens_without_values(1), memory=memory).memory.used == 4


@pytest.mark.parametrize("case", [SEPARATE, *choices("gsm", "feed_forward")])
@torch.no_grad()
def test_a_decode_step_makes_the_same_calls_with_the_same_shapes_at_every_position(case):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Listen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            shapes = [tuple(one.shape) for one in tree_leaves(args) if isinstance(one, torch.Tensor)]
            calls.append((str(func), shapes))
            return func(*args, **(kwargs or {}))

    model, tokens = build(case, geometry=SHALLOW), random_tokens(1, 9)
    memory, steps = model.start(capacity=9), []
    for token in tokens.split(1, dim=1):
        calls: list = []
        with Listen():
            model(token, memory=memory)
        steps.append(calls)
    for position, step in enumerate(steps):
        assert step == steps[0], f"position {position} computes otherwise than position 0"


FAILURES = {
    "more tokens than there is room for": (
        lambda model, tokens, memory: model(tokens[:, :1].expand(2, 11), memory=memory)
    ),
    "targets that are fractions": (lambda model, tokens, memory: model(tokens, memory=memory, targets=tokens.double())),
    "documents that are fractions": (
        lambda model, tokens, memory: model(tokens, memory=memory, documents=tokens.double())
    ),
    "a loss that cannot be computed": (lambda model, tokens, memory: model(tokens, memory=memory, targets=tokens)),
    "a prompt of which the second chunk fails": (
        lambda model, tokens, memory: model.prefill(tokens.where(torch.arange(6) < 4, 999), memory, chunk=4)
    ),
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("case", MEMORIES)
@torch.no_grad()
def test_a_call_is_a_transaction(case, name, monkeypatch):
    """After any failed call, a static memory is unchanged, and the next call computes as if there had been none."""
    model, tokens = build(case), random_tokens(2, 20)
    memory, full = model.start(2, capacity=20), model(tokens).logits
    model(tokens[:, :10], memory=memory)
    with monkeypatch.context() as patch:
        if "loss" in name:
            patch.setattr(base, "linear_cross_entropy", lambda *arguments: 1 / 0)
        with pytest.raises((ValueError, ZeroDivisionError)):
            FAILURES[name](model, tokens[:, 3:9], memory)
    assert memory.used == 10
    assert_same(model(tokens[:, 10:], memory=memory).logits, full[:, 10:], "the call after the one that failed")


@pytest.mark.parametrize("case", MEMORIES)
def test_bytes_depend_on_the_capacity_at_most_and_those_of_state_and_windows_do_not(case):
    model, sizes = build(case, geometry=SHALLOW), {}
    for capacity in (40, 41, 80):
        with torch.no_grad():
            memory = model.start(2, capacity)
            empty = memory.breakdown()
            model(random_tokens(2, 33), memory=memory, rows=1)
        assert memory.breakdown() == empty, "a static memory has grown"
        assert memory.nbytes() == sum(empty.values())
        sizes[capacity] = empty
    fixed = {
        kind for kind in sizes[40] if kind in ("shared_state", "bookkeeping") or kind.endswith(("window", "pending"))
    }
    for kind in fixed:
        assert sizes[40][kind] == sizes[80][kind], f"{kind} depends on the capacity"
    if isinstance(model, GSM):  # what is written and, where there is a reach, what it is made from
        entries = (model.state_size + model.writer.reach) * len(model.writer.parts)
        assert sizes[40]["shared_state"] == 2 * entries * GEOMETRY.entry_dim * 8
    if "encoder_bank" not in sizes[40]:
        return
    ratio = 3 if case == "gsm-ratio=3" else RATIO
    banks, slots = len(SHALLOW.bank_layers), 40 // ratio + 1  # one slot to spare
    assert sizes[40]["encoder_bank"] == 2 * banks * slots * GEOMETRY.entry_dim * 8


@torch.no_grad()
def test_the_dtype_of_a_memory_is_that_of_the_model():
    for dtype in (torch.float32, torch.bfloat16):
        model = build("gsm-writer=additive").to(dtype)
        memory = model.start(capacity=8)
        assert {t.dtype for _, t in _tensors(memory, "")} == {dtype, torch.int64}
        model(random_tokens(1, 8), memory=memory)


def test_a_static_memory_is_refused_while_gradients_are_recorded():
    model, tokens = build("gsm-writer=additive"), random_tokens(1, 5)
    memory = model.start(capacity=10)
    with pytest.raises(ValueError, match="^memory"):
        model(tokens, memory=memory)
    assert memory.used == 0
    with torch.inference_mode():
        model(tokens, memory=memory)
    assert memory.used == 5


def test_a_store_that_changes_its_shape_is_refused_before_any_write():
    memory = replace(build("gsm-writer=additive").start(capacity=10), stages=(torch.zeros(2),))
    after = replace(memory.clone(), document_B=torch.ones(1, dtype=torch.int64), stages=(torch.zeros(3),))
    with pytest.raises(TypeError, match="^bookkeeping"):
        memory.advance(after, tokens=1, single_document=True, rows=1)
    assert memory.document_B.item() == -1 and memory.used == 0
