"""Any sequence of calls on a memory gives the rows of one call on the whole text.

Hypothesis draws the calls: chunks and rows, prefills, clones, marks and rewinds, buffers that take over others, and
sequences that are repeated; with memories that grow and static ones, left padding, and documents that differ between
sequences. `GSM_FUZZ=1000 make test ARGS="-k any_sequence"` draws more; a failure prints the shortest calls that fail.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from small import MEMORIES, SHALLOW, K, M, W, assert_same, build, variant

from gsm.cache.memory import Memory, _tensors
from gsm.models.base import LanguageModel

EXAMPLES = -(-int(os.environ.get("GSM_FUZZ", "100")) // len(MEMORIES))  # sequences of calls for each model
CALLS = 14  # in a sequence, at most
CHECKS: Any = list(HealthCheck)
# Every run draws the same, and nothing is kept on disk.
DRAWING = settings(
    max_examples=EXAMPLES,
    stateful_step_count=CALLS,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=CHECKS,
)


@cache
def model_of(case: str) -> LanguageModel:
    return build(case, geometry=SHALLOW, residual=variant("residual", "plain"))


@st.composite
def documents(draw: st.DrawFn, length: int) -> list[int]:
    """Ids of one sequence: sometimes padding on the left, then documents of random lengths; an id may occur again."""
    ids = [-1] * draw(st.sampled_from((0, 0, 1, length // 2)))
    while len(ids) < length:
        ids += [draw(st.integers(0, 2))] * draw(st.sampled_from((length, 1, 2, W, M, 2 * M)))
    return ids[:length]


def places(memory: Memory) -> list[int]:
    """Return the addresses of a memory's buffers."""
    return [tensor.data_ptr() for _, tensor in _tensors(memory, "") if tensor.numel()]


class Calls(RuleBasedStateMachine):
    """One memory, the text that it reads, and the logits of one call on all of it."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.model = model_of(case)

    @initialize(data=st.data(), batch=st.integers(1, 3), length=st.sampled_from((2 * M + 3, 30, M + 1, K)))
    @torch.no_grad()
    def start(self, data: st.DataObject, batch: int, length: int) -> None:
        self.tokens = torch.randint(
            SHALLOW.vocabulary, (batch, length), generator=torch.Generator().manual_seed(length)
        )
        self.documents = torch.tensor([data.draw(documents(length)) for _ in range(batch)])
        self.want = self.model(self.tokens, self.documents).logits
        capacity = data.draw(st.sampled_from((None, length, length + 5)))
        self.memory, self.done = self.model.start(batch, capacity), 0
        self.marks = []  # (mark, tokens that it has read), in ascending order

    def left(self) -> bool:
        return self.done < self.tokens.shape[1]

    def read(self, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
        part = slice(self.done, self.done + min(chunk, self.tokens.shape[1] - self.done))
        return self.tokens[:, part], self.documents[:, part]

    def check(self, out, tokens: torch.Tensor) -> None:
        """The rows of real tokens, the count, and the places of a static memory's buffers."""
        before = places(self.memory)
        self.memory, self.done = out.memory, self.done + tokens.shape[1]
        assert self.memory.capacity is None or places(self.memory) == before, "a buffer has moved"
        assert self.memory.used == self.done
        rows = slice(self.done - out.logits.shape[1], self.done)
        real = self.documents[:, rows] >= 0
        assert_same(out.logits[real], self.want[:, rows][real], f"{self.done} tokens, capacity {self.memory.capacity}")

    @precondition(left)
    @rule(chunk=st.sampled_from((1, 2, 3, W, W + 1, M, 2 * M)), rows=st.sampled_from((1, 2, M + 3, 2 * M)))
    @torch.no_grad()
    def append(self, chunk: int, rows: int) -> None:
        tokens, ids = self.read(chunk)
        rows = min(rows, tokens.shape[1])
        self.check(self.model(tokens, documents=ids, memory=self.memory, rows=rows), tokens)

    @precondition(left)
    @rule()
    @torch.no_grad()
    def decode(self) -> None:
        tokens, ids = self.read(1)
        self.check(self.model(tokens, documents=ids, memory=self.memory), tokens)

    @precondition(left)
    @rule(length=st.integers(1, 30), chunk=st.sampled_from((1, 3, W, 2 * M)))
    @torch.no_grad()
    def prefill(self, length: int, chunk: int) -> None:
        tokens, ids = self.read(length)
        one_document = self.done == 0 and bool((ids == ids[:, :1]).all() and (ids >= 0).all())
        documents = None if one_document else ids
        self.check(self.model.prefill(tokens, self.memory, chunk=chunk, documents=documents), tokens)

    @rule()
    @torch.no_grad()
    def clone(self) -> None:
        """Go on with a clone, and spoil the original where a call may change it."""
        original, self.memory = self.memory, self.memory.clone()
        if original.capacity is None or original.used < original.capacity:
            self.model(self.tokens[:, :1], memory=original)
        self.marks = []  # of the original: their slots are now those of another text

    @precondition(lambda self: self.memory.capacity is not None)
    @rule()
    @torch.no_grad()
    def load(self) -> None:
        """Buffers that have read another text take this memory over."""
        other = self.model.start(self.memory.batch, self.memory.capacity)
        self.model(self.tokens.flip(1), memory=other, rows=1)
        before = places(other)
        other.load(self.memory)
        assert places(other) == before, "a buffer has moved"
        self.memory, self.marks = other, []

    @rule()
    def mark(self) -> None:
        point = self.memory if self.memory.capacity is None else self.memory.mark()
        self.marks.append((point, self.done))

    @precondition(lambda self: self.marks)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.marks) - 1))
        mark, self.done = self.marks[number]
        del self.marks[number + 1 :]
        if self.memory.capacity is None:
            self.memory = mark
        else:
            self.memory.rewind(mark)
        assert self.memory.used == self.done

    @precondition(lambda self: len(self.tokens) < 4)
    @rule()
    @torch.no_grad()
    def expand(self) -> None:
        """Repeat every sequence, and spoil the original where a call may change it."""
        original, self.memory, self.marks = self.memory, self.memory.expand(2), []
        assert self.memory.nbytes() == 2 * original.nbytes()
        if original.capacity is None or original.used < original.capacity:
            self.model(self.tokens[:, :1], memory=original)
        self.tokens, self.documents, self.want = (
            x.repeat_interleave(2, 0) for x in (self.tokens, self.documents, self.want)
        )


@pytest.mark.parametrize("case", MEMORIES)
def test_any_sequence_of_calls_equals_one_call_on_the_whole_text(case):
    machine: Any = lambda: Calls(case)  # noqa: E731
    run_state_machine_as_test(machine, settings=DRAWING)
