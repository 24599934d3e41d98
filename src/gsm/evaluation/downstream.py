"""Downstream tasks by the log-likelihoods of answers, and the paper's table with ours beside it.

    python evaluate.py checkpoint=logs/default tasks=paper data=FOLDER

A task has one file of results, with every sample's scores. Batches are planned from all samples and never change, so
that an evaluation that was interrupted ends with the numbers of one that was not.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from gsm import paths
from gsm.config.check import ConfigError
from gsm.config.command_line import read_arguments
from gsm.config.load import refusals
from gsm.data.tokenizer import Tokenizer
from gsm.evaluation import loglikelihood, ruler, task_files
from gsm.evaluation.checkpoints import Trained, home
from gsm.evaluation.loglikelihood import Question, Score
from gsm.evaluation.measure import Measure, publish
from gsm.evaluation.paper import Published, published
from gsm.evaluation.results import (
    ACCURACIES,
    Grid,
    Progress,
    Results,
    by_arm,
    difference,
    finish,
    means,
    side_by_side,
    silent,
)
from gsm.evaluation.ruler import Ruler
from gsm.evaluation.task_files import Sample, Task
from gsm.training.callbacks.summary import versions

LONGEST = 4096  # tokens of context in the paper's evaluation
ROWS = 32
NO_HARNESS = f"harness=true needs the extra eval: {paths.install('eval')}"
HUB = "hub"  # in the settings of results, where documents are not local files
# Of one checkpoint: `experiment`, `arm`, `seed`, `mixture`, `tasks`, each with `scores` and `samples`; `ruler`, its
# result or None.
Result = Mapping[str, Any]


@dataclass(frozen=True)
class Tasks(Measure):
    """Scores trained models on downstream tasks, and prints the paper's table with ours beside it.

    Every task leaves a file with the scores of all samples in tasks/ below the folder of its run; the same command goes
    on where it was interrupted. With several runs: mean and spread over the seeds of every arm, and how the arms differ
    from the first on the same questions. Of tasks=ablation RULER is a part: what lies in the ruler.json of a run, if
    that is of the same checkpoint. What output= names is the folder for the table: tasks.md, tasks.json.

    Args:
        tasks: paper (its Table 1), ablation (its retrieval ablation), or some of them: tasks=piqa,sciq, also yaml files
            of your own
        data: the folder of their documents, a file NAME.jsonl or NAME.jsonl.xz each
        limit: documents of a task at most, spread evenly over its file (with harness=true and no data: the first, of
            each subtask); such results lie in tasks_limit<n>/; 0: all
        context: tokens that a model reads at most, what is longer is cut on the left; 0: as in training, up to 4096
        batch_size: answers scored at a time
        harness: let lm-evaluation-harness do it (extra eval), without data with the documents of the hub
        ruler: true: for tasks=ablation, ask RULER too, as ruler=true does alone, and of what is not there yet; its own
            arguments as ruler.examples=20 ruler.lengths=4096,8192 (python evaluate.py ruler=true --help)
    """

    file: ClassVar[str] = "tasks.json"
    takes_folder: ClassVar[bool] = True

    tasks: Sequence[str] = ("paper",)
    data: str = ""
    limit: int = 0
    context: int = 0
    batch_size: int = ROWS
    harness: bool = False
    ruler: str = ""

    def __post_init__(self) -> None:
        for name, least in (("limit", 0), ("context", 0), ("batch_size", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}, but has to be {least} or more")
        if not self.data and not self.harness:
            raise ConfigError("tasks need their documents: say data=FOLDER, or harness=true to take them from the hub")
        _ = self.needles

    def require(self) -> None:
        """The harness, where it is asked for."""
        if self.harness and importlib.util.find_spec("lm_eval") is None:
            raise ConfigError(NO_HARNESS)

    def evaluate(self) -> list[dict[str, Any]]:
        """RULER first, where it is asked too."""
        if self.needles:
            self.needles.evaluate()
        return super().evaluate()

    @cached_property
    def table(self) -> Published | None:
        """The paper's table, where the tasks are those of one."""
        return published(",".join(self.tasks))

    @cached_property
    def texts(self) -> list[tuple[Task, list[Sample] | None]]:
        """The tasks with their samples; None: those of the hub. Raises ConfigError."""
        with refusals("tasks"):
            chosen = [task_files.load(name) for name in (self.table.rows if self.table else self.tasks)]
            if self.data:
                task_files.require(chosen, Path(self.data))
            return [
                (task, task_files.samples(task, Path(self.data), self.limit) if self.data else None) for task in chosen
            ]

    @property
    def needles(self) -> Ruler | None:
        """How RULER is asked; None: it is not. Raises ConfigError."""
        if self.ruler in ("", "false"):
            return None
        if not (self.table and self.table.ruler):
            raise ConfigError(
                "ruler=true stands beside tasks, but only tasks=ablation has it in its table: leave it out"
            )
        words = [] if self.ruler == "true" else self.ruler.split()
        without = {"checkpoint", "device", "output"}
        return Ruler(self.checkpoint, self.device, **read_arguments(words, Ruler, Ruler.script, without))

    def of(self, trained: Trained, file: Path) -> dict[str, Any]:
        """Scores of every task; each is kept in the run's folder by itself, and not measured again."""
        by_harness = _harness() if self.harness else None
        texts, data = self.texts, Path(self.data) if self.data else None
        model, tokenizer = trained.model, trained.tokenizer
        longest = self.context or min(LONGEST, trained.config["data"]["context"])
        settings = {
            **{"checkpoint": trained.digest, "context": longest, "rows": self.batch_size, "limit": self.limit},
            **{"precision": trained.precision, "device": trained.device_kind, "versions": versions()},
            "scorer": by_harness.version() if by_harness else "built in",
        }
        found = {}
        with trained.computing():
            for task, samples in texts:
                own = {**settings, "documents": documents_digest(task, data) if data else HUB}
                options: dict[str, Any] = {"max_length": longest, "rows": self.batch_size}
                options["progress"] = trained.progress("batches", f"{task.name}: ")
                if by_harness:
                    adapter = by_harness.Adapter(model, tokenizer, **options)
                    options = {"limit": self.limit, "file": self._samples_of(task.name, trained.file), "settings": own}
                    found[task.name] = by_harness.measure(adapter, task, samples, **options)
                else:
                    assert samples is not None  # there are data
                    options |= {"file": self._samples_of(task.name, trained.file), "settings": own}
                    found[task.name] = measure(model, tokenizer, task, samples, **options)
        report = model.parameter_report()
        return {**trained.facts, "mixture": report.active < report.total, "tasks": found}

    def conclude(self, results: Sequence[Result], place: Path) -> None:
        """The paper's table with its average, and what the arms differ by."""
        results = [{**result, "ruler": ruler.known(Path(result["checkpoint"]))} for result in results]
        tasks, table, arms = [task for task, _ in self.texts], self.table, by_arm(results)
        grids, said = [grid(tasks, arms, table), *differences(arms, table)], notes(arms, tasks, table)
        kept = [  # without their samples, which have a file of their own
            {
                **result,
                "tasks": {
                    name: {"settings": one["settings"], **one["scores"]} for name, one in result["tasks"].items()
                },
                **{"ruler": ruler.numbers(result["ruler"]), "values": values(result, table)},
            }
            for result in results
        ]
        print(f"\n{publish(place, grids, said, {'runs': kept})}")
        print("The scores of all samples are in the folders of the runs")

    def _samples_of(self, task: str, checkpoint: Path) -> Path:
        """The file of a task with every sample's scores."""
        folder = home(checkpoint) / (f"tasks_limit{self.limit}" if self.limit else "tasks")
        return folder / (f"{task}_harness.json" if self.harness else f"{task}.json")

    def written_in(self, folder: Path, run: Mapping[str, Any]) -> dict[str, Any]:
        """With the samples of every task, from the folder of the checkpoint's run."""
        (kept,) = self._written(folder)["runs"]
        files = {task: self._samples_of(task, Path(kept["checkpoint"])) for task in kept["tasks"]}
        found = {task: json.loads(file.read_text(encoding="utf-8")) for task, file in files.items()}
        return {**kept, "tasks": found, **run}

    @staticmethod
    def metrics(written: Mapping[str, Any]) -> dict[str, float]:
        """The score in percent of every task, and their `average`."""
        return written["runs"][0]["values"]


def measure(
    model: Any,
    tokenizer: Tokenizer,
    task: Task,
    samples: Sequence[Sample],
    *,
    max_length: int,
    rows: int = ROWS,
    file: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Scores the samples of a task.

    Args:
        model: as in ``loglikelihood.loglikelihoods``.
        tokenizer: the model's.
        task, samples: of ``task_files``.
        max_length: tokens that the model may read at most; what is longer is cut on the left.
        rows: continuations at a time.
        file: for the results, gone on from if its settings are the same (``Results``).
        settings: whatever the numbers depend on, as plain containers.
        progress: passes on the batches that are still to do.

    Returns:
        ``settings``, ``scores`` (see ``conclude``) and ``samples``: of each, the number of its document, ``subtask``,
        ``gold``, ``loglikelihoods`` and ``greedy`` of its pairs, ``cut`` tokens, and its metrics.

    Raises:
        ValueError: as ``loglikelihoods``.
    """
    texts = [pair for sample in samples for pair in sample.pairs]
    pairs = loglikelihood.encode_pairs(tokenizer.encode_batch, tokenizer.end_of_text, texts)
    batches = loglikelihood.plan(pairs, max_length=max_length, rows=rows)

    def places(batch: Sequence[Question]) -> list[str]:
        return [str(place) for question in batch for place in question.places]

    def compute(batch: Sequence[Question]) -> dict[str, Any]:
        return {str(place): astuple(score) for place, score in loglikelihood.score(model, batch).items()}

    results = Results(file, {"task": task.name, "samples": len(samples), **(settings or {})})
    if "samples" not in results.conclusion:
        results.fill(batches, places, compute, progress)
        scores = iter([Score(*results.cells[str(place)]) for place in range(len(pairs))])
        finish(
            results, task.metrics, [record(task, sample, [next(scores) for _ in sample.pairs]) for sample in samples]
        )
    return results.content()


def record(task: Task, sample: Sample, scores: Sequence[Score]) -> dict[str, Any]:
    """What is kept of a sample.

    The likeliest choice is taken, the first of equals; of a single pair, whether every token of it was the likeliest.
    """
    kept: dict[str, Any] = {
        **{"document": sample.document, "subtask": sample.subtask, "gold": sample.gold},
        "loglikelihoods": [score.loglikelihood for score in scores],
        "greedy": [score.greedy for score in scores],
        "cut": max(score.cut for score in scores),
    }
    for metric in task.metrics:
        each = [score.loglikelihood for score in scores]
        if metric == "acc_norm" and sample.lengths:
            each = [value / length for value, length in zip(each, sample.lengths, strict=True)]
        right = scores[0].greedy if len(scores) == 1 else each.index(max(each)) == sample.gold
        kept |= {metric: float(right)} if metric in ACCURACIES else {}
    return kept


def documents_digest(task: Task, folder: Path) -> str:
    """SHA-256 of a task's own file and of its documents, in hexadecimal."""
    found = hashlib.sha256()
    for path in (task.file, *(task_files.find(folder, name) for name in task.files)):
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


def _harness() -> Any:
    """The adapter's module. Raises ConfigError where the extra is missing."""
    try:
        from gsm.evaluation import harness
    except ImportError as error:
        raise ConfigError(f"{NO_HARNESS} ({error})") from error
    return harness


def values(result: Result, table: Published | None) -> dict[str, float]:
    """The score of every task and their unweighted mean (``average``), in percent; where the table has RULER, and the
    result too, also ``ruler_average`` and ``ruler_longest``."""
    each = {task: 100 * scored["scores"][metric(task, result, table)] for task, scored in result["tasks"].items()}
    further = ruler.numbers(result.get("ruler")) if table and table.ruler else {}
    beside = {f"ruler_{name}": value for name, value in further.items()}
    return {**each, "average": statistics.fmean(each.values()), **beside}


def metric(task: str, result: Result, table: Published | None) -> str:
    """What a task is scored by: as the paper does for such a model; outside its tables acc_norm where there is one."""
    if table:
        return table.rows[task]["mixture" if result["mixture"] else "dense"]
    return "acc_norm" if "acc_norm" in result["tasks"][task]["scores"] else "acc"


def grid(tasks: Sequence[Task], arms: Mapping[str, Mapping[Any, Result]], table: Published | None) -> Grid:
    """Tasks by models: ours, mean and standard deviation over seeds, then the paper's."""
    title = _mean_title(table)
    if table is None:
        rows = {task.name: task.title for task in tasks} | {"average": title}
        return side_by_side("task (%)", arms, rows, lambda result, name: values(result, None)[name])
    rows = {task.name: task.title + "+" * _depends(table, task.name) for task in tasks}
    rows |= {"average": title, **{f"ruler_{name}": ruler.TITLES[name] for name in table.ruler}}
    theirs = {name: row["values"] for name, row in table.rows.items()} | {"average": table.average}
    theirs |= {f"ruler_{name}": numbers for name, numbers in table.ruler.items()}
    return side_by_side(
        "task (%)", arms, rows, lambda result, name: values(result, table).get(name), table.columns, theirs
    )


def differences(arms: Mapping[str, Mapping[Any, Result]], table: Published | None) -> list[Grid]:
    """A table of every other arm minus the first: each question's score is the mean over the seeds that both arms have,
    the interval is the paired bootstrap's over questions. None for a single arm."""
    (arm, first), *others = arms.items()
    if not others:
        return []
    tasks = list(next(iter(first.values()))["tasks"])
    rows = [[f"minus {arm}, with 95 % interval", *(name for name, _ in others)]]
    for title, wanted in [*((task, [task]) for task in tasks), (_mean_title(table), tasks)]:
        scores = lambda results, wanted=wanted: {task: _questions(results, task, table) for task in wanted}  # noqa: E731
        rows.append([title, *(difference(first, other, scores) for _, other in others)])
    asked = [{seed: one["ruler"] for seed, one in seeds.items() if one["ruler"]} for seeds in arms.values()]
    last = next((str(ruler.longest(one)) for one in asked[0].values()), "")
    for name in table.ruler if table else ():
        which = lambda task, length, name=name: name != "longest" or length == last  # noqa: E731
        rows.append([ruler.TITLES[name], *(ruler.apart(asked[0], other, which) for other in asked[1:])])
    return [rows]


def _questions(results: Sequence[Result], task: str, table: Published | None) -> list[float]:
    """The score of each question of a task, the mean over these results."""
    each = []
    for result in results:
        samples = sorted(result["tasks"][task]["samples"], key=lambda one: (one["subtask"], one["document"]))
        each.append([one[metric(task, result, table)] for one in samples])
    return means(each)


def notes(arms: Mapping[str, Mapping[Any, Result]], tasks: Sequence[Task], table: Published | None) -> list[str]:
    """What has to be said about the numbers."""
    results = [result for seeds in arms.values() for result in seeds.values()]
    said = [f"The last columns are the paper's, {table.table}."] if table else []
    if table and any(_depends(table, name) for name in table.rows):
        said.append("+ acc_norm for dense models, acc for those with a mixture of experts; acc otherwise.")
    if len(results) > 1:
        said.append("mean +- sample standard deviation over the seeds of an arm")
    scored = results[0]["tasks"]
    documents = {task.name: scored[task.name]["settings"]["documents"] for task in tasks}
    said += [f"{task.title}: {task.note}." for task in tasks if task.note and documents[task.name] != HUB]
    few = [task for task in tasks if scored[task.name]["settings"]["limit"]]
    if few:
        counts = ", ".join(f"{task.title} {scored[task.name]['scores']['samples']:,}" for task in few)
        said.append(f"Limited: {counts} samples.")
    for task in tasks:
        most = max((result["tasks"][task.name]["scores"] for result in results), key=lambda one: one["cut"])
        if most["cut"]:
            cut = f"{most['cut']:,} of {most['samples']:,} contexts were cut on the left"
            said.append(f"{task.title}: {cut} to what the model reads.")
    if table and table.ruler:
        names = [f"{arm}/seed{result['seed']}" for arm, seeds in arms.items() for result in seeds.values()]
        said += ruler.notes([result["ruler"] for result in results], names)
    return said


def _mean_title(table: Published | None) -> str:
    """What the mean over tasks is called: beside RULER's, as the paper does."""
    return "Standard Avg." if table and table.ruler else "Avg."


def _depends(table: Published, task: str) -> bool:
    """Whether a task is scored otherwise for models with a mixture of experts."""
    return table.rows[task]["dense"] != table.rows[task]["mixture"]
