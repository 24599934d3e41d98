"""Memory of a request to a model: what it needs, what is free, and how many tokens would fit."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from gsm.costs.model import cost
from gsm.models.base import LanguageModel

GUESS = 64  # estimated activations of a token while its chunk is read, in vectors of the model's width
# Messages of a GPU, of the traceback of a child process, and of a CPU.
MESSAGES = ("out of memory", "OutOfMemoryError", "can't allocate memory")


def out_of_memory(error: BaseException) -> bool:
    """Return whether a GPU, a CPU, or a child process with its traceback as the message ran out of memory."""
    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or any(words in str(error) for words in MESSAGES)


def available_bytes(device: torch.device) -> int:
    """Return the free bytes of a GPU, including PyTorch's unused reserve, or of this machine."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def needs(model: LanguageModel, chunk: int, batch: int = 1) -> Callable[[int], int]:
    """Return a function of the number of tokens: the bytes of their memory and, estimated, of reading a chunk."""
    weight, costs = model.embedding.weight, cost(model)

    def needed(tokens: int) -> int:
        memory = costs.cache_bytes(tokens, weight.dtype, batch, capacity=tokens).total()
        return memory + GUESS * model.dim * weight.itemsize * batch * min(tokens, chunk)

    return needed


def refusal(needed: Callable[[int], int], tokens: int, available: int) -> str:
    """Return the needed bytes, the free bytes, and the largest number of tokens below this one that would fit."""
    need, free = (number / 2**30 for number in (needed(tokens), max(available, 0)))
    most = bisect_right(range(1, tokens), available, key=needed)
    sizes = f"about {need:.3g} GiB are needed beside the weights, {free:.3g} are free"
    return f"out of memory: {sizes}; {most:,} tokens would fit"
