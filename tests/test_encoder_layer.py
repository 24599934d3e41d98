"""The layers of the encoder of GSM as a slot: a convolution before their feed-forwards, recurrences in place of some.
(test_three_ways, test_memory, test_pieces and others compare the modes of every variant.)"""

from __future__ import annotations

import pytest
import torch
from small import GEOMETRY, SHALLOW, M, W, assert_same, build, random_tokens, variant

import gsm
from gsm.analysis.attention import names_of
from gsm.config.compose import compose
from gsm.costs.model import cost
from gsm.layers.residual import Streams
from gsm.models.schedule import gsm_schedule
from gsm.paths import variants
from gsm.slots.encoder_layer import Recurrent
from gsm.span import Span, document_positions
from gsm.training.optimizer import Muon

CONVOLUTION, GDN = 4, "GatedDeltaNet"


def test_the_rows_of_the_paper_s_encoder_are_those_of_equation_14():
    """Rows that lie ahead of a call, too."""
    layers, last_bank, window, state = 6, 4, 5, 9
    reaches = [None if layer in (2, last_bank) else window - 1 for layer in range(1, layers + 1)]
    for new in (1, 7, 20, 60):
        for rows in range(-40, new + 1):
            plan = gsm_schedule(new, rows, encoder=reaches, decoder=[0, 0], state_size=state)
            writer = min(new, max(state + min(new, rows) - 1, min(new, rows)))
            above = [min(new, writer + (layers - layer) * (window - 1)) for layer in range(last_bank, layers + 1)]
            assert plan.encoder == [max(0, count) for count in [new] * (last_bank - 1) + above], (new, rows)
            assert plan.writer == max(0, writer)


def test_a_layer_above_a_recurrence_needs_all_positions():
    assert build("gsm").encoder.reaches == [W - 1, None, None, W - 1]
    assert build("gsm-encoder_layer=recurrent").encoder.reaches == [W - 1, None, None, None]
    both = build("gsm", encoder_layer=Recurrent(variant("mixer", "gated_delta_net"), roles=["window", "reuse"]))
    assert both.encoder.reaches == [None] * 4 and both.schedule(60, 1).encoder == [60, 60, 60, M]


def test_a_new_encoder_with_convolutions_is_the_paper_s():
    """A seed draws the same weights, and the filters are zeros."""
    paper, convolved = (
        gsm.build_model("gsm", size="pico", overrides=words, seed=3)
        for words in ([], ["model/encoder_layer=convolved"])
    )
    weights = convolved.state_dict()
    filters = [weights.pop(f"encoder.blocks.{layer}.convolution.weight") for layer in range(4)]
    assert all(weight.shape == (64, CONVOLUTION) and not weight.any() for weight in filters)
    assert weights.keys() == paper.state_dict().keys()
    assert all(torch.equal(weight, paper.state_dict()[name]) for name, weight in weights.items())
    tokens = random_tokens(2, 90)
    assert torch.equal(convolved(tokens).logits, paper(tokens).logits)


@torch.no_grad()
def test_a_convolution_before_a_feed_forward_mixes_its_inputs_in_their_document():
    block = build("gsm-encoder_layer=convolved").encoder.blocks[0].double()
    torch.nn.init.normal_(block.convolution.weight)
    position_BT = document_positions(torch.tensor([[0] * 3 + [1] * 11]), *torch.full((2, 1), -1))
    streams = Streams.copies(torch.randn(1, 14, GEOMETRY.dim, dtype=torch.float64), block.attention_residual.streams)
    got = {}
    for place, part in (("norm", block.feed_forward_norm), ("feed-forward", block.feed_forward)):
        part.register_forward_hook(lambda _, given, out, place=place: got.update({place: (given[0], out)}))
    block(streams, Span(position_BT, 14), block.start(1, "encoder"), None)
    mixed_BTD = got["norm"][1].clone()
    for t in range(14):
        for back in range(min(CONVOLUTION, int(position_BT[0, t]) + 1)):
            mixed_BTD[0, t] += block.convolution.weight[:, back] * got["norm"][1][0, t - back]
    assert_same(got["feed-forward"][0], mixed_BTD, "inputs that were mixed by hand", 1e-12)


def test_rows_that_lack_tokens_for_a_convolution_are_not_used():
    """Layers above need the others, and so do the stages and the writer."""
    model = build("gsm-encoder_layer=convolved")
    assert model.encoder.incomplete == CONVOLUTION - 1
    assert model.encoder.reaches == [W - 1, None, None, W + 2]
    plan = model.schedule(60, 1)
    assert plan.encoder == [60, 60, M + 3 + W + 2, M + 3] and plan.writer == M
    products = CONVOLUTION * GEOMETRY.dim * sum(plan.encoder)
    assert cost(model).forward_flops(60, 1)["encoder/convolution"] == 2 * products, "of these rows alone"


@torch.no_grad()
def test_convolutions_before_feed_forwards_keep_three_inputs_and_leave_all_other_bytes():
    bytes_of = [
        model(random_tokens(1, 50), memory=model.start(1)).memory.breakdown()
        for model in (build("gsm-encoder_layer=convolved"), build("gsm"))
    ]
    kept = 4 * (CONVOLUTION - 1) * GEOMETRY.dim * 8
    assert bytes_of[0] == {**bytes_of[1], "encoder_convolution": kept}


@pytest.mark.parametrize("name", ["gated_delta_net", "sliding_window", "transformer"])
@torch.no_grad()
def test_a_comparator_with_the_same_convolutions_is_one_computation_in_all_modes(name: str):
    model, tokens = build(name, feed_forward_convolution=CONVOLUTION), random_tokens(2, 60)
    assert [block.incomplete for block in model.decoder] == [CONVOLUTION - 1] * GEOMETRY.depth
    if name == "sliding_window":
        assert model.reach == GEOMETRY.depth * (W - 1 + CONVOLUTION - 1)
    full = model(tokens).logits
    for rows in (1, 5):
        assert_same(model(tokens, rows=rows).logits, full[:, -rows:], "pruned")
    for chunk in (1, 3, 16):
        read = model.prefill(tokens[:, :-4], model.start(2), chunk=chunk)
        assert_same(read.logits, full[:, -5:-4], f"prefill in chunks of {chunk}")
        for t in range(4):
            read = model(tokens[:, 56 + t : 57 + t], memory=read.memory)
            assert_same(read.logits[:, -1], full[:, 56 + t], f"token {t} after chunks of {chunk}")


@pytest.mark.parametrize("capacity", [None, 60])
@pytest.mark.parametrize("roles", [["reuse"], ["window", "reuse"]])
@torch.no_grad()
def test_convolutions_in_all_layers_and_recurrences_in_some_are_one_computation_in_all_modes(capacity, roles):
    mixer = variant("mixer", "gated_delta_net")
    layers = Recurrent(mixer, roles=roles, feed_forward_convolution=CONVOLUTION)
    model, tokens = build("gsm", encoder_layer=layers), random_tokens(2, 60)
    assert [block.incomplete for block in model.encoder] == [CONVOLUTION - 1] * GEOMETRY.encoder_layers
    full = model(tokens).logits
    assert_same(model(tokens, rows=5).logits, full[:, -5:], "pruned")
    for chunk in (1, 3, 16):
        read = model.prefill(tokens[:, :-4], model.start(2, capacity), chunk=chunk)
        assert_same(read.logits, full[:, -5:-4], f"prefill in chunks of {chunk}")
        for t in range(4):
            read = model(tokens[:, 56 + t : 57 + t], memory=read.memory)
            assert_same(read.logits[:, -1], full[:, 56 + t], f"token {t} after chunks of {chunk}")


@pytest.mark.parametrize("name", ["kda", "sliding_window"])
@torch.no_grad()
def test_layers_without_a_bank_can_have_any_mixer(name: str):
    words = ["model/encoder_layer=recurrent", f"model/mixer@model.encoder_layer.mixer={name}"]
    words = [*words, "model.encoder_layer.roles=[window,reuse]"]
    model = gsm.build_model("gsm", size="pico", overrides=words, seed=0).double().eval()
    tokens = random_tokens(1, 70)
    full = model(tokens).logits
    assert_same(model(tokens, rows=3).logits, full[:, -3:], "pruned")
    read = model.prefill(tokens[:, :-1], model.start(1), chunk=9)
    assert_same(model(tokens[:, -1:], memory=read.memory).logits[:, -1], full[:, -1], "decoded")


@torch.no_grad()
def test_a_stage_on_a_recurrent_layer_reads_the_entries_of_the_layer_below():
    model = build("gsm-encoder_layer=recurrent", geometry=SHALLOW)
    assert [type(block.attention).__name__ for block in model.encoder] == ["SparseAttention", "SparseAttention", GDN]
    with gsm.record() as seen:
        model(random_tokens(1, 30))
    assert "encoder/3/top_k" not in seen and "encoder/3/weights" not in seen
    assert torch.equal(seen["stage/2/top_k"], seen["encoder/2/top_k"]) and (seen["stage/2/top_k"] >= 0).any()
    with gsm.patch("encoder/2/window", lambda x: x + 1), gsm.record("stage/2/weights") as patched:
        model(random_tokens(1, 30))
    assert not torch.equal(seen["stage/2/weights"], patched["stage/2/weights"])


@pytest.mark.parametrize("size", variants("size"))
def test_gsm_recurrent_has_the_parameters_of_gsm_at_every_size(size: str):
    with torch.device("meta"):
        paper, recurrent = (gsm.build_model(name, size=size) for name in ("gsm", "gsm_recurrent"))
    assert {type(block.attention).__name__ for block in recurrent.encoder} == {GDN, "SparseAttention"}
    assert all(block.convolution.weight.shape[-1] == CONVOLUTION for block in recurrent.encoder)
    assert all(block.convolution is None for block in paper.encoder)
    assert abs(recurrent.parameter_report().total / paper.parameter_report().total - 1) < 0.015
    states = [cost(model).cache_bytes(500)["shared_state"] for model in (paper, recurrent)]
    assert states[0] == states[1] > 0


def test_models_compared_on_text_have_the_same_parameters_within_a_hundredth():
    arms = compose(["experiment=convolved"])["arms"]
    with torch.device("meta"):
        totals = {
            arm: gsm.build_model("gsm", size="nano", overrides=words).parameter_report().total
            for arm, words in arms.items()
        }
    assert max(totals.values()) / min(totals.values()) < 1.01, totals


def test_heads_are_chosen_without_a_random_number_and_can_be_set():
    chosen, states = [], []
    for words in ([], ["model.encoder_layer.heads=1"], ["model.encoder_layer.heads=4"]):
        torch.manual_seed(5)
        chosen.append(gsm.build_model("gsm_recurrent", size="pico", overrides=words))
        states.append(torch.get_rng_state())
    fitted, one, four = (model.state_dict() for model in chosen)
    assert fitted.keys() == one.keys() and all(torch.equal(weight, one[name]) for name, weight in fitted.items())
    assert torch.equal(states[0], states[1])
    name = "encoder.blocks.3.attention.decay.weight"
    assert len(four[name]) == 4 * len(one[name])


def test_heads_that_a_mixer_refuses_are_not_chosen():
    words = ["model/encoder_layer=recurrent", "model/mixer@model.encoder_layer.mixer=sliding_window"]
    words = [*words, "model.encoder_layer.mixer.key_value_heads=4"]
    model = gsm.build_model("gsm", size="pico", overrides=words)
    assert model.get_submodule("encoder.blocks.3.attention").query.heads == 4
    with pytest.raises(ValueError, match="key_value_heads"):
        gsm.build_model("gsm", size="pico", overrides=[*words[:2], "model.encoder_layer.mixer.key_value_heads=3"])


def test_filters_are_left_to_adamw_and_count_as_convolutions():
    model = build("gsm-encoder_layer=convolved")
    filters = {id(p) for name, p in model.named_parameters() if "convolution" in name}
    settings = Muon(learning_rate=1e-3, warmup_steps=1, final_fraction=0.1, weight_decay=0.1)
    groups = {group["name"]: group["params"] for group in settings.build(model.parameter_groups()).param_groups}
    assert filters <= {id(p) for p in groups["table_decay"]} and not filters & {id(p) for p in groups["matrices"]}
    assert model.parameter_report().parts["convolutions"] == 4 * GEOMETRY.dim * CONVOLUTION


def test_a_recurrent_layer_has_no_attention_to_analyse():
    model = build("gsm-encoder_layer=recurrent")
    assert [name for name in names_of(model) if name.startswith("encoder")] == ["encoder/1", "encoder/2", "encoder/3"]
