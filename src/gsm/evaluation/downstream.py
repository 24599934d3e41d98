"""Downstream tasks by the log-likelihoods of answers: one file of results for a task, with every sample's scores.

A file is begun with the first batch and goes on where it was: batches are planned from all samples and never change, so
that an evaluation that was interrupted ends with the numbers of one that was not.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gsm.data.tokenizer import Tokenizer
from gsm.evaluation import loglikelihood, task_files
from gsm.evaluation.loglikelihood import Progress, Score
from gsm.evaluation.task_files import Sample, Task
from gsm.files import replacing

SAVE_EVERY = 20.0  # seconds
ACCURACIES = ("acc", "acc_norm")


def evaluate(
    model: Any,
    tokenizer: Tokenizer,
    task: Task,
    samples: Sequence[Sample],
    *,
    max_length: int,
    rows: int = 32,
    file: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: Progress = iter,
) -> dict[str, Any]:
    """Scores the samples of a task.

    Args:
        model: as in ``loglikelihood.loglikelihoods``.
        tokenizer: the model's.
        task, samples: of ``task_files``.
        max_length: tokens that the model may read at most; what is longer is cut on the left.
        rows: continuations at a time.
        file: where the results go, and where those of an earlier call with the same ``settings`` are taken from.
        settings: whatever the numbers depend on, as plain containers.
        progress: passes on the batches that are still to do.

    Returns:
        ``task``, ``settings``, ``scores`` (see ``conclude``) and ``samples``: of each, the number of its document,
        ``subtask``, ``gold``, ``loglikelihoods`` and ``greedy`` of its pairs, ``cut`` tokens, and its metrics.

    Raises:
        ValueError: as ``loglikelihoods``.
    """
    texts = [pair for sample in samples for pair in sample.pairs]
    pairs = loglikelihood.encode_pairs(tokenizer.encode_batch, tokenizer.end_of_text, texts)
    batches = loglikelihood.plan(pairs, max_length=max_length, rows=rows)
    head = {"task": task.name, "settings": dict(settings or {})}
    scores = _known(file, head, samples) if file else {}
    left = [batch for batch in batches if any(place not in scores for one in batch for place in one.places)]
    saved = time.monotonic()
    try:
        for batch in progress(left):
            scores |= loglikelihood.score(model, batch)
            if file and time.monotonic() - saved > SAVE_EVERY:
                write(file, head, _records(task, samples, scores))
                saved = time.monotonic()
    except BaseException:  # above all KeyboardInterrupt: it costs the batch that it came in
        if file:
            write(file, head, _records(task, samples, scores))
        raise
    records = _records(task, samples, scores)
    head["scores"] = conclude(task.metrics, records)
    if file:
        write(file, head, records)
    return {**head, "samples": records}


def conclude(metrics: Sequence[str], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The scores of a task: means over all samples, which for a task with subtasks weighs these by their samples.

    Returns:
        Each metric; ``samples``; ``cut``, how many of them were cut; and ``subtasks``, each with ``samples`` and its
        accuracies.
    """
    subtasks: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        subtasks.setdefault(record["subtask"], []).append(record)
    found: dict[str, Any] = {metric: _mean(metric, records) for metric in metrics}
    found |= {"samples": len(records), "cut": sum(record["cut"] > 0 for record in records)}
    if set(subtasks) != {""}:
        accuracies = [metric for metric in metrics if metric in ACCURACIES]
        found["subtasks"] = {
            name: {"samples": len(those), **{metric: _mean(metric, those) for metric in accuracies}}
            for name, those in sorted(subtasks.items())
        }
    return found


def record(task: Task, sample: Sample, scores: Sequence[Score | None]) -> dict[str, Any]:
    """What is kept of a sample; its metrics only once all of its pairs have a score."""
    done = [score for score in scores if score is not None]
    kept: dict[str, Any] = {
        **{"document": sample.document, "subtask": sample.subtask, "gold": sample.gold},
        "loglikelihoods": [None if score is None else score.loglikelihood for score in scores],
        "greedy": [None if score is None else score.greedy for score in scores],
        "cut": max((score.cut for score in done), default=0),
    }
    if len(done) == len(scores):
        kept |= {metric: _metric(metric, sample, done) for metric in task.metrics if metric in ACCURACIES}
    return kept


def finished(file: Path, head: Mapping[str, Any]) -> dict[str, Any] | None:
    """What ``write`` has put into a file with this head, once there are ``scores``; None otherwise."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return content if "scores" in content and all(content[key] == head[key] for key in head) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(file: Path, head: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> None:
    """A sample a line, the file as a whole or not at all."""
    lines = ",\n".join(f"    {json.dumps(one)}" for one in records)
    with replacing(file) as opened:
        opened.write(f'{json.dumps(head, indent=2)[:-2]},\n  "samples": [\n{lines}\n  ]\n}}\n'.encode())


def digest(*files: Path) -> str:
    """SHA-256 of the content of files, in hexadecimal."""
    found = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


def documents_digest(task: Task, folder: Path) -> str:
    """SHA-256 of a task's own file and of its documents."""
    return digest(task.file, *(task_files.find(folder, name) for name in task.files))


def _metric(metric: str, sample: Sample, scores: Sequence[Score]) -> float:
    """Whether the likeliest choice is the right one, the first of equals counting; with a single pair, whether every
    token of it was the likeliest."""
    if len(scores) == 1:
        return float(scores[0].greedy)
    each = [score.loglikelihood for score in scores]
    if metric == "acc_norm":
        each = [value / length for value, length in zip(each, sample.lengths, strict=True)]
    return float(each.index(max(each)) == sample.gold)


def _mean(metric: str, records: Sequence[Mapping[str, Any]]) -> float:
    """A mean over samples; of perplexity the exponential of the mean negative log-likelihood of whole continuations."""
    if metric == "perplexity":
        return math.exp(min(700.0, -statistics.fmean(one["loglikelihoods"][one["gold"]] for one in records)))
    return statistics.fmean(one[metric] for one in records)


def _records(task: Task, samples: Sequence[Sample], scores: Mapping[int, Score]) -> list[dict[str, Any]]:
    records, place = [], 0
    for sample in samples:
        records.append(record(task, sample, [scores.get(place + pair) for pair in range(len(sample.pairs))]))
        place += len(sample.pairs)
    return records


def _known(file: Path, head: Mapping[str, Any], samples: Sequence[Sample]) -> dict[int, Score]:
    """The scores in a file of the same settings and samples, by place among the pairs."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        same = all(content[key] == head[key] for key in head)
        records = content["samples"] if same and len(content["samples"]) == len(samples) else []
        each = [
            (value, greedy, one["cut"])
            for one in records
            for value, greedy in zip(one["loglikelihoods"], one["greedy"], strict=True)
        ]
    except (OSError, ValueError, KeyError, TypeError):  # nothing there yet, or nothing that can be gone on from
        return {}
    return {place: Score(*score) for place, score in enumerate(each) if score[0] is not None}
