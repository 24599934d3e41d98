"""RULER's needle tasks put to trained models, from the command line: `python evaluate.py checkpoint=... ruler=true`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gsm.config.check import ConfigError
from gsm.config.load import load_model, read_checkpoint, refusals, tokenizer_of, usable
from gsm.data.adaptation import BOTH, trained_lengths
from gsm.data.ingredients import Ingredients
from gsm.data.ruler import SEED, TASKS
from gsm.evaluation import plots, ruler, ruler_score, ruler_table
from gsm.evaluation.commands.scoring import autocast, checkpoints, device_name, home, precision_of, progress
from gsm.evaluation.published import published_ruler
from gsm.experiments import weights
from gsm.experiments.table import grid_markdown, grid_text
from gsm.files import replacing, write_json

ADAPTED = "gsm.data.adaptation.RulerData"


def evaluate(
    checkpoint: str,
    lengths: str = "",
    tasks: str = "",
    examples: int = 20,
    answers: str = "",
    template: str = "",
    haystack: str = "",
    keys: str = "",
    words: int = 0,
    text_field: str = "",
    digits: int = 0,
    new_tokens: int = 0,
    increment: int = 0,
    files: str = "",
    batch_size: int = 8,
    chunk: int = 4096,
    seed: int = SEED,
    device: str = "auto",
    output: str = "",
) -> list[dict[str, Any]]:
    """Asks trained models RULER's needle tasks and prints accuracies; the names below are given as ruler.examples=20.

    A run that was adapted to them (data=ruler) is asked as it was trained, at its lengths and its context, unless told
    otherwise. Given again, the same command goes on where it was interrupted. Several runs also become the paper's
    tables, by arm, with the differences between arms on the same questions, and a picture: ruler.md and ruler.png.

    Args:
        checkpoint: a .ckpt file, the folder of a run, or a folder above several runs; as checkpoint=...
        lengths: of question and answer, such as 4096,8192; left out: those of the paper up to the model's context
        tasks: some of niah_single_1,niah_single_2,niah_multikey_1; left out: these three
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
        device: cpu, cuda, ...; auto: a GPU if there is one
        output: the file to write; left out: ruler.json in the folder of the run, and in the folder above several

    Raises:
        ConfigError, FileNotFoundError: a value out of range, or a file that cannot be used; the message says which.
    """
    found, device = checkpoints(checkpoint), usable(device)
    if output and len(found) > 1:
        raise ConfigError(f"output is {output}, but {len(found)} runs write a file each; leave it out")
    words_given = {"answers": answers, "template": template, "haystack": haystack, "keys": keys}
    numbers = {"words": words, "digits": digits, "new_tokens": new_tokens, "increment": increment}
    given = {name: value for name, value in {**words_given, "text_field": text_field, **numbers}.items() if value}
    asked = {"examples": examples, "files": files or None, "batch_size": batch_size, "chunk": chunk, "seed": seed}
    results = []
    for file in found:
        path = Path(output) if output else _place(file)
        results.append(measure(file, path, given, _numbers(lengths), _list(tasks), asked, device))
        print(f"{_name(results[-1])}\n{ruler_score.table(results[-1])}\nWritten to {path}\n", flush=True)
    if len(results) > 1:
        print("\n".join(side_by_side(results, Path(checkpoint))))
    return results


def measure(
    file: Path,
    path: Path,
    given: Mapping[str, Any],
    lengths: Sequence[int],
    tasks: Sequence[str],
    asked: Mapping[str, Any],
    device: str,
) -> dict[str, Any]:
    """The result of one checkpoint (see `gsm.evaluation.ruler.evaluate`), which goes to `path`.

    Args:
        given: arguments of `Ingredients.choose`, and answers; what is left out is as in the run's adaptation.
        lengths, tasks: empty for those of the run.
        asked: further arguments of `gsm.evaluation.ruler.evaluate`.
    """
    saved = read_checkpoint(file, mmap=True)
    config, tokenizer = saved["hyper_parameters"]["config"], tokenizer_of(saved, file)
    own = config["data"] if config["data"].get("_target_") == ADAPTED else {}
    named = ("answers", "template", "haystack", "keys", "words", "text_field", "digits", "new_tokens", "increment")
    chosen = {**{name: own[name] for name in named if own.get(name) is not None}, **given}
    answers = chosen.pop("answers", "direct")
    if answers == BOTH:
        raise ConfigError(f"{file} was trained with answers both; say ruler.answers=direct or ruler.answers=cot")
    precision = precision_of(config, device)
    run = {name: str(config.get(name)) for name in ("name", "arm", "seed")}
    identity = {
        "run": run,
        "step": saved.get("global_step"),
        "checkpoint": weights.digest(file),
        "precision": precision,
    }
    with refusals(str(file)), autocast(precision, device):
        return ruler.evaluate(
            load_model(file, device),
            tokenizer,
            tasks or own.get("tasks") or list(TASKS),
            lengths or _own_lengths(own, config),
            ingredients=Ingredients.choose(**chosen),
            answers=answers,
            path=path,
            identity={**identity, "device": device_name(device).partition(",")[0]},
            watch=progress,
            say=lambda line: print(line, flush=True),
            **asked,
        )


def known(file: Path) -> dict[str, Any] | None:
    """What was found of a checkpoint before; None where there is nothing, or only of other weights."""
    place = _place(file)
    found = _read(place) if place.is_file() else None
    if found is None or found["settings"]["checkpoint"] != weights.digest(file):
        return None
    return {**found, "cells": {name: found["cells"][name] for name in found["asked"]}}


def known_below(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """The same of the checkpoints of these runs, those that have something."""
    files = [file for folder in folders if any(folder.rglob("last.ckpt")) for file in checkpoints(str(folder))]
    return [found for file in files if (found := known(file)) is not None]


def _place(file: Path) -> Path:
    """The ruler.json of a checkpoint: beside it, or of an evaluation after the same run."""
    own = home(file) / "ruler.json"
    others = [path for path in sorted(home(file).parent.glob("*/ruler.json")) if path != own]
    if own.is_file() or not others:
        return own
    of_it = [p for p in others if (found := _read(p)) and found["settings"]["checkpoint"] == weights.digest(file)]
    return of_it[0] if of_it else own


def _read(path: Path) -> dict[str, Any] | None:
    """A finished result; None for what is damaged, not finished, or something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if {"averages", "asked", "cells"} <= set(found) and "checkpoint" in found["settings"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _own_lengths(own: Mapping[str, Any], config: Mapping[str, Any]) -> list[int]:
    """The lengths of a run's adaptation and the one that it reserved; of any other run, those of the paper that fit."""
    context = config["data"]["context"]
    if own:
        return sorted({*trained_lengths(own.get("lengths"), context), context})
    fitting = [length for length in ruler.LENGTHS if length <= context]
    if not fitting:
        raise ConfigError(
            f"the model was trained on {context} tokens and the shortest length of the paper is {ruler.LENGTHS[0]}; "
            "say ruler.lengths=, and ruler.template=short for small models"
        )
    return fitting


def metrics(written: Mapping[str, Any]) -> dict[str, float]:
    """Accuracies in percent of one run's file: the `average`, and the means of every length and of every task."""
    means = written["averages"]
    return {"average": means["average"], **means["by_length"], **means["by_task"]}


def side_by_side(results: Sequence[dict[str, Any]], folder: Path) -> list[str]:
    """Several runs in the paper's tables, by arm: lines to print, and ruler.json, ruler.md, ruler.png in a folder.

    Raises OSError where these cannot be written.
    """
    write_json(folder / "ruler.json", {"runs": results})
    names = [_name(result) for result in results]
    notes = ruler_table.notes(results, names)
    if not ruler_table.alike(results):
        return [*notes, f"Written to {folder / 'ruler.json'}"]
    arms = _by_arm(results)
    grids = ruler_table.tables(arms, published_ruler())
    contents = {"ruler.md": "\n\n".join([*map(grid_markdown, grids), *notes, ""]).encode(), **_picture(arms)}
    for name, content in contents.items():
        with replacing(folder / name) as file:
            file.write(content)
    return [*"\n\n".join(map(grid_text, grids)).splitlines(), "", *notes, _written(folder, contents)]


def _written(folder: Path, contents: Mapping[str, bytes]) -> str:
    without = "" if "ruler.png" in contents else f"; {plots.REMEDY}"
    return f"Written to {folder}: ruler.json, {', '.join(contents)}{without}"


def _by_arm(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """By arm and seed; arms with their experiment's name in front where there are several of these."""
    runs = [result["settings"]["run"] for result in results]
    several = len({run["name"] for run in runs}) > 1
    arms: dict[str, dict[str, dict[str, Any]]] = {}
    for run, result in zip(runs, results, strict=True):
        arms.setdefault(f"{run['name']}/{run['arm']}" if several else run["arm"], {})[run["seed"]] = result
    return arms


def _picture(arms: Mapping[str, Mapping[str, dict[str, Any]]]) -> dict[str, bytes]:
    """Accuracy by length, of the tasks together and of each; none where matplotlib is missing."""
    first = next(iter(next(iter(arms.values())).values()))
    drawn: dict[str, dict[str, list[dict[int, float]]]] = {}
    for task in (None, *first["averages"]["by_task"]):
        drawn[task or "all tasks"] = {arm: [_lengths(one, task) for one in of.values()] for arm, of in arms.items()}
    try:
        figure, panels = plots.figure(columns=2, width=3.8, height=2.6, rows=-(-len(drawn) // 2))
    except ImportError:
        return {}
    plots.lengths(panels, drawn, "length (tokens)", "answered (%)", top=100)
    return {"ruler.png": plots.png(figure)}


def _lengths(result: Mapping[str, Any], task: str | None) -> dict[int, float]:
    """Accuracy by length, of one task or of all."""
    means = result["averages"]["by_length"]
    if task is None:
        return {int(length): value for length, value in means.items()}
    return {int(length): result["cells"][f"{task}/{length}"]["accuracy"] for length in means}


def _name(result: Mapping[str, Any]) -> str:
    run = result["settings"]["run"]
    return f"{run['name']}/{run['arm']}/seed{run['seed']}"


def _list(text: str) -> list[str]:
    """`a,b` or `[a, b]` as a list."""
    return [word.strip() for word in text.strip("[]").split(",") if word.strip()]


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in _list(text)]
    except ValueError as error:
        raise ConfigError(f"lengths is '{text}', but takes whole numbers such as 4096,8192") from error
