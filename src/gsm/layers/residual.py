"""Residual connections of attention and feed-forward sites: one stream, or several that are mixed (mHC).

All variants share ``Streams`` and one method, ``leave``. A site reads ``streams.mixed_BTD``, or the result of its
method ``enter`` if it has one.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from gsm.errors import within
from gsm.layers.costs import ProductCost, declared_cost, products
from gsm.layers.linear import draw
from gsm.shapes import last_rows, promoted
from gsm_kernels import mhc_boundary
from gsm_kernels.device import full_precision

EPS = 1e-6  # added to the mean square and to the read weights, as in ``gsm_kernels.mhc``


class Streams(NamedTuple):
    """The residual state between two sites.

    Attributes:
        value_BTXD: the residual streams.
        mixed_BTD: the read-out for the next site, unless that has an ``enter``; after the last site, the output of the
            stack.
    """

    value_BTXD: Tensor
    mixed_BTD: Tensor

    @staticmethod
    def copies(x_BTD: Tensor, count: int) -> Streams:
        """Return ``count`` equal streams; the next site reads the first."""
        return Streams(x_BTD[:, :, None].expand(-1, -1, count, -1), x_BTD)

    def last_rows(self, rows: int) -> Streams:
        """Return the streams of the last ``rows`` positions."""
        return self if rows == self.mixed_BTD.shape[1] else Streams(*(last_rows(x, rows) for x in self))


class Residual(Protocol):
    """The interface of a residual site.

    A site with its own read-out has two more methods: ``enter``, from ``Streams`` to [B, T, D], and ``enter_products``,
    its cost per position.
    """

    streams: int

    def leave(self, streams: Streams, update_BRD: Tensor) -> Streams:
        """Write the site's output to the streams of the last R positions; return these."""
        ...

    def products(self) -> ProductCost:
        """Return the cost per row."""
        ...


def entering(site: Residual, streams: Streams) -> Tensor:
    """Return a site's input, [B, T, D]: from its ``enter``, or the read-out of the previous site."""
    enter = getattr(site, "enter", None)
    return streams.mixed_BTD if enter is None else enter(streams)


def with_read_out(streams: Streams, mixed_BTD: Tensor) -> Streams:
    """Return the streams with another read-out, which is the stream itself if there is only one."""
    if mixed_BTD is streams.mixed_BTD:
        return streams
    if streams.value_BTXD.shape[2] > 1:
        return streams._replace(mixed_BTD=mixed_BTD)
    value_BTXD = mixed_BTD[:, :, None]
    return Streams(value_BTXD, value_BTXD[:, :, 0])  # as ``Plain`` leaves them: gradients add up in the same order


def entering_cost(site: Residual) -> ProductCost:
    """Return the cost per position of the site's ``enter``; zero if it has none."""
    return declared_cost(site, "enter_products") if hasattr(site, "enter") else ProductCost()


class Plain(nn.Module):
    """A pre-norm residual: a site adds its output to a single stream.

    Args:
        dim: model width; the site has no parameters.
    """

    streams = 1

    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim

    def leave(self, streams: Streams, update_BRD: Tensor) -> Streams:
        """Add the update to the last R positions of the stream."""
        value_BRXD = last_rows(streams.value_BTXD, update_BRD.shape[1]) + update_BRD[:, :, None]
        return Streams(value_BRXD, value_BRXD[:, :, 0])

    def products(self) -> ProductCost:
        """Return the cost: stream and update are read, the stream is written."""
        return ProductCost(moved=3 * self.dim)


class HyperConnection(nn.Module):
    """Manifold-constrained hyper-connections in the single-pass form (Xie et al., 2025; DeepSeek-V4.1, equation 6).

    The streams before a site determine three sets of coefficients: the weights with which its output is written to each
    stream, the mixing matrix of the streams (doubly stochastic, by Sinkhorn), and the weights with which the *next*
    site reads them. At initialisation all coefficients are nearly constant and the streams stay equal, so that the
    model starts as a pre-norm residual network.

    Args:
        dim: model width.
        streams: number of residual streams (X).
        sinkhorn_rounds: alternating normalisations of the mixing matrix.
        gate: initial value of the three scales of the dynamic part.
    """

    def __init__(self, dim: int, *, streams: int = 4, sinkhorn_rounds: int = 20, gate: float = 0.01):
        super().__init__()
        if streams < 2:
            raise ValueError(f"streams must be at least 2, got {streams}; residual=plain has one")
        within(1, 1000, sinkhorn_rounds=sinkhorn_rounds)
        self.streams, self.sinkhorn_rounds = streams, sinkhorn_rounds
        coefficients = 2 * streams + streams * streams
        self.phi = nn.Parameter(torch.empty(coefficients, streams * dim))
        self.bias = nn.Parameter(torch.zeros(coefficients))
        self.scale = nn.Parameter(torch.full((3,), float(gate)))
        draw(self.phi, 0.02)

    def leave(self, streams: Streams, update_BRD: Tensor) -> Streams:
        """Mix the last R positions of the streams, write the site's output to them, and read for the next site."""
        entered_BRXD = last_rows(streams.value_BTXD, update_BRD.shape[1])
        return Streams(*mhc_boundary(entered_BRXD, update_BRD, self.phi, self.bias, self.scale, self.sinkhorn_rounds))

    def products(self) -> ProductCost:
        """Return the cost of one pass: streams and update are read, streams and the next site's input are written.

        In addition to the products with weights, there are those with coefficients: X x (X + 1) to write and mix, and X
        to read, each on D channels.
        """
        wide, weights = self.phi.shape[1], products(self).weights
        return ProductCost(self.phi.numel() + (self.streams + 2) * wide, 2 * (wide + wide // self.streams), weights)


def by_streams(dim: int, *, streams: int) -> Residual:
    """Return a plain residual for one stream, and a hyper-connection in the single-pass form for more.

    Args:
        dim: model width.
        streams: number of residual streams (X).
    """
    return Plain(dim) if streams == 1 else HyperConnection(dim, streams=streams)


class TwoPassHyperConnection(HyperConnection):
    """Manifold-constrained hyper-connections of Xie et al. (2025): the streams before a site also determine its read
    weights.

    The parameters and their initialisation are those of the single-pass form. A read-out without a site (the output of
    a stack, h after a layer) is the mean of the streams, which mixing does not change.
    """

    def enter(self, streams: Streams) -> Tensor:
        """Read the streams with the coefficients A that they determine, as in ``gsm_kernels.mhc``; returns [B, T,
        D]."""
        value_BTXD = promoted(streams.value_BTXD)
        with full_precision(value_BTXD):
            flat_BTF = value_BTXD.flatten(2)
            number_BTX = flat_BTF @ self.phi[: self.streams].to(flat_BTF.dtype).T
            number_BTX = number_BTX * (flat_BTF.square().mean(dim=-1, keepdim=True) + EPS).rsqrt()
            read_BTX = torch.sigmoid(self.scale[0] * number_BTX + self.bias[: self.streams]) + EPS
            mixed_BTD = (read_BTX[:, :, None] @ value_BTXD)[:, :, 0]
        return mixed_BTD.to(streams.value_BTXD.dtype)

    def leave(self, streams: Streams, update_BRD: Tensor) -> Streams:
        """Mix the last R positions of the streams and write the site's output to them.

        This uses the kernel of the single-pass form, which also reads for the next site; that output is ignored.
        """
        value_BRXD = super().leave(streams, update_BRD).value_BTXD
        return Streams(value_BRXD, value_BRXD.mean(dim=2))

    def enter_products(self) -> ProductCost:
        """Return the cost of reading: streams are read, one vector is written; coefficients are computed and
        applied."""
        wide = self.phi.shape[1]
        return ProductCost((self.streams + 1) * wide, wide + wide // self.streams, self.streams * wide)

    def products(self) -> ProductCost:
        """Return the cost of ``leave``: streams (a second time) and update are read, streams are written.

        In addition to the products with weights, there are those with coefficients: X x (X + 1) to write and mix, on D
        channels.
        """
        wide, numbers = self.phi.shape[1], self.phi.shape[0] - self.streams
        weights = products(self).weights - self.streams * wide
        return ProductCost((numbers + self.streams + 1) * wide, 2 * wide + wide // self.streams, weights)
