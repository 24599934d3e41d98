"""The memory that a request to a model needs, the memory that is free, and the number of tokens that would fit."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from gsm.costs.model import cost
from gsm.models.base import LanguageModel

GUESS = 64  # estimated activations per token of a chunk, in vectors of the model's width
# In messages of a GPU, of the traceback of a child process, and of a CPU.
MESSAGES = ("out of memory", "OutOfMemoryError", "can't allocate memory")


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a GPU or the machine ran out of memory, also by the text of its message."""
    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or any(words in str(error) for words in MESSAGES)


def available_bytes(device: torch.device) -> int:
    """Return the free bytes of a GPU, including what PyTorch has reserved and does not use; else of this machine."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def needs(model: LanguageModel, chunk: int, batch: int = 1) -> Callable[[int], int]:
    """Return a function that maps a number of tokens to the bytes of their static memory and, estimated, of a chunk's
    activations."""
    weight, costs = model.embedding.weight, cost(model)

    def needed(tokens: int) -> int:
        memory = costs.cache_bytes(tokens, weight.dtype, batch, capacity=tokens).total()
        return memory + GUESS * model.dim * weight.itemsize * batch * min(tokens, chunk)

    return needed


def refusal(needed: Callable[[int], int], tokens: int, available: int) -> str:
    """Return an error message with the needed bytes, the free bytes, and how many tokens (below this number) would fit.

    Args:
        needed: from ``needs``.
        tokens: the requested number.
        available: free bytes.
    """
    need, free = (number / 2**30 for number in (needed(tokens), max(available, 0)))
    most = bisect_right(range(1, tokens), available, key=needed)
    sizes = f"about {need:.3g} GiB are needed in addition to the weights, {free:.3g} GiB are free"
    return f"out of memory: {sizes}; {most:,} tokens would fit"
