"""Documents for the kernels of flash-linear-attention.

These take no flags, but offsets of concatenated sequences, each with its own initial state. Every document in a row of
the batch, or part of a document, becomes such a sequence.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def laid_end_to_end(
    run: Callable[..., tuple[Tensor, Tensor]],
    call: dict[str, Tensor],
    start_BT: Tensor,
    state_BHRC: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Run a kernel on all rows of a batch, concatenated and cut at the start of each row and document.

    Args:
        run: a kernel of the library; called with ``call``, ``scale``, states [N, H, R, C] and the offsets [N + 1].
        call: its tensors by name, [B, T, ...].
        start_BT: bool, True at the start of a document.
        state_BHRC: initial state of each row, unless a document starts at its first token.
        scale: factor of the queries.

    Returns:
        Its output, [B, T, ...], and the state after each row, [B, H, R, C].
    """
    batch, length = start_BT.shape
    cut_BT = start_BT.clone()
    cut_BT[:, 0] = True
    first_N = cut_BT.flatten().nonzero()[:, 0]
    end = first_N.new_tensor([batch * length])
    continued_N = (first_N % length == 0) & ~start_BT.flatten()[first_N]
    entering_NHRC = state_BHRC[first_N // length].masked_fill(~continued_N[:, None, None, None], 0)
    out_1THC, after_NHRC = run(
        **{name: x.flatten(0, 1)[None] for name, x in call.items()},
        scale=scale,
        initial_state=entering_NHRC,
        output_final_state=True,
        cu_seqlens=torch.cat((first_N, end)),
    )
    return out_1THC[0].unflatten(0, (batch, length)), after_NHRC[cut_BT.sum(dim=1).cumsum(0) - 1]
