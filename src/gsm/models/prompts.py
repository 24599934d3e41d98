"""Prompts of different lengths in one batch: padded on the left, so that all of them end where the new tokens begin."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Ids = Tensor | Sequence[int]  # token ids of one sequence
Prompt = Ids | Sequence[Ids]  # one sequence, a batch of them as a tensor [B, T], or one each


def left_pad(prompts: Sequence[Ids], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """One batch of prompts of different lengths.

    Args:
        prompts: token ids, each 1-D and not empty.
        device: where to put the result.

    Returns:
        tokens: int64 [B, T], T of the longest, the others filled up on the left with id 0.
        documents: int64 [B, T], 0 for the prompts, -1 for what fills them up: with these the filling is not seen.

    Raises:
        ValueError: for no prompts, or one that is empty, not 1-D or not of whole numbers.
    """
    rows = [torch.as_tensor(prompt, device=device) for prompt in prompts]
    if not rows:
        raise ValueError("prompts must hold at least one prompt, got none")
    for number, row in enumerate(rows):
        if row.ndim != 1 or row.numel() == 0 or row.is_floating_point():
            raise ValueError(
                f"prompts[{number}] must be 1-D, of whole numbers and not an empty prompt, "
                f"got {row.dtype} {list(row.shape)}"
            )
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64, device=device)
    documents = torch.full_like(tokens, -1)
    for row, ids, document in zip(rows, tokens, documents, strict=True):
        ids[len(ids) - len(row) :] = row
        document[len(ids) - len(row) :] = 0
    return tokens, documents


def as_batch(prompt: Prompt, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Tokens [B, T] and documents of what a user may give as a prompt: a tensor [B, T] or [T], a sequence of ids, or a
    sequence of prompts, which may differ in length. Documents are None where nothing had to be filled up. Raises
    ValueError as ``left_pad`` does."""
    if isinstance(prompt, Tensor) and prompt.is_meta and device.type != "meta":
        raise ValueError("prompt lies on the meta device, where tensors have no values: give one with values")
    if isinstance(prompt, Tensor) or (len(prompt) and torch.as_tensor(prompt[0]).ndim == 0):
        return torch.atleast_2d(torch.as_tensor(prompt, device=device)), None
    tokens, documents = left_pad(prompt, device)  # pyright: ignore[reportArgumentType]
    return tokens, documents if len({len(row) for row in prompt}) > 1 else None  # pyright: ignore[reportArgumentType]
