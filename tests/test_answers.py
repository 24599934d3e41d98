"""Answers by length: chunks answer as one forward does, and only YaRN's factor follows the length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import small
import torch

from gsm.config.check import ConfigError
from gsm.evaluation import answers, commands
from gsm.evaluation.answers import Answers, answered
from gsm.evaluation.checkpoints import Trained, checkpoints
from gsm.evaluation.records import read, where
from gsm.models.checks import IGNORED

LONG = 37


@pytest.mark.parametrize("case", ["gsm", "baseline", "gated_delta_net"])
@pytest.mark.parametrize("chunk", [4, 64])
def test_chunks_answer_as_one_forward_does(case: str, chunk: int):
    model, token_1T = small.build(case), small.random_tokens(1, LONG)
    best_T = model(token_1T).logits[0].argmax(-1)
    target_T = torch.full((LONG,), IGNORED)
    target_T[[9, 20, 30, 36]] = best_T[[9, 20, 30, 36]]
    target_T[20] = (target_T[20] + 1) % model.vocabulary  # one wrong answer
    right, *_ = answered(model, {"tokens": token_1T[0], "targets": target_T}, chunk)
    assert right == {"quantity": "answered", "value": 3, "weight": 4}


def test_an_answer_of_two_tokens_is_right_if_both_are():
    model, token_1T = small.build("gsm"), small.random_tokens(1, LONG)
    target_T = model(token_1T).logits[0].argmax(-1)
    target_T[:31] = IGNORED
    target_T[34] = (target_T[34] + 1) % model.vocabulary  # the first token of the second of three answers
    right, *_ = answered(model, {"tokens": token_1T[0], "targets": target_T}, 4, answer_tokens=2)
    assert right == {"quantity": "answered", "value": 2, "weight": 3}


def test_a_model_answers_a_variant_of_its_task_and_long_lengths_have_fewer_sequences(tmp_path: Path):
    words = ["answers=96,384", "sequences=3", "tokens=400", "task.pairs=4", "task.asked=1", "device=cpu"]
    (result,) = commands.parse(["checkpoint=needle_gsm", *words, f"output={tmp_path}"]).evaluate()
    asked = result.where(quantity="answered")
    assert [(record["length"], record["weight"]) for record in asked] == [(96, 1)] * 3 + [(384, 1)]


def test_the_decoder_of_gsm_keeps_its_state_alone_and_the_baseline_a_bank_that_grows():
    def kept(case: str, length: int) -> int:
        sequence = {"tokens": small.random_tokens(1, length)[0], "targets": torch.zeros(length, dtype=torch.long)}
        (record,) = where(answered(small.build(case), sequence, 16), quantity="decoder_bytes")
        return record["value"]

    assert kept("gsm", 32) == kept("gsm", 64) > 0
    assert kept("baseline", 64) > kept("baseline", 32)


def test_only_yarns_factor_follows_the_length():
    trained = Trained(checkpoints("needle_gsm")[0], "cpu")
    measure = Answers("needle_gsm", answers=[96, 384])
    stretched: Any = measure.stretched(trained, 384)
    assert measure.stretched(trained, 96) is trained.model
    assert stretched.geometry.yarn_factor == 4
    assert stretched.geometry.bank_rope().original == 96
    for (name, own), other in zip(stretched.named_parameters(), trained.model.parameters(), strict=True):
        assert torch.equal(own, other), name


def test_a_trained_model_answers_and_a_second_call_computes_nothing(tmp_path: Path, monkeypatch: Any):
    measure = commands.parse(
        ["checkpoint=needle_gsm", "answers=96,384", "sequences=2", "device=cpu", f"output={tmp_path}"]
    )
    (first,) = measure.evaluate()
    assert measure.metrics(first)["answered/384"] > 0.9
    assert (tmp_path / "answers.md").is_file() and len(read(tmp_path / "answers.jsonl")[0].records) == 2 * 2 * 4
    monkeypatch.setattr(answers, "answered", None)  # nothing may call it
    (second,) = measure.evaluate()
    assert second.records == first.records == measure.read(tmp_path, {}).records


def test_more_sequences_are_asked_than_the_validation_of_the_run_has(tmp_path: Path):
    (result,) = Answers("needle_gsm", answers=[96], sequences=65, device="cpu", output=str(tmp_path)).evaluate()
    assert sum(record["weight"] for record in result.where(quantity="answered")) == 650


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("checkpoint=nano answers=96", "answers"),
        ("answers=", "answers"),
        ("answers=40", "context"),
        ("answers=96 task.pear=1", "pear"),
        ("answers=96 task.pairs=99", "pairs"),
    ],
)
def test_a_length_or_a_task_without_room_and_a_model_of_text_are_refused(words: str, key: str):
    with pytest.raises(ConfigError, match=key):
        commands.parse(["checkpoint=needle_gsm", *words.split()]).evaluate()
