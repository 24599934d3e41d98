"""How the output of an attention or feed-forward site joins the residual stream: one stream, or several that are mixed (mHC).

Both variants share ``Streams`` and one method, ``leave``; a site reads with ``streams.mixed()``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from gsm_kernels import mhc_enter, mhc_leave


class Streams(NamedTuple):
    """The residual state between two sites.

    Attributes:
        value_BTXD: the residual streams.
        read_BTX: weights with which the next site reads them, computed by the site before (single-pass mHC).
    """

    value_BTXD: Tensor
    read_BTX: Tensor

    @staticmethod
    def copies(x_BTD: Tensor, count: int) -> Streams:
        """``count`` equal streams; the next site reads the first."""
        read_X = x_BTD.new_zeros(count)
        read_X[0] = 1
        return Streams(x_BTD[:, :, None].expand(-1, -1, count, -1), read_X.expand(*x_BTD.shape[:2], -1))

    def mixed(self) -> Tensor:
        """What the next site reads, [B, T, D]; after the last site: the output of the stack."""
        if self.value_BTXD.shape[2] == 1:
            return self.value_BTXD[:, :, 0]
        return mhc_enter(self.value_BTXD, self.read_BTX)

    def last(self, rows: int) -> Streams:
        """The last ``rows`` positions."""
        return Streams(self.value_BTXD[:, -rows:], self.read_BTX[:, -rows:])


class Plain(nn.Module):
    """One stream, to which a site adds its output: pre-norm residual.

    Args:
        dim: model width (unused: the site has no parameters).
    """

    streams = 1

    def __init__(self, dim: int):
        super().__init__()

    def leave(self, streams: Streams, update_BRD: Tensor) -> Streams:
        """Adds the update to the last R positions of the stream."""
        rows = streams.last(update_BRD.shape[1])
        return Streams(rows.value_BTXD + update_BRD[:, :, None], rows.read_BTX)


class HyperConnection(nn.Module):
    """Manifold-constrained hyper-connections in the single-pass form (Xie et al., 2025; DeepSeek-V4.1, equation 6).

    The streams that enter a site decide three things: how its output is written to each stream, how the streams are mixed on the way past
    it (a doubly stochastic matrix, by Sinkhorn), and how the *next* site reads them. At initialisation all coefficients are nearly
    constant and the streams stay equal, so that the model starts as a pre-norm residual network.

    Args:
        dim: model width.
        streams: number of residual streams (n).
        sinkhorn_rounds: alternating normalisations of the mixing matrix.
        gate: initial value of the three scales of the dynamic part.
    """

    def __init__(self, dim: int, *, streams: int = 4, sinkhorn_rounds: int = 20, gate: float = 0.01):
        super().__init__()
        if streams < 2:
            raise ValueError(f"streams must be at least 2 for hyper-connections, got {streams}; for one stream take residual plain")
        self.streams, self.sinkhorn_rounds = streams, sinkhorn_rounds
        coefficients = 2 * streams + streams * streams
        self.phi = nn.Parameter(torch.empty(coefficients, streams * dim))
        self.bias = nn.Parameter(torch.zeros(coefficients))
        self.scale = nn.Parameter(torch.full((3,), gate))
        nn.init.normal_(self.phi, std=0.02)

    def leave(self, streams: Streams, update_BRD: Tensor) -> Streams:
        """Mixes the last R positions of the streams and writes the site's output to them."""
        entered_BRXD = streams.value_BTXD[:, -update_BRD.shape[1] :]
        return Streams(*mhc_leave(entered_BRXD, update_BRD, self.phi, self.bias, self.scale, self.sinkhorn_rounds))
