"""Whatever a user does with a memory, he gets the rows of the full forward: random chunks and rows, documents that
differ between sequences, left padding, clones and repeated sequences, with growing and static memories.

`GSM_FUZZ=1000 make test ARGS="-k random_sequence"` draws as many sequences of calls; a failure names its seed.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from small import MEMORIES, SHALLOW, K, M, W, assert_same, build, variant
from torch import Tensor

from gsm.cache.memory import Memory
from gsm.models.base import LanguageModel

SEQUENCES = int(os.environ.get("GSM_FUZZ", "30"))
PARTS = 6  # so that several processes can share the work


@cache
def model_of(case: str) -> LanguageModel:
    return build(case, geometry=SHALLOW, residual=variant("residual", "plain"))


@dataclass
class Play:
    """One memory, what it has read, and what the full forward says about it."""

    tokens: Tensor
    documents: Tensor
    want: Tensor
    memory: Memory
    done: int = 0

    @staticmethod
    def draw(model: LanguageModel, draw: random.Random) -> Play:
        batch, length = draw.randint(1, 3), draw.choice((K, M + 1, 2 * M + 3, 30))
        tokens = torch.tensor([[draw.randrange(SHALLOW.vocabulary) for _ in range(length)] for _ in range(batch)])
        documents = torch.tensor([random_documents(length, draw) for _ in range(batch)])
        capacity = draw.choice((None, length, length + draw.randrange(9)))
        return Play(tokens, documents, model(tokens, documents).logits, model.start(batch, capacity))

    def call(self, model: LanguageModel, draw: random.Random) -> str:
        """Reads the next chunk, and compares the rows asked for, padding left out. Returns what was done."""
        left = self.tokens.shape[1] - self.done
        chunk = min(draw.choice((1, 1, 2, 3, W, W + 1, M, 2 * M)), left)
        rows = draw.choice((1, chunk, min(2, chunk), min(M + 3, chunk)))
        part = slice(self.done, self.done + chunk)
        out = model(self.tokens[:, part], documents=self.documents[:, part], memory=self.memory, rows=rows)
        self.memory, self.done = out.memory, self.done + chunk
        what = f"{chunk} tokens up to {self.done}, {rows} rows, capacity {self.memory.capacity}"
        asked = slice(self.done - rows, self.done)
        real = self.documents[:, asked] >= 0
        assert_same(out.logits[real], self.want[:, asked][real], what)
        return what

    def fork(self, model: LanguageModel, draw: random.Random) -> str:
        """Goes on with a clone, and spoils the original where a call may change it."""
        spoilt, self.memory = self.memory, self.memory.clone()
        if spoilt.capacity is None or spoilt.used < spoilt.capacity:
            model(self.tokens[:, :1], memory=spoilt)
        return "clone"

    def repeat(self, model: LanguageModel, draw: random.Random) -> str:
        """Goes on with every sequence twice."""
        self.memory = self.memory.expand(2)
        self.tokens, self.documents, self.want = (
            x.repeat_interleave(2, 0) for x in (self.tokens, self.documents, self.want)
        )
        return "expand"


def random_documents(length: int, draw: random.Random) -> list[int]:
    """Ids of one sequence: padding on the left now and then, then documents of random lengths, whose ids may return."""
    ids = [-1] * draw.choice((0, 0, 1, draw.randrange(length)))
    while len(ids) < length:
        ids += [draw.randrange(3)] * draw.choice((1, 2, W, M, 2 * M, length))
    return ids[:length]


@torch.no_grad()
def play(seed: int) -> None:
    """One sequence of calls, all of it drawn from the seed."""
    draw = random.Random(seed)
    case = draw.choice(MEMORIES)
    model, story = model_of(case), [case]
    try:
        game = Play.draw(model, draw)
        while game.done < game.tokens.shape[1]:
            move = draw.choices((game.call, game.fork, game.repeat), (8, 1, 1 if len(game.tokens) < 4 else 0))[0]
            story.append(move(model, draw))
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error}; after " + "; ".join(story)) from error


@pytest.mark.parametrize("part", range(PARTS))
def test_a_random_sequence_of_calls_equals_the_full_forward(part):
    for seed in range(part, max(SEQUENCES, PARTS), PARTS):
        play(seed)


def test_a_failure_names_its_seed(monkeypatch):
    monkeypatch.setattr(Play, "call", lambda self, model, draw: 1 / 0)
    with pytest.raises(AssertionError, match="seed 5: division by zero; after [a-z]+"):
        play(5)
