"""The two ceilings of a device, measured: how fast it multiplies matrices, and how fast it copies memory.

No operation that does so many FLOPs and moves so many bytes can be faster than `floor`: data-sheet rates are never
reached, so times are held against what the device shows in the same run (Williams et al. 2009, the roofline).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .timing import take_turns


class Ceilings(NamedTuple):
    """FLOP/s of a matrix product in `dtype`, and bytes/s of a copy, read and written ones counted."""

    flops: float
    bytes: float
    dtype: str

    def floor(self, flops: float, moved: float) -> float:
        """Milliseconds that so many FLOPs and bytes take at least."""
        return 1e3 * max(flops / self.flops, moved / self.bytes)


def measure(device: torch.device, size: int | None = None, copied: int | None = None) -> Ceilings:
    """Multiply two matrices of size x size and copy so many bytes; left out, 8192 and 1 GiB on a GPU, less on a CPU.

    Matrices are random: on zeros a GPU draws less power and runs faster than it ever does on data.
    """
    gpu = device.type == "cuda"
    size, copied = size or (8192 if gpu else 1024), copied or (1 << 30 if gpu else 1 << 27)
    dtype = torch.bfloat16 if gpu else torch.float32
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    source = torch.randint(-128, 127, (copied,), device=device, dtype=torch.int8)
    target = torch.empty_like(source)
    runs = {"product": lambda: torch.mm(left, right, out=product), "copy": lambda: target.copy_(source)}
    times = take_turns(runs, device)
    rates = 2e3 * size**3 / times["product"].median, 2e3 * copied / times["copy"].median
    return Ceilings(*rates, str(dtype).removeprefix("torch."))
