"""Raven (Afzal et al., 2026, "Raven: High-Recall Sequence Modeling with Sparse Memory Routing"): a router chooses a few
slots to which a token is written; the other slots are unchanged. It follows ``fla/layers/raven.py`` in
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
    """``SlotMemory`` with the decay ``a_tm = exp(-exp(A) softplus(W x_t + b) r_tm)`` of slot m: the decay of the head,
    to the power of the slot's share r_tm. ``r_t`` is ``sigmoid(W' x_t)`` in the ``top_k`` slots with the largest
    values, divided by their sum, and 0 in the others, which are unchanged. SiLU and a norm are applied to queries and
    keys.

    Args:
        shape: widths that all attention layers share.
        geometry: unused.
        name: prefix of the names of its taps, e.g. ``decoder/3``.
        convolution: width in tokens of the short convolution; 1: no convolution, as in the original.
        slots: slots of a head (M); None: its number of channels.
        top_k: number of slots that a token is written to; None: half of them, as in the original, at least one. With 1,
            the share is always 1, so the router does not learn.
        noise: whether Gumbel noise is added to the router's logits in training, so that all slots are tried.

    Raises:
        ValueError: if ``slots`` is below 1, or ``top_k`` not in [1, slots].
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
        # Not named top_k, by which gsm.training.callbacks.selection finds selections of bank entries.
        self.written, self.noise = max(1, self.slots // 2) if top_k is None else top_k, noise
        if not 1 <= self.written <= self.slots:
            raise ValueError(f"top_k must be in [1, {self.slots}], the number of slots, got {top_k}")
        self.key_norm = RMSNorm(shape.entry_dim)
        self.query_norm = RMSNorm(shape.entry_dim)
        self.decay = Linear(shape.dim, shape.heads)
        self.decay_rate = nn.Parameter(fresh_rates(shape.heads))
        self.decay_bias = nn.Parameter(fresh_steps(shape.heads))
        self.router = Linear(shape.dim, shape.heads * self.slots)

    def slot_decay(self, x_BTD: Tensor) -> Tensor:
        """Return log a, [B, T, H, M], in at least float32; 0 in slots that are not written to."""
        step_BTH = F.softplus(promoted(self.decay(x_BTD)) + promoted(self.decay_bias))
        return (-promoted(self.decay_rate).exp() * step_BTH)[..., None] * self.route(x_BTD)

    def route(self, x_BTD: Tensor) -> Tensor:
        """Return r, the shares of a token in the slots, [B, T, H, M], in at least float32."""
        logit_BTHM = promoted(self.router(x_BTD)).unflatten(-1, (self.heads, self.slots))
        if self.noise and self.training:
            logit_BTHM = logit_BTHM - torch.empty_like(logit_BTHM).exponential_().log()
        score_BTHK, slot_BTHK = logit_BTHM.sigmoid().topk(self.written, dim=-1)
        share_BTHK = score_BTHK / score_BTHK.sum(-1, keepdim=True).clamp(min=1e-9)
        return torch.zeros_like(logit_BTHM).scatter(-1, slot_BTHK, share_BTHK)

    def query_feature(self, x_BTHC: Tensor) -> Tensor:
        """Apply SiLU, then a norm."""
        return self.query_norm(F.silu(x_BTHC))

    def feature(self, x_BTHC: Tensor) -> Tensor:
        """Apply SiLU, then the keys' own norm."""
        return self.key_norm(F.silu(x_BTHC))

    def multiplied(self) -> int:
        """Return the multiply-adds per token: all slots are read, and ``top_k`` are written."""
        return self.heads * (self.slots + self.written) * 2 * self.width
