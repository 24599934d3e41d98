"""The paper's measurements of efficiency with one command: its table of training and its figure of prefill, decoding
and cache, with the settings of its appendix, and its numbers beside ours; and its equations (1) to (4) at this size.

Zheng et al., *GSM: Efficient Language Modeling with Shared Global State*, the section on computational efficiency and
the appendix on efficiency measurement. Devices differ; the ratio of GSM to the baseline is compared.

``benchmark=training`` and ``benchmark=inference`` measure, each into a file of its own beside this one's. The context
of the size takes the place of 4,096 tokens, and a CPU reads shorter prompts. Devices that torchrun has started train
together; the first one alone reads and decodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from gsm.cache.memory import of_decoder
from gsm.costs.model import paper_cache, paper_decode
from gsm.evaluation.divided import join
from gsm.files import write_json
from gsm.models.baseline import Baseline
from gsm.models.gsm import GSM
from gsm.tables import length_text

from . import inference, machine, models, pictures, results, training
from .inference import find, speed_up
from .models import Entry, Model, known_cost, one_size
from .models import read as read_models
from .results import Asked, Row, mark, read, table, usual_path

NAMES = ("baseline", "gsm")
SIZE = "1p5b"  # the only size that the paper has timed
# The table of training efficiency (section 4.3), and its protocol (appendix A.3). The paper does not say which
# activations were recomputed, only that both models recompute the same.
TRAINING: dict[str, Any] = {
    "device": "8 x NVIDIA H800 80GB",
    "how": {"batch_size": 4, "warm_up": 5, "steps": 12},
    "devices": 8,
    "baseline": {"seconds": 2.578, "tokens_per_second": 50833, "peak_gib": 43.54},
    "gsm": {"seconds": 2.462, "tokens_per_second": 53231, "peak_gib": 44.06},
}
# The figure of inference efficiency gives no numbers; the text names for every length which of the two is ahead.
INFERENCE: dict[str, Any] = {
    "device": "one NVIDIA H800 80GB, trained weights, bfloat16, CUDA Graphs",
    "how": {"batch_size": 1, "warm_up": 2, "runs": 3, "steps": 64},
    "lengths": [256 << n for n in range(11)],  # 256 to 256K; the doubling is our reading
    "gsm / baseline": {"prefill": "above 1", "decode": "above 1", "cache": "below 1"},
}
LENGTHS = {"cuda": INFERENCE["lengths"], "cpu": [n for n in INFERENCE["lengths"] if n <= 65536]}
UNITS = {"seconds": "s a step", "tokens_per_second": "tokens/s", "peak_gib": "peak GiB a GPU"}
PARTS = {"prefill": "prefill, tokens/s", "decode": "decoding, tokens/s", "cache": "all that is kept, MiB"}
HEAD = ("baseline", "GSM", "GSM / baseline", "by processor time", "paper: baseline", "paper: GSM", "paper: ratio")
# What two of the paper's equations estimate of a decoder, baseline and GSM, and what is counted of it: the FLOPs of the
# cost model, of attention and search, and the bytes of the memory, without index keys.
EQUATIONS = {
    "attention": ("the decoder's attention for one token", ("(1)", "(2)"), "multiply-adds", "FLOPs"),
    "entries": ("the decoder's entries", ("(3)", "(4)"), "KiB", "KiB"),
}


def run(
    models: Sequence[Entry] = models.PAIR,
    size: str | None = None,
    lengths: Sequence[int] | None = None,
    recompute: bool | Literal["selective"] = True,
    text: str = inference.STDLIB,
    seconds: float | None = None,
    **asked: Any,
) -> Path:
    """Measure the missing rows, print the table and write it beside the JSON file; return that file.

    Args: as in configs/benchmark/paper.yaml and configs/benchmark.yaml.

    Raises:
        ValueError: models that are not called gsm and baseline, or a value that the two benchmarks refuse.
        Exception: the first that a measurement raised.
    """
    how = Asked(**asked)
    if how.results:
        return show(Path(how.results))
    chosen, where = read_models(models), machine.chosen(how.device)
    names = [model.name for model in chosen]
    if set(names) != {"gsm", "baseline"}:
        raise ValueError(
            f"models must be two with the names gsm and baseline, such as {{name: gsm, checkpoint: "
            f"logs/default/gsm-seed0}}, got {names}"
        )
    size = one_size(chosen, size, SIZE if where.type == "cuda" else "nano")
    lengths = LENGTHS[where.type] if lengths is None else sorted({*lengths})
    path = Path(how.output) if how.output else usual_path(machine.facts(where), "paper")
    trained, served = (path.with_name(f"{path.stem}-{name}.json") for name in ("training", "inference"))
    common: dict[str, Any] = {"models": models, "size": size, "device": how.device}
    settings = {**TRAINING["how"], "recompute": recompute}
    ranks = join()
    training.run(**common, **settings, output=str(trained))
    if ranks.rank:
        return path
    prompts = {"lengths": lengths, "text": text, "seconds": seconds}
    inference.run(**common, **INFERENCE["how"], **prompts, output=str(served))
    steps, requests = _steps(trained, size, settings, ranks.world), _current(served, size, text)
    rows = {row["quantity"]: row for row in (*steps, *_requests(requests, size, lengths))}
    facts = {key: value for key, value in read(served).items() if key != "rows"}
    equations = [*_equations(requests, chosen, size, lengths)]
    write_json(path, {**facts, "size": size, "text": text, "trained": settings, "rows": rows, "equations": equations})
    return show(path)


def _steps(file: Path, size: str, settings: Mapping[str, Any], devices: int) -> Iterator[dict[str, Any]]:
    """Yield the quantities of the table of training; tokens/s are those of all devices together."""
    content = read(file)
    wanted = {"size": size, **{key: settings[key] for key in ("batch_size", "recompute")}}
    wanted |= {"devices": devices}
    rows = [row for row in content["rows"].values() if mark(row) == mark(content) and wanted.items() <= row.items()]
    pair = {row["model"]: row for row in rows}
    for key, unit in UNITS.items():
        paper, words = None, f"{unit}, {devices} device{'s' * (devices > 1)}"
        if size == SIZE:
            paper = {name: TRAINING[name][key] for name in NAMES}
            if key == "tokens_per_second" and devices != TRAINING["devices"]:
                paper = {name: number * devices / TRAINING["devices"] for name, number in paper.items()}
                words += f" (paper's x {devices}/{TRAINING['devices']})"
        values = {model: _trained(row, key) for model, row in pair.items()}
        yield _quantity("training", words, values, paper=paper)


def _trained(row: Row, key: str) -> float | None:
    """Return a value of a row of training, None where it was not measured."""
    if row.get("failed"):
        return None
    return row["ms"]["median"] / 1e3 if key == "seconds" else row[key]


def _current(file: Path, size: str, text: str) -> list[Row]:
    """Return the rows of inference that were measured in the state of the last run."""
    content, how = read(file), INFERENCE["how"]
    wanted = {"size": size, "text": text, "batch": how["batch_size"], "steps": how["steps"]}
    rows = [row for row in content["rows"].values() if mark(row) == mark(content)]
    return [row for row in rows if wanted.items() <= row["protocol"].items()]


def _requests(rows: Sequence[Row], size: str, lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the quantities of the figure of inference."""
    asked = INFERENCE["how"]["runs"]
    for part in PARTS:
        for tokens in lengths:
            pair = {name: find(rows, name, tokens) for name in ("gsm", "baseline")}
            values = {name: inference.value(row, part) for name, row in pair.items() if row}
            ours, other = pair["gsm"], pair["baseline"]
            processor = speed_up(ours, other, part, "processor_ms") if ours and other and part != "cache" else None
            paper = {"ratio": INFERENCE["gsm / baseline"][part]} if size == SIZE else None
            fewest = min([row["runs"]["runs"] for row in pair.values() if row], default=asked)
            words = f"{length_text(tokens)} tokens" + (f" ({fewest} of {asked} runs)" if fewest < asked else "")
            yield {**_quantity(part, words, values, processor, paper), "tokens": tokens}


def _equations(
    rows: Sequence[Row], chosen: Sequence[Model], size: str, lengths: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield, for every length and both sides of each of EQUATIONS, what the paper's equations have and what is counted.

    Attention is that of the last of N tokens. Bytes are those of a prompt and the tokens after it.
    """
    costs = {model.name: known_cost(model, size) for model in chosen}
    for tokens in lengths:
        for name, known in costs.items():
            model, row = known.model, find(rows, name, tokens)
            if row is None or not isinstance(model, GSM | Baseline):
                continue
            protocol, parts = row["protocol"], known.decode_flops(tokens - 1)
            dtype, end = getattr(torch, protocol["dtype"]), tokens + protocol["steps"]
            attention = paper_decode(model, tokens), parts["decoder/attention"] + parts["decoder/index scores"]
            entries = paper_cache(model, end, dtype) / 2**10, of_decoder(row["cache"]["parts"]) / 2**10
            yield {"model": name, "tokens": tokens, "attention": attention, "entries": entries}


def _quantity(
    panel: str,
    words: str,
    values: Mapping[str, float | None],
    processor: float | None = None,
    paper: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the row of a quantity: both values, and GSM's over the baseline's."""
    other, ours = values.get("baseline"), values.get("gsm")
    ratio = ours / other if ours and other else None
    if paper and "gsm" in paper:
        paper = {**paper, "ratio": paper["gsm"] / paper["baseline"]}
    both = {"baseline": other, "gsm": ours}
    name = {"quantity": f"{panel}, {words}", "panel": panel, "words": words}
    return {**name, **both, "ratio": ratio, "processor": processor, "paper": paper}


def show(path: Path) -> Path:
    """Publish the tables and the picture of a file of results."""
    content = read(path, "panel")
    trained, served = content["trained"], INFERENCE["how"]
    how = (
        f"Size {content['size']}. Training: {trained['batch_size']} sequences on each device, "
        f"recompute={trained['recompute']}, "
        f"median of {trained['steps']} steps after {trained['warm_up']}. Inference: {served['batch_size']} request, "
        f"median of {served['runs']} runs after {served['warm_up']}, {served['steps']} tokens after the prompt; text: "
        f"{content['text']}. The paper's training ran on {TRAINING['device']}, the same number on each, its "
        f"inference on {INFERENCE['device']}; of inference it gives a plot without numbers."
    )
    rows = list(content["rows"].values())
    panels = [
        table([words, *HEAD], [_cells(row) for row in rows if row["panel"] == panel])
        for panel, words in {"training": "training", **PARTS}.items()
    ]
    equations = [_equation(content["equations"], kind) for kind in EQUATIONS] if content["equations"] else []
    sections = [results.measured_on(content), how, *panels, *equations]
    return results.publish(path, *sections, pictures={"": partial(_picture, content["size"], rows)})


def _cells(row: Row) -> tuple[str, ...]:
    paper = row["paper"] or {}
    ours = [row[key] for key in ("baseline", "gsm", "ratio", "processor")]
    return row["words"], *(_number(value) for value in [*ours, *map(paper.get, ("baseline", "gsm", "ratio"))])


def _equation(rows: Sequence[Row], kind: str) -> str:
    """Return the table of two equations: a line for each length, both models by the equation and as counted."""
    words, numbers, estimated, counted = EQUATIONS[kind]
    head = [words, *(f"{name}, equation {n}: {estimated}" for name, n in zip(NAMES, numbers, strict=True))]
    head += [f"{name}, counted: {counted}" for name in NAMES]
    values = {(row["tokens"], row["model"]): row[kind] for row in rows}
    cells = [
        [f"{length_text(n)} tokens"]
        + [_number(values[n, name][place] if (n, name) in values else None) for place in (0, 1) for name in NAMES]
        for n in sorted({row["tokens"] for row in rows})
    ]
    return table(head, cells)


def _picture(size: str, rows: Sequence[Row]) -> bytes:
    """Return a PNG of the three panels of the paper's figure.

    Raises ValueError if no request was measured, ImportError if matplotlib is missing.
    """
    points = {
        words: {
            name: [(row["tokens"], row[name]) for row in rows if row["panel"] == part and row[name] is not None]
            for name in reversed(NAMES)
        }
        for part, words in PARTS.items()
    }
    if not all(points[words][name] for words in points for name in NAMES):
        raise ValueError(f"{size}: not both models were measured, and so there is no picture")
    return pictures.panels(size, points)


def _number(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,.4g}" if value < 1e3 else f"{value:,.0f}"
