"""A writer that subtracts from each entry its prediction from the previous entries. The paper (section 2.3) names the
problem that this addresses: the state is small, and redundant entries waste it.

    z -- norm, projection, norm --> plain entry --------------------- minus --> norm --> rotation --> state entry
                                         |                              ^
                                         '--> the M - 1 plain entries --'
                                              before: beta x prediction

The delta rule of fast-weight memories (Schlag et al., 2021) also subtracts the stored content from each write. There,
each write depends on the previous corrected writes, so writes are sequential. Here it depends on the plain entries, so
all positions are corrected in parallel.
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

    The sink takes the weight if no entry fits; at the first position of a document, s_t is zero. The outer norm gives
    all entries the same scale. w starts at zero and b is negative, so beta_t starts small and the entries start near
    the paper's, but beta_t is large enough for W_q to get a gradient. If the state has several parts, each has its own
    correction.

    A row sees M corrected entries, the first of which needs M - 1 plain entries before it. So the state stores 2 M - 1
    entries and carries information over 2 M - 1 positions.

    Args:
        shape, state_size, common: as in ``StateWriter``.
        bias: initial b; -2.0 gives a beta of 0.12.

    Raises:
        ValueError: if ``state_size`` is below 2, so that there is no entry to predict from.
    """

    def __init__(self, shape: Shape, *, state_size: int, bias: float, **common: Any):
        super().__init__(shape, state_size=state_size, **common)
        if state_size < 2:
            raise ValueError(
                f"state_size must be at least 2 for writer=delta, got {state_size}; use writer=additive for one entry"
            )
        self.reach = state_size - 1
        self.correction = nn.ModuleDict({part.name: Correction(shape, self.reach, bias) for part in self.parts})

    def start_part(self, batch: int) -> DeltaCache:
        """Return empty windows of plain and corrected entries."""
        return DeltaCache(self.window(batch, self.reach), self.window(batch, self.state_size))

    def stored(self, tokens: int) -> int:
        """Return the number of elements of the plain and the corrected entries; the state has both."""
        return (min(tokens, self.reach) + min(tokens, self.state_size)) * self.width

    def multiply_adds(self, first: int, last: int) -> dict[str, int]:
        """Return the multiply-adds of the predictions: the logit and the weighted sum of up to M - 1 entries per
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
    """Subtract beta times the prediction from previous entries, s_t, from each plain entry.

    Args:
        shape: widths that all attention layers share.
        reach: number of earlier positions from which an entry is predicted (M - 1).
        bias: initial b of beta.
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
            plain_BTC: plain entries of the same positions, before rotation.
            plain_BEC: stored and new plain entries in the order of their tokens, rotated.
            position_BR: int64, positions of the rows.
            angles: rotation of the rows.
        """
        rows = position_BR.shape[1]
        beta_BT1 = torch.sigmoid(self.rate(x_BTD) + self.bias)
        predicted_BRC = self.predict(last_rows(self.query(x_BTD), rows), plain_BEC, position_BR, angles)
        new_BRC = last_rows(plain_BTC, rows) - last_rows(beta_BT1, rows) * predicted_BRC
        return self.norm(new_BRC).type_as(plain_BTC)  # under autocast beta has a wider dtype than the entries

    def predict(self, query_BRC: Tensor, plain_BEC: Tensor, position_BR: Tensor, angles: Angles) -> Tensor:
        """Return s_t of the rows, [B, R, C], before rotation.

        The kernel lets a row see its own entry and the previous ones. To exclude its own, each row is moved back by one
        entry and one position. At position 0, no entry remains.
        """
        before_BEC = pad(plain_BEC[:, :-1], (0, 0, 1, 0))
        position_BR = (position_BR - 1).clamp(min=-1)
        band = (query_BRC[:, :, None], before_BEC, position_BR, self.reach, self.sink, *angles)
        return attend_tapped("state/weights", *band)[:, :, 0]
