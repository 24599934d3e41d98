"""Any model of ours in lm-evaluation-harness (extra ``eval``), and our samples as a task of it.

The adapter answers the harness's three kinds of requests with the same core as the built-in scorer. Imports lm_eval, so
this module is imported where it is needed alone.

The harness may run code that a task file holds: its templates have no sandbox, and its yaml files name functions. So it
gets texts that ``task_files`` has rendered, or one of its own tasks; never a template or a path from a task file.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from gsm.data.tokenizer import Tokenizer
from gsm.evaluation import task_files
from gsm.evaluation.loglikelihood import Pair, Score, cut, encode_pairs, loglikelihoods
from gsm.evaluation.results import ACCURACIES, Progress, Results, finish, silent
from gsm.evaluation.task_files import Sample, Task
from gsm.models.prompts import left_pad
from gsm.models.sampling import sample as draw

SEED = 42  # the paper's
NEW_TOKENS = 256  # where a task does not say how many it wants generated, as in the harness


class Adapter(TemplateLM):
    """A model of ours as the harness wants it.

    Args:
        model: as in ``loglikelihood.loglikelihoods``.
        tokenizer: with ``encode``, ``decode`` and ``end_of_text``, which also stands for an empty context.
        max_length: tokens that the model may read at most; what is longer is cut on the left.
        rows: sequences at a time.
        progress: passes batches on, and may say how far it is.

    Attributes:
        cut: requests whose context was cut, so far.
    """

    def __init__(
        self, model: Any, tokenizer: Tokenizer, *, max_length: int, rows: int = 32, progress: Progress = silent
    ) -> None:
        super().__init__()
        self.progress = progress
        self.model, self.coder, self.rows = model, tokenizer, rows
        self._max_length = max_length
        self._device = next(model.parameters()).device
        self.cut = 0

    @property
    def eot_token_id(self) -> int:
        """The id that ends a document, and stands before one."""
        return self.coder.end_of_text

    @property
    def max_length(self) -> int:
        """Tokens that the model may read at most."""
        return self._max_length

    @property
    def tokenizer_name(self) -> str:
        """What the harness's cache of requests tells tokenizers apart by."""
        return self.coder.digest

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of a text; ours has no special tokens to add."""
        return self.coder.encode(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        return [(score.loglikelihood, score.greedy) for score in self._scores([pair[1:] for pair in requests])]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts, in windows that each predict what those before have not."""
        windows, owners = [], []
        for owner, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            parts = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            windows += map(make_disjoint_window, parts)
            owners += [owner] * (len(windows) - len(owners))
        totals = [0.0] * len(requests)
        for owner, score in zip(owners, self._scores(windows), strict=True):
            totals[owner] += score.loglikelihood
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each context, until one of the texts that end it, or ``max_gen_toks``."""
        asked: list[tuple[Any, ...]] = [request.args for request in requests]
        by_options: dict[str, list[int]] = {}
        for number, one in enumerate(asked):
            by_options.setdefault(repr(one[1]), []).append(number)
        found: dict[int, str] = {}
        for alike in by_options.values():
            alike.sort(key=lambda number: len(asked[number][0]), reverse=True)
            for start in range(0, len(alike), self.rows):
                batch = alike[start : start + self.rows]
                texts = self._generate([asked[n][0] for n in batch], **asked[batch[0]][1])
                found |= dict(zip(batch, texts, strict=True))
        return [found[number] for number in range(len(requests))]

    def _scores(self, pairs: Sequence[Pair]) -> list[Score]:
        options = {"max_length": self.max_length, "rows": self.rows, "progress": self.progress}
        scores = loglikelihoods(self.model, pairs, **options)
        self.cut += sum(score.cut > 0 for score in scores)
        return scores

    @torch.no_grad()
    def _generate(
        self, contexts: Sequence[str], *, until: str | Sequence[str] | None = None, **options: Any
    ) -> list[str]:
        stops = [until] if isinstance(until, str) else [stop for stop in until or () if stop]
        count = int(options.get("max_gen_toks", NEW_TOKENS))
        temperature = float(options.get("temperature", 0.0)) if options.get("do_sample") else 0.0
        generator = torch.Generator(self._device).manual_seed(SEED)
        room = max(1, self.max_length - count)
        prompts = [(self.tok_encode(text) or [self.eot_token_id])[-room:] for text in contexts]
        tokens_BT, documents_BT = left_pad(prompts, self._device)
        memory, ids = self.model.start(len(prompts)), [[] for _ in prompts]
        out = self.model(tokens_BT, documents=documents_BT, memory=memory, rows=1)
        for left in reversed(range(count)):
            token_B = draw(out.logits[:, -1], temperature, float(options.get("top_p", 1.0)), generator)
            for written, token in zip(ids, token_B.tolist(), strict=True):
                written.append(token)
            texts = [self._text(written, stops) for written in ids]
            if not left or all(ended for _, ended in texts):
                break
            out = self.model(token_B[:, None], memory=out.memory, rows=1)
        return [self._text(written, stops)[0] for written in ids]

    def _text(self, ids: list[int], stops: Sequence[str]) -> tuple[str, bool]:
        """The text before the first end, and whether there was one."""
        ended = self.eot_token_id in ids
        text = self.coder.decode(ids[: ids.index(self.eot_token_id)] if ended else ids)
        places = [text.index(stop) for stop in stops if stop in text]
        return text[: min(places)] if places else text, ended or bool(places)


def version() -> str:
    """What a table says of the scorer."""
    return f"lm-eval {lm_eval.__version__}"


def measure(
    adapter: Adapter,
    task: Task,
    samples: Sequence[Sample] | None = None,
    *,
    limit: int = 0,
    file: Path | None = None,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Scores samples, or the harness's own task of that name with its documents from the hub.

    Args:
        adapter: the model.
        task: of ``task_files``.
        samples: of the task; None: those of the hub.
        limit: documents of the hub's task, or of each of its subtasks; 0: all of them.
        file: for the results; taken from there once it is finished, if its settings are the same.
        settings: whatever the numbers depend on, as plain containers.

    Returns:
        ``settings``, ``scores`` and ``samples`` as of ``downstream.measure``.

    Raises:
        ValueError: the harness has no such task.
    """
    results = Results(file, {"task": task.name, **(settings or {})})
    if "samples" not in results.conclusion:
        records = _records_of_the_hub(adapter, task, limit) if samples is None else _records(adapter, task, samples)
        finish(results, task.metrics, sorted(records, key=lambda one: one["document"]))
    return results.content()


def _records(adapter: Adapter, task: Task, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """By a task of the harness whose documents are texts that stand already, so that it renders nothing."""
    several = len({context for context, _ in samples[0].pairs}) > 1  # each choice is a context of its own
    rows = [
        {
            "contexts": [context for context, _ in sample.pairs],
            "context": sample.pairs[0][0],
            "answers": [continuation[1:] for _, continuation in sample.pairs],  # the harness adds the blank
            "answer": sample.pairs[0][1][several:],
            "gold": sample.gold,
        }
        for sample in samples
    ]
    kind: dict[str, Any] = {"output_type": "loglikelihood", "doc_to_text": "context", "doc_to_target": "answer"}
    if several:
        kind = {"doc_to_text": "gold", "doc_to_choice": "contexts", "doc_to_target": "answer"}
    elif task.choices:
        kind = {"doc_to_text": "context", "doc_to_choice": "answers", "doc_to_target": "gold"}
    metrics = [
        {"metric": name, "aggregation": name if name == "perplexity" else "mean", "higher_is_better": True}
        for name in task.metrics
    ]
    config = {"task": f"gsm_{task.name}", "test_split": "test", "metric_list": metrics}
    config |= {"output_type": "multiple_choice", **kind}
    config["custom_dataset"] = lambda **_: {"test": datasets.Dataset.from_list(rows)}
    (logged,) = run(adapter, [ConfigurableTask(config=config)], TaskManager(include_defaults=False)).values()
    mine = [samples[one["doc_id"]] for one in logged]
    return [
        record(adapter, task, one, sample.document, sample.subtask, sample.gold)
        for one, sample in zip(logged, mine, strict=True)
    ]


def _records_of_the_hub(adapter: Adapter, task: Task, limit: int) -> list[dict[str, Any]]:
    name, manager = task.harness or task.name, TaskManager()
    if name not in manager.all_tasks:  # it would take a path too, and run what the file there names
        raise ValueError(
            f"lm-evaluation-harness has no task '{name}', but harness=true without data= takes it from there"
        )
    return [
        record(adapter, task, one, one["doc_id"], part.removeprefix(name).removeprefix("_"))
        for part, logged in run(adapter, [name], manager, shots=task.shots, limit=limit).items()
        for one in logged
    ]


def run(
    adapter: Adapter, tasks: list[Any], manager: TaskManager, *, shots: int = 0, limit: int = 0
) -> dict[str, list[dict[str, Any]]]:
    """What the harness logs of every document, by task."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    seeds = dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), SEED)
    options: dict[str, Any] = {"num_fewshot": shots, "limit": limit or None, "bootstrap_iters": 0, **seeds}
    evaluate: Any = lm_eval.simple_evaluate  # which its package declares without parameters
    found = evaluate(model=adapter, tasks=tasks, task_manager=manager, **options)
    return found["samples"]


def record(
    adapter: Adapter, task: Task, logged: Mapping[str, Any], document: int, subtask: str, gold: int | None = None
) -> dict[str, Any]:
    """What the harness logs of a document, in the form that ours have; ``gold``: None for what the task says of it."""
    scores = [answer[0] for answer in logged["resps"]]
    pairs = encode_pairs(adapter.coder.encode_batch, adapter.eot_token_id, logged["arguments"])
    if gold is None:
        gold = task_files.gold(task, logged["doc"]) if len(scores) > 1 else 0
    return {
        **{"document": document, "subtask": subtask, "gold": gold},
        "loglikelihoods": [float(loglikelihood) for loglikelihood, _ in scores],
        "greedy": [bool(greedy) for _, greedy in scores],
        "cut": max(cut(*pair, adapter.max_length) for pair in pairs),
        **{metric: float(logged[metric]) for metric in task.metrics if metric in ACCURACIES},
    }
