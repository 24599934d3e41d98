"""A memory of this project as a cache of transformers. B sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from gsm.cache.memory import Memory, map_nodes


class MemoryCache(Cache):
    """The cache after the last call; made by ``GSMForCausalLM`` at the beginning of a text.

    Attributes:
        memory: a growing memory; each call of a model replaces it.
        mask_BT: bool, False for padding among the tokens read; None: no padding.
    """

    def __init__(self, memory: Memory, mask_BT: Tensor | None = None) -> None:
        super().__init__(layers=[])
        self.memory, self.mask_BT = memory, mask_BT

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens read, padding included."""
        return self.memory.used

    def get_max_length(self) -> int | None:
        """Return None, because the memory grows."""
        return None

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        return self.memory.batch

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the sequences by those with these indices, int64 [B], as beam search does."""
        # The first dimension of all tensors in a growing memory is the sequence.
        self.memory = map_nodes(self.memory, (Tensor,), lambda x: x.index_select(0, beam_idx.to(x.device)))
        self.mask_BT = None if self.mask_BT is None else self.mask_BT[beam_idx.to(self.mask_BT.device)]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select any number of sequences."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence ``repeats`` times."""
        self.reorder_cache(torch.arange(self.memory.batch).repeat_interleave(repeats))

    def reset(self) -> None:
        """Raise NotImplementedError: a new text needs a new cache."""
        raise NotImplementedError("past_key_values cannot be emptied by reset(); leave it out to begin a new text")

    def crop(self, max_length: int) -> None:
        """Raise NotImplementedError: a state cannot be restored to an earlier point."""
        raise NotImplementedError(
            "past_key_values cannot be shortened by crop(), as states store no history; use a copy.deepcopy of the "
            "cache at the earlier point"
        )

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Raise NotImplementedError: the layers have no keys and values that can be updated from outside."""
        raise NotImplementedError(
            "past_key_values cannot be changed by update(): the layers alone write to their memory"
        )
