"""The common part of every attention: the query projection and the output projection."""

from __future__ import annotations

from torch import Tensor, nn

from gsm.layers.projections import OutputProjection, Query, Shape
from gsm.layers.rope import Rope
from gsm.observe import tap


class MultiHead(nn.Module):
    """Query and output projection of one attention, with the taps ``query`` and ``heads``.

    Args:
        dim_in: width of the query's input.
        shape: widths that all attention layers share.
        rope: rotary embedding of the queries, equal to that of the keys.
        name: prefix of the names of its taps, e.g. ``encoder/3``.
    """

    def __init__(self, dim_in: int, shape: Shape, *, rope: Rope, name: str):
        super().__init__()
        self.rope, self.name = rope, name
        self.query = Query(dim_in, shape, rope.query_scale)
        self.output = OutputProjection(shape)

    def ask(self, x_BRD: Tensor, down_BRQ: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the queries before rotation, [B, R, H, C], and their latents, [B, R, Q]; arguments as in ``Query``."""
        query_BRHC: Tensor
        query_BRHC, latent_BRQ = self.query(x_BRD, down_BRQ)
        return tap((self, "query"), query_BRHC), latent_BRQ

    def project(self, out_BRHC: Tensor) -> Tensor:
        """Project the outputs of all heads to [B, R, D]."""
        return self.output(tap((self, "heads"), out_BRHC))
