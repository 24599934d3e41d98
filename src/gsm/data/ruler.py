"""RULER's tasks (Hsieh et al., 2024; NVIDIA/RULER, Apache-2.0, whose wording this is), but for its two of questions
about documents.

    niah_single_1     one line over and over, one needle among the lines
    niah_single_2     running text, one needle between two sentences
    niah_single_3     the same, with a UUID for a number
    niah_multikey_1   running text, four needles with four keys; one of them is asked for
    niah_multikey_2   a needle among lines that are needles with other keys
    niah_multikey_3   the same, and keys and values are UUIDs
    niah_multivalue   running text, four needles with one key; all four values are asked for
    niah_multiquery   running text, four needles with four keys, all asked for
    vt                among lines, a variable with a number and four that are given its value: which have that number?
    cwe               a numbered list in which ten words come ten times as often as all others: which?
    fwe               words of random letters, word k as often as 1 / k^2 of all: which are the three most frequent?

A needle gives a number to a key. The question asks for it, and the prompt ends where the answer begins:

    <question, first half> <haystack with needles> <question, second half> <answer prefix> | <number>

A sample is as long as fits: tokens of the prompt and tokens kept free for the answer are at most the length.

Differences from the benchmark: every sample draws its random numbers from (seed, task, length, index), so that it does
not depend on the number of samples; keys of a sample differ, and so do their numbers (of millions, they do anyway); the
search for the size of the haystack has no upper estimate, and goes down to a single unit where the benchmark's step
is too coarse; `vt`'s example has twelve lines of noise; `cwe`'s words are those of the keys, then those of the
haystack. `Ingredients.facts` has the other choices.

A kind of task draws a context of a number of units (lines, words), a question about it, and the answer.
"""

from __future__ import annotations

import hashlib
import math
import random
import string
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import numpy as np

from gsm.data.ingredients import Ingredients, Wording
from gsm.data.tokenizer import Tokenizer

SEED = 42
TRIES = 1000  # draws of a sample, of which none fits
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = np.round(np.linspace(0, 100, 40)).astype(int).tolist()  # percent of the sentences that stand before a needle
MANY = 10**12  # pairs of key and number: training and evaluation hardly ever draw the same pair of this number
LONG = 4096  # tokens: from this length on the benchmark takes larger steps and more repetitions


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A question with its answer.

    Attributes:
        index: its number.
        input: the prompt without its prefix.
        outputs: strings that a right answer contains.
        length: tokens of the prompt and tokens kept free for the answer.
        answer_prefix: the end of the prompt.
        answer: the right answer as training teaches it.
        key: the key of the question; empty for a task without keys.
        needles: the sentences with the answer, one for each of `outputs`; empty for a task without needles.
    """

    index: int = 0
    input: str
    outputs: tuple[str, ...]
    length: int = 0
    answer_prefix: str = ""
    answer: str = ""
    key: str = ""
    needles: tuple[str, ...] = ()

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
        length: most tokens of the sample.
        seed: of the parts that all samples of a seed share, as in the benchmark: the order of needles, and in
            evaluation the order of words.
    """

    made: Ingredients
    part: str
    random: random.Random
    length: int
    seed: int

    def order(self) -> int:
        """Return the seed of the order of words. In training each sample has its own, or places could be learned."""
        return self.random.getrandbits(32) if self.part == "training" else self.seed


class RulerTask:
    """A kind of task, with its numbers.

    Attributes:
        least: units that a context needs.
        words: the field of `Template` with the words of the question.
    """

    least: ClassVar[int] = 1
    words: ClassVar[str]

    def draw(self, draw: Draw, units: int) -> Sample:
        """Return one question about a context of `units`."""
        raise NotImplementedError

    def increment(self, length: int) -> int:
        """Return the units by which the benchmark shrinks a context that is too long for samples of `length`."""
        return 10

    def wording(self, made: Ingredients) -> Wording:
        """Return the words of the question."""
        return getattr(made.template, self.words)

    def most(self, made: Ingredients, length: int, count: Callable[[str], int]) -> int:
        """Return an upper bound of the units of a sample of `length` tokens; `count` counts the tokens of a text."""
        return length


@dataclass(frozen=True)
class Needles(RulerTask):
    """Needles in a haystack: sentences that give values to keys.

    Attributes:
        haystack: "lines" of `NOISE`, running "text", or other "needles".
        keys: number of keys in the haystack.
        values: values of each key.
        asked: number of keys in the question.
        key_type, value_type: "words" or "uuids", "numbers" or "uuids".
    """

    haystack: str
    keys: int = 1
    values: int = 1
    asked: int = 1
    key_type: str = "words"
    value_type: str = "numbers"

    def draw(self, draw: Draw, units: int) -> Sample:
        """See `RulerTask.draw`. As in the benchmark, the words for one value are other words than those for several."""
        values_of = self._needles(draw)
        needles = [self._needle(draw.made, key, value) for key, values in values_of.items() for value in values]
        random.Random(draw.seed).shuffle(needles)
        if self.haystack == "text":
            context = _between_sentences(draw, units, needles)
        else:
            lines = [NOISE] * units
            if self.haystack == "needles":
                lines = [self._needle(draw.made, *self._other(draw, values_of)) for _ in range(units)]
            context = _between_lines(draw, lines, needles)
        keys = [list(values_of)[index] for index in draw.random.sample(range(self.keys), self.asked)]
        pairs = [(key, value) for key in keys for value in values_of[key]]
        # Several values of a key have no order of their own: they are taught as they stand in the text.
        place = lambda pair: context.index(self._needle(draw.made, *pair))  # noqa: E731
        taught = sorted(pairs, key=place) if self.values > 1 else pairs
        listed = f"{', '.join(keys[:-1])}, and {keys[-1]}" if len(keys) > 1 else keys[0]
        words = {"type": self.value_type[:-1], "types": self.value_type, "key": listed}
        wording = self.wording(draw.made)
        return Sample(
            input=wording.question.format(context=context, **words),
            outputs=tuple(value for _, value in pairs),
            answer_prefix=wording.prefix.format(**words),
            answer=", ".join(value for _, value in taught),
            key=listed,
            needles=tuple(self._needle(draw.made, *pair) for pair in pairs),
        )

    def increment(self, length: int) -> int:
        """Return 500 words of text; 25 lines, or 5 below 4K tokens."""
        return 500 if self.haystack == "text" else 25 if length >= LONG else 5

    def wording(self, made: Ingredients) -> Wording:
        """Return the words for one value, or those for several."""
        return made.template.one if self.asked * self.values == 1 else made.template.many

    def most(self, made: Ingredients, length: int, count: Callable[[str], int]) -> int:
        """Return the bound by the tokens of the shortest line. A word has at least one."""
        shortest = {"lines": NOISE, "text": "", "needles": self._needle(made, "", "")}[self.haystack]
        return length // max(count(shortest), 1)

    def _needles(self, draw: Draw) -> dict[str, list[str]]:
        """Draw keys with their values, uniformly, all different."""
        values_of: dict[str, list[str]] = {}
        taken: set[str] = set()
        while len(taken) < self.keys * self.values:
            unfinished = next((key for key, values in values_of.items() if len(values) < self.values), None)
            key, value = self._pair(draw, unfinished)
            if value not in taken and (unfinished or key not in values_of) and self._allowed(draw, key, value):
                values_of.setdefault(key, []).append(value)
                taken.add(value)
        return values_of

    def _other(self, draw: Draw, values_of: Mapping[str, Sequence[str]]) -> tuple[str, str]:
        """Draw a pair for the haystack: of another key, with another value."""
        taken = {value for values in values_of.values() for value in values}
        while True:
            key, value = self._pair(draw)
            if key not in values_of and value not in taken and self._allowed(draw, key, value):
                return key, value

    def _pair(self, draw: Draw, key: str | None = None) -> tuple[str, str]:
        if key is None:
            key = draw.random.choice(draw.made.keys) if self.key_type == "words" else _uuid(draw)
        digits = draw.made.template.digits
        number = self.value_type == "numbers"
        return key, str(draw.random.randint(10 ** (digits - 1), 10**digits - 1)) if number else _uuid(draw)

    def _allowed(self, draw: Draw, key: str, value: str) -> bool:
        """Return whether this part draws a pair. Training and evaluation have disjoint halves where pairs are few."""
        random_ids = "uuids" in (self.key_type, self.value_type)
        if random_ids or len(draw.made.keys) * 9 * 10 ** (draw.made.template.digits - 1) >= MANY:
            return True
        return hashlib.sha256(f"{key}: {value}".encode()).digest()[0] % 2 == (draw.part == "training")

    def _needle(self, made: Ingredients, key: str, value: str) -> str:
        return made.template.needle.format(type=self.value_type[:-1], types=self.value_type, key=key, value=value)


@dataclass(frozen=True)
class Variables(RulerTask):
    """A variable is given a number, and each of the others the one before: which have that number?

    Before the question stands an example with its answer and twelve lines of noise (the benchmark: up to 500 tokens).
    """

    least: ClassVar[int] = 5  # lines, one for each variable
    words: ClassVar[str] = "variables"

    def draw(self, draw: Draw, units: int) -> Sample:
        """See `RulerTask.draw`. A unit is a line."""
        letters, letters_of_example, _ = draw.made.template.letters
        example = ""
        if draw.made.template.examples:
            shown = self._ask(draw, 12, letters_of_example)
            example = f"{shown.prompt} {shown.answer}\n\n"
        return _after(example, self._ask(draw, units, letters))

    def increment(self, length: int) -> int:
        """Return 10 lines, or 5 below 4K tokens."""
        return 10 if length >= LONG else 5

    def most(self, made: Ingredients, length: int, count: Callable[[str], int]) -> int:
        """Return the bound by the tokens of a line."""
        return length // count(NOISE)

    def _ask(self, draw: Draw, units: int, letters: int) -> Sample:
        names: dict[str, None] = {}
        while len(names) < self.least:
            names["".join(draw.random.choices(string.ascii_uppercase, k=letters))] = None
        chain, value = list(names), str(draw.random.randrange(10_000, 99_999))
        assignments = [
            f"VAR {chain[0]} = {value}",
            *(f"VAR {b} = VAR {a} " for a, b in zip(chain, chain[1:], strict=False)),
        ]
        lines = [NOISE] * units
        for offset, place in enumerate(sorted(draw.random.sample(range(units), len(assignments)))):
            lines.insert(place + offset, assignments[offset])
        words, wording = {"value": value, "count": len(chain)}, self.wording(draw.made)
        context = "\n".join(lines).replace(". \n", ".\n")
        return Sample(
            input=wording.question.format(context=context, **words),
            outputs=tuple(chain),
            answer_prefix=wording.prefix.format(**words),
            answer=" ".join(chain),
            key=value,
        )


@dataclass(frozen=True)
class CommonWords(RulerTask):
    """A numbered list in which some words come more often than all others: which?"""

    least: ClassVar[int] = 11
    words: ClassVar[str] = "common"

    def draw(self, draw: Draw, units: int) -> Sample:
        """See `RulerTask.draw`. A unit is a new word. From 4K tokens on, common words are ten times as frequent."""
        long, order, example = draw.length >= LONG, draw.order(), ""
        if draw.made.template.examples:
            shown = self._ask(draw, *((40, 10, 3) if long else (20, 3, 1)), order)
            example = f"{shown.prompt} {shown.answer}\n"
        return _after(example, self._ask(draw, units, *((30, 3) if long else (6, 1)), order))

    def most(self, made: Ingredients, length: int, count: Callable[[str], int]) -> int:
        """Return the number of different words: a list of all may be shorter than the length."""
        return min(length, len(made.words))

    def _ask(self, draw: Draw, units: int, often: int, seldom: int, order: int) -> Sample:
        count = draw.made.template.words
        different = draw.random.sample(draw.made.words, units)
        common, rare = different[:count], different[count:]
        words = common * often + rare * seldom
        random.Random(order).shuffle(words)
        wording = self.wording(draw.made)
        return Sample(
            input=wording.question.format(context=_numbered(words), count=count),
            outputs=tuple(common),
            answer_prefix=wording.prefix.format(count=count),
            answer=_numbered(common),
        )


@dataclass(frozen=True)
class FrequentWords(RulerTask):
    """Words of random letters. Word k is 1 / k^2 of all; the first is dots. Which are the next three?"""

    least: ClassVar[int] = 53  # words: the fourth is then more frequent than the fifth
    words: ClassVar[str] = "frequent"

    def draw(self, draw: Draw, units: int) -> Sample:
        """See `RulerTask.draw`. A unit is a word of the text. A fiftieth of the tokens is the number of new words."""
        letters, different, wording = draw.made.template.letters[2], set[str](), self.wording(draw.made)
        while len(different) < max(8, (draw.length - wording.new_tokens) // 50):
            different.add("".join(draw.random.choices(string.ascii_lowercase, k=letters)))
        words, order = sorted(different), draw.order()
        random.Random(order).shuffle(words)
        words[0] = "..."
        counts = [int(units / rank**2 / (math.pi**2 / 6)) for rank in range(1, len(words) + 1)]
        text = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
        random.Random(order).shuffle(text)
        return Sample(
            input=wording.question.format(context=" ".join(text)),
            outputs=tuple(words[1:4]),
            answer_prefix=wording.prefix,
            answer=" ".join(words[1:4]),
        )

    def increment(self, length: int) -> int:
        """Return a thirty-second of the tokens."""
        return max(1, length // 32)


TASKS: dict[str, RulerTask] = {
    "niah_single_1": Needles("lines"),
    "niah_single_2": Needles("text"),
    "niah_single_3": Needles("text", value_type="uuids"),
    "niah_multikey_1": Needles("text", keys=4),
    "niah_multikey_2": Needles("needles"),
    "niah_multikey_3": Needles("needles", key_type="uuids", value_type="uuids"),
    "niah_multivalue": Needles("text", values=4),
    "niah_multiquery": Needles("text", keys=4, asked=4),
    "vt": Variables(),
    "cwe": CommonWords(),
    "fwe": FrequentWords(),
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
            raise ValueError(
                f"task={task} with part={part} is not allowed because it is unknown. Use {', '.join(TASKS)}, with the "
                "part evaluation or training."
            )
        self.name, self.task, self.tokenizer, self.part = task, TASKS[task], tokenizer, part
        self.ingredients = ingredients
        self.new_tokens = ingredients.new_tokens or self.task.wording(ingredients).new_tokens
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
            units -= increment if units - increment >= self.task.least else 0
            sample, tries = self.task.draw(draw, units), tries + 1
        return replace(sample, index=index, length=tokens)

    def _size(self, length: int, seed: int) -> tuple[int, int]:
        """Return the largest haystack that fits, in units, and its increment.

        A binary search, with a draw for each step: prompts with other keys may be some tokens longer.
        """
        draw, least = self._draw(length, seed, "size"), self.task.least
        most = self.task.most(self.ingredients, length, self._count)
        for increment in (self.ingredients.template.increment or self.task.increment(length), 1):
            low = first = max(increment, least)
            high = max(most, first)
            while low <= high:
                middle = (low + high) // 2
                if self._tokens(self.task.draw(draw, middle)) <= length:
                    low = middle + 1
                else:
                    high = middle - 1
            if high >= first:
                return high, increment
        raise self._too_short(length, self._tokens(self.task.draw(draw, least)))

    def _draw(self, length: int, seed: int, index: int | str) -> Draw:
        numbers = random.Random(f"{seed}/{self.part}/{self.name}/{length}/{index}")
        return Draw(self.ingredients, self.part, numbers, length, seed)

    def _too_short(self, length: int, least: int) -> ValueError:
        remedy = "" if self.ingredients.template.name == "short" else ", or template=short"
        return ValueError(
            f"length={length} is not allowed because a sample of {self.name} takes {least} tokens with hardly any "
            f"haystack, {self.new_tokens} of them (new_tokens) for the answer. Use longer lengths{remedy}."
        )

    def _tokens(self, sample: Sample) -> int:
        """Return the tokens of the prompt and those kept free."""
        return self._count(sample.prompt) + self.new_tokens

    def _count(self, text: str) -> int:
        return len(self.tokenizer.encode(text))


def _after(example: str, question: Sample) -> Sample:
    return replace(question, input=example + question.input)


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


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def _uuid(draw: Draw) -> str:
    return str(uuid.UUID(int=draw.random.getrandbits(128), version=4))
