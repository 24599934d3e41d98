"""The cost model compared with the models: products that PyTorch counts, entries that rows see."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from small import (
    GEOMETRY,
    MEMORIES,
    SHALLOW,
    M,
    build,
    comparators,
    mostly_nightly,
    random_tokens,
    reads,
    training_cases,
)
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

import gsm.layers.indexer_training as indexer_training
import gsm.layers.norm as norm
import gsm.layers.nsa as nsa
import gsm.layers.residual as residual
import gsm.layers.search as search
import gsm.layers.sparse as sparse
import gsm.models.base as base
from gsm.config.load import build_model
from gsm.costs.model import Parts, cost
from gsm.layers.costs import limited, pooled
from gsm.layers.operations import OPS
from gsm.models.base import LanguageModel
from gsm.models.baseline import Baseline
from gsm.models.gsm import GSM
from gsm.observe import record
from gsm_kernels import Impl, IndexerLoss
from gsm_kernels.index_top_k.reference import slots_visible

# The rest are products with weights, and hyper-connections.
CORES = ("attention", "index scores", "teacher", "recurrence", "convolution")
# Tokens, rows, before. After 35 tokens all groups of 1, 2 or 3 end with the next one, so that no slot is to spare.
CALLS = ((41, 1, 0), (7, 2, 35), (7, -4, 35))
POOL = replace(SHALLOW, candidate_blocks=2)


CASES = training_cases()
TRAINED = [*CASES, "gsm-retriever=separate_indexer, recomputed"]


def model_of(case: str, **options) -> LanguageModel:
    """The shallow model of a case; a pool holds at least K slots, whatever its newest block lacks."""
    return build(case, geometry=POOL if case == "baseline-pool" else SHALLOW, **options)


def linear(parts: Parts) -> dict[str, int]:
    """The parts without attention and search."""
    return {part: flops for part, flops in parts.items() if part.partition("/")[2] not in CORES}


def naive_boundary(streams_BRXD, update_BRD, phi, bias, scale, rounds):
    """Return hyper-connections as three products, without the operations between them."""
    left, _ = naive_writing(streams_BRXD, update_BRD, phi)
    read_BRX = streams_BRXD.flatten(2) @ phi[: streams_BRXD.shape[2]].T
    return left, (read_BRX[:, :, None] @ left)[:, :, 0]


def naive_writing(streams_BRXD, update_BRD, phi, *others):
    """Return the products of a site that reads its own input, without the unused read for the next site."""
    count = streams_BRXD.shape[2]
    write, mix = (streams_BRXD.flatten(2) @ phi[count:].T).split((count, count * count), dim=-1)
    matrix = torch.cat([write[..., None], mix.unflatten(-1, (count, count))], dim=-1)
    return matrix @ torch.cat([update_BRD[:, :, None], streams_BRXD], dim=2), update_BRD


@pytest.fixture
def without_cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention, search and recurrences without products; gradients pass."""

    def attend(query_BRHC, window_BEC, position, width, sink_H, cos, sin, bank_BFC=None, index=None, bias=None):
        far = sum(x.sum() for x in (bank_BFC, bias) if x is not None)
        return query_BRHC + window_BEC.sum() + sink_H.sum() + far

    def attend_range(query_BRHC, key_BFGC, value_BFGC, first_BR, last_BR, width=None, whole=False):
        return query_BRHC + key_BFGC.sum() + value_BFGC.sum()

    def attend_blocks(query_BRHC, key_BFGC, value_BFGC, first_BR, last_BR, chosen_BRGN, block):
        return query_BRHC + key_BFGC.sum() + value_BFGC.sum()

    def choose(query_BRHC, blocks, position_BR, block, count):
        return position_BR[..., None, None] * 0

    def recur(query_BTHC, key, value, beta, log_decay, start, live, state_BHRC, scale, channel_decay=None):
        given = (key, value, beta, log_decay, channel_decay)
        return query_BTHC + sum(x.sum() for x in given if x is not None), state_BHRC

    def nothing(query_BRJI, weight_BRJ, key_BFI, first_BR, last_BR, count, pool=None):
        return first_BR[..., None].expand(-1, -1, count) * 0 - 1

    def kl(index_query_BRJI, index_weight_BRJ, index_key_BFI, **teacher):
        return IndexerLoss(index_query_BRJI.sum() + index_weight_BRJ.sum() + index_key_BFI.sum(), None)

    def scores(query_BRJI, weight_BRJ, key_BFI, index_BRK):
        return query_BRJI.sum() + weight_BRJ.sum() + key_BFI.sum() + torch.zeros(index_BRK.shape)

    for module, stubs in (
        (search, {"index_top_k": nothing}),
        (indexer_training, {"indexer_kl": kl, "score_slots": scores}),
    ):
        for name, stub in stubs.items():
            monkeypatch.setattr(module, name, stub)
    stubs = {"attend": attend, "attend_band": attend, "attend_range": attend_range, "attend_blocks": attend_blocks}
    stubs |= {"delta_rule": recur, "slot_attention": recur}
    operations = {op.name: op for op in OPS}
    for name, stub in stubs.items():  # the operations themselves, wherever they are called
        reference = Impl("reference", lambda inputs, stub=stub: stub(*inputs))
        monkeypatch.setattr(operations[name], "impls", (reference,))
    monkeypatch.setattr(sparse, "candidate_pool", nothing)
    monkeypatch.setattr(nsa, "choose_blocks", choose)
    two_passes = "two_pass" in request.node.name
    monkeypatch.setattr(residual, "mhc_boundary", naive_writing if two_passes else naive_boundary)
    # These two have backward passes of their own, with sums written as products, and products in place, unseen.
    monkeypatch.setattr(norm, "rms_norm", lambda x, weight, eps, *angles: x * weight)
    monkeypatch.setattr(base, "linear_cross_entropy", lambda x, w, target, _: F.cross_entropy(x @ w.T, target))


def counted(model: LanguageModel, tokens: int, rows: int, before: int) -> dict[str, int]:
    """Return the FLOPs of one forward by PyTorch's counter, by part; all without a layer are hyper-connections."""
    ids = torch.zeros(1, before + tokens, dtype=torch.int64, device=model.embedding.weight.device)
    counter = FlopCounterMode(display=False)
    with torch.no_grad():
        memory = model(ids[:, :before], memory=model.start(1)).memory if before else None
        with counter:
            assert model(ids[:, before:], memory=memory, rows=rows).logits.shape[1] == max(0, rows)
    parts: dict[str, int] = {}
    whole = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    for name, flops in whole.items():
        part = part_of(model, name.split("."))
        if part:
            parts[part] = parts.get(part, 0) + flops
    rest = whole["Global"] - sum(parts.values())
    return {**{part: flops for part, flops in parts.items() if flops}, "hyper-connections": rest}


def part_of(model: LanguageModel, path: list[str]) -> str | None:
    """The part that a layer of weights belongs to, by its place in the model."""
    place = {"aggregation": "stages", "key_value": "cache"}.get(path[1], path[1]) if len(path) > 1 else ""
    if place in ("head", "writer"):  # the whole of each, whatever it consists of
        return {"head": "head", "writer": "state/writer"}[place] if len(path) == 2 else None
    owners = {
        "query": "projections", "output": "projections", "window": "entries", "compressor": "compressors",
        "indexer": "indexers", "feed_forward": "feed-forward", "key_value": "keys and values",
        "attention": "projections", "shared": "feed-forward", "decay": "projections", "gate": "projections",
    }  # fmt: skip
    owner = path[-2] if len(path) > 2 else ""
    leaf = not any(model.get_submodule(".".join(path[1:])).children())
    return f"{place}/{owners[owner]}" if leaf and owner in owners and path[-1] != "norm" else None


def predicted(parts: Parts) -> dict[str, int]:
    """The same parts from the cost model."""
    mixing = [part for part in linear(parts) if part.endswith("hyper-connections")]
    rest = {part: flops for part, flops in linear(parts).items() if part not in mixing}
    return {**rest, "hyper-connections": sum(parts[part] for part in mixing)}


@pytest.mark.parametrize("case", mostly_nightly(CASES, *MEMORIES, "baseline"))
def test_products_with_weights_equal_pytorch_s_count(case: str, without_cores: None):
    model = model_of(case)
    for tokens, rows, before in CALLS:
        want = predicted(cost(model).forward_flops(tokens, rows, before))
        assert counted(model, tokens, rows, before) == want, f"{tokens} tokens, {rows} rows, {before} before"


@pytest.mark.parametrize("size", ["nano", "1p5b"])
@pytest.mark.parametrize("name", ["gsm", "baseline"])
def test_products_at_shipped_sizes_equal_pytorch_s_count(name: str, size: str, without_cores: None):
    with torch.device("meta"):
        model = build_model(name, size)
    assert counted(model, 6000, 1, 0) == predicted(cost(model).forward_flops(6000, 1))


@pytest.mark.parametrize("case", mostly_nightly(TRAINED, *MEMORIES, "baseline"))
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
    unread = [layers[SHALLOW.encoder_layers - 1]] * (not encoder)
    unread += [layer for layer in layers if layer.place == "stages" and not stages]
    want -= 2 * 33 * 2 * sum(each.multiply_adds for layer in unread for each in layer.work.per_row.values())
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
        with record() as seen:
            model(ids[:, before:], memory=memory, rows=rows)
        places = {"encoder": "encoder", "stage": "stages", "state": "state", "decoder": "decoder"}
        entries = dict.fromkeys(places.values(), 0)  # as often as there are heads that see them
        sinks = isinstance(model, GSM | Baseline)
        for name, weights_BRHE in seen.items():
            if not name.endswith("/weights"):
                continue
            entries[places[name.partition("/")[0]]] += (
                int((weights_BRHE > 0).sum()) - sinks * weights_BRHE[..., 0].numel()
            )
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


@pytest.mark.parametrize(
    ("name", "reads", "writes"),
    [
        ("linear_attention", 1, 1),  # the query reads
        ("delta_net", 2, 1),  # so does the key, before it writes
        ("gated_delta_net", 2, 1),
        ("delta_product", 3, 2),
        ("kda", 2, 1),
        ("gsa", 1, 1),  # keys and values of slots: both are read once, and written
        ("raven", 1, 0.5),  # half of them are written
        ("mamba3", 1, 2),  # a token is written with the one before it
    ],
)
def test_recurrences_cost_what_their_equations_need(name: str, reads: int, writes: float):
    heads, width, sees = GEOMETRY.heads, GEOMETRY.entry_dim, 4
    across = 2 * width if name in ("gsa", "raven") else width  # as many slots as channels
    state = torch.zeros(heads, width, across)
    with FlopCounterMode(display=False) as recurrence:
        for _ in range(reads):
            _ = state.mT @ torch.zeros(heads, width, 1)
        for _ in range(max(1, int(writes))):
            _ = torch.zeros(heads, int(min(1, writes) * width), 1) @ torch.zeros(heads, 1, across)
    channels = heads * width * (1 + 2 * int(writes))
    with FlopCounterMode(display=False) as convolution:
        F.conv1d(torch.zeros(1, channels, sees), torch.zeros(channels, 1, sees), groups=channels)
    parts, times = cost(build(name)).forward_flops(9, rows=2), 9 * GEOMETRY.depth
    assert parts["decoder/recurrence"] == times * recurrence.get_total_flops()
    if name not in ("raven", "mamba3"):  # which have none
        assert parts["decoder/convolution"] == times * convolution.get_total_flops()


@pytest.mark.parametrize("case", ["gsm-retriever=separate_indexer", "baseline-pool", *comparators()])
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
        monkeypatch.setattr(learning, "sampled_rows", 16)
        monkeypatch.setattr(learning, "beyond", "selected")
        sparse_training = model.training_flops(40)
        name = f"{'encoder' if case.startswith('gsm') else 'decoder'}/{scores}"
        assert forward[name] < sparse_training[name] < 3 * forward[name] == training[name]
        monkeypatch.undo()


def test_beyond_the_limit_the_teacher_looks_at_the_slots_of_sampled_rows(monkeypatch: pytest.MonkeyPatch):
    shape, case = SHALLOW, "gsm-retriever=separate_indexer"
    model = cost(model_of(case))
    monkeypatch.setattr(model.model.indexer_training, "dense_limit", 39)
    monkeypatch.setattr(model.model.indexer_training, "sampled_rows", 16)
    visible = sum((row + 1) // shape.encoder_ratio for row in range(0, 32, 2))
    forward, sampled = model.forward_flops(40), model.training_flops(40)
    indexers = {"encoder": len(shape.bank_layers), "stages": len(shape.stages)}
    for place, count in indexers.items():
        assert sampled[f"{place}/teacher"] == 2 * shape.heads * shape.entry_dim * count * visible
        scores = 2 * 2 * shape.index_heads * (shape.index_dim + 1) * count * visible
        assert sampled[f"{place}/index scores"] == forward[f"{place}/index scores"] + scores
    monkeypatch.setattr(model.model.indexer_training, "beyond", "selected")  # which measures recall on these rows
    assert model.training_flops(40)["encoder/teacher"] == sampled["encoder/teacher"]


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
