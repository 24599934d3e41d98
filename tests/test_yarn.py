"""YaRN: the pairs of a rotation that it slows down, by how much, and its effect on attention."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import small
import torch

from gsm.layers.key_value import RangeAttention
from gsm.layers.latent_attention import LatentAttention
from gsm.layers.rope import Rope
from gsm.models.geometry import Geometry

LONG: dict[str, Any] = {"factor": 16.0, "original": 4096}


def frequencies(rope: Rope) -> list[float]:
    return rope.frequencies(torch.device("cpu"), torch.float64).tolist()


@pytest.mark.parametrize(
    ("channels", "original", "ramp"), [(32, 4096, (4, 9)), (64, 4096, (8, 18)), (64, 65536, (15, 25))]
)
def test_the_ramp_has_the_ends_of_deepseek_s(channels: int, original: int, ramp: tuple[int, int]):
    assert Rope(channels, base=160_000, factor=16, original=original).correction_range() == ramp


def test_fast_pairs_stay_slow_ones_slow_down_by_the_factor_and_a_ramp_lies_between():
    """From the definition: how often a pair turns over the original context."""
    plain, slowed = frequencies(Rope(32, base=160_000)), frequencies(Rope(32, base=160_000, **LONG))
    turns = [4096 * theta / (2 * math.pi) for theta in plain]
    ratio = [slow / fast for slow, fast in zip(slowed, plain, strict=True)]
    assert [r == 1 for r in ratio] == [t > 32 or pair == 4 for pair, t in enumerate(turns)]  # 4: where the ramp begins
    assert [r == pytest.approx(1 / 16, rel=1e-12) for r in ratio] == [t < 1 for t in turns]
    for pair in range(4, 10):
        assert ratio[pair] == pytest.approx(1 - (pair - 4) / 5 * (1 - 1 / 16), rel=1e-12)


def test_other_betas_move_the_ramp():
    wide = Rope(32, base=160_000, beta_fast=64, beta_slow=0.5, **LONG)
    assert wide.correction_range() == (3, 10)
    assert wide.key != Rope(32, base=160_000, **LONG).key, "or layers would share the angles of another"


@pytest.mark.parametrize("seed", range(3))
def test_frequencies_equal_those_of_transformers(seed: int):
    rotary = pytest.importorskip("transformers.modeling_rope_utils", reason="transformers is not installed")
    from transformers import LlamaConfig

    draw = torch.Generator().manual_seed(seed)
    heads, pairs, factor, original = (int(torch.randint(2, 40, (), generator=draw)) for _ in range(4))
    told = {"rope_type": "yarn", "rope_theta": 5e4, "factor": float(factor), "beta_fast": 20.0, "beta_slow": 2.0}
    told["original_max_position_embeddings"] = 256 * original
    config = LlamaConfig(hidden_size=2 * pairs * heads, num_attention_heads=heads, rope_parameters=told)
    want_P, scale = rotary.ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    ours = {"factor": factor, "original": 256 * original, "beta_fast": 20.0, "beta_slow": 2.0, "mscale": 1.0}
    rope = Rope(2 * pairs, base=5e4, **ours)
    torch.testing.assert_close(rope.frequencies(torch.device("cpu"), torch.float32), want_P, rtol=1e-5, atol=0)
    assert rope.query_scale == pytest.approx(scale**2)


def test_a_factor_of_one_changes_nothing():
    rope = Rope(8, base=1e4, beta_fast=2.0, mscale=1.0)
    assert frequencies(rope) == pytest.approx([1e4 ** (-2 * pair / 8) for pair in range(4)], rel=1e-15)
    assert rope.query_scale == Rope(8, base=1e4, **LONG).query_scale == 1


@pytest.mark.parametrize("case", ["gsm", "baseline", "transformer", "yoco"])
def test_the_temperature_scales_only_the_queries_of_layers_with_yarn(case: str):
    """It changes neither windows, nor the decoder's state, nor the queries of indexers."""
    tokens = small.random_tokens(2, 40)
    cool, model = (built(case, yarn_factor=4.0, yarn_mscale=mscale) for mscale in (0.0, 1.0))
    model.load_state_dict(cool.state_dict())
    found = model(tokens).logits
    assert not torch.allclose(found, cool(tokens).logits)
    for part in cool.modules():
        if isinstance(part, LatentAttention | RangeAttention) and part.rope.factor > 1:
            part.query.up.weight.data *= (1 + 0.1 * math.log(4)) ** 2
    torch.testing.assert_close(found, cool(tokens).logits)


@pytest.mark.parametrize("case", ["gsm", "baseline"])
def test_a_model_with_yarn_loads_the_weights_of_one_without(case: str):
    plain, long = built(case), built(case, yarn_factor=4.0, yarn_mscale=1.0)
    long.load_state_dict(plain.state_dict())
    tokens = small.random_tokens(1, 40)
    assert not torch.allclose(long(tokens).logits, plain(tokens).logits)


def built(case: str, **yarn: Any):
    geometry: Geometry = replace(small.GEOMETRY, **yarn)
    return small.build(case, geometry=geometry)
