"""Mamba-3 (Lahoti et al., 2026, "Mamba-3: Improved Sequence Modeling using State Space Principles"): a state that
decays and turns at rates that each token gives, and to which a token is written together with the one before it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gsm.layers.gated_delta_net import fresh_steps
from gsm.layers.linear import Linear
from gsm.layers.norm import RMSNorm
from gsm.layers.projections import Shape
from gsm.layers.recurrence import Recurrence
from gsm.shapes import promoted
from gsm_kernels import delta_rule

SLOWEST = 1e-4  # rate at which a state decays, at least


class Mamba3(Recurrence):
    """``S_t = a_t S_(t-1) + (1 - l_t) d_t a_t k_(t-1) v_(t-1)^T + l_t d_t k_t v_t^T`` (the trapezoidal rule), with a
    step ``d_t = softplus(W_d x_t + b)``, ``a_t = exp(-max(softplus(W_a x_t), 1e-4) d_t)`` and
    ``l_t = sigmoid(W_l x_t)`` for every head. Queries and keys are normed, shifted by a bias of each head, and their
    pairs of channels turned by the sum of ``pi tanh(W x_s) d_s`` over the tokens s up to their own: so the state is one
    of complex numbers. The output is ``norm(S_t^T q_t + D v_t) silu(W' x_t)``.

    Of the original it has the form with one input and one output for each head (SISO), with a norm of the output. Keys
    and queries are projected for each head, as in all recurrences here; there, all heads share them.

    The state of a head is [C + 2, C]: S, then key and value of the last token. S is kept as the next token would have
    it, were there no turn before its own, and so no angle is.

    Args:
        shape: shared widths.
        geometry: not needed.
        name: what its taps are called.
        rotated: channels of a head that are turned, the last ones; None: half of them, as in the original.

    Raises:
        ValueError: for a number of rotated channels that cannot be.
    """

    def __init__(self, shape: Shape, *, geometry: object, name: str, rotated: int | None):
        super().__init__(shape, name=name, convolution=1)
        channels = shape.entry_dim
        self.rotated = 2 * max(1, channels // 4) if rotated is None else rotated
        if self.rotated % 2 or not 2 <= self.rotated <= channels:
            raise ValueError(f"rotated must be an even number from 2 to the {channels} channels, got {rotated}")
        self.kept = (channels + 2, channels)
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
        """Normed, then shifted."""
        return self.query_norm(x_BTHC) + self.query_bias.view(self.heads, -1).type_as(x_BTHC)

    def feature(self, x_BTHC: Tensor) -> Tensor:
        """The same with a norm and a bias of its own."""
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
        """What the state answers to every query, [B, T, H, C], and the state after the call.

        A token is written by itself and once more when the next one comes: both at once is one linear attention, whose
        answers to a token's own query lack what will only be written then.
        """
        step_BTH = F.softplus(promoted(self.step(x_BTD)) + promoted(self.step_bias))
        blend_BTH = promoted(self.blend(x_BTD)).sigmoid()
        again_BTH = ((1 - blend_BTH) * step_BTH).masked_fill((position_BT <= 0)[..., None], 0)  # the token before
        next_BTH = F.pad(again_BTH[:, 1:], (0, 0, 0, 1))
        angle_BTHP = (math.pi * promoted(self.angle(x_BTD)).tanh()[:, :, None] * step_BTH[..., None]).cumsum(1)
        query, key = (turned(x, angle_BTHP) for x in (query_BTHC, key_BTHC))
        state_BHCC, last_key_BHC, last_value_BHC = self.parts(state_BHRC)
        written_BHCC = again_BTH[:, 0, :, None, None] * last_key_BHC[..., None] * last_value_BHC[:, :, None]
        out_BTHC, state_BHCC = delta_rule(
            query,
            key,
            ((blend_BTH * step_BTH + next_BTH)[..., None] * value_BTHC).type_as(value_BTHC),
            None,
            -F.softplus(promoted(self.decay(x_BTD))).clamp(min=SLOWEST) * step_BTH,
            position_BT == 0,
            position_BT >= 0,
            state_BHCC + written_BHCC,
        )
        early_BTH = next_BTH * (promoted(query) * promoted(key)).sum(-1)
        out_BTHC = out_BTHC + ((promoted(self.skip) - early_BTH)[..., None] * value_BTHC).type_as(out_BTHC)
        back_BH1P = -angle_BTHP[:, -1, :, None]
        after = (turned(state_BHCC.mT, back_BH1P).mT, key_BTHC[:, -1, :, None], value_BTHC[:, -1, :, None])
        return out_BTHC, torch.cat([part.type_as(state_BHRC) for part in after], dim=2)

    def parts(self, state_BHRC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """S, and key and value of the last token."""
        return state_BHRC[:, :, :-2], state_BHRC[:, :, -2], state_BHRC[:, :, -1]

    def gated(self, out_BRHC: Tensor, x_BRD: Tensor) -> Tensor:
        """The output times SiLU of the gate."""
        return out_BRHC * F.silu(self.gate(x_BRD)).unflatten(-1, (self.heads, -1))

    def for_rows(self) -> tuple[nn.Module, ...]:
        """The gate as well."""
        return *super().for_rows(), self.gate

    def multiplied(self) -> int:
        """A query reads the state; the token and the one before it are written."""
        return 3 * self.heads * self.width**2


def turned(x: Tensor, angle_P: Tensor) -> Tensor:
    """The last 2 P channels of [..., C], pair by pair turned by angles [..., P], in at least float32 and back."""
    still, pairs = promoted(x).split([x.shape[-1] - 2 * angle_P.shape[-1], 2 * angle_P.shape[-1]], dim=-1)
    a, b = pairs.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angle_P.cos(), angle_P.sin()
    turn = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    return torch.cat((still, turn), dim=-1).type_as(x)
