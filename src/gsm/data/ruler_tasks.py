"""What each of RULER's kinds of tasks tells, asks and takes for right; `gsm.data.ruler` makes samples of it.

A kind draws a context of so many units (lines, words) and what is asked of it. Of its own, each says by how many units
the benchmark makes a context smaller that is too long, and how many it needs.
"""

from __future__ import annotations

import hashlib
import math
import random
import string
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gsm.data.ingredients import Ingredients, Wording

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = np.round(np.linspace(0, 100, 40)).astype(int).tolist()  # percent of the sentences that stand before a needle
MANY = 10**12  # pairs of key and number: of so many, training and evaluation hardly ever draw the same


@dataclass(frozen=True)
class Drawn:
    """What is asked, in words.

    Attributes:
        input: the prompt without its prefix.
        prefix: the end of the prompt.
        outputs: what a right answer contains.
        answer: the right answer as it is taught.
        key: what is asked for; empty where nothing is named.
        told: the needles that tell it, one for each of `outputs`; empty where there are none.
    """

    input: str
    prefix: str
    outputs: tuple[str, ...]
    answer: str
    key: str = ""
    told: tuple[str, ...] = ()


class Task(ABC):
    """A kind of task, with its numbers."""

    least: ClassVar[int] = 1  # units

    @abstractmethod
    def draw(self, made: Ingredients, part: str, drawing: random.Random, units: int, length: int, seed: int) -> Drawn:
        """One question about so many units.

        Args:
            made: what it is made of.
            part: "evaluation" or "training".
            drawing: gives all that is drawn anew for a sample.
            length: tokens that a sample may have.
            seed: of what is the same in all samples of a seed, as in the benchmark: the order of needles, and where a
                model is evaluated, that of words.
        """

    @abstractmethod
    def increment(self, length: int) -> int:
        """Units by which the benchmark makes a context smaller that is too long."""

    @abstractmethod
    def wording(self, made: Ingredients) -> Wording:
        """Its words."""

    def most(self, made: Ingredients, length: int, count: Callable[[str], int]) -> int:
        """Units that a sample of so many tokens cannot exceed."""
        return length


@dataclass(frozen=True)
class Needles(Task):
    """Keys that have values, told in a haystack.

    Attributes:
        haystack: "lines" of `NOISE`, running "text", or other "needles".
        keys: how many are told.
        values: of each key.
        asked: keys that are asked for.
        key_type, value_type: "words" or "uuids", "numbers" or "uuids".
    """

    haystack: str
    keys: int = 1
    values: int = 1
    asked: int = 1
    key_type: str = "words"
    value_type: str = "numbers"

    def draw(self, made: Ingredients, part: str, drawing: random.Random, units: int, length: int, seed: int) -> Drawn:
        """See `Task.draw`; the benchmark asks for one value in other words than for several."""
        told = self._told(made, part, drawing)
        needles = [self._needle(made, key, value) for key, values in told.items() for value in values]
        shuffled = list(needles)
        random.Random(seed).shuffle(shuffled)
        if self.haystack == "text":
            context = _between_sentences(made, drawing, units, shuffled)
        else:
            lines = [NOISE] * units
            if self.haystack == "needles":
                lines = [self._needle(made, *self._other(made, part, drawing, told)) for _ in range(units)]
            context = _between_lines(drawing, lines, shuffled)
        keys = [list(told)[index] for index in drawing.sample(range(self.keys), self.asked)]
        pairs = [(key, value) for key in keys for value in told[key]]
        values = [value for _, value in pairs]
        # Several values of a key have no order of their own: they are taught as they stand in the text.
        taught = sorted(pairs, key=lambda pair: context.index(self._needle(made, *pair))) if self.values > 1 else pairs
        asked = f"{', '.join(keys[:-1])}, and {keys[-1]}" if len(keys) > 1 else keys[0]
        words = {"type": self.value_type[:-1], "types": self.value_type, "key": asked}
        wording = self.wording(made)
        return Drawn(
            wording.question.format(context=context, **words),
            wording.prefix.format(**words),
            tuple(values),
            ", ".join(value for _, value in taught),
            asked,
            tuple(self._needle(made, *pair) for pair in pairs),
        )

    def increment(self, length: int) -> int:
        """500 words of text; 25 lines, 5 below 4K tokens."""
        return 500 if self.haystack == "text" else 25 if length >= 4096 else 5

    def wording(self, made: Ingredients) -> Wording:
        """That for one value, or that for several."""
        return made.template.one if self.asked * self.values == 1 else made.template.many

    def most(self, made: Ingredients, length: int, count: Callable[[str], int]) -> int:
        """By the tokens of the shortest line; a word has at least one."""
        shortest = {"lines": NOISE, "text": "", "needles": self._needle(made, "", "")}[self.haystack]
        return length // max(count(shortest), 1)

    def divided(self, made: Ingredients) -> bool:
        """Whether there are so few pairs that training and evaluation draw from halves."""
        return self._words and len(made.keys) * 9 * 10 ** (made.digits - 1) < MANY  # pyright: ignore[reportOptionalOperand]

    @property
    def _words(self) -> bool:
        return self.key_type == "words" and self.value_type == "numbers"

    def _told(self, made: Ingredients, part: str, drawing: random.Random) -> dict[str, list[str]]:
        """Keys with their values, uniform, all different."""
        told: dict[str, list[str]] = {}
        taken: set[str] = set()
        while len(taken) < self.keys * self.values:
            unfinished = next((key for key, values in told.items() if len(values) < self.values), None)
            key, value = self._pair(made, drawing, unfinished)
            if value not in taken and (unfinished or key not in told) and self._mine(made, part, key, value):
                told.setdefault(key, []).append(value)
                taken.add(value)
        return told

    def _other(
        self, made: Ingredients, part: str, drawing: random.Random, told: dict[str, list[str]]
    ) -> tuple[str, str]:
        """A pair for the haystack: of another key, with another value."""
        taken = {value for values in told.values() for value in values}
        while True:
            key, value = self._pair(made, drawing)
            if key not in told and value not in taken and self._mine(made, part, key, value):
                return key, value

    def _pair(self, made: Ingredients, drawing: random.Random, key: str | None = None) -> tuple[str, str]:
        if key is None:
            key = drawing.choice(made.keys) if self.key_type == "words" else _uuid(drawing)
        assert made.digits is not None  # its template has it
        lowest, highest = 10 ** (made.digits - 1), 10**made.digits - 1
        return key, str(drawing.randint(lowest, highest)) if self.value_type == "numbers" else _uuid(drawing)

    def _mine(self, made: Ingredients, part: str, key: str, value: str) -> bool:
        """Whether a pair is in this part's half."""
        if not self.divided(made):
            return True
        return hashlib.sha256(f"{key}: {value}".encode()).digest()[0] % 2 == (part == "training")

    def _needle(self, made: Ingredients, key: str, value: str) -> str:
        return made.template.needle.format(type=self.value_type[:-1], types=self.value_type, key=key, value=value)


@dataclass(frozen=True)
class Variables(Task):
    """A variable is given a number, and others the one before: which have that number?

    Before the question an example with its answer; twelve lines of noise in it (the benchmark: up to 500 tokens).

    Attributes:
        hops: variables after the first.
    """

    hops: int = 4
    least: ClassVar[int] = 5

    def draw(self, made: Ingredients, part: str, drawing: random.Random, units: int, length: int, seed: int) -> Drawn:
        """See `Task.draw`."""
        name, in_example, _ = made.template.letters
        shown = ""
        if made.template.examples:
            question, prefix, names, _ = self._ask(made, drawing, 12, in_example)
            shown = f"{question}{prefix} {' '.join(names)}\n\n"
        question, prefix, names, value = self._ask(made, drawing, units, name)
        return Drawn(shown + question, prefix, tuple(names), " ".join(names), value)

    def increment(self, length: int) -> int:
        """Ten lines, five below 4K tokens."""
        return 10 if length >= 4096 else 5

    def wording(self, made: Ingredients) -> Wording:
        """See `Task.wording`."""
        return made.template.variables

    def most(self, made: Ingredients, length: int, count: Callable[[str], int]) -> int:
        """By the tokens of a line."""
        return length // count(NOISE)

    def _ask(
        self, made: Ingredients, drawing: random.Random, units: int, letters: int
    ) -> tuple[str, str, list[str], str]:
        names: dict[str, None] = {}
        while len(names) <= self.hops:
            names["".join(drawing.choices(string.ascii_uppercase, k=letters))] = None
        chain, value = list(names), str(drawing.randrange(10_000, 99_999))
        said = [f"VAR {chain[0]} = {value}", *(f"VAR {b} = VAR {a} " for a, b in zip(chain, chain[1:], strict=False))]
        lines = [NOISE] * units
        for offset, place in enumerate(sorted(drawing.sample(range(units), len(said)))):
            lines.insert(place + offset, said[offset])
        words, wording = {"value": value, "count": len(chain)}, self.wording(made)
        context = "\n".join(lines).replace(". \n", ".\n")
        return wording.question.format(context=context, **words), wording.prefix.format(**words), chain, value


@dataclass(frozen=True)
class CommonWords(Task):
    """A numbered list in which some words come more often than all others: which?"""

    least: ClassVar[int] = 11

    def draw(self, made: Ingredients, part: str, drawing: random.Random, units: int, length: int, seed: int) -> Drawn:
        """See `Task.draw`. A unit is a different word: ten times as frequent, if common, from 4K tokens on."""
        long = length >= 4096
        shown, order = "", _order(part, drawing, seed)
        if made.template.examples:
            question, prefix, words = self._ask(made, drawing, *((40, 10, 3) if long else (20, 3, 1)), order)
            shown = f"{question}{prefix} {_numbered(words)}\n"
        question, prefix, words = self._ask(made, drawing, units, *((30, 3) if long else (6, 1)), order)
        return Drawn(shown + question, prefix, tuple(words), _numbered(words))

    def increment(self, length: int) -> int:
        """Ten different words."""
        return 10

    def wording(self, made: Ingredients) -> Wording:
        """See `Task.wording`."""
        return made.template.common

    def most(self, made: Ingredients, length: int, count: Callable[[str], int]) -> int:
        """As many as there are different words: a list of all may be shorter than the length."""
        return min(length, len(made.words))

    def _ask(
        self, made: Ingredients, drawing: random.Random, units: int, often: int, seldom: int, order: int
    ) -> tuple[str, str, list[str]]:
        drawn = drawing.sample(made.words, units)
        common, others = drawn[: made.template.words], drawn[made.template.words :]
        words = common * often + others * seldom
        random.Random(order).shuffle(words)
        wording, count = self.wording(made), made.template.words
        return (
            wording.question.format(context=_numbered(words), count=count),
            wording.prefix.format(count=count),
            common,
        )


@dataclass(frozen=True)
class FrequentWords(Task):
    """Words of random letters, word k as often as 1 / k^2 of all, the first one dots: which are the next three?"""

    least: ClassVar[int] = 53  # words: the fourth is then more frequent than the fifth

    def draw(self, made: Ingredients, part: str, drawing: random.Random, units: int, length: int, seed: int) -> Drawn:
        """See `Task.draw`. A unit is a word of the text; so many are different as a fiftieth of the tokens."""
        letters, drawn = made.template.letters[2], set()
        while len(drawn) < max(8, (length - self.wording(made).new_tokens) // 50):
            drawn.add("".join(drawing.choices(string.ascii_lowercase, k=letters)))
        words, order = sorted(drawn), _order(part, drawing, seed)
        random.Random(order).shuffle(words)
        words[0] = "..."
        often = [int(units / rank**2 / (math.pi**2 / 6)) for rank in range(1, len(words) + 1)]
        text = [word for word, count in zip(words, often, strict=True) for _ in range(count)]
        random.Random(order).shuffle(text)
        wording, frequent = self.wording(made), words[1:4]
        return Drawn(
            wording.question.format(context=" ".join(text)), wording.prefix, tuple(frequent), " ".join(frequent)
        )

    def increment(self, length: int) -> int:
        """A thirty-second of the tokens."""
        return max(1, length // 32)

    def wording(self, made: Ingredients) -> Wording:
        """See `Task.wording`."""
        return made.template.frequent


TASKS: dict[str, Task] = {
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


def _between_lines(drawing: random.Random, lines: Sequence[str], needles: Sequence[str]) -> str:
    among = list(lines)
    places = sorted(drawing.sample(range(len(lines)), len(needles)), reverse=True)
    for place, needle in zip(places, needles, strict=True):
        among.insert(place, needle)
    return "\n".join(among)


def _between_sentences(made: Ingredients, drawing: random.Random, units: int, needles: Sequence[str]) -> str:
    sentences = list(made.haystack.sentences(units))
    places = sorted(int(len(sentences) * depth / 100) for depth in drawing.sample(DEPTHS, len(needles)))
    for place, needle in reversed(list(zip(places, needles, strict=True))):
        sentences.insert(place, needle)
    return " ".join(sentences)


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def _order(part: str, drawing: random.Random, seed: int) -> int:
    """What orders words: the same for all samples of a seed, as in the benchmark; in training one for each, or the
    places of what is asked for could be learned."""
    return drawing.getrandbits(32) if part == "training" else seed


def _uuid(drawing: random.Random) -> str:
    return str(uuid.UUID(int=drawing.getrandbits(128), version=4))
