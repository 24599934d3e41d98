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
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

from gsm.data.ingredients import Ingredients
from gsm.data.ruler_tasks import TASKS, Draw, Sample
from gsm.data.tokenizer import Tokenizer

SEED = 42
TRIES = 1000  # draws of a sample, of which none fits


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

    def __init__(
        self, task: str, tokenizer: Tokenizer, ingredients: Ingredients | None = None, part: str = "evaluation"
    ) -> None:
        if task not in TASKS or part not in ("evaluation", "training"):
            values = f"{', '.join(TASKS)}, and of part evaluation, training"
            raise ValueError(f"unknown task {task!r} or part {part!r}; the known values of task are {values}")
        self.name, self.task, self.tokenizer, self.part = task, TASKS[task], tokenizer, part
        self.ingredients = made = ingredients or Ingredients()
        self.new_tokens = made.new_tokens or self.task.wording(made).new_tokens
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
        for increment in (self.ingredients.increment or self.task.increment(length), 1):
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
        remedy = "take longer ones" + ("" if self.ingredients.template.name == "short" else ", or template short")
        return ValueError(
            f"length {length} is too short for {self.name}: with hardly any haystack a sample takes {least} tokens, "
            f"{self.new_tokens} of them (new_tokens) for the answer; {remedy}"
        )

    def _tokens(self, sample: Sample) -> int:
        """Return the tokens of the prompt and those kept free."""
        return self._count(sample.prompt) + self.new_tokens

    def _count(self, text: str) -> int:
        return len(self.tokenizer.encode(text))
