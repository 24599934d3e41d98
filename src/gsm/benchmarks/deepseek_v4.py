"""DeepSeek-V4 as the library transformers has it, with the widths of one of our sizes and random weights.

Taken over: vocabulary, width, depth, heads, entries and their rotated channels, query and output ranks, window,
index heads, K, four residual streams with 20 rounds of Sinkhorn, the clamped SwiGLU, the tied embedding. What is left
is how V4 differs from V4.1, which the baseline follows, and how the library computes it:

* Every layer behind the window-only ones pools a bank of its own, over groups that overlap (two projections of width
  2C), pools index keys of its own likewise, and searches them. The baseline's layers share three banks.
* All banks have the encoder's ratio; the baseline's decoder has an entry for every token.
* Hyper-connections read for the site that they stand at, not for the next, and a mixer of its own ends the stack;
  queries are normed for each head.
* The feed-forward is a mixture of experts: here one expert that is always chosen, and the shared one, of half the width
  each, which together are the dense one.
* Indexers learn nothing, while a step of the baseline includes their loss.
* Attention forms the weights of all pairs, under a mask; prefill computes every row of every layer.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from gsm.models.geometry import Geometry


def library() -> Any:
    """The library. Raises ModuleNotFoundError, with the remedy, where it is missing or does not know the model yet."""
    remedy = "which is not installed: pip install -c constraints.txt -e '.[clients]'"
    try:
        found = import_module("transformers")
        if not hasattr(found, "DeepseekV4ForCausalLM"):
            remedy = f"and {found.__version__} is too old: pip install -c constraints.txt -e '.[clients]'"
            raise ModuleNotFoundError("no DeepseekV4ForCausalLM")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"the model to compare with is in transformers >= 5.23, {remedy}") from error
    return found


def configuration(geometry: Geometry, **changes: Any) -> Any:
    """The library's configuration that comes nearest to a geometry; ``changes`` replace single fields.

    Raises:
        ValueError: for a feed-forward width that is odd, or a YaRN factor, which is not taken over.
    """
    if geometry.feed_forward_dim % 2 or geometry.yarn_factor != 1:
        raise ValueError(
            f"feed_forward_dim {geometry.feed_forward_dim} must be even and yarn_factor {geometry.yarn_factor} be 1 "
            "for a comparison with DeepSeek-V4; choose another size"
        )
    roles = [*geometry.encoder_roles(), *["bank"] * geometry.decoder_layers]
    sparse = "compressed_sparse_attention"
    fields = {
        "vocab_size": geometry.vocabulary,
        "hidden_size": geometry.dim,
        "num_hidden_layers": geometry.depth,
        "layer_types": ["sliding_attention" if role == "window" else sparse for role in roles],
        "compress_rates": {sparse: geometry.encoder_ratio, "heavily_compressed_attention": 128},
        "num_attention_heads": geometry.heads,
        "head_dim": geometry.entry_dim,
        "partial_rotary_factor": geometry.rotary_dim / geometry.entry_dim,
        "rope_theta": geometry.rope_base,
        "compress_rope_theta": geometry.bank_rope_base,
        "q_lora_rank": geometry.query_rank,
        "o_groups": geometry.output_groups,
        "o_lora_rank": geometry.output_rank,
        "sliding_window": geometry.window,
        "index_n_heads": geometry.index_heads,
        "index_head_dim": geometry.index_dim,
        "index_topk": geometry.top_k,
        "mlp_layer_types": ["moe"] * geometry.depth,
        "moe_intermediate_size": geometry.feed_forward_dim // 2,
        "n_routed_experts": 1,
        "num_experts_per_tok": 1,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_implementation": "eager",  # the only one that the model has
    }
    return library().DeepseekV4Config(**{**fields, **changes})


class DeepseekV4:
    """A contender of ``gsm.benchmarks.clients``.

    Args:
        geometry: its widths and depths.
        changes: fields of the library's configuration, see ``configuration``.
    """

    def __init__(self, geometry: Geometry, **changes: Any):
        self.model: Any = library().DeepseekV4ForCausalLM(configuration(geometry, **changes))
        config = self.model.config
        self.chosen = {"attention": config._attn_implementation, "experts": config._experts_implementation}

    def groups(self) -> dict[str, list[nn.Parameter]]:
        """Parameters that are decayed, and that are not."""
        parameters = list(self.model.parameters())
        return {
            "decay": [one for one in parameters if one.ndim > 1],
            "no_decay": [one for one in parameters if one.ndim < 2],
        }

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean cross-entropy."""
        targets_BT = targets_BT.contiguous()
        return self.model(input_ids=tokens_BT, labels=targets_BT, shift_labels=targets_BT, use_cache=False).loss

    @torch.no_grad()
    def prefill(self, tokens_BT: Tensor, room: int) -> tuple[Tensor, Any]:
        """Logits of the last position, [B, 1, V], and a cache, which grows."""
        return self._read(tokens_BT, None)

    @torch.no_grad()
    def decode(self, token_B1: Tensor, memory: Any) -> tuple[Tensor, Any]:
        """Logits of one more token, [B, 1, V], and the cache, which is changed."""
        return self._read(token_B1, memory)

    def _read(self, tokens_BT: Tensor, cache: Any) -> tuple[Tensor, Any]:
        out = self.model(input_ids=tokens_BT, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits, out.past_key_values
