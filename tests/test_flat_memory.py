"""A model that is called again and again leaves no tensor behind."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from small import SHALLOW, build

import gsm

CAPACITY, PROMPT, CALLS = 12, 8, 24


def tensors() -> list[torch.Tensor]:
    """Return the tensors of this process, after garbage is gone."""
    gc.collect()
    return [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]


def generates() -> Callable[[], None]:
    """Return a call of `generate`, with prompts of several lengths."""
    model, number = build("gsm-residual=plain", geometry=SHALLOW), [0]

    def step() -> None:
        number[0] += 1
        model.generate(torch.arange(PROMPT + number[0] % 3)[None], max_new_tokens=2, temperature=1.0, top_p=0.9)

    return step


def decodes() -> Callable[[], None]:
    """Return a step of an engine. A full memory goes on from a clone, or reads the prompt again."""
    engine, number = gsm.Engine(build("gsm-residual=plain", geometry=SHALLOW), capacity=CAPACITY), [0]
    engine.prefill(torch.arange(PROMPT)[None])
    clone = engine.memory.clone()

    def step() -> None:
        number[0] += 1
        if engine.memory.used == CAPACITY and number[0] % 2:
            engine.load(clone)
        elif engine.memory.used == CAPACITY:
            engine.reset()
            engine.prefill(torch.arange(PROMPT)[None])
        engine.decode(torch.tensor([number[0] % SHALLOW.vocabulary]))

    return step


@pytest.mark.parametrize("make", [generates, decodes])
def test_no_tensor_stays_behind_a_call(make: Callable[[], Callable[[], None]]) -> None:
    step = make()
    for _ in range(CALLS // 2):
        step()
    before = tensors()  # held, so that caches of earlier tests free none meanwhile
    known = {id(one) for one in before}
    for _ in range(CALLS // 2):
        step()
    new = [one for one in tensors() if id(one) not in known]
    assert len(new) < CALLS // 2, "fewer than one for each call"
