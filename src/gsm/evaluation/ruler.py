"""RULER's needle tasks put to a model: its answers at every length, kept cell by cell, so that an evaluation which was
interrupted goes on where it was. B prompts at a time, T tokens of each.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gsm.data.adaptation import RESPONSES
from gsm.data.ingredients import Ingredients
from gsm.data.ruler import SEED, TASKS, Needles, Sample, read_samples
from gsm.data.tokenizer import Tokenizer
from gsm.evaluation.ruler_score import accuracy, averages, final_answer, score
from gsm.files import write_json

LENGTHS = (4096, 8192, 16384, 32768, 65536)
Watch = Callable[[Iterable[Any], int, str], Iterable[Any]]


class Writer(Protocol):
    """What is asked: any `LanguageModel` is one."""

    def stream(self, prompt: Any, max_new_tokens: int, *, chunk: int, capacity: int) -> Iterator[Tensor]:
        """Yields the likeliest next id of every sequence, int64 [B], after prompts: int64 [B,T], or, unless
        `padded` is False in `evaluate`, also a list of B lists of ids that differ in length."""
        ...


def evaluate(
    model: Writer,
    tokenizer: Tokenizer,
    tasks: Sequence[str] = tuple(TASKS),
    lengths: Sequence[int] = LENGTHS,
    examples: int = 20,
    *,
    ingredients: Ingredients | None = None,
    answers: str = "direct",
    files: str | os.PathLike[str] | None = None,
    batch_size: int = 8,
    padded: bool = True,
    chunk: int = 4096,
    seed: int = SEED,
    limit: int | None = None,
    path: str | os.PathLike[str] | None = None,
    identity: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """Asks a model every task at every length, and scores what it says.

    It answers greedily, in a static memory, until its end of text, with direct answers also until the end of a line, or
    until `new_tokens` of the ingredients.

    Args:
        model: what is asked.
        tokenizer: its tokenizer.
        tasks: names of `TASKS`.
        lengths: tokens of a prompt and its answer, at most.
        examples: of each cell.
        ingredients: what samples are made of.
        answers: "direct", or "cot" for those that end with `Final answer:`.
        files: a folder with `<length>/<task>.jsonl` of the benchmark, instead of samples that are made here.
        batch_size: at most so many prompts at a time.
        padded: whether prompts of different lengths may go together; else those of one length do.
        chunk: tokens of a prompt that are read at a time.
        seed: of the samples.
        limit: tokens that the model can take; None: any number.
        path: a JSON file for the result, written after every cell. Cells that it holds are not asked again if its
            settings are the same; else it is moved to `<name>.previous`.
        identity: what else tells this evaluation from others, such as the checkpoint; a part of the settings.
        watch: passes on an iterable of so many samples, and may say how far it is.
        say: takes a line for every cell that is done.

    Returns:
        `settings`, `cells` by `<task>/<length>` (each with `accuracy` in percent, and of every sample `prediction` and
        `score`), `averages` over the cells that were `asked`, and `unmarked`, the share of outputs without
        `Final answer:` where it is wanted.

    Raises:
        ValueError: a value is out of range, a length goes beyond `limit` or holds no sample.
        OSError: the file cannot be written.
    """
    _check(tasks, lengths, examples, answers, batch_size, limit)
    made = ingredients or Ingredients()
    assert made.new_tokens is not None  # its template has it
    settings = {"answers": answers, "examples": examples, "seed": seed, "tokenizer": tokenizer.digest}
    settings |= {"files": str(files), "new_tokens": made.new_tokens} if files else made.facts()
    result = opened(path, json.loads(json.dumps({**settings, **(identity or {})})))
    cells: dict[str, Any] = result["cells"]
    asked = {f"{task}/{length}": (task, length) for task in tasks for length in lengths}
    for name, (task, length) in asked.items():
        if name in cells:
            say(f"{name}: {cells[name]['accuracy']:.2f} %, from {path}")
            continue
        start = time.perf_counter()
        samples = _samples(task, length, examples, seed, tokenizer, made, files)
        batches = _batches(samples, tokenizer, batch_size, padded)
        said = _answers(model, tokenizer, batches, made.new_tokens, answers == "direct", chunk)
        told = watch(said, examples, f"{name}: ") if watch else said
        scored = [_scored(sample, tokens, text, answers) for sample, tokens, text in told]
        cells[name] = {"task": task, "length": length, "accuracy": accuracy(scored)}
        cells[name] |= {"seconds": round(time.perf_counter() - start, 3)}
        cells[name] |= {"samples": sorted(scored, key=lambda sample: sample["index"])}
        if path:
            write_json(path, result)
        say(f"{name}: {cells[name]['accuracy']:.2f} % of {examples}, {cells[name]['seconds']:.1f} s")
    return _concluded(settings, result, asked, path)


def complete(
    model: Writer, tokenizer: Tokenizer, prompts: Sequence[list[int]], most: int, a_line: bool, chunk: int = 4096
) -> list[str]:
    """What a model writes after each prompt, until its end of text or for `most` tokens.

    Args:
        prompts: their ids.
        a_line: stop at the end of a line that holds something.
    """
    made: list[list[int]] = [[] for _ in prompts]
    going = set(range(len(made)))
    lengths = {len(ids) for ids in prompts}
    prompt = torch.tensor(prompts) if len(lengths) == 1 else prompts
    for token_B in model.stream(prompt, most, chunk=chunk, capacity=max(lengths) + most - 1):
        told = token_B.tolist()
        for row in sorted(going):
            made[row].append(told[row])
            if told[row] == tokenizer.end_of_text or a_line and "\n" in tokenizer.decode(made[row]).lstrip():
                going.remove(row)
        if not going:
            break
    return [tokenizer.decode(ids) for ids in made]


def _check(
    tasks: Sequence[str], lengths: Sequence[int], examples: int, answers: str, batch_size: int, limit: int | None
) -> None:
    if not tasks or set(tasks) - set(TASKS):
        raise ValueError(f"tasks {list(tasks)} must be some of {', '.join(TASKS)}")
    if not lengths or min(lengths) < 1 or examples < 1 or batch_size < 1:
        raise ValueError(
            f"lengths {list(lengths)}, examples {examples} and batch_size {batch_size} must be at least 1 each"
        )
    if answers not in RESPONSES:
        raise ValueError(f"answers {answers!r} is unknown; the known ones are {', '.join(RESPONSES)}")
    if limit is not None and max(lengths) > limit:
        raise ValueError(
            f"length {max(lengths)} goes beyond the {limit} tokens that the model takes; take shorter ones"
        )


def _samples(
    task: str,
    length: int,
    examples: int,
    seed: int,
    tokenizer: Tokenizer,
    ingredients: Ingredients,
    files: str | os.PathLike[str] | None,
) -> list[Sample]:
    """The samples of a cell; of a file the first ones. Raises ValueError where it holds fewer."""
    if files is None:
        needles = Needles(task, tokenizer, ingredients)
        return [needles.sample(index, length, seed) for index in range(examples)]
    file = Path(files) / str(length) / f"{task}.jsonl"
    samples = read_samples(file)
    if len(samples) < examples:
        raise ValueError(f"{file} holds {len(samples)} samples, and examples is {examples}; take fewer")
    return samples[:examples]


def _batches(
    samples: Sequence[Sample], tokenizer: Tokenizer, size: int, padded: bool
) -> Iterator[list[tuple[Sample, list[int]]]]:
    """Samples and the ids of their prompts, those of similar length together, or only those of the same."""
    prompts = sorted(((one, tokenizer.encode(one.prompt)) for one in samples), key=lambda pair: len(pair[1]))
    for _, alike in groupby(prompts, key=lambda pair: 0 if padded else len(pair[1])):
        group = list(alike)
        yield from (group[first : first + size] for first in range(0, len(group), size))


def _answers(
    model: Writer,
    tokenizer: Tokenizer,
    batches: Iterable[list[tuple[Sample, list[int]]]],
    most: int,
    a_line: bool,
    chunk: int,
) -> Iterator[tuple[Sample, int, str]]:
    """Every sample with the tokens of its prompt and what the model says."""
    for batch in batches:
        said = complete(model, tokenizer, [ids for _, ids in batch], most, a_line, chunk)
        yield from ((sample, len(ids), text) for (sample, ids), text in zip(batch, said, strict=True))


def _scored(sample: Sample, tokens: int, said: str, answers: str) -> dict[str, Any]:
    judged = final_answer(said, answers)
    facts = {"index": sample.index, "tokens": tokens, "outputs": list(sample.outputs), "prediction": said}
    return {**facts, "marked": judged is not None, "score": score(judged, sample.outputs)}


def opened(path: str | os.PathLike[str] | None, settings: dict[str, Any]) -> dict[str, Any]:
    """What a file holds already, if its settings are these; one with others is moved aside."""
    fresh = {"settings": settings, "cells": {}}
    if path is None or not Path(path).exists():
        return fresh
    try:
        known = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError:
        known = None
    if isinstance(known, dict) and known.get("settings") == settings and isinstance(known.get("cells"), dict):
        return {"settings": settings, "cells": known["cells"]}
    os.replace(path, Path(path).with_suffix(".previous"))
    return fresh


def _concluded(
    settings: Mapping[str, Any], result: dict[str, Any], asked: Iterable[str], path: str | os.PathLike[str] | None
) -> dict[str, Any]:
    """The result with its means over the cells that were asked; the file keeps the others too."""
    cells = {name: result["cells"][name] for name in asked}
    marked = [sample["marked"] for cell in cells.values() for sample in cell["samples"]]
    means = {"asked": list(cells), "averages": averages(cells.values()), "unmarked": 1 - sum(marked) / len(marked)}
    if path:
        write_json(path, {**result, **means})
    return {**result, "cells": cells, **means}
