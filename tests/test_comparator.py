"""Comparators: stacks of any mixers, their row schedule, their parameters, and their memories."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from small import GEOMETRY, SHALLOW, W, assert_same, build, comparators, random_tokens, variant

import gsm
from gsm.cache.memory import forgetful
from gsm.layers.attention import Attention
from gsm.layers.block import LayerOutput
from gsm.layers.key_value import KeyValue
from gsm.layers.residual import HyperConnection, Plain
from gsm.layers.sliding_window import SlidingWindow
from gsm.models.decoder_only import DecoderOnly
from gsm.models.matching import BARE, difference_note, head_counts, match
from gsm.models.schedule import stack_rows
from gsm.paths import variants
from gsm.span import Span
from gsm_kernels import attend_range, listening, using

MIXERS = {"window": SlidingWindow, "all": Attention}
TOKENS = random_tokens(2, 40)


def plain(layers: list[str], **options) -> DecoderOnly:
    mixers = {name: mixer for name, mixer in MIXERS.items() if name in layers}
    return DecoderOnly(GEOMETRY, mixers=mixers, layers=layers, residual=Plain, **options)


@pytest.mark.parametrize(
    ("new", "rows", "reaches", "want"),
    [
        (20, 1, [3, 3, 3], [7, 4, 1]),
        (20, 20, [3, 3, 3], [20, 20, 20]),
        (6, 1, [3, 3, 3], [6, 4, 1]),
        (20, 1, [None, 3, 3], [7, 4, 1]),  # what the first layer needs are its inputs, which are there
        (20, 1, [3, None, 3], [20, 4, 1]),
        (20, 2, [3, 3, None], [20, 20, 2]),
        (20, 2, [0, 0], [2, 2]),
    ],
)
def test_rows_are_pruned_from_the_top_by_what_each_layer_reaches(new, rows, reaches, want):
    assert stack_rows(new, rows, reaches)[1:] == want


def test_layers_repeat_over_the_depth():
    model = plain(["window", "window", "all"])
    kinds = [type(block.attention) for block in model.decoder]
    assert kinds == [SlidingWindow, SlidingWindow, Attention] * 2 + [SlidingWindow] * 2
    assert model.decoder.reaches == [W - 1, W - 1, None] * 2 + [W - 1] * 2 and model.reach is None
    assert plain(["window"]).reach == GEOMETRY.depth * (W - 1)


def test_every_mixer_has_a_model_so_that_the_tests_cover_it():
    used = {type(block.attention) for name in comparators() for block in build(name).decoder}
    mixers = [variant("mixer", name)(GEOMETRY.shape(), geometry=GEOMETRY, name="") for name in variants("model/mixer")]
    assert {type(mixer) for mixer in mixers} <= used


@torch.no_grad()
def test_a_window_over_everything_is_dense_attention():
    same = replace(GEOMETRY, bank_rope_base=GEOMETRY.rope_base)
    mixers = {"window": partial(SlidingWindow, window=40), "all": Attention}
    models = [
        DecoderOnly(same, mixers={name: mixers[name]}, layers=[name], residual=Plain, query_rank=6).double()
        for name in mixers
    ]
    models[1].load_state_dict(models[0].state_dict())
    assert_same(models[0](TOKENS).logits, models[1](TOKENS).logits, "a window of 40 tokens against dense attention")


@torch.no_grad()
def test_a_layer_is_the_equation_of_attention():
    """Against softmax(q k^T / sqrt(C)) v, head by head, with a rotation written out as complex numbers."""
    mixer = Attention(GEOMETRY.shape(), geometry=GEOMETRY, name="", key_value_heads=2).double()
    x, span = torch.randn(1, 9, GEOMETRY.dim, dtype=torch.float64), Span(torch.arange(9)[None], 9)
    (got,), _ = mixer(x, span, forgetful(mixer.start(1, "decoder")), None)
    rotary, width = GEOMETRY.rotary_dim, GEOMETRY.entry_dim
    frequency = GEOMETRY.bank_rope_base ** (-2 * torch.arange(rotary // 2, dtype=torch.float64) / rotary)
    turn = torch.polar(torch.ones(9, rotary // 2, dtype=torch.float64), torch.arange(9)[:, None] * frequency)

    def rotated(y_TC):
        pairs = torch.view_as_complex(y_TC[:, width - rotary :].reshape(9, -1, 2).contiguous()) * turn
        return torch.cat([y_TC[:, : width - rotary], torch.view_as_real(pairs).flatten(1)], dim=1)

    query = mixer.query.up(mixer.query.norm(mixer.query.down(x[0]))).split(width, dim=1)
    stored = mixer.key_value.projection(x[0]).split(width, dim=1)  # two keys, then two values
    hidden = torch.ones(9, 9).triu(1).bool()
    heads = []
    for head in range(GEOMETRY.heads):
        key, value = stored[head // 2], stored[2 + head // 2]
        logit = rotated(query[head]) @ rotated(key).T / width**0.5
        heads.append(logit.masked_fill(hidden, -torch.inf).softmax(1) @ value)
    assert_same(got, mixer.output(torch.stack(heads, dim=1)), "one layer")


@torch.no_grad()
def test_attention_without_positions_reads_a_set_of_tokens():
    mixer = variant("mixer", "attention_without_positions")(GEOMETRY.shape(), geometry=GEOMETRY, name="").double()
    x, span = torch.randn(1, 9, GEOMETRY.dim, dtype=torch.float64), Span(torch.arange(9)[None], 1)
    cache = forgetful(mixer.start(1, "decoder"))
    shuffled = torch.cat([x[:, :8].flip(1), x[:, 8:]], dim=1)
    assert_same(mixer(shuffled, span, cache, None)[0], mixer(x, span, cache, None)[0], "the last row")
    rotated = variant("mixer", "attention")(GEOMETRY.shape(), geometry=GEOMETRY, name="").double()
    assert not torch.allclose(rotated(shuffled, span, cache, None)[0], rotated(x, span, cache, None)[0])


@pytest.mark.parametrize("case", comparators())
@torch.no_grad()
def test_fast_implementations_and_references_make_the_same_model(case):
    model = build(case)
    with listening() as heard:
        fast = model(TOKENS).logits
    with using("reference"):
        assert_same(fast, model(TOKENS).logits, case)
    assert {("attend_range", "sdpa"), ("delta_rule", "chunked"), ("slot_attention", "chunked")} & set(heard)


@torch.no_grad()
def test_whole_is_never_set_for_a_static_memory_or_packed_documents(monkeypatch):
    """It is set for one document without padding, known on the host."""
    model, values, inputs = build("transformer"), [], attend_range.inputs

    def listened(*args, **kwargs):
        values.append(inputs(*args, **kwargs).whole)
        return inputs(*args, **kwargs)

    monkeypatch.setattr(attend_range, "inputs", listened)
    out = model(TOKENS[:, :30], memory=model.start(2))
    model(TOKENS[:, 30:], memory=out.memory)
    model.prefill(TOKENS, model.start(2, capacity=50), chunk=7)
    assert len(values) > 4 * GEOMETRY.depth and all(values)
    values.clear()
    packed = model(TOKENS[:, :30], documents=torch.zeros_like(TOKENS[:, :30]), memory=model.start(2))
    model(TOKENS[:, 30:], memory=packed.memory)
    static = model.start(2, capacity=50)
    model(TOKENS, memory=static)
    model(TOKENS[:, :1], memory=static)  # a capture of this call serves every length
    assert len(values) == 4 * GEOMETRY.depth and not any(values)


@pytest.mark.parametrize("case", comparators())
@torch.no_grad()
def test_the_state_of_a_comparator_is_its_whole_cache(case):
    model = build(case)
    memory = model.prefill(TOKENS[:1], model.start()).memory
    sizes = memory.breakdown()
    assert model.state_bytes(memory) == memory.cache_bytes() == memory.nbytes() - sizes["bookkeeping"] > 0


@torch.no_grad()
def test_a_cache_grows_by_its_heads_and_a_window_does_not():
    sizes = {}
    for case in ("transformer", "sliding_window", "yoco"):
        model = build(case)
        sizes[case] = [model.start(1, capacity=n).breakdown() for n in (39, 79)]
    entry = 2 * GEOMETRY.entry_dim * 8  # one key and one value head in float64
    assert [size["decoder_cache"] for size in sizes["transformer"]] == [GEOMETRY.depth * n * entry for n in (40, 80)]
    assert [size["decoder_window"] for size in sizes["sliding_window"]] == [GEOMETRY.depth * W * entry] * 2
    assert [size["decoder_cache"] for size in sizes["yoco"]] == [n * entry for n in (40, 80)], "cached once"
    assert sizes["yoco"][0]["encoder_window"] == GEOMETRY.encoder_layers * W * entry


@torch.no_grad()
def test_a_decoded_token_does_not_depend_on_the_room_of_its_memory():
    """The loops read only filled slots: a larger capacity, or a growing memory, changes no bit."""
    pytest.importorskip("numba")
    model = DecoderOnly(replace(GEOMETRY, entry_dim=16), mixers=MIXERS, layers=["window", "all"], residual=Plain)
    logits = []
    for memory in (model.float().start(2), model.start(2, capacity=50), model.start(2, capacity=500)):
        filled = model.prefill(TOKENS[:, :-1], memory).memory
        with listening() as heard:
            logits.append(model(TOKENS[:, -1:], memory=filled).logits)
        assert heard.count(("attend_range", "numba")) == GEOMETRY.depth
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[1], logits[2])


@pytest.mark.parametrize("name", variants("model/mixer"))
@torch.no_grad()
def test_yoco_s_self_decoder_takes_any_mixer(name):
    """Every token of it is cached, whatever the mixer reaches: in chunks the same as at once."""
    model = build("yoco", self_decoder=variant("mixer", name), geometry=SHALLOW)
    kinds = {type(block.attention) for block in model.encoder}
    assert kinds == {type(variant("mixer", name)(GEOMETRY.shape(), geometry=GEOMETRY, name=""))}
    full, memory = model(TOKENS).logits, model.start(2)
    for first, end in ((0, 3), (3, 4), (4, 21), (21, 40)):
        out = model(TOKENS[:, first:end], memory=memory, rows=1)
        memory = out.memory
        assert_same(out.logits, full[:, end - 1 : end], f"{name}, up to {end}")


def test_matching_takes_the_first_heads_whose_rank_fits():
    def make(heads, query_rank):
        return plain(["all"], heads=heads, query_rank=query_rank, feed_forward=BARE["feed_forward"])

    def count(model):
        return sum(p.numel() for p in model.parameters())

    for heads, rank in ((4, 7), (2, 5)):
        result = match(GEOMETRY, [heads], make, lambda h=heads, r=rank: make(h, r))
        assert result == (heads, rank, 0)
    poor = match(GEOMETRY, head_counts(4), make, lambda: make(4, 2))  # rank 2 is below half of the geometry's 6
    assert poor.heads < 4 and poor.rank >= 3
    tiny = match(GEOMETRY, head_counts(4), make, lambda: make(1, 1))
    assert tiny.heads == 1 and tiny.rank == 3 and tiny.difference == count(make(1, 3)) - count(make(1, 1))
    assert "more than the baseline" in difference_note(tiny.difference, make(1, 3))


def test_mixers_without_a_low_rank_query_are_matched_by_their_heads():
    """The difference of two ranks is then zero, and was divided by."""

    def make(heads, query_rank):
        return plain(["all"], heads=heads, query_rank=3, feed_forward=BARE["feed_forward"])

    assert match(GEOMETRY, [4, 2, 1], make, lambda: make(2, 3)) == (2, GEOMETRY.query_rank, 0)


def test_heads_that_the_caller_s_key_heads_do_not_divide_are_passed_over():
    three = partial(Attention, key_value_heads=3)
    model = DecoderOnly(GEOMETRY, mixers={"all": three}, layers=["all"], residual=Plain)
    assert model.shape.heads == 3
    with pytest.raises(ValueError, match="^key_value_heads"):
        DecoderOnly(GEOMETRY, mixers={"all": partial(Attention, key_value_heads=5)}, layers=["all"])


@pytest.mark.parametrize(("heads", "shared"), [(1, 1), (3, 1), (4, 1), (6, 1), (8, 2), (30, 6), (31, 1), (32, 8)])
def test_a_key_head_serves_at_least_four_query_heads_and_divides_them(heads, shared):
    assert KeyValue(replace(GEOMETRY.shape(), heads=heads)).heads == shared


def test_a_rank_given_by_hand_is_compared_too():
    note = plain(["all"], heads=4, query_rank=40).parameter_note
    assert note.startswith("4 heads, query rank 40; ") and note.endswith("more than the baseline")


class Averaged(torch.nn.Module):
    """A mixer that the house does not know: the mean of the last two inputs, times a vector."""

    reach = 1

    def __init__(self, shape, *, geometry, name):
        super().__init__()
        self.strange = torch.nn.Parameter(torch.ones(shape.dim))
        self.query = torch.nn.Linear(shape.dim, shape.query_rank)

    def start(self, batch, kind):
        return None

    def forward(self, x_BTD, span, cache, below):
        before_BTD = torch.nn.functional.pad(x_BTD, (0, 0, 1, 0))[:, :-1]
        return (self.strange * (x_BTD + before_BTD) / 2)[:, -span.rows :], LayerOutput(None)


def test_a_mixer_with_parameters_of_its_own_kind_is_counted_and_runs():
    model = DecoderOnly(GEOMETRY, mixers={"mean": Averaged}, layers=["mean"], query_rank=2, residual=Plain)
    model.scale = torch.nn.Parameter(torch.ones(3))
    parts = model.parameter_report().parts
    assert parts["attention, other"] == GEOMETRY.depth * GEOMETRY.dim and parts["other"] == 3
    assert model(TOKENS).logits.shape == (2, 40, GEOMETRY.vocabulary) and model.reach == GEOMETRY.depth


@torch.no_grad()
def test_an_implementation_that_few_operations_have_can_be_forced():
    model = build("hybrid", residual=partial(HyperConnection, sinkhorn_rounds=3))
    want = model(TOKENS).logits
    for name, op in (("sdpa", "attend_range"), ("chunked", "delta_rule")):
        with using(name), listening() as heard:
            assert_same(model(TOKENS).logits, want, name)
        assert (op, name) in heard and ("mhc_boundary", "reference") in heard
    with using("triton"), pytest.raises(RuntimeError, match="triton"):
        model(TOKENS)


def test_matching_draws_no_random_numbers():
    def weights(**options):
        torch.manual_seed(0)
        return plain(["all"], **options).state_dict()

    matched = weights()
    heads, rank = GEOMETRY.heads, matched["decoder.blocks.0.attention.query.down.weight"].shape[0]
    for name, value in weights(heads=heads, query_rank=rank).items():
        assert torch.equal(value, matched[name]), name


@torch.no_grad()
def test_taps_show_the_weights_of_every_layer():
    for case, name in (
        ("transformer", "decoder/8/weights"),
        ("yoco", "decoder/5/weights"),
        ("yoco", "encoder/4/weights"),
    ):
        with gsm.record("*/weights") as seen:
            build(case)(TOKENS)
        assert len(seen) == GEOMETRY.depth and seen[name].shape == (2, 40, GEOMETRY.heads, 40)
        assert_same(seen[name].sum(-1), torch.ones(2, 40, GEOMETRY.heads, dtype=torch.float64), name, 1e-12)
