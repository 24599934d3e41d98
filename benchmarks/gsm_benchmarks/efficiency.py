"""The paper's measurements of efficiency with one command: its table of training and its figure of prefill, decoding
and cache, with the settings of its appendix, and what it has found beside what is found here.

``benchmark=training`` and ``benchmark=inference`` measure, each into a file of its own beside this one's; the same
command goes on where the last one ended. The size's own context takes the place of 4,096 tokens, and a CPU is given
shorter prompts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from . import entries, inference, machine, paper, results, training
from .entries import Entry
from .inference_report import apart, short, speed_up, value
from .results import Asked, Errors, Row, mark, read, table, usual_path, write

HEAD = ("", "baseline", "GSM", "GSM / baseline")
CLOCK, PAPERS = "by processor time", ("paper: baseline", "paper: GSM", "paper: GSM / baseline")
WHAT = {"prefill": "prefill, {}: tokens/s", "decode": "decoding after {}: tokens/s", "cache": "cache after {}: MiB"}


def run(
    models: Sequence[Entry] = entries.PAIR,
    size: str | None = None,
    lengths: Sequence[int] | None = None,
    recompute: bool | Literal["selective"] = True,
    devices: int | None = None,
    text: str = inference.STDLIB,
    seconds: float = 120.0,
    **asked: Any,
) -> Path:
    """Measure what is missing, print the table and write it beside the JSON file; return that file.

    Args: as in configs/benchmark/paper.yaml and configs/benchmark.yaml, which say what they mean.

    Raises:
        ValueError: models that are not called gsm and baseline, or what the two benchmarks refuse.
        KeyboardInterrupt: after the table of what there is was made.
        Exception: the first that a measurement raised, once all others were made.
    """
    how = Asked(**asked)
    if how.results:
        return show(Path(how.results))
    known, where = entries.read(models), machine.chosen(how.device)
    if {model.name for model in known} != set(entries.PAIR):
        raise ValueError(
            f"models are {', '.join(model.name for model in known)}: the paper holds gsm against baseline, so name two "
            "entries so, such as {name: gsm, checkpoint: logs/default/gsm}"
        )
    size = entries.one_size(known, size, paper.SIZE if where.type == "cuda" else "nano")
    devices = devices or (paper.TRAINING["devices"] if torch.cuda.device_count() >= paper.TRAINING["devices"] else 1)
    path = Path(how.output) if how.output else usual_path(machine.facts(where), "paper")
    files = {name: path.with_name(f"{path.stem}-{name}.json") for name in ("training", "inference")}
    common: dict[str, Any] = {"models": models, "size": size, "device": how.device, "force": how.force}
    trained = {**paper.TRAINING["how"], "recompute": recompute, "devices": devices}
    longest = max(inference.LENGTHS[where.type])
    prompts = [n for n in paper.INFERENCE["lengths"] if n <= longest] if lengths is None else lengths
    texts = {"lengths": prompts, "synthetic_lengths": [], "text": text}
    served = {**paper.INFERENCE["how"], **texts, "seconds": seconds}
    given = {model.name: model.given for model in known}
    errors, end = Errors(), time.monotonic() + 60 * how.minutes
    try:
        for name, measure, settings in (("training", training.run, trained), ("inference", inference.run, served)):
            left = max(0.0, (end - time.monotonic()) / 60)
            again = name == "training" and 0 < len(_trained(files[name], size, trained, given)) < len(known)
            with errors.kept(name):  # what was trained in another run of this command is not compared with
                once = {**common, "force": how.force or again}
                measure(**once, **settings, output=str(files[name]), minutes=left)
    finally:
        if any(file.exists() for file in files.values()):
            write(path, _content(files, size, trained, served, given))
            show(path)
    errors.raise_first()
    return path


def _content(
    files: Mapping[str, Path],
    size: str,
    trained: Mapping[str, Any],
    served: Mapping[str, Any],
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """What the file holds: facts of the two files, and of each quantity what was found, and what the paper has. Rows of
    other models, of another size, or measured in another way, are left out."""
    there = {name: read(file) for name, file in files.items() if file.exists()}
    facts = {key: value for content in there.values() for key, value in content.items() if key not in ("rows", "tried")}
    steps = _trained(files["training"], size, trained, given)
    wanted = {**served, "size": size, "batch": served["batch_size"]}
    requests = [
        row
        for row in _current(files["inference"], given)
        if row["tokens"] in served["lengths"]
        and all(value == wanted.get(key, value) for key, value in row["protocol"].items())
    ]
    rows = {one["quantity"]: one for one in (*_steps(steps, size), *_requests(requests, size))}
    models = [{"model": row["model"], "given": row["given"]} for row in (*steps, *requests) if row.get("given")]
    return {**facts, "size": size, "text": served["text"], "trained": dict(trained), "models": models, "rows": rows}


def _current(file: Path, given: Mapping[str, Any]) -> list[Row]:
    """The rows of these models that were measured where the file was last added to."""
    content = read(file) if file.exists() else {"rows": {}}
    rows = [row for row in content["rows"].values() if mark(row) == mark(content)]
    return [row for row in rows if row["model"] in given and row.get("given", {}) == given[row["model"]]]


def _trained(file: Path, size: str, trained: Mapping[str, Any], given: Mapping[str, Any]) -> list[Row]:
    """The rows of training of this size and with these settings."""
    alike = ("batch_size", "recompute", "devices")
    rows = [row for row in _current(file, given) if row["size"] == size]
    return [row for row in rows if all(row[key] == trained[key] for key in alike)]


def _steps(rows: Sequence[Row], size: str) -> Iterator[dict[str, Any]]:
    """The table of training, of the rows of ``benchmark=training``."""
    pair = {row["model"]: row for row in rows}
    if not pair:
        return
    one = next(iter(pair.values()))
    for key, unit in training.UNITS.items():
        name = f"training, {one['batch_size']} x {one['context']:,} tokens on each of {one['devices']}: {unit}"
        found = {model: _of(pair.get(model), lambda row, key=key: training.value(row, key)) for model in entries.PAIR}
        yield {"quantity": name, **found, "ratio": _ratio(found), "processor": None, "paper": _papers(key, size)}


def _requests(rows: Sequence[Row], size: str) -> Iterator[dict[str, Any]]:
    """The figure of inference, of the rows of ``benchmark=inference``."""
    for what, words in WHAT.items():
        for tokens in sorted({row["tokens"] for row in rows}):
            ours, other = (
                next(
                    (row for row in rows if (row["model"], row["tokens"], row["kind"]) == (name, tokens, "read")), None
                )
                for name in (paper.OURS, "baseline")
            )
            pair = {paper.OURS: ours, "baseline": other}
            found = {name: _of(pair[name], lambda row, what=what: value(row, what)) for name in entries.PAIR}
            ratio, processor = _ratio(found), None
            if ratio is not None and what != "cache" and ours and other:
                ratio = speed_up(ours, other, what)
                own = ours[what]["processor_ms"] and other[what]["processor_ms"]
                processor = speed_up(ours, other, what, "processor_ms") if own else None
            said = {"ratio": paper.INFERENCE["gsm / baseline"][what]} if size == paper.SIZE else None
            name = words.format(f"{short(tokens)} tokens")
            if ours and other and what != "cache":
                name += apart(ours, other)
            yield {"quantity": name, **found, "ratio": ratio, "processor": processor, "paper": said}


def _of(row: Row | None, value: Any) -> float | str | None:
    """What a row shows; the reason why it shows nothing; None where nothing is known."""
    if row is None:
        return "not measured"
    return f"failed: {row['failed']}" if row.get("failed") else value(row)


def _ratio(found: Mapping[str, Any]) -> float | None:
    ours, other = found[paper.OURS], found["baseline"]
    return ours / other if isinstance(ours, float | int) and isinstance(other, float | int) else None


def _papers(key: str, size: str) -> dict[str, Any] | None:
    """The paper's numbers of training, where the size is the paper's."""
    if size != paper.SIZE:
        return None
    theirs = {name: paper.TRAINING[name][key] for name in entries.PAIR}
    return {**theirs, "ratio": theirs[paper.OURS] / theirs["baseline"]}


def show(path: Path) -> Path:
    """Publish the table of a file of results."""
    content = read(path, "quantity")
    rows, trained = list(content["rows"].values()), content["trained"]
    beside, timed = any(row["paper"] for row in rows), any(row["processor"] for row in rows)
    head = [*HEAD, *([CLOCK] if timed else []), *(PAPERS if beside else ())]
    served = paper.INFERENCE["how"]
    how = (
        f"Size {content['size']}. Training: {trained['batch_size']} sequences on each of {trained['devices']} devices, "
        f"recompute={str(trained['recompute']).lower()}, median of {trained['steps']} steps after "
        f"{trained['warm_up']}. Inference: {served['batch_size']} request, median of {served['runs']} runs after "
        f"{served['warm_up']}, {served['steps']} given tokens; text: {content['text']}; ratios are "
        "those of medians."
    )
    theirs = (
        f"The paper's: training on {paper.TRAINING['device']}, {paper.TRAINING['what']}; inference on "
        f"{paper.INFERENCE['device']}, {paper.INFERENCE['what']}. Of inference it gives a plot, and in words which of "
        "the two is ahead at every length."
    )
    cells = [_cells(row, timed, beside) for row in rows]
    about = entries.described(content["models"])
    return results.publish(path, results.measured_on(content), how, about, table(head, cells), theirs if beside else "")


def _cells(row: Row, timed: bool, beside: bool) -> tuple[str, ...]:
    found = [row["quantity"], *(_number(row[name]) for name in ("baseline", paper.OURS)), _number(row["ratio"], "")]
    theirs = row["paper"] or {}
    found += [_number(row["processor"], "")] if timed else []
    return *found, *(_number(theirs.get(name), "") for name in ("baseline", paper.OURS, "ratio") if beside)


def _number(value: float | str | None, none: str = "not known") -> str:
    return (
        none
        if value is None
        else value
        if isinstance(value, str)
        else f"{value:,.4g}"
        if value < 1e3
        else f"{value:,.0f}"
    )
