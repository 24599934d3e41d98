"""A command takes as many threads as others leave cores, and no more than it may use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from gsm import threads


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Eight cores for everybody, and a user who has chosen nothing."""
    before = torch.get_num_threads()
    for name in threads.CHOICES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8), raising=False)
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("busy", "count"), [(0.0, 8), (0.4, 8), (1.0, 7), (5.2, 3), (7.9, 1), (40.0, 1)])
def test_others_are_left_their_cores(busy: float, count: int, monkeypatch: pytest.MonkeyPatch):
    """Two threads on two busy cores trained at a fifth of the speed of one."""
    monkeypatch.setattr(threads, "others", lambda: busy)
    threads.settle()
    assert torch.get_num_threads() == count and threads.why == f" (others use {busy:.1f} of 8 cores)"


@pytest.mark.parametrize("name", threads.CHOICES)
def test_the_user_has_the_last_word(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, "5")
    monkeypatch.setattr(threads, "others", lambda: 8.0)
    threads.settle()
    assert torch.get_num_threads() == 8 and threads.why == f" ({name}=5)", "PyTorch has read it already"


def test_what_is_computed_does_not_depend_on_the_number_of_threads():
    """Or a run that is gone on with under another load would be another run."""
    layer, x = nn.Linear(256, 768), torch.randn(512, 256)
    found = []
    for count in (1, 2, 8):
        torch.set_num_threads(count)
        layer.zero_grad()
        layer(x).square().mean().backward()
        assert layer.weight.grad is not None
        found.append(layer.weight.grad.clone())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
