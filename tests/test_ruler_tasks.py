"""RULER's other kinds of tasks: what is told, asked and right, by counting it in the text itself."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from test_ruler import MADE, SHORT, asking

from gsm.data.adaptation import RulerData
from gsm.data.ingredients import Ingredients, open_haystack, open_keys
from gsm.data.ruler import NOISE, TASKS, Questions
from gsm.data.tokenizer import Tokenizer
from gsm.evaluation.ruler import score

BYTES = Tokenizer.plain_bytes()
WHOLE = Ingredients.choose()
UUID = "[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"


def told(text: str, types: str = "numbers") -> dict[str, list[str]]:
    """The needles of a text, read back from it."""
    found: dict[str, list[str]] = {}
    for key, value in re.findall(rf"One of the special magic {types} for (\S+) is: (\S+)\.", text):
        found.setdefault(key, []).append(value)
    return found


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("made", [WHOLE, Ingredients.choose("short")], ids=["ruler", "short"])
def test_a_right_answer_scores_one_an_empty_one_nothing_and_no_sample_is_too_long(task: str, made: Ingredients):
    length = 12_000 if made is WHOLE else 900
    questions = Questions(task, BYTES, made)
    for index in range(4):
        sample = questions.sample(index, length)
        assert score(sample.answer, sample.outputs) == 1 and score("", sample.outputs) == 0
        assert sample.length == len(BYTES.encode(sample.prompt)) + questions.new_tokens <= length
        assert questions.sample(index, length) == sample


@pytest.mark.parametrize("task", ["niah_multikey_2", "niah_multikey_3"])
def test_the_haystack_is_needles_with_other_keys(task: str):
    types, kind = ("uuids", UUID) if task.endswith("3") else ("numbers", r"\d{7}")
    for index in range(10):
        sample = asking(task).sample(index, 4500)
        lines = sample.input.split("\n")[1:-1]
        found = told("\n".join(lines), types)
        assert len(lines) == sum(map(len, found.values())), "every line is one"
        assert found[sample.key] == list(sample.outputs) and re.fullmatch(kind, sample.outputs[0])
        assert (
            sample.answer_prefix
            == f" The special magic {types[:-1]} for {sample.key} mentioned in the provided text is"
        )
        if types == "uuids":
            assert all(re.fullmatch(UUID, key) for key in found)


def test_all_values_of_a_key_are_asked_for():
    for index in range(10):
        sample = asking("niah_multivalue").sample(index, 3000)
        assert {key: set(values) for key, values in told(sample.input).items()} == {sample.key: set(sample.outputs)}
        assert sample.answer == ", ".join(told(sample.input)[sample.key]), "in the order of the text"
        assert len(set(sample.outputs)) == 4 and sample.input.startswith("Some special magic numbers are hidden")
        assert f"What are all the special magic numbers for {sample.key} mentioned" in sample.input
        assert sample.answer_prefix.endswith(f"numbers for {sample.key} mentioned in the provided text are")


def test_all_keys_are_asked_for_in_the_order_of_the_answers():
    orders = set()
    for index in range(10):
        sample = asking("niah_multiquery").sample(index, 3000)
        keys = re.split(", and |, ", sample.key)
        assert [told(sample.input)[key] for key in keys] == [[value] for value in sample.outputs] and len(keys) == 4
        orders.add(tuple(keys.index(key) for key in told(sample.input)))
        assert sample.answer == ", ".join(sample.outputs)
    assert len(orders) > 3


def test_a_uuid_is_one_value_among_sentences():
    sample = asking("niah_single_3").sample(0, 3000)
    assert told(sample.input, "uuids") == {sample.key: list(sample.outputs)} and re.fullmatch(UUID, sample.outputs[0])


@pytest.mark.parametrize("made", [MADE, SHORT], ids=["ruler", "short"])
def test_variables_are_given_one_another_and_the_first_a_number(made: Ingredients):
    name, in_example, _ = made.template.letters
    for index in range(10):
        sample = asking("vt", made).sample(index, 5000)
        values = {}
        whole = sample.input.split("Memorize and track") if made is MADE else [None, None, sample.input]
        assert len(whole) == 3, "an example, and the question"
        lines = whole[2].split("\n")
        for line in lines:
            if said := re.fullmatch(r"VAR ([A-Z]+) = (?:VAR ([A-Z]+) |(\d{5}))", line):
                values[said[1]] = said[3] or values[said[2]]
        assert list(values) == list(sample.outputs) and set(values.values()) == {sample.key} and len(values) == 5
        assert all(len(one) == name for one in values) and lines.count(NOISE) > 12
        if made is MADE:
            given = re.search(r"they are:  ((?:[A-Z]{3} ?){5})\n\n$", whole[1])
            assert given and all(f"VAR {one} = " in whole[1] for one in given[1].split()) and in_example == 3
            assert f"5 variables are assigned the value {sample.key}, they are: " in sample.answer_prefix


@pytest.mark.parametrize(
    ("made", "length", "often"), [(WHOLE, 12_000, (30, 3)), (WHOLE, 3900, (6, 1)), (SHORT, 4000, (6, 1))]
)
def test_common_words_are_those_that_come_most_often(made: Ingredients, length: int, often: tuple[int, int]):
    made = Ingredients(made.template, open_haystack(), open_keys())
    for index in range(5):
        sample = asking("cwe", made).sample(index, length)
        listed = sample.input.rpartition("Below is a numbered list")[2] if made.template.examples else sample.input
        numbers, words = zip(*re.findall(r"(\d+)\. (\S+)", listed), strict=True)
        assert list(map(int, numbers)) == list(range(1, len(numbers) + 1))
        counts = Counter(words)
        assert {word for word, count in counts.items() if count == often[0]} == set(sample.outputs)
        assert set(counts.values()) == set(often) and len(sample.outputs) == made.template.words
        assert f"{made.template.words} " in sample.input.rpartition("\n")[2]
        assert sample.answer == " ".join(f"{place}. {word}" for place, word in enumerate(sample.outputs, 1))
        assert sample.input.count("Below is") == (2 if made.template.examples else 0), "an example with its answer"


@pytest.mark.parametrize(("made", "length"), [(MADE, 2000), (MADE, 16_000), (SHORT, 400), (SHORT, 1500)])
def test_frequent_words_are_the_second_to_the_fourth_after_the_dots(made: Ingredients, length: int):
    for index in range(5):
        sample = asking("fwe", made).sample(index, length)
        counts = Counter(re.findall(r"\.\.\.|\b[a-z]+\b", _context(sample.input, made)))
        (dots, most), *others = counts.most_common(5)
        assert dots == "..." and [word for word, _ in others[:3]] == list(sample.outputs)
        assert others[2][1] > others[3][1] if len(others) > 3 else True, "no tie with the fifth"
        assert abs(others[0][1] - most / 4) <= 1 and abs(others[1][1] - most / 9) <= 1


def _context(text: str, made: Ingredients) -> str:
    before, after = made.template.frequent.question.split("{context}")
    return text.removeprefix(before).removesuffix(after)


@pytest.mark.parametrize("task", ["cwe", "fwe"])
def test_the_places_of_what_is_asked_for_cannot_be_learned(task: str):
    def places(part: str) -> set[tuple[int, ...]]:
        samples = [Questions(task, BYTES, WHOLE, part).sample(index, 3900) for index in range(6)]
        contexts = [_words(sample.input, task) for sample in samples]
        return {tuple(words.index(word) for word in one.outputs) for words, one in zip(contexts, samples, strict=True)}

    assert len(places("training")) == 6
    assert len(places("evaluation")) < 6, "as in the benchmark, a seed has one order"


def _words(text: str, task: str) -> list[str]:
    return text.rpartition("Below is")[2].split() if task == "cwe" else text.split()


def test_every_kind_can_be_taught_and_the_answer_is_what_is_learned():
    tasks = list(TASKS)
    made = RulerData(
        vocabulary=257, tokenizer=BYTES, template="short", tasks=tasks, lengths=[900], context=1800, batch_size=11,
        new_tokens=120, examples=22,
    )  # fmt: skip
    made.prepare_data()
    batch = made.train_set.batch(range(len(tasks)))
    for row, target_T in enumerate(batch["targets"]):
        sample = made.train_set.sample(row, 900)
        assert BYTES.decode(target_T[target_T >= 0][:-1].tolist()) == f" {sample.answer}"
    assert torch.equal(batch["tokens"][0], made.train_set[0]["tokens"])


def test_a_chain_of_thought_is_for_tasks_with_needles():
    given = {"vocabulary": 257, "context": 1800, "batch_size": 1, "tokenizer": BYTES, "answers": "cot"}
    made = RulerData(**given, tasks=["niah_multiquery"], template="short", words=4, lengths=[900], new_tokens=400)
    sample = made.train_set.sample(0, 900)
    assert len(sample.needles) == 4
    assert all(value in needle for value, needle in zip(sample.outputs, sample.needles, strict=True))
