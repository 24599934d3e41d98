"""Tasks as data: which documents, what prompt, which answers. One yaml each in ``tasks/``, or one of your own.

What a model scores are pairs of texts: a context, and what follows it after a blank. A task says how a document becomes
such pairs:

    choices, gold                  one context, the prompt; each choice is a continuation of it
    choices, gold, continuation    each choice is a context of its own; the continuation is the same for all
    continuation                   one context, the prompt, and one continuation

``prompt`` and ``description`` are Jinja templates over the fields of a document, ``choices``, ``gold`` and
``continuation`` Jinja expressions. The prompts are those of lm-evaluation-harness 0.4.13, written for its columns.
"""

from __future__ import annotations

import difflib
import functools
import json
import lzma
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment

FOLDER = Path(__file__).parent / "tasks"
METRICS = ("acc", "acc_norm", "perplexity")
ENVIRONMENT = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
ENVIRONMENT.filters["regex_replace"] = lambda text, pattern, other: re.sub(pattern, other, text)
TEMPLATES, EXPRESSIONS = ("description", "prompt"), ("choices", "continuation", "gold")
ENDINGS = (".jsonl", ".jsonl.xz")


@dataclass(frozen=True)
class Task:
    """What a task file says.

    Attributes:
        name: that of the file.
        title: for tables.
        documents: name of the file of documents, without ``.jsonl`` or ``.jsonl.xz``.
        metrics: of ``METRICS``; ``acc_norm`` divides log-likelihoods by the characters of a choice.
        prompt, choices, gold, continuation: see above.
        subtask: the field that tells subtasks apart; a task's score is the mean over all of its samples.
        description: what stands before everything, with the fields of the document.
        shots, shot_documents: how many answered documents of the same subtask stand in front, the first in that file.
        harness: what lm-evaluation-harness calls the task, where it has another name.
        note: what a table has to say about these documents.
        file: where it was read from.
    """

    name: str
    title: str
    documents: str
    metrics: tuple[str, ...]
    file: Path
    prompt: str = ""
    choices: str = ""
    gold: str = ""
    continuation: str = ""
    subtask: str = ""
    description: str = ""
    shots: int = 0
    shot_documents: str = ""
    harness: str = ""
    note: str = ""

    @property
    def files(self) -> list[str]:
        """The names of the files that it reads."""
        return [self.documents, *([self.shot_documents] if self.shots else [])]


@dataclass(frozen=True)
class Sample:
    """A document as pairs of texts.

    Attributes:
        document: its number among all documents of the file, from 0.
        subtask: empty where a task has none.
        pairs: context and continuation, the continuation with its blank.
        gold: which pair is right; 0 where there is only one.
        lengths: characters of each choice, for ``acc_norm``.
        row: the document itself.
    """

    document: int
    subtask: str
    pairs: tuple[tuple[str, str], ...]
    gold: int
    lengths: tuple[int, ...]
    row: Mapping[str, Any]


def known() -> list[str]:
    """The names of our tasks."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name: str) -> Task:
    """A task of ours by its name, or the one in a yaml file. Raises ValueError, FileNotFoundError."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if path.parent == FOLDER and not path.is_file():
        near = difflib.get_close_matches(name, known(), n=1)
        meant = f"; did you mean {near[0]}?" if near else "."
        raise ValueError(f"unknown task '{name}'{meant} Known are {', '.join(known())}, and yaml files of your own")
    return read_task(path)


def read_task(path: Path) -> Task:
    """The task that a file describes. Raises FileNotFoundError; ValueError naming file, line and field."""
    text = path.read_text(encoding="utf-8")
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ValueError(f"{path}, line {line}: this is no yaml: {error.problem}") from error
    if not isinstance(node, yaml.MappingNode):
        raise ValueError(f"{path}, line 1: a task is a mapping of fields, such as documents: piqa_validation")
    places = {key.value: f"{path}, line {key.start_mark.line + 1}" for key, _ in node.value}
    given = yaml.safe_load(text)
    _check(given, places, f"{path}, line {node.start_mark.line + 1}")
    given["metrics"] = tuple(given["metrics"])
    return Task(**{"name": path.stem, "title": path.stem, "file": path, **given})


def find(folder: Path, name: str) -> Path:
    """The file of documents with that name. Raises FileNotFoundError."""
    for ending in ENDINGS:
        if (folder / f"{name}{ending}").is_file():
            return folder / f"{name}{ending}"
    raise FileNotFoundError(f"there is no {' or '.join(name + ending for ending in ENDINGS)} in {folder}")


def require(tasks: Sequence[Task], folder: Path) -> None:
    """Raises FileNotFoundError, naming all files that the tasks read and the folder does not have."""
    there = {path.name for path in folder.glob("*")}
    missing = {
        name: task.name for task in tasks for name in task.files if not there & {name + ending for ending in ENDINGS}
    }
    if missing:
        wanted = ", ".join(f"{name} (of {task})" for name, task in missing.items())
        raise FileNotFoundError(
            f"{folder} lacks {wanted}; each is a file {' or '.join('NAME' + ending for ending in ENDINGS)} with a "
            "document a line"
        )


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    """The documents of a file, one a line. Raises FileNotFoundError; ValueError naming file and line."""
    path = find(folder, name)
    with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as file:
        rows = []
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: this is no JSON: {error.msg}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: a document is an object of fields, as in {{'question': ...}}")
            rows.append(row)
    return rows


def samples(task: Task, folder: Path, limit: int = 0) -> list[Sample]:
    """The documents of a task as pairs of texts.

    Args:
        task: the task.
        folder: where its files of documents lie.
        limit: at most so many, spread evenly over the file, so that every subtask has its part; 0: all of them.

    Raises:
        FileNotFoundError, ValueError: naming the file, the line and the field of what cannot be used.
    """
    rows, path = read(folder, task.documents), find(folder, task.documents)
    shots = _shots(task, folder) if task.shots else {}
    count = min(limit or len(rows), len(rows))
    chosen = [index * len(rows) // count for index in range(count)]
    return [_sample(task, rows[number], number, path, shots) for number in chosen]


def gold(task: Task, row: Mapping[str, Any], place: str = "a document") -> int:
    """Which choice of a document is right. Raises ValueError naming the place."""
    found, count = _value(task, "gold", row, place), len(_value(task, "choices", row, place))
    if not (isinstance(found, int) and 0 <= found < count):
        raise ValueError(
            f"{place}: gold of task {task.name} is {found!r}, but has to be the number of one of the {count} choices, "
            "from 0"
        )
    return found


def _sample(task: Task, row: Mapping[str, Any], number: int, path: Path, shots: Mapping[str, str]) -> Sample:
    place = f"{path}, line {number + 1}"
    subtask = _subtask(task, row, place)
    if task.shots and subtask not in shots:
        raise ValueError(f"{place}: {task.shot_documents} has no documents of {task.subtask} '{subtask}'")
    before = _value(task, "description", row, place) + shots.get(subtask, "")
    pairs, right, lengths = _pairs(task, row, place)
    return Sample(number, subtask, tuple((before + one, other) for one, other in pairs), right, lengths, row)


def _pairs(task: Task, row: Mapping[str, Any], place: str) -> tuple[list[tuple[str, str]], int, tuple[int, ...]]:
    """Contexts and continuations of a document by itself, which of them is right, and the length of each choice."""
    said = functools.partial(_value, task, row=row, place=place)
    if not task.choices:
        return [(said("prompt"), f" {said('continuation')}")], 0, ()
    choices = said("choices")
    if not all(choices):
        raise ValueError(f"{place}: a choice of task {task.name} is empty, but all have to be texts: {choices}")
    if task.continuation:
        pairs = [(choice, f" {said('continuation')}") for choice in choices]
    else:
        context = said("prompt")
        pairs = [(context, f" {choice}") for choice in choices]
    return pairs, gold(task, row, place), tuple(map(len, choices))


def _shots(task: Task, folder: Path) -> dict[str, str]:
    """The answered documents that stand in front, by subtask."""
    path, texts = find(folder, task.shot_documents), {}
    for number, row in enumerate(read(folder, task.shot_documents), 1):
        pairs, right, _ = _pairs(task, row, f"{path}, line {number}")
        texts.setdefault(_subtask(task, row, f"{path}, line {number}"), []).append("".join(pairs[right]) + "\n\n")
    for subtask, found in texts.items():
        if len(found) < task.shots:
            where = f" of {task.subtask} '{subtask}'" if subtask else ""
            raise ValueError(f"{path} has {len(found)} documents{where}, but task {task.name} shows {task.shots}")
    return {subtask: "".join(found[: task.shots]) for subtask, found in texts.items()}


def _subtask(task: Task, row: Mapping[str, Any], place: str) -> str:
    if task.subtask and task.subtask not in row:
        raise ValueError(f"{place}: there is no field '{task.subtask}', which tells the subtasks of {task.name} apart")
    return str(row[task.subtask]) if task.subtask else ""


def _value(task: Task, field: str, row: Mapping[str, Any], place: str) -> Any:
    """What a template or an expression of the task makes of a document."""
    source = getattr(task, field)
    try:
        value = _compiled(field in TEMPLATES, source)(**row)
        if isinstance(value, list):
            return [str(choice) for choice in value]
        return str(value) if isinstance(value, StrictUndefined) else value  # str() says what is not defined
    except (TemplateError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        raise ValueError(f"{place}: {field} of task {task.name}, {source!r}, cannot be made of it: {error}") from error


@functools.lru_cache(maxsize=256)
def _compiled(template: bool, source: str) -> Callable[..., Any]:
    if template:
        return ENVIRONMENT.from_string(source).render
    return ENVIRONMENT.compile_expression(source, undefined_to_none=False)


def _check(given: Mapping[str, Any], places: Mapping[str, str], top: str) -> None:
    """Raises ValueError for a field that is missing, unknown, or not what it has to be."""
    kinds = {field.name: field.type for field in fields(Task) if field.name not in ("name", "file")}
    for field, value in given.items():
        if field not in kinds:
            raise ValueError(f"{places[field]}: unknown field '{field}'; known are {', '.join(kinds)}")
        wanted = {"int": int, "str": str}.get(str(kinds[field]), list)
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise ValueError(f"{places[field]}: {field} is {value!r}, but has to be a {wanted.__name__}")
    needed = ["documents", "metrics", "gold" if "choices" in given else "continuation"]
    needed += ["shot_documents"] if given.get("shots") else []
    for field in needed:
        if not given.get(field):
            also = " (or choices and gold)" if field == "continuation" else ""
            raise ValueError(f"{top}: the task has no field '{field}'{also}")
    for metric in given["metrics"]:
        if metric not in METRICS:
            raise ValueError(f"{places['metrics']}: unknown metric '{metric}'; known are {', '.join(METRICS)}")
    for field in (*TEMPLATES, *EXPRESSIONS):
        try:
            _compiled(field in TEMPLATES, given[field]) if given.get(field) else None
        except TemplateError as error:
            raise ValueError(f"{places[field]}: {field} is no {'template' if field in TEMPLATES else 'expression'} "
                             f"of Jinja: {error.message}") from error  # fmt: skip
