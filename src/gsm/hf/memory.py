"""A memory of ours as a cache of transformers. B sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from gsm.cache.memory import Memory, map_nodes


class Remembered(Cache):
    """Holds the memory after the last call; made by ``GSMForCausalLM`` when a text begins.

    Attributes:
        memory: one that grows; the calls of a model replace it.
    """

    def __init__(self, memory: Memory) -> None:
        super().__init__(layers=[])
        self.memory = memory

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens read, padding included."""
        return self.memory.used

    def get_max_length(self) -> int | None:
        """None: it grows."""
        return None

    @property
    def is_compileable(self) -> bool:
        """Shapes change from call to call; ``gsm.Engine`` has a memory in which they do not."""
        return False

    @property
    def batch_size(self) -> int:
        """Sequences."""
        return self.memory.batch

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Goes on with these sequences, int64 [B], as beam search does."""
        self.memory = _chosen(self.memory, beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """The same, of any number."""
        self.memory = _chosen(self.memory, indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence so many times in a row."""
        self.memory = self.memory.expand(repeats)

    def reset(self) -> None:
        """Raises NotImplementedError: whoever begins anew leaves the cache out."""
        raise NotImplementedError("a memory is not emptied: leave past_key_values out, and a new one is made")

    def crop(self, max_length: int) -> None:
        """Raises NotImplementedError: a state does not know what it was before its last tokens."""
        raise NotImplementedError(
            "what was read cannot be taken back, as states hold no history: keep model.start()'s memories of the "
            "points to go back to, which later calls do not change"
        )

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Raises NotImplementedError: there are no keys and values of layers to be updated from outside."""
        raise NotImplementedError("layers of these models write to their own memory; nothing else can")


def _chosen(memory: Memory, index_B: Tensor) -> Memory:
    """The memory of these sequences; of a growing one all tensors have the sequences first."""
    return map_nodes(memory, (torch.Tensor,), lambda x: x.index_select(0, index_B.to(x.device)))
