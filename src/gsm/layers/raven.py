"""Raven (Afzal et al., 2026, "Raven: High-Recall Sequence Modeling with Sparse Memory Routing"): slots of which every
token chooses some to be written to, while the others stay as they are. After ``fla/layers/raven.py`` in
flash-linear-attention 0.6."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gsm.layers.gated_delta_net import fresh_rates, fresh_steps
from gsm.layers.linear import Linear
from gsm.layers.norm import RMSNorm
from gsm.layers.projections import Shape
from gsm.layers.slot_memory import SlotMemory
from gsm.shapes import promoted


class Raven(SlotMemory):
    """Slots of which a token leaves ``a_tm = exp(-exp(A) softplus(W x_t + b) r_tm)``, a number for a head to the power
    of what the router gives to a slot: ``r_t`` is ``sigmoid(W' x_t)`` in the ``top_k`` slots where that is largest,
    divided by their sum, and 0 in all others, which the token leaves alone. Query and key are normed behind SiLU.

    Args:
        shape: shared widths.
        geometry: not needed.
        name: what its taps are called.
        convolution: tokens that the short convolution sees; 1: there is none, as in the original.
        slots: slots of a head (M); None: as many as it has channels.
        top_k: slots that a token is written to; None: half of them, as in the original, at least one. One alone has the
            share 1 whatever the router says, which then learns nothing.
        noise: whether Gumbel noise is added to the router's logits in training, so that all slots are tried.

    Raises:
        ValueError: for slots that cannot be, or a top_k outside of 1 to their number.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        geometry: object,
        name: str,
        convolution: int,
        slots: int | None,
        top_k: int | None,
        noise: bool,
    ):
        super().__init__(shape, name=name, convolution=convolution, slots=slots)
        # Not top_k: what selects bank entries is known by that (gsm.training.callbacks.selection).
        self.written, self.noise = max(1, self.slots // 2) if top_k is None else top_k, noise
        if not 1 <= self.written <= self.slots:
            raise ValueError(f"top_k must be from 1 to the {self.slots} slots, got {top_k}")
        self.key_norm = RMSNorm(shape.entry_dim)
        self.query_norm = RMSNorm(shape.entry_dim)
        self.decay = Linear(shape.dim, shape.heads)
        self.decay_rate = nn.Parameter(fresh_rates(shape.heads))
        self.decay_bias = nn.Parameter(fresh_steps(shape.heads))
        self.router = Linear(shape.dim, shape.heads * self.slots)

    def slot_decay(self, x_BTD: Tensor) -> Tensor:
        """log a, [B, T, H, M], in at least float32; 0 in slots that are not written to."""
        step_BTH = F.softplus(promoted(self.decay(x_BTD)) + promoted(self.decay_bias))
        return (-promoted(self.decay_rate).exp() * step_BTH)[..., None] * self.route(x_BTD)

    def route(self, x_BTD: Tensor) -> Tensor:
        """r, how a token is shared out among the slots, [B, T, H, M], in at least float32."""
        logit_BTHM = promoted(self.router(x_BTD)).unflatten(-1, (self.heads, self.slots))
        if self.noise and self.training:
            logit_BTHM = logit_BTHM - torch.empty_like(logit_BTHM).exponential_().log()
        score_BTHK, slot_BTHK = logit_BTHM.sigmoid().topk(self.written, dim=-1)
        share_BTHK = score_BTHK / score_BTHK.sum(-1, keepdim=True).clamp(min=1e-9)
        return torch.zeros_like(logit_BTHM).scatter(-1, slot_BTHK, share_BTHK)

    def query_feature(self, x_BTHC: Tensor) -> Tensor:
        """SiLU, then a norm."""
        return self.query_norm(F.silu(x_BTHC))

    def feature(self, x_BTHC: Tensor) -> Tensor:
        """The same with a norm of its own."""
        return self.key_norm(F.silu(x_BTHC))

    def multiplied(self) -> int:
        """A query reads all slots, a token is written to some."""
        return self.heads * (self.slots + self.written) * 2 * self.width
