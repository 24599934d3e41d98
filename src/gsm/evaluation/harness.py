"""Any model of ours in lm-evaluation-harness (extra ``eval``), and our tasks written as a folder of its task files.

The adapter answers the harness's three kinds of requests with the same core as the built-in scorer. Imports lm_eval, so
this module is imported where it is needed alone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import torch
import yaml
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from gsm.data.tokenizer import Tokenizer
from gsm.evaluation import downstream, task_files
from gsm.evaluation.loglikelihood import Pair, Progress, Score, cut, encode_pairs, loglikelihoods
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
        self, model: Any, tokenizer: Tokenizer, *, max_length: int, rows: int = 32, progress: Progress = iter
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
        by_options: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            by_options.setdefault(repr(request.args[1]), []).append(number)
        found: dict[int, str] = {}
        for alike in by_options.values():
            alike.sort(key=lambda number: len(requests[number].args[0]), reverse=True)
            for start in range(0, len(alike), self.rows):
                batch = alike[start : start + self.rows]
                texts = self._generate([requests[n].args[0] for n in batch], **requests[batch[0]].args[1])
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


def evaluate(adapter: Adapter, task: Task, *, limit: int = 0) -> dict[str, Any]:
    """Scores the harness's own task of that name, with its documents from the hub.

    Args:
        adapter: the model.
        task: of ``task_files``.
        limit: documents of the task, or of each of its subtasks; 0: all of them.

    Returns:
        As ``evaluate_local``.
    """
    return _run(adapter, task, [task.harness or task.name], TaskManager(), limit=limit)


def evaluate_local(adapter: Adapter, task: Task, samples: Sequence[Sample], data: Path, folder: Path) -> dict[str, Any]:
    """Scores samples from local files.

    Args:
        adapter: the model.
        task, samples: of ``task_files``.
        data: the folder of documents.
        folder: an empty folder, for the task files that the harness reads.

    Returns:
        ``task``, ``scores`` and ``samples`` as of ``downstream.evaluate``.
    """
    numbers = write_tasks(task, samples, data, folder)
    return _run(adapter, task, list(numbers), TaskManager(include_path=str(folder), include_defaults=False), numbers)


def write_tasks(task: Task, samples: Sequence[Sample], data: Path, folder: Path) -> dict[str, list[int]]:
    """A task of ours as task files of the harness, one for each subtask, with these documents beside them.

    Returns:
        The number of each document in ours, by the harness's name of the task.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shown = task_files.read(data, task.shot_documents) if task.shots else []
    numbers: dict[str, list[int]] = {}
    for subtask in sorted({sample.subtask for sample in samples}):
        name = "_".join(filter(None, ["gsm", task.name, subtask]))
        mine = [sample for sample in samples if sample.subtask == subtask]
        numbers[name] = [sample.document for sample in mine]
        splits = {"test": [sample.row for sample in mine]}
        if task.shots:
            splits["shots"] = [row for row in shown if not task.subtask or str(row[task.subtask]) == subtask]
        for split, rows in splits.items():
            text = "".join(f"{json.dumps(row)}\n" for row in rows)
            (folder / f"{name}.{split}.jsonl").write_text(text, encoding="utf-8")
        files = {split: str(folder / f"{name}.{split}.jsonl") for split in splits}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(_described(task, name, files, str(folder / "cache"))))
    return numbers


def _described(task: Task, name: str, files: Mapping[str, str], cache: str) -> dict[str, Any]:
    """A task file in the harness's own words."""
    multiple = {"doc_to_choice": f"{{{{{task.choices}}}}}"}
    if not task.choices:
        kind = {"output_type": "loglikelihood", "doc_to_text": task.prompt}
        kind["doc_to_target"] = f"{{{{' ' ~ ({task.continuation})}}}}"
    elif task.continuation:
        kind = {"output_type": "multiple_choice", "doc_to_text": f"{{{{{task.gold}}}}}", **multiple}
        kind["doc_to_target"] = f"{{{{{task.continuation}}}}}"
    else:
        kind = {"output_type": "multiple_choice", "doc_to_text": task.prompt, **multiple}
        kind["doc_to_target"] = f"{{{{{task.gold}}}}}"
    metrics = [{"metric": m, "higher_is_better": m != "perplexity"} for m in task.metrics]
    for metric in metrics:
        metric["aggregation"] = "perplexity" if metric["metric"] == "perplexity" else "mean"
    shots = {"fewshot_split": "shots", "fewshot_config": {"sampler": "first_n"}, "num_fewshot": task.shots}
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": dict(files), "cache_dir": cache},
        "test_split": "test",
        **kind,
        "description": task.description,
        "metric_list": metrics,
        **(shots if task.shots else {}),
    }


def _run(
    adapter: Adapter,
    task: Task,
    names: list[str],
    manager: TaskManager,
    numbers: Mapping[str, list[int]] | None = None,
    limit: int = 0,
) -> dict[str, Any]:
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    seeds = dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), SEED)
    found: Any = lm_eval.simple_evaluate(
        model=adapter,
        tasks=names,  # pyright: ignore[reportArgumentType]
        task_manager=manager,
        num_fewshot=task.shots,
        limit=limit or None,
        bootstrap_iters=0,
        **seeds,
    )
    records = []
    for name, samples in found["samples"].items():
        subtask = name.removeprefix(f"{names[0] if numbers is None else 'gsm_' + task.name}").removeprefix("_")
        order = numbers[name] if numbers else range(len(samples))
        records += [_record(adapter, task, subtask, order[one["doc_id"]], one) for one in samples]
    records.sort(key=lambda one: one["document"])
    return {"task": task.name, "scores": downstream.conclude(task.metrics, records), "samples": records}


def _record(adapter: Adapter, task: Task, subtask: str, number: int, logged: Mapping[str, Any]) -> dict[str, Any]:
    """A sample as the harness logs it, in the form that ours have."""
    scores = [answer[0] for answer in logged["resps"]]
    pairs = encode_pairs(adapter.coder.encode_batch, adapter.eot_token_id, logged["arguments"])
    gold = task_files.gold(task, logged["doc"]) if len(scores) > 1 else 0
    return {
        **{"document": number, "subtask": subtask, "gold": gold},
        "loglikelihoods": [float(loglikelihood) for loglikelihood, _ in scores],
        "greedy": [bool(greedy) for _, greedy in scores],
        "cut": max(cut(*pair, adapter.max_length) for pair in pairs),
        **{metric: float(logged[metric]) for metric in task.metrics if metric in downstream.ACCURACIES},
    }
