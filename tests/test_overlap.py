"""Overlap of what stages and encoder select: 1 where the stages follow, by chance where they choose at random."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small import GEOMETRY, RATIO, K, build, random_tokens
from torch import Tensor

import gsm
from gsm.analysis.attention import selected_distances
from gsm.analysis.overlap import chance, measure, overlaps, selects_for_itself, shared_slots, table
from gsm.data.recall import Needle
from gsm.data.synthetic import SyntheticData
from gsm.evaluation.paper import tables

LENGTH = 40


def sequences(length: int, count: int = 2) -> list[dict[str, Tensor]]:
    """Return sequences of two documents each."""
    ids = (torch.arange(length) >= length // 4).long()
    return [{"tokens": tokens, "documents": ids} for tokens in random_tokens(count, length)]


def test_a_stage_that_shares_the_selection_overlaps_wholly():
    by_stage = overlaps(build("gsm-retriever=shared_topk"), sequences(LENGTH))
    queries = 2 * sum((position + 1) // RATIO > K for part in (10, 30) for position in range(part))
    assert set(by_stage) == {1, 2}
    for overlap_N in by_stage.values():
        assert torch.equal(overlap_N, torch.ones(queries))


def test_the_table_says_that_stages_with_the_encoders_selection_overlap_by_construction():
    """`overlap=true` answered 100.0 for each stage of the default model, as if that were a measurement."""
    shared = measure(build("gsm-retriever=shared_topk"), sequences, LENGTH)
    assert shared["mean"] == 1 and shared["by_construction"] is True
    assert table(shared)[-1].strip().startswith("by construction")
    separate = measure(build("gsm-retriever=separate_indexer"), sequences, LENGTH)
    assert "by_construction" not in separate and "by construction" not in " ".join(table(separate))


def test_stages_on_layers_that_reuse_a_selection_are_compared_with_it():
    geometry = replace(GEOMETRY, bank_layers=[2])  # layers 3 and 4 reuse what layer 2 has selected
    by_stage = overlaps(build("gsm-retriever=shared_topk", geometry=geometry, stages=[3, 4]), sequences(LENGTH))
    assert [float(overlap_N.mean()) for overlap_N in by_stage.values()] == [1.0, 1.0]


def test_a_random_selection_overlaps_by_k_over_the_candidates():
    """The expected overlap of a row with n candidates is K / n; 700 rows leave a standard error of about 0.01."""
    model = build("gsm-retriever=random_topk")
    rows = [{"tokens": t, "documents": torch.zeros(LENGTH, dtype=torch.int64)} for t in random_tokens(20, LENGTH)]
    shares = [K / n for position in range(LENGTH) if (n := (position + 1) // RATIO) > K]
    assert chance(model, rows) == pytest.approx(sum(shares) / len(shares))
    for overlap_N in overlaps(model, rows).values():
        assert len(overlap_N) == 20 * len(shares)
        assert float(overlap_N.mean()) == pytest.approx(chance(model, rows), abs=0.03)


def test_chance_counts_positions_from_the_beginning_of_each_document():
    parts = [K / n for part in (10, 30) for position in range(part) if (n := (position + 1) // RATIO) > K]
    share = chance(build("gsm-retriever=separate_indexer"), sequences(LENGTH))
    assert share == pytest.approx(sum(parts) / len(parts))


def test_the_table_shows_the_agreement_beyond_chance():
    row = {"length": 64, "queries": 9, "chance": 0.6, "stages": [0.7, None]}
    lines = table({"mean": 0.7, "by_length": [row]})
    assert lines[-1].split() == ["chance", "60.0,", "beyond", "it", "0.250", "-"]


def test_the_overlap_does_not_depend_on_how_a_sequence_is_cut(monkeypatch: pytest.MonkeyPatch):
    model = build("gsm-retriever=separate_indexer")
    whole = overlaps(model, sequences(LENGTH))
    monkeypatch.setattr("gsm.analysis.overlap.CHUNK", 27)
    monkeypatch.setattr("gsm.analysis.overlap.AT_ONCE", LENGTH)
    cut = overlaps(model, sequences(LENGTH))
    for stage, overlap_N in whole.items():
        assert 0 < float(overlap_N.mean()) < 1
        assert sorted(cut[stage].tolist()) == sorted(overlap_N.tolist())


def test_shared_slots_are_those_of_both_sets():
    stage_BRJ = torch.tensor([[[0, 3, 5, -1], [7, -1, -1, -1]]])
    encoder_BRK = torch.tensor([[[3, 5, 9], [-1, -1, -1]]])
    assert shared_slots(stage_BRJ, encoder_BRK).tolist() == [[2, 0]]
    assert shared_slots(stage_BRJ, encoder_BRK[..., :0]).tolist() == [[0, 0]]


def test_distances_count_tokens_of_the_rows_document():
    model = build("gsm-retriever=shared_topk")
    documents = torch.tensor([[0] * 5 + [1] * 9])
    with gsm.record("position", "stage/*/top_k") as seen:
        model(random_tokens(1, 14), documents=documents)
    # Slots 0 and 1 are of the first document, 2 begins at position 0 of the second, 3 at position 2, ...
    begins = [0, 2, 0, 2, 4, 6]
    expected = [
        int(position) - begins[slot]
        for position, row in zip(seen["position"][0], seen["stage/1/top_k"][0].tolist(), strict=True)
        for slot in row
        if slot >= 0
    ]
    assert selected_distances(model, seen)[1].tolist() == expected
    assert min(expected) >= RATIO - 1


@pytest.mark.parametrize("case", ["gsm-stages=none", "gsm-encoder_reading=window_only", "baseline-pool"])
def test_a_model_without_two_selections_has_no_overlap(case: str):
    model = build(case)
    assert overlaps(model, sequences(LENGTH)) == {}
    assert measure(model, sequences, LENGTH) is None
    assert not selects_for_itself(model)


def test_the_table_has_a_line_for_each_length_that_the_task_fits_into():
    task = Needle(pairs=2, keys=7, values=7, fillers=9, gap=4)
    data = SyntheticData(task=task, vocabulary=23, context=24, batch_size=2, validation_sequences=3)
    model = build("gsm-retriever=separate_indexer")
    facts = measure(model, lambda length: data.of_length(length, 2), 24)
    assert [row["length"] for row in facts["by_length"]] == [12, 24, 48], "6 are too few for two needles and questions"
    whole = facts["by_length"][1]
    assert facts["mean"] == pytest.approx(sum(whole["stages"]) / 2)
    assert facts["chance"] == whole["chance"] and 0 < whole["chance"] < 1
    assert whole["queries"] == 2 * sum((position + 1) // RATIO > K for position in range(24))
    assert [len(line.split()) for line in table(facts)[1:]] == [4, 6] * 3
    assert facts["by_length"][0]["queries"] > 0 and model.training is False
    row = {"length": 65536, "stages": [0.2, 0.25], "queries": 9}
    papers = table({"mean": 0.4, "by_length": [row]}, tables()["overlap"]["by_length"])
    assert papers[-2].split() == ["65,536", "tokens", "20.0", "25.0"]
    assert papers[-1].split() == ["the", "paper,", "0.5B", "GSM", "19.0", "24.7", "36.2"]
    chosen = measure(model, lambda length: data.of_length(length, 2), 24, [48, 24])
    assert chosen == {**facts, "by_length": facts["by_length"][1:]}
    with pytest.raises(ValueError, match="6"):
        measure(model, lambda length: data.of_length(length, 2), 24, [6, 24])
