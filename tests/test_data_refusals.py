"""Data and measures refuse a wrong value in one sentence that names it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gsm.data.adaptation import RulerData
from gsm.data.ingredients import Haystack, Ingredients, open_haystack, open_keys
from gsm.data.ruler import Questions
from gsm.data.tokenizer import Tokenizer
from gsm.evaluation.ruler import Ruler

BYTES = Tokenizer.plain_bytes()


def questions(task: str, length: int, template: str = "ruler") -> object:
    return Questions(task, BYTES, Ingredients.choose(template)).sample(0, length)


def examples(**options: object) -> None:
    usual = {"lengths": [360, 440], "context": 640, "batch_size": 3, "new_tokens": 120, "words": 4}
    RulerData(vocabulary=257, tokenizer=BYTES, template="short", **{**usual, **options}).prepare_data()


def ruler(**options: object) -> object:
    return Ruler(**{"template": "short", "lengths": (400,), **options}).measure(None, BYTES)


REFUSALS: list[tuple[Callable[[], object], str]] = [
    (lambda: questions("niah_single_1", 500), "length=500 is not allowed"),
    (
        lambda: questions("niah_multikey_1", 200, "short"),
        "length=200 is not allowed because a sample of niah_multikey_1",
    ),
    (lambda: questions("niah_single_4", 500), "task=niah_single_4 with part=evaluation is not allowed"),
    (lambda: Ingredients.choose("long"), "template=long is not allowed"),
    (lambda: Ingredients.choose(new_tokens=0), "new_tokens=0"),
    (lambda: open_keys(words=1), "words=1 is not allowed"),
    (lambda: Haystack(" ", "void"), "haystack=void is not allowed because it has no words"),
    (lambda: open_haystack("/nowhere"), "haystack=/nowhere is not allowed because there is no such file"),
    (lambda: examples(new_tokens=30, answers="cot"), "Use data.new_tokens="),
    (lambda: examples(lengths=[360, 200]), "length=200 is not allowed because a sample of niah_single_1"),
    (lambda: examples(lengths=[700]), "is not allowed because context=640"),
    (lambda: examples(answers="long"), "answers=long is not allowed"),
    (lambda: examples(answers="cot", tasks=["niah_single_1", "vt", "fwe"]), "vt, fwe have no needle"),
    (lambda: examples(tasks=["niah"]), "niah_single_1"),
    (lambda: examples(examples=0), "examples=0"),
    (lambda: ruler(lengths=(100,)), "length=100 is not allowed because a sample of niah_single_1"),
    (lambda: ruler(lengths=(0,)), "lengths=0"),
    (lambda: ruler(examples=0), "examples=0"),
    (lambda: ruler(tasks=("niah",)), "tasks=niah"),
    (lambda: ruler(answers="long"), "answers=long"),
]


@pytest.mark.parametrize(("make", "words"), REFUSALS, ids=[words for _, words in REFUSALS])
def test_a_wrong_value_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises((ValueError, OSError)) as refusal:
        make()
    assert words in str(refusal.value)
