"""Documents as the kernels of flash-linear-attention take them: they know no flags but offsets of sequences laid end to
end, each with a state of its own to start from. Every document in a row of the batch, or part of one, becomes such a
sequence.
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
    """Runs a kernel on all rows of a batch as one, cut where a row or a document starts.

    Args:
        run: a kernel of the library; called with ``call``, ``scale``, states [N, H, R, C] and the offsets [N + 1].
        call: its tensors by name, [B, T, ...].
        start_BT: bool, where documents start.
        state_BHRC: what the first token of each row goes on from, unless a document starts there.
        scale: factor of the queries.

    Returns:
        its output, [B, T, ...], and the state after each row, [B, H, R, C].
    """
    batch, length = start_BT.shape
    cut_BT = start_BT.clone()
    cut_BT[:, 0] = True
    first_N = cut_BT.flatten().nonzero()[:, 0]
    end = first_N.new_tensor([batch * length])
    goes_on_N = (first_N % length == 0) & ~start_BT.flatten()[first_N]
    entering_NHRC = state_BHRC[first_N // length].masked_fill(~goes_on_N[:, None, None, None], 0)
    out_1THC, after_NHRC = run(
        **{name: x.flatten(0, 1)[None] for name, x in call.items()},
        scale=scale,
        initial_state=entering_NHRC,
        output_final_state=True,
        cu_seqlens=torch.cat((first_N, end)),
    )
    return out_1THC[0].unflatten(0, (batch, length)), after_NHRC[cut_BT.sum(dim=1).cumsum(0) - 1]
