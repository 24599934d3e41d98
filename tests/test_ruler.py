"""RULER's samples: the benchmark's words and fields, as long as fits, needles where they belong, always the same."""

from __future__ import annotations

import json
import lzma
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gsm.data.ingredients import BORDER, TEMPLATES, Haystack, Ingredients, open_haystack, open_keys
from gsm.data.ruler import DEPTHS, NOISE, TASKS, Questions
from gsm.data.tokenizer import Tokenizer
from gsm.evaluation.ruler import score

BYTES = Tokenizer.plain_bytes()
# Sentences of one word each, all different, so that a place among them can be told.
SENTENCES = Haystack(" ".join(f"W{number}." for number in range(4000)), "numbers")
MADE = Ingredients(TEMPLATES["ruler"], SENTENCES, open_keys())
SHORT = Ingredients(TEMPLATES["short"], SENTENCES, open_keys(words=4))

OF_WORDS: dict[str, Any] = {name: TASKS[name] for name in ("niah_single_1", "niah_single_2", "niah_multikey_1")}


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return Tokenizer.train([open_haystack().first(5000), NOISE], 600)


def asking(task: str, made: Ingredients = MADE, tokenizer: Tokenizer = BYTES, part: str = "evaluation") -> Questions:
    return Questions(task, tokenizer, made, part)


def test_the_words_are_the_benchmarks_in_their_form_for_one_number():
    question = (
        "Some special magic {type} are hidden within the following text. Make sure to memorize it. I will quiz you "
        "about the {type} afterwards.\n{context}\nWhat are all the special magic {type} for {key} mentioned in the "
        "provided text?"
    )
    prefix = " The special magic {type} for {key} mentioned in the provided text are"
    for old, new in (("Some", "A"), ("are all", "is"), ("are", "is"), ("{type}", "number")):
        question, prefix = question.replace(old, new), prefix.replace(old, new)
    ruler = TEMPLATES["ruler"]
    assert ruler.needle == "One of the special magic numbers for {key} is: {value}."
    assert (ruler.digits, ruler.new_tokens, ruler.question, ruler.prefix) == (7, 128, question, prefix)


def test_a_sample_among_lines_field_by_field():
    sample = asking("niah_single_1").sample(3, 2048)
    head, *lines, tail = sample.input.split("\n")
    (value,), key = sample.outputs, sample.key
    assert head.startswith("A special magic number is hidden") and head.endswith("about the number afterwards.")
    assert tail == f"What is the special magic number for {key} mentioned in the provided text?"
    room = 2048 - 128 - len(sample.prompt) + (len(lines) - 1) * len(NOISE + "\n")
    assert len(lines) - 1 in (room // len(NOISE + "\n"), room // len(NOISE + "\n") - 1)
    assert sorted(lines, key=len) == [f"One of the special magic numbers for {key} is: {value}."] + [NOISE] * (
        len(lines) - 1
    )
    assert sample.answer_prefix == f" The special magic number for {key} mentioned in the provided text is"
    assert 1_000_000 <= int(value) <= 9_999_999 and value == str(int(value))
    adjective, noun = key.split("-")
    assert adjective in MADE.keys.adjectives and noun in MADE.keys.nouns
    assert sample.length == len(sample.input + sample.answer_prefix) + 128, "a byte is a token here"
    assert sample.index == 3 and sample.needle == f"One of the special magic numbers for {key} is: {value}."


@pytest.mark.parametrize("task", OF_WORDS)
def test_every_task_has_its_needles_and_asks_for_one(task: str):
    asked = set()
    for index in range(30):
        sample = asking(task).sample(index, 2000)
        found = re.findall(r"One of the special magic numbers for [a-z]+-[a-z]+ is: (\d{7})\.", sample.input)
        assert len(found) == len(set(found)) == OF_WORDS[task].keys
        needle = sample.needle
        assert sample.input.count(needle) == 1 and f" {sample.key} is: {sample.outputs[0]}." in needle
        assert sample.input.count(sample.key) == 2 and sample.answer_prefix.count(sample.key) == 1
        asked.add(found.index(sample.outputs[0]))
    assert asked == set(range(OF_WORDS[task].keys)), "any of them is asked for"


def test_the_haystack_of_the_fourth_is_needles_with_other_keys():
    for index in range(10):
        sample = asking("niah_multikey_2").sample(index, 4500)
        lines = sample.input.split("\n")[1:-1]
        found = re.findall(r"One of the special magic numbers for (\S+) is: (\d{7})\.", "\n".join(lines))
        assert len(lines) == len(found) > 20, "every line is one"
        assert [value for key, value in found if key == sample.key] == list(sample.outputs)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_right_answer_scores_one_an_empty_one_nothing_and_no_sample_is_too_long(task: str, template: str):
    questions = Questions(task, BYTES, Ingredients.choose(template))
    length = {"ruler": 12_000, "short": 900}[template]
    for index in range(4):
        sample = questions.sample(index, length)
        assert score(sample.answer, sample.outputs) == 1 and score("", sample.outputs) == 0
        assert sample.length == len(BYTES.encode(sample.prompt)) + questions.new_tokens <= length


@pytest.mark.parametrize("task", ["niah_single_2", "niah_multikey_1"])
def test_needles_stand_between_sentences_at_the_benchmarks_depths(task: str):
    assert DEPTHS[:4] == [0, 3, 5, 8] and DEPTHS[-1] == 100 and len(set(DEPTHS)) == 40
    made, seen = asking(task), set()
    for index in range(240 // OF_WORDS[task].keys):
        context = made.sample(index, 3000).input.split("\n")[1]
        words = context.replace("One of the special magic numbers for", "NEEDLE").replace(" is: ", " is:").split()
        total = sum(word.startswith("W") for word in words)
        places = [sum(w.startswith("W") for w in words[:at]) for at, word in enumerate(words) if word == "NEEDLE"]
        assert [w for w in words if w.startswith("W")] == SENTENCES.words[:total]
        depths = {place: depth for depth in DEPTHS for place in [int(total * depth / 100)]}
        assert len(set(places)) == OF_WORDS[task].keys and set(places) <= set(depths)
        seen |= {depths[place] for place in places}
    assert {0, 100} <= seen and len(seen) > 25


@pytest.mark.parametrize("task", OF_WORDS)
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
@pytest.mark.parametrize("length", [1024, 4096])
def test_samples_are_less_than_a_unit_below_the_length(task: str, kind: str, length: int, bpe: Tokenizer):
    tokenizer = BYTES if kind == "bytes" else bpe
    made = asking(
        task, replace(MADE, haystack=open_haystack(), template=replace(TEMPLATES["ruler"], increment=1)), tokenizer
    )
    unit = (
        len(tokenizer.encode(f"\n{NOISE}")) if OF_WORDS[task].haystack == "lines" else 40
    )  # bytes of the longest words
    keys = 8 * OF_WORDS[task].keys  # tokens by which prompts with other keys are longer or shorter
    for index in range(6):
        sample = made.sample(index, length)
        assert sample.length == len(tokenizer.encode(sample.prompt)) + 128
        assert length - unit - 4 * keys < sample.length <= length


def test_a_sample_that_is_too_long_loses_the_benchmarks_unit():
    made = asking("niah_single_1")
    units, unit = made.size(2048, 42)
    assert (
        unit == 5
        and asking("niah_single_1").size(8192, 42)[1] == 25
        and asking("niah_single_2").size(8192, 42)[1] == 500
    )
    lines = {made.sample(index, 2048).input.count(NOISE) for index in range(30)}
    assert lines <= {units, units - 5, units - 10} and units in lines


def test_samples_are_a_function_of_their_number():
    made, again = asking("niah_multikey_1"), asking("niah_multikey_1")
    assert made.sample(5, 1500) == [again.sample(index, 1500) for index in (7, 2, 5)][2]
    several = [made.sample(0, 1500), made.sample(1, 1500), made.sample(0, 1600), made.sample(0, 1500, seed=1)]
    assert len({sample.outputs for sample in several}) == 4


def test_training_and_evaluation_never_tell_the_same_pair():
    made = {part: asking("niah_multikey_1", SHORT, part=part) for part in ("training", "evaluation")}
    pairs = {part: set() for part in made}
    for part, one in made.items():
        for index in range(300):
            said = one.sample(index, 600).input.split("The number of ")[1:5]
            pairs[part] |= {tuple(text.split(". ")[0].split(" is ")[:2]) for text in said if " is " in text}
    training, evaluation = ({(key, value[:2]) for key, value in pairs[part]} for part in made)
    assert not training & evaluation and min(len(training), len(evaluation)) > 400
    assert {key for key, _ in training} == {key for key, _ in evaluation} == set(SHORT.keys)


def test_a_haystack_begins_again_when_it_is_too_short():
    hay = Haystack("One  two.\nThree four.", "few")
    assert hay.first(6) == "One two. Three four. One two."
    assert hay.sentences(6) == ["One two.", "Three four.", "One two."]


def test_the_rule_for_sentences():
    assert BORDER.split('He said "No!" Then (so) he went. 3 times? yes, e.g. here. (Or not.) End') == [
        'He said "No!"',
        "Then (so) he went.",
        "3 times? yes, e.g. here.",
        "(Or not.)",
        "End",
    ]


def test_essays_are_read_from_a_folder_a_packed_file_and_the_benchmarks_own(tmp_path: Path):
    (tmp_path / "essays").mkdir()
    (tmp_path / "essays" / "b.txt").write_text("three  four")
    with lzma.open(tmp_path / "essays" / "a.jsonl.xz", "wt") as file:
        file.write('{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "PaulGrahamEssays.json").write_text(json.dumps({"text": "five six"}))
    assert open_haystack(str(tmp_path / "essays")).words == ["one", "two", "three", "four"]
    assert open_haystack(str(tmp_path / "essays" / "a.jsonl.xz")).words == ["one", "two"]
    assert open_haystack(str(tmp_path / "PaulGrahamEssays.json")).words == ["five", "six"]


def test_word_lists_are_builtin_or_come_from_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assets = tmp_path / "wonderwords" / "assets"
    assets.mkdir(parents=True)
    (tmp_path / "wonderwords" / "__init__.py").write_text("")
    (assets / "adjectivelist.txt").write_text("red\nad hoc \nred\n\n")
    (assets / "nounlist.txt").write_text("cat\ndog\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wonderwords", raising=False)
    wanted = ["red-cat", "red-dog", "ad hoc-cat", "ad hoc-dog"]
    assert list(open_keys("wonderwords")) == wanted
    with pytest.raises(ValueError, match="^keys "):
        open_keys("words.json")
    assert list(open_keys("builtin", words=2)) == ["amber-anchor", "amber-barrel", "ancient-anchor", "ancient-barrel"]
