"""How the output of an attention or feed-forward site joins the residual stream: one stream, or several that are
mixed (mHC).

All variants share ``Streams`` and one method, ``leave``. A site reads ``streams.mixed_BTD``, or if it has a method
``enter``, what this makes of the streams.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from gsm.costs.primitives import ProductCost, products, told
from gsm.layers.linear import draw
from gsm.shapes import last, promoted
from gsm_kernels import mhc_boundary
from gsm_kernels.device import full_precision

EPS = 1e-6  # of the mean square, and of the weights that streams are read with: as in ``gsm_kernels.mhc``


class Streams(NamedTuple):
    """The residual state between two sites.

    Attributes:
        value_BTXD: the residual streams.
        mixed_BTD: what they are read as by the next site, unless it has an ``enter`` of its own; after the last site:
            the output of the stack.
    """

    value_BTXD: Tensor
    mixed_BTD: Tensor

    @staticmethod
    def copies(x_BTD: Tensor, count: int) -> Streams:
        """``count`` equal streams, of which the next site reads the first."""
        return Streams(x_BTD[:, :, None].expand(-1, -1, count, -1), x_BTD)

    def last(self, rows: int) -> Streams:
        """Those of the last ``rows`` positions."""
        return self if rows == self.mixed_BTD.shape[1] else Streams(*(last(x, rows) for x in self))


class Residual(Protocol):
    """What a block needs of a residual site. One that reads the streams in a way of its own has a method ``enter``,
    from ``Streams`` to what it reads of them, [B, T, D], and ``enter_products``, what that costs for a position."""

    streams: int

    def leave(self, streams: Streams, update_BRD: Tensor) -> Streams:
        """The streams of the last R positions after the site has written its output to them."""
        ...

    def products(self) -> ProductCost:
        """What a row costs."""
        ...


def entering(site: Residual, streams: Streams) -> Tensor:
    """What a site reads of the streams that enter it: by its ``enter``, or as the site before has left them.
    [B, T, D]."""
    enter = getattr(site, "enter", None)
    return streams.mixed_BTD if enter is None else enter(streams)


def entering_cost(site: Residual) -> ProductCost:
    """What its ``enter`` costs for each position that enters; nothing, if it has none."""
    return told(site, "enter_products") if hasattr(site, "enter") else ProductCost()


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


class TwoPassHyperConnection(HyperConnection):
    """Manifold-constrained hyper-connections as Xie et al. (2025) have them: reading, too, is decided by the streams
    that enter the site itself.

    Parameters are those of the single-pass form, and are drawn alike. Where no site reads (the output of a stack, h
    behind a layer), it is the mean of the streams, which the mixing leaves as it is.
    """

    def enter(self, streams: Streams) -> Tensor:
        """Reads the streams with the coefficients A that they decide, as in ``gsm_kernels.mhc``. [B, T, D]."""
        value_BTXD = promoted(streams.value_BTXD)
        with full_precision(value_BTXD):
            flat_BTF = value_BTXD.flatten(2)
            number_BTX = flat_BTF @ self.phi[: self.streams].to(flat_BTF.dtype).T
            number_BTX = number_BTX * (flat_BTF.square().mean(dim=-1, keepdim=True) + EPS).rsqrt()
            read_BTX = torch.sigmoid(self.scale[0] * number_BTX + self.bias[: self.streams]) + EPS
            mixed_BTD = (read_BTX[:, :, None] @ value_BTXD)[:, :, 0]
        return mixed_BTD.to(streams.value_BTXD.dtype)

    def leave(self, streams: Streams, update_BRD: Tensor) -> Streams:
        """Mixes the last R positions of the streams and writes the site's output to them.

        Both are those of the single pass and take its kernel, which also reads for a next site: nobody looks at that.
        """
        value_BRXD = super().leave(streams, update_BRD).value_BTXD
        return Streams(value_BRXD, value_BRXD.mean(dim=2))

    def enter_products(self) -> ProductCost:
        """What reading costs: streams are read, one vector is written; coefficients and their products with the
        streams."""
        wide = self.phi.shape[1]
        return ProductCost((self.streams + 1) * wide, wide + wide // self.streams, self.streams * wide)

    def products(self) -> ProductCost:
        """What the rest costs: streams, which are read a second time, and update are read, streams are written. Besides
        its weights' products those of the coefficients: write and mix X x (X + 1), on D channels."""
        wide, numbers = self.phi.shape[1], self.phi.shape[0] - self.streams
        weights = products(self).weights - self.streams * wide
        return ProductCost((numbers + self.streams + 1) * wide, 2 * wide + wide // self.streams, weights)
