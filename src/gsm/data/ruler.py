"""RULER's needle tasks (Hsieh et al., 2024; NVIDIA/RULER, Apache-2.0, whose wording this is).

    niah_single_1     one line over and over, one needle among the lines
    niah_single_2     running text, one needle between two sentences
    niah_multikey_1   running text, four needles with four keys; one of them is asked for
    niah_multikey_2   a needle among lines that are needles with other keys

A needle gives a number to a key. The question asks for it, and the prompt ends where the answer begins:

    <question, first half> <haystack with needles> <question, second half> <answer prefix> | <number>

A sample is as long as fits: tokens of the prompt and tokens kept free for the answer are at most the length. The paper
asks all but the last one, which teaches small models to find a key. lm-eval has all thirteen, as its group `ruler`.

Differences from the benchmark: every sample draws its random numbers from (seed, task, length, index), so that it does
not depend on the number of samples. All keys of a sample differ, and so do their numbers. The search for the size of
the haystack starts without an estimate, and takes steps of a single unit where the benchmark's step is too coarse.
`Ingredients.facts` has the other choices.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from gsm.data.ingredients import Ingredients
from gsm.data.tokenizer import Tokenizer

SEED = 42
TRIES = 1000  # draws of a sample before its length counts as too short
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = np.round(np.linspace(0, 100, 40)).astype(int).tolist()  # percent of the sentences that stand before a needle
MANY = 10**12  # pairs of key and number: training and evaluation hardly ever draw the same pair of this number
LONG = 4096  # tokens: from this length on the benchmark takes larger steps


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A question with its answer.

    Attributes:
        index: its number.
        input: the prompt without its prefix.
        outputs: strings that a right answer contains: the number.
        length: tokens of the prompt and tokens kept free for the answer.
        answer_prefix: the end of the prompt.
        answer: the right answer as training teaches it.
        key: the key of the question.
        needle: the sentence with the answer.
    """

    index: int = 0
    input: str
    outputs: tuple[str, ...]
    length: int = 0
    answer_prefix: str
    answer: str
    key: str
    needle: str

    @property
    def prompt(self) -> str:
        """The whole prompt of a model."""
        return self.input + self.answer_prefix


@dataclass(frozen=True)
class Draw:
    """The circumstances in which a sample is drawn.

    Attributes:
        made: the ingredients.
        part: "evaluation" or "training".
        random: the source of everything that differs between samples.
        seed: of what all samples of a seed share, as in the benchmark: the order of needles.
    """

    made: Ingredients
    part: str
    random: random.Random
    seed: int


@dataclass(frozen=True)
class Needles:
    """A task: a context of a number of units (lines, or words of text) with needles in it, and a question about one.

    Attributes:
        haystack: "lines" of `NOISE`, running "text", or other "needles".
        keys: number of needles besides those of the haystack, each with a key of its own.
    """

    haystack: str
    keys: int = 1

    def draw(self, draw: Draw, units: int) -> Sample:
        """Return one question about a context of `units`."""
        value_of: dict[str, str] = {}
        while len(value_of) < self.keys:
            key, value = self._pair(draw, value_of)
            value_of[key] = value
        needles = [draw.made.needle(*pair) for pair in value_of.items()]
        random.Random(draw.seed).shuffle(needles)
        if self.haystack == "text":
            context = _between_sentences(draw, units, needles)
        else:
            lines = [NOISE] * units
            if self.haystack == "needles":
                lines = [draw.made.needle(*self._pair(draw, value_of)) for _ in range(units)]
            context = _between_lines(draw, lines, needles)
        key = draw.random.choice(list(value_of))
        template, value = draw.made.template, value_of[key]
        return Sample(
            input=template.question.format(context=context, key=key),
            outputs=(value,),
            answer_prefix=template.prefix.format(key=key),
            answer=value,
            key=key,
            needle=draw.made.needle(key, value),
        )

    def increment(self, length: int) -> int:
        """Return the units by which the benchmark shrinks a context that is too long for samples of `length`: 500 words
        of text; 25 lines, or 5 below 4K tokens."""
        return 500 if self.haystack == "text" else 25 if length >= LONG else 5

    def shortest(self, made: Ingredients) -> str:
        """Return the text of the shortest unit."""
        return {"lines": NOISE, "text": "", "needles": made.needle("", "")}[self.haystack]

    def _pair(self, draw: Draw, taken: Mapping[str, str]) -> tuple[str, str]:
        """Draw a key and a number, uniformly, that are not taken."""
        digits = draw.made.template.digits
        while True:
            key = draw.random.choice(draw.made.keys)
            value = str(draw.random.randint(10 ** (digits - 1), 10**digits - 1))
            if key not in taken and value not in taken.values() and self._allowed(draw, key, value):
                return key, value

    def _allowed(self, draw: Draw, key: str, value: str) -> bool:
        """Return whether this part draws a pair. Training and evaluation have disjoint halves where pairs are few."""
        if len(draw.made.keys) * 9 * 10 ** (draw.made.template.digits - 1) >= MANY:
            return True
        return hashlib.sha256(f"{key}: {value}".encode()).digest()[0] % 2 == (draw.part == "training")


TASKS = {
    "niah_single_1": Needles("lines"),
    "niah_single_2": Needles("text"),
    "niah_multikey_1": Needles("text", keys=4),
    "niah_multikey_2": Needles("needles"),
}


class Questions:
    """The samples of one task for one tokenizer.

    Where few pairs of key and number exist, training and evaluation draw from disjoint halves.

    Args:
        task: one of `TASKS`.
        tokenizer: counts the tokens.
        ingredients: the parts of samples.
        part: "evaluation" or "training".

    Attributes:
        new_tokens: tokens kept free for an answer.

    Raises:
        ValueError: the task or the part is unknown.
    """

    def __init__(self, task: str, tokenizer: Tokenizer, ingredients: Ingredients, part: str = "evaluation") -> None:
        if task not in TASKS or part not in ("evaluation", "training"):
            raise ValueError(f"task must be {', '.join(TASKS)}, and part evaluation or training, got {task} and {part}")
        self.name, self.task, self.tokenizer, self.part = task, TASKS[task], tokenizer, part
        self.ingredients = ingredients
        self.new_tokens = ingredients.new_tokens or ingredients.template.new_tokens
        self.size = cache(self._size)

    def sample(self, index: int, length: int, seed: int = SEED) -> Sample:
        """Return the sample of a number, of at most `length` tokens.

        As in the benchmark, a sample that is too long is drawn again with a smaller haystack. Raise ValueError for a
        length that holds no sample.
        """
        units, increment = self.size(length, seed)
        draw = self._draw(length, seed, index)
        sample, tries = self.task.draw(draw, units), 1
        while (tokens := self._tokens(sample)) > length:
            if tries == TRIES:
                raise self._too_short(length, tokens)
            units -= increment if units - increment >= 1 else 0
            sample, tries = self.task.draw(draw, units), tries + 1
        return replace(sample, index=index, length=tokens)

    def _size(self, length: int, seed: int) -> tuple[int, int]:
        """Return the largest haystack that fits, in units, and its increment.

        A binary search, with a draw for each step: prompts with other keys may be some tokens longer.
        """
        draw = self._draw(length, seed, "size")
        most = length // max(self._count(self.task.shortest(self.ingredients)), 1)  # a word has at least one token
        for increment in (self.ingredients.template.increment or self.task.increment(length), 1):
            low = first = increment
            high = max(most, first)
            while low <= high:
                middle = (low + high) // 2
                if self._tokens(self.task.draw(draw, middle)) <= length:
                    low = middle + 1
                else:
                    high = middle - 1
            if high >= first:
                return high, increment
        raise self._too_short(length, self._tokens(self.task.draw(draw, 1)))

    def _draw(self, length: int, seed: int, index: int | str) -> Draw:
        numbers = random.Random(f"{seed}/{self.part}/{self.name}/{length}/{index}")
        return Draw(self.ingredients, self.part, numbers, seed)

    def _too_short(self, length: int, least: int) -> ValueError:
        remedy = "" if self.ingredients.template.name == "short" else "; template=short takes less"
        return ValueError(
            f"length must be at least {least} for a sample of {self.name} with {self.new_tokens} new tokens "
            f"(new_tokens), got {length}{remedy}"
        )

    def _tokens(self, sample: Sample) -> int:
        """Return the tokens of the prompt and those kept free."""
        return self._count(sample.prompt) + self.new_tokens

    def _count(self, text: str) -> int:
        return len(self.tokenizer.encode(text))


def _between_lines(draw: Draw, lines: Sequence[str], needles: Sequence[str]) -> str:
    context = list(lines)
    places = sorted(draw.random.sample(range(len(lines)), len(needles)), reverse=True)
    for place, needle in zip(places, needles, strict=True):
        context.insert(place, needle)
    return "\n".join(context)


def _between_sentences(draw: Draw, units: int, needles: Sequence[str]) -> str:
    sentences = list(draw.made.haystack.sentences(units))
    places = sorted(int(len(sentences) * depth / 100) for depth in draw.random.sample(DEPTHS, len(needles)))
    for place, needle in reversed(list(zip(places, needles, strict=True))):
        sentences.insert(place, needle)
    return " ".join(sentences)
