"""PyTorch's grouped matrix product: one launch for all groups, whose ends stay on the device.

On compute capability 9.0 it is a CUTLASS kernel that needs nothing from the host. Its loads need rows of a multiple of
16 bytes. Group sizes are free: with weights stored [out, in] no product runs along a row's place in memory, forward or
backward. (For newer chips wrong gradients of empty groups have been reported, pytorch/pytorch issue 172439; older ones
have a loop that waits for the ends.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import HOPPER, no_nvidia_gpu

ALIGNED = 8  # numbers of 2 bytes in 16 bytes


def missing() -> str | None:
    """Why it is not for this machine."""
    if (refusal := no_nvidia_gpu()) is not None:
        return f"torch._grouped_mm {refusal}"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != HOPPER:
        return f"torch._grouped_mm is trusted on compute capability 9.0 alone, this is {major}.{minor}"
    return None


def refuses(x_MD: Tensor, weight_END: Tensor, end_E: Tensor) -> str | None:
    """Return why this call is not for it."""
    if not x_MD.is_cuda:
        return f"needs tensors on a GPU, got {x_MD.device.type}"
    if {x_MD.dtype, weight_END.dtype} != {torch.bfloat16}:
        return f"needs bfloat16, got {x_MD.dtype} and {weight_END.dtype}"
    if weight_END.shape[1] % ALIGNED or weight_END.shape[2] % ALIGNED:
        return f"needs widths that are multiples of {ALIGNED}, got {weight_END.shape[2]} and {weight_END.shape[1]}"
    return None


def grouped_linear(x_MD: Tensor, weight_END: Tensor, end_E: Tensor) -> Tensor:
    """See `gsm_kernels.grouped_linear`."""
    return torch._grouped_mm(x_MD.contiguous(), weight_END.contiguous().mT, offs=end_E)
