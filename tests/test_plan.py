"""The plan of large runs: its parts by hand, what autograd keeps by hand, and that more is never less."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from gsm.config.compose import compose
from gsm_benchmarks import plan
from gsm_benchmarks.entries import Model, known_cost
from gsm_benchmarks.plan import GIB, Assumed, Setting, _built, kept, memory, paper_mfu, saved_bytes, timing
from gsm_benchmarks.recipes import composed
from gsm_kernels.device import triton_version

ASSUMED = Assumed(
    peak=1e15, mfu=0.4, hbm=80, reserve=5, nvlink=200e9, network=50e9, reached=0.5, hidden=0.75, backward=0.5,
    sequences=128, context=4096, micro_batch=4, per_node=8,
)  # fmt: skip
GSM = Model("gsm")
SMALL = Setting(GSM, "pico", gpus=8, sharding="ddp", recompute=False, micro_batch=4, context=64)

counted = pytest.mark.skipif(triton_version() is None, reason="what is kept is counted on Triton's operations")


@counted
def test_what_is_kept_is_what_the_kernels_say_by_hand():
    """Size pico: 4 streams of D = 64, F = 176, 4 heads of C = 32, query rank 32, 2 x 32 outputs, 4 + 4 layers."""
    streams, dim, hidden, heads, query, rank, output, entry = 4, 64, 176, 4, 128, 32, 64, 32
    sites = 2 * streams * dim + 2 * (dim + dim + dim)  # streams; what is read, normed, and the update
    layer = sites + 3 * hidden + 2 * rank + 2 * query + output  # gate, up, product; latent, normed; query, mixture
    stages = (dim + dim + 2 * rank + 2 * query + output) + (2 * dim + 2 * dim + 2 * rank + 2 * query + output)
    half = 8 * layer + stages + 4 * 2 * entry + 2 * 2 * entry - 2 * (streams - 1) * dim  # entries, banks; first copies
    full = 16 * (2 * (2 * streams + streams**2) + 1) + 10 * heads  # coefficients and norms of sites; softmaxes
    small = saved_bytes(_built(GSM, "pico", False), 64) - 4 * 512 * dim
    assert small / 64 == pytest.approx(2 * half + 4 * full, rel=0.05)


@counted
def test_what_is_kept_is_a_fixed_part_and_one_for_each_token():
    model = _built(GSM, "pico", False)
    few, some, many = (saved_bytes(model, tokens) for tokens in (32, 64, 96))
    assert many - some == pytest.approx(some - few, rel=1e-3)
    found = kept(GSM, "pico", False, 64)
    assert found.fixed == 4 * 512 * 64 and found.total(64) == pytest.approx(some, rel=1e-9)


@counted
def test_recomputed_layers_keep_what_enters_them():
    whole, bare = kept(GSM, "pico", False, 64), kept(GSM, "pico", True, 64)
    entering = 2 * 64 * (2 * (5 * 4 - 4))
    assert entering < bare.each < whole.each - 8 * bare.block + entering + 1
    assert whole.block == bare.block


@counted
@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_memory_by_hand(sharding: str):
    parts = memory(replace(SMALL, sharding=sharding), ASSUMED)
    model = known_cost(GSM, "pico").model
    total, embedding = sum(p.numel() for p in model.parameters()), 512 * 64
    layer = max(sum(p.numel() for p in block.parameters()) for block in [*model.encoder, *model.decoder])
    shards, found = (1 if sharding == "ddp" else 8), kept(GSM, "pico", False, 64)
    assert parts["weights"] == parts["gradients"] == parts["optimizer"] / 2 == 4 * total / shards
    assert parts["buckets"] == (4 * total if sharding == "ddp" else 0)
    assert parts["weights at work"] == 2 * total + (0 if sharding == "ddp" else 4 * embedding + 16 * layer)
    assert parts["activations"] == found.fixed + 256 * found.each
    assert parts["layer or logits at work"] == max(256 * 512 * 6, 0.5 * 256 * found.block)
    assert parts["total"] == sum(size for name, size in parts.items() if name != "total")


@counted
def test_weights_that_are_gathered_in_bfloat16_leave_autocast_nothing_to_copy():
    model, setting = known_cost(GSM, "pico").model, replace(SMALL, sharding="fsdp2", gathered=2, reduced=4)
    layer = max(sum(p.numel() for p in block.parameters()) for block in [*model.encoder, *model.decoder])
    assert memory(setting, ASSUMED)["weights at work"] == 2 * 512 * 64 + 10 * layer
    slow, fast = (timing(one, ASSUMED)["communication"] for one in (replace(setting, gathered=4), setting))
    assert fast == pytest.approx(slow * 8 / 12)


def test_what_fsdp2_gathers_and_reduces_is_what_its_yaml_says():
    assert plan.travelling() == {"gathered": 4, "reduced": 4}
    both = ["trainer.strategy.gathered=bfloat16", "trainer.strategy.reduced=float32"]
    assert plan.travelling(both) == {"gathered": 2, "reduced": 4} and plan.travelling(both[:1])["reduced"] == 2


def test_links_by_hand():
    one = 8e9  # bytes
    assert ASSUMED.one_pass(one, 8) == pytest.approx(7 / 8 * one / 100e9)
    assert ASSUMED.one_pass(one, 32) == pytest.approx(7 / 8 * one / 100e9 + 3 / 4 * one / 8 / 25e9)


@pytest.mark.parametrize(("gpus", "recompute"), [(8, True), (64, False)])
def test_time_is_the_cost_models_flops_over_the_rate_and_near_six_n_d(gpus: int, recompute: bool):
    setting = Setting(GSM, "1p5b", gpus, "ddp", recompute, 2, 4096)
    found = timing(setting, ASSUMED)
    flops = 128 * setting.cost.training_flops(4096).total()
    assert found["arithmetic"] == flops / gpus / 4e14 and found["tokens"] == 128 * 4096
    parameters = known_cost(GSM, "1p5b").model.parameter_report().active
    share = flops / (6 * parameters * found["tokens"])
    assert (1.3 < share < 1.6) if recompute else (1.0 < share < 1.2)
    assert found["communication"] == pytest.approx(2 * ASSUMED.one_pass(4 * parameters, gpus))
    assert found["step"] == pytest.approx(found["arithmetic"] + 0.25 * found["communication"])


def test_communication_that_is_longer_than_arithmetic_cannot_hide_behind_it():
    slow = replace(ASSUMED, network=1e6)
    found = timing(replace(SMALL, gpus=64), slow)
    assert found["step"] == pytest.approx(found["communication"])


def test_fsdp_gathers_again_for_every_micro_batch():
    few, many = (timing(replace(SMALL, sharding="fsdp2", micro_batch=n), ASSUMED)["communication"] for n in (16, 4))
    assert many == pytest.approx(4 * few)


def test_more_gpus_than_sequences_make_the_step_larger_not_faster():
    steps = [timing(replace(SMALL, gpus=n, micro_batch=1), ASSUMED) for n in (8, 64, 128, 256)]
    assert all(a["arithmetic"] > b["arithmetic"] for a, b in pairwise(steps[:3]))
    assert steps[3]["arithmetic"] == steps[2]["arithmetic"] and steps[3]["tokens"] == 2 * steps[2]["tokens"]


@counted
def test_memory_grows_with_tokens_and_shrinks_with_shards_and_recomputation():
    assert memory(replace(SMALL, micro_batch=8), ASSUMED)["total"] > memory(SMALL, ASSUMED)["total"]
    sharded = [memory(replace(SMALL, sharding="fsdp2", gpus=n), ASSUMED)["total"] for n in (8, 64, 800)]
    assert sharded == sorted(sharded, reverse=True)
    large = replace(SMALL, micro_batch=64)
    assert memory(replace(large, recompute=True), ASSUMED)["total"] < memory(large, ASSUMED)["total"]


def test_the_papers_speed_is_a_small_share_of_the_peak():
    flops = known_cost(GSM, "1p5b", ("model.recompute=true",)).training_flops(4096).total() / 4096
    assert paper_mfu("gsm", ASSUMED) == pytest.approx(53231 / 8 * flops / 1e15)


@counted
def test_the_tables_say_that_they_are_computed_and_are_made_from_the_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = plan.run(
        replace(ASSUMED, context=64), {"pico": 1e6}, output=str(tmp_path / "a.json"), models=["gsm"], gpus=[8, 16],
        contexts=[64, 128], recipes=[],
    )  # fmt: skip
    rows = json.loads(path.read_text())["rows"].values()
    assert [row["kind"] for row in rows].count("run") == 8 and [row["kind"] for row in rows].count("length") == 4
    run = next(row for row in rows if row["kind"] == "run")
    assert run["hours"] == pytest.approx(1e6 / (128 * 64) * run["seconds"]["step"] / 3600)
    text = path.with_suffix(".md").read_text()
    assert "**Computed, nothing measured**" in text and "peak 1e+15" in text and "| pico | gsm | 8 |" in text
    monkeypatch.setattr(plan, "kept", None)
    plan.run(ASSUMED, {}, results=str(path))
    assert path.with_suffix(".md").read_text() == text


@counted
def test_what_does_not_fit_says_over_how_many_gpus_it_would():
    parts = memory(SMALL, ASSUMED)
    divided = parts["activations"] + parts["layer or logits at work"]
    rest = parts["total"] - divided
    for share, gpus in ((1.01, 1), (0.4, 3), (0, None)):
        row = plan._length(SMALL, replace(ASSUMED, hbm=ASSUMED.reserve + (rest + share * divided) / GIB))
        assert (row["fits"], row["divided_over"]) == (share > 1, gpus)


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(ValueError, match=r"gpus \[12\].*give multiples of 8 GPUs"):
        plan.run(ASSUMED, {"pico": 1e6}, gpus=[12])
    with pytest.raises(ValueError, match="assumed.mfu is 1.4; give a share, up to 1"):
        replace(ASSUMED, mfu=1.4)


def test_the_yaml_states_every_assumption():
    node = compose(["benchmark=plan"], script="benchmark")["benchmark"]["assumed"]
    assert {*node} - {"_target_"} == {*Assumed.__dataclass_fields__}
    assert float(node["peak"]) == 989e12


def test_a_recipe_is_the_papers_on_any_number_of_gpus_or_says_why_not():
    """128 sequences a step, 10 B tokens in all; 64 GPUs with four sequences each would take 256 at a time."""
    found = {one.layout: one for one in composed(["experiment=paper_main size=0p5b"], ["1", "8", "64", "2x8"])}
    whole = {layout: (one.gpus, one.batches, one.sequences) for layout, one in found.items() if not one.refused}
    assert whole == {"1": (1, 32, 128), "8": (8, 4, 128), "2x8": (16, 2, 128)}
    assert {one.steps * 128 * one.context for one in found.values()} == {19_074 * 524_288}
    assert found["64"].batches is None and "say data.batch_size=2 or global_batch=256" in found["64"].refused
    with pytest.raises(ValueError, match="layouts has '2 x 8', but takes GPUs such as 8"):
        list(composed(["experiment=paper_main"], ["2 x 8"]))


@counted
def test_a_recipe_needs_the_simplest_way_that_fits_or_more_gpus():
    recipe = next(composed(["experiment=paper_long_context size=nano"], ["8"]))
    total = memory(Setting(GSM, "nano", 8, "ddp", False, 4, 256), ASSUMED)["total"]
    row = plan._recipe(recipe, ASSUMED)
    assert row["memory"]["trainer=ddp"]["gsm"] == total and row["needs"] == "trainer=ddp"
    sharded = max(row["memory"]["trainer=fsdp"].values())
    assert sharded < total
    tight = replace(ASSUMED, hbm=5 + (sharded + 1) / GIB)
    assert plan._recipe(recipe, tight)["needs"] == "trainer=fsdp"
    half = max(row["memory"][[*plan.WAYS][-1]].values())
    assert half < sharded
    assert (
        "GPUs, trainer=fsdp trainer.strategy.gathered=bfloat16"
        in plan._recipe(recipe, replace(ASSUMED, hbm=5 + (half - 1) / GIB))["needs"]
    )
