"""A writer that subtracts the state's prediction from each entry. It addresses the bottleneck that the paper names
(section 2.3): redundant entries waste the small state.

    z -- norm, projection, norm --> plain entry --------------------- minus --> norm --> rotation --> state entry
                                         |                              ^
                                         '--> the M - 1 plain entries --'
                                              before: beta x prediction

The delta rule of fast-weight memories (Schlag et al., 2021) also subtracts the stored content from each write. There a
write depends on the previous corrected ones, so writes are sequential. Here it depends on the plain entries, so that
all positions are corrected in one parallel step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from gsm.cache.store import WindowStore
from gsm.layers.attended import StatePart
from gsm.layers.latent_attention import attend_tapped
from gsm.layers.linear import Linear
from gsm.layers.norm import RMSNorm
from gsm.layers.projections import Shape
from gsm.layers.rope import Angles
from gsm.shapes import last_rows
from gsm.slots.writer.additive import Additive
from gsm.span import Span
from gsm_kernels import rotate


@dataclass(frozen=True)
class DeltaCache:
    """The cache of one part.

    Attributes:
        plain: the last M - 1 plain entries, for the predictions of later entries.
        corrected: the last M corrected entries, which the decoder reads.
    """

    plain: WindowStore
    corrected: WindowStore


class Delta(Additive):
    """z = e + r, and with x = RMSNorm(z), i over the M - 1 positions before t in the same document:

        p_t = RMSNorm( W x_t )                                                  the plain entry
        a_ti = exp(q_t . RoPE_{i-t} p_i / sqrt(C)) / (exp(sink) + the sum of these over i),    q_t = W_q x_t
        s_t = sum_i a_ti RoPE_{i-t} p_i                                         the prediction from entries before t
        beta_t = sigmoid(w . x_t + b)
        entry_t = RoPE_t RMSNorm( p_t - beta_t s_t )

    The sink takes the weight if no entry fits; the first position of a document has no prediction. The norm gives the
    difference the full range of an entry, and keys a fixed scale. w starts at zero and b is negative. So the model
    starts near the paper's entries, because s_t predicts nothing while W_q is random; but beta is large enough for W_q
    to learn. If the state has several parts, each has its own correction.

    A row sees M corrected entries, and the first of them needs M - 1 more plain entries. So the state carries
    information over 2 M - 1 positions, and stores 2 M - 1 entries.

    Args:
        shape, state_size, common: as in ``StateWriter``.
        bias: initial b; -2.0 makes beta 0.12.

    Raises:
        ValueError: for a state of one entry, which has no entries before it that could predict it.
    """

    def __init__(self, shape: Shape, *, state_size: int, bias: float, **common: Any):
        super().__init__(shape, state_size=state_size, **common)
        if state_size < 2:
            raise ValueError(
                f"state_size must be at least 2 for writer=delta, got {state_size}; writer=additive can have one entry"
            )
        self.reach = state_size - 1
        self.correction = nn.ModuleDict({part.name: Correction(shape, self.reach, bias) for part in self.parts})

    def start_part(self, batch: int) -> DeltaCache:
        """Return empty windows of plain and corrected entries."""
        return DeltaCache(self.window(batch, self.reach), self.window(batch, self.state_size))

    def stored(self, tokens: int) -> int:
        """Return the number of elements of plain and corrected entries, which both are state."""
        return (min(tokens, self.reach) + min(tokens, self.state_size)) * self.width

    def multiply_adds(self, first: int, last: int) -> dict[str, int]:
        """Return the multiply-adds of the predictions: logit and mixture for at most M - 1 entries before a
        position."""
        seen = sum(min(position, self.reach) for position in range(first, last))
        return {"attention": 2 * self.width * seen}

    def reads(self, first: int, last: int) -> int:
        """Return the number of elements of the plain entries that the predictions read."""
        return self.width * max(0, min(last - 1, last - 1 - first + self.reach))

    def write(self, part: StatePart, x_BTD: Tensor, span: Span, cache: DeltaCache) -> tuple[Tensor, DeltaCache]:
        """Write plain entries of all positions, and corrected entries of the last ``span.rows``."""
        angles, correction = self.angles(part, span, x_BTD.dtype), cast(Correction, self.correction[part.name])
        plain_BTC = self.projection(part).latent(x_BTD)
        plain_BEC, plain = cache.plain.extend(rotate(plain_BTC, *angles))
        angles = angles.last_rows(span.rows)
        new_BRC = correction(x_BTD, plain_BTC, plain_BEC, span.row_position_BR, angles)
        corrected_BEC, corrected = cache.corrected.extend(rotate(new_BRC, *angles))
        return corrected_BEC, DeltaCache(plain, corrected)


class Correction(nn.Module):
    """Subtract a part (beta) of the prediction from previous entries from each entry.

    Args:
        shape: shared widths.
        reach: number of positions before a row that predict its entry.
        bias: initial bias of beta.
    """

    def __init__(self, shape: Shape, reach: int, bias: float):
        super().__init__()
        self.reach = reach
        self.query = Linear(shape.dim, shape.entry_dim)
        self.sink = nn.Parameter(torch.zeros(1))
        self.rate = Linear(shape.dim, 1, gain=0.0)
        self.bias = nn.Parameter(torch.full((1,), float(bias)))
        self.norm = RMSNorm(shape.entry_dim)

    def forward(
        self, x_BTD: Tensor, plain_BTC: Tensor, plain_BEC: Tensor, position_BR: Tensor, angles: Angles
    ) -> Tensor:
        """Return the corrected entries of the rows before their rotation, [B, R, C].

        Args:
            x_BTD: z, normed.
            plain_BTC: plain entries of the same positions, not rotated.
            plain_BEC: stored and new plain entries in stream order, rotated.
            position_BR: int64, positions of the rows.
            angles: rotation of the rows.
        """
        rows = position_BR.shape[1]
        beta_BT1 = torch.sigmoid(self.rate(x_BTD) + self.bias)
        predicted_BRC = self.predict(last_rows(self.query(x_BTD), rows), plain_BEC, position_BR, angles)
        new_BRC = last_rows(plain_BTC, rows) - last_rows(beta_BT1, rows) * predicted_BRC
        return self.norm(new_BRC).type_as(plain_BTC)  # under autocast beta has a wider dtype than the entries

    def predict(self, query_BRC: Tensor, plain_BEC: Tensor, position_BR: Tensor, angles: Angles) -> Tensor:
        """Return s of the rows, [B, R, C], rotated back.

        Attention sees a row's own entry and the previous ones. To exclude its own, each row is moved back by one entry
        and one position; at position 0 nothing remains.
        """
        before_BEC = pad(plain_BEC[:, :-1], (0, 0, 1, 0))
        position_BR = (position_BR - 1).clamp(min=-1)
        band = (query_BRC[:, :, None], before_BEC, position_BR, self.reach, self.sink, *angles)
        return attend_tapped("state/weights", *band)[:, :, 0]
