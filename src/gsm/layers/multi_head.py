"""The two ends of every attention: the queries of its heads, and the projection of what the heads return."""

from __future__ import annotations

from torch import Tensor, nn

from gsm.layers.projections import OutputProjection, Query, Shape
from gsm.layers.rope import Rope
from gsm.observe import tap


class MultiHead(nn.Module):
    """Query and output projection of one attention, with the taps ``query`` and ``heads``.

    Args:
        dim_in: width of the query's input.
        shape: shared widths.
        rope: rotation of the queries, equal to that of the keys.
        name: prefix of its taps, e.g. ``encoder/3``.
    """

    def __init__(self, dim_in: int, shape: Shape, *, rope: Rope, name: str):
        super().__init__()
        self.rope, self.name = rope, name
        self.query = Query(dim_in, shape, rope.query_scale)
        self.output = OutputProjection(shape)

    def ask(self, x_BRD: Tensor, down_BRQ: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return ``query_BRHC``, not rotated yet, and the latent ``latent_BRQ``; arguments as in ``Query``."""
        query_BRHC: Tensor
        query_BRHC, latent_BRQ = self.query(x_BRD, down_BRQ)
        return tap((self, "query"), query_BRHC), latent_BRQ

    def project(self, out_BRHC: Tensor) -> Tensor:
        """Map the output of all heads to [B, R, D]."""
        return self.output(tap((self, "heads"), out_BRHC))
