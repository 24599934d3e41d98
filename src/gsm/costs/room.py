"""Memory: how much there is, how much a request takes, and what would fit.

A request needs the weights, the memory of so many tokens (``gsm.costs.model``), and what the layers hold while they
read a chunk of the prompt. The last is known once something has been measured; before that it is guessed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

GUESS = 64  # numbers of the model's width that a token of a chunk takes while it is read, before anybody has measured
CGROUP = Path("/sys/fs/cgroup")
# Of a GPU, in the traceback of a process that was started, of a CPU.
SAID = ("out of memory", "OutOfMemoryError", "can't allocate memory")


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: of a GPU, of a CPU, or in a process that was started, whose traceback is the message."""
    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or any(words in str(error) for words in SAID)


def available_bytes(device: torch.device) -> int:
    """What can still be taken: of a GPU, with what PyTorch holds and does not use; else of this machine, or of the
    container that this process may live in."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), free)
    with suppress(OSError, ValueError):  # no container, or one without a limit, which says `max`
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        lines = (CGROUP / "memory.stat").read_text().splitlines()
        # What is used counts pages of files too, of which these are given back whenever somebody wants them.
        cached = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
        free = min(free, limit - used + cached)
    return free


@dataclass
class Room:
    """What requests to one model need besides its weights, which are there already.

    Attributes:
        cache: bytes of the memory of so many tokens.
        chunk: tokens that are read at a time.
        batch: requests at once.
        each: bytes that a token of a chunk takes while it is read.
        measured: whether that was measured.
    """

    cache: Callable[[int], int]
    chunk: int
    batch: int
    each: float
    measured: bool = field(default=False)

    def needed(self, tokens: int, memories: int = 1) -> int:
        """Bytes of a request; a decode from a synthetic memory holds two memories, and reads no chunk."""
        return round(memories * self.cache(tokens) + self.each * self._reading(tokens, memories))

    def learn(self, extra: int | None, tokens: int) -> None:
        """Takes over what a request to so many tokens took."""
        if extra is None:
            return
        found = (extra - self.cache(tokens)) / (self.batch * min(tokens, self.chunk))
        self.each = max(found, self.each) if self.measured else max(found, 1.0)
        self.measured = True

    def fits(self, available: int, memories: int = 1) -> int:
        """The largest number of tokens that fits, 0 if none does."""
        low, high = 0, 1
        while high < 1 << 40 and self.needed(high, memories) <= available:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.needed(middle, memories) <= available else (low, middle)
        return low

    def refusal(self, tokens: int, available: int, memories: int = 1, tried: bool = False) -> str:
        """One sentence: what was needed, what there is, and what would fit. What was ``tried`` and ran out of memory
        takes more than there is, whatever was thought: then a token of a chunk takes more."""
        need, room = self.needed(tokens, memories), self
        if tried and need <= available:
            need = available + 1
            room = replace(self, each=(need - memories * self.cache(tokens)) / self._reading(tokens, memories))
        about = "more than" if room is not self else "about"
        wanted = f"{about} {need / 2**30:.3g} GiB besides the weights, {max(available, 0) / 2**30:.3g} GiB are there"
        most = room.fits(available, memories)
        return f"out of memory: {wanted}; would fit: {most:,} tokens at batch {self.batch}"

    def _reading(self, tokens: int, memories: int) -> int:
        """Tokens that are read at a time, of all requests."""
        return self.batch * min(tokens, self.chunk) if memories == 1 else self.batch
