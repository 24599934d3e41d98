"""Held-out loss of trained models: the text that they are measured on, and the report.

    python evaluate.py checkpoint=logs/default

B sequences, T positions, S sequences with sums of their own, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

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
from gsm.evaluation.measure import Measure
from gsm.evaluation.records import Arms, Cell, Measured, Record, Rows, by, error, mean, over_arms, pivot, runs_of, where
from gsm.files import read_json
from gsm.intervals import over_seeds
from gsm.models.gsm import GSM
from gsm.tables import Grid

SPLITS = ("validation", "train")
SPAN = ("first", "last")  # of a bucket
READ = ("tokenizer", "tokenizer_vocabulary")  # of the description of data
WHOLE: dict[str, Any] = {"part": "text", "by": None, "quantity": "loss"}  # of all targets


@dataclass(frozen=True)
class HeldOut(Measure):
    """Print the loss of trained models on text that they were not trained on, and write it.

    evaluation.jsonl has lines for every sequence; beside it lie the tables, evaluation.md.

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
        outside: leave out the text of the windows that lengths= measures, by their number and length: outside=16,65536
        overlap: also the share of the stages' selection that the encoder selects too, at four lengths around context
        overlap_lengths: at these lengths instead, in tokens: overlap_lengths=4096,65536
        ablate: also the loss of a GSM whose decoder finds a state of zeros, and of one whose stages retrieve nothing
    """

    name: ClassVar[str] = "evaluation"

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

    def of(self, trained: Trained, file: Path | None) -> Measured:
        """Return the losses of every sequence. Raises ConfigError."""
        text = {name: getattr(self, name) for name in ("data", "path", "split", "documents", "context", "batch_size")}
        data, model = open_data(trained.saved, **text, sequences=self.sequences), trained.model
        sequences, count, indices = _sequences(data, self.split, self.sequences, self.outside)
        document_S = None
        if self.split == "validation" and isinstance(data, TextData):  # a training split may be too large to read
            document_S = data.validation_set.documents_of(indices)

        def losses(without: str = "") -> list[Record]:
            rows = progress(sequences(), count, trained.note + (f"without {without}: " if without else ""))
            bytes_of = getattr(data, "bytes_of_tokens", None) if data.tokenizer else None
            bytes_V = bytes_of(self.split) if bytes_of else data.token_bytes_V
            found = {"token_bytes_V": bytes_V, "document_S": document_S, "ranks": trained.ranks}
            return measure(model, rows, batch_size=data.batch_size or 8, **found)

        def without(part: Record) -> list[Record]:
            with removable[part["removed"]]():
                return where(losses(part["removed"]), by=None)

        def overlap(part: Record) -> list[Record]:
            try:
                rows = data.of_length(part["length"], most=part["sequences"], split=self.split)
            except ValueError:  # too long for the text that there is, or too short for the task
                if self.overlap_lengths:
                    raise
                return []
            return overlaps.records(model, rows)

        whole = getattr(data, f"{self.split}_set", None)  # not sized where sequences are drawn without end
        questions = {
            **{"split": self.split, "documents": getattr(data, "documents", None), "context": data.context},
            **{"sequences": count, "of": (len(whole) if isinstance(whole, Sized) else 0) or count},
            "outside": list(self.outside),
            "data": data.description([self.split]) if isinstance(data, TextData) else data.description(),
        }
        measured = trained.measured(file, questions)
        removable = ablations(model) if self.ablate and isinstance(model, GSM) else {}
        with trained.computing():
            measured.fill([{"part": "text"}], lambda part: losses(), together=True)
            if removable:
                parts = [{"part": "without", "removed": name} for name in removable]
                measured.fill(parts, without, together=True)
            if self.overlap or self.overlap_lengths:
                lengths = sorted(set(self.overlap_lengths) or overlaps.around(data.context))
                most = self.sequences or overlaps.SEQUENCES
                measured.fill([{"part": "overlap", "sequences": most, "length": length} for length in lengths], overlap)
        return measured

    def check(self, runs: Sequence[Measured]) -> None:
        """Runs may have different text; notes warn where that shows."""

    def tables(self, arms: Arms) -> list[Grid]:
        """Return the losses of arms: of all targets, by position, by the distance of their bigram, with zeros for parts
        of the model; and the overlap of stages and encoder."""
        runs = runs_of(arms)
        known = [record for one in runs for record in one.records]
        cell, bits = _with_error if len(runs) == 1 else over_arms, {**WHOLE, "quantity": "bits"}
        rows = {"loss, nats per token": WHOLE} | ({"bits per byte": bits} if where(known, **bits) else {})
        whole = pivot("all targets", arms, rows, cell(4))
        grids = [[*whole, *pivot("", arms, {"perplexity": WHOLE}, _perplexity)[1:]]]
        for title, key in (("place in the document", "position"), ("tokens since its bigram", "bigram")):
            rows = {_span(*span): {"by": key, "first": span[0]} for span in sorted(by(where(known, by=key), *SPAN))}
            if key == "bigram" and rows:
                rows.pop("0", None)
                rows = {"new": {"by": key, "seen": False}, "seen before": {"by": key, "seen": True}} | rows
            grids += [pivot(f"loss, {title}", arms, rows, cell(3), ["targets"], _targets(runs, rows))] if rows else []
        return [*grids, *_without(arms, known), *_overlap(arms, known)]

    def notes(self, arms: Arms) -> list[str]:
        """Return sentences on the text, and on runs that do not compare."""
        runs = runs_of(arms)
        asked = [one.settings["questions"] for one in runs]
        notes = [*dict.fromkeys(_text(one) for one in runs)]
        if len(runs) == 1:
            run = runs[0].run
            step = f", step {run['step']}" if "step" in run else ""  # an experiment knows it by its runs
            notes[0] = f"{run['experiment']}/{run['arm']}-seed{run['seed']}{step}: {notes[0]}"
            notes.append("+- is the standard error over sequences")
        else:
            count = ", ".join(f"{len(seeds)} of {arm}" for arm, seeds in arms.items())
            notes.append(f"{len(runs)} runs: {count}; mean +- standard deviation between the runs of an arm")
        notes += dict.fromkeys(
            line for one in runs for line in (_share(one) if self.data or self.path else _caution(one))
        )
        for asked_for, part, lacking in (
            (self.ablate, "without", "zeros for parts of the model: none, as it has no shared state"),
            (
                self.overlap or self.overlap_lengths,
                "overlap",
                "overlap: none, as nothing is selected, or no query has a choice",
            ),
        ):
            notes += [f"{one.run['arm']}, {lacking}" for one in runs if asked_for and not one.where(part=part)]
        if len(treated := dict.fromkeys(str(each["documents"]) for each in asked)) > 1:
            notes.append(f"Compare with care: documents are {' in some and '.join(treated)} in others. Use documents=")
        read = dict.fromkeys(" ".join(str(each["data"].get(key)) for key in READ) for each in asked)
        if len(read) > 1 and "isolated" in treated:
            notes.append(
                f"Bits per byte do not compare: the tokenizers are {' and '.join(read)} ids, and documents=isolated "
                "leaves out the first token of each document. Use documents=isolated_all_targets"
            )
        return notes

    def metrics(self, measured: Measured) -> dict[str, Any]:
        """Return `loss`, `perplexity`, `bits_per_byte`, `by_document`, the mean `overlap` of the stages, its
        `chance`, each `overlap/<length>/<stage>` and `chance/<length>`; `bigram/new` and `bigram/seen`: the losses of
        tokens that complete a bigram new to the document, and one seen before in it; `without/<part>`: the loss without
        it."""
        values, overlap = _whole(measured), measured.where(part="overlap")
        values["by_document"] = _by_document(measured)
        at_context = where(overlap, length=measured.settings["questions"]["context"])
        values["overlap"] = mean(where(at_context, quantity="overlap"), ["stage"])
        values["chance"] = mean(where(at_context, quantity="chance"))
        for (length, stage), records in by(where(overlap, quantity="overlap"), "length", "stage").items():
            values[f"overlap/{length}/{stage}"] = mean(records)
        for (length,), records in by(where(overlap, quantity="chance"), "length").items():
            values[f"chance/{length}"] = mean(records)
        for name, seen in {"new": False, "seen": True}.items():
            values[f"bigram/{name}"] = mean(measured.where(by="bigram", seen=seen))
        for (part,), records in by(measured.where(part="without"), "removed").items():
            values[f"without/{part.replace(' ', '_')}"] = mean(where(records, quantity="loss"))
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
    """Return a function that starts an iteration over a split, its number of sequences, and their indices; None for a
    user's data module without indices."""
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
            return text.validation, sum(map(len, loader.plan())), indices
        rows = list(text.validation())
        return lambda: rows, len(rows), indices
    if not hasattr(text, "train_set"):
        raise ConfigError("split must be validation, as these sequences are synthetic, got train")
    indices = validation_indices(len(text.train_set), sequences or text.validation_sequences)
    return lambda: text.train_set.each(indices), len(indices), indices


def read_documents(names: Sequence[str]) -> None:
    """Raise ConfigError for an unknown treatment of documents, for none, or for the same twice."""
    if len({*names}) < len(names):
        raise ConfigError(f"documents must have each name once, got {','.join(names)}")
    for name in names or ("nothing",):
        if name not in DOCUMENTS:
            raise ConfigError(f"documents must be {' or '.join(DOCUMENTS)}, got {name}")


def _text(one: Measured) -> str:
    asked = one.settings["questions"]
    split = asked["data"].get("held_out", "validation") if asked["split"] == "validation" else asked["split"]
    of = asked["data"].get("corpus") or asked["data"].get("task") or "its data"
    return (
        f"{split} of {of}, {asked['sequences']:,} sequences of {asked['context']:,} tokens, "
        f"{_weight(one.where(**WHOLE)):,} targets"
        + (f", documents: {asked['documents']}" if asked["documents"] else "")
    )


def _share(one: Measured) -> list[str]:
    """Return a line that says how much of a split of other text was measured; none for synthetic data."""
    asked = one.settings["questions"]
    data, split = asked["data"], asked["split"]
    if f"{split}_files" not in data:
        return []
    return [
        f"measured {asked['sequences']:,} of the {asked['of']:,} sequences of this split, which is "
        f"{data[f'{split}_bytes']:,} bytes of {data[f'{split}_files']:,} of {data['files']:,} files"
    ]


def _caution(one: Measured) -> list[str]:
    """Return a line if the run's own numbers are of another text."""
    if "checkpoint" not in one.run:  # of an experiment, where each run is measured by a process of its own
        return []
    before = (read_json(home(Path(one.run["checkpoint"])) / "summary.json") or {}).get("data")
    if not isinstance(before, dict) or before.get("digest") in (None, one.settings["questions"]["data"].get("digest")):
        return []
    return ["This is not the text that the run validated on: it has another digest"]


def _whole(one: Measured) -> dict[str, Any]:
    """Return the mean loss of a run, its perplexity, and bits per byte where the text has bytes."""
    loss, bits = (mean(one.where(**{**WHOLE, "quantity": name})) for name in ("loss", "bits"))
    return {"loss": loss, "perplexity": None if loss is None else perplexity(loss), "bits_per_byte": bits}


def _by_document(one: Measured) -> list[list[float]] | None:
    """Return the summed loss and the bytes of each document, in order; None without documents or bytes."""
    nats, bits = (by(one.where(**{**WHOLE, "quantity": name}), "document") for name in ("loss", "bits"))
    sums = {
        name: [math.fsum(record["value"] for record in records), sum(record["weight"] for record in bits.get(name, ()))]
        for name, records in nats.items()
    }
    return [sums[name] for name in sorted(sums)] if bits and (None,) not in sums else None


def perplexity(loss: float) -> float:
    """Return exp(loss), at most exp(700)."""
    return math.exp(min(loss, 700.0))


def _with_error(digits: int) -> Cell:
    """Return a cell with the mean of a run and its standard error over sequences."""
    return lambda seeds: replace(over_seeds(map(mean, seeds)), spread=error(seeds[0])).text(digits)


def _perplexity(seeds: Sequence[Sequence[Record]]) -> str:
    return over_seeds(None if (loss := mean(records)) is None else perplexity(loss) for records in seeds).text(2)


def _weight(records: Iterable[Record]) -> int:
    return sum(record["weight"] for record in records)


def _targets(runs: Sequence[Measured], rows: Rows) -> dict[str, list[str]]:
    """Return the number of targets of every row; ``-`` where it is not the same in all runs."""
    counts = {label: {_weight(one.where(**keys)) for one in runs} for label, keys in rows.items()}
    return {label: [f"{min(count):,}" if len(count) == 1 else "-"] for label, count in counts.items()}


def _without(arms: Arms, known: Sequence[Record]) -> list[Grid]:
    """Return the loss with zeros for parts of the model; for a single run also what they add to it."""
    runs = runs_of(arms)
    names = {"state": "state, but a row's own z"}
    rows = {"nothing": WHOLE}
    for (name,) in by(where(known, part="without"), "removed"):
        rows[names.get(name, f"retrieval of {name}")] = {**WHOLE, "part": "without", "removed": name}
    if len(rows) == 1:
        return []
    if len(runs) > 1:
        return [pivot("loss with zeros for", arms, rows, over_arms(4))]
    losses = {label: mean(runs[0].where(**keys)) or 0.0 for label, keys in rows.items()}
    added = {label: [f"{loss - losses['nothing']:+.4f}"] for label, loss in losses.items()}
    return [pivot("loss with zeros for", arms, rows, over_arms(4), ["added"], added)]


def _overlap(arms: Arms, known: Sequence[Record]) -> list[Grid]:
    """Return the overlap by length and stage: of a single run beside the paper's."""
    found, runs = where(known, part="overlap"), runs_of(arms)
    if found and len(runs) == 1:
        rows = [
            {
                "length": length,
                "chance": mean(where(records, quantity="chance")),
                "stages": [mean(stage) for stage in by(where(records, quantity="overlap"), "stage").values()],
            }
            for (length,), records in sorted(by(found, "length").items())
        ]
        facts = {"by_length": rows, "by_construction": any(record.get("by_construction") for record in found)}
        return [overlaps.grid(facts, paper.tables()["overlap"]["by_length"])]
    keys = sorted(by(where(found, quantity="overlap"), "length", "stage"))
    rows = {f"{length:,} tokens, stage {stage}": {"length": length, "stage": stage} for length, stage in keys}
    return [pivot("overlap with the encoder, %", arms, rows, over_arms(1, 100))] if rows else []


def _span(first: int, last: int) -> str:
    """Return ``5`` or ``4 to 7``."""
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"
