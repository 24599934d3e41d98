"""Documents for the kernels of flash-linear-attention and FlashAttention.

These take no flags, but offsets of concatenated sequences; a recurrence has an initial state for each. Every document
in a row of the batch, or part of a document, becomes such a sequence.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .device import at_least_float32

Kernel = Callable[..., tuple[Tensor, Tensor]]


def recurrence(
    kernel: Callable[[str], Kernel],
    call: dict[str, Tensor],
    start_BT: Tensor,
    live_BT: Tensor,
    state_BHRC: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Run a kernel of flash-linear-attention on all rows of a batch, cut at the start of each row and document.

    Args:
        kernel: returns the library's function in its form `chunk`, or `fused_recurrent` for a single token. It is
            called with `call`, `scale`, states [N, H, R, C] and the offsets [N + 1], which wait for the device.
        call: its tensors by name, [B, T, ...].
        start_BT: bool, True at the start of a document.
        live_BT: bool, False at padding, which has the output 0.
        state_BHRC: initial state of each row, unless a document starts at its first token.
        scale: factor of the queries.

    Returns:
        Its output, [B, T, H, C], and the state after each row, [B, H, R, C], in at least float32.
    """
    start_BT, state_BHRC = start_BT & live_BT, at_least_float32(state_BHRC)
    if start_BT.shape[1] == 1 and not torch.is_grad_enabled():  # the kernels for single tokens have no backward
        entering_BHRC = state_BHRC.masked_fill(start_BT[..., None, None], 0)
        run = kernel("fused_recurrent")
        out_BTHC, after_BHRC = run(**call, scale=scale, initial_state=entering_BHRC, output_final_state=True)
    else:
        out_BTHC, after_BHRC = _concatenated(kernel("chunk"), call, start_BT, state_BHRC, scale)
    return out_BTHC.masked_fill(~live_BT[..., None, None], 0), after_BHRC


def _concatenated(run: Kernel, call: dict[str, Tensor], start_BT: Tensor, state_BHRC: Tensor, scale: float):
    batch, length = start_BT.shape
    bounds = offsets(start_BT)
    first_N = bounds[:-1]
    continued_N = (first_N % length == 0) & ~start_BT.flatten()[first_N]
    entering_NHRC = state_BHRC[first_N // length].masked_fill(~continued_N[:, None, None, None], 0)
    out_1THC, after_NHRC = run(
        **{name: x.flatten(0, 1)[None] for name, x in call.items()},
        scale=scale,
        initial_state=entering_NHRC,
        output_final_state=True,
        cu_seqlens=bounds,
    )
    last = torch.searchsorted(first_N, length * torch.arange(1, batch + 1, device=first_N.device)) - 1
    return out_1THC[0].unflatten(0, (batch, length)), after_NHRC[last]


def offsets(start_BT: Tensor) -> Tensor:
    """Return the first tokens of all sequences and the number of all tokens, int64 [N + 1], for flags of starts.

    A row of the batch starts a sequence. The call waits for the device.
    """
    batch, length = start_BT.shape
    cut_BT = start_BT.clone()
    cut_BT[:, 0] = True
    first_N = cut_BT.flatten().nonzero()[:, 0]
    return torch.cat((first_N, first_N.new_tensor([batch * length])))
