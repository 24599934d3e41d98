"""The baseline beside transformers' DeepSeek-V4: it computes the same where V4 and V4.1 do not differ.

Weights are copied. What V4 alone has is put out of action by weights (the overlapping half of a group: a bias of minus
infinity; hyper-connections: constant and equal streams), but for the norm of each query head, which has none and is
taken out. The library computes norms in float32 whatever the model is in, so all of this is in float32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small import GEOMETRY, random_tokens, randomise
from torch import nn

from gsm.layers.feed_forward import SwiGLU
from gsm.layers.residual import HyperConnection, Plain, Streams
from gsm.models.baseline import Baseline
from gsm.models.geometry import Geometry

transformers: Any = pytest.importorskip("transformers", minversion="5.23", reason="the extra hf is not installed")
CLOSE: Any = {"rtol": 1e-3, "atol": 1e-3}


def theirs_of(geometry: Geometry, **changes: Any) -> Any:
    """transformers' DeepSeek-V4 that comes nearest to a geometry; ``changes`` replace fields of its configuration."""
    roles = [*geometry.encoder_roles(), *["bank"] * geometry.decoder_layers]
    sparse = "compressed_sparse_attention"
    fields = {
        "vocab_size": geometry.vocabulary,
        "hidden_size": geometry.dim,
        "num_hidden_layers": geometry.depth,
        "num_attention_heads": geometry.heads,
        "head_dim": geometry.entry_dim,
        "partial_rotary_factor": geometry.rotary_dim / geometry.entry_dim,
        "rope_theta": geometry.rope_base,
        "compress_rope_theta": geometry.bank_rope_base,
        "q_lora_rank": geometry.query_rank,
        "o_groups": geometry.output_groups,
        "o_lora_rank": geometry.output_rank,
        "sliding_window": geometry.window,
        "layer_types": ["sliding_attention" if role == "window" else sparse for role in roles],
        "compress_rates": {sparse: geometry.encoder_ratio, "heavily_compressed_attention": 128},
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
        "attn_implementation": "eager",  # the model has no other
    }
    return transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**{**fields, **changes})).eval()


def geometry_of(ratio: int, top_k: int):
    """A window-only layer, one with a bank in the encoder and one in the decoder. Many index heads, so that no two
    scores are zero: the library has no rule for ties."""
    layers = {"encoder_layers": 2, "decoder_layers": 1, "bank_layers": [2], "stages": [2]}
    decoder = {"decoder_full": 3, "decoder_reindex": [], "decoder_ratio": ratio}
    return replace(GEOMETRY, **layers, **decoder, encoder_ratio=ratio, top_k=top_k, index_heads=16)


def pair_of(ratio: int, top_k: int) -> tuple[Any, Any]:
    """Ours with a plain residual, and theirs with its weights."""
    geometry = geometry_of(ratio, top_k)
    ours = Baseline(geometry, residual=Plain)
    randomise(ours)
    theirs = theirs_of(geometry, tie_word_embeddings=False)
    copy_model(ours, theirs)
    return ours.eval(), theirs


@torch.no_grad()
def copy_model(ours, theirs) -> None:
    theirs.model.embed_tokens.weight.copy_(ours.embedding.weight * ours.dim**0.5)
    theirs.lm_head.weight.copy_(ours.head.weight)
    theirs.model.norm.weight.copy_(ours.norm.weight)
    for name in ("hc_fn", "hc_base"):  # reads all streams alike
        getattr(theirs.model.hc_head, name).zero_()
    for layer, block in zip(theirs.model.layers, [*ours.encoder.blocks, *ours.decoder.blocks], strict=True):
        for site in (layer.attn_hc, layer.ffn_hc):  # reads, writes and mixes all streams alike
            site.fn.zero_()
            site.base.zero_()
        layer.input_layernorm.weight.copy_(block.attention_norm.weight)
        layer.post_attention_layernorm.weight.copy_(block.feed_forward_norm.weight)
        copy_attention(block.attention, layer.self_attn)
        copy_feed_forward(block.feed_forward, layer.mlp)


def copy_attention(ours, theirs) -> None:
    theirs.q_b_norm = nn.Identity()
    for their, our in (
        (theirs.q_a_proj.weight, ours.query.down.weight),
        (theirs.q_a_norm.weight, ours.query.norm.weight),
        (theirs.q_b_proj.weight, ours.query.up.weight),
        (theirs.kv_proj.weight, ours.window.projection.weight),
        (theirs.kv_norm.weight, ours.window.norm.weight),
        (theirs.sinks, ours.sink),
        (theirs.o_a_proj.weight, ours.output.down.weight.flatten(0, 1)),
        (theirs.o_b_proj.weight, ours.output.up.weight),
    ):
        their.copy_(our)
    if theirs.compressor is not None:
        copy_bank(ours.compressor, ours.indexer, theirs.compressor)


def copy_bank(compressor, indexer, theirs) -> None:
    """With one token a group, an index key is a projection of that token: the norm between two projections is undone by
    the one behind them, except for its weights. With more, it is not, and theirs selects something else."""
    key = indexer.key.weight * compressor.norm.weight @ compressor.value.weight
    for part, value, norm in (
        (theirs, compressor.value.weight, compressor.norm),
        (theirs.indexer, key, indexer.key_norm),
    ):
        width = len(value)
        part.kv_proj.weight.zero_()
        part.kv_proj.weight[width:] = value
        part.gate_proj.weight.zero_()
        part.position_bias.zero_()
        part.position_bias[:, :width] = -torch.inf  # nothing of the group before
        part.kv_norm.weight.copy_(norm.weight)
    if compressor.gate is not None:
        theirs.gate_proj.weight[len(compressor.gate.weight) :] = compressor.gate.weight
    theirs.indexer.q_b_proj.weight.copy_(indexer.query.weight)
    theirs.indexer.scorer.weights_proj.weight.copy_(indexer.weight.weight)


def copy_feed_forward(ours, theirs) -> None:
    """The expert that is always chosen has the first half of the channels, the shared one the second."""
    gates, ups, downs = ours.gate.weight.chunk(2), ours.up.weight.chunk(2), ours.down.weight.chunk(2, dim=1)
    theirs.experts.gate_up_proj[0] = torch.cat([gates[0], ups[0]])
    theirs.experts.down_proj[0] = downs[0]
    shared = theirs.shared_experts
    for their, our in ((shared.gate_proj, gates[1]), (shared.up_proj, ups[1]), (shared.down_proj, downs[1])):
        their.weight.copy_(our)


# One token a group: what is selected is compared too. Two: what is pooled, with all of it selected.
@pytest.mark.parametrize(("ratio", "top_k"), [(1, 3), (2, 64)])
def test_a_model_computes_what_theirs_does(ratio, top_k):
    ours, theirs = pair_of(ratio, top_k)
    tokens_BT = random_tokens(2, 33)
    expected_BTV = theirs(input_ids=tokens_BT).logits
    torch.testing.assert_close(ours(tokens_BT).logits, expected_BTV, **CLOSE)
    assert expected_BTV.std() > 0.5  # so that the tolerance means something


@pytest.mark.parametrize(("ratio", "top_k"), [(1, 3), (2, 64)])
@torch.no_grad()
def test_its_prefill_and_decoding_are_ours(ratio, top_k):
    ours, theirs = pair_of(ratio, top_k)
    tokens_BT = random_tokens(1, 30)
    want_BTV = ours(tokens_BT).logits
    out = theirs(input_ids=tokens_BT[:, :25], use_cache=True)
    torch.testing.assert_close(out.logits[:, -1:], want_BTV[:, 24:25], **CLOSE)
    for place in range(25, 30):
        out = theirs(input_ids=tokens_BT[:, place : place + 1], past_key_values=out.past_key_values, use_cache=True)
        torch.testing.assert_close(out.logits, want_BTV[:, place : place + 1], **CLOSE)


def test_a_step_has_their_loss_and_their_gradients():
    ours, theirs = pair_of(ratio=2, top_k=64)
    tokens_BT = random_tokens(2, 34)
    loss = ours(tokens_BT[:, :-1], targets=tokens_BT[:, 1:]).loss
    target_BT = tokens_BT[:, 1:].contiguous()
    expected = theirs(input_ids=tokens_BT[:, :-1], labels=target_BT, shift_labels=target_BT, use_cache=False).loss
    torch.testing.assert_close(loss, expected, **CLOSE)
    loss.backward()
    expected.backward()
    for layer, block in zip(theirs.model.layers, [*ours.encoder.blocks, *ours.decoder.blocks], strict=True):
        pairs = {
            "query": (block.attention.query.down.weight, layer.self_attn.q_a_proj.weight),
            "window": (block.attention.window.projection.weight, layer.self_attn.kv_proj.weight),
            "sink": (block.attention.sink, layer.self_attn.sinks),
        }
        if (bank := block.attention.compressor) is not None:
            width = len(bank.value.weight)
            torch.testing.assert_close(
                bank.value.weight.grad, layer.self_attn.compressor.kv_proj.weight.grad[width:], **CLOSE
            )
        for name, (our, their) in pairs.items():
            torch.testing.assert_close(our.grad, their.grad, **CLOSE, msg=lambda said, name=name: f"{name}: {said}")


def test_the_expert_and_the_shared_one_are_the_dense_feed_forward():
    geometry = geometry_of(1, 3)
    ours = SwiGLU(geometry.dim, geometry.feed_forward_dim)
    theirs = theirs_of(geometry).model.layers[0].mlp
    with torch.no_grad():
        copy_feed_forward(ours, theirs)
    x = 30 * torch.randn(2, 5, geometry.dim)  # large enough to be clamped
    torch.testing.assert_close(ours(x).update_BRD, theirs(x), **CLOSE)


def test_a_site_mixes_writes_and_reads_by_their_coefficients():
    """V4 reads for the site itself what V4.1 reads for the next: the vector is the same, on other streams."""
    ours = HyperConnection(GEOMETRY.dim)
    randomise(ours)
    theirs = theirs_of(GEOMETRY).model.layers[0].attn_hc
    with torch.no_grad():
        for their, our in ((theirs.fn, ours.phi), (theirs.base, ours.bias), (theirs.scale, ours.scale)):
            their.copy_(our)
    value_BTXD, update_BTD = torch.randn(2, 5, 4, GEOMETRY.dim), torch.randn(2, 5, GEOMETRY.dim)
    write_BTX, mix_BTXX, read_BTD = theirs(value_BTXD)
    expected_BTXD = write_BTX[..., None] * update_BTD[:, :, None] + mix_BTXX.mT @ value_BTXD
    left = ours.leave(Streams(value_BTXD, read_BTD), update_BTD)
    torch.testing.assert_close(left.value_BTXD, expected_BTXD, **CLOSE)
    read_BTX1 = torch.linalg.lstsq(value_BTXD.mT, read_BTD[..., None]).solution
    torch.testing.assert_close(left.mixed_BTD, (expected_BTXD.mT @ read_BTX1)[..., 0], **CLOSE)
