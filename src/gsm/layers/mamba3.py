"""Mamba-3 (Lahoti et al., 2026, "Mamba-3: Improved Sequence Modeling using State Space Principles"): a state with decay
and rotation determined by each token. Each write combines a token with the previous one."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gsm.layers.delta_rule import delta_rule
from gsm.layers.gated_delta_net import fresh_steps
from gsm.layers.linear import Linear
from gsm.layers.norm import RMSNorm
from gsm.layers.projections import Shape
from gsm.layers.recurrence import Recurrence
from gsm.shapes import promoted

SLOWEST = 1e-4  # lower bound of the decay rate of a state


class Mamba3(Recurrence):
    """``S_t = a_t S_(t-1) + (1 - l_t) d_t a_t k_(t-1) v_(t-1)^T + l_t d_t k_t v_t^T`` (the trapezoidal rule), with the
    step ``d_t = softplus(W_d x_t + b)``, ``a_t = exp(-max(softplus(W_a x_t), 1e-4) d_t)`` and
    ``l_t = sigmoid(W_l x_t)`` for every head. Queries and keys are normed, and a bias of each head is added. Pairs of
    their channels are rotated by the sum of ``pi tanh(W x_s) d_s`` over the tokens s up to their own, which makes the
    state complex. The output is ``norm(S_t^T q_t + D v_t) silu(W' x_t)``.

    This is the form with one input and one output per head (SISO). It differs from the original's defaults in two
    ways: the output is normed, and every head has its own keys and queries, as in all recurrences here.

    The state of a head is [C + 2, C]: S, then the key and the value of the last token. S is stored relative to the
    rotation of the last token, so that the angle need not be stored.

    Args:
        shape: widths that all attention layers share.
        geometry: unused.
        name: prefix of the names of its taps, e.g. ``decoder/3``.
        rotated: number of rotated channels of a head, the last ones; None: half of the channels, as in the original.

    Raises:
        ValueError: if ``rotated`` is odd, below 2 or above the number of channels.
    """

    def __init__(self, shape: Shape, *, geometry: object, name: str, rotated: int | None):
        super().__init__(shape, name=name, convolution=1)
        channels = shape.entry_dim
        self.rotated = 2 * max(1, channels // 4) if rotated is None else rotated
        if self.rotated % 2 or not 2 <= self.rotated <= channels:
            raise ValueError(
                f"rotated must be an even number in [2, {channels}], the number of channels, got {rotated}"
            )
        self.state_shape = (channels + 2, channels)
        self.query_norm, self.key_norm = RMSNorm(channels), RMSNorm(channels)
        self.query_bias = nn.Parameter(torch.ones(shape.heads * channels))
        self.key_bias = nn.Parameter(torch.ones(shape.heads * channels))
        self.decay = Linear(shape.dim, shape.heads)
        self.step = Linear(shape.dim, shape.heads)
        self.step_bias = nn.Parameter(fresh_steps(shape.heads))
        self.blend = Linear(shape.dim, shape.heads)
        self.angle = Linear(shape.dim, self.rotated // 2)
        self.skip = nn.Parameter(torch.ones(shape.heads))
        self.gate = Linear(shape.dim, shape.heads * channels)

    def query_feature(self, x_BTHC: Tensor) -> Tensor:
        """Norm the queries, then add their bias."""
        return self.query_norm(x_BTHC) + self.query_bias.view(self.heads, -1).type_as(x_BTHC)

    def feature(self, x_BTHC: Tensor) -> Tensor:
        """Norm the keys, then add their bias."""
        return self.key_norm(x_BTHC) + self.key_bias.view(self.heads, -1).type_as(x_BTHC)

    def recur(
        self,
        query_BTHC: Tensor,
        key_BTHC: Tensor,
        value_BTHC: Tensor,
        x_BTD: Tensor,
        position_BT: Tensor,
        state_BHRC: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the state's output for every query, [B, T, H, C], and the final state.

        Each token is written twice: at its own step and at the next one. If both writes are made just before the next
        token, the reads are one linear attention over earlier tokens, to which the contribution of the row's own write
        is added. (Otherwise a part of a later token would be added to a row and subtracted again, with rounding
        errors.)
        """
        live_BT1, later_BT1 = (position_BT >= 0)[..., None], (position_BT > 0)[..., None]
        step_BTH = F.softplus(promoted(self.step(x_BTD)) + promoted(self.step_bias))
        blend_BTH = promoted(self.blend(x_BTD)).sigmoid()
        first_BTH = (blend_BTH * step_BTH).masked_fill(~live_BT1, 0)  # first write of a token
        again_BTH = ((1 - blend_BTH) * step_BTH).masked_fill(~later_BT1, 0)  # second write of the previous token
        rate_BTH = F.softplus(promoted(self.decay(x_BTD))).clamp(min=SLOWEST)
        log_decay_BTH = (-rate_BTH * step_BTH).masked_fill(~live_BT1, 0)
        angle_BTHP = (math.pi * promoted(self.angle(x_BTD)).tanh()[:, :, None] * step_BTH[..., None]).cumsum(1)
        query, key = (turned(x, angle_BTHP) for x in (query_BTHC, key_BTHC))
        state_BHCC, last_key_BHC, last_value_BHC = state_BHRC[:, :, :-2], state_BHRC[:, :, -2], state_BHRC[:, :, -1]
        state_BHCC = state_BHCC + outer(again_BTH[:, 0, :, None] * last_key_BHC, last_value_BHC)
        start_BT = position_BT == 0
        before_BTH = (before(first_BTH) + again_BTH).masked_fill(start_BT[..., None], 0) * log_decay_BTH.exp()
        out_BTHC, state_BHCC = delta_rule(
            query,
            before(key),
            (before_BTH[..., None] * before(value_BTHC)).type_as(value_BTHC),
            None,
            log_decay_BTH,
            start_BT,
            torch.ones_like(position_BT, dtype=torch.bool),  # padding too: the token before it may still be unwritten
            state_BHCC,
        )
        own_BTH = first_BTH * (promoted(query) * promoted(key)).sum(-1)
        out_BTHC = out_BTHC + ((promoted(self.skip) + own_BTH)[..., None] * value_BTHC).type_as(out_BTHC)
        state_BHCC = state_BHCC + outer(first_BTH[:, -1, :, None] * key[:, -1], promoted(value_BTHC[:, -1]))
        back_BH1P = -angle_BTHP[:, -1, :, None]
        after = (turned(state_BHCC.mT, back_BH1P).mT, key_BTHC[:, -1, :, None], value_BTHC[:, -1, :, None])
        return out_BTHC, torch.cat([part.type_as(state_BHRC) for part in after], dim=2)

    def gated(self, out_BRHC: Tensor, x_BRD: Tensor) -> Tensor:
        """Multiply the output by SiLU of the gate."""
        return out_BRHC * F.silu(self.gate(x_BRD)).unflatten(-1, (self.heads, -1))

    def multiplied(self) -> int:
        """Return the multiply-adds per token: one read of the state, and the writes of this and the previous token."""
        return 3 * self.heads * self.width**2


def before(x_BT: Tensor) -> Tensor:
    """Return the values of the previous token, [B, T, ...]; zeros for the first."""
    return torch.cat((torch.zeros_like(x_BT[:, :1]), x_BT[:, :-1]), dim=1)


def outer(key_BHC: Tensor, value_BHC: Tensor) -> Tensor:
    """Return the outer products k v^T, [B, H, C, C]."""
    return key_BHC[..., None] * value_BHC[:, :, None]


def turned(x: Tensor, angle_P: Tensor) -> Tensor:
    """Rotate the last 2 P channels of [..., C] in pairs by angles [..., P]; computed in at least float32."""
    still, pairs = promoted(x).split([x.shape[-1] - 2 * angle_P.shape[-1], 2 * angle_P.shape[-1]], dim=-1)
    a, b = pairs.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angle_P.cos(), angle_P.sin()
    turn = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    return torch.cat((still, turn), dim=-1).type_as(x)
