"""Properties of the equations, tested on their transcription: mixing, selection, the clamp.

Causality and packing are tested with models that are equal to it (test_paper, test_perturbation).
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transcription
from toys import TINY, some_tokens, transcribed
from transcription import Geometry, Notes, Weights, attend, random_weights, tiny_baseline, tiny_gsm, transcribe

pytestmark = pytest.mark.slow  # few changes touch the transcription
every_model = pytest.mark.parametrize("model", ["gsm", "baseline"])


def test_mixing_is_uniform_if_the_weights_are_zero():
    geometry, notes = tiny_gsm(), {}
    weights = random_weights(geometry)
    silent = {name: 0 * tensor if "_residual." in name else tensor for name, tensor in weights.items()}
    transcribed(geometry, silent, some_tokens(2), notes=notes)
    third = torch.full((3, 3), 1 / 3, dtype=torch.float64)
    torch.testing.assert_close(notes["decoder/6/attention_mixing"][1], third, atol=1e-6, rtol=0)


@every_model
def test_the_streams_can_be_renamed(model):
    """Phi's columns move by stream, its rows and the bias by coefficient: one that is cut differently would show."""
    geometry = TINY[model]()
    weights, n = random_weights(geometry), geometry.streams
    order = torch.tensor([2, 0, 1])
    mixing_rows = (2 * n + torch.arange(n * n)).reshape(n, n)[order][:, order].reshape(-1)
    rows = torch.cat([order, n + order, mixing_rows])
    renamed = dict(weights)
    for name, tensor in weights.items():
        if name.endswith("_residual.phi"):
            renamed[name] = tensor[rows].reshape(len(rows), n, -1)[:, order].reshape(tensor.shape)
        if name.endswith("_residual.bias"):
            renamed[name] = tensor[rows]
    tokens = some_tokens(8)
    torch.testing.assert_close(transcribed(geometry, renamed, tokens), transcribed(geometry, weights, tokens))


@every_model
def test_the_index_does_not_matter_when_every_entry_fits(model):
    geometry, tokens = TINY[model](top_k=20), some_tokens(15)
    weights = random_weights(geometry)
    other = {name: -2 * tensor if ".indexer." in name else tensor for name, tensor in weights.items()}
    assert torch.equal(transcribed(geometry, weights, tokens), transcribed(geometry, other, tokens))


@every_model
def test_every_weight_takes_part(model):
    """A zero gradient would let a mistake in that weight pass. An index acts through its selection alone."""
    geometry, tokens = TINY[model](), some_tokens(12)
    weights = {name: tensor.requires_grad_() for name, tensor in random_weights(geometry).items()}
    transcribe(geometry, weights, tokens).square().sum().backward()
    silent = {name for name, tensor in weights.items() if tensor.grad is None or not tensor.grad.abs().max() > 1e-6}
    assert silent == {name for name in weights if ".indexer." in name}


@every_model
def test_every_weight_of_an_index_moves_its_scores(model):
    geometry, tokens = TINY[model](residual="plain"), some_tokens(5)
    weights, before = random_weights(geometry), {}
    transcribed(geometry, weights, tokens, notes=before)
    labels = {geometry.prefix(depth): geometry.label(depth) for depth in range(1, geometry.depth + 1)}
    for name in weights:
        if ".indexer." in name:
            after: Notes = {}
            transcribed(geometry, weights | {name: weights[name].roll(1, 0)}, tokens, notes=after)
            label = f"{labels[name.split('.attention.')[0]]}/scores"
            assert before[label] != after[label], f"{name} moves no score"


def chosen(geometry: Geometry, weights: Weights) -> dict[str, list]:
    notes: Notes = {}
    transcribed(geometry, weights, some_tokens(22), notes=notes)
    return {name: values for name, values in notes.items() if name.endswith("/top_k")}


@every_model
def test_a_choice_holds_the_visible_entries_in_order_and_k_at_most(model):
    geometry = TINY[model]()
    choices = chosen(geometry, random_weights(geometry))
    assert choices["encoder/2/top_k"] != choices["encoder/3/top_k"] == choices["encoder/4/top_k"]
    for name, slots_T in choices.items():
        ratio = geometry.ratio(int(name.split("/")[1]))
        for t, slots in enumerate(slots_T):
            finished = (t + 1) // ratio if name != "encoder/1/top_k" else 0
            assert len(slots) == min(geometry.top_k, finished)
            assert slots == sorted(set(slots)) and all(slot < finished for slot in slots), f"{name} at {t}: {slots}"


def test_a_reindex_layer_makes_its_own_selection_and_the_next_layer_reuses_it():
    geometry = tiny_baseline()
    choices = chosen(geometry, random_weights(geometry))
    assert choices["decoder/5/top_k"] == choices["decoder/6/top_k"] != choices["decoder/7/top_k"]
    assert choices["decoder/7/top_k"] == choices["decoder/8/top_k"]


def test_ties_go_to_the_lowest_entries():
    geometry = tiny_baseline()
    weights = random_weights(geometry)
    silenced = {
        name: 0 * tensor if name.endswith("indexer.weight.weight") else tensor for name, tensor in weights.items()
    }
    for name, slots_T in chosen(geometry, silenced).items():
        assert all(slots == list(range(len(slots))) for slots in slots_T), name


def test_the_candidate_pool_keeps_the_newest_block():
    geometry, notes = dataclasses.replace(tiny_baseline(residual="plain"), pool_blocks=1), {}
    transcribed(geometry, random_weights(geometry), some_tokens(26), notes=notes)
    assert notes["decoder/5/pool"] == [[t // 8] for t in range(26)]
    assert all(slot // 8 == t // 8 for t, slots in enumerate(notes["decoder/7/top_k"]) for slot in slots)


def test_a_row_that_sees_nothing_returns_zero_and_no_sink_is_a_plain_softmax():
    query_C, *entries = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(attend(query_C, [], torch.tensor(1.5))[0], torch.zeros(8, dtype=torch.float64))
    no_sink, _ = attend(query_C, entries, torch.tensor(-torch.inf))
    entry_EC = torch.stack(entries)
    torch.testing.assert_close(no_sink, torch.softmax(entry_EC @ query_C / 8**0.5, 0) @ entry_EC)
    strong_sink, shares = attend(query_C, entries, torch.tensor(50.0))
    assert strong_sink.abs().max() < 1e-15 and sum(shares) < 1e-15


@every_model
def test_the_clamp_of_the_feed_forward_binds(model):
    geometry = TINY[model](residual="plain")
    weights, tokens = random_weights(geometry), some_tokens(3)
    unclamped = dataclasses.replace(geometry, clamp=1e9)
    assert not torch.allclose(transcribed(geometry, weights, tokens), transcribed(unclamped, weights, tokens))
    one_F, high_F = torch.tensor([1.0]).double(), torch.tensor([[12.0], [-12.0]]).double()
    values = {"gate.weight": high_F, "up.weight": high_F, "down.weight": torch.eye(2).double()}
    gate = torch.nn.functional.silu(torch.tensor([10.0, -12.0]).double())  # from above only
    up = torch.tensor([10.0, -10.0]).double()  # on both sides
    torch.testing.assert_close(transcription.feed_forward(values, one_F, 10.0), gate * up)


def test_equal_gates_give_the_mean_of_a_group():
    geometry = tiny_gsm()
    weights, notes = random_weights(geometry), {}
    weights["encoder.blocks.1.attention.compressor.gate.weight"].zero_()
    transcribed(geometry, weights, some_tokens(2), notes=notes)
    block = transcription.part(weights, "encoder.blocks.1")
    normed = [transcription.rms_norm(x_D, block["attention_norm.weight"], 1e-6) for x_D in notes["encoder/2/mixed"]]
    mean_C = block["attention.compressor.value.weight"] @ (normed[0] + normed[1]) / 2
    expected = transcription.rms_norm(mean_C, block["attention.compressor.norm.weight"], 1e-6)
    torch.testing.assert_close(
        notes["encoder/2/bank"][0], expected
    )  # the first group stands at position 0: not rotated


def test_the_state_is_the_encoding_plus_every_increment():
    geometry, notes = tiny_gsm(), {}
    weights, tokens = random_weights(geometry), some_tokens(9)
    transcribed(geometry, weights, tokens, notes=notes)
    alone: Notes = {}
    transcribed(tiny_gsm(stage_layers=()), weights, tokens, notes=alone)
    for t in range(9):
        increments = notes["stage/1/increment"][t] + notes["stage/2/increment"][t]
        torch.testing.assert_close(notes["state/written"][t], alone["state/written"][t] + increments)
        assert notes["stage/2/input"][t].shape == (2 * geometry.dim,)
        assert notes["decoder/5/weights"][t].shape == (geometry.heads, min(t + 1, geometry.state_size))
        assert torch.equal(notes["decoder/5/mixed"][t], notes["state/written"][t])
