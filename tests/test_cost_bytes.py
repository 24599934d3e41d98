"""Bytes of the cost model compared with the models: bytes of real memories, parameters that a step reads, and entries
that its rows see."""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from small import GEOMETRY, build, cases, random_tokens
from test_cost import model_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gsm.layers.search as search
from gsm.config.load import build_model
from gsm.costs.model import cost, paper_cache, paper_decode
from gsm.layers.costs import ProductCost
from gsm.models.base import LanguageModel
from gsm.models.baseline import Baseline
from gsm.models.gsm import GSM
from gsm.observe import record
from gsm.slots.state_reader.base import StateAttention
from gsm_kernels.index_top_k.reference import slots_visible

BLOCKS = ("encoder", "decoder")
CARRIED = ("_pending", "_convolution", "encoder_state", "decoder_state")  # every call reads all of these


class Touched(TorchDispatchMode):
    """Parameters that any operation is given, each storage once."""

    def __init__(self, model: LanguageModel):
        super().__init__()
        self.bytes_of: dict[int, int] = defaultdict(int)  # weights of one input lie in one storage
        for p in model.parameters():
            self.bytes_of[p.untyped_storage().data_ptr()] += p.numel() * p.element_size()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self.seen |= {x.untyped_storage().data_ptr() for x in given} & self.bytes_of.keys()
        return func(*args, **(kwargs or {}))

    @property
    def bytes(self) -> int:
        """Bytes of all parameters that operations have read so far."""
        return sum(self.bytes_of[storage] for storage in self.seen)


@pytest.mark.parametrize("case", cases())
@torch.no_grad()
def test_a_step_reads_every_weight_once_and_the_entries_that_it_sees(case: str, monkeypatch: pytest.MonkeyPatch):
    model, before, width = model_of(case), 36, GEOMETRY.entry_dim
    ids = random_tokens(1, before + 1)
    memory = model(ids[:, :before], memory=model.start(1)).memory
    assert memory is not None
    searched, top_k = [], search.index_top_k

    def watched(query, weight, key_BFI, first_BR, last_BR, k, pool=None):
        searched.append(int(slots_visible(key_BFI.shape[1], first_BR, last_BR, pool, 8).sum()))
        return top_k(query, weight, key_BFI, first_BR, last_BR, k, pool)

    monkeypatch.setattr(search, "index_top_k", watched)
    with Touched(model) as touched, record("position", "*/weights", "*/weights/*") as seen:
        assert model(ids[:, before:], memory=memory).logits is not None
    parts = cost(model).decode_bytes(before, torch.float64)
    feed_forwards = [layer.work.per_row["feed-forward"] for layer in cost(model).layers if layer.place in BLOCKS]
    idle = sum(each.routed - min(each.routed, each.each) for each in feed_forwards)  # experts of no row
    assert sum(size for part, size in parts.items() if part.endswith("/weights")) == touched.bytes - 8 * idle
    if not isinstance(model, GSM | Baseline):
        width *= 2 * max(1, model.shape.heads // 4)  # keys and values, a head of them for four queries
    sinks = isinstance(model, GSM | Baseline)
    entries = sum(
        (int((weights_BRHE[0, 0, 0] > 0).sum()) - sinks) * parts_per_entry(model, name)
        for name, weights_BRHE in seen.items()
        if name != "position"
    )
    numbers = entries * width + sum(searched) * GEOMETRY.index_dim
    carried = sum(size for kind, size in memory.breakdown().items() if kind.endswith(CARRIED))
    assert sum(size for part, size in parts.items() if part.endswith("/cache read")) == 8 * numbers + carried


def parts_per_entry(model: LanguageModel, tap: str) -> int:
    """Parts of a state that are read for each entry which the weights of a tap show."""
    parts = {part.name: part.parts_per_entry for part in model.modules() if isinstance(part, StateAttention)}
    return parts.get("/".join(tap.split("/")[:2]), 1)


@pytest.mark.parametrize("case", cases())
@torch.no_grad()
def test_what_a_step_writes_is_what_a_memory_gains_or_replaces(case: str):
    """From nothing: all that is there after the first tokens has been written by them."""
    model = model_of(case)
    memory = model(random_tokens(1, 5), memory=model.start(1)).memory
    assert memory is not None
    parts = cost(model).forward_bytes(5, dtype=torch.float64)
    written = sum(size for part, size in parts.items() if part.endswith("/cache written"))
    assert written == memory.cache_bytes()


def test_activations_are_those_of_the_stated_rule():
    """One layer by hand: DeltaNet on a plain residual."""
    model, tokens, rows = cost(build("delta_net")), 7, 2
    shape, inner = GEOMETRY, GEOMETRY.heads * GEOMETRY.entry_dim
    every = (shape.dim + shape.query_rank) + (shape.query_rank + inner)  # query
    every += 2 * (shape.dim + inner) + (shape.dim + shape.heads)  # key, value, beta
    every += 2 * 3 * inner + 4 * inner  # convolution; query, key, value and output of the recurrence
    each = (inner + shape.dim) + 3 * (shape.dim + shape.feed_forward_dim) + 2 * 3 * shape.dim  # sites of one stream
    numbers = (shape.depth - 1) * tokens * (every + each) + tokens * every + rows * each
    numbers += 2 * tokens * shape.dim + rows * (shape.dim + shape.vocabulary)
    moved = model.forward_bytes(tokens, rows)
    assert sum(size for part, size in moved.items() if part.endswith("/activations")) == 2 * numbers


def test_hyper_connections_move_ten_times_the_width_and_fourteen_times_in_two_passes():
    once, twice = (
        build(f"gsm-residual={name}").get_submodule("decoder.blocks.0.feed_forward_residual")
        for name in ("mhc", "mhc_two_pass")
    )
    assert once.products().moved == 10 * GEOMETRY.dim
    assert twice.enter_products() + twice.products() == replace(once.products(), moved=14 * GEOMETRY.dim)


@pytest.mark.parametrize("case", ["gsm-writer=additive", "baseline-residual=mhc", "hybrid", "yoco"])
def test_a_prompt_in_chunks_computes_what_it_does_at_once(case: str):
    """All products and all entries that rows read equal those of one pass."""
    model = cost(build(case))
    at_once = model.forward_flops(4096, 1)
    for chunk in (64, 256, 1000):
        assert model.prefill_flops(4096, chunk) == at_once, chunk


def test_sequences_of_a_batch_share_the_weights_alone():
    model = cost(build("hybrid"))
    one, four = model.decode_bytes(20), model.decode_bytes(20, batch=4)
    assert four == {part: (1 if part.endswith("weights") else 4) * size for part, size in one.items()}


def test_training_moves_three_forward_passes_and_the_optimiser():
    model = build("gsm")
    exact = cost(model)
    forward, step = exact.forward_bytes(30, batch=2), exact.training_bytes(30, batch=2)
    assert step["decoder/activations"] == 3 * forward["decoder/activations"]
    assert step["optimizer"] == 28 * model.parameter_report().total
    again = cost(build("gsm", recompute=True)).training_bytes(30, batch=2)
    assert again["decoder/activations"] == 4 * forward["decoder/activations"]
    assert again["stages/activations"] == step["stages/activations"]


def test_few_rows_read_the_weights_of_few_experts():
    experts = ProductCost(multiply_adds=3 * 10, weights=100 + 8 * 10, routed=8 * 10, each=3 * 10)
    assert [experts.read(rows) for rows in (0, 1, 2, 3, 1000)] == [100, 130, 160, 180, 180]


@pytest.mark.parametrize("case", cases())
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


@functools.cache
def large(name: str, *overrides: str) -> LanguageModel:
    with torch.device("meta"):
        return build_model(name, "1p5b", overrides)


def test_the_decoder_of_the_large_model_costs_the_same_at_any_length():
    model, other = cost(large("gsm")), cost(large("baseline"))
    near, far = ((model.decode_flops(p), model.decode_bytes(p)) for p in (1024, 65536))
    for short, long in zip(near, far, strict=True):
        of_decoder = {part: n for part, n in short.items() if part.startswith("decoder/")}
        assert of_decoder and of_decoder == {part: n for part, n in long.items() if part.startswith("decoder/")}
    assert near[1]["decoder/cache read"] == 14 * 256 * 128 * 2
    grown = other.decode_bytes(65536)["decoder/cache read"] - other.decode_bytes(1024)["decoder/cache read"]
    searched, pool = 65536 - 1024, 4096 - 7 - 1025  # of the newest block of 8 there is one entry
    assert grown == (searched + 3 * pool) * 64 * 2, "one layer that searches, and three that search its pool"


def test_the_state_of_the_large_model_stays_small():
    model, other = cost(large("gsm")), cost(large("baseline"))
    short, long = model.cache_bytes(1024), model.cache_bytes(65536)
    assert short["shared_state"] == long["shared_state"] == 256 * 128 * 2
    grown = other.cache_bytes(65536)
    assert grown["decoder_bank"] == 65536 * 128 * 2 and grown["encoder_bank"] == long["encoder_bank"]
    assert not any(kind.startswith("decoder") for kind in long)


def test_equations_1_and_2_are_the_attention_of_a_decoder():
    for name in ("gsm-writer=additive", "baseline-pool"):
        model = model_of(name)
        assert isinstance(model, GSM | Baseline)
        exact, shape = cost(model), GEOMETRY
        parts = exact.decode_flops(999)
        scores = parts["decoder/index scores"] / (shape.index_dim + 1) * shape.index_dim
        assert parts["decoder/attention"] / 4 + scores / 2 == paper_decode(model, 1000)


@pytest.mark.parametrize("case", ["gsm-writer=additive", "baseline-pool", "baseline"])
@torch.no_grad()
def test_equations_3_and_4_are_the_bytes_that_a_decoder_keeps(case: str):
    """After a prompt and some tokens: windows are full, and the bank has an entry for every token."""
    model = model_of(case).eval()
    assert isinstance(model, GSM | Baseline)
    memory = model.prefill(random_tokens(1, 40), model.start(1)).memory
    for tokens in (41, 42):
        memory = model(random_tokens(1, 1), memory=memory).memory
        assert memory is not None
        parts = memory.breakdown()
        kept = sum(parts.get(kind, 0) for kind in ("shared_state", "decoder_window", "decoder_bank"))
        assert kept == paper_cache(model, tokens, torch.float64)


@pytest.mark.parametrize("tokens", [1 << 16, 1 << 20])
def test_at_long_lengths_the_leading_terms_equal_the_paper_s(tokens: int):
    """For a baseline with a pool these are N d_I operations and N d_KV of entries; GSM has none."""
    model = large("baseline", "model.candidate_pool=true")
    assert isinstance(model, Baseline)
    exact, before, shape = cost(model), tokens // 2, model.geometry
    searching = exact.decode_flops(tokens)["decoder/index scores"] - exact.decode_flops(before)["decoder/index scores"]
    estimated = paper_decode(model, tokens) - paper_decode(model, before)
    assert searching / 2 / estimated == pytest.approx(1 + 1 / shape.index_dim, rel=0.001), "J more for the sum of heads"
    grown = exact.cache_bytes(tokens)["decoder_bank"] - exact.cache_bytes(before)["decoder_bank"]
    assert grown == paper_cache(model, tokens) - paper_cache(model, before)
    state = large("gsm")
    assert isinstance(state, GSM)
    assert paper_decode(state, tokens) == paper_decode(state, 1) and paper_cache(state, tokens) == paper_cache(state, 1)


def test_a_pruned_prefill_has_the_rows_of_the_paper():
    """Equation 14: R_l = min(N, m + (L_E - l)(W - 1)), m = min(N, M), seen in the feed-forward of the encoder."""
    exact, shape = cost(large("gsm")), large("gsm").geometry
    for tokens, rows in ((4096, [637, 510, 383, 256]), (300, [300, 300, 300, 256])):
        flops = exact.forward_flops(tokens, rows=1)["encoder/feed-forward"]
        assert flops == (10 * tokens + sum(rows)) * 6 * shape.dim * shape.feed_forward_dim
