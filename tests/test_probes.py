"""Probes find what is there, and nothing where nothing is; and what else is looked at in a state."""

from __future__ import annotations

import pytest
import torch
from small import GEOMETRY, SHALLOW, assert_same, build, random_tokens, variant

import gsm
from gsm.analysis import attention, probes
from gsm.analysis.needles import ask
from gsm.analysis.state import effective_rank, latents, state_facts
from gsm.data.recall import Alphabet, MultiQueryRecall, Needle

CLASSES = 5


def samples(count: int, features: int, hidden: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Features, and labels that are hidden in them, or are not."""
    feature_NF, label_N = torch.randn(count, features), torch.randint(CLASSES, (count,))
    direction_YF = torch.randn(CLASSES, features)
    return feature_NF + (4 * direction_YF[label_N] if hidden else 0), label_N


@pytest.mark.parametrize("features", [10, 600])
def test_a_probe_reads_labels_only_from_features_that_have_them(features: int):
    with_labels = probes.probe(*samples(400, features, hidden=True))
    assert with_labels.accuracy > 0.95
    assert (with_labels.fitted, with_labels.tested, with_labels.features) == (300, 100, features)
    without = probes.probe(*samples(400, features, hidden=False))
    for lucky in (without.accuracy, with_labels.shuffled, without.shuffled, with_labels.chance):
        assert lucky < 0.4, "chance is 0.2: with more features than samples, the fitted samples are no evidence"


def test_a_probe_without_information_answers_with_the_commonest_label():
    feature_NF, _ = samples(400, 10, hidden=False)
    result = probes.probe(feature_NF, (torch.arange(400) % 10 - 6).clamp(min=0))
    assert result.chance == pytest.approx(0.7) and result.accuracy > 0.65 and result.shuffled > 0.65


def test_all_rows_of_a_sequence_are_fitted_or_all_are_tested():
    result = probes.by_distance(build("gsm"), random_tokens(10, 8), [5, 6, 7], [0])["z"][0]
    assert (result.fitted, result.tested) == (8 * 3, 2 * 3)


def test_a_map_is_the_same_whether_solved_for_features_or_for_samples():
    feature_NF, target_NY = torch.randn(12, 12, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
    map_FY = probes.ridge_map(feature_NF, target_NY, 0.3)
    padded_FY = probes.ridge_map(torch.nn.functional.pad(feature_NF, (0, 1)), target_NY, 0.3)[:-1]
    assert_same(map_FY, padded_FY, "the map of 12 features, and of 13 features with an empty one")
    error_NY = feature_NF @ map_FY - (target_NY - target_NY.mean(0))
    assert_same(feature_NF.T @ error_NY + 0.3 * map_FY, torch.zeros_like(map_FY), "the gradient at the minimum")


@pytest.mark.parametrize("case", ["gsm-writer=additive", "gsm-writer=multi_slot", "gsm-writer=delta", "delta_net"])
def test_states_do_not_depend_on_how_the_text_was_cut(case: str):
    model, token_BT = build(case), random_tokens(3, 40)
    whole, cut = probes.states(model, token_BT, [39]), probes.states(model, token_BT, [4, 9, 39], chunk=7)
    for name, value_BRF in whole.items():
        assert_same(value_BRF[:, 0], cut[name][:, -1], name, tolerance=1e-8)
    if case != "delta_net":
        assert torch.equal(whole["state"][..., -whole["entry"].shape[-1] :], whole["entry"]), "the newest comes last"
        empty = (model.writer.positions - 5) * model.writer.slots * GEOMETRY.entry_dim
        at_4 = cut["state"][:, 0] != 0
        assert not at_4[:, : max(0, empty)].any() and at_4[:, max(0, empty) :].all(), (
            "five positions, or all that the state has"
        )
    else:
        assert set(whole) == {"state"}


def test_a_state_holds_its_own_token_and_no_token_beyond_its_reach():
    windows = {"geometry": SHALLOW, "retriever": variant("retriever", "window_only")}
    model = build("gsm-encoder_reading=window_only", **windows)
    token_BT = torch.randint(4, (80, 40), generator=torch.Generator().manual_seed(1))
    results = probes.by_distance(model, token_BT, range(34, 40), [0, 1, 30])
    assert results["z"][0].accuracy > 0.95 and results["entry"][0].accuracy > 0.8
    assert results["state"][1].accuracy > 0.8
    for by_distance in results.values():
        assert by_distance[30].accuracy < 0.45, "3 windows of 4 and a state of 7 end before 30; chance is 0.25"


ALPHABET = {"keys": 8, "values": 4, "fillers": 6, "pairs": 2, "gap": 4}


@pytest.mark.parametrize("task", [Needle(**ALPHABET), MultiQueryRecall(**ALPHABET)], ids=["needle", "recall"])
def test_a_needles_value_is_read_where_its_key_is_asked_and_not_before(task: Alphabet, monkeypatch: pytest.MonkeyPatch):
    """The toy model keeps, at each position, the token that once followed the token there. Questions of recall are at
    other places in each sequence."""

    def recalled(model, token_BT, rows):
        behind = [[(line + [0])[line.index(line[row]) + 1] for row in rows] for line in token_BT.tolist()]
        return {"state": torch.nn.functional.one_hot(torch.tensor(behind), 18).double()}

    monkeypatch.setattr(probes, "states", recalled)
    questions = ask(task, 24, 80)
    result = probes.of_needles(torch.nn.Identity(), questions)["state"]
    assert result.accuracy == 1 and (result.fitted, result.tested) == (120, 40)
    assert probes.of_needles(torch.nn.Identity(), questions, before=2)["state"].accuracy < 0.5, "chance is 0.25"


def test_what_falls_at_all_distances_and_on_the_sink_is_one():
    model = build("gsm-writer=multi_slot")
    with torch.no_grad(), gsm.record("position", "*/weights", "*/top_k") as seen:
        model(random_tokens(2, 30))
    for name in attention.names_of(model):
        far_D = attention.by_distance(model, seen, name, torch.tensor([0, 1, 2, 4, 8, 16]))
        sink_H = attention.sinks(model, seen)[name]
        assert_same(far_D.sum() + sink_H.mean(), torch.ones((), dtype=torch.float64), name)
        window = model.writer.positions if name.startswith("decoder") else GEOMETRY.window
        reads_bank = f"{name}/top_k" in seen
        assert (far_D[-1] > 0) == reads_bank, f"{name} sees {window} entries, and a bank: {reads_bank}"


def test_effective_rank_counts_directions():
    assert effective_rank(torch.eye(5)[:3]) == pytest.approx(3)
    assert effective_rank(torch.ones(7, 4)) == pytest.approx(1, abs=1e-3)
    assert 1 < effective_rank(torch.diag(torch.tensor([1.0, 0.1]))) < 2
    assert effective_rank(torch.zeros(3, 2)) == 0


@torch.no_grad()
def test_latents_are_the_entries_before_their_rotation_and_facts_leave_padding_out():
    model, token_BT = build("gsm-writer=multi_slot"), random_tokens(2, 20)
    documents = torch.tensor([[0] * 20, [-1] * 17 + [0] * 3])
    with gsm.record() as seen:
        model(token_BT, documents=documents)
    x_BTD = model.writer.norm(seen["state/z"])
    entries = (model.writer.entry["entries"], *model.writer.further["entries"])
    want = torch.stack([entry.latent(x_BTD) for entry in entries], 2).flatten(1, 2)
    real_BE = (documents >= 0).repeat_interleave(model.writer.slots, dim=1)
    assert_same(latents(model, seen)[real_BE], want[real_BE], "latents")
    facts, last = state_facts(model, seen), model.writer.positions * model.writer.slots
    assert facts["state/norm"] == pytest.approx(float(seen["state/z"][documents >= 0].norm(dim=-1).mean()))
    ranks = [effective_rank(want[0, -last:]), effective_rank(want[1, -3 * model.writer.slots :])]
    assert facts["state/effective_rank"] == pytest.approx(sum(ranks) / 2)
