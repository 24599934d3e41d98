"""What dividing sequences and experts takes: by hand, and as the plan has it where nothing is divided."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_plan import ASSUMED, counted

from gsm.costs import traffic
from gsm.layers.experts import Experts, ways_to_divide
from gsm_benchmarks import plan, scale
from gsm_benchmarks.entries import Model
from gsm_benchmarks.plan import Setting
from gsm_benchmarks.scale import Split

MOE = Model("gsm", ("model/feed_forward=moe",))
LONG = Setting(MOE, "pico", 8, "fsdp2", True, 1, 1024, 2, 4)


@counted
def test_undivided_it_is_the_plan():
    assert scale.memory(LONG, Split(1, 1), ASSUMED) == {**plan.memory(LONG, ASSUMED), "gathered banks": 0.0}


@counted
def test_memory_of_divided_sequences_by_hand():
    whole, half = (scale.memory(LONG, Split(n, 1), ASSUMED) for n in (1, 2))
    kept = plan.kept(MOE, "pico", True, 1024)
    assert whole["activations"] - half["activations"] == pytest.approx(kept.each * 512)
    # Every bank has a slot for two tokens: an entry of 32 numbers, an index key of 16 where the layer searches.
    assert half["gathered banks"] == 2 * 2 * scale.slots(LONG.cost.model, 1024)
    layout = MOE.build("pico").start().layout()
    widths = [width for kind, _, width, _ in layout if kind in ("encoder_bank", "index_keys")]
    assert scale.slots(LONG.cost.model, 1024) == 512 * sum(widths)


@counted
def test_experts_that_are_divided_are_not_gathered():
    all_of_them, half = (scale.memory(LONG, Split(1, n), ASSUMED)["weights at work"] for n in (1, 2))
    experts = scale._experts_of_layers(LONG.cost.model)
    assert all_of_them - half == pytest.approx((3 * 2 + 4) * experts[0] / 2)


@counted
def test_seconds_by_hand():
    split = Split(4, 2)
    found = scale.seconds(LONG, split, ASSUMED)
    model = LONG.cost.model
    sent = traffic.sent(model, batch=1, tokens=1024, ranks=4, number_bytes=2)
    assert found["sequences"] == pytest.approx(3 * sum(one.bytes for one in sent) / 4 / (200e9 * 0.5))
    geometry, layers = model.geometry, len(scale._experts_of_layers(model))
    rows = 256 * geometry.experts_per_token * layers
    assert found["experts"] == pytest.approx(3 * rows * 2 * 2 * geometry.dim / 2 / (200e9 * 0.5))
    alone = scale.seconds(LONG, Split(1, 1), ASSUMED)
    assert alone["sequences"] == alone["experts"] == 0
    assert alone["arithmetic"] == pytest.approx(4 * found["arithmetic"])
    everything = sum(p.numel() for p in model.parameters())
    assert alone["weights"] == pytest.approx(ASSUMED.one_pass(8 * everything, 8))


@counted
@pytest.mark.parametrize(
    ("gpus", "asked", "planned"), [(2, 4, 2), (8, 4, 4), (10, 4, 1), (6, 4, 1), (7, 4, 1), (8, 1, 1)]
)
def test_only_what_training_takes_is_planned(gpus: int, asked: int, planned: int):
    row = scale._row(MOE, "pico", 1024, gpus, asked, ASSUMED)
    parts = [part for part in LONG.cost.model.modules() if isinstance(part, Experts)]
    assert row["experts"] == planned and planned in ways_to_divide(parts, gpus)


@counted
def test_a_case_whose_experts_cannot_be_divided_is_not_there_twice(tmp_path: Path):
    case = {"name": "gsm", "overrides": ["model/feed_forward=moe"], "size": "pico"}
    path = scale.run(ASSUMED, [case, {**case, "experts": 4}], [7, 8], [1024], output=str(tmp_path / "scale.json"))
    rows = json.loads(path.read_text())["rows"].values()
    assert [(row["gpus"], row["experts"]) for row in rows] == [(7, 1), (8, 1), (8, 4)]


@counted
def test_the_table_names_what_is_short_first(tmp_path: Path):
    tight = replace(ASSUMED, hbm=5.04, reserve=5)
    path = scale.run(
        tight, [{"name": "gsm", "size": "pico"}], [8], [1024, 1 << 20], output=str(tmp_path / "scale.json")
    )
    rows = list(json.loads(path.read_text())["rows"].values())
    assert [row["fits"] for row in rows] == [True, False] and rows[1]["sequence"] == 8
    assert "| memory |" in path.with_suffix(".md").read_text()
