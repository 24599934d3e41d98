"""The cost model against what the models do: bytes of real memories, products that PyTorch counts, entries that are
seen."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from small import GEOMETRY, M, build, comparators, random_tokens, reads, training_cases
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

import gsm.mixers.sparse as sparse
import gsm.models.base as base
import gsm.nn.indexer_training as indexer_training
import gsm.nn.norm as norm
import gsm.nn.residual as residual
import gsm.nn.search as search
import gsm_kernels
from gsm.models.base import LanguageModel
from gsm.models.baseline import Baseline
from gsm.models.cost import Parts, cost, paper_cache, paper_decode
from gsm.models.cost_layers import limited, pooled
from gsm.models.gsm import GSM
from gsm.nn.feed_forward import SwiGLU
from gsm.observe import record
from gsm.runs.load import build_model
from gsm_kernels import Impl, IndexerLoss
from gsm_kernels.index_top_k.reference import slots_visible

CORES = ("attention", "index scores", "teacher")  # the rest are products with weights, and hyper-connections
# Tokens, rows, before. After 35 tokens all groups of 1, 2 or 3 end with the next one, so that no slot is to spare.
CALLS = ((41, 1, 0), (7, 2, 35))
POOL = replace(GEOMETRY, candidate_blocks=2)


CASES = [case for case in training_cases() if case.partition("-")[0] not in comparators()]


def model_of(case: str, **options) -> GSM | Baseline:
    """The model of a case; a pool holds at least K slots, whatever its newest block lacks."""
    if case == "baseline-pool":
        options["geometry"] = POOL
    model = build(case, **options)
    assert isinstance(model, GSM | Baseline)
    return model


def linear(parts: Parts) -> dict[str, int]:
    """The parts without attention and search."""
    return {part: flops for part, flops in parts.items() if part.partition("/")[2] not in CORES}


def naive_boundary(streams_BRXD, update_BRD, phi, bias, scale, rounds):
    """Hyper-connections as three products; what lies between them is no product, and left out."""
    count = streams_BRXD.shape[2]
    number_BRN = streams_BRXD.flatten(2) @ phi.T
    read, write, mix = number_BRN.split((count, count, count * count), dim=-1)
    matrix = torch.cat([write[..., None], mix.unflatten(-1, (count, count))], dim=-1)
    left = matrix @ torch.cat([update_BRD[:, :, None], streams_BRXD], dim=2)
    return left, (read[:, :, None] @ left)[:, :, 0]


@pytest.fixture
def without_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention and search without products; gradients pass."""

    def attend(query_BRHC, window_BEC, position, width, sink_H, cos, sin, bank_BFC=None, index=None, bias=None):
        far = sum(x.sum() for x in (bank_BFC, bias) if x is not None)
        return query_BRHC + window_BEC.sum() + sink_H.sum() + far

    def nothing(query_BRJI, weight_BRJ, key_BFI, first_BR, last_BR, count, pool=None):
        return first_BR[..., None].expand(-1, -1, count) * 0 - 1

    def kl(*arguments, dense, pool_BRN):
        return IndexerLoss(torch.stack([x.sum() for x in arguments[-3:]]).sum(), None)

    def scores(query_BRJI, weight_BRJ, key_BFI, index_BRK):
        return query_BRJI.sum() + weight_BRJ.sum() + key_BFI.sum() + torch.zeros(index_BRK.shape)

    for module, stubs in (
        (search, {"index_top_k": nothing}),
        (indexer_training, {"indexer_kl": kl, "score_slots": scores}),
    ):
        for name, stub in stubs.items():
            monkeypatch.setattr(module, name, stub)
    for op in (gsm_kernels.attend, gsm_kernels.attend_band):  # the operations themselves, wherever they are called
        monkeypatch.setattr(op, "impls", (Impl("reference", attend),))
    monkeypatch.setattr(sparse, "candidate_pool", nothing)
    monkeypatch.setattr(residual, "mhc_boundary", naive_boundary)
    # These two have backward passes of their own, with sums written as products, and products in place, unseen.
    monkeypatch.setattr(norm, "rms_norm", lambda x, weight, eps: x * weight)
    monkeypatch.setattr(base, "linear_cross_entropy", lambda x, w, target, _: cross_entropy(x @ w.T, target))


def counted(model: LanguageModel, tokens: int, rows: int, before: int) -> dict[str, int]:
    """What PyTorch's counter sees in one forward, by part; what no layer of weights owns are hyper-connections."""
    ids = torch.zeros(1, before + tokens, dtype=torch.int64, device=model.embedding.weight.device)
    counter = FlopCounterMode(display=False)
    with torch.no_grad():
        memory = model(ids[:, :before], memory=model.start(1)).memory if before else None
        with counter:
            assert model(ids[:, before:], memory=memory, rows=rows).logits.shape[1] == rows
    parts: dict[str, int] = {}
    whole = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    for name, flops in whole.items():
        part = part_of(name.split("."))
        if part:
            parts[part] = parts.get(part, 0) + flops
    rest = whole["Global"] - sum(parts.values())
    return {**parts, "hyper-connections": rest}


def part_of(path: list[str]) -> str | None:
    """The part that a layer of weights belongs to, by its place in the model."""
    place = {"aggregation": "stages"}.get(path[1], path[1]) if len(path) > 1 else ""
    if place in ("head", "writer"):  # the whole of each, whatever it consists of
        return {"head": "head", "writer": "state/writer"}[place] if len(path) == 2 else None
    owners = {
        "query": "projections", "output": "projections", "window": "entries", "compressor": "compressors",
        "indexer": "indexers", "feed_forward": "feed-forward",
    }  # fmt: skip
    owner = path[-2] if len(path) > 2 else ""
    return f"{place}/{owners[owner]}" if owner in owners and path[-1] != "norm" else None


def predicted(parts: Parts) -> dict[str, int]:
    """The same parts from the cost model."""
    mixing = [part for part in linear(parts) if part.endswith("hyper-connections")]
    rest = {part: flops for part, flops in linear(parts).items() if part not in mixing}
    return {**rest, "hyper-connections": sum(parts[part] for part in mixing)}


@pytest.mark.parametrize("case", CASES)
def test_products_with_weights_are_those_that_pytorch_counts(case: str, without_cores: None):
    model = model_of(case)
    for tokens, rows, before in CALLS:
        want = predicted(cost(model).forward_flops(tokens, rows, before))
        assert counted(model, tokens, rows, before) == want, f"{tokens} tokens, {rows} rows, {before} before"


@functools.cache
def sized(name: str, size: str) -> GSM | Baseline:
    with torch.device("meta"):
        model = build_model(name, size)
    assert isinstance(model, GSM | Baseline)
    return model


@pytest.mark.parametrize("name", ["gsm", "baseline"])
@pytest.mark.parametrize("size", ["nano", "1p5b"])
def test_they_are_at_every_scale(name: str, size: str, without_cores: None):
    model = sized(name, size)
    tokens = model.geometry.context + 5000
    for rows in (1, tokens):
        assert counted(model, tokens, rows, 0) == predicted(cost(model).forward_flops(tokens, rows))


@pytest.mark.parametrize("case", [*CASES, "gsm-retriever=separate_indexer, recomputed"])
def test_training_makes_every_product_three_times(case: str, without_cores: None):
    named, _, recompute = case.partition(", ")
    model = model_of(named, recompute=bool(recompute))
    tokens = random_tokens(1, 33)
    counter = FlopCounterMode(display=False)
    with counter, set_checkpoint_early_stop(False):  # which would leave out the last product of every block
        out = model.train()(tokens, targets=tokens)
        (out.loss + sum(out.losses.values())).backward()
    want = sum(linear(cost(model).training_flops(33)).values())
    # What a writer does not read runs, and nobody wants its gradient: rows of the encoder's last layer, or the stages.
    layers, (encoder, stages) = cost(model).layers, reads(model.writer) if isinstance(model, GSM) else (True, True)
    unread = [layers[GEOMETRY.encoder_layers - 1]] * (not encoder)
    unread += [layer for layer in layers if layer.place == "stages" and not stages]
    want -= 2 * 33 * 2 * sum(number for layer in unread for number in layer.per_row.values())
    assert counter.get_total_flops() == want


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_attention_and_search_cost_what_the_rows_see(case: str, monkeypatch: pytest.MonkeyPatch):
    model = model_of(case)
    searched = []
    top_k = search.index_top_k

    def watched(query, weight, key_BFI, first_BR, last_BR, k, pool=None):
        searched.append(int(slots_visible(key_BFI.shape[1], first_BR, last_BR, pool, 8).sum()))
        return top_k(query, weight, key_BFI, first_BR, last_BR, k, pool)

    monkeypatch.setattr(search, "index_top_k", watched)
    for tokens, rows, before in ((41, 5, 0), (41, 1, 0), (7, 2, 36)):
        ids = random_tokens(1, before + tokens)
        memory = model(ids[:, :before], memory=model.start(1)).memory if before else None
        searched.clear()
        with record("*/weights") as seen:
            model(ids[:, before:], memory=memory, rows=rows)
        places = {"encoder": "encoder", "stage": "stages", "state": "state", "decoder": "decoder"}
        entries = dict.fromkeys(places.values(), 0)  # as often as there are heads that see them
        for name, weights_BRHE in seen.items():
            entries[places[name.partition("/")[0]]] += int((weights_BRHE[..., :-1] > 0).sum())
        parts = cost(model).forward_flops(tokens, rows, before)
        for place, number in entries.items():
            want = number * 4 * GEOMETRY.entry_dim
            assert parts[f"{place}/attention"] == want, f"{place}, {tokens} tokens, {rows} rows, {before} before"
        scores = sum(flops for part, flops in parts.items() if part.endswith("index scores"))
        assert scores == sum(searched) * 2 * GEOMETRY.index_heads * (GEOMETRY.index_dim + 1)


def test_the_rates_of_attention_and_search_are_those_of_their_equations():
    heads, width, rows, entries = GEOMETRY.heads, GEOMETRY.entry_dim, 1, M
    index, index_width = GEOMETRY.index_heads, GEOMETRY.index_dim
    with FlopCounterMode(display=False) as attention:
        logits = torch.zeros(rows, heads, width) @ torch.zeros(width, entries)
        _ = logits.softmax(-1) @ torch.zeros(entries, width)
    with FlopCounterMode(display=False) as search:
        fired = (torch.zeros(rows, index, index_width) @ torch.zeros(index_width, 5)).relu()
        _ = torch.zeros(rows, 1, index) @ fired
    model = build("gsm-writer=additive")
    late = cost(model).decode_flops(1000)
    assert late["decoder/attention"] == GEOMETRY.decoder_layers * attention.get_total_flops()
    assert late["encoder/index scores"] / 2 == 500 * search.get_total_flops() / 5, "two banks of 1001 // 2 slots"


@pytest.mark.parametrize("case", ["gsm-retriever=separate_indexer", "baseline-pool"])
def test_tokens_one_by_one_cost_what_they_cost_together(case: str):
    model = cost(model_of(case))
    whole, parts = model.forward_flops(50), Parts()
    for position in range(50):
        parts.update(model.decode_flops(position))
    assert parts == whole
    assert Parts(model.forward_flops(13) + model.forward_flops(37, before=13)) == whole


def test_the_teacher_looks_at_every_slot_that_is_searched(monkeypatch: pytest.MonkeyPatch):
    shape = GEOMETRY
    for case in ("gsm-retriever=separate_indexer", "baseline-pool"):
        model = cost(model_of(case))
        forward, training = model.forward_flops(40), model.training_flops(40)
        learning = model.model.indexer_training
        scores, teacher = ("index scores", "teacher")
        searched = sum(n for k, n in forward.items() if k.endswith(scores)) / (
            2 * shape.index_heads * (shape.index_dim + 1)
        )
        taught = sum(n for k, n in training.items() if k.endswith(teacher)) / (2 * shape.heads * shape.entry_dim)
        assert searched == taught > 0
        monkeypatch.setattr(learning, "dense_limit", 39)
        sparse_training = model.training_flops(40)
        assert not any(part.endswith(teacher) for part in sparse_training)
        name = f"{'encoder' if case.startswith('gsm') else 'decoder'}/{scores}"
        assert forward[name] < sparse_training[name] < 3 * forward[name] == training[name]
        monkeypatch.undo()


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_cache_bytes_are_those_of_a_memory(case: str):
    model = model_of(case)
    for batch, length in ((1, 3), (1, 17), (2, 40)):
        memory = model.prefill(random_tokens(batch, length), model.start(batch), chunk=17).memory
        assert memory is not None
        got = cost(model).cache_bytes(length, torch.float64, batch)
        assert got == memory.breakdown(), f"batch {batch}, {length} tokens"
        assert got.total() == memory.nbytes()
    for capacity in (1, 7, 40):
        got = cost(model).cache_bytes(0, torch.float64, 2, capacity)
        assert got == model.start(2, capacity=capacity).breakdown(), f"capacity {capacity}"


def test_the_state_of_the_large_model_stays_small():
    model, other = cost(sized("gsm", "1p5b")), cost(sized("baseline", "1p5b"))
    short, long = model.cache_bytes(1024), model.cache_bytes(65536)
    assert short["shared_state"] == long["shared_state"] == 256 * 128 * 2
    grown = other.cache_bytes(65536)
    assert grown["decoder_bank"] == 65536 * 128 * 2 and grown["encoder_bank"] == long["encoder_bank"]
    assert not any(kind.startswith("decoder") for kind in long)


def test_the_paper_estimates_the_attention_of_a_decoder():
    for name in ("gsm-writer=additive", "baseline-pool"):
        model = model_of(name)
        exact, shape = cost(model), GEOMETRY
        parts = exact.decode_flops(999)
        scores = parts["decoder/index scores"] / (shape.index_dim + 1) * shape.index_dim
        assert parts["decoder/attention"] / 4 + scores / 2 == paper_decode(model, 1000)
        kept = exact.cache_bytes(1000, torch.float64)
        entries = kept["shared_state"] + kept["decoder_window"] + kept["decoder_bank"]
        assert entries == paper_cache(model, 1000) * 8


def test_the_sums_are_sums():
    for ratio in (1, 2, 3):
        for count in range(80):
            visible = [k // ratio for k in range(1, count + 1)]
            for limit in (0, 1, 5, 100):
                assert limited(count, limit, ratio) == sum(min(v, limit) for v in visible)
            assert pooled(count, None, ratio) == sum(visible)
            for blocks in (1, 2, 5):
                kept = [v if -(-v // 8) <= blocks else 8 * (blocks - 1) + (v - 1) % 8 + 1 for v in visible]
                assert pooled(count, 8 * blocks, ratio) == sum(kept), f"{blocks} blocks, ratio {ratio}, {count}"


@pytest.mark.parametrize("case", comparators())
def test_the_cost_of_comparators_is_not_known_yet(case: str):
    with pytest.raises(ValueError, match="the cost of (Comparator|YOCO) is not known, only of GSM, Baseline; extend"):
        cost(build(case))


def test_a_part_of_unknown_cost_is_refused():
    class Wider(SwiGLU):
        pass

    with pytest.raises(ValueError, match="the cost of Wider is not known, only of SwiGLU; extend gsm.models.cost"):
        cost(GSM(GEOMETRY, feed_forward=Wider))


def test_a_pool_that_may_run_short_is_refused():
    with pytest.raises(ValueError, match="a pool of 8 slots, .* can hold fewer than top_k 3"):
        cost(build("baseline-pool"))


@pytest.mark.parametrize(("tokens", "rows", "before"), [(0, None, 0), (4, 5, 0), (4, 0, 0), (4, None, -1)])
def test_impossible_calls_are_refused(tokens: int, rows: int | None, before: int):
    with pytest.raises(ValueError, match="give 1 <= rows <= tokens and before >= 0"):
        cost(build("gsm-writer=additive")).forward_flops(tokens, rows, before)
