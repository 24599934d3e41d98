"""The sizes have the paper's numbers; counted on the meta device."""

from __future__ import annotations

import functools
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from small import comparators, mostly_nightly, mostly_slow

import gsm
from gsm.config.check import ConfigError
from gsm.config.compose import compose
from gsm.layers.residual import HyperConnection, Plain
from gsm.models.geometry import Geometry
from gsm.models.matching import NEGLIGIBLE
from gsm.paths import ROOT, variants

# Where no number of heads comes within 2 % of the baseline's parameters: by how many percent each misses them.
NOT_MATCHED = {("delta_product", "pico"): 7.0, ("kda", "pico"): -4.8, ("kimi_linear", "pico"): 2.2}


@functools.cache
def model_of(name: str, size: str):
    with torch.device("meta"):
        return gsm.build_model(name, size=size)


def report(model: str, size: str):
    return model_of(model, size).parameter_report()


def test_the_paper_s_15b_scale_is_met():
    baseline, model = report("baseline", "1p5b"), report("gsm", "1p5b")
    assert round(baseline.total / 1e9, 3) == 1.505
    assert 31.8e6 <= model.total - baseline.total <= 32.0e6


@pytest.mark.parametrize(("model", "billions"), [("baseline", 0.470), ("gsm", 0.477)])
def test_the_05b_scale_is_as_counted_by_hand(model, billions):
    assert round(report(model, "0p5b").total / 1e9, 3) == billions


@pytest.mark.parametrize(("model", "total", "active"), [("baseline", 7.982, 1.508), ("gsm", 8.014, 1.540)])
def test_the_8b_scale_is_as_counted_by_hand_and_near_the_paper_s(model, total, active):
    counted = report(model, "8b_a1p5b")
    assert (round(counted.total / 1e9, 3), round(counted.active / 1e9, 3)) == (total, active)
    paper = {"baseline": (8.001, 1.497), "gsm": (8.033, 1.529)}[model]
    assert abs(total / paper[0] - 1) < 0.003 and abs(active / paper[1] - 1) < 0.01


def test_every_size_works_with_and_without_experts():
    with torch.device("meta"):
        dense = gsm.build_model("gsm", size="8b_a1p5b", overrides=["model/feed_forward=dense"])
        sparse = gsm.build_model("gsm", size="1p5b", overrides=["model/feed_forward=moe"])
    assert dense.parameter_report() == report("gsm", "1p5b")
    assert sparse.parameter_report() == report("gsm", "8b_a1p5b")


@pytest.mark.parametrize(
    ("model", "size"),
    [
        *(("gsm", size) for size in variants("size")),
        ("baseline", "nano"),
        *(pytest.param("baseline", size, marks=pytest.mark.nightly) for size in variants("size") if size != "nano"),
        *((model, "nano") for model in variants("model") if model not in ("gsm", "baseline")),
    ],
)
def test_the_parts_sum_to_all_parameters(model, size):
    built = model_of(model, size)
    counted = built.parameter_report()
    assert sum(counted.parts.values()) == counted.total == sum(p.numel() for p in built.parameters())


@pytest.mark.parametrize("size", mostly_nightly(["nano", "pico", "0p5b"], "nano"))
@pytest.mark.parametrize("name", mostly_slow(comparators(), "transformer", "mamba3"))
def test_comparators_have_the_baseline_s_parameters_or_report_the_difference(name, size):
    model, baseline = model_of(name, size), model_of("baseline", size)
    total, goal = (one.parameter_report().total for one in (model, baseline))
    assert model.parameter_note.startswith(f"{model.shape.heads} heads, query rank {model.shape.query_rank}")
    if (name, size) in NOT_MATCHED:
        assert NOT_MATCHED[name, size] == round(100 * (total / goal - 1), 1)
        assert f"{abs(total - goal):,} parameters" in model.parameter_note
    else:
        assert abs(total - goal) <= NEGLIGIBLE * goal and "parameters" not in model.parameter_note


@pytest.mark.parametrize("size", variants("size"))
def test_the_size_chooses_the_residual(size):
    """Plain residuals at both nanos, four streams at the others, and any number that is asked for."""
    assert model_of("gsm", size).encoder.streams == (1 if size.startswith("nano") else 4)
    if size == "pico":
        for streams, kind in ((1, Plain), (2, HyperConnection)):
            (block, *_) = gsm.build_model("gsm", size, [f"size.streams={streams}"]).encoder
            assert type(block.attention_residual) is kind and block.attention_residual.streams == streams


@pytest.mark.parametrize("size", ["0p5b", "1p5b", "8b_a1p5b"])
def test_sizes_follow_the_paper_s_appendix(size):
    geometry = _geometry(size)
    assert geometry.encoder_layers == geometry.decoder_layers == (12 if size == "0p5b" else 14)
    assert list(geometry.stages) == ([6, 10, 12] if size == "0p5b" else [6, 10, 14])
    assert (geometry.dim, geometry.feed_forward_dim) == ((1024, 4608) if size == "0p5b" else (2048, 6144))
    assert geometry.window + geometry.top_k == 256


def test_nano_deep_has_the_layers_and_the_recipe_of_nano():
    nano, deep = (compose([f"size={size}"]) for size in ("nano", "nano_deep"))
    assert deep["size"]["encoder_layers"] == 6 and deep["recipe"] == nano["recipe"]
    depths = [one["size"]["encoder_layers"] + one["size"]["decoder_layers"] for one in (nano, deep)]
    assert depths == [8, 8]


WHOLE = [size for size in variants("size") if size != "nano_deep"]  # nano_deep changes a few fields of nano


@pytest.mark.parametrize("size", WHOLE)
def test_every_size_names_every_width(size):
    written = set(OmegaConf.load(ROOT / "configs" / "size" / f"{size}.yaml")) - {"_target_", "defaults"}
    assert written == {field.name for field in fields(Geometry)}


def _geometry(size: str) -> Geometry:
    return model_of("gsm", size).geometry


@pytest.mark.parametrize("size", WHOLE)
def test_every_size_has_a_recipe_whose_numbers_follow_from_its_context(size: str):
    composed = compose([f"size={size}"])
    recipe, context = composed["recipe"], composed["size"]["context"]
    assert composed["choices"]["recipe"] == size
    assert recipe["extension"]["lengths"] == [context, 4 * context, 8 * context, 16 * context]
    assert recipe["extension"]["context"] == 16 * context
    assert recipe["extension"]["learning_rate"] == pytest.approx(recipe["learning_rate"] / 10), "ours"
    assert 4 * recipe["extension"]["global_batch"] == recipe["global_batch"], (
        "a quarter of the sequences, 16 times as long"
    )
    assert recipe["recall"] == {"pairs": context // 12, "symbols": context // 3, "shortest": context // 2}


@pytest.mark.parametrize(("size", "tokens"), [("0p5b", 10e9), ("1p5b", 15e9), ("8b_a1p5b", 18e9)])
def test_the_papers_recipes_take_its_tokens_in_its_steps(size: str, tokens: float):
    config = compose([f"size={size}"])
    step = config["global_batch"] * config["data"]["context"]
    assert step == 128 * 4096 and config["data"]["max_tokens"] == tokens
    assert 0 <= step * config["trainer"]["max_steps"] - tokens < step


def test_a_recipe_can_be_another_size_s_and_a_size_of_ones_own_has_that_of_nano(tmp_path: Path):
    config = compose(["size=tiny", "recipe=0p5b", "data=stdlib", "optimizer.learning_rate=1"])
    assert (config["global_batch"], config["trainer"]["max_steps"], config["data"]["batch_size"]) == (128, 19074, 4)
    assert config["optimizer"]["learning_rate"] == 1
    (tmp_path / "size").mkdir()
    (tmp_path / "size/mine.yaml").write_text("defaults: [nano]\nheads: 8\n")
    assert compose(["size=mine"], [tmp_path])["choices"]["recipe"] == "nano"


@pytest.mark.parametrize("size", variants("size"))
@pytest.mark.parametrize("state_size", [None, 24])
def test_words_in_yamls_stand_for_numbers_of_the_model(size: str, state_size: int | None):
    more = [f"model.state_size={state_size}"] if state_size else []
    config = compose([f"size={size}", "data=needle", "model.stages=all", "data.task.gap=beyond_delta", *more])
    geometry = config["size"]
    layers, reach = geometry["encoder_layers"], geometry["window"] - 1
    entries = state_size or geometry["window"] + geometry["top_k"]
    assert config["data"]["task"]["gap"] == layers * reach + 2 * entries - 1
    assert config["model"]["stages"] == list(range(geometry["bank_layers"][0], layers + 1))
    both = compose([f"size={size}", "data=needle", *more])["data"]["task"]["gap"]
    assert both == max(layers * reach + entries, (layers + geometry["decoder_layers"]) * reach)
    assert compose([f"size={size}", "data=needle", "data.task.gap=beyond_gsm", *more])["data"]["task"]["gap"] == (
        layers * reach + entries
    )


@torch.no_grad()
def test_a_gap_is_beyond_windows_of_the_decoder_too():
    """Without banks, a token that far back does not change the last row; a slightly later one does."""
    words = ["size=pico", "model/state_reader=state_and_window", "model.stages=[]", "model/encoder_reading=window_only"]
    gap = compose([*words, "data=needle", "data.task.gap=beyond_gsm"])["data"]["task"]["gap"]
    model = gsm.build_model("gsm", size="pico", overrides=words[1:], seed=0).double().eval()
    tokens = torch.zeros(1, 64, dtype=torch.int64)
    last = model(tokens, rows=1).logits
    for back, changed in ((gap, False), (gap - 4, True)):  # the first layer of a decoder reads the state or its window
        other = tokens.clone()
        other[0, 63 - back] = 1
        assert torch.equal(model(other, rows=1).logits, last) != changed, back


@torch.no_grad()
def test_a_gap_is_beyond_the_convolutions_of_the_encoder_too():
    """Needles of a GSM with convolutions had lain within the reach of its encoder."""
    words = ["size=pico", "model/encoder_layer=convolved", "model.stages=[]", "model/encoder_reading=window_only"]
    gap = compose([*words, "data=needle", "data.task.gap=beyond_gsm"])["data"]["task"]["gap"]
    model = gsm.build_model("gsm", size="pico", overrides=words[1:], seed=0).double().eval()
    for name, weight in model.named_parameters():
        if "convolution" in name:
            weight.fill_(1)
    tokens = torch.zeros(1, 64, dtype=torch.int64)
    last = model(tokens, rows=1).logits
    for back, changed in ((gap, False), (gap - 1, True)):
        other = tokens.clone()
        other[0, 63 - back] = 1
        assert torch.equal(model(other, rows=1).logits, last) != changed, back


def test_an_unknown_word_in_a_yaml_is_refused():
    with pytest.raises(ConfigError, match="^data.task.gap .*beyond_gsm.* far$"):
        compose(["data=needle", "data.task.gap=far"])
    with pytest.raises(ConfigError, match="^model.stages .*'every'"):
        compose(["model.stages=every"])
