"""Needles in a haystack, as RULER makes them (Hsieh et al., 2024; NVIDIA/RULER, Apache-2.0, whose wording this is).

    niah_single_1     one line over and over, one needle among the lines
    niah_single_2     running text, one needle between two sentences
    niah_multikey_1   running text, four needles with four keys; one of them is asked for

A needle says that a key has a number, the question asks for it, and the prompt ends where the answer begins:

    <question, first half> <haystack with needles> <question, second half> <answer prefix> | <number>

A sample is as long as fits: tokens of the prompt and `new_tokens`, kept free for the answer, are at most the length.

What differs from the benchmark: every sample draws its random numbers from (seed, task, length, index), so that it does
not depend on how many are made; keys of a sample differ, and so do their numbers (of millions, they do anyway); the
search for the size of the haystack has no upper estimate, and goes down to a single word where the benchmark's step
is too coarse. `Ingredients.facts` says what else was chosen otherwise.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from gsm.data.ingredients import Ingredients
from gsm.data.tokenizer import Tokenizer

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = np.round(np.linspace(0, 100, 40)).astype(int).tolist()  # percent of the sentences that stand before a needle
SEED = 42
MANY = 10**12  # pairs of key and number: of so many, training and evaluation hardly ever draw the same
TRIES = 1000  # samples drawn anew, when none fits
FIELDS = ("index", "input", "outputs")  # of a line of JSON, what is needed


@dataclass(frozen=True)
class Task:
    """Attributes: whether the haystack is `NOISE` in lines, or running text; and how many needles are in it."""

    noise: bool
    needles: int


TASKS = {
    "niah_single_1": Task(noise=True, needles=1),
    "niah_single_2": Task(noise=False, needles=1),
    "niah_multikey_1": Task(noise=False, needles=4),
}


@dataclass(frozen=True)
class Sample:
    """A question. The benchmark's fields, and of those that are made here key and needle.

    Attributes:
        index: its number.
        input: the prompt without its prefix.
        outputs: what a right answer contains.
        length: tokens of the prompt, and those kept free.
        answer_prefix: the end of the prompt.
        token_position_answer: tokens before the number; -1: not known.
        key: what is asked for.
        needle: the sentence that tells it.
    """

    index: int
    input: str
    outputs: tuple[str, ...]
    length: int = 0
    answer_prefix: str = ""
    token_position_answer: int = -1
    key: str = ""
    needle: str = ""

    @property
    def prompt(self) -> str:
        """All that a model is given."""
        return self.input + self.answer_prefix

    def row(self) -> dict[str, Any]:
        """The fields that a line of the benchmark's JSON has; without a chat template both lengths are equal."""
        row = {name: value for name, value in asdict(self).items() if name not in ("key", "needle")}
        return {**row, "outputs": list(self.outputs), "length_w_model_temp": self.length}


class Needles:
    """The samples of one task for one tokenizer.

    Where few pairs of key and number exist (fewer than `MANY`), training and evaluation draw from disjoint halves.

    Args:
        task: one of `TASKS`.
        tokenizer: counts the tokens.
        ingredients: what samples are made of.
        part: "evaluation" or "training".

    Raises:
        ValueError: the task or the part is unknown.
    """

    def __init__(
        self, task: str, tokenizer: Tokenizer, ingredients: Ingredients | None = None, part: str = "evaluation"
    ) -> None:
        if task not in TASKS or part not in ("evaluation", "training"):
            known = f"{', '.join(TASKS)}, and of part evaluation, training"
            raise ValueError(f"unknown task {task!r} or part {part!r}; the known values of task are {known}")
        self.name, self.task, self.tokenizer, self.part = task, TASKS[task], tokenizer, part
        self.ingredients = made = ingredients or Ingredients()
        assert made.digits is not None and made.new_tokens is not None  # its template has them
        self.numbers, self.new_tokens = (10 ** (made.digits - 1), 10**made.digits - 1), made.new_tokens
        self.divided = len(made.keys) * (self.numbers[1] - self.numbers[0] + 1) < MANY
        self.size = cache(self._size)

    def sample(self, index: int, length: int, seed: int = SEED) -> Sample:
        """The sample with a number, of at most `length` tokens; as in the benchmark, one that is too long is drawn
        again with a smaller haystack. Raises ValueError for a length that holds no sample."""
        units, increment = self.size(length, seed)
        drawing = random.Random(f"{seed}/{self.part}/{self.name}/{length}/{index}")
        sample, tries = self._draw(drawing, units, index, seed), 1
        while sample.length > length:
            if tries == TRIES:
                raise self._too_short(length, sample.length)
            units -= increment if units > increment else 0
            sample, tries = self._draw(drawing, units, index, seed), tries + 1
        before = sample.input.index(sample.needle) + sample.needle.rindex(sample.outputs[0])
        return replace(sample, token_position_answer=self._count(sample.input[:before]))

    def _size(self, length: int, seed: int) -> tuple[int, int]:
        """The largest haystack that was found to fit, in words or lines, and what it shrinks by. A draw for each step
        of a binary search: prompts with other keys may be some tokens longer."""
        usual = 500 if not self.task.noise else 25 if length >= 4096 else 5
        least = self._count(NOISE) if self.task.noise else 1  # tokens of a unit
        drawing = random.Random(f"{seed}/{self.part}/{self.name}/{length}/size")
        for increment in (self.ingredients.increment or usual, 1):
            low, high = increment, max(length // least, increment)
            while low <= high:
                middle = (low + high) // 2
                if self._draw(drawing, middle, 0, seed).length <= length:
                    low = middle + 1
                else:
                    high = middle - 1
            if high >= increment:
                return high, increment
        raise self._too_short(length, self._draw(drawing, 1, 0, seed).length)

    def _too_short(self, length: int, least: int) -> ValueError:
        remedy = "take longer ones" + ("" if self.ingredients.template.name == "short" else ", or template short")
        return ValueError(
            f"length {length} is too short for {self.name}: with hardly any haystack a sample takes {least} tokens, "
            f"{self.new_tokens} of them (new_tokens) for the answer; {remedy}"
        )

    def _draw(self, drawing: random.Random, units: int, index: int, seed: int) -> Sample:
        made = self.ingredients.template
        pairs = self._pairs(drawing)
        needles = [made.needle.format(key=key, value=value) for key, value in pairs]
        shuffled = list(needles)
        random.Random(seed).shuffle(shuffled)
        context = self._lines(drawing, units, shuffled) if self.task.noise else self._text(drawing, units, shuffled)
        asked = drawing.randrange(len(pairs))
        key, value = pairs[asked]
        question, prefix = made.question.format(context=context, key=key), made.prefix.format(key=key)
        return Sample(
            index=index,
            input=question,
            outputs=(value,),
            length=self._count(question + prefix) + self.new_tokens,
            answer_prefix=prefix,
            key=key,
            needle=needles[asked],
        )

    def _pairs(self, drawing: random.Random) -> list[tuple[str, str]]:
        """Keys and their numbers, uniform, all different."""
        pairs: dict[str, str] = {}
        while len(pairs) < self.task.needles:
            key, value = drawing.choice(self.ingredients.keys), str(drawing.randint(*self.numbers))
            if key not in pairs and value not in pairs.values() and self._mine(key, value):
                pairs[key] = value
        return list(pairs.items())

    def _mine(self, key: str, value: str) -> bool:
        """Whether a pair is in this part's half."""
        if not self.divided:
            return True
        return hashlib.sha256(f"{key}: {value}".encode()).digest()[0] % 2 == (self.part == "training")

    def _lines(self, drawing: random.Random, units: int, needles: Sequence[str]) -> str:
        lines = [NOISE] * units
        places = sorted(drawing.sample(range(units), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)

    def _text(self, drawing: random.Random, units: int, needles: Sequence[str]) -> str:
        sentences = list(self.ingredients.haystack.sentences(units))
        places = sorted(int(len(sentences) * depth / 100) for depth in drawing.sample(DEPTHS, len(needles)))
        for place, needle in reversed(list(zip(places, needles, strict=True))):
            sentences.insert(place, needle)
        return " ".join(sentences)

    def _count(self, text: str) -> int:
        return len(self.tokenizer.encode(text))


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Samples as the benchmark's JSON lines. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(sample.row()) + "\n" for sample in samples), encoding="utf-8")


def read_samples(path: Path) -> list[Sample]:
    """The samples of a file of the benchmark, whichever tokenizer it was made for.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line (named) is not JSON or lacks a field.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no samples at {path}; a folder of them holds <length>/<task>.jsonl")
    lines = path.read_text(encoding="utf-8").splitlines()
    return [_read(f"{path}, line {number},", line) for number, line in enumerate(lines, 1) if line.strip()]


def _read(where: str, line: str) -> Sample:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error})") from error
    missing = [name for name in FIELDS if not isinstance(row, Mapping) or name not in row]
    if missing:
        raise ValueError(f"{where} has no field {missing[0]!r}; each line needs {', '.join(FIELDS)}")
    known = {name: row[name] for name in ("length", "answer_prefix", "token_position_answer") if name in row}
    return Sample(row["index"], row["input"], tuple(map(str, row["outputs"])), **known)
