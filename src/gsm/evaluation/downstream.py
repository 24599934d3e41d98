"""Downstream tasks by lm-evaluation-harness, and the paper's table with ours beside it.

    python evaluate.py checkpoint=logs/default tasks=paper data=FOLDER

A task has one file of results, with every sample's scores. An interrupted evaluation goes on from the harness's cache
of answers (its ``use_cache``) in our cache folder: the harness reads it with pickle, so it never lies beside a
checkpoint.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from gsm import paths
from gsm.config.check import ConfigError
from gsm.config.load import refusals
from gsm.data.cache import cache_folder
from gsm.errors import within
from gsm.evaluation import tasks
from gsm.evaluation.checkpoints import Trained, home
from gsm.evaluation.measure import Measure, own_json, publish
from gsm.evaluation.paper import Published, published
from gsm.evaluation.results import Results, by_arm, difference, means, side_by_side
from gsm.evaluation.tasks import HUB, Task
from gsm.tables import Grid
from gsm.training.callbacks.summary import versions

LONGEST = 4096  # tokens of context in the paper's evaluation
ROWS = 32
# The result of one checkpoint: `experiment`, `arm`, `seed`, `mixture`, and `tasks`, each with `scores` and `samples`.
Result = Mapping[str, Any]


@dataclass(frozen=True)
class Tasks(Measure):
    """Score trained models on downstream tasks, and print the paper's table with ours beside it.

    lm-evaluation-harness (extra eval) makes the questions. Every task leaves a file with the scores of all samples in
    tasks/ below the folder of its run; the same command goes on where it was interrupted. With several runs: mean and
    spread over the seeds of every arm, and the differences of the arms from the first on the same questions. output=
    names the folder of the table: tasks.md, tasks.json.

    Args:
        tasks: paper (its Table 1), ablation (its retrieval ablation), or some of the harness's tasks: tasks=piqa,sciq
        data: the folder of their documents, a file NAME.jsonl or NAME.jsonl.xz each; left out: the hub
        limit: largest number of documents of each subtask, the first ones; such results lie in tasks_limit<n>/; 0: all
        context: largest number of tokens that a model reads, a longer context is cut on the left; 0: as in training,
            up to 4096
        batch_size: answers scored at a time
    """

    file: ClassVar[str] = "tasks.json"
    takes_folder: ClassVar[bool] = True

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
            raise ConfigError(
                f"tasks= is not allowed because lm-evaluation-harness is not installed. Use {paths.install('eval')}."
            )

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

    def of(self, trained: Trained, file: Path) -> dict[str, Any]:
        """Return the scores of every task. The run's folder keeps each, and a finished one is not measured again."""
        longest = self.context or min(LONGEST, trained.config["data"]["context"])
        settings = {
            **{"checkpoint": trained.digest, "context": longest, "rows": self.batch_size, "limit": self.limit},
            **{"precision": trained.precision, "device": trained.device_kind, "versions": versions()},
            "scorer": f"lm-eval {importlib.metadata.version('lm-eval')}",
        }
        kept = {
            task.name: Results(
                self._samples_of(task.name, trained.file),
                {"task": task.name, **settings, "documents": task.documents(self.data)},
            )
            for task in self.chosen
        }
        left = [name for name, results in kept.items() if "samples" not in results.conclusion]
        if left:
            from gsm.evaluation import harness

            questions = {name: self.questions[name] for name in left}
            key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
            lm = harness.LM(trained.model, trained.tokenizer, longest, self.batch_size)
            with trained.computing():
                scored = harness.measure(lm, questions, self.limit, cache_folder() / "lm_eval" / key)
            for name, content in scored.items():
                kept[name].save(**content)
        report = trained.model.parameter_report()
        tasks = {name: results.content() for name, results in kept.items()}
        return {**trained.facts, "mixture": report.active < report.total, "tasks": tasks}

    def conclude(self, results: Sequence[Result], place: Path) -> None:
        """Print and write the paper's table with its average, and the differences of the arms."""
        table, arms = self.table, by_arm(results)
        grids = [grid(self.chosen, arms, table), *differences(arms, table)]
        runs = [  # without their samples, which have a file of their own
            {
                **result,
                "tasks": {
                    name: {"settings": content["settings"], **content["scores"]}
                    for name, content in result["tasks"].items()
                },
                "values": values(result, table),
            }
            for result in results
        ]
        print(f"\n{publish(place, grids, notes(arms, self.chosen, table), {'runs': runs})}")
        print("The scores of all samples are in the folders of the runs")

    def _samples_of(self, task: str, checkpoint: Path) -> Path:
        """Return the file of a task with every sample's scores."""
        return home(checkpoint) / (f"tasks_limit{self.limit}" if self.limit else "tasks") / f"{task}.json"

    def written_in(self, folder: Path, run: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result with the samples of every task, from the folder of the checkpoint's run."""
        (written,) = self._written(folder)["runs"]
        files = {task: self._samples_of(task, Path(written["checkpoint"])) for task in written["tasks"]}
        return {**written, "tasks": {task: own_json(file) for task, file in files.items()}, **run}

    @staticmethod
    def metrics(written: Mapping[str, Any]) -> dict[str, float]:
        """Return the score of every task in percent, and their `average`."""
        return written["runs"][0]["values"]


def values(result: Result, table: Published | None) -> dict[str, float]:
    """Return the score of every task and their unweighted mean (``average``), in percent."""
    each = {task: 100 * scored["scores"][metric(task, result, table)] for task, scored in result["tasks"].items()}
    return {**each, "average": statistics.fmean(each.values())}


def metric(task: str, result: Result, table: Published | None) -> str:
    """Return the metric of a task: the paper's for such a model; outside its tables acc_norm where there is one."""
    if table:
        return table.rows[task]["mixture" if result["mixture"] else "dense"]
    return "acc_norm" if "acc_norm" in result["tasks"][task]["scores"] else "acc"


def grid(tasks: Sequence[Task], arms: Mapping[str, Mapping[Any, Result]], table: Published | None) -> Grid:
    """Return tasks by models: ours, mean and standard deviation over seeds, then the paper's."""
    rows = {task.name: task.title + "+" * _depends(table, task.name) for task in tasks} | {"average": "Avg."}
    papers = {name: row["values"] for name, row in table.rows.items()} | {"average": table.average} if table else {}
    columns = table.columns if table else ()
    return side_by_side("task (%)", arms, rows, lambda result, name: values(result, table)[name], columns, papers)


def differences(arms: Mapping[str, Mapping[Any, Result]], table: Published | None) -> list[Grid]:
    """Return a table of every other arm minus the first: each question's score is the mean over the common seeds, the
    interval is the paired bootstrap's over questions. No table for a single arm."""
    (arm, first), *later = arms.items()
    if not later:
        return []
    tasks = list(next(iter(first.values()))["tasks"])
    rows = [[f"minus {arm}, with 95 % interval", *(name for name, _ in later)]]
    for title, wanted in [*((task, [task]) for task in tasks), ("Avg.", tasks)]:

        def scores(results: Sequence[Result], wanted: Sequence[str] = wanted) -> dict[str, list[float]]:
            return {task: _questions(results, task, table) for task in wanted}

        rows.append([title, *(difference(first, other, scores) for _, other in later)])
    return [rows]


def _questions(results: Sequence[Result], task: str, table: Published | None) -> list[float]:
    """Return the score of each question of a task, the mean over these results."""
    each = []
    for result in results:
        samples = sorted(result["tasks"][task]["samples"], key=lambda row: (row["subtask"], row["document"]))
        each.append([sample[metric(task, result, table)] for sample in samples])
    return means(each)


def notes(arms: Mapping[str, Mapping[Any, Result]], tasks: Sequence[Task], table: Published | None) -> list[str]:
    """Return the sentences below the table."""
    results = [result for seeds in arms.values() for result in seeds.values()]
    sentences = [f"The last columns are the paper's, {table.table}."] if table else []
    if any(_depends(table, task.name) for task in tasks):
        sentences.append("+ acc_norm for dense models, acc for those with a mixture of experts; acc otherwise.")
    if len(results) > 1:
        sentences.append("mean +- sample standard deviation over the seeds of an arm")
    scored = results[0]["tasks"]
    documents = {task.name: scored[task.name]["settings"]["documents"] for task in tasks}
    sentences += [f"{task.title}: {task.note}." for task in tasks if task.note and documents[task.name] != HUB]
    few = [task for task in tasks if scored[task.name]["settings"]["limit"]]
    if few:
        counts = ", ".join(f"{task.title} {scored[task.name]['scores']['samples']:,}" for task in few)
        sentences.append(f"Limited: {counts} samples.")
    for task in tasks:
        most = max((result["tasks"][task.name]["scores"] for result in results), key=lambda one: one["cut"])
        if most["cut"]:
            cut = f"{most['cut']:,} of {most['samples']:,} contexts were cut on the left"
            sentences.append(f"{task.title}: {cut} to what the model reads.")
    return sentences


def _depends(table: Published | None, task: str) -> bool:
    """Return whether a task has another metric for models with a mixture of experts."""
    return table is not None and table.rows[task]["dense"] != table.rows[task]["mixture"]
