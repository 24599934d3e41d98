"""The sequence mixer of each encoder layer: the slot ``model/encoder_layer``.

A Full layer builds the bank of its group. Layers below the first bank (``window``) and the other layers of a group
(``reuse``) may be other mixers. Stages and layers above a mixer without entries see the entries of the layer below it.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gsm.errors import within
from gsm.layers.block import Mixer, MixerGeometry
from gsm.layers.costs import products
from gsm.layers.projections import Shape
from gsm.layers.sparse import Role, SparseAttention


class EncoderLayer(ABC):
    """Base of all variants.

    Args:
        feed_forward_convolution: tokens that a short convolution before each feed-forward of the encoder sees; 1: no
            convolution.

    Raises:
        ValueError: below 1, or above 1,024.
    """

    def __init__(self, feed_forward_convolution: int = 1):
        within(1, 1024, feed_forward_convolution=feed_forward_convolution)
        self.feed_forward_convolution = feed_forward_convolution

    @abstractmethod
    def layer(self, shape: Shape, role: Role, *, geometry: MixerGeometry, **common: Any) -> Mixer:
        """Build the mixer of one encoder layer.

        Args:
            shape: shared widths.
            role: ``window``, ``full`` or ``reuse``, as in ``SparseAttention``. The mixer of a ``full`` layer returns an
                ``Attended`` with a bank.
            geometry: the model's geometry, for mixers of the slot ``model/mixer``.
            common: ``name`` and the other arguments of ``SparseAttention``.
        """


class Attention(EncoderLayer):
    """Sparse attention in every layer: the paper's (section 3.1)."""

    def layer(self, shape: Shape, role: Role, *, geometry: MixerGeometry, **common: Any) -> Mixer:
        """Build the attention."""
        return SparseAttention(shape, role, **common)


ATTENTION = Attention()


class Recurrent(EncoderLayer):
    """Recurrences, or any other mixers, in the layers of some roles; sparse attention in the others.

    Args:
        mixer: called with ``shape, geometry=..., name=...``.
        roles: roles of the layers that get the mixer: ``window``, ``reuse`` or both. Full layers keep their attention,
            which builds a bank.
        heads: heads of these mixers; None: the divisor of the size's that brings the number of their parameters
            nearest to that of the attention that they replace.
        feed_forward_convolution: of all layers, as in ``EncoderLayer``.

    Raises:
        ValueError: heads is below 1, or roles is empty or has another role.
    """

    def __init__(
        self,
        mixer: Callable[..., Mixer],
        roles: Sequence[str] = ("reuse",),
        heads: int | None = None,
        feed_forward_convolution: int = 1,
    ):
        super().__init__(feed_forward_convolution)
        within(1, heads=heads)
        if not roles or set(roles) - {"window", "reuse"}:
            raise ValueError(f"roles must be [window], [reuse] or [window,reuse], got {list(roles)}")
        self.mixer, self.roles, self.heads = mixer, roles, heads

    def layer(self, shape: Shape, role: Role, *, geometry: MixerGeometry, **common: Any) -> Mixer:
        """Build the mixer, or the attention of a layer of another role."""
        attention = partial(SparseAttention, shape, role, **common)
        if role not in self.roles:
            return attention()
        mixer = partial(self.mixer, geometry=geometry, name=common["name"])
        return mixer(replace(shape, heads=self.heads or fitting_heads(mixer, shape, attention)))


def fitting_heads(mixer: Callable[[Shape], Any], shape: Shape, target: Callable[[], Any]) -> int:
    """Return the divisor of the shape's heads with which a mixer's parameters are nearest to the target's.

    Divisors that the mixer refuses are left out. If all are equally near, the shape's heads stay.
    """
    differences = {}
    with torch.device("meta"):
        goal = products(target()).weights
        for heads in range(shape.heads, 0, -1):
            if shape.heads % heads == 0:
                with contextlib.suppress(ValueError):
                    differences[heads] = abs(products(mixer(replace(shape, heads=heads))).weights - goal)
    return min(differences, key=differences.__getitem__, default=shape.heads)
