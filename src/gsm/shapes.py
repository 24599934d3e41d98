"""The dimension letters at the end of tensor names, and the dtype rules of the project.

The name of a tensor is the noun of its content, then its dimensions: ``retrieved_SBRD`` has one retrieved vector per
stage, sequence, row and channel.

    B  sequences in a batch            T  new positions of a call        R  requested rows: the last R of T
    E  window entries, stored and new  F  slots of a bank, or a cache    G  slots that this call adds to a bank
    K  slots that a row selects        N  candidate blocks of a row      S  aggregation stages
    W  entries of a window             M  entries of the state           m  tokens of a bank entry
    D  model width                     H  attention heads                C  width of an entry, and of a head
    P  rotated channel pairs           Q  rank of a query                X  residual streams
    J  index heads                     I  index width                    V  vocabulary
    U  width of several vectors side by side: [h ; r], or keys and values

Some letters have a second meaning in some files: G key and value heads (``layers/key_value.py``), J entries of a
position (state readers and writers). In ``layers/experts.py`` and ``models/balancing.py``: L layers, E experts, F the
width of an expert, N rows of all sequences, M their pairs with experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gsm_kernels.device import at_least_float32


def promoted(x: Tensor) -> Tensor:
    """Return ``x`` in at least float32: half types are widened, float64 stays float64.

    Never use ``.float()`` for this: it would silently narrow a float64 model, and the invariants are tested in float64.
    """
    return at_least_float32(x)


def read_by_several(entry: Tensor) -> Tensor:
    """Return entries that several layers attend to. If they have a gradient it is at least float32, so that autograd
    adds those of the layers without rounding; each layer reads the entries in the dtype of its queries."""
    return promoted(entry) if torch.is_grad_enabled() and entry.requires_grad else entry


def lowered(x: Tensor) -> Tensor:
    """Return ``x`` in the dtype of matmuls with weights: the half type under autocast, else its own."""
    kind = x.device.type
    half = kind != "meta" and torch.is_autocast_enabled(kind)
    return x.to(torch.get_autocast_dtype(kind)) if half else x


def last_rows(x_BT: Tensor, rows: int) -> Tensor:
    """Return the last ``rows`` positions of [B, T, ...]; ``x`` itself if these are all, because the backward of even a
    whole slice copies."""
    return x_BT if rows == x_BT.shape[1] else x_BT[:, x_BT.shape[1] - rows :]
