"""Folders with a model as transformers writes it, ``config.json`` and ``model.safetensors``, read like a checkpoint.

``export.py`` writes them. What they hold is trusted as little as a checkpoint: no part is built that no yaml names, and
safetensors' files hold tensors alone. Needs safetensors (extra ``hf``), and not transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gsm import paths
from gsm.config.check import ConfigError
from gsm.files import Damaged

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
EMBEDDING, HEAD = "model.embedding.weight", "model.head.weight"  # names are those of a checkpoint
REMEDY = f"reading it needs safetensors: {paths.install('hf')}"


def weights_in(folder: Path) -> Path | None:
    """The file of the weights, if this is such a folder."""
    return folder / WEIGHTS if (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file() else None


def read(file: Path) -> dict[str, Any]:
    """The content of a folder, whose weights are in this file, in the words of a checkpoint.

    Raises:
        ConfigError: safetensors is not installed.
        Damaged: something in it cannot be read; the message says what.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ConfigError(f"{file} is of safetensors, and {REMEDY}") from error
    try:
        described = json.loads((file.parent / CONFIG).read_text(encoding="utf-8"))
        with safe_open(file, framework="pt") as opened:
            weights = {name: opened.get_tensor(name) for name in opened.keys()}
    except (SafetensorError, ValueError, RecursionError) as error:  # of JSON and of its encoding
        raise Damaged(str(error)) from error
    run = described.get("run") if isinstance(described, dict) else None
    if not isinstance(run, dict) or described.get("model_type") != "gsm":
        raise Damaged(f"its {CONFIG} is not one that export.py has written")
    if EMBEDDING in weights:
        weights.setdefault(HEAD, weights[EMBEDDING])  # one tensor, which is written once
    config = run.get("config")
    return {
        **run,
        "hyper_parameters": {
            "config": {**config, "model": described.get("model")} if isinstance(config, dict) else config
        },
        "state_dict": weights,
        "tokenizer": _tokenizer(file.parent, run.get("tokenizer")),
    }


def _tokenizer(folder: Path, said: Any) -> Any:
    """What a checkpoint says of the tokenizer."""
    if not isinstance(said, dict) or said.get("kind") == "bytes":
        return said
    try:
        return {**said, "json": (folder / TOKENIZER).read_text(encoding="utf-8")}
    except (OSError, ValueError) as error:
        raise Damaged(f"its {TOKENIZER} cannot be read ({error})") from error
