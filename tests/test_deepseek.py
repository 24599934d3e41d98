"""The baseline beside DeepSeek's own code for V4.1: numbers that it gave (`deepseek_v41.json`: inference/model.py of
DeepSeek-V4.1-Flash at dba1be0a40aa, in float64, its fake quantisation out of action), for weights that a formula
gives; and beside the model in transformers, as soon as a release has it.

Widths of 24 keep the library from quantising, and 16 index heads keep scores from being equal, for which it has no
rule. It computes in float32."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gsm.layers.experts import MixtureOfExperts
from gsm.models.baseline import Baseline
from gsm.models.geometry import Geometry
from gsm_benchmarks import clients

RECORDED = json.loads((Path(__file__).parent / "deepseek_v41.json").read_text())
GEOMETRY = Geometry(**RECORDED["geometry"])


def uniform(count: int, number: int) -> Tensor:
    """Numbers in (0, 1), float64 [count], by a hash of their place and of a number."""
    x = torch.arange(count) + 1000003 * (number + 1)
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return ((x ^ (x >> 16)).double() + 0.5) / 2**32


@torch.no_grad()
def weighted(**options: Any) -> Baseline:
    """The baseline with the weights that the numbers were recorded for."""
    experts = partial(MixtureOfExperts, experts=GEOMETRY.experts, chosen=GEOMETRY.experts_per_token)
    model = Baseline(GEOMETRY, feed_forward=experts, **options).double().eval()
    for number, (name, parameter) in enumerate(sorted(model.named_parameters())):
        u = uniform(parameter.numel(), number).view_as(parameter)
        e = (u - 0.5) * 12**0.5
        if name.endswith("phi"):
            value = 0.3 * e
        elif name.endswith("residual.scale"):
            value = 0.3 + 0.5 * u
        elif name.endswith("residual.bias"):
            value = 0.7 * e
        elif "norm" in name:
            value = 0.6 + 0.8 * u
        else:
            value = e if name.endswith("sink") else e / parameter.shape[-1] ** 0.5
        parameter.copy_(value)
    mixtures = [part for part in model.modules() if isinstance(part, MixtureOfExperts)]
    for number, mixture in enumerate(mixtures):  # in the order of the layers
        mixture.nudges_E.copy_((400 * uniform(GEOMETRY.experts, 1000 + number)).floor() - 200)
    return model


def test_logits_loss_and_gradients_are_those_of_deepseek_s_own_code():
    model, tokens_BT = weighted(), (61 * uniform(240, 5000)).floor().long().view(2, 120)
    assert tokens_BT[0, :10].tolist() == RECORDED["first ten tokens"]
    logits_BTV = model(tokens_BT).logits
    close = partial(pytest.approx, rel=1e-10, abs=1e-10)
    assert logits_BTV.square().sum().item() == close(RECORDED["sum of squares of all logits"])
    for place, expected in RECORDED["logits of sequence 0, first five of the vocabulary, by position"].items():
        assert logits_BTV[0, int(place), :5].tolist() == close(expected), f"position {place}"
    assert logits_BTV[1, 119, -5:].tolist() == close(RECORDED["logits of sequence 1, position 119, last five"])
    loss = torch.nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten())
    assert loss.item() == close(RECORDED["loss"])
    loss.backward()
    blocks = [*model.encoder.blocks, *model.decoder.blocks]
    for place, expected in RECORDED["norm of the gradient of the loss, by layer (from 1) and parameter"].items():
        layer, name = place.split()
        gradient = blocks[int(layer) - 1].get_parameter(name).grad
        assert gradient is not None and gradient.norm().item() == close(expected), place


# With the library. Names in a layer: ours, those of the checkpoint, and those that the library has given them since.
NAMES = """
attention_norm.weight                 attn_norm.weight                   input_layernorm.weight
feed_forward_norm.weight              ffn_norm.weight                    post_attention_layernorm.weight
attention_residual.phi                hc_attn_fn                         attn_hc.fn
attention_residual.bias               hc_attn_base                       attn_hc.base
attention_residual.scale              hc_attn_scale                      attn_hc.scale
feed_forward_residual.phi             hc_ffn_fn                          ffn_hc.fn
feed_forward_residual.bias            hc_ffn_base                        ffn_hc.base
feed_forward_residual.scale           hc_ffn_scale                       ffn_hc.scale
attention.query.down.weight           attn.wq_a.weight                   self_attn.q_a_proj.weight
attention.query.norm.weight           attn.q_norm.weight                 self_attn.q_a_norm.weight
attention.query.up.weight             attn.wq_b.weight                   self_attn.q_b_proj.weight
attention.window.projection.weight    attn.wkv.weight                    self_attn.kv_proj.weight
attention.window.norm.weight          attn.kv_norm.weight                self_attn.kv_norm.weight
attention.sink                        attn.attn_sink                     self_attn.sinks
attention.output.down.weight          attn.wo_a.weight                   self_attn.o_a_proj.weight
attention.output.up.weight            attn.wo_b.weight                   self_attn.o_b_proj.weight
attention.compressor.value.weight     attn.compressor.wkv.weight         self_attn.compressor.kv_proj.weight
attention.compressor.gate.weight      attn.compressor.wgate.weight       self_attn.compressor.gate_proj.weight
attention.compressor.norm.weight      attn.compressor.norm.weight        self_attn.compressor.kv_norm.weight
attention.indexer.query.weight        attn.indexer.wq_b.weight           self_attn.indexer.q_b_proj.weight
attention.indexer.weight.weight       attn.indexer.weights_proj.weight   self_attn.indexer.weights_proj.weight
attention.indexer.key.weight          attn.indexer.wk.weight             self_attn.indexer.k_proj.weight
attention.indexer.key_norm.weight     attn.indexer.k_norm.weight         self_attn.indexer.k_norm.weight
feed_forward.router.weight            ffn.gate.weight                    mlp.gate.weight
feed_forward.nudges_E                 ffn.gate.bias                      mlp.gate.e_score_correction_bias
feed_forward.shared.gate.weight       ffn.shared_experts.w1.weight       mlp.shared_experts.gate_proj.weight
feed_forward.shared.up.weight         ffn.shared_experts.w3.weight       mlp.shared_experts.up_proj.weight
feed_forward.shared.down.weight       ffn.shared_experts.w2.weight       mlp.shared_experts.down_proj.weight
feed_forward.experts.gate             ffn.experts.*.w1.weight            mlp.experts.gate_up_proj
feed_forward.experts.up               ffn.experts.*.w3.weight            mlp.experts.gate_up_proj
feed_forward.experts.down             ffn.experts.*.w2.weight            mlp.experts.down_proj
"""
LAYER = {ours: both for ours, *both in map(str.split, NAMES.strip().splitlines())}
WHOLE = {
    "embedding.weight": ("model.embed.weight", "model.embed_tokens.weight"),
    "norm.weight": ("model.norm.weight", "model.norm.weight"),
}


def renamed(ours: Mapping[str, Tensor], layout: int) -> dict[str, Tensor]:
    """Our weights, or their gradients, by the names of a layout (0: the checkpoint's, 1: the later one), but for what
    the embedding is multiplied with. Raises KeyError for one that has no name there."""
    theirs = {}
    for name, value in ours.items():
        stack, blocks, rest = name.partition(".blocks.")
        if not blocks:
            theirs[WHOLE[name][layout]] = value
            continue
        number, _, inner = rest.partition(".")
        layer = int(number) + (GEOMETRY.encoder_layers if stack == "decoder" else 0)
        place = f"model.layers.{layer}.{LAYER[inner][layout]}"
        value = value.flatten(0, 1) if inner == "attention.output.down.weight" else value
        if "*" in place:
            theirs |= {place.replace("*", str(expert)): part for expert, part in enumerate(value)}
        else:  # gates, then what they multiply, are one matrix in the later layout
            theirs[place] = torch.cat([theirs[place], value], dim=1) if place in theirs else value
    return theirs


def with_head(ours: Baseline, layout: int) -> dict[str, Tensor]:
    """All that a model of the library has, by its names."""
    theirs = renamed({**dict(ours.named_parameters()), **dict(ours.named_buffers())}, layout)
    theirs["lm_head.weight"] = ours.head.weight
    theirs[WHOLE["embedding.weight"][layout]] = ours.embedding.weight * ours.dim**0.5
    bias = LAYER["feed_forward.nudges_E"][layout]
    return {name: value * 0.001 if name.endswith(bias) else value for name, value in theirs.items()}


@pytest.mark.parametrize("layout", [0, 1])
def test_every_weight_has_a_name_in_the_library_and_is_copied_once(layout):
    ours = weighted()
    theirs = with_head(ours, layout)
    weights = [*ours.parameters(), *ours.buffers(), ours.head.weight]
    assert sum(value.numel() for value in theirs.values()) == sum(weight.numel() for weight in weights)


def pair(pool: bool) -> tuple[Baseline, Any, int]:
    """Ours and the library's with the same weights, and the layout of its names."""
    reason = "no release of transformers here has DeepSeek-V4.1"
    pytest.importorskip("transformers.models.deepseek_v41.modeling_deepseek_v41", reason=reason)
    ours, chosen = weighted(candidate_pool=pool).float(), GEOMETRY.experts_per_token
    experts = {"n_routed_experts": GEOMETRY.experts, "num_experts_per_tok": chosen, "routed_scaling_factor": 1.5}
    experts |= {"moe_intermediate_size": GEOMETRY.feed_forward_dim // (chosen + 1), "experts_implementation": "eager"}
    no_pool = {} if pool else {"candidate_source_layer_id": -1}
    theirs = clients.DeepseekV41(GEOMETRY, tie_word_embeddings=False, **experts, **no_pool).model.eval()
    has = theirs.state_dict()
    layout = int("model.layers.0.attn_norm.weight" not in has)
    weights = with_head(ours, layout)
    images = {f"{name}_vl": value for name, value in weights.items() if f"{name}_vl" in has}  # experts' biases there
    theirs.load_state_dict({**weights, **images})  # names the keys that have no partner
    return ours, theirs, layout


CLOSE: Any = {"rtol": 1e-3, "atol": 1e-3}


@pytest.mark.parametrize("pool", [True, False])
@torch.no_grad()
def test_a_whole_sequence_has_the_library_s_logits(pool):
    ours, theirs, _ = pair(pool)
    tokens_BT = torch.randint(GEOMETRY.vocabulary, (2, 131), generator=torch.Generator().manual_seed(0))
    expected_BTV = theirs(input_ids=tokens_BT, use_cache=True).logits
    assert expected_BTV.std() > 0.5  # so that the tolerance means something
    torch.testing.assert_close(ours(tokens_BT).logits, expected_BTV, **CLOSE)


@pytest.mark.parametrize("calls", [[37, *[1] * 23], [21, 7, 7, 7]])
@torch.no_grad()
def test_calls_of_any_length_have_the_library_s_logits(calls):
    ours, theirs, _ = pair(pool=True)
    tokens_BT = torch.randint(GEOMETRY.vocabulary, (2, sum(calls)), generator=torch.Generator().manual_seed(0))
    memory, cache = ours.start(2), None
    for part_BT in tokens_BT.split(calls, dim=1):
        out, their = ours(part_BT, memory=memory), theirs(input_ids=part_BT, past_key_values=cache, use_cache=True)
        memory, cache = out.memory, their.past_key_values
        torch.testing.assert_close(out.logits, their.logits, **CLOSE)


def test_gradients_are_the_library_s():
    ours, theirs, layout = pair(pool=True)
    tokens_BT = torch.randint(GEOMETRY.vocabulary, (2, 131), generator=torch.Generator().manual_seed(0))
    for logits_BTV in (ours(tokens_BT).logits, theirs(input_ids=tokens_BT, use_cache=True).logits):
        torch.nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten()).backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.grad is not None}
    embedding = WHOLE["embedding.weight"][layout]
    expected[embedding] = expected[embedding] * ours.dim**0.5 + expected.pop("lm_head.weight")
    found = renamed({name: p.grad for name, p in ours.named_parameters() if p.grad is not None}, layout)
    assert found.keys() == expected.keys(), "neither has a gradient in its indexers"
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], **CLOSE, msg=lambda text, name=name: f"{name}: {text}")
