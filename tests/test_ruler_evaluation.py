"""RULER put to models: what is right scores 100, what is wrong 0, and an evaluation that was interrupted goes on."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from short_runs import NO_PICTURES, TINY

from gsm.config.compose import compose
from gsm.data.ingredients import Ingredients
from gsm.data.ruler import Questions
from gsm.data.tokenizer import Tokenizer
from gsm.evaluation import commands
from gsm.evaluation.held_out import WHOLE, HeldOut
from gsm.evaluation.records import Measured, by, mean, read
from gsm.evaluation.ruler import Ruler, complete, final_answer, score
from gsm.paths import ROOT
from gsm.training.run import train

BYTES = Tokenizer.plain_bytes()
SHORT = Ingredients.choose("short", words=4, new_tokens=120)
TASKS = ("niah_single_1", "niah_multikey_1")


class Oracle:
    """Finds the needle in the text, and says what `say` makes of key and value, then its end of text for ever."""

    def __init__(self, say: Callable[[str, str], str]) -> None:
        self.say, self.asked = say, 0

    def stream(self, prompt: Any, max_new_tokens: int, *, capacity: int):
        rows = [list(map(int, row)) for row in prompt]
        assert capacity == max(map(len, rows)) + max_new_tokens - 1
        self.asked += len(rows)
        said = [BYTES.encode(self._answer(BYTES.decode(row))) for row in rows]
        for step in range(max_new_tokens):
            yield torch.tensor([ids[step] if step < len(ids) else BYTES.end_of_text for ids in said])

    def _answer(self, text: str) -> str:
        (key,) = re.findall(r"What is the number of (\S+)\?", text)
        (value,) = re.findall(rf"The number of {key} is (\d+)\.", text)
        return self.say(key, value)


RIGHT = Oracle(lambda key, value: f" {value}")
THINKS = Oracle(lambda key, value: f" told here: 99 or 10. Final answer: {value}")


def ask(model: Any, file: Path | None = None, step: int = 0, **options: Any) -> Measured:
    measured = Measured.begun(file, {"step": step})
    Ruler(**{"tasks": TASKS, "lengths": (400, 512), "examples": 5, **options}).measure(model, BYTES, SHORT, measured)
    return measured


@pytest.mark.parametrize(
    ("text", "outputs", "points"),
    [
        (" 1234567", ["1234567"], 1),
        ("is 1234567.", ["1234567"], 1),
        ("\x00\t1234567\x1f", ["1234567"], 1),
        ("123\x004567", ["1234567"], 0),
        ("123456", ["1234567"], 0),
        ("", ["1"], 0),
        ("A Red-Cat", ["rEd-cat"], 1),
        ("one and two", ["one", "three"], 0.5),
        (None, ["1"], 0),
    ],
)
def test_an_answer_is_right_as_far_as_it_contains_what_was_asked_for(text, outputs, points):
    assert score(text, outputs) == points


@pytest.mark.parametrize(
    ("text", "answers", "judged"),
    [
        ("so 12. Final answer: 34", "cot", " 34"),
        ("Final answer: 12. No. Final answer: 34", "cot", " 34"),
        ("so 12", "cot", None),
        ("Final answer:", "cot", ""),
        ("12. Final answer: 34", "direct", "12. Final answer: 34"),
    ],
)
def test_of_a_chain_of_thought_only_the_final_answer_is_judged(text, answers, judged):
    assert final_answer(text, answers) == judged


@pytest.mark.parametrize(
    ("say", "answers", "accuracy"),
    [
        (RIGHT.say, "direct", 100),
        (lambda key, value: f" {int(value) % 89 + 10}", "direct", 0),
        (THINKS.say, "cot", 100),
        (lambda key, value: f" {value}. Final answer: {int(value) % 89 + 10}", "cot", 0),
        (RIGHT.say, "cot", 0),
        (THINKS.say, "direct", 100),
    ],
)
def test_who_knows_the_needle_scores_100_and_who_says_something_else_0(say, answers, accuracy):
    found = ask(Oracle(say), answers=answers, batch_size=2).where(quantity="score")
    cells = by(found, "task", "length")
    assert list(cells) == [(task, length) for task in TASKS for length in (400, 512)]
    assert [100 * (mean(records) or 0) for records in cells.values()] == [accuracy] * 4
    assert all(record["marked"] for record in found) == (say is not RIGHT.say or answers != "cot")


def test_every_sample_is_kept_with_what_was_said_of_it():
    found = ask(Oracle(lambda key, value: f" {value}\nand more"))
    records = found.where(task="niah_multikey_1", length=512, quantity="score")
    assert [record["index"] for record in records] == list(range(5))
    for record in records:
        made = Questions("niah_multikey_1", BYTES, SHORT).sample(record["index"], 512)
        assert record["outputs"] == list(made.outputs) and record["tokens"] == len(made.prompt)
        assert record["prediction"] == f" {made.outputs[0]}\n" and record["value"] == 1


def test_an_answer_ends_with_its_text_or_if_it_is_direct_with_its_line():
    model = Oracle(lambda key, value: "\n ab\ncd")
    prompt = BYTES.encode("The number of k is 1. What is the number of k?")
    assert complete(model, BYTES, [prompt, prompt], 20, a_line=True) == ["\n ab\n"] * 2
    assert complete(model, BYTES, [prompt, prompt[:-1] + prompt[-1:]], 20, a_line=False) == ["\n ab\ncd"] * 2
    assert complete(model, BYTES, [prompt], 3, a_line=False) == ["\n a"]


class Stops(Oracle):
    """Somebody presses Ctrl-C at a question."""

    def stream(self, *arguments, **options):
        if self.asked >= 10:
            raise KeyboardInterrupt
        return super().stream(*arguments, **options)


def scores(file: Path) -> list[dict[str, Any]]:
    return read(file)[-1].where(quantity="score")


def test_an_interrupted_evaluation_goes_on_and_ends_with_the_same_numbers(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        ask(Stops(RIGHT.say), tmp_path / "a.jsonl")
    assert len(scores(tmp_path / "a.jsonl")) == 2 * 5
    again = Oracle(RIGHT.say)
    ask(again, tmp_path / "a.jsonl")
    ask(Oracle(RIGHT.say), tmp_path / "b.jsonl")
    assert again.asked == 10, "only what was missing"
    assert scores(tmp_path / "a.jsonl") == scores(tmp_path / "b.jsonl")


def test_further_lengths_join_a_file_and_other_settings_have_records_of_their_own(tmp_path: Path):
    file, model = tmp_path / "ruler.jsonl", Oracle(RIGHT.say)
    ask(model, file, lengths=(400,))
    result = ask(model, file, lengths=(512,))
    assert model.asked == 20 and {record["length"] for record in result.records} == {512}
    assert len(scores(file)) == 20
    ask(model, file, 7, lengths=(400,))
    assert model.asked == 30 and len(scores(file)) == 10
    ask(model, file)
    assert model.asked == 30


def test_a_length_without_samples_is_refused_before_anything_is_measured(tmp_path: Path):
    file, model = tmp_path / "ruler.jsonl", Oracle(RIGHT.say)
    ask(model, file, lengths=(400,))
    before, asked = file.read_bytes(), model.asked
    with pytest.raises(ValueError, match="length"):
        ask(model, file, 7, lengths=(400, 20))
    assert (file.read_bytes(), model.asked) == (before, asked)


RULER = ("ruler.tasks=niah_single_2", "ruler.examples=2")
ADAPTED = [
    *TINY[: TINY.index("data=folder")],
    NO_PICTURES,
    *"size.context=300 data=ruler data.tokenizer=bytes data.template=short data.words=2 data.new_tokens=6".split(),
    *"data.lengths=[240] data.tasks=[niah_single_1,niah_single_2] data.batch_size=2".split(),
    *"data.validation_sequences=2 trainer=cpu trainer.max_steps=2".split(),
]


def test_a_run_is_adapted_and_asked_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    facts = train(compose([*ADAPTED, f"logs={tmp_path}"]))
    assert facts["status"] == "finished" and 0 <= facts["accuracy"] <= 1
    (result,) = Ruler(str(tmp_path), examples=2, device="cpu").evaluate()
    asked = [(f"niah_single_{task}", length) for task in (1, 2) for length in (240, 300)]
    assert list(by(result.records, "task", "length")) == asked
    questions = result.settings["questions"]
    assert questions["new_tokens"] == 6 and questions["template"] == "short"
    capsys.readouterr()
    commands.call([f"checkpoint={tmp_path}", "device=cpu", *RULER, "ruler.lengths=[240, 300]"])
    said = capsys.readouterr().out
    assert "\nniah_single_2  " in said and "niah_single_1" not in said and "template: short" in " ".join(said.split())
    (held_out,) = HeldOut(str(tmp_path), device="cpu").evaluate()
    assert sum(record["weight"] for record in held_out.where(**WHOLE)) == 2 * 4, (
        "of each example a blank, two digits and the end"
    )
    with pytest.raises(SystemExit, match="lengths"):
        commands.call([f"checkpoint={tmp_path}", "ruler.lengths=4K", "device=cpu"])
    with pytest.raises(ValueError, match="template"):
        Ruler(str(tmp_path), template="shrt", device="cpu").evaluate()


def test_the_script_takes_its_names_with_ruler_before_them(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "ruler=true", "--help"])
    runpy.run_path(str(ROOT / "evaluate.py"), run_name="__main__")
    assert "ruler.examples=20" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "checkpoint=none", "ruler.lenths=5"])
    with pytest.raises(SystemExit, match="'lenths'.*lengths"):
        runpy.run_path(str(ROOT / "evaluate.py"), run_name="__main__")
