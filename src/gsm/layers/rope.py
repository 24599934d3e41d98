"""Rotary positions: angles of the rotated channel pairs, with YaRN for contexts beyond the trained one.

Rotary embedding is from Su et al. (2021), YaRN from Peng et al. (2023), used here as DeepSeek-V4.1 does: adjacent
pairs, only the last channels of a head, by default frequencies only (no attention temperature). The rotation itself
is ``gsm_kernels.rotate``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gsm.shapes import last
from gsm.span import Span


class Angles(NamedTuple):
    """Cosine and sine of every rotated pair, at least float32."""

    cos_BTP: Tensor
    sin_BTP: Tensor

    def last(self, rows: int) -> Angles:
        """Those of the last ``rows`` positions."""
        return self if rows == self.cos_BTP.shape[1] else Angles(last(self.cos_BTP, rows), last(self.sin_BTP, rows))


class Rope:
    """Angles ``position * base ** (-2 i / channels)`` for the pairs i.

    Not a module: it owns no tensor that a change of dtype could round. The table is made on the device of the
    positions.

    Args:
        channels: number of rotated channels, even.
        base: the size's ``bank_rope_base`` in layers that see far (160,000 at the paper's scales), its ``rope_base``
            in window-only layers and in GSM's decoder (10,000).
        factor: YaRN's scale of the context; 1 switches YaRN off.
        original: trained context in tokens that YaRN starts from; not needed where it is off.
        beta_fast, beta_slow: pairs that turn more often than ``beta_fast`` times over the original context keep their
            frequency, those that turn less often than ``beta_slow`` times turn slower by the factor; between, a ramp.
        mscale: of YaRN's attention temperature, see ``query_scale``; 0: none.

    Raises:
        ValueError: for an odd number of channels, a factor below 1, one above without ``original``, or betas or an
            mscale that cannot be.
    """

    def __init__(
        self,
        channels: int,
        *,
        base: float,
        factor: float = 1.0,
        original: int | None = None,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        mscale: float = 0.0,
    ):
        if channels % 2:
            raise ValueError(f"rotary_dim must be even because channels are rotated in pairs, got {channels}")
        if factor < 1:
            raise ValueError(f"yarn_factor must be at least 1 (1: off), got {factor}")
        if not beta_fast > beta_slow > 0:
            raise ValueError(
                f"yarn_beta_fast {beta_fast} must be above yarn_beta_slow {beta_slow}, and that above 0: they are turns"
            )
        if mscale < 0:
            raise ValueError(f"yarn_mscale must be at least 0 (0: no attention temperature), got {mscale}")
        if factor > 1 and original is None:
            raise ValueError(f"YaRN with a factor of {factor} needs the original context in tokens")
        self.channels, self.base, self.factor, self.original = channels, base, factor, original
        self.beta_fast, self.beta_slow, self.mscale = beta_fast, beta_slow, mscale

    def __call__(self, position_BT: Tensor, dtype: torch.dtype) -> Angles:
        """Angles at the given positions, for tensors of ``dtype``: float64 for float64, else float32."""
        wide = torch.promote_types(dtype, torch.float32)
        angle_BTP = position_BT.to(wide)[..., None] * self.frequencies(position_BT.device, wide)
        return Angles(angle_BTP.cos(), angle_BTP.sin())

    def at(self, span: Span, dtype: torch.dtype) -> Angles:
        """Angles at the new positions of a span; layers that rotate alike share them."""
        return span.once(("angles", *self.key, dtype), lambda: self(span.position_BT, dtype))

    @property
    def key(self) -> tuple[float | None, ...]:
        """What tells this rotation from others."""
        return self.channels, self.base, self.factor, self.original, self.beta_fast, self.beta_slow

    @property
    def query_scale(self) -> float:
        """What queries are multiplied by: 1 / t of YaRN's softmax(q k / (t sqrt(C))), with
        sqrt(1 / t) = 1 + 0.1 mscale ln(factor).

        Peng et al. put sqrt(1 / t) on queries and keys, through cosine and sine. Entries here are values too, and only
        some of their channels are rotated: so the query gets all of it.
        """
        return (1 + 0.1 * self.mscale * math.log(self.factor)) ** 2

    def frequencies(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Radians per position of every pair, with YaRN's interpolation of the slow ones."""
        pair_P = torch.arange(self.channels // 2, device=device, dtype=dtype)
        theta_P = self.base ** (-2 * pair_P / self.channels)
        if self.factor == 1:
            return theta_P
        low, high = self.correction_range()
        slow_P = ((pair_P - low) / (high - low)).clamp(0, 1)
        return theta_P * (1 - slow_P) + theta_P / self.factor * slow_P

    def correction_range(self) -> tuple[int, int]:
        """Where YaRN's ramp begins and ends: the pairs that turn ``beta_fast`` and ``beta_slow`` times over the
        original context."""
        original = self.original
        assert original is not None  # or YaRN would be off

        def pair(turns: float) -> float:
            return self.channels * math.log(original / (2 * math.pi * turns)) / (2 * math.log(self.base))

        low, high = max(math.floor(pair(self.beta_fast)), 0), min(math.ceil(pair(self.beta_slow)), self.channels - 1)
        return low, max(high, low + 1)
