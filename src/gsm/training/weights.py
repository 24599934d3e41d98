"""A run that starts from the weights of another run (`start_from=`): a fresh optimiser and step count, its own data.

It may change everything but what the checkpoint fixes: the parameters, the tokenizer, and the context that YaRN
extends. So it may have other lengths of sequences, another rotation, text or optimiser.

With `start_fresh=false` it is a branch of that run: optimiser, number of steps, order of the data and random numbers go
on (`gsm.training.folder.begin`), and only settings of the run's end may differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gsm.config.check import ConfigError, contrast, few, flat
from gsm.config.load import CheckpointError, load_weights, misfits, refusals, tokenizer_of
from gsm.config.stored import read_checkpoint
from gsm.data.module import chosen_tokenizer
from gsm.data.tokenizer import Tokenizer
from gsm.models.base import LanguageModel


def take(model: LanguageModel, path: str, config: Mapping[str, Any]) -> None:
    """Give a model the weights of a checkpoint.

    Args:
        model: of the configuration, with any weights.
        path: of a checkpoint, or of a run's folder.
        config: the configuration that the model was made from; only an error looks at it.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it cannot be read, or its parameters are not the model's; names the fields that differ.
        ConfigError: YaRN would start from another context than the checkpoint was trained with.
    """
    checkpoint = read_checkpoint(path)
    wrong = misfits(model, checkpoint)
    if wrong:
        raise CheckpointError(
            f"start_from must be a checkpoint of this model, got {path}, which differs in "
            f"{few(_other_fields(checkpoint, config) or wrong)}, and so in parameters ({few(wrong)})"
        )
    chosen, trained = config["model"].get("geometry") or {}, _context(checkpoint)
    if chosen.get("yarn_factor", 1) > 1 and not chosen.get("yarn_original") and chosen["context"] != trained:
        raise ConfigError(
            f"size.yarn_original must be given, such as {trained}, the context of start_from={path}, got null "
            f"(size.context={chosen['context']})"
        )
    load_weights(model, checkpoint)


def tokenizer(path: str, data: Mapping[str, Any]) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint; None if it has none.

    Args:
        path: as of `take`.
        data: the configuration of the data.

    Raises as `take` does, and ConfigError if `data` names another tokenizer.
    """
    saved = read_checkpoint(path, weights=False)
    if not saved.get("tokenizer"):
        return None
    kept, named = tokenizer_of(saved, path), data.get("tokenizer")
    if isinstance(named, str):
        with refusals("data"):
            chosen = chosen_tokenizer(named, data.get("end_of_text"), data["vocabulary"])
        same = kept.kind == "bpe" if chosen is None else kept.digest == chosen.digest
        if not same:
            there = saved["hyper_parameters"]["config"].get("data", {}).get("tokenizer", kept.kind)
            raise ConfigError(f"data.tokenizer must be {there}, that of start_from={path}, got {named}")
    return kept


def first_sequence(config: Mapping[str, Any], checkpoint: Path | None) -> int:
    """Return the place in the order of training sequences where a run begins, or began if it goes on from a checkpoint.

    It lies behind the sequences of the run that it starts from. With another seed or context these are others, and the
    place is 0.
    """
    saved = read_checkpoint(checkpoint or config["start_from"], weights=False)
    before, there = saved.get("first_sequence", 0), saved["hyper_parameters"]["config"]
    if checkpoint:
        return before
    if any(there.get("data", {}).get(key) != config["data"].get(key) for key in ("seed", "context")):
        return 0
    return before + saved["global_step"] * there["global_batch"]


def describe_start(path: str) -> str:
    """Return the sentence that names the start of a run. Raises as `take` does."""
    return f"Starting from the weights of {path}, step {read_checkpoint(path, weights=False)['global_step']}."


def _context(checkpoint: Mapping[str, Any]) -> int | None:
    """Return the context that a checkpoint was trained with, without YaRN."""
    config = checkpoint["hyper_parameters"]["config"]
    geometry = config["model"].get("geometry") or {}
    if geometry.get("yarn_factor", 1) > 1:
        return geometry.get("yarn_original") or geometry.get("context")
    return config.get("data", {}).get("context", geometry.get("context"))


def _other_fields(checkpoint: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Return the fields of the model that two configurations differ in, for an error."""
    saved = flat(checkpoint["hyper_parameters"]["config"]["model"], "model.")
    chosen = flat(config["model"], "model.")
    return contrast(saved, chosen, sorted(saved.keys() | chosen.keys(), key=lambda key: (".geometry." in key, key)))
