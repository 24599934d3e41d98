"""Rotary position embedding (Su et al., 2021): the angles of the rotated channel pairs, with YaRN (Peng et al., 2023)
for contexts beyond the trained one.

As in DeepSeek-V4.1, pairs are adjacent channels, only the last channels of a head are rotated, and by default YaRN
changes only the frequencies and not the attention temperature. ``gsm_kernels.rotate`` applies the rotation.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gsm.shapes import last_rows
from gsm.span import Span


class Angles(NamedTuple):
    """The cosine and the sine of the angle of every rotated pair, in at least float32."""

    cos_BTP: Tensor
    sin_BTP: Tensor

    def last_rows(self, rows: int) -> Angles:
        """Return the angles of the last ``rows`` positions."""
        if rows == self.cos_BTP.shape[1]:
            return self
        return Angles(last_rows(self.cos_BTP, rows), last_rows(self.sin_BTP, rows))


class Rope:
    """Angles ``position * base ** (-2 i / channels)`` for the pairs i.

    This is no module and holds no tensor, so that casting a model does not round the frequencies. Angles are computed
    on the device of the positions.

    Args:
        channels: number of rotated channels, even.
        base: base of the frequencies: ``bank_rope_base`` of the size in layers that see the whole context (160,000 at
            the paper's scales), ``rope_base`` in window-only layers and in GSM's decoder (10,000).
        factor: factor by which YaRN extends the context; 1: no YaRN.
        original: context in tokens before the extension; needed only with YaRN.
        beta_fast, beta_slow: bounds of the number of turns over the original context. Pairs with more than
            ``beta_fast`` turns keep their frequency, that of pairs with fewer than ``beta_slow`` is divided by the
            factor, and the pairs between are interpolated.
        mscale: coefficient of YaRN's attention temperature, see ``query_scale``; 0: no temperature.

    Raises:
        ValueError: if ``channels`` is odd, ``factor`` below 1, ``original`` missing for a factor above 1, or a beta or
            ``mscale`` invalid.
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
            raise ValueError(f"rotary_dim must be even, as channels are rotated in pairs, got {channels}")
        if factor < 1:
            raise ValueError(f"yarn_factor must be at least 1 (1: off), got {factor}")
        if not beta_fast > beta_slow > 0:
            raise ValueError(
                f"yarn_beta_fast must be above yarn_beta_slow, and both above 0, got {beta_fast} and {beta_slow}"
            )
        if mscale < 0:
            raise ValueError(f"yarn_mscale must be at least 0 (0: no attention temperature), got {mscale}")
        if factor > 1 and original is None:
            raise ValueError(f"yarn_original must be a number of tokens for yarn_factor={factor}, got null")
        self.channels, self.base, self.factor, self.original = channels, base, factor, original
        self.beta_fast, self.beta_slow, self.mscale = beta_fast, beta_slow, mscale

    def __call__(self, position_BT: Tensor, dtype: torch.dtype) -> Angles:
        """Return the angles at ``position_BT`` for tensors of ``dtype``: float64 for float64, else float32."""
        wide = torch.promote_types(dtype, torch.float32)
        angle_BTP = position_BT.to(wide)[..., None] * self.frequencies(position_BT.device, wide)
        return Angles(angle_BTP.cos(), angle_BTP.sin())

    def at(self, span: Span, dtype: torch.dtype) -> Angles:
        """Return the angles at the new positions of a span, shared by all layers with the same rotation."""
        return span.once(("angles", *self.key, dtype), lambda: self(span.position_BT, dtype))

    @property
    def key(self) -> tuple[float | None, ...]:
        """The parameters of this rotary embedding. Two with equal keys have equal angles."""
        return self.channels, self.base, self.factor, self.original, self.beta_fast, self.beta_slow

    @property
    def query_scale(self) -> float:
        """The factor of queries, 1 / t in YaRN's softmax(q k / (t sqrt(C))), with sqrt(1 / t) = 1 + 0.1 mscale
        ln(factor).

        Peng et al. multiply queries and keys by sqrt(1 / t) each, through cosine and sine. Here entries are values too,
        and only some of their channels are rotated, so only the query is multiplied, by 1 / t.
        """
        return (1 + 0.1 * self.mscale * math.log(self.factor)) ** 2

    def frequencies(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the frequency of every pair in radians per position, with YaRN's interpolation of the slow pairs."""
        pair_P = torch.arange(self.channels // 2, device=device, dtype=dtype)
        theta_P = self.base ** (-2 * pair_P / self.channels)
        if self.factor == 1:
            return theta_P
        low, high = self.correction_range()
        slow_P = ((pair_P - low) / (high - low)).clamp(0, 1)
        return theta_P * (1 - slow_P) + theta_P / self.factor * slow_P

    def correction_range(self) -> tuple[int, int]:
        """Return the first and last pair of YaRN's interpolation: those with ``beta_fast`` and ``beta_slow`` turns over
        the original context."""
        original = self.original
        assert original is not None  # checked in __init__

        def pair(turns: float) -> float:
            return self.channels * math.log(original / (2 * math.pi * turns)) / (2 * math.log(self.base))

        low, high = max(math.floor(pair(self.beta_fast)), 0), min(math.ceil(pair(self.beta_slow)), self.channels - 1)
        return low, max(high, low + 1)
