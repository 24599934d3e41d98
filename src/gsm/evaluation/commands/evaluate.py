"""Held-out loss of trained models: of one checkpoint, or of every run below a folder, side by side."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from gsm.analysis.interventions import ablations
from gsm.config.check import ConfigError
from gsm.config.compose import compose
from gsm.config.load import instantiate_data, load_model, read_checkpoint, refusals, tokenizer_of, usable, vetted_node
from gsm.data.packing import validation_indices
from gsm.evaluation import losses, show
from gsm.evaluation import overlap as overlaps
from gsm.evaluation.commands.scoring import autocast, checkpoints, device_name, home, precision_of, progress, read_masks
from gsm.experiments.fit import OVERLAP_SEQUENCES
from gsm.files import write_json
from gsm.models.base import LanguageModel
from gsm.models.gsm import GSM
from gsm.training.callbacks.summary import commit, versions
from gsm_kernels import explain

SPLITS = ("validation", "train")


def evaluate(
    checkpoint: str,
    data: str = "",
    path: str = "",
    split: str = "validation",
    context: int = 0,
    sequences: int = 0,
    batch_size: int = 0,
    position: str = "document",
    masks: str = "on",
    overlap: bool = False,
    overlap_lengths: str = "",
    ablate: bool = False,
    device: str = "auto",
    output: str = "",
) -> list[dict[str, Any]]:
    """Prints how well trained models predict text they were not trained on, and writes it to evaluation.json.

    Without further arguments a model meets exactly what its run validated on, in the arithmetic that it was validated
    in: trainer.precision of its run, and what auto stands for on the device at hand.

    Others: downstream tasks (python evaluate.py tasks=paper --help), RULER (ruler=true --help), perplexity by length of
    context (lengths=paper --help)

    Args:
        checkpoint: a .ckpt file, the folder of a run, or a folder above several runs, such as logs/<name>
        data: other text: a variant of configs/data, read with the checkpoint's tokenizer
        path: other text: a folder or a file of your own, divided as for training; the part that split says is measured
        split: validation; or train, which the model has seen
        context: tokens of a sequence; 0: as in training. A longer one is allowed
        sequences: how many, spread evenly over the split; 0: as many as the run validated on
        batch_size: sequences at a time; 0: as in training
        position: place of a token in its document, or in the whole sequence
        masks: of documents: on (nothing crosses the end of a document, as in training), or off (a sequence is one)
        overlap: also how much of what the stages select the encoder selects too, at four lengths around context
        overlap_lengths: at these lengths instead, in tokens: overlap_lengths=4096,65536
        ablate: also the loss of a GSM whose decoder finds a state of zeros, and of one whose stages retrieve nothing
        device: cpu, cuda, ...; auto: a GPU if there is one
        output: the file to write; left out: evaluation.json in the folder of the run, and in the folder above several

    Raises:
        ConfigError, FileNotFoundError: a value out of range, or a file that cannot be used; the message says which.
    """
    _check(split, position, context=context, sequences=sequences, batch_size=batch_size)
    (masks,), lengths = read_masks(masks, both=False), _lengths(overlap_lengths)
    device = usable(device)
    found = checkpoints(checkpoint)
    wanted = {"split": split, "context": context, "sequences": sequences, "batch_size": batch_size}
    results = []
    for number, file in enumerate(found, 1):
        note = f"{number} of {len(found)}: " if len(found) > 1 else ""
        options = {"device": device, "data": data, "path": path, "position": position, "masks": masks}
        options |= {"overlap": overlap or bool(lengths), "overlap_lengths": lengths, "ablate": ablate}
        result = measure(file, note=note, **options, **wanted)  # pyright: ignore[reportArgumentType]
        if not output:
            _write(home(file) / "evaluation.json", result)
        print(
            f"{_title(result)}\n{_share(result) if data or path else _caution(file, result)}\n{show.one(result)}\n",
            flush=True,
        )
        results.append(result)
    if len(results) > 1:
        print(
            f"{len(results)} runs; mean +- standard deviation between the runs of an arm\n\n{show.several(results)}\n"
        )
    _conclude(results, output, Path(checkpoint), found)
    return results


def measure(
    file: Path,
    *,
    device: str = "cpu",
    data: str = "",
    path: str = "",
    split: str = "validation",
    context: int = 0,
    sequences: int = 0,
    batch_size: int = 0,
    position: str = "document",
    masks: str = "on",
    overlap: bool = False,
    overlap_lengths: Sequence[int] = (),
    ablate: bool = False,
    note: str = "",
) -> dict[str, Any]:
    """What is known of one checkpoint and what was measured, as plain containers; arguments as in ``evaluate``."""
    saved = read_checkpoint(file, mmap=True)
    config = saved["hyper_parameters"]["config"]
    text = open_data(saved, data, path, split=split, context=context, batch_size=batch_size, sequences=sequences)
    model, start = load_model(file, device), time.perf_counter()
    precision = precision_of(config, device)
    with autocast(precision, device), refusals(str(file)):

        def measured(note: str) -> losses.Losses:
            rows, count = _sequences(text, split, sequences)
            shown = progress(rows if masks == "on" else map(_as_one_document, rows), count, note)
            options = {"batch_size": text.batch_size, "place": position}
            bytes_V = text.bytes_of_tokens(split) if text.tokenizer else None
            return losses.evaluate(model, shown, token_bytes_V=bytes_V, **options)  # pyright: ignore[reportArgumentType]

        whole = measured(note)
        found = _overlap(model, text, split, sequences, masks, overlap_lengths) if overlap else {}
        found |= _ablated(model, measured, whole.loss) if ablate else {}
    return {
        "checkpoint": str(file),
        **{"experiment": config.get("name"), "arm": str(config.get("arm")), "seed": config.get("seed")},
        "step": saved.get("global_step"),
        "split": split,
        "masks": masks,
        "context": text.context,
        "text": whole.facts(),
        **found,
        "data": text.description([split]),
        "split_sequences": len(getattr(text, f"{split}_set")) if text.tokenizer else text.validation_sequences,
        **{"device": device_name(device), "precision": precision, "kernels": explain()},
        "seconds": round(time.perf_counter() - start, 3),
        **{"versions": versions(), "commit": commit()},
    }


def metrics(written: Mapping[str, Any]) -> dict[str, float]:
    """Of one run's file: `loss`, `perplexity`, `bits_per_byte`, and of the stages' `overlap` the mean
    and what `overlap/<length>/<stage>` names; `without/<part>`: the loss without it."""
    found = {name: written["text"][name] for name in ("loss", "perplexity", "bits_per_byte")}
    overlap = written.get("overlap") or {"mean": None, "by_length": []}
    found["overlap"] = overlap["mean"]
    for row in overlap["by_length"]:
        found |= {f"overlap/{row['length']}/{stage}": value for stage, value in enumerate(row["stages"], 1)}
    found |= {f"without/{name.replace(' ', '_')}": row["loss"] for name, row in (written.get("ablated") or {}).items()}
    return {name: value for name, value in found.items() if value is not None}


def open_data(
    saved: Mapping[str, Any],
    data: str = "",
    path: str = "",
    *,
    split: str = "validation",
    context: int = 0,
    batch_size: int = 0,
    sequences: int = 0,
) -> Any:
    """The data of a checkpoint, or other text, cut for its model and read with its tokenizer. Raises ConfigError.

    Only ``split`` is prepared: the other may take hours, or lie on the hub.
    """
    config, own = saved["hyper_parameters"]["config"], vetted_node(saved, "data", "the checkpoint")
    node = own if not (data or path) else _other({**config, "data": own}, data or "folder", path)
    node["context"] = context or own["context"]
    node["batch_size"] = batch_size or own["batch_size"]
    if sequences:
        node["validation_sequences"] = sequences
    if "tokenizer" in node:
        if not saved.get("tokenizer"):
            raise ConfigError(
                "the checkpoint holds no tokenizer, so its model cannot read text; leave data= and path= out"
            )
    made = instantiate_data(node, tokenizer_of(saved, "the checkpoint") if saved.get("tokenizer") else None)
    with refusals("data"):
        _ = getattr(made, f"{split}_set", None)
    return made


def _other(config: Mapping[str, Any], data: str, path: str) -> dict[str, Any]:
    """The configuration of other data, as of the checkpoint's size, with what the model fixes taken from its own."""
    own, state = config["data"], config["model"].get("state_size")
    size = [
        f"size.{name}={'null' if value is None else value}"
        for name, value in config["size"].items()
        if name.isidentifier() and name != "_target_" and _plain_number(value)
    ]
    size += [f"model.state_size={state}"] if isinstance(state, int) else []
    composed = compose([*size, f"data={data}", *(["data.path=."] if path else [])])["data"]
    kept = {name: own[name] for name in ("vocabulary", "seed", "validation_sequences", "cache_dir") if name in own}
    return {**composed, **kept, **({"path": path} if path else {})}


def _plain_number(value: Any) -> bool:
    """Whether a value of a file may become a word of a command line."""
    items = value if isinstance(value, list) else [value]
    return all(item is None or isinstance(item, bool | int | float) for item in items)


def _overlap(
    model: LanguageModel, text: Any, split: str, sequences: int, masks: str, lengths: Sequence[int]
) -> dict[str, Any]:
    """The overlap of stages and encoder by length, on as many sequences as after training unless told."""

    def make(length: int) -> list[Mapping[str, Tensor]]:
        rows = text.of_length(length, most=sequences or OVERLAP_SEQUENCES, split=split)
        return rows if masks == "on" else [*map(_as_one_document, rows)]

    return {"overlap": overlaps.by_length(model, make, text.context, lengths)}


def _ablated(model: LanguageModel, measured: Callable[[str], losses.Losses], whole: float) -> dict[str, Any]:
    """Loss without each part that can be taken away, and what that adds; None of a model without a shared state."""
    if not isinstance(model, GSM):
        return {"ablated": None}
    rows = {}
    for name, without in ablations(model).items():
        with without():
            loss = measured(f"without {name}: ").loss
        rows[name] = {"loss": loss, "added": loss - whole}
    return {"ablated": rows}


def _as_one_document(row: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A sequence whose documents are not kept apart; padding stays padding."""
    return {**row, "documents": row["documents"].clamp(max=0)}


def _sequences(text: Any, split: str, sequences: int) -> tuple[Iterator[Any], int]:
    """The sequences of a split, and how many they are."""
    limit = sequences or text.validation_sequences
    if split == "validation":
        return text.validation(), sum(len(indices) for indices in text.val_dataloader().plan())
    if not hasattr(text, "train_set"):
        raise ConfigError("split is 'train', but these sequences are made when they are needed; take split=validation")
    indices = validation_indices(len(text.train_set), limit)
    return text.train_set.each(indices), len(indices)


def _check(split: str, position: str, **numbers: int) -> None:
    if split not in SPLITS:
        raise ConfigError(f"split is '{split}', but has to be {' or '.join(SPLITS)}")
    if position not in ("document", "sequence"):
        raise ConfigError(f"position is '{position}', but has to be document or sequence")
    for name, number in numbers.items():
        if number < 0 or (name == "context" and number == 1):
            least = 2 if name == "context" else 1
            raise ConfigError(f"{name} is {number}, but has to be {least} or more; leave it out for what the run had")


def _lengths(text: str) -> list[int]:
    """`4096,65536` as numbers; none for an empty text. Raises ConfigError."""
    words = [word.strip() for word in text.strip("[]").split(",") if word.strip()]
    if not all(word.isdecimal() and int(word) for word in words):
        raise ConfigError(f"overlap_lengths is '{text}', but takes whole numbers of at least 1, such as 4096,65536")
    return [int(word) for word in words]


def _title(result: Mapping[str, Any]) -> str:
    text, data = result["text"], result["data"]
    of = data.get("corpus") or data.get("task") or "its data"
    run = f"{result['experiment']}/{result['arm']}/seed{result['seed']}"
    whole = ", each read as one document" if result["masks"] == "off" else ""
    return (
        f"{run}, step {result['step']}: {result['split']} of {of}\n"
        f"{text['sequences']:,} sequences of {result['context']:,} tokens, {text['targets']:,} targets{whole}"
    )


def _share(result: Mapping[str, Any]) -> str:
    """A line on how much of other text was measured: what training would hold out is only a part of it."""
    data, split = result["data"], result["split"]
    if f"{split}_files" not in data:
        return ""
    return (
        f"measured {result['text']['sequences']:,} of the {result['split_sequences']:,} sequences of this split, which "
        f"is {data[f'{split}_bytes']:,} bytes of {data[f'{split}_files']:,} of {data['files']:,} files\n"
    )


def _caution(file: Path, result: Mapping[str, Any]) -> str:
    """A line where the text is no longer the one that the run's own numbers are of."""
    try:
        before = json.loads((home(file) / "summary.json").read_text(encoding="utf-8"))["data"]["digest"]
    except (OSError, ValueError, KeyError, TypeError):  # no summary, or one that is of something else
        return ""
    same = before == result["data"].get("digest")
    return "" if same else "This is not the text that the run validated on: it has another digest.\n"


def _conclude(results: list[dict[str, Any]], output: str, checkpoint: Path, found: list[Path]) -> None:
    """Writes what belongs to all runs, and says what was written."""
    places = [str(home(file) / "evaluation.json") for file in found]
    if output or len(results) > 1:
        place = Path(output) if output else checkpoint / "evaluation.json"
        _write(place, results[0] if len(results) == 1 else {"runs": results})
        places = [str(place)]
    print(f"Written to {places[0]}")


def _write(path: Path, content: Mapping[str, Any]) -> None:
    try:
        write_json(path, content)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); say output=, a file elsewhere") from error
