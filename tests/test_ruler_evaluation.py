"""RULER put to models: what is right scores 100, what is wrong 0, and an evaluation that was interrupted goes on."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from short_runs import NO_PICTURES, TINY

from gsm.config.check import ConfigError
from gsm.config.compose import compose
from gsm.data.ingredients import Ingredients
from gsm.data.ruler import Questions
from gsm.data.tokenizer import Tokenizer
from gsm.evaluation import commands
from gsm.evaluation.held_out import HeldOut
from gsm.evaluation.ruler import Ruler, averages, complete, final_answer, score
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


def ask(model: Any, path: Path | None = None, identity: Any = None, **options: Any) -> dict[str, Any]:
    given = {"tasks": TASKS, "lengths": (400, 512), "examples": 5, **options}
    return Ruler(**given).measure(model, BYTES, ingredients=SHORT, path=path, identity=identity)


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
    result = ask(Oracle(say), answers=answers, batch_size=2)
    cells = result["cells"]
    assert list(cells) == ["niah_single_1/400", "niah_single_1/512", "niah_multikey_1/400", "niah_multikey_1/512"]
    assert [cell["accuracy"] for cell in cells.values()] == [accuracy] * 4
    assert result["averages"]["average"] == accuracy
    assert result["unmarked"] == (1 if say is RIGHT.say and answers == "cot" else 0)


def test_every_sample_is_kept_with_what_was_said_of_it():
    cell = ask(Oracle(lambda key, value: f" {value}\nand more"))["cells"]["niah_multikey_1/512"]
    assert [sample["index"] for sample in cell["samples"]] == list(range(5))
    for sample in cell["samples"]:
        made = Questions("niah_multikey_1", BYTES, SHORT).sample(sample["index"], 512)
        assert sample["outputs"] == list(made.outputs) and sample["tokens"] == len(made.prompt)
        assert sample["prediction"] == f" {made.outputs[0]}\n" and sample["score"] == 1


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


def without_seconds(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    for cell in found["cells"].values():
        cell.pop("seconds")
    return found


def test_an_interrupted_evaluation_goes_on_and_ends_with_the_same_numbers(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        ask(Stops(RIGHT.say), path=tmp_path / "a.json")
    assert len(json.loads((tmp_path / "a.json").read_text())["cells"]) == 2
    again = Oracle(RIGHT.say)
    ask(again, path=tmp_path / "a.json")
    ask(Oracle(RIGHT.say), path=tmp_path / "b.json")
    assert again.asked == 10, "only what was missing"
    assert without_seconds(tmp_path / "a.json") == without_seconds(tmp_path / "b.json")


def test_further_lengths_join_a_file_and_other_settings_move_it_aside(tmp_path: Path):
    path, model = tmp_path / "ruler.json", Oracle(RIGHT.say)
    ask(model, path=path, lengths=(400,))
    result = ask(model, path=path, lengths=(512,))
    assert model.asked == 20 and list(result["averages"]["by_length"]) == ["512"]
    assert len(json.loads(path.read_text())["cells"]) == 4
    ask(model, path=path, lengths=(400,), identity={"step": 7})
    assert model.asked == 30 and json.loads(path.read_text())["settings"]["step"] == 7
    assert len(json.loads((tmp_path / "ruler.previous").read_text())["cells"]) == 4


def test_a_length_without_samples_is_refused_before_anything_is_measured(tmp_path: Path):
    path, model = tmp_path / "ruler.json", Oracle(RIGHT.say)
    ask(model, path=path, lengths=(400,))
    before, asked = path.read_bytes(), model.asked
    with pytest.raises(ValueError, match="^length .*got 20"):
        ask(model, path=path, lengths=(400, 20), identity={"step": 7})
    assert (path.read_bytes(), model.asked) == (before, asked) and list(tmp_path.iterdir()) == [path]


def test_means_are_the_papers():
    """Of a length over tasks, of a task over lengths, and of lengths, unweighted."""
    given = {("a", 4096): 90.0, ("a", 8192): 100.0, ("b", 4096): 60.0, ("b", 8192): 95.0}
    found = averages({"task": task, "length": length, "accuracy": value} for (task, length), value in given.items())
    assert found["by_length"] == {"4096": 75.0, "8192": 97.5} and found["average"] == 86.25
    assert found["by_task"] == {"a": 95.0, "b": 77.5}


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
    assert result["asked"] == [f"niah_single_{task}/{length}" for task in (1, 2) for length in (240, 300)]
    assert result["settings"]["new_tokens"] == 6 and result["settings"]["template"] == "short"
    capsys.readouterr()
    commands.call([f"checkpoint={tmp_path}", "device=cpu", *RULER, "ruler.lengths=[240, 300]"])
    said = capsys.readouterr().out
    assert "\nniah_single_2  " in said and "niah_single_1" not in said and "template: short" in " ".join(said.split())
    (held_out,) = HeldOut(str(tmp_path), device="cpu").evaluate()
    assert held_out["text"]["targets"] == 2 * 4, "of each example a blank, two digits and the end"
    with pytest.raises(SystemExit, match="lengths .*'4K'"):
        commands.call([f"checkpoint={tmp_path}", "ruler.lengths=4K", "device=cpu"])
    with pytest.raises(ConfigError, match="template .*shrt"):
        Ruler(str(tmp_path), template="shrt", device="cpu").evaluate()


def test_the_script_takes_its_names_with_ruler_before_them(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "ruler=true", "--help"])
    runpy.run_path(str(ROOT / "evaluate.py"), run_name="__main__")
    assert "ruler.examples=20" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "checkpoint=none", "ruler.lenths=5"])
    with pytest.raises(SystemExit, match="'lenths'.*lengths"):
        runpy.run_path(str(ROOT / "evaluate.py"), run_name="__main__")
