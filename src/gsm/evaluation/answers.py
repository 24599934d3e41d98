"""Answers by length: the questions of a synthetic task, in sequences far longer than those of the training.

    python evaluate.py checkpoint=needle_gsm answers=96,1536,24576

Needles lie anywhere in a sequence, and questions stand at its end, so the distance grows with the length. B sequences,
T positions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from gsm import plots
from gsm.config.check import ConfigError, unknown
from gsm.config.load import load_model, refusals
from gsm.data.synthetic import UNSEEN, Generated, SyntheticData
from gsm.errors import within
from gsm.evaluation.checkpoints import Trained
from gsm.evaluation.held_out import open_data
from gsm.evaluation.measure import Measure
from gsm.evaluation.records import Arms, Measured, Record, mean, over_arms, pivot, points
from gsm.models.base import LanguageModel
from gsm.models.checks import IGNORED
from gsm.tables import Grid

DIGITS = {"answered": 3, "decoder_bytes": 0, "cache_bytes": 0}  # of each quantity in a table


@dataclass(frozen=True)
class Answers(Measure):
    """Count the questions that a model answers in longer and longer sequences of its synthetic task, and print, draw
    and write the result.

    The model is the trained one; only YaRN's factor, the scale of the positions in layers with a bank, follows the
    length. The same command resumes an interrupted measurement. answers.jsonl has a line for every sequence; beside it
    lie answers.md and .png.

    Args:
        answers: tokens of a sequence: 96,1536,24576
        sequences: number of sequences of each length
        tokens: largest number of tokens of each length, in whole sequences, at least one; 0: no limit
        task: values of the task that differ from training: task.pairs=1 task.asked=1
        yarn: scale positions by length / trained context; false: as in training
        chunk: tokens read at a time
    """

    name: ClassVar[str] = "answers"

    answers: Sequence[int] = ()
    sequences: int = 16
    tokens: int = 0
    task: Mapping[str, int] = field(default_factory=dict)
    yarn: bool = True
    chunk: int = 1024

    def __post_init__(self) -> None:
        within(1, sequences=self.sequences, chunk=self.chunk)
        within(0, tokens=self.tokens)
        if not self.answers:
            raise ConfigError("answers must name at least one length, such as answers=96,1536")

    def of(self, trained: Trained, file: Path | None) -> Measured:
        """Return the answers in every sequence."""
        data = open_data(trained.saved)
        if not isinstance(data, SyntheticData):
            raise ConfigError(f"answers= must be of a synthetic task, got {trained.file}, trained on text")
        task: Any = data.task
        if self.task:
            known = [one.name for one in fields(task)]
            if unlike := self.task.keys() - {*known}:
                raise unknown("key of task", min(unlike), known, "this task")
            with refusals("task"):
                task = replace(task, **self.task)
        with refusals("answers"):
            for length in self.answers:
                task.check(length)
        questions = {"task": {**data.description(), **self.task}, "yarn": self.yarn, "chunk": self.chunk}
        measured, models = trained.measured(file, questions), dict[int, LanguageModel]()

        def compute(part: Record) -> list[Record]:
            length = part["length"]
            if length not in models:
                models.clear()  # one at a time in memory
                models[length] = self.stretched(trained, length)
            sequence = Generated(task, UNSEEN[data.held_out], lambda _: length)[part["sequence"]]
            return answered(models[length], sequence, self.chunk, getattr(task, "answer_tokens", 1))

        parts = [
            {"length": length, "sequence": number} for length in self.answers for number in range(self.count(length))
        ]
        with trained.computing():
            measured.fill(parts, compute, trained.progress("sequences"))
        return measured

    def count(self, length: int) -> int:
        """Return the number of sequences of a length."""
        return min(self.sequences, max(1, self.tokens // length)) if self.tokens else self.sequences

    def stretched(self, trained: Trained, length: int) -> LanguageModel:
        """Return the model with YaRN's factor for a length; up to the trained context it is the model as trained."""
        geometry = trained.config["model"]["geometry"]
        factor = max(geometry["yarn_factor"], length / (geometry["yarn_original"] or geometry["context"]))
        if not self.yarn or factor == geometry["yarn_factor"]:
            return trained.model
        return load_model(trained.file, trained.device, overrides=[f"model.geometry.yarn_factor={factor}"])

    def tables(self, arms: Arms) -> list[Grid]:
        """Return lengths by arms for each quantity."""
        return [
            pivot(
                f"{plots.label(quantity)}, by tokens",
                arms,
                {f"{length:,}": {"length": length, "quantity": quantity} for length in self.answers},
                over_arms(digits),
            )
            for quantity, digits in DIGITS.items()
        ]

    def notes(self, arms: Arms) -> list[str]:
        """Return a line with the numbers of sequences, and what counts as answered."""
        numbers = ", ".join(f"{self.count(length)} of {length:,} tokens" for length in self.answers)
        return [
            f"sequences: {numbers}; answered: share of questions whose most likely tokens are the answer; of several "
            "seeds, mean +- standard deviation"
        ]

    def picture(self, arms: Arms) -> bytes:
        """Draw a panel for each quantity, against length."""
        return plots.png(plots.quantities({name: points(arms, "length", quantity=name) for name in DIGITS}))

    def metrics(self, measured: Measured) -> dict[str, Any]:
        """Return the quantities of every length, as ``answered/<length>``, and ``seconds``."""
        values: dict[str, Any] = {
            f"{quantity}/{length}": mean(measured.where(length=length, quantity=quantity))
            for quantity in DIGITS
            for length in self.answers
        }
        return values | {"seconds": math.fsum(record["value"] for record in measured.where(quantity="seconds"))}


@torch.no_grad()
def answered(
    model: LanguageModel, sequence: Mapping[str, torch.Tensor], chunk: int, answer_tokens: int = 1
) -> list[Record]:
    """Return the number of questions of a sequence that a model answers: its most likely tokens are the answer.

    The sequence is read in chunks through the model's memory, and rows before the first question are computed only
    where a later row needs them.

    Args:
        model: on its device.
        sequence: ``tokens`` and ``targets`` (-100: none), int64 [T] each.
        chunk: tokens read at a time.
        answer_tokens: targets of a question. Each follows the right ones before it, and all must be right: the model
            writes the same answer by itself.

    Returns:
        Records of ``answered`` (its weight the number of questions), and of the memory at the end ``cache_bytes`` (all
        of it), ``decoder_bytes`` (what belongs to the decoder: the shared state, or its caches; without index keys),
        and ``seconds``.
    """
    start = time.perf_counter()
    device = model.embedding.weight.device
    token_BT, target_BT = (sequence[name][None].to(device) for name in ("tokens", "targets"))
    length, first = token_BT.shape[1], int((target_BT[0] != IGNORED).nonzero()[0])
    memory, right = model.start(1), list[torch.Tensor]()
    with model.evaluating():
        if first:
            memory = model.prefill(token_BT[:, :first], memory, chunk).memory
        for place in range(first, length, chunk):
            part = slice(place, min(place + chunk, length))
            out = model(token_BT[:, part], memory=memory)
            memory, due_T = out.memory, target_BT[0, part]
            right.append((out.logits[0].argmax(-1) == due_T)[due_T != IGNORED])
    assert memory is not None  # one was given
    right_Q = torch.cat(right).reshape(-1, answer_tokens).all(-1)
    return [
        {"quantity": "answered", "value": int(right_Q.sum()), "weight": len(right_Q)},
        {"quantity": "cache_bytes", "value": memory.cache_bytes(), "weight": 1},
        {"quantity": "decoder_bytes", "value": memory.decoder_bytes(), "weight": 1},
        {"quantity": "seconds", "value": round(time.perf_counter() - start, 3), "weight": 1},
    ]
