"""Any model of ours in lm-evaluation-harness (extra ``eval``), as its own HFLM is for models of transformers.

    lm_eval.simple_evaluate(model=LM(gsm.load_model("nano"), tokenizer), tasks=["lambada_openai", "wikitext"])

Imports lm_eval, so this module is imported only by a function that needs it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gsm.config.check import unknown
from gsm.data.tokenizer import Tokenizer
from gsm.errors import ConfigError
from gsm.evaluation import tasks
from gsm.evaluation.checkpoints import progress
from gsm.evaluation.records import Record
from gsm.evaluation.tasks import Task
from gsm.models.prompts import as_batch
from gsm.shapes import promoted

logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of each of the 67 tasks in BLiMP

SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
SEED = 42  # the paper's
KINDS = ("loglikelihood", "multiple_choice")  # `output_type` of tasks that our table can hold
METRICS = ("acc", "acc_norm")  # of the harness, in our results
Request = tuple[Any, list[int], list[int]]  # the texts, then the token ids of a context and of an answer to it


@dataclass
class Question:
    """A context and the answers that share it, token ids by the number of their request."""

    context: list[int]
    answers: dict[int, list[int]] = field(default_factory=dict)

    @property
    def size(self) -> tuple[int, int, int]:
        """The numbers of answers, of tokens of the context, and of tokens of the longest answer."""
        return len(self.answers), len(self.context), max(map(len, self.answers.values()))


class LM(TemplateLM):
    """A model for lm-evaluation-harness.

    A context is read once for all of its answers: ``memory.expand`` gives each of them a copy of the memory. A context
    that does not fit is cut on the left, as in HFLM. An answer is scored as a whole, behind one token of context if
    it is longer than the model may read.

    Args:
        model: anything with ``start(batch)``, whose memory has ``expand``, and a forward that takes ``memory``,
            ``documents`` (-1 for padding on the left) and ``rows``, and returns ``logits`` and ``memory``. Tasks in
            which it writes need ``stream``, too.
        tokenizer: its ``end_of_text`` also stands for an empty context.
        max_length: largest number of tokens that the model reads.
        batch_size: answers scored at a time.
    """

    def __init__(self, model: Any, tokenizer: Tokenizer, max_length: int = 4096, batch_size: int = 32) -> None:
        super().__init__()
        self.model, self.coder = model, tokenizer
        self.max_length, self.batch_size = max_length, batch_size

    @property
    def eot_token_id(self) -> int:
        """The id that ends a document, and stands before one."""
        return self.coder.end_of_text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the token ids of a text; our tokenizer has no special tokens to add."""
        return self.coder.encode(string)

    def _loglikelihood_tokens(self, requests: Sequence[Request], **kwargs: Any) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each answer in nats, and whether each of its tokens was the likeliest.

        Raises ValueError for a model that scores NaN.
        """
        scores: dict[int, tuple[float, bool]] = {}
        batches = self._batches(self._questions(requests))
        for batch in progress(batches, len(batches), "", "batches"):
            for number, score in self._score(batch).items():
                scores[number] = score
                if requests[number][0] is not None:  # a window of a long text has no texts
                    self.cache_hook.add_partial("loglikelihood", requests[number][0], score)
        return [scores[number] for number in range(len(requests))]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihoods of whole texts in nats, from windows of ``max_length`` tokens."""
        scores = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            scores.append(sum(score for score, _ in self._loglikelihood_tokens(parts)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), scores[-1])
        return scores

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the texts that the model writes, up to the first of the stops that a task names."""
        texts = []
        for context, options in progress([request.args for request in requests], len(requests), "", "answers"):
            given: dict[str, Any] = {**normalize_gen_kwargs(options)}
            stops, new_tokens = given["until"], given["max_gen_toks"]
            drawn = {"temperature": given.get("temperature", 0.0), "top_p": given.get("top_p", 1.0)}
            ids = (self.tok_encode(context) or [self.eot_token_id])[-max(1, self.max_length - new_tokens) :]
            decoder, text = self.coder.stream(), ""
            for token_B in self.model.stream(ids, new_tokens, **drawn):
                if int(token_B) == self.eot_token_id or any(stop in text for stop in stops if stop):
                    break
                text += decoder.push(int(token_B))
            texts.append(postprocess_generated_text(text + decoder.finish(), stops, None))
            self.cache_hook.add_partial("generate_until", (context, options), texts[-1])
        return texts

    def _questions(self, requests: Sequence[Request]) -> list[Question]:
        """Return neighbours with the same context as one question. A context of one token is not shared, because its
        answers are better sorted by their lengths."""
        questions: list[Question] = []
        for number, (_, context, answer) in enumerate(requests):
            context = context or [self.eot_token_id]  # of blanks alone: the harness moves them to the answer
            read = context[-max(1, self.max_length + 1 - len(answer)) :]  # the last token of an answer is never read
            last = questions[-1] if questions else None
            if last is None or len(read) == 1 or last.context != read or len(last.answers) == self.batch_size:
                last = Question(read)
                questions.append(last)
            last.answers[number] = answer
        return questions

    def _batches(self, questions: Sequence[Question]) -> list[list[Question]]:
        """Return batches of questions with equal numbers of answers, long ones first."""
        batches: list[list[Question]] = []
        by_size = sorted(questions, key=lambda question: question.size, reverse=True)
        for answers, alike in itertools.groupby(by_size, key=lambda question: len(question.answers)):
            group, several = list(alike), max(1, self.batch_size // answers)
            batches += [group[first : first + several] for first in range(0, len(group), several)]
        return batches

    @torch.no_grad()
    def _score(self, batch: Sequence[Question]) -> dict[int, tuple[float, bool]]:
        """Read the contexts of a batch once, then all answers; return scores by the number of the request.

        B questions, N answers of all of them, M tokens of the longest, T tokens of the longest context, V vocabulary.
        """
        device, each = next(self.model.parameters()).device, len(batch[0].answers)
        tokens_BT, documents_BT = as_batch([question.context for question in batch], device)
        out = self.model(tokens_BT, documents=documents_BT, memory=self.model.start(len(batch)), rows=1)
        answers = {number: ids for question in batch for number, ids in question.answers.items()}
        target_NM = pad_sequence(
            [torch.tensor(ids, dtype=torch.int64) for ids in answers.values()], batch_first=True
        ).to(device)
        parts = [_at(out.logits.repeat_interleave(each, dim=0), target_NM[:, :1])]
        if target_NM.shape[1] > 1:
            out = self.model(target_NM[:, :-1], memory=out.memory.expand(each))
            parts.append(_at(out.logits, target_NM[:, 1:]))  # padded on the right, where no earlier position looks
        logprob_NM, best_NM = (torch.cat(part, dim=1).cpu() for part in zip(*parts, strict=True))
        if logprob_NM.isnan().any():
            raise ValueError("the model's log-probabilities are not finite: look for NaN or infinity in its weights")
        return {
            number: (float(logprob_NM[n, : len(ids)].double().sum()), bool(best_NM[n, : len(ids)].all()))
            for n, (number, ids) in enumerate(answers.items())
        }


def _at(logits_NTV: Tensor, target_NT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of the targets, and whether each is the likeliest."""
    logprob_NTV = promoted(logits_NTV).log_softmax(-1)
    return logprob_NTV.gather(-1, target_NT[..., None])[..., 0], logprob_NTV.argmax(-1) == target_NT


def build(task: Task, data: str = "") -> list[Any]:
    """Return the harness's tasks with their documents, several for one with subtasks.

    Args:
        task: the task.
        data: the folder of its files; empty: the documents of the hub.

    Raises:
        ConfigError, FileNotFoundError: the task or its documents cannot be used; the message names the files.
    """
    name = task.harness or task.name
    paths, manager = task.paths(data), _manager(task.folder)
    if name not in manager.all_tasks:
        raise unknown("task", task.name, tasks.known(), "the paper's tables")
    try:
        loaded = manager.load([_local(task, name, paths) if paths else name])
    except Exception as error:  # the harness's own, of documents that a task does not fit
        files = ", ".join(map(str, paths.values())) or "the hub"
        raise ConfigError(f"task {task.name} cannot be read from {files}: {type(error).__name__}: {error}") from error
    built: list[Any] = list(loaded["tasks"].values())
    if built[0].OUTPUT_TYPE not in KINDS or "acc" not in built[0].aggregation():
        raise ConfigError(
            f"tasks must have acc by log-likelihoods, got {task.name} with {', '.join(built[0].aggregation())} by "
            f"{built[0].OUTPUT_TYPE}: use lm_eval.simple_evaluate with {__name__}.LM"
        )
    for one in built:
        one.set_config("num_fewshot", task.shots or one.config.num_fewshot or 0)
    return built


def measure(lm: LM, built: Sequence[Any], limit: int = 0, cache: Path | None = None) -> list[Record]:
    """Score a task by ``lm_eval.simple_evaluate``.

    Args:
        lm: the model.
        built: its tasks of the harness, from ``build``.
        limit: largest number of documents of each subtask, the first ones; 0: all.
        cache: the harness's ``use_cache``, where an interrupted call goes on; the file is removed at the end.

    Returns:
        Of every document the records of ``acc``, and of ``acc_norm`` where the task has it, with the number of the
        ``document``, its ``subtask``, ``loglikelihoods`` and ``greedy`` of the answers, and ``cut``: whether it did not
        fit into ``max_length``.
    """
    evaluate: Any = lm_eval.simple_evaluate  # its package declares no parameters
    found = evaluate(
        model=lm,
        tasks=list(built),
        task_manager=TaskManager(include_defaults=False),  # it would list all tasks again
        limit=limit or None,
        bootstrap_iters=0,
        use_cache=str(cache) if cache else None,
        **dict.fromkeys(SEEDS, SEED),
    )
    if cache:
        cache.with_name(f"{cache.name}_rank0.db").unlink(missing_ok=True)
    return [
        {**_document(lm, document), "subtask": one.config.task, "quantity": metric, "value": value, "weight": 1}
        for one in built
        for document in found["samples"][one.config.task]
        for metric in METRICS
        if (value := document.get(metric)) is not None
    ]


def _document(lm: LM, document: Mapping[str, Any]) -> Record:
    """Return the answers to a document."""
    longest = max(map("".join, document["arguments"]), key=len)
    loglikelihoods, greedy = zip(*document["filtered_resps"], strict=True)
    return {
        "document": document["doc_id"],
        "loglikelihoods": list(loglikelihoods),
        "greedy": list(greedy),
        "cut": len(lm.tok_encode(longest)) > lm.max_length + 1,
    }


@lru_cache
def _manager(folder: str) -> TaskManager:
    """Return the harness's tasks of one of its folders, or all of them, which takes some ten seconds."""
    if not folder:
        return TaskManager()
    return TaskManager(include_defaults=False, include_path=str(Path(str(lm_eval.__file__)).parent / "tasks" / folder))


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
