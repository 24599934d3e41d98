"""The measures of `evaluate.py`, by its arguments: held-out loss, downstream tasks, RULER, perplexity and answers by
length."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from gsm.config import command_line
from gsm.evaluation.answers import Answers
from gsm.evaluation.downstream import Tasks
from gsm.evaluation.held_out import HeldOut
from gsm.evaluation.lengths import Lengths
from gsm.evaluation.measure import Measure
from gsm.evaluation.ruler import Ruler


def call(arguments: Sequence[str]) -> None:
    """Take the measure of ``name=value`` words, or print its help."""
    measure, options = choose(arguments)

    @functools.wraps(measure, updated=())
    def evaluate(**values: Any) -> None:
        measure(**values).evaluate()

    common = inspect.cleandoc(Measure.__doc__ or "").partition("Args:\n")[2]
    evaluate.__doc__ = f"{inspect.cleandoc(measure.__doc__ or '')}\n{common}"
    command_line.call(evaluate, measure.script, options)


def choose(words: Sequence[str]) -> tuple[type[Measure], list[str]]:
    """Return the measure of ``name=value`` words, and its own arguments."""
    of_ruler = [word.removeprefix("ruler.") for word in words if word.startswith("ruler.")]
    rest = [word for word in words if not word.startswith("ruler.")]
    if of_ruler or "ruler=true" in words:
        return Ruler, [*(word for word in rest if word != "ruler=true"), *of_ruler]
    if any(word.startswith("tasks=") for word in words):
        return Tasks, list(words)
    if any(word.startswith("lengths=") for word in words):
        return Lengths, [word for word in words if word != "lengths=paper"]  # the default
    if any(word.startswith("answers=") for word in words):
        of_task = [word.removeprefix("task.") for word in words if word.startswith("task.")]
        rest = [word for word in words if not word.startswith("task.")]
        return Answers, [*rest, f"task={','.join(of_task)}"] if of_task else rest
    return HeldOut, list(words)


def parse(words: Sequence[str]) -> Measure:
    """Return the measure of ``name=value`` words. Raises ConfigError."""
    measure, options = choose(words)
    return measure(**command_line.read_arguments(options, measure, measure.script))


def words(values: Mapping[str, Any]) -> list[str]:
    """Return `name=value` for each entry; a list with commas between."""
    return [f"{name}={_text(value)}" for name, value in values.items() if value is not None]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
