"""What the tests of the transcription share: its two toy models, tokens and packings for them."""

from __future__ import annotations

import torch
from torch import Tensor
from transcription import Geometry, Notes, Weights, tiny_baseline, tiny_gsm, transcribe

TINY = {"gsm": tiny_gsm, "baseline": tiny_baseline}


def some_tokens(length: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(tiny_gsm().vocabulary, (length,), generator=generator).tolist()


def packed(lengths: list[int]) -> list[int]:
    """Document ids of contiguous runs; a negative length is padding."""
    return [number if length > 0 else -1 for number, length in enumerate(lengths) for _ in range(abs(length))]


@torch.no_grad()
def transcribed(
    geometry: Geometry, weights: Weights, tokens: list[int], documents=None, notes: Notes | None = None
) -> Tensor:
    return transcribe(geometry, weights, tokens, documents, notes)
