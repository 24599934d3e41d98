"""Checks of the arguments of a model's calls. Each error names the argument, its value and the remedy."""

from __future__ import annotations

from operator import index
from typing import Any

import torch
from torch import Tensor

from gsm.cache.memory import Memory
from gsm.errors import within
from gsm_kernels.register import noted

WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DEVICES = ("cpu", "cuda", "meta")  # other devices, such as Apple's mps, are untested and may lack float64
IGNORED = -100  # target of a position without a loss


def check_call(
    vocabulary: int,
    tokens: Tensor,
    documents: Tensor | None,
    targets: Tensor | None,
    rows: int | None,
    has_memory: bool = False,
) -> None:
    """Check the arguments of ``LanguageModel.forward``.

    The range of ids is checked on a CPU only, because reading them would synchronise with a GPU, and not while a call
    is compiled or recorded.

    Args:
        vocabulary: number of token ids (V).
        tokens, documents, targets, rows: as in ``forward``.
        has_memory: whether the call has a memory; only then may ``rows`` be below 1.

    Raises:
        ValueError: if a type, dtype, shape, device or value does not fit.
    """
    for name, value in (("tokens", tokens), ("documents", documents), ("targets", targets)):
        if value is not None or name == "tokens":
            check_type(name, value, Tensor, "torch.as_tensor(...) of whole numbers [batch, length]")
    if rows is not None:
        whole_number("rows", rows, None)
    if tokens.device.type not in DEVICES:
        raise ValueError(f"tokens must be on cpu or cuda, got {tokens.device.type}")
    if tokens.ndim != 2 or tokens.dtype not in WHOLE:
        raise ValueError(
            f"tokens must be whole numbers of shape [batch, length], got {tokens.dtype} {list(tokens.shape)}"
        )
    batch, length = tokens.shape
    if batch < 1 or length < 1:
        raise ValueError(f"tokens must have at least one token, got the shape {list(tokens.shape)}")
    for name, other in (("documents", documents), ("targets", targets)):
        if other is None:
            continue
        check_shape(name, other, tokens)
        if other.dtype not in WHOLE or other.device != tokens.device:
            raise ValueError(
                f"{name} must be whole numbers on {tokens.device}, the device of tokens, got {other.dtype} on "
                f"{other.device}"
            )
    if rows is not None and (rows > length or rows < 1 and (not has_memory or targets is not None)):
        below = " (below 1 only with a memory and without targets)" if rows < 1 else ""
        raise ValueError(f"rows must be in [1, {length}], the new positions of the call{below}, got {rows}")
    if tokens.device.type == "cpu" and not torch.compiler.is_compiling() and not noted():
        check_range(vocabulary, "tokens", tokens)
        if targets is not None:
            check_range(
                vocabulary, "targets", targets.where(targets != IGNORED, 0), f", or {IGNORED} to leave a position out"
            )


def check_type(name: str, value: Any, kind: type, remedy: str) -> None:
    """Raise ValueError unless ``value`` is of type ``kind``; ``remedy`` ends the message after "use"."""
    if not isinstance(value, kind):
        actual = type(value)
        raise ValueError(f"{name} must be a {kind.__name__}, got {actual.__module__}.{actual.__name__}; use {remedy}")


def check_shape(name: str, other: Tensor, tokens: Tensor) -> None:
    """Raise ValueError unless ``other`` has the shape of ``tokens``."""
    if other.shape != tokens.shape:
        raise ValueError(f"{name} must have the shape of tokens, {list(tokens.shape)}, got {list(other.shape)}")


def whole_number(name: str, value: Any, least: int | None = 1) -> int:
    """Return ``value`` as an int.

    Raises:
        ValueError: if it is not a whole number, or outside of [``least``, 2^31 - 1] (any if ``least`` is None).
    """
    try:
        number = value if type(value) is int else index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {value!r}") from None
    if least is not None:
        within(least, (1 << 31) - 1, **{name: number})
    return number


def check_range(vocabulary: int, name: str, ids: Tensor, otherwise: str = "") -> None:
    """Raise ValueError unless all ids are in [0, vocabulary - 1]; ``otherwise`` names further permitted values."""
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        raise ValueError(
            f"{name} must be in [0, {vocabulary - 1}], the ids of the vocabulary{otherwise}, got "
            f"{low if low < 0 else high}"
        )


def check_memory(memory: Memory, layout: tuple[tuple, ...], tokens: Tensor, rows: int | None = None) -> None:
    """Raise ValueError if a call cannot use this memory. Does not synchronise with the device.

    The memory must be of this model, batch size and device, and have room for the tokens. Earlier calls must have
    computed the rows that the requested rows need. A static memory cannot be used while gradients are recorded, nor a
    memory made in inference mode outside of that mode if this call records gradients or writes to it.

    Args:
        memory: the memory.
        layout: the layout of the model's memory.
        tokens: tokens [B, T] of the call.
        rows: requested rows; None: all.
    """
    check_type("memory", memory, Memory, "start() of this model, or Output.memory")
    batch, length = tokens.shape
    if memory.batch != batch:
        raise ValueError(
            f"memory must be of batch {batch}, the batch of tokens, got {memory.batch}; use start(batch={batch})"
        )
    actual = memory.ledger.layout
    if actual is not layout and actual != layout:
        raise ValueError(
            "memory must be of this model, got one of another model, size or "
            f"dtype{first_difference(actual, layout)}; use start() of this model, or a new Engine"
        )
    if memory.document_B.device != tokens.device:
        raise ValueError(
            f"memory must be on {tokens.device}, the device of tokens, got {memory.document_B.device}; call start() "
            "after moving the model"
        )
    if memory.capacity is not None and torch.is_grad_enabled():
        raise ValueError(
            "memory must be a growing one while gradients are recorded, as a static one is written in place, got "
            f"capacity {memory.capacity}; use torch.no_grad(), or start() without a capacity"
        )
    traced = torch.compiler.is_compiling()  # a compiled graph cannot query inference mode
    if not traced and memory.document_B.is_inference() and not torch.is_inference_mode_enabled():
        if torch.is_grad_enabled() or memory.capacity is not None:
            raise ValueError(
                "memory must be made outside of torch.inference_mode() to be used outside of it; make it in "
                "torch.no_grad(), or make the call in inference mode too"
            )
    memory.ledger.require(length)
    memory.ledger.require_rows(length, length if rows is None else rows)


def first_difference(got: tuple[tuple, ...], want: tuple[tuple, ...]) -> str:
    """Describe the first store in which two layouts differ."""
    for actual, expected in zip(got, want, strict=False):
        if actual != expected:
            return f" (it has {describe(actual)} where this model has {describe(expected)})"
    return f" (it has {len(got)} stores, this model {len(want)})"


def describe(store: tuple) -> str:
    """Describe one store of a layout."""
    kind, size, width, dtype = store
    return f"{kind} {size} x {width} {str(dtype).removeprefix('torch.')}"


def check_room(capacity: int | None, prompt: int, new: int, used: int = 0) -> None:
    """Raise ValueError unless ``new`` is at least 1 and ``capacity`` at least used + prompt + new - 1, or None.

    The last new token is not read, so it needs no room. All numbers are tokens.
    """
    whole_number("max_new_tokens", new)
    needed = used + prompt + new - 1
    if capacity is not None and needed > capacity:
        after = f" after {used} used tokens" if used else ""
        raise ValueError(
            f"capacity must be at least {needed} for a prompt of {prompt} tokens and {new} new ones{after}, or None "
            f"for a memory that grows, got {capacity}"
        )
