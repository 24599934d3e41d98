"""Downstream results as tables: ours beside the paper's, and how two models differ on the same questions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gsm.evaluation import ruler_table
from gsm.evaluation.bootstrap import paired
from gsm.evaluation.published import Published
from gsm.evaluation.show import group
from gsm.evaluation.task_files import Task

HUB = "hub"  # in the settings of results, where documents are not local files
# Of one checkpoint: `arm`, `seed`, `mixture`, `tasks`, each with `scores` and `samples`; `ruler`, its result or None.
Result = Mapping[str, Any]


def metric(task: str, result: Result, table: Published | None) -> str:
    """What a task is scored by: as the paper does for such a model; outside its tables acc_norm where there is one."""
    if table:
        return table.rows[task]["mixture" if result["mixture"] else "dense"]
    return "acc_norm" if "acc_norm" in result["tasks"][task]["scores"] else "acc"


def values(results: Sequence[Result], table: Published | None) -> list[dict[str, float]]:
    """Of each result the score of every task and their unweighted mean (``average``), in percent; where the table has
    RULER, and the result too, also ``ruler_average`` and ``ruler_longest``."""
    found = []
    for result in results:
        each = {task: 100 * scored["scores"][metric(task, result, table)] for task, scored in result["tasks"].items()}
        further = ruler_table.numbers(result.get("ruler")) if table and table.ruler else {}
        ruler = {f"ruler_{name}": value for name, value in further.items()}
        found.append({**each, "average": statistics.fmean(each.values()), **ruler})
    return found


def by_arm(results: Sequence[Result]) -> list[tuple[str, Result]]:
    """The arm of each result, with its experiment where there are several of these; in the order of the results."""
    arms = {id(result): arm for arm, those in group(results).items() for result in those}
    return [(arms[id(result)], result) for result in results]


def grid(tasks: Sequence[Task], cells: Mapping[str, Mapping[str, Any]], table: Published | None) -> list[list[str]]:
    """Tasks by models: ours, mean and standard deviation over seeds (``cells``, by arm and task), then the paper's."""
    theirs = table.columns if table else []
    rows = [["task (%)", *cells, *theirs]]
    for task in tasks:
        numbers = table.rows[task.name]["values"] if table else []
        dagger = "+" if table and len({table.rows[task.name][kind] for kind in ("dense", "mixture")}) > 1 else ""
        rows.append([task.title + dagger, *(_cell(cells[arm][task.name]) for arm in cells)])
        rows[-1] += [f"{number:.2f}" for number in numbers] or ["-"] * len(theirs)
    rows.append([_mean_title(table), *(_cell(cells[arm]["average"]) for arm in cells)])
    rows[-1] += [f"{number:.2f}" for number in table.average] if table else []
    for name, numbers in table.ruler.items() if table else ():
        ours = [_cell(cells[arm][f"ruler_{name}"]) for arm in cells]
        rows.append([ruler_table.TITLES[name], *ours, *(f"{number:.2f}" for number in numbers)])
    return rows


def differences(results: Sequence[Result], table: Published | None) -> list[list[list[str]]]:
    """A table of every other arm minus the first: each question's score is the mean over the seeds that both arms have,
    the interval is the paired bootstrap's over questions. None for a single arm."""
    arms: dict[str, dict[Any, Result]] = {}
    for arm, result in by_arm(results):
        arms.setdefault(arm, {})[result["seed"]] = result
    names = list(arms)
    rows = [[f"minus {names[0]}, with 95 % interval", *names[1:]]]
    first = arms[names[0]]
    for task in [*results[0]["tasks"], None]:
        wanted = list(results[0]["tasks"]) if task is None else [task]
        cells = [_difference(first, arms[name], wanted, table) for name in names[1:]]
        rows.append([_mean_title(table) if task is None else task, *cells])
    for name in table.ruler if table else ():
        cells = [_ruler_difference(first, arms[other], name == "longest") for other in names[1:]]
        rows.append([ruler_table.TITLES[name], *cells])
    return [rows] if len(names) > 1 else []


def notes(results: Sequence[Result], tasks: Sequence[Task], table: Published | None) -> list[str]:
    """What has to be said about the numbers."""
    said = [f"The last columns are the paper's, {table.table}."] if table else []
    if table and any(row["dense"] != row["mixture"] for row in table.rows.values()):
        said.append("+ acc_norm for dense models, acc for those with a mixture of experts; acc otherwise.")
    if len(results) > 1:
        said.append("mean +- sample standard deviation over the seeds of an arm")
    scored = results[0]["tasks"]
    said += [
        f"{task.title}: {task.note}."
        for task in tasks
        if task.note and scored[task.name]["settings"]["documents"] != HUB
    ]
    few = {
        task.title: scored[task.name]["scores"]["samples"] for task in tasks if scored[task.name]["settings"]["limit"]
    }
    if few:
        said.append(f"Limited: {', '.join(f'{title} {count:,}' for title, count in few.items())} samples.")
    for name, count, total in _cut(results, tasks):
        said.append(f"{name}: {count:,} of {total:,} contexts were cut on the left to what the model reads.")
    if table and table.ruler:
        names = [f"{arm}/seed{result['seed']}" for arm, result in by_arm(results)]
        said += ruler_table.notes([result["ruler"] for result in results], names)
    return said


def _mean_title(table: Published | None) -> str:
    """What the mean over tasks is called: beside RULER's, as the paper does."""
    return "Standard Avg." if table and table.ruler else "Avg."


def _ruler_difference(first: Mapping[Any, Result], second: Mapping[Any, Result], longest: bool) -> str:
    """RULER over the seeds for which both arms have a result."""
    one, other = ({seed: each["ruler"] for seed, each in arm.items() if each["ruler"]} for arm in (first, second))
    last = str(ruler_table.longest(next(iter(one.values())))) if one else ""
    return ruler_table.by_seed(one, other, lambda task, length: length == last or not longest)


def _cell(cell: Any) -> str:
    """``51.85``, or with the spread over seeds ``51.85 +- 0.31``."""
    if cell.mean is None:
        return "-"
    return f"{cell.mean:.2f}" + ("" if cell.spread is None else f" +- {cell.spread:.2f}")


def _difference(first: Mapping[Any, Result], second: Mapping[Any, Result], tasks: list[str], table: Any) -> str:
    seeds = [seed for seed in first if seed in second]
    if not seeds:
        return "-"
    one, other = (
        {task: _mean([arm[seed] for seed in seeds], task, table) for task in tasks} for arm in (first, second)
    )
    return str(paired(one, other))


def _mean(results: Sequence[Result], task: str, table: Published | None) -> list[float]:
    """The score of each question, the mean over these results."""
    each = [
        {
            (one["subtask"], one["document"]): one[metric(task, result, table)]
            for one in result["tasks"][task]["samples"]
        }
        for result in results
    ]
    return [statistics.fmean(scores[question] for scores in each) for question in sorted(each[0])]


def _cut(results: Sequence[Result], tasks: Sequence[Task]) -> list[tuple[str, int, int]]:
    """Tasks with contexts that were cut: of the result with the most of them."""
    found = []
    for task in tasks:
        scores = max((result["tasks"][task.name]["scores"] for result in results), key=lambda one: one["cut"])
        found += [(task.title, scores["cut"], scores["samples"])] if scores["cut"] else []
    return found
