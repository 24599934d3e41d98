"""The sequence mixer of each encoder layer: the config group ``model/encoder_layer``.

A ``full`` layer is sparse attention, because it builds the bank of its group. The layers below the first bank
(``window``) and the other layers of a group (``reuse``) can be other mixers. A stage or a layer above a mixer without
entries, such as a recurrence, sees the entries of the layer below that mixer.
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
        feed_forward_convolution: width in tokens of a short convolution before each feed-forward of the encoder; 1: no
            convolution.

    Raises:
        ValueError: if ``feed_forward_convolution`` is not in [1, 1024].
    """

    def __init__(self, feed_forward_convolution: int = 1):
        within(1, 1024, feed_forward_convolution=feed_forward_convolution)
        self.feed_forward_convolution = feed_forward_convolution

    @abstractmethod
    def layer(self, shape: Shape, role: Role, *, geometry: MixerGeometry, **common: Any) -> Mixer:
        """Build the mixer of one encoder layer.

        Args:
            shape: widths that all attention layers share.
            role: ``window``, ``full`` or ``reuse``, as in ``SparseAttention``. The mixer of a ``full`` layer returns an
                ``Attended`` with a bank.
            geometry: the model's geometry, for mixers of ``model/mixer``.
            common: ``name`` and the other arguments of ``SparseAttention``.
        """


class Attention(EncoderLayer):
    """The paper: sparse attention in every layer (section 3.1)."""

    def layer(self, shape: Shape, role: Role, *, geometry: MixerGeometry, **common: Any) -> Mixer:
        """Build the attention."""
        return SparseAttention(shape, role, **common)


ATTENTION = Attention()


class Recurrent(EncoderLayer):
    """A recurrence, or any other mixer, in the layers of some roles; sparse attention in the others.

    Args:
        mixer: builds the mixer; called with ``shape, geometry=..., name=...``.
        roles: roles of the layers that get the mixer: ``window``, ``reuse`` or both. Full layers keep their attention,
            which builds a bank.
        heads: number of heads of the mixer; None: the divisor of the size's number of heads with which it has most
            nearly as many parameters as the attention that it replaces.
        feed_forward_convolution: as in ``EncoderLayer``, for all layers.

    Raises:
        ValueError: if ``heads`` is below 1, or ``roles`` is empty or has another role.
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
        """Build the mixer, or attention for a layer of another role."""
        attention = partial(SparseAttention, shape, role, **common)
        if role not in self.roles:
            return attention()
        mixer = partial(self.mixer, geometry=geometry, name=common["name"])
        return mixer(replace(shape, heads=self.heads or fitting_heads(mixer, shape, attention)))


def fitting_heads(mixer: Callable[[Shape], Any], shape: Shape, target: Callable[[], Any]) -> int:
    """Return the number of heads with which a mixer has most nearly as many parameters as the target.

    The divisors of the shape's number of heads are tried, except those for which the mixer raises ValueError. Of
    equally near ones, the largest is returned; if none is possible, the shape's number.

    Args:
        mixer: builds the mixer for a shape.
        shape: widths and the largest number of heads.
        target: builds the module to match.
    """
    differences = {}
    with torch.device("meta"):
        goal = products(target()).weights
        for heads in range(shape.heads, 0, -1):
            if shape.heads % heads == 0:
                with contextlib.suppress(ValueError):
                    differences[heads] = abs(products(mixer(replace(shape, heads=heads))).weights - goal)
    return min(differences, key=differences.__getitem__, default=shape.heads)
