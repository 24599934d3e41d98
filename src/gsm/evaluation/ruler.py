"""Ask a model RULER's tasks: its answers at every length, their scores, and the paper's tables beside ours.

    python evaluate.py checkpoint=logs/default ruler=true

The score of an answer is the share of the expected strings that it contains. Of a chain of thought only the text after
its last `Final answer:` counts. Without these words it is wrong, and results have the share of such answers. All
numbers are in percent. B prompts at a time, T tokens of each.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
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
from gsm.evaluation.measure import Measure
from gsm.evaluation.records import (
    Arms,
    Measured,
    Progress,
    Record,
    mean,
    minus,
    over_arms,
    pivot,
    points,
    runs_of,
    silent,
)
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
SCORE: dict[str, Any] = {"quantity": "score"}
CELLS = ("task", "length")  # all of them count alike in an average, as in the paper


@dataclass(frozen=True)
class Ruler(Measure):
    """Ask trained models RULER's tasks and print accuracies. Arguments have the prefix ruler., as ruler.examples=20,
    all but checkpoint=...

    A run that was adapted to these tasks (data=ruler) is asked in the form, and at the lengths, of its training, and at
    its context, unless other values are given. The same command resumes an interrupted measurement: ruler.jsonl has a
    line for every answer. ruler.md has the tables beside the paper's, and for several arms the differences on the same
    questions; ruler.png is their picture.

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
        new_tokens: tokens kept free for an answer, and the most that are generated
        batch_size: prompts at a time
        seed: of the questions
    """

    script: ClassVar[str] = "evaluate.py ruler=true"
    name: ClassVar[str] = "ruler"

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

    def of(self, trained: Trained, file: Path | None) -> Measured:
        """Return the score of every answer."""
        ruler = self.adapted(trained)
        tokenizer, made = trained.tokenizer, ruler.ingredients()
        questions = {"examples": ruler.examples, "seed": ruler.seed, "tokenizer": tokenizer.digest, **made.facts()}
        measured = trained.measured(file, questions, answers=ruler.answers or "direct")
        with trained.computing():
            ruler.measure(trained.model, tokenizer, made, measured, trained.progress("questions"))
        return measured

    def ingredients(self) -> Ingredients:
        """Return the ingredients of the questions. Raises ConfigError."""
        return Ingredients.choose(**{name: getattr(self, name) for name in INGREDIENTS if getattr(self, name)})

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
                f"ruler.answers must be {' or '.join(RESPONSES)}, as {trained.file} was trained with both"
            )
        lengths = self.lengths or (
            sorted({*trained_lengths(adapted_data.get("lengths"), context), context})
            if adapted_data
            else [length for length in LENGTHS if length <= context]
        )
        if not lengths:
            raise ConfigError(
                f"ruler.lengths must be given for a model with a context of {context} tokens, as the paper's begin at "
                f"{LENGTHS[0]}; small models need ruler.template=short, too"
            )
        return replace(self, **choices, lengths=lengths, tasks=self.tasks or adapted_data.get("tasks") or ())

    def measure(
        self,
        model: Any,
        tokenizer: Tokenizer,
        made: Ingredients,
        measured: Measured,
        progress: Progress = silent,
    ) -> None:
        """Ask a model every task at every length, and score its answers.

        It answers greedily, in a static memory, until its end of text or for `new_tokens` of the ingredients. A direct
        answer also ends with its line.

        Args:
            model: gives the answers by `stream`, as in `LanguageModel`.
            tokenizer: its tokenizer.
            made: the ingredients of the questions.
            measured: gets the records: of every sample its `score`, with `prediction`, and `marked`, whether it has its
                `Final answer:`, which every direct answer has.
            progress: passes on the samples of a cell, and may show the place in them.

        Raises:
            ConfigError: a value is out of range, or a length holds no sample.
            OSError: the file cannot be written.
        """
        tasks, lengths, answers = self.tasks or TAUGHT, self.lengths or LENGTHS, self.answers or "direct"
        if not tasks or set(tasks) - set(TASKS):
            raise ConfigError(f"tasks must be some of {', '.join(TASKS)}, got {','.join(tasks)}")
        if answers not in RESPONSES:
            raise ConfigError(f"answers must be {' or '.join(RESPONSES)}, got {answers}")
        within(1, lengths=min(lengths), examples=self.examples, batch_size=self.batch_size)
        for task in tasks:  # raises for a length that is too short, before anything is measured
            Questions(task, tokenizer, made).sample(0, min(lengths), self.seed)

        def compute(part: Record) -> list[Record]:
            """Return a record for every answer to a task at a length, in the order of the samples, and the seconds."""
            task, length, start = part["task"], part["length"], time.perf_counter()
            questions = Questions(task, tokenizer, made)
            samples = [questions.sample(index, length, self.seed) for index in range(self.examples)]
            texts = _answers(model, tokenizer, samples, self.batch_size, questions.new_tokens, answers == "direct")
            counted = progress(texts, self.examples, f"{task}/{length}: ")
            scored = [_scored(sample, count, text, answers) for sample, count, text in counted]
            seconds = round(time.perf_counter() - start, 3)
            return [
                *sorted(scored, key=lambda one: one["index"]),
                {"quantity": "seconds", "value": seconds, "weight": 1},
            ]

        measured.fill([{"task": task, "length": length} for task in tasks for length in lengths], compute)

    def check(self, runs: Sequence[Measured]) -> None:
        """Raise ConfigError also for runs that were asked other tasks or lengths, by which their averages differ."""
        super().check(runs)
        for key in CELLS:
            first, *others = (_values(one, key) for one in runs)
            for values in others:
                if {*values} != {*first}:
                    raise ConfigError(f"ruler.{key}s must be the same for runs side by side, got {values} and {first}")

    def tables(self, arms: Arms) -> list[Grid]:
        """Return lengths by arms and tasks by arms, in percent, beside the paper's columns, then the differences."""
        asked, published = runs_of(arms)[0], paper.tables()["ruler"]
        tasks = {task: {"task": task, **SCORE} for task in _values(asked, "task")}
        lengths = {length_text(n): {"length": n, **SCORE} for n in sorted(_values(asked, "length"))}
        columns = [f"paper: {name}" for name in published["columns"]]
        by_length = {length_text(n): values for n, values in published["by_length"].items()}
        by_length["Avg."] = published["average"]
        cell = over_arms(2, 100, CELLS)
        return [
            pivot("length, %", arms, {**lengths, "Avg.": SCORE}, cell, columns, _texts(by_length)),
            pivot("task, %", arms, tasks, cell, columns, _texts(published["by_task"])),
            *minus("minus ", arms, {"Avg.": SCORE, **tasks}, ["index"], CELLS),
        ]

    def notes(self, arms: Arms) -> list[str]:
        """Return sentences on the questions, and on the deviations from the benchmark."""
        runs = runs_of(arms)
        questions = runs[0].settings["questions"]
        lines = [f"{questions['examples']} examples of each task at each length (the paper: 4K to 64K)."]
        if changes := [f"{name}: {questions[name]}" for name, usual in STANDARD.items() if questions[name] != usual]:
            lines.append(f"Not as in the benchmark: {'; '.join(changes)}.")
        if chains := [r for one in runs if one.settings["model"]["answers"] == "cot" for r in one.where(**SCORE)]:
            unmarked = 100 * sum(not record["marked"] for record in chains) / len(chains)
            lines.append(f"Chains of thought without {MARK!r}: {unmarked:.1f} %.")
        return lines

    def picture(self, arms: Arms) -> bytes | None:
        """Draw the accuracy by length, the mean over tasks and each task, of several runs."""
        runs = runs_of(arms)
        if len(runs) == 1:
            return None
        lines = {"all tasks": points(arms, "length", 100, **SCORE)}
        lines |= {task: points(arms, "length", 100, task=task, **SCORE) for task in _values(runs[0], "task")}
        figure, panels = plots.figure(columns=2, width=3.8, height=2.6, rows=-(-len(lines) // 2))
        plots.lengths(panels, lines, "length (tokens)", "answered (%)", top=100)
        return plots.png(figure)

    def metrics(self, measured: Measured) -> dict[str, Any]:
        """Return accuracies in percent: the `average`, and the means of every length and of every task."""
        rows = {"average": {}, **{str(n): {"length": n} for n in sorted(_values(measured, "length"))}}
        rows |= {task: {"task": task} for task in _values(measured, "task")}
        return {name: 100 * (mean(measured.where(**keys, **SCORE), CELLS) or 0.0) for name, keys in rows.items()}


def complete(model: Any, tokenizer: Tokenizer, prompts: Sequence[list[int]], most: int, a_line: bool) -> list[str]:
    """Return the text that a model generates after each prompt, up to its end of text or `most` tokens.

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


def _values(measured: Measured, key: str) -> list[Any]:
    """Return the values of a key, in their order."""
    return list(dict.fromkeys(record[key] for record in measured.where(**SCORE)))


def _texts(published: Mapping[Any, Sequence[float]]) -> dict[Any, list[str]]:
    return {name: [f"{number:.2f}" for number in numbers] for name, numbers in published.items()}


def _answers(
    model: Any, tokenizer: Tokenizer, samples: Sequence[Sample], size: int, most: int, a_line: bool
) -> Iterator[tuple[Sample, int, str]]:
    """Yield every sample with the tokens of its prompt and the model's text. Similar lengths are asked together."""
    prompts = sorted(((each, tokenizer.encode(each.prompt)) for each in samples), key=lambda pair: len(pair[1]))
    for first in range(0, len(prompts), size):
        batch = prompts[first : first + size]
        texts = complete(model, tokenizer, [ids for _, ids in batch], most, a_line)
        yield from ((sample, len(ids), text) for (sample, ids), text in zip(batch, texts, strict=True))


def _scored(sample: Sample, tokens: int, prediction: str, answers: str) -> Record:
    answer = final_answer(prediction, answers)
    facts = {"index": sample.index, "tokens": tokens, "outputs": list(sample.outputs), "prediction": prediction}
    return {**facts, "marked": answer is not None, **SCORE, "value": score(answer, sample.outputs), "weight": 1}
