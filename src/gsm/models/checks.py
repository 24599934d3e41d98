"""What a model refuses, each with a sentence that names the field, the value and the remedy."""

from __future__ import annotations

import torch
from torch import Tensor

from gsm.cache.memory import Memory
from gsm_kernels.native import noted

WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DEVICES = ("cpu", "cuda", "meta")  # others, such as Apple's mps, compute some things otherwise, or not in float64
IGNORED = -100  # target of a position that is not trained on


def check_call(
    vocabulary: int,
    tokens: Tensor,
    documents: Tensor | None,
    targets: Tensor | None,
    rows: int | None,
    remembered: bool = False,
) -> None:
    """Raises ValueError for arguments of a forward that do not fit one another or the vocabulary. Values are looked at
    on the CPU alone: elsewhere that would stall the device; and not where the call is recorded.

    Args:
        remembered: whether there is a memory, for which a call without rows has a use.
    """
    if tokens.device.type not in DEVICES:
        raise ValueError(
            f"tokens are on {tokens.device.type}, where nothing of this was tried: move model and tokens to cpu or cuda"
        )
    if tokens.ndim != 2 or tokens.dtype not in WHOLE:
        raise ValueError(
            f"tokens must be whole numbers of shape [batch, length], got {tokens.dtype} {list(tokens.shape)}"
        )
    batch, length = tokens.shape
    if batch < 1 or length < 1:
        raise ValueError(f"tokens must hold at least one token, got an empty prompt of shape {list(tokens.shape)}")
    for name, other in (("documents", documents), ("targets", targets)):
        if other is not None and other.shape != tokens.shape:
            raise ValueError(f"{name} must have the shape of tokens, {list(tokens.shape)}, got {list(other.shape)}")
        if other is not None and (other.dtype not in WHOLE or other.device != tokens.device):
            raise ValueError(
                f"{name} must be whole numbers on the device of tokens, {tokens.device}, got {other.dtype} on "
                f"{other.device}"
            )
    if rows is not None and (rows > length or rows < 1 and (not remembered or targets is not None)):
        below = "; less than 1 is for calls with a memory and without targets" if rows < 1 else ""
        raise ValueError(f"rows must lie between 1 and the {length} new positions, got {rows}{below}")
    if tokens.device.type == "cpu" and not torch.compiler.is_compiling() and not noted():
        check_range(vocabulary, "token id", tokens)
        if targets is not None:
            check_range(vocabulary, "target", targets.where(targets != IGNORED, 0), f", or {IGNORED} to be left out")


def check_range(vocabulary: int, name: str, ids: Tensor, otherwise: str = "") -> None:
    """Raises ValueError for ids that the vocabulary does not have."""
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        ends = f"the vocabulary has ids 0 to {vocabulary - 1}"
        raise ValueError(f"{name} {low if low < 0 else high} is out of range: {ends}{otherwise}")


def check_memory(memory: Memory, layout: tuple[tuple, ...], tokens: Tensor, rows: int | None = None) -> None:
    """Raises ValueError for a memory of another model, for another number of sequences, on another device, without
    room, or that lacks what the rows need; and for a static one while gradients are recorded. Looks at nothing but
    numbers that the host knows."""
    batch, length = tokens.shape
    if memory.batch != batch:
        raise ValueError(
            f"memory is for a batch of {memory.batch}, tokens have a batch of {batch}; use start(batch={batch})"
        )
    own = memory.ledger.layout
    if own is not layout and own != layout:
        raise ValueError(
            "memory was made by another model, or one of other sizes or dtype"
            f"{first_difference(own, layout)}; use start() of this model"
        )
    if memory.document_B.device != tokens.device:
        raise ValueError(
            f"memory lies on {memory.document_B.device}, tokens on {tokens.device}; move the model first, then start()"
        )
    if memory.capacity is not None and torch.is_grad_enabled():
        raise ValueError(
            f"memory of capacity {memory.capacity} is written in place, which gradients do not survive; call the model "
            "under torch.no_grad(), or use start() without a capacity"
        )
    memory.ledger.require(length)
    memory.ledger.require_rows(length, length if rows is None else rows)


def first_difference(got: tuple[tuple, ...], want: tuple[tuple, ...]) -> str:
    """The first store in which two layouts differ, in words."""
    for one, other in zip(got, want, strict=False):
        if one != other:
            return f" (it has {describe(one)} where this model has {describe(other)})"
    return f" (it has {len(got)} stores, this model {len(want)})"


def describe(store: tuple) -> str:
    """A line of a layout in words."""
    kind, size, width, dtype = store
    return f"{kind} {size} x {width} {str(dtype).removeprefix('torch.')}"


def check_room(capacity: int | None, prompt: int, new: int, used: int = 0) -> None:
    """Raises ValueError for fewer new tokens than 1, and for a capacity that does not hold what is used, a prompt, and
    the new tokens after it. The last new token is not read, so it needs no room."""
    if new < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {new}")
    needed = used + prompt + new - 1
    if capacity is not None and needed > capacity:
        after = f", after {used} that are used" if used else ""
        raise ValueError(
            f"capacity {capacity} does not hold a prompt of {prompt} tokens and {new} new ones{after}; "
            f"use capacity={needed} or more, or None for a memory that grows"
        )
