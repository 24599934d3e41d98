"""RULER results of several models side by side: means over the seeds of an arm beside the paper's, and how arms differ
on the same questions.

A result is what `gsm.evaluation.ruler.evaluate` returns; a model without one has None.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gsm.evaluation.bootstrap import paired
from gsm.evaluation.ruler_score import MARK, deviations, shown

Result = Mapping[str, Any]
Arms = Mapping[str, Sequence[Result]]  # by name, the results of its seeds
Grid = list[list[str]]
# In the settings of a result, what is the model's and not the question's: all else has to be the same to compare.
OF_THE_MODEL = {"run", "step", "checkpoint", "precision", "device", "answers"}
TITLES = {"average": "RULER Avg.", "longest": "RULER longest"}


def numbers(result: Result | None) -> dict[str, float]:
    """`average` over all lengths, and that of the `longest`, in percent; empty without a result."""
    if result is None:
        return {}
    means = result["averages"]
    return {"average": means["average"], "longest": means["by_length"][str(longest(result))]}


def longest(result: Result) -> int:
    """The longest length that was asked, in tokens."""
    return max(map(int, result["averages"]["by_length"]))


def alike(results: Sequence[Result | None]) -> bool:
    """Whether all results there are answer the same questions, in whatever form, so that they can be compared."""
    found = [one for one in results if one is not None]
    return all(_questions(one) == _questions(found[0]) for one in found)


def difference(first: Sequence[Result], second: Sequence[Result], wanted: Callable[[str, str], bool]) -> str:
    """Second minus first, each the mean over its results (the seeds), with the interval of the paired bootstrap over
    questions; tasks and lengths count alike.

    Args:
        first, second: results that are `alike`, at least one each.
        wanted: whether a task counts at a length (both as strings).
    """
    return str(paired(_scores(first, wanted), _scores(second, wanted)))


def by_seed(first: Mapping[Any, Result], second: Mapping[Any, Result], wanted: Callable[[str, str], bool]) -> str:
    """The same over the seeds that both arms have; `-` where there is none, or the questions are not the same."""
    seeds = [seed for seed in first if seed in second]
    one, other = ([arm[seed] for seed in seeds] for arm in (first, second))
    return difference(one, other, wanted) if seeds and alike([*one, *other]) else "-"


def tables(arms: Mapping[str, Mapping[Any, Result]], paper: Mapping[str, Any]) -> list[Grid]:
    """The paper's tables of RULER: arms by lengths, tasks by arms, beside its own; then every task at every length, and
    how the other arms differ from the first.

    Args:
        arms: by name and seed, results that are `alike`, in percent.
        paper: its `columns`, `by_length` and `by_task`, `average`.
    """
    results: Arms = {arm: list(seeds.values()) for arm, seeds in arms.items()}
    first = next(iter(results.values()))[0]
    lengths, tasks = list(first["averages"]["by_length"]), list(first["averages"]["by_task"])
    return [
        _by_length(results, lengths),
        _published(paper),
        _by_task(results, tasks, paper),
        _cells(results, lengths),
    ] + ([_differences(arms, tasks, str(longest(first)))] if len(arms) > 1 else [])


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


def _by_length(arms: Arms, lengths: Sequence[str]) -> Grid:
    rows = [["RULER, %", *(shown(int(length)) for length in lengths), "Avg."]]
    for arm, results in arms.items():
        means = [one["averages"] for one in results]
        cells = [_cell([each["by_length"][length] for each in means]) for length in lengths]
        rows.append([arm, *cells, _cell([each["average"] for each in means])])
    return rows


def _published(paper: Mapping[str, Any]) -> Grid:
    rows = [["the paper, 1.5B GSM", *(shown(int(length)) for length in paper["by_length"]), "Avg."]]
    for column, name in enumerate(paper["columns"]):
        each = [*paper["by_length"].values(), paper["average"]]
        rows.append([name, *(f"{values[column]:.2f}" for values in each)])
    return rows


def _by_task(arms: Arms, tasks: Sequence[str], paper: Mapping[str, Any]) -> Grid:
    rows = [["task, %", *arms, *(f"paper: {name}" for name in paper["columns"])]]
    for task in tasks:
        ours = [_cell([one["averages"]["by_task"][task] for one in results]) for results in arms.values()]
        theirs = paper["by_task"].get(task)
        rows.append([task, *ours, *(["-"] * len(paper["columns"]) if theirs is None else [f"{n:.2f}" for n in theirs])])
    return rows


def _cells(arms: Arms, lengths: Sequence[str]) -> Grid:
    rows = [["arm, task, %", *(shown(int(length)) for length in lengths)]]
    for arm, results in arms.items():
        for task in results[0]["averages"]["by_task"]:
            each = [[one["cells"][f"{task}/{length}"]["accuracy"] for one in results] for length in lengths]
            rows.append([f"{arm}, {task}", *map(_cell, each)])
    return rows


def _differences(arms: Mapping[str, Mapping[Any, Result]], tasks: Sequence[str], last: str) -> Grid:
    first, *others = arms
    wanted: dict[str, Callable[[str, str], bool]] = {
        "Avg.": lambda task, length: True,
        f"at {shown(int(last))}": lambda task, length: length == last,
        **{name: (lambda task, length, name=name: task == name) for name in tasks},
    }
    rows = [[f"minus {first}, with 95 % interval", *others]]
    return rows + [
        [name, *(by_seed(arms[first], arms[arm], which) for arm in others)] for name, which in wanted.items()
    ]


def _questions(result: Result) -> tuple[Any, ...]:
    settings = {name: value for name, value in result["settings"].items() if name not in OF_THE_MODEL}
    return settings, result["asked"]


def _scores(results: Sequence[Result], wanted: Callable[[str, str], bool]) -> dict[str, list[float]]:
    """By cell, the score of each of its questions: the mean over results."""
    cells = [name for name in results[0]["asked"] if wanted(*name.split("/"))]
    each = {name: [[sample["score"] for sample in one["cells"][name]["samples"]] for one in results] for name in cells}
    return {name: [statistics.fmean(scores) for scores in zip(*runs, strict=True)] for name, runs in each.items()}


def _cell(values: Sequence[float]) -> str:
    """``98.33``, or with the standard deviation over seeds ``98.33 +- 1.67``."""
    spread = f" +- {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"
