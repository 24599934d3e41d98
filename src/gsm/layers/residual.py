"""Residual connections: one residual stream, or several that are mixed (mHC, manifold-constrained hyper-connections).

A *site* is an attention or a feed-forward together with its residual connection. It reads ``streams.mixed_BTD``, or the
result of the connection's method ``enter`` if there is one. The method ``leave`` writes its output to the streams.
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
    """The residual streams between two sites.

    Attributes:
        value_BTXD: the X streams.
        mixed_BTD: the input of the next site, unless it has an ``enter``; after the last site, the output of the stack.
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
    """The interface of a residual connection.

    If it computes the input of its site itself, it has two more methods: ``enter``, from ``Streams`` to [B, T, D], and
    ``enter_products``, the cost of ``enter`` per position.
    """

    streams: int

    def leave(self, streams: Streams, update_BRD: Tensor) -> Streams:
        """Write the output of the site to the streams of the last R positions, and return these."""
        ...

    def products(self) -> ProductCost:
        """Return the cost per row."""
        ...


def entering(site: Residual, streams: Streams) -> Tensor:
    """Return the input of a site, [B, T, D]: the result of its ``enter``, or else ``streams.mixed_BTD``."""
    enter = getattr(site, "enter", None)
    return streams.mixed_BTD if enter is None else enter(streams)


def with_read_out(streams: Streams, mixed_BTD: Tensor) -> Streams:
    """Return the streams with another ``mixed_BTD``. If there is only one stream, it is replaced too."""
    if mixed_BTD is streams.mixed_BTD:
        return streams
    if streams.value_BTXD.shape[2] > 1:
        return streams._replace(mixed_BTD=mixed_BTD)
    value_BTXD = mixed_BTD[:, :, None]
    return Streams(value_BTXD, value_BTXD[:, :, 0])  # a view, as in ``Plain``: gradients are summed in the same order


def entering_cost(site: Residual) -> ProductCost:
    """Return the cost per position of the site's ``enter``; zero if it has none."""
    return declared_cost(site, "enter_products") if hasattr(site, "enter") else ProductCost()


class Plain(nn.Module):
    """The usual pre-norm residual connection: the output of a site is added to a single stream.

    Args:
        dim: model width; unused, as there are no parameters.
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
        """Return the cost per row: the stream and the update are read, the stream is written."""
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
        sinkhorn_rounds: number of alternating normalisations of the mixing matrix.
        gate: initial value of the three scales of the part of the coefficients that depends on the streams.

    Raises:
        ValueError: if ``streams`` is below 2.
    """

    def __init__(self, dim: int, *, streams: int = 4, sinkhorn_rounds: int = 20, gate: float = 0.01):
        super().__init__()
        if streams < 2:
            raise ValueError(f"streams must be at least 2, got {streams}; use residual=plain for one stream")
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
        """Return the cost per row: streams and update are read, streams and the next site's input are written.

        Besides the products with weights, there are X (X + 1) products to write and mix and X to read, each on D
        channels.
        """
        wide, weights = self.phi.shape[1], products(self).weights
        return ProductCost(self.phi.numel() + (self.streams + 2) * wide, 2 * (wide + wide // self.streams), weights)


def by_streams(dim: int, *, streams: int) -> Residual:
    """Return a ``Plain`` residual connection for one stream, a ``HyperConnection`` for more.

    Args:
        dim: model width.
        streams: number of residual streams (X).
    """
    return Plain(dim) if streams == 1 else HyperConnection(dim, streams=streams)


class TwoPassHyperConnection(HyperConnection):
    """Manifold-constrained hyper-connections of Xie et al. (2025): the streams before a site also determine the weights
    with which it reads them. In the single-pass form, the streams before the previous site do.

    The parameters and their initialisation are those of the single-pass form. Where no site follows (at the output of a
    stack, or for h after a layer), ``mixed_BTD`` is the mean of the streams, which mixing does not change.
    """

    def enter(self, streams: Streams) -> Tensor:
        """Return the input of the site, [B, T, D]: the streams, weighted by the coefficients A of
        ``gsm_kernels.mhc``."""
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

        The kernel of the single-pass form also computes an input of the next site, which is ignored.
        """
        value_BRXD = super().leave(streams, update_BRD).value_BTXD
        return Streams(value_BRXD, value_BRXD.mean(dim=2))

    def enter_products(self) -> ProductCost:
        """Return the cost of ``enter`` per position: the coefficients are computed, the streams read, and one vector is
        written."""
        wide = self.phi.shape[1]
        return ProductCost((self.streams + 1) * wide, wide + wide // self.streams, self.streams * wide)

    def products(self) -> ProductCost:
        """Return the cost of ``leave`` per row: streams and update are read, streams are written.

        Besides the products with weights, there are X (X + 1) products to write and mix, each on D channels.
        """
        wide, numbers = self.phi.shape[1], self.phi.shape[0] - self.streams
        weights = products(self).weights - self.streams * wide
        return ProductCost((numbers + self.streams + 1) * wide, 2 * wide + wide // self.streams, weights)
