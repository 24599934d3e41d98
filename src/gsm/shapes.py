"""The letters that tensor names end in, and the two dtype rules of the project.

A tensor is named after what it holds, then its dimensions: ``retrieved_SBRD`` is one retrieved vector per stage,
sequence, row and channel.

    B  sequences in a batch            T  new positions of a call        R  rows asked for: the last R of T
    E  window entries, stored and new  F  slots of a bank                G  slots that this call adds to a bank
    K  slots that a row selects        N  candidate blocks of a row      S  aggregation stages
    D  model width                     H  attention heads                C  width of an entry (key and value)
    P  rotated channel pairs           Q  rank of a query                X  residual streams
    J  index heads                     I  index width                    V  vocabulary
"""

from __future__ import annotations

import torch
from torch import Tensor


def promoted(x: Tensor) -> Tensor:
    """``x`` in at least float32: half types are widened, float64 stays what it is.

    Never use ``.float()`` for this: it would silently narrow a float64 model, and the invariants are tested in float64.
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))


def lowered(x: Tensor) -> Tensor:
    """``x`` as products with weights take it: under autocast in its half type, else as it is."""
    kind = x.device.type
    half = kind != "meta" and torch.is_autocast_enabled(kind)
    return x.to(torch.get_autocast_dtype(kind)) if half else x


def last(x_BT: Tensor, rows: int) -> Tensor:
    """The last ``rows`` positions of [B, T, ...]; ``x`` itself if these are all: in backward even a whole slice
    copies."""
    return x_BT if rows == x_BT.shape[1] else x_BT[:, x_BT.shape[1] - rows :]
