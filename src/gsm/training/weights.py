"""A run that starts from the weights of another run (`start_from=`): a fresh optimiser and step count, its own data.

It may differ in everything that changes no parameter: the length of sequences, the rotation, the text, the optimiser.
Its tokenizer is the checkpoint's, since weights mean nothing without the ids that they were trained on.

With `start_fresh=false` it is a branch of that run: optimiser, number of steps, order of the data and random numbers go
on (`gsm.training.folder`), and only settings of the run's end may differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gsm.config.check import contrast, few, flat
from gsm.config.load import CheckpointError, digest, load_weights, misfits, read_checkpoint, tokenizer_of
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
    """
    checkpoint = read_checkpoint(path)
    wrong = misfits(model, checkpoint)
    if wrong:
        raise CheckpointError(
            f"start_from={path} is not allowed because it holds the weights of another model: it differs in "
            f"{few(_other_fields(checkpoint, config) or wrong)}, and so do parameters ({few(wrong)}). Use its values."
        )
    load_weights(model, checkpoint)


def tokenizer(path: str) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint; None if it has none. Raises as `take` does."""
    saved = read_checkpoint(path, mmap=True)
    return tokenizer_of(saved, path) if saved.get("tokenizer") else None


def describe_start(path: str) -> str:
    """Return the sentence that names the start of a run. Raises as `take` does."""
    return f"Starting from the weights of {path}, step {read_checkpoint(path, mmap=True)['global_step']}."


def begins(config: Mapping[str, Any]) -> str | None:
    """Return the `digest` of the checkpoint that a run starts from, marked where the run is a branch. Raises as
    `digest`."""
    origin = digest(config.get("start_from"))
    return f"{origin} and its optimiser" if origin and is_branch(config) else origin


def is_branch(config: Mapping[str, Any]) -> bool:
    """Return whether a run takes more than weights from where it starts: optimiser, steps, its place in the data."""
    return bool(config.get("start_from")) and not config.get("start_fresh", True)


def _other_fields(checkpoint: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Return the fields of the model that two configurations differ in, for an error."""
    saved = flat(checkpoint["hyper_parameters"]["config"]["model"], "model.")
    chosen = flat(config["model"], "model.")
    return contrast(saved, chosen, sorted(saved.keys() | chosen.keys(), key=lambda key: (".geometry." in key, key)))
