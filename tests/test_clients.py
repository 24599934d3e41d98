"""The comparison with a model that nobody here wrote: how it is measured, and that it computes what ours does where
DeepSeek-V4 and V4.1 do not differ.

For the second, weights are copied. What V4 alone has is put out of action by weights (the overlapping half of a group:
a bias of minus infinity; hyper-connections: constant and equal streams), but for the norm of each query head, which has
none and is taken out. The library computes norms in float32 whatever the model is in, so all of this is in float32.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from small import GEOMETRY, random_tokens, randomise
from torch import nn

from gsm import build_model
from gsm.layers.feed_forward import SwiGLU
from gsm.layers.residual import HyperConnection, Plain, Streams
from gsm.models.baseline import Baseline
from gsm_benchmarks import clients, timing
from gsm_benchmarks.clients import Ours
from gsm_benchmarks.results import read

CPU = torch.device("cpu")
CLOSE: Any = {"rtol": 1e-3, "atol": 1e-3}


@pytest.fixture
def ourselves(monkeypatch):
    """We are our own client, so that nothing else has to be installed."""
    monkeypatch.setattr(clients, "DECODED", 1)
    fake = type(sys)("transformers")
    monkeypatch.setattr(fake, "__version__", "5.99", raising=False)
    monkeypatch.setattr(clients, "library", lambda: fake)
    monkeypatch.setitem(clients.CLIENTS, "deepseek_v4", lambda geometry, parameters: Ours(Baseline(geometry)))


def test_without_the_library_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"not installed: pip install -c constraints.txt -e '.\[clients\]'"):
        clients.run(device="cpu")


@pytest.mark.parametrize("options", [{"contexts": [0]}, {"rounds": 0}, {"work": ["train"]}])
def test_a_value_out_of_range_is_refused_before_anything_is_measured(options):
    with pytest.raises(ValueError, match="give 1 or more; work .*: there are step, prefill, decode"):
        clients.run(device="cpu", **options)


def test_every_kind_of_work_is_measured_once_and_shown(tmp_path, capsys, ourselves):
    output = tmp_path / "a.json"
    options = {"sizes": ["pico"], "contexts": [24], "rounds": 1, "device": "cpu", "output": str(output)}
    clients.run(**options)
    rows = read(output)["rows"]
    assert list(rows) == [f"baseline pico, 1 x 24, {work}" for work in clients.WORK]
    for row in rows.values():
        assert row["ours_ms"]["laps"] == row["theirs_ms"]["laps"] == row["ratio"]["laps"] == 1
        assert row["parameters"]["ours"] == row["parameters"]["theirs"] > 0
    both = rows["baseline pico, 1 x 24, step"]["kept_gib"]
    assert both["ours"] == both["theirs"] > 0
    capsys.readouterr()
    clients.run(**options)
    assert capsys.readouterr().out.count("measured already") == 3
    before = output.with_suffix(".md").read_text()
    assert "| baseline pico, 1 x 24, decode a token |" in before and "transformers 5.99" in before
    clients.run(results=str(output))
    assert output.with_suffix(".md").read_text() == before


def test_a_ratio_is_that_of_one_round_and_each_begins_in_turn(monkeypatch):
    order, clock = [], [0.0]

    def one(who, seconds):
        order.append(who)
        clock[0] += seconds * ((1 + len(order)) // 2)  # the machine becomes slower, for both alike

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    runs = {"ours": lambda: one("ours", 1), "theirs": lambda: one("theirs", 3)}
    found = clients.paired(runs, CPU, rounds=4, seconds=1e9)
    assert found["ratio"]["median"] == found["ratio"]["fastest"] == 3 and found["ours_ms"]["low"] > 2000
    assert order == ["ours", "theirs"] + ["ours", "theirs", "theirs", "ours"] * 2


# With the library.


def geometry_of(ratio: int, top_k: int):
    """A window-only layer, one with a bank in the encoder and one in the decoder. Many index heads, so that no two
    scores are zero: the library has no rule for ties."""
    layers = {"encoder_layers": 2, "decoder_layers": 1, "bank_layers": [2], "stages": [2]}
    decoder = {"decoder_full": 3, "decoder_reindex": [], "decoder_ratio": ratio}
    return replace(GEOMETRY, **layers, **decoder, encoder_ratio=ratio, top_k=top_k, index_heads=16)


def pair_of(ratio: int, top_k: int) -> tuple[Any, clients.DeepseekV4]:
    """Ours with a plain residual, and theirs with its weights."""
    geometry = geometry_of(ratio, top_k)
    ours = Baseline(geometry, residual=Plain)
    randomise(ours)
    theirs = clients.DeepseekV4(geometry, tie_word_embeddings=False)
    copy_model(ours, theirs.model)
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


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers", minversion="5.23", reason="the extra `clients` is not installed")


# One token a group: what is selected is compared too. Two: what is pooled, with all of it selected.
@pytest.mark.parametrize(("ratio", "top_k"), [(1, 3), (2, 64)])
def test_a_model_computes_what_theirs_does(transformers, ratio, top_k):
    ours, theirs = pair_of(ratio, top_k)
    tokens_BT = random_tokens(2, 33)
    theirs.model.eval()
    expected_BTV = theirs.model(input_ids=tokens_BT).logits
    torch.testing.assert_close(ours(tokens_BT).logits, expected_BTV, **CLOSE)
    assert expected_BTV.std() > 0.5  # so that the tolerance means something


@pytest.mark.parametrize(("ratio", "top_k"), [(1, 3), (2, 64)])
def test_its_prefill_and_decoding_are_ours(transformers, ratio, top_k):
    ours, theirs = pair_of(ratio, top_k)
    theirs.model.eval()
    tokens_BT = random_tokens(1, 30)
    want_BTV = ours(tokens_BT).logits
    logits_B1V, cache = theirs.prefill(tokens_BT[:, :25], room=5)
    torch.testing.assert_close(logits_B1V, want_BTV[:, 24:25], **CLOSE)
    for place in range(25, 30):
        logits_B1V, cache = theirs.decode(tokens_BT[:, place : place + 1], cache)
        torch.testing.assert_close(logits_B1V, want_BTV[:, place : place + 1], **CLOSE)


def test_a_step_has_their_loss_and_their_gradients(transformers):
    ours, theirs = pair_of(ratio=2, top_k=64)
    tokens_BT = random_tokens(2, 34)
    loss = ours(tokens_BT[:, :-1], targets=tokens_BT[:, 1:]).loss
    expected = theirs.loss(tokens_BT[:, :-1], tokens_BT[:, 1:])
    torch.testing.assert_close(loss, expected, **CLOSE)
    loss.backward()
    expected.backward()
    for layer, block in zip(theirs.model.model.layers, [*ours.encoder.blocks, *ours.decoder.blocks], strict=True):
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


def test_the_expert_and_the_shared_one_are_the_dense_feed_forward(transformers):
    geometry = geometry_of(1, 3)
    ours = SwiGLU(geometry.dim, geometry.feed_forward_dim)
    theirs = clients.DeepseekV4(geometry).model.model.layers[0].mlp
    with torch.no_grad():
        copy_feed_forward(ours, theirs)
    x = 30 * torch.randn(2, 5, geometry.dim)  # large enough to be clamped
    torch.testing.assert_close(ours(x).update_BRD, theirs(x), **CLOSE)


def test_a_site_mixes_writes_and_reads_by_their_coefficients(transformers):
    """V4 reads for the site itself what V4.1 reads for the next: the vector is the same, on other streams."""
    ours = HyperConnection(GEOMETRY.dim)
    randomise(ours)
    theirs = clients.DeepseekV4(GEOMETRY).model.model.layers[0].attn_hc
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


def test_widths_and_layers_are_taken_over(transformers):
    model: Any = build_model("baseline", "nano", seed=0)
    theirs = clients.DeepseekV4(model.geometry)
    kinds = [layer.self_attn.layer_type for layer in theirs.model.model.layers]
    assert kinds == ["sliding_attention"] + ["compressed_sparse_attention"] * 7
    count = sum(p.numel() for p in theirs.model.parameters()) / sum(p.numel() for p in model.parameters())
    assert 1 < count < 1.15


def test_a_size_that_cannot_be_taken_over_is_refused(transformers):
    with pytest.raises(ValueError, match="feed_forward_dim 25 must be even"):
        clients.configuration(replace(GEOMETRY, feed_forward_dim=25))


def test_a_llama_has_as_many_parameters_and_layers_and_decodes_after_a_prompt(transformers):
    ours: Any = build_model("gsm", "nano", seed=0)
    wanted = sum(p.numel() for p in ours.parameters())
    theirs = clients.Llama(ours.geometry, wanted)
    layers = theirs.model.model.layers
    assert len(layers) == ours.geometry.depth
    assert abs(sum(p.numel() for p in theirs.model.parameters()) - wanted) <= 3 * len(layers) * ours.geometry.dim
    theirs.model.eval()
    _, cache = theirs.prefill(torch.arange(20)[None], room=1)
    read = theirs.decode(torch.tensor([[5]]), cache)[0]
    whole = theirs.model(input_ids=torch.tensor([[*range(20), 5]])).logits[:, -1:]
    torch.testing.assert_close(read, whole, **CLOSE)


def test_an_unknown_client_is_refused():
    with pytest.raises(ValueError, match="client=gpt is not allowed because it is unknown. Use deepseek_v4 or llama"):
        clients.run(device="cpu", client="gpt")
