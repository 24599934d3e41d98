"""A model of a few lines with the interface of our models, for tests of code that uses a model's output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class Bag(torch.nn.Module):
    """A minimal model: its prediction depends on the sum of all previous tokens. It counts the tokens that it reads."""

    def __init__(self, vocabulary: int = 257) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.into = torch.nn.Parameter(torch.randn(vocabulary, 8, dtype=torch.float64, generator=generator))
        self.read = 0

    def start(self, batch: int = 1) -> Sum:
        return Sum(torch.zeros(batch, 8, dtype=torch.float64))

    def forward(self, tokens: Tensor, documents: Tensor | None = None, memory: Sum | None = None, rows: int = 0) -> Out:
        self.read += tokens.numel()
        x_BTD = self.into[tokens] if documents is None else self.into[tokens] * (documents >= 0)[..., None]
        sum_BTD = (memory or self.start(len(tokens))).sum_BD[:, None] + x_BTD.cumsum(1)
        return Out(sum_BTD[:, -rows:].sin() @ self.into.T, Sum(sum_BTD[:, -1]))


@dataclass(frozen=True)
class Sum:
    sum_BD: Tensor

    def expand(self, times: int) -> Sum:
        return Sum(self.sum_BD.repeat_interleave(times, dim=0))


@dataclass(frozen=True)
class Out:
    logits: Tensor
    memory: Sum
