"""What training keeps for the backward pass, counted on tensors without memory: the model runs on the meta device with
the GPU's kernels, of which nothing is launched, and every tensor that autograd holds on to is weighed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gsm.config.load import build_model
from gsm.models.base import LanguageModel
from gsm.models.stack import Stack
from gsm_kernels import using
from gsm_kernels.device import triton_version
from gsm_kernels.launch import launching


@dataclass(frozen=True)
class Kept:
    """Bytes that wait for the backward pass, in bfloat16 as autocast has it: ``fixed + each * tokens`` on a device.

    Attributes:
        fixed: the float32 gradient of the head's weight, which is made together with the loss.
        each: of a token, of all layers.
        block: of a token, of one layer (the mean of all) whose activations are not recomputed.
    """

    fixed: int
    each: float
    block: float

    def total(self, tokens: int) -> float:
        """With so many tokens on a device at a time."""
        return self.fixed + self.each * tokens


def kept(name: str, size: str, recompute: bool, context: int) -> Kept:
    """Of a variant of ``model`` of a size, for sequences of this length.

    Raises:
        ValueError: there is no Triton on this machine, whose operations say what they keep.
    """
    return _counted(name, size, min(context, 1024) if context <= 4096 else 8192)[recompute]


@lru_cache(maxsize=64)
def _counted(name: str, size: str, tokens: int) -> tuple[Kept, Kept]:
    """Without and with recomputation, by so many tokens: what is kept is linear in them, but that indexers learn from
    fewer slots beyond 4,096."""
    if triton_version() is None:
        raise ValueError("Triton is not installed: what its operations keep cannot be counted; pip install triton")
    plain, bare = _model(name, size, False), _model(name, size, True)
    fixed, parts = 4 * plain.embedding.weight.numel(), [part for part in plain.children() if isinstance(part, Stack)]
    whole, rest = ((saved_bytes(model, tokens) - fixed) / tokens for model in (plain, bare))
    block = (whole - rest) / sum(len(part.blocks) for part in parts)
    # What enters the layers is held by a checkpoint, outside of what autograd saves.
    return Kept(fixed, whole, block), Kept(fixed, rest + sum(map(_entering, parts)), block)


def saved_bytes(model: LanguageModel, tokens: int) -> int:
    """Bytes of all tensors but parameters that autograd has saved after the loss of one sequence, each storage once."""
    own = {_storage(p) for p in model.parameters()}
    sizes: dict[int, int] = {}
    alive: list[Tensor] = []  # or a storage's address could come back as another's

    def weigh(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        if _storage(tensor) not in own:
            sizes[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    ids_BT = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    with launching(_nothing), using("auto"), torch.autograd.graph.saved_tensors_hooks(weigh, _same):
        out = model(ids_BT, documents=ids_BT, targets=ids_BT)
        assert out.loss is not None  # there were targets
        _ = torch.stack([out.loss, *out.losses.values()]).sum()
    return sum(sizes.values())


def _entering(part: Stack) -> int:
    """Bytes of a token at the doors of a stack's layers: X streams, and what the first site reads of them. The streams
    that enter the first layer are X views of that."""
    dim = next(iter(part)).attention_norm.weight.numel()
    return 2 * dim * ((part.streams + 1) * len(part.blocks) - part.streams)


def _model(name: str, size: str, recompute: bool) -> LanguageModel:
    with torch.device("meta"):
        model = build_model(name, size, [f"model.recompute={str(recompute).lower()}"])
    return model.to(torch.bfloat16).train()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _nothing(*_: object) -> None:
    """In place of a launch."""


def _same(tensor: Tensor) -> Tensor:
    return tensor
