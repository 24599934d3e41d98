"""RULER's needle tasks put to trained models, from the command line: `python evaluate.py checkpoint=... ruler=true`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gsm.data.adaptation import trained_lengths
from gsm.data.ingredients import Ingredients
from gsm.data.ruler import SEED, TASKS
from gsm.eval import ruler, ruler_score
from gsm.files import write_json
from gsm.runs.check import ConfigError
from gsm.runs.load import load_model, read_checkpoint, refusals, tokenizer_of, usable
from gsm.runs.scoring import autocast, checkpoints, device_name, home, precision_of, progress

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
    otherwise. Given again, the same command goes on where it was interrupted.

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
        path = Path(output) if output else home(file) / "ruler.json"
        results.append(measure(file, path, given, _numbers(lengths), _list(tasks), asked, device))
        print(f"{_name(results[-1])}\n{ruler_score.table(results[-1])}\nWritten to {path}\n", flush=True)
    if len(results) > 1:
        _together(results, Path(checkpoint) / "ruler.json")
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
    """The result of one checkpoint (see `gsm.eval.ruler.evaluate`), which goes to `path`.

    Args:
        given: arguments of `Ingredients.choose`, and answers; what is left out is as in the run's adaptation.
        lengths, tasks: empty for those of the run.
        asked: further arguments of `gsm.eval.ruler.evaluate`.
    """
    saved = read_checkpoint(file, mmap=True)
    config, tokenizer = saved["hyper_parameters"]["config"], tokenizer_of(saved, file)
    own = config["data"] if config["data"].get("_target_") == ADAPTED else {}
    named = ("answers", "template", "haystack", "keys", "words", "text_field", "digits", "new_tokens", "increment")
    chosen = {**{name: own[name] for name in named if own.get(name) is not None}, **given}
    answers = chosen.pop("answers", "direct")
    precision = precision_of(config, device)
    run = {name: str(config.get(name)) for name in ("name", "arm", "seed")}
    identity = {
        "run": run,
        "step": saved.get("global_step"),
        "changed": file.stat().st_mtime_ns,
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
            identity={**identity, "device": device_name(device)},
            watch=progress,
            say=lambda line: print(line, flush=True),
            **asked,
        )


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


def _together(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Several runs side by side, where they were asked the same."""
    names = [_name(result) for result in results]
    if len({tuple(result["asked"]) for result in results}) == 1:
        print(ruler_score.several(results, names))
    write_json(path, {"runs": results})
    print(f"Written to {path}")


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
