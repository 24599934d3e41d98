"""`RulerData`: questions with answers that teach a trained model the form of RULER's tasks. B batch, T positions.

    direct   <prompt> 8262683 END
    cot      <prompt> told here: <needle> It is about <key>, as asked. Final answer: 8262683 END
    both     direct and cot by turns: teaches retrieval, before a model is adapted to one of the two

The two forms have the same prompts, and training predicts only the answers. The chain of thought repeats the needle,
verifies its key and answers; its words are ours, since the paper prints only the last ones. Example i is a function of
(seed, i, length). A pass takes all examples in order, and the length changes with each step: the paper's 512 examples
are 64 steps of 8, at 4K, 8K, 16K, 32K, ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gsm.data.base import check_held_out, check_numbers
from gsm.data.cache import cache_folder
from gsm.data.corpus import standard_library
from gsm.data.ingredients import Ingredients
from gsm.data.module import chosen_tokenizer
from gsm.data.packing import validation_indices
from gsm.data.ruler import TASKS, Questions, Sample
from gsm.data.synthetic import UNSEEN, MadeData
from gsm.data.tokenizer import Tokenizer
from gsm.data.tokens import find_or_train
from gsm.errors import within
from gsm.models.checks import IGNORED

MARK = "Final answer:"
RESPONSES = {
    "direct": " {value}",
    "cot": " told here: {needle} It is about {key}, as asked. " + MARK + " {value}",
}
BOTH = "both"
TAUGHT = ("niah_single_1", "niah_single_2", "niah_multikey_1")  # the paper's


class Examples:
    """A question with its answer for every number, as training sees it.

    Args:
        tasks: the sources of samples; example i belongs to the task at i modulo their number.
        answers: "direct", "cot", or "both", by turns for each task.
        seed: of all examples.
        length: T of the batch that begins with a number.
        count: number of different examples; then they come again.
    """

    def __init__(
        self, tasks: Sequence[Questions], answers: str, seed: int, length: Callable[[int], int], count: int
    ) -> None:
        self.tasks, self.answers, self.seed, self.length, self.count = tasks, answers, seed, length, count
        self.ids = lru_cache(count)(self._ids)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one example: `tokens`, `targets` and `documents`, int64 [T] each."""
        return {name: value_BT[0] for name, value_BT in self.batch([index]).items()}

    def batch(self, indices: np.ndarray | Sequence[int]) -> dict[str, Tensor]:
        """Return the examples of these numbers, int64 [B,T] each, all of the length of the first one.

        Targets are -100 outside the answer and the end of text behind it, and everywhere for -1, which evens out ranks.
        The rest of T is padding, with `documents` -1.
        """
        length, end = self.length(int(indices[0])), self.tasks[0].tokenizer.end_of_text
        token_BT = torch.full((len(indices), length), end)
        target_BT, document_BT = torch.full_like(token_BT, IGNORED), torch.full_like(token_BT, -1)
        for row, number in enumerate(map(int, indices)):
            prompt, answer = self.ids(max(number, 0) % self.count, length)
            whole = torch.from_numpy(np.concatenate([prompt, answer])).long()
            token_BT[row, : len(whole) - 1] = whole[:-1]
            document_BT[row, : len(whole) - 1] = 0
            if number >= 0:
                target_BT[row, len(prompt) - 1 : len(whole) - 1] = whole[len(prompt) :]
        return {"tokens": token_BT, "targets": target_BT, "documents": document_BT}

    def sample(self, index: int, length: int) -> Sample:
        """Return the question of an example."""
        return self.tasks[index % len(self.tasks)].sample(index, length, self.seed)

    def _ids(self, index: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of the prompt, and of the answer with its end, int32."""
        sample, task = self.sample(index, length), self.tasks[index % len(self.tasks)]
        turn = list(RESPONSES)[index // len(self.tasks) % len(RESPONSES)]
        tokenizer, form = task.tokenizer, RESPONSES[turn if self.answers == BOTH else self.answers]
        text = form.format(value=sample.answer, needle=sample.needle, key=sample.key)
        answer = [*tokenizer.encode(text), tokenizer.end_of_text]
        if len(answer) > task.new_tokens:
            raise ValueError(f"new_tokens must be at least {len(answer)} for an answer, got {task.new_tokens}")
        return np.array(tokenizer.encode(sample.prompt), np.int32), np.array(answer, np.int32)


class RulerData(MadeData):
    """Examples of RULER's tasks, dicts of int64 [B,T] as in `TextData`.

    Validation also measures accuracy, over the tokens of the answers. It takes examples of its own at the longest of
    `lengths`. The questions of `gsm.evaluation.ruler` are others, and longer texts are left to it.

    Args:
        vocabulary: number of the model's ids.
        context: the longest text of the model, here or in evaluation.
        batch_size: B on each device.
        tokenizer: as in `TextData`; "bpe" is the one that it trains on the standard library.
        end_of_text: as in `TextData`.
        tasks: names of `gsm.data.ruler.TASKS`.
        lengths: T, one after another; None: a sixteenth, an eighth, a quarter and a half of `context`, which stays
            reserved for evaluation.
        answers: "direct", "cot" for a short chain of thought, or "both" by turns.
        examples: number of different examples.
        template, haystack, keys, words, text_field, new_tokens: see `Ingredients.choose`.
        seed: of the training examples.
        validation_sequences: number of examples of validation.
        held_out: "validation", or "tuning" for other examples than the reported ones.
        cache_dir: the folder of the tokenizer; None: GSM_CACHE or `.cache/gsm`.

    Raises:
        ValueError: a name is unknown, a number is out of range, or a length holds no sample.
        FileNotFoundError: there is nothing at a path.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        context: int,
        batch_size: int,
        tokenizer: str | Tokenizer = "bpe",
        end_of_text: str | None = None,
        tasks: Sequence[str] = TAUGHT,
        lengths: Sequence[int] | None = None,
        answers: str = "direct",
        examples: int = 512,
        template: str = "ruler",
        haystack: str = "python",
        keys: str = "builtin",
        words: int | None = None,
        text_field: str = "text",
        new_tokens: int | None = None,
        seed: int = 0,
        validation_sequences: int = 64,
        held_out: str = "validation",
        cache_dir: str | None = None,
    ) -> None:
        super().__init__()
        self.lengths = trained_lengths(lengths, context)
        self.tasks, self.answers, self.examples = list(tasks), answers, examples
        self.vocabulary, self.context, self.batch_size, self.cache_dir = vocabulary, context, batch_size, cache_dir
        self.seed, self.validation_sequences = seed, validation_sequences
        self.held_out = check_held_out(held_out)
        self._check()
        self._chosen = chosen_tokenizer(tokenizer, end_of_text, vocabulary)
        self.ingredients = Ingredients.choose(template, haystack, keys, words, text_field, new_tokens)

    def prepare_data(self) -> None:
        """Train the tokenizer, unless the cache has it. Raise ValueError for a length that is too short for a task."""
        for length in self.lengths:
            for index in range(len(self.tasks)):
                self.train_set.ids(index, length)

    @cached_property
    def tokenizer(self) -> Tokenizer:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The tokenizer (its `vocabulary` may be smaller than the model's)."""
        if self._chosen:
            return self._chosen
        return find_or_train(standard_library(), self.vocabulary, cache_folder(self.cache_dir))

    @cached_property
    def train_set(self) -> Examples:
        """The training examples at the longest length."""
        return self.training_set(lambda _: max(self.lengths))

    @cached_property
    def validation_set(self) -> Examples:
        """The examples of validation."""
        return self._held_out(max(self.lengths))

    def training_set(self, length: Callable[[int], int]) -> Examples:
        """Return the training examples; T is a function of an example's place in the training."""
        return Examples(self._needles["training"], self.answers, self.seed, length, self.examples)

    def length_at(self, step: int) -> int:
        """Return T of the examples of a step."""
        return self.lengths[step % len(self.lengths)]

    def of_length(self, length: int, most: int, split: str = "validation") -> list[dict[str, Tensor]]:
        """Return examples of another length. Raise ValueError for a length that holds no sample."""
        examples = self._held_out(length) if split == "validation" else self.training_set(lambda _: length)
        return [examples[int(index)] for index in validation_indices(len(examples), most)]

    def bytes_of_tokens(self, split: str) -> np.ndarray:
        """Return the bytes that each id stands for, int64 [V]."""
        return self.tokenizer.token_lengths_V

    def headline(self) -> dict[str, str]:
        """Return the lines about the data in the header of a run."""
        lengths = ", ".join(f"{length:,}" for length in self.lengths)
        return {"data": f"{self.examples:,} examples of RULER's tasks, answers {self.answers}, at {lengths} tokens"}

    def description(self) -> dict[str, Any]:
        """Return the facts about the data in a run's summary."""
        chosen = {name: getattr(self, name) for name in ("tasks", "lengths", "answers", "examples", "context")}
        return {"task": "RULER", **self.marks, **chosen, **self.ingredients.facts(), "tokenizer": self.tokenizer.kind}

    def fingerprint(self) -> dict[str, str | int]:
        """Return the facts that determine the training examples, without the run's seed and batches."""
        facts = {**self.description(), "tokenizer": self.tokenizer.digest}
        return {name: value if type(value) in (str, int) else str(value) for name, value in facts.items()}

    def _check(self) -> None:
        check_numbers(self.batch_size, self.validation_sequences, self.seed)
        within(1, examples=self.examples)
        if self.answers not in (*RESPONSES, BOTH):
            names = " or ".join((*RESPONSES, BOTH))
            raise ValueError(f"answers must be {names}, got {self.answers}")
        if not self.tasks or set(self.tasks) - set(TASKS):
            raise ValueError(f"tasks must be some of {', '.join(TASKS)}, got {self.tasks}")
        if max(self.lengths) > self.context:
            raise ValueError(f"lengths must be at most context={self.context}, got {self.lengths}")

    @cached_property
    def _needles(self) -> dict[str, list[Questions]]:
        """The tasks of each part. They remember the sizes of haystacks, a search of seconds."""
        return {
            part: [Questions(task, self.tokenizer, self.ingredients, part) for task in self.tasks]
            for part in ("training", "evaluation")
        }

    def _held_out(self, length: int) -> Examples:
        tasks, seed = self._needles["evaluation"], UNSEEN[self.held_out]
        return Examples(tasks, self.answers, seed, lambda _: length, self.validation_sequences)


def trained_lengths(lengths: Sequence[int] | None, context: int) -> list[int]:
    """Return the lengths that a run takes in turn. The default leaves the context itself to evaluation."""
    return list(lengths or (context // part for part in (16, 8, 4, 2)))
