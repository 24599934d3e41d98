"""Device memory: the available bytes, the bytes of a request, and the largest request that fits.

A request needs the weights, the memory of its tokens (``gsm.costs.model``), and activations while a chunk of the prompt
is read. The latter are estimated.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

GUESS = 64  # estimated activations of a token while its chunk is read, in vectors of the model's width
CGROUP = Path("/sys/fs/cgroup")
# Messages of a GPU, of the traceback of a child process, and of a CPU.
MESSAGES = ("out of memory", "OutOfMemoryError", "can't allocate memory")


def out_of_memory(error: BaseException) -> bool:
    """Return whether a GPU, a CPU, or a child process with its traceback as the message ran out of memory."""
    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or any(words in str(error) for words in MESSAGES)


def available_bytes(device: torch.device) -> int:
    """Return the available bytes of a GPU, including PyTorch's unused reserve, or of this machine or its container."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), free)
    with suppress(OSError, ValueError):  # no container, or no limit (`max`)
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        lines = (CGROUP / "memory.stat").read_text().splitlines()
        # Used memory includes pages of files; the kernel frees inactive ones on demand.
        cached = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
        free = min(free, limit - used + cached)
    return free


@dataclass
class Room:
    """The memory that requests to a loaded model need.

    Attributes:
        cache: returns the bytes of the memory of a number of tokens.
        chunk: tokens per chunk.
        batch: number of simultaneous requests.
        each: bytes of activations per token while a chunk is read.
    """

    cache: Callable[[int], int]
    chunk: int
    batch: int
    each: float

    def needed(self, tokens: int) -> int:
        """Return the bytes of a request."""
        return round(self.cache(tokens) + self.each * self.batch * min(tokens, self.chunk))

    def fits(self, available: int) -> int:
        """Return the largest number of tokens that fits, 0 for none."""
        low, high = 0, 1
        while high < 1 << 40 and self.needed(high) <= available:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.needed(middle) <= available else (low, middle)
        return low

    def refusal(self, tokens: int, available: int) -> str:
        """Return one sentence with the needed bytes, the available bytes, and the number of tokens that would fit.

        A request that ran out of memory needs more than is available. If the estimate of ``each`` is too low for that,
        it is raised for this sentence.
        """
        need, room = self.needed(tokens), self
        if need <= available:
            need = available + 1
            room = replace(self, each=(need - self.cache(tokens)) / (self.batch * min(tokens, self.chunk)))
        about = "more than" if room is not self else "about"
        sizes = (
            f"{about} {need / 2**30:.3g} GiB are needed beside the weights, {max(available, 0) / 2**30:.3g} are free"
        )
        most = room.fits(available)
        return f"out of memory: {sizes}; would fit: {most:,} tokens at batch {self.batch}"
