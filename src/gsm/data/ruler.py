"""RULER's tasks (Hsieh et al., 2024; NVIDIA/RULER, Apache-2.0, whose wording this is), but for its two of questions
about documents.

    niah_single_1     one line over and over, one needle among the lines
    niah_single_2     running text, one needle between two sentences
    niah_single_3     the same, and what the needle tells is a UUID
    niah_multikey_1   running text, four needles with four keys; one of them is asked for
    niah_multikey_2   a needle among lines that are needles with other keys
    niah_multikey_3   the same, and keys and values are UUIDs
    niah_multivalue   running text, four needles with one key; all four values are asked for
    niah_multiquery   running text, four needles with four keys, all asked for
    vt                among lines, a variable with a number and four that are given its value: which have that number?
    cwe               a numbered list in which ten words come ten times as often as all others: which?
    fwe               words of random letters, word k as often as 1 / k^2 of all: which are the three most frequent?

A needle says that a key has a number, the question asks for it, and the prompt ends where the answer begins:

    <question, first half> <haystack with needles> <question, second half> <answer prefix> | <number>

A sample is as long as fits: tokens of the prompt and those kept free for the answer are at most the length.

What differs from the benchmark: every sample draws its random numbers from (seed, task, length, index), so that it does
not depend on how many are made; keys of a sample differ, and so do their numbers (of millions, they do anyway); the
search for the size of the haystack has no upper estimate, and goes down to a single unit where the benchmark's step
is too coarse; `vt`'s example has twelve lines of noise; `cwe`'s words are those of the keys, then those of the
haystack. `Ingredients.facts` says what else was chosen otherwise.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gsm.data.ingredients import Ingredients
from gsm.data.ruler_tasks import TASKS, Drawn
from gsm.data.tokenizer import Tokenizer

SEED = 42
TRIES = 1000  # samples drawn anew, when none fits
FIELDS = ("index", "input", "outputs")  # of a line of JSON, what is needed


@dataclass(frozen=True)
class Sample:
    """A question. The benchmark's fields, and of those that are made here answer, key and needle.

    Attributes:
        index: its number.
        input: the prompt without its prefix.
        outputs: what a right answer contains.
        length: tokens of the prompt, and those kept free.
        answer_prefix: the end of the prompt.
        token_position_answer: tokens before the number that a needle tells; -1: not known.
        answer: the right one, as it is taught.
        key: what is asked for; empty where nothing is named.
        needle: the sentences that tell it; empty where there are none.
    """

    index: int
    input: str
    outputs: tuple[str, ...]
    length: int = 0
    answer_prefix: str = ""
    token_position_answer: int = -1
    answer: str = ""
    key: str = ""
    needle: str = ""

    @property
    def prompt(self) -> str:
        """All that a model is given."""
        return self.input + self.answer_prefix

    def row(self) -> dict[str, Any]:
        """The fields that a line of the benchmark's JSON has; without a chat template both lengths are equal."""
        row = {name: value for name, value in asdict(self).items() if name not in ("answer", "key", "needle")}
        return {**row, "outputs": list(self.outputs), "length_w_model_temp": self.length}


class Questions:
    """The samples of one task for one tokenizer.

    Where few pairs of key and number exist, training and evaluation draw from disjoint halves.

    Args:
        task: one of `TASKS`.
        tokenizer: counts the tokens.
        ingredients: what samples are made of.
        part: "evaluation" or "training".

    Attributes:
        new_tokens: kept free for an answer.

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
        self.new_tokens = made.new_tokens or self.task.wording(made).new_tokens
        self.size = cache(self._size)

    def sample(self, index: int, length: int, seed: int = SEED) -> Sample:
        """The sample with a number, of at most `length` tokens; as in the benchmark, one that is too long is drawn
        again with a smaller haystack. Raises ValueError for a length that holds no sample."""
        units, increment = self.size(length, seed)
        drawing = random.Random(f"{seed}/{self.part}/{self.name}/{length}/{index}")
        drawn, tries = self._draw(drawing, units, length, seed), 1
        while (tokens := self._tokens(drawn)) > length:
            if tries == TRIES:
                raise self._too_short(length, tokens)
            units -= increment if units - increment >= self.task.least else 0
            drawn, tries = self._draw(drawing, units, length, seed), tries + 1
        position = -1
        if drawn.told:
            before = drawn.input.index(drawn.told[0]) + drawn.told[0].rindex(drawn.outputs[0])
            position = self._count(drawn.input[:before])
        return Sample(
            index=index,
            input=drawn.input,
            outputs=drawn.outputs,
            length=tokens,
            answer_prefix=drawn.prefix,
            token_position_answer=position,
            answer=drawn.answer,
            key=drawn.key,
            needle=" ".join(drawn.told),
        )

    def _size(self, length: int, seed: int) -> tuple[int, int]:
        """The largest haystack that was found to fit, in units, and what it shrinks by. A draw for each step of a
        binary search: prompts with other keys may be some tokens longer."""
        drawing = random.Random(f"{seed}/{self.part}/{self.name}/{length}/size")
        most, least = self.task.most(self.ingredients, length, self._count), self.task.least
        for increment in (self.ingredients.increment or self.task.increment(length), 1):
            low = first = max(increment, least)
            high = max(most, first)
            while low <= high:
                middle = (low + high) // 2
                if self._tokens(self._draw(drawing, middle, length, seed)) <= length:
                    low = middle + 1
                else:
                    high = middle - 1
            if high >= first:
                return high, increment
        raise self._too_short(length, self._tokens(self._draw(drawing, least, length, seed)))

    def _too_short(self, length: int, least: int) -> ValueError:
        remedy = "take longer ones" + ("" if self.ingredients.template.name == "short" else ", or template short")
        return ValueError(
            f"length {length} is too short for {self.name}: with hardly any haystack a sample takes {least} tokens, "
            f"{self.new_tokens} of them (new_tokens) for the answer; {remedy}"
        )

    def _draw(self, drawing: random.Random, units: int, length: int, seed: int) -> Drawn:
        return self.task.draw(self.ingredients, self.part, drawing, units, length, seed)

    def _tokens(self, drawn: Drawn) -> int:
        """Those of the prompt, and those kept free."""
        return self._count(drawn.input + drawn.prefix) + self.new_tokens

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
