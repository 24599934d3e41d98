"""Rotary positions: angles of the rotated channel pairs, with YaRN for contexts beyond the trained one.

Rotary embedding is from Su et al. (2021), YaRN from Peng et al. (2023), in the form of DeepSeek-V4.1: adjacent pairs,
only the last channels of a head, by default frequencies only (no attention temperature). The rotation itself is
``gsm_kernels.rotate``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gsm.shapes import last_rows
from gsm.span import Span


class Angles(NamedTuple):
    """Cosine and sine of every rotated pair, at least float32."""

    cos_BTP: Tensor
    sin_BTP: Tensor

    def last_rows(self, rows: int) -> Angles:
        """Return the angles of the last ``rows`` positions."""
        if rows == self.cos_BTP.shape[1]:
            return self
        return Angles(last_rows(self.cos_BTP, rows), last_rows(self.sin_BTP, rows))


class Rope:
    """Angles ``position * base ** (-2 i / channels)`` for the pairs i.

    It is not a module, so that it owns no tensor that a change of dtype could round. The table is made on the device of
    the positions.

    Args:
        channels: number of rotated channels, even.
        base: the size's ``bank_rope_base`` in layers that see the whole context (160,000 at the paper's scales), its
            ``rope_base`` in window-only layers and in GSM's decoder (10,000).
        factor: YaRN's scale of the context; 1 switches YaRN off.
        original: trained context in tokens that YaRN starts from; not needed without YaRN.
        beta_fast, beta_slow: bounds in turns over the original context. Pairs with more than ``beta_fast`` turns keep
            their frequency; pairs with fewer than ``beta_slow`` are slowed by the factor; between them is a ramp.
        mscale: coefficient of YaRN's attention temperature, see ``query_scale``; 0: none.

    Raises:
        ValueError: for an odd number of channels, a factor below 1, a factor above 1 without ``original``, or invalid
            betas or mscale.
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
                f"yarn_beta_fast must be above yarn_beta_slow, and that above 0, got {beta_fast} and {beta_slow}"
            )
        if mscale < 0:
            raise ValueError(f"yarn_mscale must be at least 0 (0: no attention temperature), got {mscale}")
        if factor > 1 and original is None:
            raise ValueError(f"yarn_original must be the original context for yarn_factor={factor}, got null")
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
        """The parameters that identify this rotation."""
        return self.channels, self.base, self.factor, self.original, self.beta_fast, self.beta_slow

    @property
    def query_scale(self) -> float:
        """Factor of queries: 1 / t of YaRN's softmax(q k / (t sqrt(C))), with sqrt(1 / t) = 1 + 0.1 mscale ln(factor).

        Peng et al. multiply queries and keys by sqrt(1 / t), through cosine and sine. Here entries are values too, and
        only some of their channels are rotated, so the query gets the whole factor.
        """
        return (1 + 0.1 * self.mscale * math.log(self.factor)) ** 2

    def frequencies(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return the radians per position of every pair, with YaRN's interpolation of the slow pairs."""
        pair_P = torch.arange(self.channels // 2, device=device, dtype=dtype)
        theta_P = self.base ** (-2 * pair_P / self.channels)
        if self.factor == 1:
            return theta_P
        low, high = self.correction_range()
        slow_P = ((pair_P - low) / (high - low)).clamp(0, 1)
        return theta_P * (1 - slow_P) + theta_P / self.factor * slow_P

    def correction_range(self) -> tuple[int, int]:
        """Return the ends of YaRN's ramp: the pairs with ``beta_fast`` and ``beta_slow`` turns over the original
        context."""
        original = self.original
        assert original is not None  # because YaRN is on

        def pair(turns: float) -> float:
            return self.channels * math.log(original / (2 * math.pi * turns)) / (2 * math.log(self.base))

        low, high = max(math.floor(pair(self.beta_fast)), 0), min(math.ceil(pair(self.beta_slow)), self.channels - 1)
        return low, max(high, low + 1)
