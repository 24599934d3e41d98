"""Downstream tasks from the command line: `python evaluate.py checkpoint=logs/default tasks=paper data=FOLDER`."""

from __future__ import annotations

import json
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gsm.config.check import ConfigError
from gsm.config.command_line import read_arguments
from gsm.config.load import load_model, read_checkpoint, refusals, tokenizer_of, usable
from gsm.data.tokenizer import Tokenizer
from gsm.evaluation import downstream, downstream_table, ruler_table, task_files
from gsm.evaluation.commands import ruler as asking
from gsm.evaluation.commands.scoring import autocast, checkpoints, device_name, home, precision_of, progress
from gsm.evaluation.loglikelihood import Progress
from gsm.evaluation.published import Published, published
from gsm.evaluation.task_files import Sample, Task
from gsm.experiments.report import shown
from gsm.experiments.table import WIDTH, RunSummary, grid_markdown, grid_text, summarise
from gsm.files import replacing, write_json
from gsm.training.callbacks.summary import versions

LONGEST = 4096  # tokens of context in the paper's evaluation
ROWS = 32


def evaluate(
    checkpoint: str,
    tasks: str,
    data: str = "",
    limit: int = 0,
    context: int = 0,
    batch_size: int = ROWS,
    harness: bool = False,
    ruler: str = "",
    device: str = "auto",
    output: str = "",
) -> list[dict[str, Any]]:
    """Scores trained models on downstream tasks, and prints the paper's table with ours beside it.

    Every task leaves a file with the scores of all samples in tasks/ below the folder of its run; the same command goes
    on where it was interrupted. With several runs: mean and spread over the seeds of every arm, and how the arms differ
    from the first on the same questions. Of tasks=ablation RULER is a part: what lies in the ruler.json of a run, if
    that is of the same checkpoint.

    Args:
        checkpoint: a .ckpt file, the folder of a run, or a folder above several runs, such as logs/<name>
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
        device: cpu, cuda, ...; auto: a GPU if there is one
        output: the folder for the table (tasks.md, tasks.json); left out: the folder of the run, or above several

    Raises:
        ConfigError, FileNotFoundError: a value out of range, or a file that cannot be used; the message says which.
    """
    for name, number, least in (("limit", limit, 0), ("context", context, 0), ("batch_size", batch_size, 1)):
        if number < least:
            raise ConfigError(f"{name} is {number}, but has to be {least} or more")
    if not data and not harness:
        raise ConfigError("tasks need their documents: say data=FOLDER, or harness=true to take them from the hub")
    found, device = checkpoints(checkpoint), usable(device)
    with refusals("tasks"):
        table = published(tasks)
        chosen = [task_files.load(name) for name in (table.rows if table else tasks.strip("[]").split(","))]
        texts = _texts(chosen, data, limit)
    asked = ruler_words(ruler, table)
    options = {"limit": limit, "context": context, "rows": batch_size, "harness": harness, "device": device}
    results = []
    for number, file in enumerate(found, 1):
        note = f"{number} of {len(found)}: " if len(found) > 1 else ""
        results.append(measure(file, texts, Path(data) if data else None, note=note, **options))
    if asked is not None:
        asking.evaluate(checkpoint, device=device, **asked)
    results = [{**result, "ruler": asking.known(file)} for result, file in zip(results, found, strict=True)]
    place = Path(output) if output else (home(found[0]) if len(found) == 1 else Path(checkpoint))
    _conclude(results, chosen, table, place)
    return results


def ruler_words(ruler: str, table: Published | None) -> dict[str, Any] | None:
    """The arguments that RULER is asked with, checked; None: it is not asked. Raises ConfigError."""
    if ruler in ("", "false"):
        return None
    if not (table and table.ruler):
        raise ConfigError("ruler=true stands beside tasks, but only tasks=ablation has it in its table: leave it out")
    words = [] if ruler == "true" else ruler.split()
    return read_arguments(words, asking.evaluate, "evaluate.py ruler=true", {"checkpoint", "device", "output"})


def measure(
    file: Path,
    texts: Sequence[tuple[Task, list[Sample] | None]],
    data: Path | None = None,
    *,
    limit: int = 0,
    context: int = 0,
    rows: int = ROWS,
    harness: bool = False,
    device: str = "cpu",
    note: str = "",
) -> dict[str, Any]:
    """The results of one checkpoint, by task; arguments as in ``evaluate``, and tasks with their samples (None: those
    of the hub)."""
    saved = read_checkpoint(file, mmap=True)
    config, tokenizer = saved["hyper_parameters"]["config"], tokenizer_of(saved, file)
    precision, model = precision_of(config, device), load_model(file, device)
    settings = {
        "checkpoint": downstream.digest(file),
        "context": context or min(LONGEST, config["data"]["context"]),
        **{"rows": rows, "limit": limit, "precision": precision},
        **{"device": device_name(device).partition(",")[0], "versions": versions()},
    }
    folder = home(file) / (f"tasks_limit{limit}" if limit else "tasks")
    scorer = _Scorer(model, tokenizer, data, folder, settings, note)
    with autocast(precision, device), refusals(str(file)):
        found = {task.name: (scorer.by_harness if harness else scorer.built_in)(task, each) for task, each in texts}
    report = model.parameter_report()
    return {
        "checkpoint": str(file),
        **{"experiment": config.get("name"), "arm": str(config.get("arm")), "seed": config.get("seed")},
        **{"step": saved.get("global_step"), "mixture": report.active < report.total, "tasks": found},
    }


def metrics(written: Mapping[str, Any]) -> dict[str, float]:
    """The score in percent of every task of one run's table, and their `average`."""
    return written["runs"][0]["values"]


@dataclass(frozen=True)
class _Scorer:
    """A model, and where its results go."""

    model: Any
    tokenizer: Tokenizer
    data: Path | None
    folder: Path
    settings: Mapping[str, Any]
    note: str

    def built_in(self, task: Task, samples: list[Sample] | None) -> dict[str, Any]:
        """By the project's own code."""
        assert samples is not None
        file, settings = self.folder / f"{task.name}.json", self._settings(task, "built in")
        self._announce(file, settings)
        options = {"max_length": settings["context"], "rows": settings["rows"], "progress": self._progress(task)}
        return downstream.evaluate(self.model, self.tokenizer, task, samples, file=file, settings=settings, **options)

    def by_harness(self, task: Task, samples: list[Sample] | None) -> dict[str, Any]:
        """By lm-evaluation-harness; what is finished is kept, task by task."""
        try:
            from gsm.evaluation import harness
        except ImportError as error:
            raise ConfigError(f"harness=true needs the extra eval: pip install -e '.[eval]' ({error})") from error
        file, settings = self.folder / f"{task.name}_harness.json", self._settings(task, harness.version())
        head = {"task": task.name, "settings": settings}
        found = downstream.finished(file, head)
        if found is None:
            self._announce(file, settings)
            options = {"max_length": settings["context"], "rows": settings["rows"], "progress": self._progress(task)}
            adapter = harness.Adapter(self.model, self.tokenizer, **options)
            found = {**head, **self._ask(harness, adapter, task, samples)}
            downstream.write(file, {key: found[key] for key in (*head, "scores")}, found["samples"])
        return found

    def _ask(self, harness: Any, adapter: Any, task: Task, samples: list[Sample] | None) -> dict[str, Any]:
        if samples is None:
            return harness.evaluate(adapter, task, limit=self.settings["limit"])
        with tempfile.TemporaryDirectory(prefix="gsm-tasks-") as folder:
            return harness.evaluate_local(adapter, task, samples, self.data, Path(folder))

    def _settings(self, task: Task, scorer: str) -> dict[str, Any]:
        documents = downstream.documents_digest(task, self.data) if self.data else downstream_table.HUB
        return {**self.settings, "scorer": scorer, "documents": documents}

    def _progress(self, task: Task) -> Progress:
        return lambda batches: progress(batches, len(batches), f"{self.note}{task.name}: ", "batches")

    def _announce(self, file: Path, settings: Mapping[str, Any]) -> None:
        """Says so where earlier results cannot be gone on from."""
        try:
            before = json.loads(file.read_text(encoding="utf-8"))["settings"]
        except (OSError, ValueError, KeyError, TypeError):
            return
        changed = [name for name, value in settings.items() if before.get(name) != value]
        if changed:
            print(f"{shown(file)} is begun anew: it was made with another {', '.join(changed)}", flush=True)


def _texts(tasks: Sequence[Task], data: str, limit: int) -> list[tuple[Task, list[Sample] | None]]:
    """The samples of each task, read and looked at before any model is; None where they come from the hub."""
    if not data:
        return [(task, None) for task in tasks]
    task_files.require(tasks, Path(data))
    return [(task, task_files.samples(task, Path(data), limit)) for task in tasks]


def _conclude(
    results: Sequence[Mapping[str, Any]], tasks: Sequence[Task], table: Published | None, place: Path
) -> None:
    """Prints the table and writes it."""
    scores = downstream_table.values(results, table)
    named = zip(downstream_table.by_arm(results), scores, strict=True)
    runs = [
        RunSummary(arm, int(result["seed"] or 0), Path(result["checkpoint"]), {"status": "finished", **values})
        for (arm, result), values in named
    ]
    columns = [*results[0]["tasks"], "average", *(f"ruler_{name}" for name in (table.ruler if table else ()))]
    cells = {row.arm: row.cells for row in summarise(runs, columns).rows}
    grids = [downstream_table.grid(tasks, cells, table), *downstream_table.differences(results, table)]
    notes = downstream_table.notes(results, tasks, table)
    print("\n\n".join(["", *map(grid_text, grids), "\n".join(textwrap.fill(note, WIDTH) for note in notes)]))
    kept = [
        {**result, "tasks": {name: _kept(found) for name, found in result["tasks"].items()}, "values": values}
        for result, values in zip(results, scores, strict=True)
    ]
    kept = [{**result, "ruler": ruler_table.numbers(result["ruler"])} for result in kept]
    try:
        write_json(place / "tasks.json", {"runs": kept, "tables": grids, "notes": notes})
        with replacing(place / "tasks.md") as opened:
            opened.write("\n\n".join([*map(grid_markdown, grids), *notes, ""]).encode())
    except OSError as error:
        raise ConfigError(f"{place} cannot be written to ({error.strerror}); say output=, another folder") from error
    print(
        f"\nWritten to {shown(place)}: tasks.md, tasks.json; the scores of all samples are in the folders of the runs"
    )


def _kept(found: Mapping[str, Any]) -> dict[str, Any]:
    """Results without their samples, which have a file of their own."""
    return {"settings": found["settings"], **found["scores"]}
