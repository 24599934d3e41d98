"""A causal model of the transformers library behind our interface: `start`, forward with `memory` and `rows`, `logits`.

For tests against code that nobody here wrote.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache


@dataclass(frozen=True)
class CacheMemory:
    """Keys and values read so far, and which of them are padding (0) or not (1), [B, T]."""

    cache: DynamicCache
    seen_BT: Tensor

    def expand(self, times: int) -> CacheMemory:
        cache = copy.deepcopy(self.cache)
        cache.batch_repeat_interleave(times)
        return CacheMemory(cache, self.seen_BT.repeat_interleave(times, dim=0))


@dataclass(frozen=True)
class CacheOutput:
    logits: Tensor
    memory: CacheMemory


class HuggingFace(nn.Module):
    """Any causal language model of transformers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.eval()

    def start(self, batch: int = 1) -> CacheMemory:
        return CacheMemory(DynamicCache(config=self.model.config), torch.zeros(batch, 0, dtype=torch.int64))

    def forward(
        self,
        tokens: Tensor,
        documents: Tensor | None = None,
        memory: CacheMemory | None = None,
        rows: int | None = None,
    ) -> CacheOutput:
        memory = memory or self.start(tokens.shape[0])
        new_BT = torch.ones_like(tokens) if documents is None else (documents >= 0).long()
        seen_BT = torch.cat([memory.seen_BT, new_BT], dim=1)
        position_BT = (seen_BT.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        cache = copy.deepcopy(memory.cache)
        out = self.model(
            input_ids=tokens,
            attention_mask=seen_BT,
            position_ids=position_BT,
            past_key_values=cache,
            logits_to_keep=rows or 0,
        )
        return CacheOutput(out.logits, CacheMemory(cache, seen_BT))
