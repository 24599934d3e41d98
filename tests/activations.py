"""What waits for the backward pass, counted without a GPU on tensors without memory, with the GPU's kernels."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gsm.config.load import build_model
from gsm.models.base import LanguageModel
from gsm.models.stack import Stack
from gsm_kernels import using
from gsm_kernels.launch import launching


class Kept(NamedTuple):
    """Bytes in bfloat16, as autocast has it: the float32 gradient of the head's weight, which is made with the loss;
    of each token, of all layers; and of each token, of one layer (the mean of all) that is not recomputed."""

    fixed: int
    each: float
    block: float

    def total(self, tokens: int) -> float:
        """With so many tokens on a device at a time."""
        return self.fixed + self.each * tokens


def kept(name: str, size: str, recompute: bool, context: int) -> Kept:
    """Of a variant of `model` of a size, for sequences of this length; it needs Triton, whose operations say what they
    keep. What is kept is linear in the tokens, but that indexers learn from fewer slots beyond 4,096."""
    return _counted(name, size, min(context, 1024) if context <= 4096 else 8192)[recompute]


@lru_cache(maxsize=64)
def _counted(name: str, size: str, tokens: int) -> tuple[Kept, Kept]:
    """Without and with recomputation."""
    plain, bare = meta_model(name, size, False), meta_model(name, size, True)
    fixed, parts = 4 * plain.embedding.weight.numel(), [part for part in plain.children() if isinstance(part, Stack)]
    whole, rest = ((saved_bytes(model, tokens) - fixed) / tokens for model in (plain, bare))
    block = (whole - rest) / sum(len(part.blocks) for part in parts)
    # What enters the layers is held by a checkpoint, outside of what autograd saves.
    return Kept(fixed, whole, block), Kept(fixed, rest + sum(map(_entering, parts)), block)


def _entering(part: Stack) -> int:
    """Bytes of a token at the doors of a stack's layers: X streams, and what the first site reads of them. The streams
    that enter the first layer are X views of that."""
    dim = next(iter(part)).attention_norm.weight.numel()
    return 2 * dim * ((part.streams + 1) * len(part.blocks) - part.streams)


def saved_bytes(model: LanguageModel, tokens: int) -> int:
    """Bytes of all tensors but parameters that autograd has saved after the loss of one sequence, each storage once."""
    ids_BT = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    own, sizes = {p.untyped_storage()._cdata for p in model.parameters()}, {}
    alive: list[object] = []  # or a storage's address could come back as another's

    def weigh(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    with launching(lambda *_: None), using("auto"):
        with torch.autograd.graph.saved_tensors_hooks(weigh, lambda tensor: tensor):
            out = model(ids_BT, documents=ids_BT, targets=ids_BT)
            alive.append(torch.stack([out.loss, *out.losses.values()]).sum())  # which holds the graph
    return sum(sizes.values())


def meta_model(name: str, size: str, recompute: bool) -> LanguageModel:
    """Without memory for its weights."""
    with torch.device("meta"):
        model = build_model(name, size, [f"model.recompute={str(recompute).lower()}"])
    return model.to(torch.bfloat16).train()
