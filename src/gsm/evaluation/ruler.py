"""RULER's tasks put to a model: its answers at every length, their scores, and the paper's tables beside ours.

    python evaluate.py checkpoint=logs/default ruler=true

An answer is right as far as it contains what was asked for. A chain of thought is judged by what follows its last
`Final answer:` alone; one without is wrong, and how many there were is reported. All numbers are in percent.
B prompts at a time, T tokens of each.
"""

from __future__ import annotations

import os
import re
import statistics
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from gsm.config.check import ConfigError
from gsm.data.adaptation import BOTH, MARK, RESPONSES, TAUGHT, trained_lengths
from gsm.data.ingredients import Ingredients
from gsm.data.ruler import SEED, Questions, Sample, read_samples
from gsm.data.ruler_tasks import TASKS
from gsm.data.tokenizer import Tokenizer
from gsm.evaluation import paper, plots
from gsm.evaluation.checkpoints import Trained, home
from gsm.evaluation.measure import Measure, publish
from gsm.evaluation.results import Grid, Progress, Results, by_arm, difference, means, side_by_side, silent, transposed
from gsm.experiments import weights
from gsm.experiments.table import WIDTH, grid_text
from gsm.files import read_json

LENGTHS = (4096, 8192, 16384, 32768, 65536)
ADAPTED = "gsm.data.adaptation.RulerData"
INGREDIENTS = ("template", "haystack", "keys", "words", "text_field", "digits", "new_tokens", "increment")
CONTROL = re.compile(r"[\x00-\x1f]")
# What the benchmark takes; what is otherwise is a deviation, and printed as one.
STANDARD = {"template": "ruler", "sentences": "punkt", "keys": "wonderwords", "digits": 7, "increment": None}
ESSAYS = "PaulGrahamEssays.json"
# In the settings of a result, what is the model's and not the question's: all else has to be the same to compare.
OF_THE_MODEL = {"run", "step", "checkpoint", "precision", "device", "answers"}
TITLES = {"average": "RULER Avg.", "longest": "RULER longest"}
Result = Mapping[str, Any]  # what `measure` returns
Arms = Mapping[str, Mapping[Any, Result]]  # by name and seed


class Writer(Protocol):
    """What is asked: any `LanguageModel` is one."""

    def stream(self, prompt: Any, max_new_tokens: int, *, chunk: int, capacity: int) -> Iterator[Tensor]:
        """Yields the likeliest next id of every sequence, int64 [B], after prompts: int64 [B,T], or a list of
        B lists of ids that differ in length."""
        ...


@dataclass(frozen=True)
class Ruler(Measure):
    """Asks trained models RULER's tasks and prints accuracies; the names below are given as ruler.examples=20,
    but checkpoint=...

    A run that was adapted to them (data=ruler) is asked as it was trained, at its lengths and its context, unless told
    otherwise. Given again, the same command goes on where it was interrupted. Several runs also become the paper's
    tables, by arm, with the differences between arms on the same questions, and a picture: ruler.md and ruler.png.

    Args:
        lengths: of question and answer, such as 4096,8192; left out: those of the paper up to the model's context
        tasks: some of niah_single_1,niah_single_2,niah_single_3,niah_multikey_1,niah_multikey_2,niah_multikey_3,
            niah_multivalue,niah_multiquery,vt,cwe,fwe; left out: niah_single_1,niah_single_2,niah_multikey_1
        examples: of every task at every length
        answers: direct; or cot: what follows the last "Final answer:" is judged
        template: ruler; or short, for small models
        haystack: python, the language reference that comes with Python; or the path of essays
        keys: builtin, wonderwords, or the path of word lists
        words: so many adjectives and as many nouns
        text_field: where the text of essays stands in JSON
        digits: of a number
        new_tokens: kept free for an answer, and at most so many are generated
        increment: words (or lines) by which a text that is too long is cut
        files: a folder with <length>/<task>.jsonl that the benchmark has prepared, instead of questions made here
        batch_size: prompts at a time
        chunk: tokens of a prompt that are read at a time
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
    digits: int = 0
    new_tokens: int = 0
    increment: int = 0
    files: str = ""
    batch_size: int = 8
    chunk: int = 4096
    seed: int = SEED

    def own_file(self, checkpoint: Path) -> Path:
        return _place(checkpoint)

    def of(self, trained: Trained, file: Path) -> dict[str, Any]:
        """Recall of every cell; each is kept in ``file`` as it is done."""
        asked = self.adapted(trained)
        run = {name: str(value) for name, value in zip(("name", "arm", "seed"), trained.run.values(), strict=True)}
        identity = {"run": run, "step": trained.step, "checkpoint": trained.digest}
        identity |= {"precision": trained.precision, "device": trained.device_kind}
        with trained.computing():
            result = asked.measure(
                trained.model,
                trained.tokenizer,
                path=file,
                identity=identity,
                progress=trained.progress("questions"),
                say=lambda line: print(line, flush=True),
            )
        print(f"{_name(result)}\n{table(result)}\nWritten to {file}\n", flush=True)
        return result

    def adapted(self, trained: Trained) -> Ruler:
        """The same, asked as the run was trained where it was adapted to these tasks and nothing else is said."""
        data, context = trained.config["data"], trained.config["data"]["context"]
        own = data if data.get("_target_") == ADAPTED else {}
        said = {name: own[name] for name in (*INGREDIENTS, "answers") if own.get(name) and not getattr(self, name)}
        if (self.answers or said.get("answers")) == BOTH:
            raise ConfigError(
                f"{trained.file} was trained with answers both; say ruler.answers=direct or ruler.answers=cot"
            )
        lengths = self.lengths or (
            sorted({*trained_lengths(own.get("lengths"), context), context})
            if own
            else [length for length in LENGTHS if length <= context]
        )
        if not lengths:
            raise ConfigError(
                f"the model was trained on {context} tokens and the shortest length of the paper is {LENGTHS[0]}; "
                "say ruler.lengths=, and ruler.template=short for small models"
            )
        return replace(self, **said, lengths=lengths, tasks=self.tasks or own.get("tasks") or ())

    def measure(
        self,
        model: Writer,
        tokenizer: Tokenizer,
        *,
        ingredients: Ingredients | None = None,
        path: str | os.PathLike[str] | None = None,
        identity: Mapping[str, Any] | None = None,
        progress: Progress = silent,
        say: Callable[[str], object] = lambda line: None,
    ) -> dict[str, Any]:
        """Asks a model every task at every length, and scores what it says.

        It answers greedily, in a static memory, until its end of text, with direct answers also until the end of a
        line, or until `new_tokens` of the ingredients.

        Args:
            model: what is asked.
            tokenizer: its tokenizer.
            ingredients: what samples are made of; None: as the fields say.
            path: a JSON file for the result, gone on from if its settings are the same (`Results`).
            identity: what else tells this evaluation from others, such as the checkpoint; a part of the settings.
            progress: passes on the samples of a cell, and may say how far it is.
            say: takes a line for every cell that is done.

        Returns:
            `settings`, `cells` by `<task>/<length>` (each with `accuracy` in percent, and of every sample `prediction`
            and `score`), `averages` over the cells that were `asked`, and `unmarked`, the share of outputs without
            `Final answer:` where it is wanted.

        Raises:
            ValueError: a value is out of range, a length holds no sample.
            OSError: the file cannot be written.
        """
        tasks, lengths, answers = self.tasks or TAUGHT, self.lengths or LENGTHS, self.answers or "direct"
        _check(tasks, lengths, self.examples, answers, self.batch_size)
        chosen: dict[str, Any] = {name: getattr(self, name) for name in INGREDIENTS if getattr(self, name)}
        made = ingredients or Ingredients.choose(**chosen)
        settings = {"answers": answers, "examples": self.examples, "seed": self.seed, "tokenizer": tokenizer.digest}
        settings |= {"files": self.files, "new_tokens": made.new_tokens} if self.files else made.facts()
        results = Results(path, {**settings, **(identity or {})})
        asked = {f"{task}/{length}": (task, length) for task in tasks for length in lengths}
        for name in (name for name in asked if name in results.cells):
            say(f"{name}: {results.cells[name]['accuracy']:.2f} %, from {path}")

        def compute(name: str) -> dict[str, Any]:
            (task, length), start = asked[name], time.perf_counter()
            questions = Questions(task, tokenizer, made)
            samples, most = self._samples(questions, length), questions.new_tokens
            said = _answers(model, tokenizer, samples, self.batch_size, most, answers == "direct", self.chunk)
            counted = progress(said, self.examples, f"{name}: ")
            scored = [_scored(sample, count, text, answers) for sample, count, text in counted]
            found = {"task": task, "length": length, "accuracy": accuracy(scored)}
            found |= {"seconds": round(time.perf_counter() - start, 3)}
            say(f"{name}: {found['accuracy']:.2f} % of {self.examples}, {found['seconds']:.1f} s")
            return {name: {**found, "samples": sorted(scored, key=lambda sample: sample["index"])}}

        results.fill(asked, lambda name: [name], compute)
        cells = {name: results.cells[name] for name in asked}  # the file keeps the others too
        marked = [sample["marked"] for cell in cells.values() for sample in cell["samples"]]
        further = {
            "asked": list(cells),
            "averages": averages(cells.values()),
            "unmarked": 1 - sum(marked) / len(marked),
        }
        results.save(**further)
        return {**results.content(), "cells": cells}

    def conclude(self, results: Sequence[Result], place: Path) -> None:
        """The arms side by side, where there are several runs."""
        if len(results) > 1:
            print(side_by_side_of(results, place))

    def written_in(self, folder: Path, run: Mapping[str, Any]) -> dict[str, Any]:
        """The cells that were asked, the run among the settings."""
        found = self._written(folder)
        own = {"name": run["experiment"], "arm": run["arm"], "seed": str(run["seed"])}
        return {**_of_asked(found), "settings": {**found["settings"], "run": own}}

    @staticmethod
    def metrics(written: Result) -> dict[str, float]:
        """Accuracies in percent: the `average`, and the means of every length and of every task."""
        found = written["averages"]
        return {"average": found["average"], **found["by_length"], **found["by_task"]}

    def _samples(self, questions: Questions, length: int) -> list[Sample]:
        """The samples of a cell; of a file the first ones. Raises ValueError where it holds fewer."""
        if not self.files:
            return [questions.sample(index, length, self.seed) for index in range(self.examples)]
        file = Path(self.files) / str(length) / f"{questions.name}.jsonl"
        samples = read_samples(file)
        if len(samples) < self.examples:
            raise ValueError(f"{file} holds {len(samples)} samples, and examples is {self.examples}; take fewer")
        return samples[: self.examples]


def complete(
    model: Writer, tokenizer: Tokenizer, prompts: Sequence[list[int]], most: int, a_line: bool, chunk: int = 4096
) -> list[str]:
    """What a model writes after each prompt, until its end of text or for `most` tokens.

    Args:
        prompts: their ids.
        a_line: stop at the end of a line that holds something.
    """
    made: list[list[int]] = [[] for _ in prompts]
    going = set(range(len(made)))
    lengths = {len(ids) for ids in prompts}
    prompt = torch.tensor(prompts) if len(lengths) == 1 else prompts
    for token_B in model.stream(prompt, most, chunk=chunk, capacity=max(lengths) + most - 1):
        told = token_B.tolist()
        for row in sorted(going):
            made[row].append(told[row])
            if told[row] == tokenizer.end_of_text or a_line and "\n" in tokenizer.decode(made[row]).lstrip():
                going.remove(row)
        if not going:
            break
    return [tokenizer.decode(ids) for ids in made]


def final_answer(text: str, answers: str) -> str | None:
    """The part of an output that is judged; None where a chain of thought (answers "cot") does not come to an end."""
    _, mark, answer = text.rpartition(MARK)
    return text if answers != "cot" else answer if mark else None


def score(text: str | None, outputs: Sequence[str]) -> float:
    """The share of `outputs` that a text contains, in whatever case, control characters being line ends; 0 for None."""
    if text is None:
        return 0.0
    text = CONTROL.sub("\n", text.strip()).strip().lower()
    return sum(output.lower() in text for output in outputs) / len(outputs)


def accuracy(samples: Iterable[Mapping[str, Any]]) -> float:
    """Mean score in percent."""
    return 100 * statistics.fmean(sample["score"] for sample in samples)


def averages(cells: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The paper's means: of each length over tasks, of each task over lengths, and of all lengths, unweighted.

    Args:
        cells: each with `task`, `length` and `accuracy`; every task at every length.
    """
    cells = list(cells)
    tasks, lengths = (dict.fromkeys(cell[name] for cell in cells) for name in ("task", "length"))
    by_length = {str(n): statistics.fmean(c["accuracy"] for c in cells if c["length"] == n) for n in sorted(lengths)}
    by_task = {task: statistics.fmean(c["accuracy"] for c in cells if c["task"] == task) for task in tasks}
    return {"by_length": by_length, "by_task": by_task, "average": statistics.fmean(by_length.values())}


def _check(tasks: Sequence[str], lengths: Sequence[int], examples: int, answers: str, batch_size: int) -> None:
    if not tasks or set(tasks) - set(TASKS):
        raise ValueError(f"tasks {list(tasks)} must be some of {', '.join(TASKS)}")
    if not lengths or min(lengths) < 1 or examples < 1 or batch_size < 1:
        raise ValueError(
            f"lengths {list(lengths)}, examples {examples} and batch_size {batch_size} must be at least 1 each"
        )
    if answers not in RESPONSES:
        raise ValueError(f"answers {answers!r} is unknown; the known ones are {', '.join(RESPONSES)}")


def _answers(
    model: Writer, tokenizer: Tokenizer, samples: Sequence[Sample], size: int, most: int, a_line: bool, chunk: int
) -> Iterator[tuple[Sample, int, str]]:
    """Every sample with the tokens of its prompt and what the model says; similar lengths are asked together."""
    prompts = sorted(((one, tokenizer.encode(one.prompt)) for one in samples), key=lambda pair: len(pair[1]))
    for first in range(0, len(prompts), size):
        batch = prompts[first : first + size]
        said = complete(model, tokenizer, [ids for _, ids in batch], most, a_line, chunk)
        yield from ((sample, len(ids), text) for (sample, ids), text in zip(batch, said, strict=True))


def _scored(sample: Sample, tokens: int, said: str, answers: str) -> dict[str, Any]:
    judged = final_answer(said, answers)
    facts = {"index": sample.index, "tokens": tokens, "outputs": list(sample.outputs), "prediction": said}
    return {**facts, "marked": judged is not None, "score": score(judged, sample.outputs)}


def known(file: Path) -> dict[str, Any] | None:
    """What was found of a checkpoint before; None where there is nothing, or only of other weights."""
    found = _read(_place(file))
    if found is None or found["settings"]["checkpoint"] != weights.digest(file):
        return None
    return _of_asked(found)


def _of_asked(found: Result) -> dict[str, Any]:
    """A result without the cells of earlier questions, which its file keeps."""
    return {**found, "cells": {name: found["cells"][name] for name in found["asked"]}}


def _place(file: Path) -> Path:
    """The ruler.json of a checkpoint: beside it, or of an evaluation after the same run."""
    own = home(file) / "ruler.json"
    others = [path for path in sorted(home(file).parent.glob("*/ruler.json")) if path != own]
    if own.is_file() or not others:
        return own
    of_it = [p for p in others if (found := _read(p)) and found["settings"]["checkpoint"] == weights.digest(file)]
    return of_it[0] if of_it else own


def _read(path: Path) -> dict[str, Any] | None:
    """A finished result; None for what is missing, damaged, not finished, or something else."""
    found = read_json(path) or {}
    finished = {"averages", "asked", "cells", "settings"} <= set(found) and "checkpoint" in found["settings"]
    return found if finished else None


def _name(result: Result) -> str:
    run = result["settings"]["run"]
    return f"{run['name']}/{run['arm']}/seed{run['seed']}"


def table(result: Result) -> str:
    """Tasks by lengths of one model, with the means over both, and what is not as in the benchmark."""
    found, lengths = result["averages"], list(result["averages"]["by_length"])
    rows = [["task, %", *(shown(int(length)) for length in lengths), "Avg."]]
    for task, mean in found["by_task"].items():
        each = [result["cells"][f"{task}/{length}"]["accuracy"] for length in lengths]
        rows.append([task, *(f"{value:.2f}" for value in (*each, mean))])
    rows.append(["mean", *(f"{value:.2f}" for value in (*found["by_length"].values(), found["average"]))])
    return "\n".join([grid_text(rows), "", *(textwrap.fill(note, WIDTH) for note in notes([result], [""]))])


def side_by_side_of(results: Sequence[Result], place: Path) -> str:
    """Several runs in the paper's tables, by arm, written to a file (`ruler.json`) and beside it; as text. Raises
    ConfigError where these cannot be written."""
    said = notes(results, [_name(result) for result in results])
    if not alike(results):
        return publish(place, [], said, {"runs": results})
    arms = by_arm(results, lambda result: {**(run := result["settings"]["run"]), "experiment": run["name"]})
    return publish(place, tables(arms, paper.tables()["ruler"]), said, {"runs": results}, lambda: _picture(arms))


def tables(arms: Arms, published: Mapping[str, Any]) -> list[Grid]:
    """The paper's tables of RULER: arms by lengths, tasks by arms, beside its own; then every task at every length, and
    how the other arms differ from the first.

    Args:
        arms: by name and seed, results that are `alike`, in percent.
        published: the paper's `columns`, `by_length`, `by_task` and `average`.
    """
    first, columns = next(iter(next(iter(arms.values())).values())), published["columns"]
    lengths = {length: shown(int(length)) for length in first["averages"]["by_length"]}
    tasks = {task: task for task in first["averages"]["by_task"]}
    theirs = {str(length): values for length, values in published["by_length"].items()}
    titles = {**{length: shown(int(length)) for length in theirs}, "average": "Avg."}
    theirs["average"] = published["average"]

    def mean(result: Result, name: str) -> float:
        return Ruler.metrics(result)[name]

    def accuracy_of(cell: tuple[Result, str], length: str) -> float:
        return cell[0]["cells"][f"{cell[1]}/{length}"]["accuracy"]

    each = {f"{arm}, {task}": {n: (one, task) for n, one in of.items()} for arm, of in arms.items() for task in tasks}
    grids = [
        transposed(side_by_side("RULER, %", arms, {**lengths, "average": "Avg."}, mean)),
        transposed(side_by_side("the paper, 1.5B GSM", {}, titles, mean, columns, theirs)),
        side_by_side("task, %", arms, tasks, mean, [f"paper: {name}" for name in columns], published["by_task"]),
        transposed(side_by_side("arm, task, %", each, lengths, accuracy_of)),
    ]
    return [*grids, *([_differences(arms, list(tasks), list(lengths)[-1])] if len(arms) > 1 else [])]


def _differences(arms: Arms, tasks: Sequence[str], last: str) -> Grid:
    first, *others = arms
    wanted: dict[str, Callable[[str, str], bool]] = {
        "Avg.": lambda task, length: True,
        f"at {shown(int(last))}": lambda task, length: length == last,
        **{name: (lambda task, length, name=name: task == name) for name in tasks},
    }
    rows = [[f"minus {first}, with 95 % interval", *others]]
    return rows + [[name, *(apart(arms[first], arms[arm], which) for arm in others)] for name, which in wanted.items()]


def apart(first: Mapping[Any, Result], second: Mapping[Any, Result], wanted: Callable[[str, str], bool]) -> str:
    """Second arm minus first over the seeds that both have, with its interval; tasks and lengths count alike. `-` where
    there is no such seed, or the questions are not the same.

    Args:
        first, second: results by seed.
        wanted: whether a task counts at a length (both as strings).
    """

    def scores(results: list[Result]) -> dict[str, list[float]]:
        cells = [name for name in results[0]["asked"] if wanted(*name.split("/"))]
        each = [[[sample["score"] for sample in one["cells"][name]["samples"]] for one in results] for name in cells]
        return dict(zip(cells, map(means, each), strict=True))

    return difference(first, second, scores, alike)


def alike(results: Sequence[Result | None]) -> bool:
    """Whether all results there are answer the same questions, in whatever form, so that they can be compared."""
    asked = [
        ({name: value for name, value in one["settings"].items() if name not in OF_THE_MODEL}, one["asked"])
        for one in results
        if one is not None
    ]
    return all(one == asked[0] for one in asked)


def numbers(result: Result | None) -> dict[str, float]:
    """`average` over all lengths, and that of the `longest`, in percent; empty without a result."""
    if result is None:
        return {}
    found = result["averages"]
    return {"average": found["average"], "longest": found["by_length"][str(longest(result))]}


def longest(result: Result) -> int:
    """The longest length that was asked, in tokens."""
    return max(map(int, result["averages"]["by_length"]))


def notes(results: Sequence[Result | None], names: Sequence[str]) -> list[str]:
    """What has to be said: what was asked, what is not as in the benchmark, and which models have no result."""
    found = [one for one in results if one is not None]
    said = []
    for one in found[:1]:
        lengths = ", ".join(shown(int(length)) for length in one["averages"]["by_length"])
        answers = " or ".join(dict.fromkeys(each["settings"]["answers"] for each in found))
        said.append(
            f"RULER: {len(one['averages']['by_task'])} tasks at {lengths} tokens (the paper: 4K to 64K), "
            f"{one['settings']['examples']} examples of each, answers {answers}."
        )
        otherwise = deviations(one["settings"])
        said += [f"RULER, not as in the benchmark: {'; '.join(otherwise)}."] if otherwise else []
    unmarked = [one["unmarked"] for one in found if one["settings"]["answers"] == "cot"]
    said += [f"Chains of thought without {MARK!r}: {100 * statistics.fmean(unmarked):.1f} %."] if unmarked else []
    if not alike(results):
        said.append(
            "RULER: these models were not asked the same and are not compared; ask them with ruler=true and one "
            "ruler.lengths= (and ruler.examples=, ...) for all."
        )
    missing = [name for name, one in zip(names, results, strict=True) if one is None]
    if missing:
        said.append(f"RULER: nothing for {', '.join(missing)}; ruler=true asks, and goes on where it was interrupted.")
    return said


def deviations(settings: Mapping[str, Any]) -> list[str]:
    """What was chosen otherwise than in the benchmark, as `name: value`."""
    named = [
        f"{name}: {settings[name]}" for name, value in STANDARD.items() if name in settings and settings[name] != value
    ]
    haystack = settings.get("haystack", ESSAYS)
    return [*([f"haystack: {haystack}"] if haystack != ESSAYS else []), *named]


def shown(length: int) -> str:
    """4096 as 4K."""
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def _picture(arms: Arms) -> bytes:
    """Accuracy by length, of the tasks together and of each. Raises ImportError where matplotlib is missing."""

    def lengths(result: Result, task: str | None) -> dict[int, float]:
        found = result["averages"]["by_length"]
        cells = found if task is None else {n: result["cells"][f"{task}/{n}"]["accuracy"] for n in found}
        return {int(length): value for length, value in cells.items()}

    first = next(iter(next(iter(arms.values())).values()))
    drawn = {
        task or "all tasks": {arm: [lengths(one, task) for one in seeds.values()] for arm, seeds in arms.items()}
        for task in (None, *first["averages"]["by_task"])
    }
    figure, panels = plots.figure(columns=2, width=3.8, height=2.6, rows=-(-len(drawn) // 2))
    plots.lengths(panels, drawn, "length (tokens)", "answered (%)", top=100)
    return plots.png(figure)
