"""Downstream tasks by lm-evaluation-harness, and the paper's table with ours beside it.

    python evaluate.py checkpoint=logs/default tasks=paper data=FOLDER

``tasks.jsonl`` has a line for every document. An interrupted task resumes from the harness's cache of answers
(``use_cache``) in our cache folder. The harness reads that cache with pickle, so it never lies beside a checkpoint.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from gsm import paths
from gsm.config.check import ConfigError
from gsm.config.load import refusals
from gsm.data.cache import cache_folder
from gsm.errors import within
from gsm.evaluation import tasks
from gsm.evaluation.checkpoints import Trained
from gsm.evaluation.measure import Measure
from gsm.evaluation.paper import Published, published
from gsm.evaluation.records import Arms, Measured, Record, mean, minus, over_arms, pivot, runs_of
from gsm.evaluation.tasks import HUB, Task
from gsm.tables import Grid

LONGEST = 4096  # tokens of context in the paper's evaluation
ROWS = 32


@dataclass(frozen=True)
class Tasks(Measure):
    """Score trained models on downstream tasks, and print the paper's table with ours beside it.

    lm-evaluation-harness (extra eval) makes the questions. tasks.jsonl in the folder of the run has the score of every
    document; the same command resumes an interrupted measurement. For several runs, tasks.md has mean and spread over
    the seeds of every arm, and the differences of the arms from the first on the same questions.

    Args:
        tasks: paper (its Table 1), ablation (its retrieval ablation), or some of the harness's tasks: tasks=piqa,sciq
        data: the folder of their documents, a file NAME.jsonl or NAME.jsonl.xz each; left out: the hub
        limit: largest number of documents of each subtask, the first ones; 0: all
        context: largest number of tokens that a model reads, a longer context is cut on the left; 0: as in training,
            up to 4096
        batch_size: answers scored at a time
    """

    name: ClassVar[str] = "tasks"

    tasks: Sequence[str] = ("paper",)
    data: str = ""
    limit: int = 0
    context: int = 0
    batch_size: int = ROWS

    def __post_init__(self) -> None:
        within(0, limit=self.limit, context=self.context)
        within(1, batch_size=self.batch_size)

    def require(self) -> None:
        """Raise ConfigError where lm-evaluation-harness is not installed."""
        if importlib.util.find_spec("lm_eval") is None:
            raise ConfigError(f"tasks needs lm-evaluation-harness, which is not installed: {paths.install('eval')}")

    @cached_property
    def table(self) -> Published | None:
        """The paper's table, if `tasks` names one."""
        return published(",".join(self.tasks))

    @cached_property
    def chosen(self) -> list[Task]:
        """The tasks. Raises ConfigError, also for missing files."""
        with refusals("tasks"):
            chosen = [tasks.load(name) for name in (self.table.rows if self.table else self.tasks)]
            for task in chosen:
                task.paths(self.data)
            return chosen

    @cached_property
    def questions(self) -> dict[str, Any]:
        """The harness's tasks of every task, by its name. Raises ConfigError."""
        from gsm.evaluation.harness import build  # imports lm_eval

        with refusals("tasks"):
            return {task.name: build(task, self.data) for task in self.chosen}

    def of(self, trained: Trained, file: Path | None) -> Measured:
        """Return the scores of every document of every task."""
        report = trained.model.parameter_report()
        settings = {"context": self.context or min(LONGEST, trained.config["data"]["context"]), "rows": self.batch_size}
        scorer = {"scorer": f"lm-eval {importlib.metadata.version('lm-eval')}"}
        measured = trained.measured(file, scorer, **settings, mixture=report.active < report.total)

        def compute(part: Record) -> list[Record]:
            from gsm.evaluation import harness

            name, lm = part["task"], harness.LM(trained.model, trained.tokenizer, settings["context"], self.batch_size)
            key = hashlib.sha256(json.dumps([part, measured.settings]).encode()).hexdigest()[:16]
            return harness.measure(lm, self.questions[name], self.limit, cache_folder() / "lm_eval" / key)

        with trained.computing():
            measured.fill(
                [
                    {"task": task.name, "documents": task.documents(self.data), "limit": self.limit}
                    for task in self.chosen
                ],
                compute,
                trained.progress("tasks"),
            )
        return measured

    def tables(self, arms: Arms) -> list[Grid]:
        """Return tasks by models, ours, then the paper's; and the differences of the arms from the first."""
        table = self.table
        scored = {arm: {seed: self.scored(one) for seed, one in seeds.items()} for arm, seeds in arms.items()}
        rows = {task.title + "+" * self._depends(task): {"task": task.name} for task in self.chosen} | {"Avg.": {}}
        published: dict[str, list[str]] = {}
        if table:
            values = [*(table.rows[task.name]["values"] for task in self.chosen), table.average]
            published = {row: [f"{x:.2f}" for x in numbers] for row, numbers in zip(rows, values, strict=True)}
        grid = pivot("task (%)", scored, rows, over_arms(2, 100, ["task"]), table.columns if table else (), published)
        each = {task.name: {"task": task.name} for task in self.chosen} | {"Avg.": {}}
        return [grid, *minus("minus ", scored, each, ["subtask", "document"], ["task", "documents"])]

    def scored(self, measured: Measured) -> Measured:
        """Return the records of one metric for each task: the paper's for such a model; outside its tables acc_norm
        where there is one."""
        table, kind = self.table, "mixture" if measured.settings["model"]["mixture"] else "dense"
        both = {record["task"] for record in measured.where(quantity="acc_norm")}
        metric = {
            task.name: table.rows[task.name][kind] if table else "acc_norm" if task.name in both else "acc"
            for task in self.chosen
        }
        return replace(
            measured, records=[record for record in measured.records if record["quantity"] == metric[record["task"]]]
        )

    def notes(self, arms: Arms) -> list[str]:
        """Return sentences on the documents, and on those that a model could not read whole."""
        runs = runs_of(arms)
        sentences = [f"The last columns are the paper's, {self.table.table}."] if self.table else []
        if any(map(self._depends, self.chosen)):
            sentences.append("+ acc_norm for dense models, acc for those with a mixture of experts; acc otherwise.")
        if len(runs) > 1:
            sentences.append("mean +- sample standard deviation over the seeds of an arm")
        read = [(task, runs[0].where(task=task.name, quantity="acc")) for task in self.chosen]
        sentences += [f"{task.title}: {task.note}." for task, r in read if task.note and r[0]["documents"] != HUB]
        if self.limit:
            sentences.append(f"Limited: {', '.join(f'{task.title} {len(r):,}' for task, r in read)} samples.")
        for task, records in read:
            if most := max(sum(r["cut"] for r in one.where(task=task.name, quantity="acc")) for one in runs):
                cut = f"{most:,} of {len(records):,} contexts were cut on the left"
                sentences.append(f"{task.title}: {cut} to what the model reads.")
        return sentences

    def metrics(self, measured: Measured) -> dict[str, Any]:
        """Return the score of every task in percent, and their `average`."""
        scored = self.scored(measured)
        rows = {**{task.name: {"task": task.name} for task in self.chosen}, "average": {}}
        return {name: 100 * (mean(scored.where(**keys), ["task"]) or 0.0) for name, keys in rows.items()}

    def _depends(self, task: Task) -> bool:
        """Return whether a task has another metric for models with a mixture of experts."""
        return self.table is not None and self.table.rows[task.name]["dense"] != self.table.rows[task.name]["mixture"]
