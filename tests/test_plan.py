"""The plan of large runs: its parts by hand, and the activations that autograd keeps by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gsm_benchmarks import plan
from gsm_benchmarks.models import Model, known_cost
from gsm_benchmarks.plan import Assumed, Setting, _built, kept, memory, saved_bytes
from gsm_kernels.device import triton_version

ASSUMED = Assumed(hbm=80, reserve=5, backward=0.5, sequences=128, context=4096, micro_batch=4)
GSM = Model("gsm", "gsm")
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
    full += 2 * 3 * entry + 2 * entry  # values, gates and weights of two compressors; the state and the banks once more
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
    model, setting = known_cost(GSM, "pico").model, replace(SMALL, sharding="fsdp2", gathered=2)
    layer = max(sum(p.numel() for p in block.parameters()) for block in [*model.encoder, *model.decoder])
    assert memory(setting, ASSUMED)["weights at work"] == 2 * 512 * 64 + 10 * layer
    several = memory(replace(setting, batches=4), ASSUMED)
    assert several["whole gradients"] == 4 * sum(p.numel() for p in model.parameters())


@counted
def test_memory_of_divided_sequences_by_hand():
    long = Setting(GSM, "pico", 8, "fsdp2", True, 1, 1024, 2)
    whole, half = (memory(replace(long, divided=ranks), ASSUMED) for ranks in (1, 2))
    assert whole["activations"] - half["activations"] == pytest.approx(kept(GSM, "pico", True, 1024).each * 512)
    # Every bank has a slot for two tokens: an entry of 32 numbers, an index key of 16 where the layer searches.
    layout = GSM.build("pico").start().layout()
    widths = [width for kind, _, width, _ in layout if kind in ("encoder_bank", "index_keys")]
    assert half["gathered banks"] == 2 * 2 * 512 * sum(widths) and whole["gathered banks"] == 0


def test_ranges_of_lengths_are_found_by_bisection():
    assert plan.below(lambda n: n, lambda n: 10, 100) == [(1, 9)]
    assert plan.below(lambda n: 10, lambda n: n, 100) == [(11, 100)]
    assert plan.below(lambda n: n, lambda n: n + 1, 7) == [(1, 7)]


@counted
@pytest.mark.nightly
def test_the_page_has_its_tables(tmp_path: Path):
    output = str(tmp_path / "plan.md")
    text = plan.run(ASSUMED, ["pico"], "pico", [8, 64], [64, 1024], output=output).read_text()
    assert text.count("\n| --- |") == 5 and "the paper measured 44.06" in text
    with pytest.raises(ValueError, match="^gpus"):
        plan.run(ASSUMED, ["pico"], gpus=[0])
