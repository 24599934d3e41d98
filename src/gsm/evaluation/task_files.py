"""Tasks as data: which documents, what prompt, which answers. One yaml each in ``tasks/``, or one of your own.

What a model scores are pairs of texts: a context, and what follows it after a blank. A task says how a document becomes
such pairs:

    choices, gold                  one context, the prompt; each choice is a continuation of it
    choices, gold, continuation    each choice is a context of its own; the continuation is the same for all
    continuation                   one context, the prompt, and one continuation

``prompt`` and ``description`` are Jinja templates over the fields of a document, ``choices``, ``gold`` and
``continuation`` Jinja expressions. The prompts are those of lm-evaluation-harness 0.4.13, written for its columns.

A task file may be a stranger's. It reads files of documents in the folder that it is given, no others. Its templates
run in Jinja's sandbox, each for some seconds at most, without powers and without long repetitions.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import lzma
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment, SecurityError

from gsm.data.reading import LONGEST_LINE

FOLDER = Path(__file__).parent / "tasks"
METRICS = ("acc", "acc_norm", "perplexity")
SECONDS = 3  # of the processor, for one template of one document
LONGEST = 1_000_000  # characters, or items, that a template may make by repeating what it has
TEMPLATES, EXPRESSIONS = ("description", "prompt"), ("choices", "continuation", "gold")
ENDINGS = (".jsonl", ".jsonl.xz")


class Environment(SandboxedEnvironment):
    """The sandbox, in which no operation of one step takes all memory, or time that no signal ends."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """A product or a power. Raises SecurityError."""
        size = max((len(value) for value in (left, right) if hasattr(value, "__len__")), default=0)
        count = max((value for value in (left, right) if isinstance(value, int)), default=0)
        if operator == "**" or size * count > LONGEST:
            raise SecurityError(f"{'a power' if operator == '**' else 'so long a repetition'} has no place in a task")
        return super().call_binop(context, operator, left, right)


ENVIRONMENT = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
ENVIRONMENT.filters["regex_replace"] = lambda text, pattern, other: re.sub(pattern, other, text)


class TooLong(BaseException):
    """What a stranger has written does not come to its end. No Exception: Jinja goes on after one."""


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
    try:
        text = path.read_text(encoding="utf-8")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise ValueError("a task has no aliases (*name)")  # a few of them make any size
        node, given = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except FileNotFoundError:
        raise
    except Exception as error:  # yaml's own, and whatever its constructors meet
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ValueError(f"{path}, line {mark.line + 1 if mark else 1}: this is no yaml: {reason}") from error
    if not isinstance(node, yaml.MappingNode) or not all(type(key) is str for key in given):
        raise ValueError(f"{path}, line 1: a task is a mapping of fields, such as documents: piqa_validation")
    top = f"{path}, line {node.start_mark.line + 1}"
    places = dict.fromkeys(given, top) | {key.value: f"{path}, line {key.start_mark.line + 1}" for key, _ in node.value}
    _check(given, places, top)
    given["metrics"] = tuple(given["metrics"])
    return Task(**{"name": path.stem, "title": path.stem, "file": path, **given})


def find(folder: Path, name: str) -> Path:
    """The file of documents with that name. Raises FileNotFoundError; ValueError for one that is not in the folder."""
    if not _is_name(name):
        raise ValueError(f"documents are {name!a:.80}, but have to be the name of a file in {folder}")
    for ending in ENDINGS:
        if (folder / f"{name}{ending}").is_file():
            return folder / f"{name}{ending}"
    raise FileNotFoundError(f"there is no {' or '.join(name + ending for ending in ENDINGS)} in {folder}")


def _is_name(name: str) -> bool:
    """Whether a folder can have a file with that name."""
    return name.isprintable() and not ({"/", "\\"} & {*name} or name.startswith(".") or len(name.encode()) > 200)


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
    path, rows, number = find(folder, name), [], 0
    with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
        try:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), 1):  # noqa: B007
                if len(line) > LONGEST_LINE:
                    raise ValueError(f"it has more than {LONGEST_LINE:,} bytes")
                rows.append(json.loads(line.decode("utf-8")))
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise ValueError(f"{path}, line {number}: this is no JSON: {reason}") from error
        except (lzma.LZMAError, EOFError) as error:
            raise ValueError(f"{path} is damaged or cut short after line {number}: {error}") from error
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: a document is an object of fields, as in {{'question': ...}}")
    if not rows:
        raise ValueError(f"{path} holds no documents")
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
    found, count = _value(task, "gold", row, place), len(_choices(task, row, place))
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
    choices = _choices(task, row, place)
    if not all(choices):
        raise ValueError(f"{place}: a choice of task {task.name} is empty, but all have to be texts: {choices}")
    if task.continuation:
        pairs = [(choice, f" {said('continuation')}") for choice in choices]
    else:
        context = said("prompt")
        pairs = [(context, f" {choice}") for choice in choices]
    return pairs, gold(task, row, place), tuple(map(len, choices))


def _choices(task: Task, row: Mapping[str, Any], place: str) -> list[str]:
    """The choices of a document, of which there are some. Raises ValueError."""
    choices = _value(task, "choices", row, place)
    if not isinstance(choices, list) or not choices:
        raise ValueError(f"{place}: choices of task {task.name} are {choices!r:.80}, but have to be a list of texts")
    return choices


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
    name = str(row[task.subtask]) if task.subtask else ""
    if "/" in name or not name.isprintable():  # files are called by it
        raise ValueError(f"{place}: {task.subtask} is {name!a:.80}, but has to be a name without slashes")
    return name


def _value(task: Task, field: str, row: Mapping[str, Any], place: str) -> Any:
    """What a template or an expression of the task makes of a document."""
    source = getattr(task, field)
    try:
        with _at_most(SECONDS):
            value = _compiled(field in TEMPLATES, source)(**row)
            if isinstance(value, list):
                return [str(choice) for choice in value]
            return str(value) if isinstance(value, StrictUndefined) else value  # str() says what is not defined
    except (Exception, TooLong) as error:  # whatever a stranger's expression meets
        raise ValueError(
            f"{place}: {field} of task {task.name}, {source!r:.200}, cannot be made of it: {_said(error)}"
        ) from error


def _said(error: BaseException) -> str:
    """In one line."""
    return " ".join(str(error).split())


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raises TooLong inside, after so many seconds of this process; in the main thread, which alone hears signals.

    Loops of Python hear them, and so do regular expressions.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TooLong(
            f"it takes more than {seconds:g} seconds, as does a regular expression with one repetition in another"
        )

    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:
        signal.signal(signal.SIGVTALRM, before)


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
            raise ValueError(f"{places[field]}: unknown field {field!r:.80}; known are {', '.join(kinds)}")
        wanted = {"int": int, "str": str}.get(str(kinds[field]), list)
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise ValueError(f"{places[field]}: {field} is {value!r:.80}, but has to be a {wanted.__name__}")
    needed = ["documents", "metrics", "gold" if "choices" in given else "continuation"]
    needed += ["shot_documents"] if given.get("shots") else []
    for field in needed:
        if not given.get(field):
            also = " (or choices and gold)" if field == "continuation" else ""
            raise ValueError(f"{top}: the task has no field '{field}'{also}")
    for metric in given["metrics"]:
        if metric not in METRICS:
            raise ValueError(f"{places['metrics']}: unknown metric {metric!r:.80}; known are {', '.join(METRICS)}")
    for field in (*TEMPLATES, *EXPRESSIONS):
        try:
            with _at_most(SECONDS):  # what is constant is computed here
                _compiled(field in TEMPLATES, given[field]) if given.get(field) else None
        except (Exception, TooLong) as error:  # Jinja's own, or of the Python that it is made into
            kind = "template" if field in TEMPLATES else "expression"
            raise ValueError(f"{places[field]}: {field} is no {kind} of Jinja: {_said(error)}") from error
    if given.get("shots", 0) < 0:
        raise ValueError(f"{places['shots']}: shots is {given['shots']}, but has to be 0 or more")
    for field in ("documents", "shot_documents"):
        name = given.get(field)
        if name and not _is_name(name):
            raise ValueError(f"{places[field]}: {field} is {name!a:.80}, but has to be the name of a file in data=")
