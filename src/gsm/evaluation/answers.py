"""Answers by length: the questions of a synthetic task, in sequences far longer than those of the training.

    python evaluate.py checkpoint=needle_gsm answers=96,1536,24576

Needles lie anywhere in a sequence, and questions stand at its end, so the distance grows with the length. B sequences,
T positions.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from gsm import plots
from gsm.config.check import ConfigError
from gsm.config.load import load_model, refusals
from gsm.data.synthetic import UNSEEN, Generated, SyntheticData
from gsm.errors import within
from gsm.evaluation.checkpoints import Trained
from gsm.evaluation.held_out import open_data
from gsm.evaluation.measure import Measure, publish, write
from gsm.evaluation.results import Results, by_arm
from gsm.intervals import over_seeds
from gsm.models.base import LanguageModel
from gsm.models.checks import IGNORED
from gsm.tables import Grid
from gsm.training.callbacks.summary import versions

NOTE = (
    "answered: share of questions whose most likely token is the answer; of several seeds, mean +- standard deviation"
)
QUANTITIES = ("answered", "decoder_bytes", "cache_bytes")


@dataclass(frozen=True)
class Answers(Measure):
    """Count the questions that a model answers in longer and longer sequences of its synthetic task, and print, draw
    and write the result.

    The model is the trained one; only YaRN's factor, the scale of the positions in layers with a bank, follows the
    length. Given again, the same command goes on where it was interrupted. Beside answers.json lie .md and .png.

    Args:
        answers: tokens of a sequence: 96,1536,24576
        sequences: number of sequences of each length
        yarn: scale positions by length / trained context; false: as in training
        chunk: tokens read at a time
    """

    file: ClassVar[str] = "answers.json"

    answers: Sequence[int] = ()
    sequences: int = 16
    yarn: bool = True
    chunk: int = 1024

    def __post_init__(self) -> None:
        within(1, sequences=self.sequences, chunk=self.chunk)
        if not self.answers:
            raise ConfigError("answers must name at least one length, such as answers=96,1536")

    def of(self, trained: Trained, file: Path) -> dict[str, Any]:
        """Return the answers of every sequence; ``file`` keeps each sequence once it is measured."""
        data = open_data(trained.saved)
        if not isinstance(data, SyntheticData):
            raise ConfigError(f"answers= must be of a synthetic task, got {trained.file}, trained on text")
        with refusals("answers"):
            for length in self.answers:
                data.task.check(length)
        identity = {
            **trained.run,
            **{"checkpoint": trained.digest, "task": data.description(), "yarn": self.yarn, "chunk": self.chunk},
            **{"precision": trained.precision, "device": trained.device_kind, "versions": versions()},
        }
        results, models = Results(file, identity), dict[int, LanguageModel]()

        def compute(part: tuple[int, int]) -> dict[str, Any]:
            length, number = part
            if length not in models:
                models.clear()  # one at a time in memory
                models[length] = self.stretched(trained, length)
            sequence = Generated(data.task, UNSEEN[data.held_out], lambda _: length)[number]
            return {_name(*part): answered(models[length], sequence, self.chunk)}

        parts = [(length, number) for length in self.answers for number in range(self.sequences)]
        with trained.computing():
            results.fill(parts, lambda part: [_name(*part)], compute, trained.progress("sequences"))
        lengths = {str(length): _summed(results.cells, length, self.sequences) for length in self.answers}
        results.save(by_length=lengths)
        result = {**trained.facts, **results.content()}
        write(file, result)
        return result

    def stretched(self, trained: Trained, length: int) -> LanguageModel:
        """Return the model with YaRN's factor for a length, or as it was trained where that is no longer."""
        geometry = trained.config["model"]["geometry"]
        factor = max(geometry["yarn_factor"], length / (geometry["yarn_original"] or geometry["context"]))
        if not self.yarn or factor == geometry["yarn_factor"]:
            return trained.model
        return load_model(trained.file, trained.device, overrides=[f"model.geometry.yarn_factor={factor}"])

    def conclude(self, results: Sequence[Mapping[str, Any]], place: Path) -> None:
        """Print, draw and write one table for each quantity."""
        arms = {arm: list(seeds.values()) for arm, seeds in by_arm(results).items()}
        grids = [self._grid(arms, key) for key in QUANTITIES]
        content = {"runs": [run["checkpoint"] for run in results]} if len(results) > 1 else None
        notes = [f"{self.sequences} sequences of each length; {NOTE}"]
        print(publish(place, grids, notes, content, lambda: _drawn(arms)))

    def _grid(self, arms: Mapping[str, Sequence[Mapping[str, Any]]], key: str) -> Grid:
        rows = [[f"{plots.label(key)}, by tokens", *arms]]
        for length in map(str, self.answers):
            cells = [over_seeds(run["by_length"][length][key] for run in runs) for runs in arms.values()]
            rows.append([f"{int(length):,}", *(cell.text(3 if key == "answered" else 0) for cell in cells)])
        return rows

    @staticmethod
    def metrics(written: Mapping[str, Any]) -> dict[str, float]:
        """Return the quantities of every length, as ``answered/<length>``, and ``seconds``."""
        lengths = written["by_length"].items()
        values: dict[str, float] = {f"{key}/{length}": row[key] for key in QUANTITIES for length, row in lengths}
        return values | {"seconds": sum(row["seconds"] for _, row in lengths)}


@torch.no_grad()
def answered(model: LanguageModel, sequence: Mapping[str, torch.Tensor], chunk: int) -> dict[str, Any]:
    """Return the number of questions of a sequence, and of those whose most likely token is the answer.

    The sequence is read in chunks through the model's memory, and rows before the first question are computed only
    where a later row needs them.

    Args:
        model: on its device.
        sequence: ``tokens`` and ``targets`` (-100: none), int64 [T] each.
        chunk: tokens read at a time.

    Returns:
        ``right`` and ``questions``, and of the memory at the end ``cache_bytes`` (all of it), ``decoder_bytes`` (what
        belongs to the decoder: the shared state, or its caches; without index keys), and ``seconds``.
    """
    start = time.perf_counter()
    device = model.embedding.weight.device
    token_BT, target_BT = (sequence[name][None].to(device) for name in ("tokens", "targets"))
    length, first = token_BT.shape[1], int((target_BT[0] != IGNORED).nonzero()[0])
    memory, right = model.start(1), 0
    with model.evaluating():
        if first:
            memory = model.prefill(token_BT[:, :first], memory, chunk).memory
        for place in range(first, length, chunk):
            part = slice(place, min(place + chunk, length))
            out = model(token_BT[:, part], memory=memory)
            memory, right = out.memory, right + int((out.logits.argmax(-1) == target_BT[:, part]).sum())
    assert memory is not None  # one was given
    sizes = memory.breakdown()
    of_decoder = sum(size for kind, size in sizes.items() if kind.startswith(("decoder", "shared_state")))
    return {
        **{"right": right, "questions": int((target_BT != IGNORED).sum())},
        **{"cache_bytes": memory.cache_bytes(), "decoder_bytes": of_decoder},
        "seconds": round(time.perf_counter() - start, 3),
    }


def _name(length: int, number: int) -> str:
    return f"{length}/{number}"


def _summed(cells: Mapping[str, Mapping[str, Any]], length: int, sequences: int) -> dict[str, Any]:
    """Return the counts of all sequences of a length, the share ``answered``, and the bytes of one sequence."""
    each = [cells[_name(length, number)] for number in range(sequences)]
    sums = {name: sum(cell[name] for cell in each) for name in ("right", "questions")}
    seconds = round(sum(cell["seconds"] for cell in each), 3)
    sizes = {name: each[0][name] for name in ("cache_bytes", "decoder_bytes")}
    return {"answered": sums["right"] / sums["questions"], **sums, **sizes, "seconds": seconds}


def _drawn(arms: Mapping[str, Sequence[Mapping[str, Any]]]) -> bytes:
    """Return a picture with a panel for each quantity, against length."""
    points = {
        key: {
            arm: [{int(length): row[key] for length, row in run["by_length"].items()} for run in runs]
            for arm, runs in arms.items()
        }
        for key in QUANTITIES
    }
    return plots.png(plots.quantities(points))
