"""Sparse attention on an input that a short convolution has mixed with the tokens before it.

x -> x + convolution(x) -> window entries, compressor, query, indexer
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from gsm.cache.memory import LayerCache
from gsm.layers.attended import Attended
from gsm.layers.block import LayerOutput
from gsm.layers.convolution import ShortConvolution
from gsm.layers.costs import LayerCost, ProductCost
from gsm.layers.projections import Shape
from gsm.layers.sparse import Role, SparseAttention
from gsm.span import Span


class ConvolvedAttention(SparseAttention):
    """Sparse attention on ``x_t + sum_j w_j * x_(t-j)`` for j below the width, channel by channel, inside a document.

    The weights start at zero, so that a new model computes as one without the convolution (Canon layers: Allen-Zhu,
    2025, arXiv 2512.17351).

    Args:
        shape, role, options: as in ``SparseAttention``.
        convolution: tokens that the convolution sees.

    Raises:
        ValueError: for a convolution outside of 1 to 1024.
    """

    def __init__(self, shape: Shape, role: Role, *, convolution: int, **options: Any):
        super().__init__(shape, role, **options)
        self.convolution = ShortConvolution(shape.dim, convolution, zero=True)

    @property
    def reach(self) -> int | None:
        """Number of earlier positions of its input that a row needs: its window, and before the oldest entry the
        convolution's."""
        reach = super().reach
        return None if reach is None else reach + self.convolution.width - 1

    def start(self, batch: int, kind: str) -> LayerCache:
        """Return an empty cache with the last inputs of the convolution; ``kind`` labels its bytes."""
        return replace(super().start(batch, kind), convolution=self.convolution.start(batch, kind))

    def forward(
        self, x_BTD: Tensor, span: Span, cache: LayerCache, below: Attended | None
    ) -> tuple[Tensor, LayerOutput]:
        """Mix all T new positions with the tokens before them; then attend for the last R of them.

        In a pruned call the first ``width - 1`` positions lack tokens before them, and no row reads their entries.
        """
        assert cache.convolution is not None
        mixed_BTD, window = self.convolution.added(x_BTD, cache.convolution, span.position_BT)
        update_BRD, out = super().forward(mixed_BTD, span, cache, below)
        return update_BRD, out._replace(cache=replace(out.cache, convolution=window))

    def work(self, kind: str, below: LayerCost | None) -> LayerCost:
        """Return the cost of the attention and of the convolution, which runs for every token."""
        per_token = {"convolution": self.convolution.products()}
        convolution = LayerCost(per_token=per_token, stores=(self.convolution.store(kind),))
        return super().work(kind, below) + convolution

    def cost_of_rows(self, *others: nn.Module | None) -> dict[str, ProductCost]:
        """Return the cost per row of all parameters except the parameters of ``others`` and the convolution's."""
        return super().cost_of_rows(self.convolution, *others)
