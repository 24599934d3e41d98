"""Ask a model RULER's tasks: its answers at every length, their scores, and the paper's tables beside ours.

    python evaluate.py checkpoint=logs/default ruler=true

The score of an answer is the share of the expected strings that it contains. Of a chain of thought only the text after
its last `Final answer:` counts. Without these words it is wrong, and results have the share of such answers. All
numbers are in percent. B prompts at a time, T tokens of each.
"""

from __future__ import annotations

import functools
import os
import re
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from gsm import plots
from gsm.config.check import ConfigError
from gsm.data.adaptation import BOTH, MARK, RESPONSES, TAUGHT, trained_lengths
from gsm.data.ingredients import Ingredients
from gsm.data.ruler import SEED, TASKS, Questions, Sample
from gsm.data.tokenizer import Tokenizer
from gsm.errors import within
from gsm.evaluation import paper
from gsm.evaluation.checkpoints import Trained
from gsm.evaluation.measure import Measure, publish
from gsm.evaluation.results import Progress, Results, by_arm, difference, means, side_by_side, silent
from gsm.tables import Grid, length_text

LENGTHS = (4096, 8192, 16384, 32768, 65536)
ADAPTED = "gsm.data.adaptation.RulerData"
INGREDIENTS = ("template", "haystack", "keys", "words", "text_field", "new_tokens")
CONTROL = re.compile(r"[\x00-\x1f]")
# The choices of the benchmark. Others are printed as deviations.
STANDARD = {
    "haystack": "PaulGrahamEssays.json",
    "template": "ruler",
    "sentences": "punkt",
    "keys": "wonderwords",
}
# Settings of the model rather than of the questions. Results compare if all others are equal.
OF_THE_MODEL = {"run", "step", "checkpoint", "precision", "device", "answers"}
Result = Mapping[str, Any]  # of `measure`
Arms = Mapping[str, Mapping[Any, Result]]  # by name and seed


@dataclass(frozen=True)
class Ruler(Measure):
    """Ask trained models RULER's tasks and print accuracies; the names below are given as ruler.examples=20, all but
    checkpoint=...

    A run that was adapted to them (data=ruler) is asked as it was trained, at its lengths and its context, unless these
    are given. Given again, the same command goes on where it was interrupted. The tables stand beside the paper's, and
    for several arms with the differences on the same questions, and a picture: ruler.md and ruler.png.

    Args:
        lengths: of question and answer, such as 4096,8192; left out: those of the paper up to the model's context
        tasks: some of niah_single_1,niah_single_2,niah_multikey_1,niah_multikey_2; left out: all but the last
        examples: of every task at every length
        answers: direct; or cot: the text behind the last "Final answer:" is judged
        template: ruler; or short, for small models
        haystack: python, the language reference that comes with Python; or the path of essays
        keys: builtin or wonderwords
        words: number of adjectives and of nouns
        text_field: where the text of essays stands in JSON
        new_tokens: kept free for an answer; no more are generated
        batch_size: prompts at a time
        seed: of the questions
    """

    script: ClassVar[str] = "evaluate.py ruler=true"
    file: ClassVar[str] = "ruler.json"

    lengths: Sequence[int] = ()
    tasks: Sequence[str] = ()
    examples: int = 20
    answers: str = ""
    template: str = ""
    haystack: str = ""
    keys: str = ""
    words: int = 0
    text_field: str = ""
    new_tokens: int = 0
    batch_size: int = 8
    seed: int = SEED

    def of(self, trained: Trained, file: Path) -> dict[str, Any]:
        """Return the recall of every cell; ``file`` holds each cell as soon as it is done."""
        ruler = self.adapted(trained)
        run = {name: str(value) for name, value in zip(("name", "arm", "seed"), trained.run.values(), strict=True)}
        identity = {"run": run, "step": trained.step, "checkpoint": trained.digest}
        identity |= {"precision": trained.precision, "device": trained.device_kind}
        with trained.computing():
            options: dict[str, Any] = {"identity": identity, "progress": trained.progress("questions")}
            return ruler.measure(trained.model, trained.tokenizer, path=file, **options)

    def adapted(self, trained: Trained) -> Ruler:
        """Return this measure with the choices of a run that was adapted to these tasks. Given choices stay."""
        data, context = trained.config["data"], trained.config["data"]["context"]
        adapted_data = data if data.get("_target_") == ADAPTED else {}
        choices = {
            name: adapted_data[name]
            for name in (*INGREDIENTS, "answers")
            if adapted_data.get(name) and not getattr(self, name)
        }
        if (self.answers or choices.get("answers")) == BOTH:
            raise ConfigError(
                f"ruler.answers is missing, and {trained.file} was trained with both kinds. Use ruler.answers=direct "
                "or ruler.answers=cot."
            )
        lengths = self.lengths or (
            sorted({*trained_lengths(adapted_data.get("lengths"), context), context})
            if adapted_data
            else [length for length in LENGTHS if length <= context]
        )
        if not lengths:
            raise ConfigError(
                f"ruler=true is not allowed because the model was trained on {context} tokens and the paper's shortest "
                f"length is {LENGTHS[0]}. Use ruler.lengths=, and ruler.template=short for small models."
            )
        return replace(self, **choices, lengths=lengths, tasks=self.tasks or adapted_data.get("tasks") or ())

    def measure(
        self,
        model: Any,
        tokenizer: Tokenizer,
        *,
        ingredients: Ingredients | None = None,
        path: str | os.PathLike[str] | None = None,
        identity: Mapping[str, Any] | None = None,
        progress: Progress = silent,
    ) -> dict[str, Any]:
        """Ask a model every task at every length, and score its answers.

        It answers greedily, in a static memory, until its end of text or for `new_tokens` of the ingredients. A direct
        answer also ends with its line.

        Args:
            model: gives the answers by `stream`, as in `LanguageModel`.
            tokenizer: its tokenizer.
            ingredients: of the samples; None: built from the fields.
            path: a JSON file for the result. A file with the same settings is continued (`Results`).
            identity: further settings, such as the checkpoint.
            progress: passes on the samples of a cell, and may show the place in them.

        Returns:
            `settings`, `cells` by `<task>/<length>` (each with `accuracy` in percent, and of every sample `prediction`
            and `score`), `averages` over the `asked` cells, and `unmarked`, the share of outputs without
            `Final answer:` in chains of thought.

        Raises:
            ValueError: a value is out of range, or a length holds no sample.
            OSError: the file cannot be written.
        """
        tasks, lengths, answers = self.tasks or TAUGHT, self.lengths or LENGTHS, self.answers or "direct"
        if not tasks or set(tasks) - set(TASKS):
            raise ConfigError(f"tasks={','.join(tasks)} is not allowed. Use some of {', '.join(TASKS)}.")
        if answers not in RESPONSES:
            raise ConfigError(f"answers={answers} is not allowed. Use {' or '.join(RESPONSES)}.")
        within(1, lengths=min(lengths), examples=self.examples, batch_size=self.batch_size)
        chosen: dict[str, Any] = {name: getattr(self, name) for name in INGREDIENTS if getattr(self, name)}
        made = ingredients or Ingredients.choose(**chosen)
        for task in tasks:  # a length that holds no sample is refused before a cell is measured
            Questions(task, tokenizer, made).sample(0, min(lengths), self.seed)
        settings = {"answers": answers, "examples": self.examples, "seed": self.seed, "tokenizer": tokenizer.digest}
        settings |= made.facts()
        results = Results(path, {**settings, **(identity or {})})
        cases = {f"{task}/{length}": (task, length) for task in tasks for length in lengths}

        def compute(name: str) -> dict[str, Any]:
            (task, length), start = cases[name], time.perf_counter()
            questions = Questions(task, tokenizer, made)
            samples = [questions.sample(index, length, self.seed) for index in range(self.examples)]
            texts = _answers(model, tokenizer, samples, self.batch_size, questions.new_tokens, answers == "direct")
            counted = progress(texts, self.examples, f"{name}: ")
            scored = [_scored(sample, count, text, answers) for sample, count, text in counted]
            cell = {"task": task, "length": length, "accuracy": accuracy(scored)}
            cell |= {"seconds": round(time.perf_counter() - start, 3)}
            return {name: {**cell, "samples": sorted(scored, key=lambda sample: sample["index"])}}

        results.fill(cases, lambda name: [name], compute)
        cells = {name: results.cells[name] for name in cases}  # the file keeps the others too
        marked = [sample["marked"] for cell in cells.values() for sample in cell["samples"]]
        further = {
            "asked": list(cells),
            "averages": averages(cells.values()),
            "unmarked": 1 - sum(marked) / len(marked),
        }
        results.save(**further)
        return {**results.content(), "cells": cells}

    def conclude(self, results: Sequence[Result], place: Path) -> None:
        """Print and write the tables, by arm. Raises ConfigError."""

        def run_of(result: Result) -> dict[str, Any]:
            run = result["settings"]["run"]
            return {**run, "experiment": run["name"]}

        arms = by_arm(results, run_of)
        grids = tables(arms, paper.tables()["ruler"]) if comparable(results) else []
        several = len(results) > 1
        picture = functools.partial(_picture, arms) if several and grids else None
        print(publish(place, grids, notes(results), {"runs": results} if several else None, picture))

    def written_in(self, folder: Path, run: Mapping[str, Any]) -> dict[str, Any]:
        """Return the asked cells, with the run among the settings."""
        result = self._written(folder)
        identity = {"name": run["experiment"], "arm": run["arm"], "seed": str(run["seed"])}
        cells = {name: result["cells"][name] for name in result["asked"]}
        return {**result, "cells": cells, "settings": {**result["settings"], "run": identity}}

    @staticmethod
    def metrics(written: Result) -> dict[str, float]:
        """Return accuracies in percent: the `average`, and the means of every length and of every task."""
        average_of = written["averages"]
        return {"average": average_of["average"], **average_of["by_length"], **average_of["by_task"]}


def complete(model: Any, tokenizer: Tokenizer, prompts: Sequence[list[int]], most: int, a_line: bool) -> list[str]:
    """Return the text of a model after each prompt, until its end of text or for `most` tokens.

    Args:
        prompts: their ids.
        a_line: stop at the end of a line that is not blank.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    unfinished = set(range(len(answers)))
    lengths = {len(ids) for ids in prompts}
    prompt = torch.tensor(prompts) if len(lengths) == 1 else prompts
    for token_B in model.stream(prompt, most, capacity=max(lengths) + most - 1):
        tokens = token_B.tolist()
        for row in sorted(unfinished):
            answers[row].append(tokens[row])
            if tokens[row] == tokenizer.end_of_text or a_line and "\n" in tokenizer.decode(answers[row]).lstrip():
                unfinished.remove(row)
        if not unfinished:
            break
    return [tokenizer.decode(ids) for ids in answers]


def final_answer(text: str, answers: str) -> str | None:
    """Return the part of an output that counts; None for a chain of thought (answers "cot") without an end."""
    _, mark, answer = text.rpartition(MARK)
    return text if answers != "cot" else answer if mark else None


def score(text: str | None, outputs: Sequence[str]) -> float:
    """Return the share of `outputs` that a text contains, in any case; 0 for None. Control characters are line ends."""
    if text is None:
        return 0.0
    text = CONTROL.sub("\n", text.strip()).strip().lower()
    return sum(output.lower() in text for output in outputs) / len(outputs)


def accuracy(samples: Iterable[Mapping[str, Any]]) -> float:
    """Return the mean score in percent."""
    return 100 * statistics.fmean(sample["score"] for sample in samples)


def averages(cells: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the paper's means: of each length over tasks, of each task over lengths, and of all lengths, unweighted.

    Args:
        cells: each with `task`, `length` and `accuracy`; every task at every length.
    """
    cells = list(cells)
    tasks, lengths = (dict.fromkeys(cell[name] for cell in cells) for name in ("task", "length"))
    by_length = {str(n): statistics.fmean(c["accuracy"] for c in cells if c["length"] == n) for n in sorted(lengths)}
    by_task = {task: statistics.fmean(c["accuracy"] for c in cells if c["task"] == task) for task in tasks}
    return {"by_length": by_length, "by_task": by_task, "average": statistics.fmean(by_length.values())}


def _answers(
    model: Any, tokenizer: Tokenizer, samples: Sequence[Sample], size: int, most: int, a_line: bool
) -> Iterator[tuple[Sample, int, str]]:
    """Yield every sample with the tokens of its prompt and the model's text. Similar lengths are asked together."""
    prompts = sorted(((each, tokenizer.encode(each.prompt)) for each in samples), key=lambda pair: len(pair[1]))
    for first in range(0, len(prompts), size):
        batch = prompts[first : first + size]
        texts = complete(model, tokenizer, [ids for _, ids in batch], most, a_line)
        yield from ((sample, len(ids), text) for (sample, ids), text in zip(batch, texts, strict=True))


def _scored(sample: Sample, tokens: int, prediction: str, answers: str) -> dict[str, Any]:
    answer = final_answer(prediction, answers)
    facts = {"index": sample.index, "tokens": tokens, "outputs": list(sample.outputs), "prediction": prediction}
    return {**facts, "marked": answer is not None, "score": score(answer, sample.outputs)}


def tables(arms: Arms, published: Mapping[str, Any]) -> list[Grid]:
    """Return lengths by arms and tasks by arms, beside the paper's columns, then the differences between arms.

    Args:
        arms: by name and seed, comparable results (`comparable`), in percent.
        published: the paper's `columns`, `by_length`, `by_task` and `average`.
    """
    first = next(iter(next(iter(arms.values())).values()))["averages"]
    lengths = {name: length_text(int(name)) for name in first["by_length"]} | {"average": "Avg."}
    tasks = {task: task for task in first["by_task"]}
    by_length = {str(length): values for length, values in published["by_length"].items()}
    by_length["average"] = published["average"]
    columns = [f"paper: {name}" for name in published["columns"]]

    def mean(result: Result, name: str) -> float:
        return Ruler.metrics(result)[name]

    grids = [
        side_by_side("length, %", arms, lengths, mean, columns, by_length),
        side_by_side("task, %", arms, tasks, mean, columns, published["by_task"]),
    ]
    (arm, base), *later = arms.items()
    if later:
        rows = [[f"minus {arm}, with 95 % interval", *(name for name, _ in later)]]
        for title, chosen in [("Avg.", list(tasks)), *((task, [task]) for task in tasks)]:
            rows.append([title, *(apart(base, other, chosen) for _, other in later)])
        grids.append(rows)
    return grids


def apart(first: Mapping[Any, Result], second: Mapping[Any, Result], tasks: Sequence[str]) -> str:
    """Return the second arm minus the first over the seeds that both have, with its interval.

    All of these tasks, and all lengths, have the same weight. The result is `-` without such a seed, or for other
    questions.

    Args:
        first, second: results by seed.
        tasks: their names.
    """

    def scores(results: list[Result]) -> dict[str, list[float]]:
        names = [name for name in results[0]["asked"] if name.split("/")[0] in tasks]
        each = [[[row["score"] for row in result["cells"][name]["samples"]] for result in results] for name in names]
        return dict(zip(names, map(means, each), strict=True))

    return difference(first, second, scores, comparable)


def comparable(results: Sequence[Result]) -> bool:
    """Return whether all results answer the same questions, in any form of answer, so that they compare."""
    questions = [
        ({name: value for name, value in result["settings"].items() if name not in OF_THE_MODEL}, result["asked"])
        for result in results
    ]
    return all(each == questions[0] for each in questions)


def notes(results: Sequence[Result]) -> list[str]:
    """Return the sentences below the tables: the questions, and the deviations from the benchmark."""
    settings = results[0]["settings"]
    lines = [f"{settings['examples']} examples of each task at each length (the paper: 4K to 64K)."]
    if changes := [f"{name}: {settings[name]}" for name, usual in STANDARD.items() if settings[name] != usual]:
        lines.append(f"Not as in the benchmark: {'; '.join(changes)}.")
    if unmarked := [result["unmarked"] for result in results if result["settings"]["answers"] == "cot"]:
        lines.append(f"Chains of thought without {MARK!r}: {100 * statistics.fmean(unmarked):.1f} %.")
    if not comparable(results):
        lines.append("These models had other questions and are not compared. Use the same ruler.* arguments for all.")
    return lines


def _picture(arms: Arms) -> bytes:
    """Draw the accuracy by length, the mean over tasks and each task. Raise ImportError without matplotlib."""

    def accuracies(result: Result, task: str) -> dict[int, float]:
        by_length, cells = result["averages"]["by_length"], result["cells"]
        return {int(n): cells[f"{task}/{n}"]["accuracy"] if task else value for n, value in by_length.items()}

    tasks = ["", *next(iter(next(iter(arms.values())).values()))["averages"]["by_task"]]
    lines = {
        task or "all tasks": {arm: [accuracies(seed, task) for seed in seeds.values()] for arm, seeds in arms.items()}
        for task in tasks
    }
    figure, panels = plots.figure(columns=2, width=3.8, height=2.6, rows=-(-len(lines) // 2))
    plots.lengths(panels, lines, "length (tokens)", "answered (%)", top=100)
    return plots.png(figure)
