"""How the output of an attention or feed-forward site joins the residual stream: one stream, or several that are
mixed (mHC).

Both variants share ``Streams`` and one method, ``leave``; a site reads ``streams.mixed_BTD``.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from gsm.costs.primitives import ProductCost, products
from gsm.layers.linear import draw
from gsm.shapes import last
from gsm_kernels import mhc_boundary


class Streams(NamedTuple):
    """The residual state between two sites.

    Attributes:
        value_BTXD: the residual streams.
        mixed_BTD: what the next site reads of them; after the last site: the output of the stack.
    """

    value_BTXD: Tensor
    mixed_BTD: Tensor

    @staticmethod
    def copies(x_BTD: Tensor, count: int) -> Streams:
        """``count`` equal streams, of which the next site reads the first."""
        return Streams(x_BTD[:, :, None].expand(-1, -1, count, -1), x_BTD)


class Residual(Protocol):
    """What a block needs of a residual site."""

    streams: int

    def leave(self, streams: Streams, update_BRD: Tensor) -> Streams:
        """The streams of the last R positions after the site has written its output to them."""
        ...

    def products(self) -> ProductCost:
        """What a row costs."""
        ...


class Plain(nn.Module):
    """One stream, to which a site adds its output: pre-norm residual.

    Args:
        dim: model width; the site has no parameters.
    """

    streams = 1

    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim

    def leave(self, streams: Streams, update_BRD: Tensor) -> Streams:
        """Adds the update to the last R positions of the stream."""
        value_BRXD = last(streams.value_BTXD, update_BRD.shape[1]) + update_BRD[:, :, None]
        return Streams(value_BRXD, value_BRXD[:, :, 0])

    def products(self) -> ProductCost:
        """What it costs: stream and update are read, the stream is written."""
        return ProductCost(moved=3 * self.dim)


class HyperConnection(nn.Module):
    """Manifold-constrained hyper-connections in the single-pass form (Xie et al., 2025; DeepSeek-V4.1, equation 6).

    The streams that enter a site decide three things: how its output is written to each stream, how the streams are
    mixed on the way past it (a doubly stochastic matrix, by Sinkhorn), and how the *next* site reads them. At
    initialisation all coefficients are nearly constant and the streams stay equal, so that the model starts as a
    pre-norm residual network.

    Args:
        dim: model width.
        streams: number of residual streams (X).
        sinkhorn_rounds: alternating normalisations of the mixing matrix.
        gate: initial value of the three scales of the dynamic part.
    """

    def __init__(self, dim: int, *, streams: int = 4, sinkhorn_rounds: int = 20, gate: float = 0.01):
        super().__init__()
        if streams < 2:
            raise ValueError(
                f"streams must be at least 2 for hyper-connections, got {streams}; for one stream take residual plain"
            )
        self.streams, self.sinkhorn_rounds = streams, sinkhorn_rounds
        coefficients = 2 * streams + streams * streams
        self.phi = nn.Parameter(torch.empty(coefficients, streams * dim))
        self.bias = nn.Parameter(torch.zeros(coefficients))
        self.scale = nn.Parameter(torch.full((3,), float(gate)))
        draw(self.phi, 0.02)

    def leave(self, streams: Streams, update_BRD: Tensor) -> Streams:
        """Mixes the last R positions of the streams, writes the site's output to them, and reads for the next site."""
        entered_BRXD = last(streams.value_BTXD, update_BRD.shape[1])
        return Streams(*mhc_boundary(entered_BRXD, update_BRD, self.phi, self.bias, self.scale, self.sinkhorn_rounds))

    def products(self) -> ProductCost:
        """What it costs, in one pass: streams and update are read, streams and what the next site reads are written.

        Besides its weights' products those of the coefficients: write and mix X x (X + 1), read X, each on D channels.
        """
        wide, weights = self.phi.shape[1], products(self).weights
        return ProductCost(self.phi.numel() + (self.streams + 2) * wide, 2 * (wide + wide // self.streams), weights)
