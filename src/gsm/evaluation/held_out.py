"""Held-out loss of trained models: the text that they are measured on, and the report.

    python evaluate.py checkpoint=logs/default

B sequences, T positions, S sequences with sums of their own, V vocabulary.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from gsm.analysis import overlap as overlaps
from gsm.analysis.interventions import ablations
from gsm.config.check import ConfigError
from gsm.config.compose import compose
from gsm.config.load import as_in_file, instantiate_data, refusals, tokenizer_of, vetted_node
from gsm.data.base import DataModule, require_data_module
from gsm.data.loader import Batches
from gsm.data.module import TextData
from gsm.data.packing import DOCUMENTS, validation_indices
from gsm.errors import within
from gsm.evaluation import paper
from gsm.evaluation.checkpoints import Trained, home, progress
from gsm.evaluation.losses import measure
from gsm.evaluation.measure import Measure, write
from gsm.evaluation.results import by_arm
from gsm.files import read_json
from gsm.intervals import over_seeds
from gsm.models.base import LanguageModel
from gsm.models.gsm import GSM
from gsm.provenance import commit
from gsm.tables import SCREEN, Grid, grid_lines, grid_text
from gsm.training.callbacks.summary import versions
from gsm.training.module import next_tokens
from gsm_kernels import explain

SPLITS = ("validation", "train")
SPREAD = "mean +- standard deviation between the runs of an arm"
READ = ("tokenizer", "tokenizer_vocabulary")  # of the description of data
MEASURES = {"loss": 4, "perplexity": 2, "bits_per_byte": 4}  # and their digits in a table


@dataclass(frozen=True)
class HeldOut(Measure):
    """Print the loss of trained models on text that they were not trained on, and write it to evaluation.json.

    By default a model is measured on its own validation data, at its training precision: trainer.precision of its
    run, where auto depends on the device at hand.

    Others: downstream tasks (python evaluate.py tasks=paper --help), RULER (ruler=true --help), perplexity by length of
    context (lengths=paper --help), answers by length of a synthetic task (answers=96 --help)

    Args:
        data: other text: a variant of configs/data, read with the checkpoint's tokenizer
        path: other text: a folder or a file of your own, divided as for training; the part of split is measured
        split: validation; or train, which the model has seen
        context: tokens of a sequence; 0: as in training. A longer one is allowed
        sequences: number of sequences, spread evenly over the split; 0: as in the run's validation
        batch_size: sequences at a time; 0: as in training
        documents: isolated, isolated_all_targets or stream, as data.documents in training; left out: as in training
        outside: leave out the text of these windows of lengths=, their number and length: outside=16,65536
        overlap: also the share of the stages' selection that the encoder selects too, at four lengths around context
        overlap_lengths: at these lengths instead, in tokens: overlap_lengths=4096,65536
        ablate: also the loss of a GSM whose decoder finds a state of zeros, and of one whose stages retrieve nothing
    """

    file: ClassVar[str] = "evaluation.json"

    data: str = ""
    path: str = ""
    split: str = "validation"
    context: int = 0
    sequences: int = 0
    batch_size: int = 0
    documents: str = ""
    outside: Sequence[int] = ()
    overlap: bool = False
    overlap_lengths: Sequence[int] = ()
    ablate: bool = False

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ConfigError(f"split must be {' or '.join(SPLITS)}, got {self.split}")
        within(2, context=self.context or None)
        within(1, sequences=self.sequences or None, batch_size=self.batch_size or None)
        if self.documents:
            read_documents([self.documents])
        if self.outside and (len(self.outside) != 2 or self.outside[0] < 1 or self.outside[1] < 2):
            raise ConfigError(f"outside must be windows and their length, as 16,65536, got {list(self.outside)}")

    def of(self, trained: Trained, file: Path) -> dict[str, Any]:
        """Return its losses, and print them at once."""
        result = self.measured(trained)
        if not self.output:
            write(file, result)
        note = _share(result) if self.data or self.path else _caution(trained.file, result)
        print(f"{_title(result)}\n{note}\n{report(result)}\n", flush=True)
        return result

    def measured(self, trained: Trained) -> dict[str, Any]:
        """Return the facts of a checkpoint and its measurements, as plain containers. Raises ConfigError."""
        text = {name: getattr(self, name) for name in ("data", "path", "split", "documents", "context", "batch_size")}
        data, start = open_data(trained.saved, **text, sequences=self.sequences), time.perf_counter()
        model = trained.model
        sequences, count, indices = _sequences(data, self.split, self.sequences, self.outside)
        document_S = None
        if self.split == "validation" and isinstance(data, TextData):  # a training split may be too large to read
            document_S = data.validation_set.documents_of(indices)

        def loss(note: str = "") -> dict[str, Any]:
            rows = progress(sequences(), count, trained.note + note)
            bytes_of = getattr(data, "bytes_of_tokens", None) if data.tokenizer else None
            bytes_V = bytes_of(self.split) if bytes_of else data.token_bytes_V
            return measure(model, rows, batch_size=data.batch_size or 8, token_bytes_V=bytes_V, document_S=document_S)

        def of_length(length: int) -> Sequence[Mapping[str, Tensor]]:
            return data.of_length(length, most=self.sequences or overlaps.SEQUENCES, split=self.split)

        with trained.computing():
            measured: dict[str, Any] = {"text": loss()}
            if self.overlap or self.overlap_lengths:
                measured["overlap"] = overlaps.measure(model, of_length, data.context, self.overlap_lengths)
            if self.ablate:
                measured["ablated"] = _ablated(model, loss, measured["text"]["loss"])
        whole = getattr(data, f"{self.split}_set", None)  # not sized where sequences are drawn without end
        return {
            **trained.facts,
            **{"split": self.split, "documents": getattr(data, "documents", None), "context": data.context},
            **({"outside": list(self.outside)} if self.outside else {}),
            **measured,
            "data": data.description([self.split]) if isinstance(data, TextData) else data.description(),
            "split_sequences": (len(whole) if isinstance(whole, Sized) else 0) or count,
            **{"device": trained.device_name, "precision": trained.precision, "kernels": explain()},
            "seconds": round(time.perf_counter() - start, 3),
            **{"versions": versions(), "commit": commit()},
        }

    def conclude(self, results: Sequence[Mapping[str, Any]], place: Path) -> None:
        """Print a table of the arms, and a table of loss by position, where there are several runs."""
        grids, notes = (tables(results) if len(results) > 1 else []), []
        if grids:
            print(f"{len(results)} runs; {SPREAD}\n\n" + "\n\n".join(grid_text(grid, SCREEN) for grid in grids) + "\n")
            treated = dict.fromkeys(str(result.get("documents")) for result in results)
            if len(treated) > 1:
                notes = [f"Compare with care: documents are {' in some and '.join(treated)} in others. Use documents="]
            read = dict.fromkeys(
                " ".join(str((result.get("data") or {}).get(key)) for key in READ) for result in results
            )
            if len(read) > 1 and "isolated" in treated:
                notes.append(
                    f"Bits per byte do not compare: the tokenizers are {' and '.join(read)} ids, and "
                    "documents=isolated leaves out the first token of each document. Use documents=isolated_all_targets"
                )
            print("".join(f"{note}\n\n" for note in notes), end="")
        if self.output or grids:
            several = {"runs": results, "tables": grids, "notes": [f"{SPREAD[0].upper()}{SPREAD[1:]}", *notes]}
            write(place, several if grids else results[0])
        print(f"Written to {place}")

    @staticmethod
    def metrics(written: Mapping[str, Any]) -> dict[str, Any]:
        """Return `loss`, `perplexity`, `bits_per_byte`, `by_document`, the mean `overlap` of the stages, its
        `chance` and each `overlap/<length>/<stage>`; `bigram/new` and `bigram/seen`: the losses of tokens that
        complete a bigram new to the document, and one seen before in it; `without/<part>`: the loss without it."""
        values = {name: written["text"].get(name) for name in (*MEASURES, "by_document")}
        overlap = written.get("overlap") or {"mean": None, "by_length": []}
        values |= {"overlap": overlap["mean"], "chance": overlap.get("chance")}
        for row in overlap["by_length"]:
            values |= {f"overlap/{row['length']}/{stage}": value for stage, value in enumerate(row["stages"], 1)}
        values |= {f"bigram/{name}": part["loss"] for name, part in bigrams(written["text"]).items()}
        ablated = written.get("ablated") or {}
        values |= {f"without/{name.replace(' ', '_')}": row["loss"] for name, row in ablated.items()}
        return {name: value for name, value in values.items() if value is not None}


def open_data(
    saved: Mapping[str, Any],
    data: str = "",
    path: str = "",
    *,
    split: str = "validation",
    documents: str = "",
    context: int = 0,
    batch_size: int = 0,
    sequences: int = 0,
) -> DataModule:
    """Return the data of a checkpoint, or other text, cut for its model and read with its tokenizer; arguments as of
    ``HeldOut``. Raises ConfigError.

    Only ``split`` is prepared: the other may take hours, or lie on the hub.
    """
    config, trained_on = saved["hyper_parameters"]["config"], vetted_node(saved, "data", "the checkpoint")
    node = trained_on if not (data or path) else _other({**config, "data": trained_on}, data or "folder", path)
    options = {"documents": documents, "context": context, "batch_size": batch_size, "validation_sequences": sequences}
    for name, value in options.items():
        if value and name not in node:
            raise ConfigError(f"{name} must be left out, as {node['_target_']} has none, got {value}")
        if value or name in node and name in trained_on:
            node[name] = value or trained_on[name]
    if "tokenizer" in node:
        if not saved.get("tokenizer"):
            raise ConfigError("data and path must be left out, as the checkpoint holds no tokenizer to read text with")
    with as_in_file():
        made = instantiate_data(node, tokenizer_of(saved, "the checkpoint") if saved.get("tokenizer") else None)
    with refusals("data"):
        if getattr(made, f"{split}_set", None) is None:  # a data module of the user's, prepared as for a trainer
            made.prepare_data()
            made.setup("validate")
    return require_data_module(made)


def _other(config: Mapping[str, Any], data: str, path: str) -> dict[str, Any]:
    """Return the configuration of other data at the checkpoint's size, with the values that its model fixes."""
    trained_on, state = config["data"], config["model"].get("state_size")
    size = [
        f"size.{name}={'null' if value is None else value}"
        for name, value in config["size"].items()
        if name.isidentifier() and name != "_target_" and _plain_number(value)
    ]
    size += [f"model.state_size={state}"] if isinstance(state, int) else []
    composed = compose([*size, f"data={data}", *(["data.path=."] if path else [])])["data"]
    carried = {
        name: trained_on[name]
        for name in ("vocabulary", "seed", "validation_sequences", "cache_dir")
        if name in trained_on
    }
    return {**composed, **carried, **({"path": path} if path else {})}


def _plain_number(value: Any) -> bool:
    """Return whether a value of a file may become a word of a command line."""
    items = value if isinstance(value, list) else [value]
    return all(item is None or isinstance(item, bool | int | float) for item in items)


def _sequences(
    text: Any, split: str, sequences: int, outside: Sequence[int]
) -> tuple[Callable[[], Iterable[Any]], int, Any]:
    """Return a function that returns the sequences of a split from the beginning, their number, and their indices, None
    where a data module of the user's has none."""
    if outside:
        if not isinstance(text, TextData):
            raise ConfigError("outside must be left out, as these data are no text; or use data= or path=")
        windows, length = outside
        with refusals("data"):
            indices = text.outside(windows, length, sequences or text.validation_sequences, split)
        return lambda: getattr(text, f"{split}_set").each(indices), len(indices), indices
    if split == "validation":
        indices = None
        if isinstance(text, TextData):
            indices = validation_indices(len(text.validation_set), text.validation_sequences)
        loader = text.val_dataloader()
        if isinstance(loader, Batches):  # they are counted before any is made
            return lambda: map(_with_targets, text.validation()), sum(map(len, loader.plan())), indices
        rows = [_with_targets(row) for row in text.validation()]
        return lambda: rows, len(rows), indices
    if not hasattr(text, "train_set"):
        raise ConfigError("split must be validation, as these sequences are synthetic, got train")
    indices = validation_indices(len(text.train_set), sequences or text.validation_sequences)
    return lambda: text.train_set.each(indices), len(indices), indices


def _with_targets(row: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return a sequence with the parts that a data module of the user's may leave out: one document, and the next
    tokens as targets."""
    if {"targets", "documents"} <= row.keys():
        return row
    document_T = row.get("documents", torch.zeros_like(row["tokens"]))
    return {"targets": next_tokens(row["tokens"][None], document_T[None])[0], "documents": document_T, **row}


def _ablated(
    model: LanguageModel, measured: Callable[[str], Mapping[str, Any]], whole: float
) -> dict[str, dict[str, float]] | None:
    """Return the loss without each removable part, and the difference; None for a model without a shared state."""
    if not isinstance(model, GSM):
        return None
    rows = {}
    for name, without in ablations(model).items():
        with without():
            loss = measured(f"without {name}: ")["loss"]
        rows[name] = {"loss": loss, "added": loss - whole}
    return rows


def read_documents(names: Sequence[str]) -> None:
    """Raise ConfigError for an unknown treatment of documents, for none, or for the same twice."""
    if len({*names}) < len(names):
        raise ConfigError(f"documents must have each name once, got {','.join(names)}")
    for name in names or ("nothing",):
        if name not in DOCUMENTS:
            raise ConfigError(f"documents must be {' or '.join(DOCUMENTS)}, got {name}")


def _title(result: Mapping[str, Any]) -> str:
    text, data = result["text"], result["data"]
    of = data.get("corpus") or data.get("task") or "its data"
    run = f"{result['experiment']}/{result['arm']}-seed{result['seed']}"
    treated = f", documents: {result['documents']}" if result["documents"] else ""
    split = data.get("held_out", "validation") if result["split"] == "validation" else result["split"]
    return (
        f"{run}, step {result['step']}: {split} of {of}\n"
        f"{text['sequences']:,} sequences of {result['context']:,} tokens, {text['targets']:,} targets{treated}"
    )


def bigrams(text: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return targets and mean loss of tokens that complete a bigram ``new`` to the document, or one ``seen`` before in
    it. A part without targets is left out; older results have neither."""
    parts = {}
    for name in ("new", "seen"):
        spans = [span for span in text.get("by_bigram", []) if (span["first"] > 0) == (name == "seen")]
        if targets := sum(span["targets"] for span in spans):
            loss = sum(span["targets"] * span["loss"] for span in spans) / targets
            parts[name] = {"targets": targets, "loss": loss}
    return parts


def _share(result: Mapping[str, Any]) -> str:
    """Return a line on the measured part of other text: training would hold out only a part of it."""
    data, split = result["data"], result["split"]
    if f"{split}_files" not in data:
        return ""
    return (
        f"measured {result['text']['sequences']:,} of the {result['split_sequences']:,} sequences of this split, which "
        f"is {data[f'{split}_bytes']:,} bytes of {data[f'{split}_files']:,} of {data['files']:,} files\n"
    )


def _caution(file: Path, result: Mapping[str, Any]) -> str:
    """Return a line where the text is another one than that of the run's own numbers."""
    before = (read_json(home(file) / "summary.json") or {}).get("data")
    if not isinstance(before, dict) or before.get("digest") in (None, result["data"].get("digest")):
        return ""
    return "This is not the text that the run validated on: it has another digest.\n"


def report(result: Mapping[str, Any]) -> str:
    """Return the report of a single model, in 80 columns: its numbers with standard errors, its loss by position with a
    bar from 0 nats, and the overlap and the ablations that were measured."""
    text = result["text"]
    lines = []
    for name in MEASURES:
        error, unit = text.get(f"{name}_error"), " nats per token" if name == "loss" else ""
        cell = _number(text[name], MEASURES[name]) + (f" +- {error:.4f}" if error is not None else "")
        lines.append(f"  {name.replace('_', ' '):<14}{cell}{unit}")
    head = ["place in the document", "targets", "loss", "+-"]
    table = grid_lines([head, *map(_bucket, text["by_position"])])
    highest = max((bucket["loss"] for bucket in text["by_position"]), default=0.0) or 1.0
    bars = ["#" * round((SCREEN - len(table[0]) - 2) * bucket["loss"] / highest) for bucket in text["by_position"]]
    lines += ["", *(f"{row}  {bar}".rstrip() for row, bar in zip(table, ["", *bars], strict=True))]
    if text.get("by_bigram"):
        lines += ["", *grid_lines([["tokens since its bigram", "targets", "loss", "+-"], *_bigram_rows(text)])]
    if "overlap" in result:
        lines += ["", *overlaps.table(result["overlap"], paper.tables()["overlap"]["by_length"])]
    if "ablated" in result and result["ablated"] is None:
        lines += ["", "  ablated: nothing, for this model has no shared state"]
    elif "ablated" in result:
        names = {name: f"retrieval of {name}" for name in result["ablated"]} | {"state": "state, but a row's own z"}
        rows = [[names[name], f"{row['loss']:.4f}", f"{row['added']:+.4f}"] for name, row in result["ablated"].items()]
        lines += ["", *grid_lines([["with zeros for the", "loss", "added"], *rows])]
    return "\n".join(lines)


def tables(results: Sequence[Mapping[str, Any]]) -> list[Grid]:
    """Return arms with the mean over their runs and the standard deviation, and the mean loss by position."""
    arms = {arm: [run["text"] for run in seeds.values()] for arm, seeds in by_arm(results).items()}
    whole = [["arm", "runs", *(name.replace("_", " ") for name in MEASURES)]]
    for arm, texts in arms.items():
        cells = [over_seeds(text[name] for text in texts).text(digits) for name, digits in MEASURES.items()]
        whole.append([arm, str(len(texts)), *cells])
    spans = {bucket["first"]: _span(bucket) for result in results for bucket in result["text"]["by_position"]}
    grid = [["place in the document", *arms]]
    for first, span in sorted(spans.items()):
        positions = [[position for text in texts for position in text["by_position"]] for texts in arms.values()]
        losses = [[position["loss"] for position in each if position["first"] == first] for each in positions]
        grid.append([span, *(_number(statistics.fmean(those) if those else None, 3) for those in losses)])
    return [whole, grid, *_bigram_grid(arms)]


def _bigram_grid(arms: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Grid]:
    """Return the mean losses of tokens that complete a new bigram and a bigram seen before, with the standard deviation
    over the runs of an arm; nothing for older results."""
    rows = []
    for arm, texts in arms.items():
        parts = [bigrams(text) for text in texts]
        if all(part.keys() == {"new", "seen"} for part in parts):
            share = statistics.fmean(
                part["seen"]["targets"] / sum(p["targets"] for p in part.values()) for part in parts
            )
            cells = [
                over_seeds(part[name]["loss"] for part in parts).text(MEASURES["loss"]) for name in ("new", "seen")
            ]
            rows.append([arm, f"{100 * share:.1f} %", *cells])
    return [[["arm", "bigrams seen before", "loss, new bigram", "loss, seen before"], *rows]] if rows else []


def _bigram_rows(text: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of new bigrams, of all others together, and of these by distance."""
    parts, spans = bigrams(text), [span for span in text["by_bigram"] if span["first"]]
    both = [
        [label, f"{parts[name]['targets']:,}", _number(parts[name]["loss"], 3), ""]
        for name, label in (("new", "new to the document"), ("seen", "seen before"))
        if name in parts
    ]
    return [*both, *map(_bucket, spans)]


def _bucket(bucket: Mapping[str, Any]) -> list[str]:
    """Return the row of a bucket of positions: span, targets, loss and standard error."""
    numbers = (_number(bucket[name], 3) for name in ("loss", "error"))
    return [_span(bucket), f"{bucket['targets']:,}", *numbers]


def _span(bucket: Mapping[str, Any]) -> str:
    """Return ``5`` or ``4 to 7``."""
    first, last = bucket["first"], bucket["last"]
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def _number(number: float | None, digits: int) -> str:
    """Return a number with this number of digits after the point; ``-`` for None."""
    return "-" if number is None else f"{number:.{digits}f}"
