"""Any model of ours in lm-evaluation-harness (extra ``eval``), and the harness's scores of a task by question.

Imports lm_eval, so this module is imported only by a function that needs it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import lm_eval.utils as harness_utils
from lm_eval.api import task as harness_task
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from gsm.config.check import unknown
from gsm.data.tokenizer import Tokenizer
from gsm.evaluation import tasks
from gsm.evaluation.loglikelihood import Score, loglikelihoods
from gsm.evaluation.results import Progress, Results, silent
from gsm.evaluation.tasks import Task

# Without a cache the harness would compile a template for each document.
harness_utils.env.from_string = lru_cache(256)(harness_utils.env.from_string)  # pyright: ignore[reportAttributeAccessIssue]
harness_task.tqdm = lambda parts, **_: parts  # a bar for each task of a group hides our own progress
logging.getLogger("lm_eval").setLevel(logging.ERROR)
datasets.disable_progress_bars()

SEED = 42  # the paper's
KINDS = ("loglikelihood", "multiple_choice")  # `output_type` of tasks that log-likelihoods answer
METRICS = ("acc", "acc_norm", "perplexity")  # of the harness that are numbers of a sample
# The harness's own command scores tasks that our table cannot hold.
ELSEWHERE = "Use lm_eval itself, on a model that export.py has written"


class Adapter(TemplateLM):
    """A model of ours in the form that the harness takes. It scores continuations; it writes no text.

    Args:
        model: as in ``loglikelihood.loglikelihoods``.
        tokenizer: with ``encode`` and ``end_of_text``, which also stands for an empty context.
        max_length: largest number of tokens that the model reads; a longer context is cut on the left.
        rows: sequences at a time.
        progress: passes batches on, and may report them.
        results: keeps the scores of continuations by their number, and has those of an interrupted call.

    Attributes:
        scores: of the continuations of the last call.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        *,
        max_length: int,
        rows: int = 32,
        progress: Progress = silent,
        results: Results | None = None,
    ) -> None:
        super().__init__()
        self.model, self.coder = model, tokenizer
        self.options: dict[str, Any] = {"max_length": max_length, "rows": rows, "progress": progress}
        self.results, self.scores = results, []

    @property
    def eot_token_id(self) -> int:
        """The id that ends a document, and stands before one."""
        return self.coder.end_of_text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the token ids of a text; our tokenizer has no special tokens to add."""
        return self.coder.encode(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(context or [self.eot_token_id], continuation) for _, context, continuation in requests]
        self.scores: list[Score] = loglikelihoods(self.model, pairs, results=self.results, **self.options)
        return [(score.loglikelihood, score.greedy) for score in self.scores]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Raise ValueError: whole texts are the harness's own business."""
        raise ValueError(f"loglikelihood_rolling is not allowed because continuations are scored alone. {ELSEWHERE}")

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Raise ValueError: writing is the harness's own business."""
        raise ValueError(f"generate_until is not allowed because continuations are scored alone. {ELSEWHERE}")


def build(task: Task, data: str = "") -> list[Any]:
    """Return the harness's tasks with their documents, several for one with subtasks.

    Args:
        task: the task.
        data: the folder of its files; empty: the documents of the hub.

    Raises:
        ValueError, FileNotFoundError: the task or its documents cannot be used; the message names the files.
    """
    paths, name = task.paths(data), task.harness or task.name
    manager = _manager(task)
    try:
        wanted = _local(task, name, paths) if paths else name
        built: list[Any] = list(manager.load([wanted])["tasks"].values())
        metrics = built[0].aggregation()
    except Exception as error:  # the harness's own, of documents that a task does not fit
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        files = f" from {', '.join(map(str, paths.values()))}" if paths else ""
        raise ValueError(f"task {task.name} cannot be read{files}: {reason}") from error
    if built[0].OUTPUT_TYPE not in KINDS or "acc" not in metrics:
        raise ValueError(
            f"task {task.name} is not allowed because its table needs acc by log-likelihoods, and it has "
            f"{', '.join(metrics)} by {built[0].OUTPUT_TYPE}. {ELSEWHERE}"
        )
    return built


@lru_cache(1)
def _everything() -> TaskManager:
    """Return all tasks of the harness; to list them takes half a minute."""
    return TaskManager()


def _manager(task: Task) -> TaskManager:
    """Return tasks of the harness, with this one among them. Raises ValueError."""
    folder, name = Path(str(lm_eval.__file__)).parent / "tasks" / task.folder, task.harness or task.name
    if task.folder:
        few = TaskManager(include_defaults=False, include_path=str(folder))
        if name in few.all_tasks:
            return few
    if name not in _everything().all_tasks:  # the harness would take a path too
        raise unknown("task", task.name, tasks.known(), "the paper's tables")
    return _everything()


def measure(
    model: Any,
    tokenizer: Tokenizer,
    task: Task,
    built: Sequence[Any],
    *,
    max_length: int,
    rows: int = 32,
    limit: int = 0,
    results: Results | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Score a task.

    Args:
        model: as in ``loglikelihood.loglikelihoods``.
        tokenizer: the model's.
        task: the task.
        built: its tasks of the harness, from ``build``.
        max_length: largest number of tokens that the model reads; a longer context is cut on the left.
        rows: continuations at a time.
        limit: largest number of documents of each subtask, the first ones; 0: all.
        results: keeps the scores while they are computed, and has those of an interrupted call.
        progress: passes on the batches that are still to do.

    Returns:
        ``settings``; ``scores``: each metric of the harness over all samples, so that a subtask counts by the number of
        its samples, ``samples``, and ``cut``, the number of samples with a cut context; and ``samples``, each with the
        number of its document, ``subtask``, ``loglikelihoods`` and ``greedy`` of its continuations, ``cut`` tokens, and
        its metrics.
    """
    results = results or Results(None, {})
    adapter = Adapter(model, tokenizer, max_length=max_length, rows=rows, progress=progress, results=results)
    logged, group = run(adapter, built, task.shots, limit), task.harness or task.name
    scores, records = iter(adapter.scores), []
    for name, documents in logged.items():
        for document in documents:
            answers = [next(scores) for _ in document["arguments"]]
            records.append(
                {
                    "document": document["doc_id"],
                    "subtask": name.removeprefix(group).removeprefix("_") if len(built) > 1 else "",
                    "loglikelihoods": [score.loglikelihood for score in answers],
                    "greedy": [score.greedy for score in answers],
                    "cut": max(score.cut for score in answers),
                    **{metric: float(document[metric]) for metric in METRICS if metric in document["metrics"]},
                }
            )
    means, totals = built[0].aggregation(), {}
    for metric in METRICS:
        if metric in records[0]:
            try:
                totals[metric] = means[metric]([record[metric] for record in records])
            except OverflowError:  # the perplexity of a model that has diverged
                totals[metric] = math.exp(700)
    totals |= {"samples": len(records), "cut": sum(record["cut"] > 0 for record in records)}
    results.cells.clear()  # the records hold all that these were for
    results.save(scores=totals, samples=records)
    return results.content()


def run(adapter: Adapter, built: Sequence[Any], shots: int | None = None, limit: int = 0) -> Any:
    """Return the harness's log of every document, by task."""
    for task in built:
        task.set_config("num_fewshot", shots or task.config.num_fewshot or 0)
        task.set_fewshot_seed(SEED)
    by_name = {task.config.task: task for task in built}
    evaluate: Any = lm_eval.evaluate  # its package declares no parameters
    options = {"limit": limit or None, "bootstrap_iters": 0}
    return evaluate(lm=adapter, task_dict={"tasks": by_name}, **options)["samples"]


def _local(task: Task, name: str, paths: Mapping[str, Path]) -> dict[str, Any]:
    """Return the group of a task of the harness with the documents of local files.

    A task of the harness may take its questions from train or validation: these are the test documents here.
    """
    rows: dict[str, dict[str, list[Any]]] = {}  # by part of the group, and by split
    for split, path in paths.items():
        for row in datasets.load_dataset("json", data_files=str(path), split="train", streaming=True):
            part = f"{name}_{row[task.subtask]}" if task.subtask else name
            rows.setdefault(part, {}).setdefault(split, []).append(row)
    parts = []
    for part, by_split in rows.items():
        splits = {split: datasets.Dataset.from_list(documents) for split, documents in by_split.items()}
        splits = {**dict.fromkeys(("train", "validation"), splits["test"]), **splits}
        parts.append({"task": part, "custom_dataset": lambda splits=splits, **_: splits})
    return {"group": f"local_{name}", "task": parts}
