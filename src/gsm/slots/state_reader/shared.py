"""GSM's decoder attention (paper, section 3.3): a new query on the shared state, and nothing of its own to remember."""

from __future__ import annotations

import torch
from torch import Tensor

from gsm.cache.view import Attended
from gsm.costs.primitives import LayerCost
from gsm.layers.block import Mixed
from gsm.layers.latent_attention import LatentAttention, attention_weights
from gsm.layers.projections import Shape
from gsm.layers.rope import Angles, Rope
from gsm.observe import tap
from gsm.shapes import last
from gsm.span import Span
from gsm_kernels import attend_band


class StateAttention(LatentAttention):
    """Query, output projection and sink over the last M state entries, which all decoder layers share.

    Args:
        shape: shared widths.
        state_size: entries that a row sees (M), its own included.
        slots: entries of a position (J), side by side in the state.
        rope: rotation of the state's entries.
        name: what its taps are called.
    """

    def __init__(self, shape: Shape, *, state_size: int, slots: int, rope: Rope, name: str):
        super().__init__(shape.dim, shape, window=state_size, rope=rope, name=name)
        self.slots = slots

    def start(self, batch: int, kind: str) -> None:
        """Nothing to remember: the state belongs to the writer."""
        return None

    def forward(self, x_BTD: Tensor, span: Span, own: None, view: Attended | None) -> Mixed:
        """Reads the state, ``view.window_BEC``, for the last R of T positions."""
        if view is None:
            raise ValueError("StateAttention needs a view of the shared state, got None")
        angles = self.rope.at(span, x_BTD.dtype).last(span.rows)
        query_BRHC, _ = self.query(last(x_BTD, span.rows))
        return Mixed(self.read(query_BRHC, view, span.row_position_BR, angles), own, view)

    def read(self, query_BRHC: Tensor, view: Attended, position_BR: Tensor, angles: Angles) -> Tensor:
        """One softmax over the last M entries, with the sink in the denominator; then the output projection. [B, R, D].

        Attention moves its band on by one entry a row. Where a position has J entries, it gets J rows, equal but for
        where they stand, of which the last sees all J: that one counts.
        """
        count = self.slots
        if count == 1:
            return super().read(query_BRHC, view, position_BR, angles)
        query_BEHC, cos_BEP, sin_BEP = (x.repeat_interleave(count, dim=1) for x in (query_BRHC, *angles))
        place_BRJ = position_BR[..., None] * count + torch.arange(count, device=position_BR.device)
        place_BE = place_BRJ.where(position_BR[..., None] >= 0, -1).flatten(1)
        band = (place_BE, self.window_size, self.sink)
        every = slice(count - 1, None, count)
        turned = Angles(cos_BEP, sin_BEP)
        tap(f"{self.name}/weights", lambda: attention_weights(query_BEHC, view, *band, turned)[:, every])
        return self.output(attend_band(query_BEHC, view.window_BEC, *band, *turned)[:, every])

    def work(self, kind: str, below: LayerCost | None) -> LayerCost:
        """What it costs: the last M entries, J of each position."""
        look = self.seeing(self.window_size // self.slots, each=self.slots, nearest=True)
        return LayerCost(self.reading(), looks=(look,))
