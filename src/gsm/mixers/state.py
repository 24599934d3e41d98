"""GSM's decoder attention (paper, section 3.3): a new query on the shared state, and nothing of its own to remember."""

from __future__ import annotations

from torch import Tensor

from gsm.memory.view import View
from gsm.nn.attention import Shape
from gsm.nn.block import Mixed
from gsm.nn.reader import Reader
from gsm.nn.rope import Rope
from gsm.shapes import last
from gsm.span import Span


class StateAttention(Reader):
    """Query, output projection and sink over the last M state entries, which all decoder layers share.

    Args:
        shape: shared widths.
        state_size: entries that a row sees (M), its own included.
        rope: rotation of the state's entries.
        name: what its taps are called.
    """

    def __init__(self, shape: Shape, *, state_size: int, rope: Rope, name: str):
        super().__init__(shape.dim, shape, window=state_size, rope=rope, name=name)

    def start(self, batch: int, kind: str) -> None:
        """Nothing to remember: the state belongs to the writer."""
        return None

    def forward(self, x_BTD: Tensor, span: Span, own: None, view: View | None) -> Mixed:
        """Reads the state, ``view.window_BEC``, for the last R of T positions."""
        if view is None:
            raise ValueError("StateAttention needs a view of the shared state, got None")
        angles = self.rope(span.row_position_BR, x_BTD.dtype)
        query_BRHC, _ = self.query(last(x_BTD, span.rows))
        return Mixed(self.read(query_BRHC, view, span.row_position_BR, angles), own, view)
