"""Perplexity by length of context from the command line: `python evaluate.py checkpoint=... lengths=256:4096`."""

from __future__ import annotations

import csv
import io
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gsm.config.check import ConfigError, few
from gsm.config.load import load_model, read_checkpoint, refusals, usable
from gsm.data.packing import validation_indices
from gsm.evaluation import lengths as evaluation
from gsm.evaluation import plots
from gsm.evaluation.bootstrap import paired
from gsm.evaluation.commands import evaluate as held_out_text
from gsm.evaluation.commands.scoring import autocast, checkpoints, device_name, home, precision_of, progress, read_masks
from gsm.evaluation.lengths import concluded, window_losses
from gsm.evaluation.published import published_perplexity
from gsm.evaluation.show import group, value
from gsm.experiments import weights
from gsm.experiments.folder import unlike
from gsm.experiments.report import shown
from gsm.experiments.table import WIDTH, grid_markdown, grid_text
from gsm.files import replacing, write_json
from gsm.training.callbacks.summary import versions

PAPER, PAPERS_LONGEST = "4096:65536", 65536
TITLES = {"off": "the window as one document", "on": "documents apart"}
NOTE = (
    "perplexity of the same targets at the end of every window, in brackets the middle 95 % if windows are drawn anew; "
    "of several seeds, exp of the mean loss over them; the first token of a document is not a target"
)


def evaluate(
    checkpoint: str,
    lengths: str,
    scored: int = 0,
    windows: int = 16,
    masks: str = "both",
    held_out: bool = True,
    data: str = "",
    path: str = "",
    split: str = "validation",
    chunk: int = 4096,
    device: str = "auto",
    output: str = "",
) -> list[dict[str, Any]]:
    """Measures the perplexity of the same text after more and more context, and prints, draws and writes it.

    Every window of held-out text is cut from its beginning to each length, and its last tokens are scored: so only the
    context changes. All targets of the full windows are scored too. Given again, the same command goes on where it was
    interrupted.

    Args:
        checkpoint: a .ckpt file, the folder of a run, or a folder above several runs, such as logs/<name>
        lengths: tokens of context and targets: 256,512,4096; 256:4096 (in steps of 256) or 256:4096:768; or paper,
            which is 4096:65536
        scored: targets at the end of a window; 0: the shortest length
        windows: how many, spread evenly over the split
        masks: of documents: on (nothing crosses the end of a document, as in training), off (a window is one document),
            or both
        held_out: also the usual perplexity of the split, in sequences of the shortest length, of as many tokens as the
            windows have (or all that there are)
        data: other text: a variant of configs/data, read with the checkpoint's tokenizer
        path: other text: a folder or a file of your own
        split: validation; or train, which the model has seen
        chunk: tokens read at a time
        device: cpu, cuda, ...; auto: a GPU if there is one
        output: the JSON file to write, with .md, .csv and .png beside it; left out: lengths.json in the folder of the
            run, or above several

    Raises:
        ConfigError, FileNotFoundError: a value out of range, too little text, or a file that cannot be used.
    """
    asked, chosen = read_lengths(lengths), read_masks(masks)
    if windows < 1:
        raise ConfigError(f"windows is {windows}, but has to be 1 or more")
    found, device = checkpoints(checkpoint), usable(device)
    text: dict[str, Any] = {"data": data, "path": path, "split": split}
    options = {"scored": scored or asked[0], "masks": chosen, "chunk": chunk}
    results = []
    for number, file in enumerate(found, 1):
        place = Path(output) if output and len(found) == 1 else home(file) / "lengths.json"
        note = f"{number} of {len(found)}: " if len(found) > 1 else ""
        results.append(measure(file, place, asked, windows, text, held_out, device, note, **options))
    place = Path(output) if output else (home(found[0]) if len(found) == 1 else Path(checkpoint)) / "lengths.json"
    _conclude(results, asked, windows, chosen, place)
    return results


def measure(
    file: Path,
    place: Path,
    lengths: Sequence[int],
    windows: int,
    text: Mapping[str, Any],
    held_out: bool,
    device: str,
    note: str = "",
    **options: Any,
) -> dict[str, Any]:
    """The result of one checkpoint (`gsm.evaluation.lengths.evaluate`), which goes to `place`; `options` as there."""
    saved = read_checkpoint(file, mmap=True)
    config = saved["hyper_parameters"]["config"]
    found = held_out_text.open_data(saved, **text, context=lengths[-1], batch_size=1)
    if not hasattr(found, "split"):
        raise ConfigError(f"{file} was trained on questions, which have no length to vary: say data=stdlib or path=")
    precision = precision_of(config, device)
    run = {"experiment": config["name"], "arm": str(config["arm"]), "seed": config["seed"]}
    read = {
        name: value for name, value in found.fingerprint().items() if name != "max_tokens" or text["split"] == "train"
    }
    identity = {
        **run,
        **{"checkpoint": weights.digest(file), "text": read, "split": text["split"]},
        **{"precision": precision, "device": device_name(device).partition(",")[0], "versions": versions()},
    }
    with refusals(str(file)), autocast(precision, device):
        cut = _windows(found, text["split"], windows, lengths[-1])
        watch = partial(progress, note=note, unit="windows")
        model = load_model(file, device)
        result = evaluation.evaluate(model, cut, lengths, path=place, identity=identity, watch=watch, **options)
    result = {"checkpoint": str(file), **run, "step": saved.get("global_step"), **result}
    if held_out:
        sequences = windows * lengths[-1] // lengths[0]
        rows = held_out_text.measure(file, device=device, **text, context=lengths[0], sequences=sequences, note=note)
        result["held_out"] = {"context": lengths[0], **{name: rows["text"][name] for name in ("perplexity", "targets")}}
    write_json(place, result)
    return result


def metrics(written: Mapping[str, Any]) -> dict[str, float]:
    """Perplexities of one run's file: by length, and of all targets of the full windows (`full`), where a window is one
    document; where documents are apart, with `apart/` in front; and `held_out`."""
    found: dict[str, float] = {}
    for mask, by_length in written["by_length"].items():
        before = "" if mask == "off" else "apart/"
        found |= {f"{before}{length}": cell["perplexity"] for length, cell in by_length.items()}
        found[f"{before}full"] = written["whole"][mask]["perplexity"]
    return found | ({"held_out": written["held_out"]["perplexity"]} if "held_out" in written else {})


def read_lengths(text: str) -> list[int]:
    """`256,512`, or a range `first:last` or `first:last:step`. Raises ConfigError."""
    text = PAPER if text == "paper" else text.strip("[]")
    try:
        numbers = [int(word) for word in text.replace(":", ",").split(",")]
        if ":" not in text:
            return sorted(set(numbers))
        first, last, step = numbers if len(numbers) == 3 else (*numbers, numbers[0])
        found = list(range(first, last + 1, step))
        if not found or found[-1] != last:
            raise ValueError(text)
    except ValueError as error:
        raise ConfigError(
            f"lengths is '{text}', but takes whole numbers such as 256,512, or 256:4096:256, whose steps end there"
        ) from error
    return found


def _windows(text: Any, split: str, count: int, length: int) -> list[Any]:
    """Windows that do not overlap, spread evenly over the split. Raises ValueError where it has no room for them."""
    sequences = getattr(text, f"{split}_set")
    if len(sequences) < count:
        raise ValueError(
            f"windows is {count} and the longest of the lengths {length}, but the {split} split has "
            f"{len(sequences.ids):,} tokens, room for {len(sequences)}: say windows={len(sequences)}, or give more text"
        )
    return list(sequences.each(validation_indices(len(sequences), count)))


def _conclude(
    results: Sequence[Mapping[str, Any]], lengths: Sequence[int], windows: int, masks: Sequence[str], place: Path
) -> None:
    """Prints the tables of all runs, arm by arm, draws them, and writes both. Raises ConfigError where their windows
    are not the same."""
    for one in results:
        if one["settings"]["text"] != results[0]["settings"]["text"]:
            changes = few(unlike(results[0]["settings"]["text"], one["settings"]["text"]))
            raise ConfigError(
                f"{one['checkpoint']} has read other windows than {results[0]['checkpoint']}, by {changes}, so that "
                "their perplexities do not compare: give runs of one tokenizer, and the same data= or path= to all"
            )
    arms = {arm: [run["cells"] for run in runs] for arm, runs in group(results).items()}
    means = {arm: concluded(runs, lengths, windows, masks) for arm, runs in arms.items()}
    grids = [_grid(means, mask) for mask in masks] + [
        _apart(arms, lengths, windows, mask) for mask in masks if len(arms) > 1
    ]
    grids.append(_held_out(results, means))
    grids += [_published()] if lengths[-1] == PAPERS_LONGEST else []
    notes = [f"{windows} windows, the last {results[0]['settings']['scored']:,} targets of each; {NOTE}"]
    try:
        pictures = {".png": _drawn(means, masks)}
    except ImportError as error:  # matplotlib is an extra; the numbers do not need it
        notes, pictures = [*notes, str(error)], {}
    print("\n\n".join([*map(grid_text, grids), "\n".join(textwrap.fill(note, WIDTH) for note in notes)]))
    text = "\n\n".join([*map(grid_markdown, grids), *notes, *([f"![]({place.stem}.png)"] if pictures else []), ""])
    for suffix, content in {".md": text.encode(), ".csv": _csv(results).encode(), **pictures}.items():
        with replacing(place.with_suffix(suffix)) as file:
            file.write(content)
    if len(results) > 1:
        write_json(place, {"arms": means, "runs": [run["checkpoint"] for run in results], "notes": notes})
    print(f"Written to {shown(place)}, {', '.join(['.md', '.csv', *pictures])} beside it")


def _grid(means: Mapping[str, Any], mask: str) -> list[list[str]]:
    """Lengths by arms, and all targets of the full windows below."""
    rows = [[f"perplexity, {TITLES[mask]}", *means]]
    for length in next(iter(means.values()))["by_length"][mask]:
        rows.append([f"{int(length):,}", *(_cell(found["by_length"][mask][length]) for found in means.values())])
    return [*rows, ["all targets", *(_cell(found["whole"][mask]) for found in means.values())]]


def _cell(found: Mapping[str, Any]) -> str:
    return f"{found['perplexity']:.4f} [{found['low']:.4f}, {found['high']:.4f}]"


def _apart(
    arms: Mapping[str, Sequence[Mapping[str, Any]]], lengths: Sequence[int], windows: int, mask: str
) -> list[list[str]]:
    """How the loss of the other arms differs from that of the first one, window by window."""
    first, *others = arms
    rows = [[f"nats minus {first}, {TITLES[mask]}", *others]]
    for length in lengths:
        losses = {arm: {"": window_losses(runs, mask, length, windows)} for arm, runs in arms.items()}
        found = [paired(losses[first], losses[arm]) for arm in others]
        rows.append([f"{length:,}", *(f"{one.difference:+.4f} [{one.low:+.4f}, {one.high:+.4f}]" for one in found)])
    return rows


def _held_out(results: Sequence[Mapping[str, Any]], means: Mapping[str, Any]) -> list[list[str]]:
    """The usual perplexity; of several runs of an arm, exp of the mean loss over them."""
    found = {arm: [run["held_out"] for run in runs if "held_out" in run] for arm, runs in group(results).items()}
    context = next((one["context"] for runs in found.values() for one in runs), None)
    cells = [
        statistics.geometric_mean(one["perplexity"] for one in found[arm]) if found[arm] else None for arm in means
    ]
    head = f"held out, in sequences of {context:,}" if context else "held out"
    return [[head, *means], ["", *(value(cell, 4) for cell in cells)]]


def _published() -> list[list[str]]:
    """What the paper's models have, on its own text and with its own tokenizer."""
    paper = published_perplexity()
    rows = [[name, *(f"{number:.4f}" for number in numbers)] for name, numbers in paper["rows"].items()]
    return [["the paper, FineWeb", *paper["columns"]], *rows]


def _drawn(means: Mapping[str, Any], masks: Sequence[str]) -> bytes:
    """Perplexity against length, a panel for each treatment of documents."""
    figure, panels = plots.figure(columns=len(masks), width=4.4, height=3.2)
    for axes, mask in zip(panels, masks, strict=True):
        points = {
            arm: {
                int(n): (cell["perplexity"], cell["low"], cell["high"]) for n, cell in found["by_length"][mask].items()
            }
            for arm, found in means.items()
        }
        plots.bands(axes, points, "tokens of context and targets", "perplexity of the same targets")
        axes.set_title(TITLES[mask], fontsize=9)
    return plots.png(figure)


def _csv(results: Sequence[Mapping[str, Any]]) -> str:
    """One line for each run, treatment of documents and length."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = ("loss", "perplexity", "low", "high", "targets")
    writer.writerow(["experiment", "arm", "seed", "masks", "length", *columns])
    for run in results:
        for mask, by_length in run["by_length"].items():
            for length, cell in [*by_length.items(), ("all", run["whole"][mask])]:
                names = (run["experiment"], run["arm"], run["seed"], mask, length)
                writer.writerow([*names, *(cell[name] for name in columns)])
    return text.getvalue()
