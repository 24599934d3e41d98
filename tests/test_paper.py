"""The models are the paper's: with the same weights they give the logits of the transcription.

The transcription has tests of its own in `test_transcription.py`.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from small import mostly_nightly
from toys import TINY, packed, some_tokens, transcribed
from transcription import Geometry, Weights, random_weights, tiny_baseline, tiny_gsm

from gsm.layers.residual import HyperConnection, Plain, TwoPassHyperConnection
from gsm.models import geometry as production_geometry
from gsm.models.baseline import Baseline
from gsm.models.gsm import GSM
from gsm.slots.decoder_start import EncoderStreams, State
from gsm.slots.stage_input import AfterLayer, BeforeLayer
from gsm.slots.state_reader.per_group import PerGroup
from gsm.slots.state_reader.separate_kv import SeparateKV
from gsm.slots.state_reader.shared import Shared
from gsm.slots.state_reader.state_and_window import StateAndWindow
from gsm.slots.writer.additive import Additive
from gsm.slots.writer.delta import Delta
from gsm.slots.writer.multi_slot import MultiSlot

# W = 4, M = 7, K * m = 6, m = 2: one less, as many, one more, and well beyond all of them.
LENGTHS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 24]
PACKINGS = {"two": [9, 8], "many": [1, 5, 2, 3, 8], "padded": [-3, 4, 9]}  # document lengths; negative is padding

every_model = pytest.mark.parametrize("model", ["gsm", "baseline"])
nightly = pytest.mark.nightly  # with hyper-connections the transcription is


def production(geometry: Geometry, weights: Weights) -> torch.nn.Module:
    """The model under test in float64 with exactly these weights; how a model is constructed is known here alone."""
    shape = {
        "context": 32,
        "feed_forward_dim": geometry.ffn_dim,
        "encoder_ratio": geometry.ratio_encoder,
        "decoder_ratio": geometry.ratio_decoder,
        "stages": list(geometry.stage_layers),
        "decoder_full": geometry.encoder_layers + 1,
        "candidate_blocks": geometry.pool_blocks or 1,
        "rope_base": geometry.plain_base,
        "bank_rope_base": geometry.bank_base,
    }
    same = {field.name for field in dataclasses.fields(production_geometry.Geometry)} & set(vars(geometry)) - set(shape)
    numbers = production_geometry.Geometry(**shape, **{name: getattr(geometry, name) for name in same})
    residual = {"plain": Plain, "mhc": HyperConnection, "mhc_two_pass": TwoPassHyperConnection}[geometry.residual]
    if residual is not Plain:
        numbered = {"streams": geometry.streams, "sinkhorn_rounds": geometry.sinkhorn_rounds}
        residual = functools.partial(residual, **numbered)
    if geometry.model == "gsm":
        writer = {
            "additive": Additive,
            "multi_slot": functools.partial(MultiSlot, slots=geometry.slots),
            "delta": functools.partial(Delta, bias=0.0),
        }[geometry.writer]
        reader = {
            "shared": Shared,
            "separate_kv": SeparateKV,
            "per_group": functools.partial(PerGroup, groups=geometry.groups),
            "state_and_window": functools.partial(StateAndWindow, window=geometry.reader_window),
        }[geometry.reader]()
        options = {
            "writer": writer,
            "state_reader": reader,
            "residual": residual,
            "stage_input": {"before_layer": BeforeLayer, "after_layer": AfterLayer}[geometry.stage_input](),
            "decoder_start": {"state": State, "streams": EncoderStreams}[geometry.decoder_start](),
        }
        model = GSM(numbers, state_size=geometry.state_size, **options)
    else:
        model = Baseline(numbers, candidate_pool=geometry.pool_blocks is not None, residual=residual)
    model.double().eval().load_state_dict({**weights, "head.weight": weights["embedding.weight"]}, strict=True)
    return model


def assert_same_logits(geometry: Geometry, tokens: list[int], documents: list[int]) -> None:
    weights = random_weights(geometry)
    expected = transcribed(geometry, weights, tokens, documents)
    with torch.no_grad():
        output = production(geometry, weights)(torch.tensor([tokens]), documents=torch.tensor([documents]))
    inside = torch.tensor(documents) >= 0
    difference = (output.logits[0] - expected)[inside].abs().amax(-1)
    assert difference.max() < 1e-9, f"{geometry.model}: rows differ by {difference.tolist()}; locate it with notes="


@every_model
@pytest.mark.parametrize(
    ("residual", "length"),
    [*(("plain", length) for length in LENGTHS), ("mhc", 1), ("mhc", 6), pytest.param("mhc", 13, marks=nightly)],
)
def test_a_model_computes_the_equations_at_every_length(model, residual, length):
    assert_same_logits(TINY[model](residual=residual), some_tokens(length), [0] * length)


@every_model
@pytest.mark.parametrize(
    ("residual", "packing"),
    [
        *(("plain", packing) for packing in PACKINGS),
        ("mhc", "many"),
        *(pytest.param("mhc", packing, marks=nightly) for packing in ("two", "padded")),
    ],
)
def test_a_model_computes_the_equations_for_packed_documents(model, residual, packing):
    documents = packed(PACKINGS[packing])
    assert_same_logits(TINY[model](residual=residual), some_tokens(len(documents)), documents)


@every_model
@pytest.mark.parametrize(
    "changes",
    [
        {"ratio_encoder": 3},
        {"ratio_encoder": 1},
        {"state_size": 3, "window": 6},
        {"top_k": 1},
        pytest.param({"sinkhorn_rounds": 20}, marks=nightly),
        {"bank_layers": (1, 4), "stage_layers": (1, 3, 4)},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_a_model_computes_the_equations_of_other_geometries(model, changes):
    if model == "baseline":
        changes = changes | {"stage_layers": ()}
    residual = "mhc" if "sinkhorn_rounds" in changes else "plain"  # which is slow, token by token
    assert_same_logits(TINY[model](residual=residual, **changes), some_tokens(17), [0] * 17)


@pytest.mark.parametrize("pool_blocks", [1, 2])
def test_the_baseline_chooses_from_its_candidate_pool(pool_blocks):
    documents = packed([3, 26])
    assert_same_logits(tiny_baseline(residual="plain", pool_blocks=pool_blocks), some_tokens(29), documents)


def test_gsm_without_stages_computes_the_equations():
    assert_same_logits(tiny_gsm(stage_layers=()), some_tokens(13), [0] * 13)


@pytest.mark.parametrize("lengths", mostly_nightly([[1], [24], *PACKINGS.values()], [24], PACKINGS["padded"]), ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {"writer": "multi_slot", "slots": 2, "state_size": 6},
        {"writer": "multi_slot", "slots": 3, "state_size": 3},
        {"writer": "delta"},
        {"writer": "delta", "state_size": 2},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_other_writers_compute_their_equations(changes, lengths):
    documents = packed(lengths)
    assert_same_logits(tiny_gsm(residual="plain", **changes), some_tokens(len(documents)), documents)


@pytest.mark.parametrize("lengths", mostly_nightly([[1], [24], *PACKINGS.values()], [24], PACKINGS["padded"]), ids=str)
@pytest.mark.parametrize("writer", ["additive", "multi_slot", "delta"])
@pytest.mark.parametrize(
    "changes",
    [
        {"reader": "separate_kv"},
        {"reader": "per_group"},
        {"reader": "per_group", "groups": 4},
        {"reader": "state_and_window"},
        {"reader": "state_and_window", "reader_window": 1},
        {"reader": "state_and_window", "reader_window": 30},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_other_readers_compute_their_equations_whatever_the_writer(changes, writer, lengths):
    documents = packed(lengths)
    writer = {"writer": writer} | ({"slots": 2, "state_size": 6} if writer == "multi_slot" else {})
    assert_same_logits(tiny_gsm(residual="plain", **changes, **writer), some_tokens(len(documents)), documents)


@pytest.mark.parametrize("residual", ["plain", "mhc", "mhc_two_pass"])
@pytest.mark.parametrize("lengths", mostly_nightly([[1], [7], [4, 1, 3]], [7]), ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {"stage_input": "after_layer"},
        {"decoder_start": "streams"},
        {"stage_input": "after_layer", "decoder_start": "streams"},
    ],
    ids=lambda changes: "-".join(changes.values()),
)
def test_every_choice_for_an_open_point_computes_its_equations(changes, lengths, residual):
    """There is a layer of every kind, and two stages; the second is on the last layer, and the output of that is e."""
    documents = packed(lengths)
    geometry = tiny_gsm(residual=residual, decoder_layers=2, **changes)
    assert_same_logits(geometry, some_tokens(len(documents)), documents)


@every_model
@pytest.mark.parametrize("lengths", mostly_nightly([[1], [6], [4, 1, 3]], [6]), ids=str)
def test_hyper_connections_of_two_passes_compute_their_equations(model, lengths):
    documents = packed(lengths)
    assert_same_logits(TINY[model](residual="mhc_two_pass"), some_tokens(len(documents)), documents)


@pytest.mark.parametrize(
    "change", [{"stage_input": "after_layer"}, {"decoder_start": "streams"}, {"residual": "mhc_two_pass"}], ids=str
)
def test_choices_for_an_open_point_compute_different_outputs(change):
    """All parameters are the same, by name and shape, so that only the equations can differ."""
    tokens, logits = torch.tensor([some_tokens(6)]), []
    weights = random_weights(tiny_gsm())
    for geometry in (tiny_gsm(), tiny_gsm(**change)):
        with torch.no_grad():
            logits.append(production(geometry, weights)(tokens).logits)
    assert (logits[0] - logits[1]).abs().amax(-1).min() > 1e-3, "at every position, the first included"
