"""The paper's measurements of efficiency with one command: its table of training and its figure of prefill, decoding
and cache, with the settings of its appendix, and its numbers beside ours.

Zheng et al., *GSM: Efficient Language Modeling with Shared Global State*, the section on computational efficiency and
the appendix on efficiency measurement. Devices differ; the ratio of GSM to the baseline is compared.

``benchmark=training`` and ``benchmark=inference`` measure, each into a file of its own beside this one's. The context
of the size takes the place of 4,096 tokens, and a CPU reads shorter prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from gsm.files import write_json
from gsm.tables import length_text

from . import inference, machine, models, results, training
from .inference import find, speed_up
from .models import Entry, one_size
from .models import read as read_models
from .results import Asked, Row, mark, read, table, usual_path

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
UNITS = {"tokens_per_second": "tokens/s", "peak_gib": "peak GiB a GPU", "seconds": "s a step"}
PARTS = {"prefill": "prefill, {}: tokens/s", "decode": "decoding after {}: tokens/s", "cache": "cache after {}: MiB"}
HEAD = ("", "baseline", "GSM", "GSM / baseline", "by processor time", "paper: baseline", "paper: GSM", "paper: ratio")


def run(
    models: Sequence[Entry] = models.PAIR,
    size: str | None = None,
    lengths: Sequence[int] | None = None,
    recompute: bool | Literal["selective"] = True,
    text: str = inference.STDLIB,
    seconds: float = 120.0,
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
    longest = max(inference.LENGTHS[where.type])
    lengths = [n for n in INFERENCE["lengths"] if n <= longest] if lengths is None else list(lengths)
    path = Path(how.output) if how.output else usual_path(machine.facts(where), "paper")
    trained, served = (path.with_name(f"{path.stem}-{name}.json") for name in ("training", "inference"))
    common: dict[str, Any] = {"models": models, "size": size, "device": how.device}
    settings = {**TRAINING["how"], "recompute": recompute}
    training.run(**common, **settings, output=str(trained))
    prompts = {"lengths": lengths, "text": text, "seconds": seconds}
    inference.run(**common, **INFERENCE["how"], **prompts, output=str(served))
    rows = {row["quantity"]: row for row in (*_steps(trained, size, settings), *_requests(served, size, lengths, text))}
    facts = {key: value for key, value in read(served).items() if key != "rows"}
    write_json(path, {**facts, "size": size, "text": text, "trained": settings, "rows": rows})
    return show(path)


def _steps(file: Path, size: str, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the quantities of the table of training."""
    wanted = {"size": size, **{key: settings[key] for key in ("batch_size", "recompute")}}
    pair = {row["model"]: row for row in _current(file) if all(row[key] == value for key, value in wanted.items())}
    for key, unit in UNITS.items():
        paper = {name: TRAINING[name][key] for name in ("baseline", "gsm")} if size == SIZE else None
        name = f"training, {settings['batch_size']} sequences: {unit}"
        yield _quantity(name, {model: _trained(row, key) for model, row in pair.items()}, paper=paper)


def _trained(row: Row, key: str) -> float | None:
    """Return a value of a row of training, None where it was not measured."""
    if row.get("failed"):
        return None
    return row["ms"]["median"] / 1e3 if key == "seconds" else row[key]


def _requests(file: Path, size: str, lengths: Sequence[int], text: str) -> Iterator[dict[str, Any]]:
    """Yield the quantities of the figure of inference."""
    how = INFERENCE["how"]
    wanted = {"size": size, "text": text, "batch": how["batch_size"], "steps": how["steps"]}
    rows = [row for row in _current(file) if wanted.items() <= row["protocol"].items()]
    for part, words in PARTS.items():
        for tokens in sorted(lengths):
            pair = {name: find(rows, name, tokens) for name in ("gsm", "baseline")}
            values = {name: inference.value(row, part) for name, row in pair.items() if row}
            ours, other = pair["gsm"], pair["baseline"]
            processor = speed_up(ours, other, part, "processor_ms") if ours and other and part != "cache" else None
            paper = {"ratio": INFERENCE["gsm / baseline"][part]} if size == SIZE else None
            yield _quantity(words.format(f"{length_text(tokens)} tokens"), values, processor, paper)


def _current(file: Path) -> list[Row]:
    """Return the rows that were measured in the state of the last run."""
    content = read(file)
    return [row for row in content["rows"].values() if mark(row) == mark(content)]


def _quantity(
    name: str,
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
    return {"quantity": name, **both, "ratio": ratio, "processor": processor, "paper": paper}


def show(path: Path) -> Path:
    """Publish the table of a file of results."""
    content = read(path, "quantity")
    trained, served = content["trained"], INFERENCE["how"]
    how = (
        f"Size {content['size']}. Training: {trained['batch_size']} sequences, recompute={trained['recompute']}, "
        f"median of {trained['steps']} steps after {trained['warm_up']}. Inference: {served['batch_size']} request, "
        f"median of {served['runs']} runs after {served['warm_up']}, {served['steps']} tokens after the prompt; text: "
        f"{content['text']}. The paper's training ran on {TRAINING['device']}, the same number on each, its "
        f"inference on {INFERENCE['device']}; of inference it gives a plot without numbers."
    )
    cells = [_cells(row) for row in content["rows"].values()]
    return results.publish(path, results.measured_on(content), how, table(HEAD, cells))


def _cells(row: Row) -> tuple[str, ...]:
    paper = row["paper"] or {}
    ours = [row[key] for key in ("baseline", "gsm", "ratio", "processor")]
    return row["quantity"], *(_number(value) for value in [*ours, *map(paper.get, ("baseline", "gsm", "ratio"))])


def _number(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,.4g}" if value < 1e3 else f"{value:,.0f}"
