"""Tensors of a clean call, put into a corrupted call, restore the information that they carry, and no more."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small import build

from gsm import paths
from gsm.analysis import patching
from gsm.analysis.interventions import starts
from gsm.analysis.needles import ask
from gsm.data.recall import Needle
from gsm.notebook import load

T = 24
TASK = Needle(keys=8, values=7, fillers=6, pairs=2, gap=4)


def test_a_corrupted_text_differs_in_the_value_of_the_needle_that_is_asked_for():
    questions = ask(TASK, T, 8)
    pair, line = patching.question_pair(questions, TASK), torch.arange(len(questions.row_N))
    differs_NT = pair.clean_NT != pair.corrupted_NT
    assert differs_NT.sum(1).tolist() == [1] * len(line)
    assert torch.equal(differs_NT.long().argmax(1), pair.needle_N + 1)
    assert torch.equal(pair.clean_NT[line, pair.needle_N + 1], pair.right_N)
    assert torch.equal(pair.corrupted_NT[line, pair.needle_N + 1], pair.wrong_N)
    assert ((TASK.keys <= pair.wrong_N) & (pair.wrong_N < TASK.keys + TASK.values)).all()
    assert (pair.wrong_N != pair.right_N).all()


@pytest.mark.parametrize("case", ["gsm", "gsm-residual=mhc_two_pass", "gsm-writer=multi_slot"])
def test_replacing_embedding_decoder_input_or_output_restores_the_whole_answer(case: str):
    model, pair = build(case), patching.question_pair(ask(TASK, T, 2), TASK)
    parts = {
        "embedding": "embedding",
        "into the decoder": ["state/entries", *starts(model)],
        "out": "hidden",
        "indexers": "*/top_k",
    }
    parts["the same in both calls"] = "position"
    shares = patching.by_part(model, pair, parts)
    assert [round(shares[name], 9) for name in ("embedding", "into the decoder", "out")] == [1, 1, 1]
    assert shares["the same in both calls"] == 0
    assert 0.1 < abs(shares["indexers"] - 1) < 1, "a selection is not its content"


def test_one_place_is_replaced_at_a_time():
    model, pair = build("gsm"), patching.question_pair(ask(TASK, T, 2), TASK)
    offsets = [-50, 0, 1, 50]
    shares = patching.by_place(model, pair, ["embedding"], pair.needle_N, offsets)["embedding"]
    assert shares == {-50: 0.0, 0: 0.0, 1: 1.0, 50: 0.0}, "the calls differ in the token behind the key alone"


def test_equal_answers_of_both_calls_leave_nothing_to_restore():
    pair = patching.question_pair(ask(TASK, T, 2), TASK)
    with pytest.raises(ValueError, match="^pair"):
        patching.by_part(build("gsm"), replace(pair, corrupted_NT=pair.clean_NT), {"out": "hidden"})


def test_questions_follow_the_model_to_its_device():
    """The meta device computes no numbers, but refuses tensors of another one."""
    model, pair = build("gsm").to("meta"), patching.question_pair(ask(TASK, T, 2), TASK)
    assert {margin.device.type for margin in patching.margins(model, pair)} == {"meta"}
    between = torch.tensor(1.0), torch.tensor(0.0)
    for places_NP in (None, patching.places_around(pair.needle_N, [0, 1])):
        assert patching.restored_share(model, pair, "embedding", places_NP, between).device.type == "meta"


def test_the_packaged_model_has_the_answer_in_the_slot_of_the_value():
    """The state entry of the key then carries it on."""
    model, data = load(paths.trained()["needle_handed_on"])
    pair = patching.question_pair(ask(data.task, data.context, 1), data.task)
    slots = patching.by_place(model, pair, ["encoder/2/latent"], (pair.needle_N + 1) // 2, [-1, 0, 1])
    entries = patching.by_place(model, pair, ["state/entries"], pair.key_N, [-1, 0, 1])
    for shares in (slots["encoder/2/latent"], entries["state/entries"]):
        assert shares[0] > 0.9 and abs(shares[-1]) < 0.05 and abs(shares[1]) < 0.05
