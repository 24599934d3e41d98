"""Prompts of different lengths in one batch, and the state of a model after generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import GEOMETRY, MEMORIES, SHALLOW, M, assert_same, build, random_tokens

from gsm.engine import Engine
from gsm.models.prompts import left_pad

LENGTHS = (1, 2 * M + 3, 6)
PROMPTS = [random_tokens(1, length, seed=length)[0] for length in LENGTHS]


def test_shorter_prompts_are_padded_on_the_left():
    tokens, documents = left_pad([torch.tensor([5, 6, 7]), [8]])
    assert tokens.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert documents.tolist() == [[0, 0, 0], [-1, -1, 0]]


@pytest.mark.parametrize(("capacity", "chunk"), [(None, 4096), (max(LENGTHS) + 2, 5)])
@pytest.mark.parametrize("case", MEMORIES)
@torch.no_grad()
def test_a_batch_of_prompts_of_different_lengths_equals_each_prompt_alone(case, capacity, chunk):
    model, more = build(case, geometry=SHALLOW), random_tokens(3, 2)
    out = model.prefill(PROMPTS, model.start(3, capacity), chunk=chunk)
    next_BRV = model(more, memory=out.memory).logits
    for row, prompt in enumerate(PROMPTS):
        alone = model(torch.cat([prompt, more[row]])[None], rows=3).logits
        assert_same(out.logits[row], alone[0, :1], f"{case}: prompt {row} in chunks of {chunk}")
        assert_same(next_BRV[row], alone[0, 1:], f"{case}: tokens after prompt {row}, chunks of {chunk}")


@pytest.mark.parametrize("capacity", [None, max(LENGTHS) + 3])
def test_generation_continues_every_prompt_as_it_would_alone(capacity):
    model = build("gsm-retriever=separate_indexer")
    together = model.generate(PROMPTS, 4, capacity=capacity)
    assert together.shape == (3, 4)
    for row, prompt in enumerate(PROMPTS):
        assert together[row].tolist() == model.generate(prompt, 4)[0].tolist(), f"prompt {row}"


def test_a_prompt_may_be_given_in_any_form():
    model, ids = build("gsm-writer=additive"), [3, 1, 4, 1, 5]
    want = model.generate(torch.tensor([ids]), 3)
    for prompt in (torch.tensor(ids), ids, [ids], [torch.tensor(ids)]):
        assert torch.equal(model.generate(prompt, 3), want), f"given as {prompt}"


def test_generation_restores_the_mode_of_every_part():
    model = build("gsm-writer=additive").train()
    model.encoder.eval()
    before = [module.training for module in model.modules()]
    stream = model.stream(random_tokens(1, 4), 3)
    for _ in range(2):
        next(stream)
        assert [module.training for module in model.modules()] == before and torch.is_grad_enabled()
    with pytest.raises(ValueError, match="^tokens"):
        next(model.stream(random_tokens(1, 4) + GEOMETRY.vocabulary, 3))
    assert [module.training for module in model.modules()] == before


def test_generation_computes_as_in_evaluation_even_between_steps_of_training(monkeypatch):
    model, modes = build("gsm-writer=additive").train(), []
    right = model.run
    monkeypatch.setattr(model, "run", lambda *arguments: modes.append(model.encoder.training) or right(*arguments))
    model.generate(random_tokens(1, 4), 3)
    assert modes == [False] * 3


@pytest.mark.parametrize(
    "prompt",
    ["hello", {1, 2}, {"input_ids": [1]}, (x for x in (1, 2)), None, ["a"], [None]],
    ids=lambda prompt: type(prompt).__name__,
)
def test_a_prompt_without_ids_is_refused(prompt: Any):
    model = build("transformer", geometry=SHALLOW)
    for writer in (model, Engine(model, capacity=20)):
        with pytest.raises(ValueError, match="^prompt "):
            writer.generate(prompt, 2)
