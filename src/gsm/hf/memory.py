"""A ``Memory`` as a cache of transformers. B sequences, T tokens read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from gsm.cache.memory import Memory, map_nodes


class MemoryCache(Cache):
    """The memory after the last call. ``GSMForCausalLM`` makes it in the first call of a text.

    Attributes:
        memory: a growing memory; each call of the model replaces it.
        mask_BT: bool, False for padding among the tokens read; None: no padding.
    """

    def __init__(self, memory: Memory, mask_BT: Tensor | None = None) -> None:
        super().__init__(layers=[])
        self.memory, self.mask_BT = memory, mask_BT

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens read, including padding."""
        return self.memory.used

    def get_max_length(self) -> int | None:
        """Return None, because the memory grows."""
        return None

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        return self.memory.batch

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the sequences by those with these indices, int64 [B]. Beam search calls this."""
        # The first dimension of all tensors in a growing memory is the batch.
        self.memory = map_nodes(self.memory, (Tensor,), lambda x: x.index_select(0, beam_idx.to(x.device)))
        self.mask_BT = None if self.mask_BT is None else self.mask_BT[beam_idx.to(self.mask_BT.device)]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the sequences with these indices, int64; any number of them, also repeatedly."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence ``repeats`` times."""
        self.reorder_cache(torch.arange(self.memory.batch).repeat_interleave(repeats))

    def reset(self) -> None:
        """Raise NotImplementedError, because a new text needs a new cache."""
        raise NotImplementedError("past_key_values cannot be emptied by reset(); use None to begin a new text")

    def crop(self, max_length: int) -> None:
        """Raise NotImplementedError, because an earlier state cannot be recovered from a later one."""
        raise NotImplementedError(
            "past_key_values cannot be shortened by crop(), as a state does not store its past; use a copy.deepcopy "
            "made at the earlier point"
        )

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Raise NotImplementedError, because only the layers of the model write to the memory."""
        raise NotImplementedError(
            "past_key_values cannot be changed by update(), as only the layers of the model write to it"
        )
