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

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from gsm.data.ingredients import Ingredients
from gsm.data.ruler_tasks import TASKS, Draw, Sample
from gsm.data.tokenizer import Tokenizer
from gsm.files import read_text

SEED = 42
TRIES = 1000  # draws of a sample, of which none fits
FIELDS = ("index", "input", "outputs")  # required fields of a line of JSON


class Questions:
    """The samples of one task for one tokenizer.

    Where few pairs of key and number exist, training and evaluation draw from disjoint halves.

    Args:
        task: one of `TASKS`.
        tokenizer: counts the tokens.
        ingredients: what samples are made of.
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
        position = -1
        if sample.needles:
            before = sample.input.index(sample.needles[0]) + sample.needles[0].rindex(sample.outputs[0])
            position = self._count(sample.input[:before])
        return replace(sample, index=index, length=tokens, token_position_answer=position)

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


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Write samples as the benchmark's JSON lines. Raise OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(sample.row()) + "\n" for sample in samples), encoding="utf-8")


def read_samples(path: Path) -> list[Sample]:
    """Return the samples in a file of the benchmark, made for any tokenizer.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line (named) is not JSON or lacks a field.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no samples at {path}; a folder of them holds <length>/<task>.jsonl")
    lines = read_text(path).splitlines()
    return [_read(f"{path}, line {number},", line) for number, line in enumerate(lines, 1) if line.strip()]


def _read(where: str, line: str) -> Sample:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error})") from error
    missing = [name for name in FIELDS if not isinstance(row, Mapping) or name not in row]
    if missing:
        raise ValueError(f"{where} has no field {missing[0]!r}; each line needs {', '.join(FIELDS)}")
    fields = ("index", "input", "length", "answer_prefix", "token_position_answer")
    return Sample(outputs=tuple(map(str, row["outputs"])), **{name: row[name] for name in fields if name in row})
