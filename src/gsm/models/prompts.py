"""Prompts of different lengths in one batch, padded on the left so that all of them end at the same position."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

Ids = Tensor | Sequence[int]  # token ids of one sequence
# A text or ids: one sequence, a batch as a tensor [B, T], or a list of sequences.
Prompt = str | Ids | Sequence[str] | Sequence[Ids]


def left_pad(prompts: Sequence[Ids], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Pad prompts of different lengths into one batch.

    Args:
        prompts: token ids, each 1-D and not empty.
        device: device of the result.

    Returns:
        tokens: int64 [B, T], T the length of the longest prompt; id 0 is the padding on the left.
        documents: int64 [B, T], 0 for prompts and -1 for padding, to which the model does not attend.

    Raises:
        ValueError: if there is no prompt, or one is empty, not 1-D or not of whole numbers.
    """
    rows = [torch.as_tensor(prompt, device=device) for prompt in prompts]
    if not rows:
        raise ValueError("prompts must have at least one prompt, got []")
    for number, row in enumerate(rows):
        if row.ndim != 1 or row.numel() == 0 or row.is_floating_point():
            raise ValueError(
                f"prompts[{number}] must be whole numbers, 1-D and not empty, got {row.dtype} {list(row.shape)}"
            )
    rows = [row.long() for row in rows]
    documents = [torch.zeros_like(row) for row in rows]
    return pad_sequence(rows, True, 0, "left"), pad_sequence(documents, True, -1, "left")


def is_text(prompt: Prompt) -> bool:
    """Return whether a prompt is a text or a list of texts."""
    return isinstance(prompt, str) or isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], str)


def as_batch(
    prompt: Prompt, device: torch.device, encode: Callable[[str], list[int]] | None = None
) -> tuple[Tensor, Tensor | None]:
    """Convert a prompt into a batch of token ids.

    Args:
        prompt: a tensor [B, T] or [T], a sequence of ids, or a sequence of prompts of any lengths; with ``encode``,
            also a text or a sequence of texts.
        device: device of the result.
        encode: maps a text to ids.

    Returns:
        tokens: [B, T], padded on the left.
        documents: int64 [B, T] as in ``left_pad``; None if all prompts have one length.

    Raises:
        ValueError: as ``left_pad``, or if the prompt has no ids.
    """
    if encode is not None and is_text(prompt):
        prompt = [encode(text) for text in ([prompt] if isinstance(prompt, str) else prompt)]  # pyright: ignore[reportArgumentType]
    if isinstance(prompt, Tensor) and prompt.is_meta and device.type != "meta":
        raise ValueError("prompt must have values, got a tensor on the meta device")
    try:
        if isinstance(prompt, Tensor) or (len(prompt) and torch.as_tensor(prompt[0]).ndim == 0):
            return torch.atleast_2d(torch.as_tensor(prompt, device=device)), None
        tokens, documents = left_pad(prompt, device)  # pyright: ignore[reportArgumentType]
    except (TypeError, KeyError, RuntimeError, OverflowError) as error:  # a text, a set, a generator
        raise ValueError(
            "prompt must be token ids (a tensor [B, T] or [T], a list, a list of lists, or encode() of a tokenizer), "
            f"got {prompt!r:.40}"
        ) from error
    return tokens, documents if len({len(row) for row in prompt}) > 1 else None  # pyright: ignore[reportArgumentType]
