"""The optimiser: AdamW in four groups, and a learning rate that is a function of the step alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class AdamW:
    """AdamW with decoupled weight decay (Loshchilov and Hutter, 2019), linear warm-up, then a cosine.

    Attributes:
        learning_rate: peak learning rate.
        warmup_steps: steps of linear warm-up; never more than a quarter of the run, so that very short runs learn too.
        final_fraction: learning rate of the last step, as a fraction of the peak.
        weight_decay: decay of the groups whose name does not end in ``no_decay``.
        betas: decay rates of the first and second moment.
        eps: added to the denominator.
    """

    learning_rate: float
    warmup_steps: int
    final_fraction: float
    weight_decay: float
    betas: Sequence[float] = (0.9, 0.95)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        for name, low, high in (
            ("learning_rate", 0, math.inf),
            ("final_fraction", 0, 1),
            ("weight_decay", 0, math.inf),
        ):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"optimizer.{name} is {getattr(self, name)}, but has to lie between {low} and {high}")
        if self.warmup_steps < 0:
            raise ValueError(f"optimizer.warmup_steps is {self.warmup_steps}, but has to be 0 or more")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas is {list(self.betas)}, but has to be two numbers from 0 to below 1")

    def build(self, groups: Mapping[str, Sequence[nn.Parameter]]) -> torch.optim.Optimizer:
        """One parameter group per non-empty entry of ``groups``, carrying its name; frozen parameters are left out."""
        described = [
            {"params": trained, "name": name, "weight_decay": 0.0 if name.endswith("no_decay") else self.weight_decay}
            for name, parameters in groups.items()
            if (trained := [p for p in parameters if p.requires_grad])
        ]
        fused = all(p.device.type in ("cpu", "cuda") for group in described for p in group["params"])
        betas = (float(self.betas[0]), float(self.betas[1]))
        return torch.optim.AdamW(described, lr=self.learning_rate, betas=betas, eps=self.eps, fused=fused)

    def factor(self, step: int, steps: int) -> float:
        """What the peak learning rate is multiplied with at ``step`` (counted from 0) of ``steps``."""
        warmup = min(self.warmup_steps, steps // 4)
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
        return self.final_fraction + (1 - self.final_fraction) * (1 + math.cos(math.pi * progress)) / 2
