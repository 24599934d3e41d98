"""Folders with a model as transformers writes it, ``config.json`` and ``model.safetensors`` or the shards that
``model.safetensors.index.json`` lists, read like a checkpoint.

``export.py`` writes them. What they hold is trusted as little as a checkpoint: no part is built that no yaml names, and
safetensors' files hold tensors alone. Transformers is not needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from gsm.files import Damaged, read_text, sound

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")  # as one file, or the list of its shards
EMBEDDING, HEAD = "model.embedding.weight", "model.head.weight"  # names are those of a checkpoint


def weights_in(folder: Path) -> Path | None:
    """Return the file of the weights, or the list of their shards; None for any other folder."""
    files = [folder / name for name in WEIGHTS if (folder / CONFIG).is_file() and (folder / name).is_file()]
    return files[0] if files else None


def files(file: Path) -> list[Path]:
    """Return the files with the tensors: ``file`` itself, or the shards beside it that it lists. Raises Damaged."""
    if file.name == WEIGHTS[0]:
        return [file]
    index = sound(file)
    shards = index.get("weight_map")
    names = set(map(str, shards.values())) if isinstance(shards, dict) else set()
    strange = [name for name in names if Path(name).name != name or not (file.parent / name).is_file()]
    if strange or not names:
        raise Damaged(f"{file.name} lists shards that are not beside it: {', '.join(sorted(strange)[:3]) or 'none'}")
    return [file.parent / name for name in sorted(names)]


def read(file: Path) -> dict[str, Any]:
    """Return the content of a folder with the keys of a checkpoint; ``file`` holds its weights.

    Raises:
        Damaged: something in it cannot be read; the message says what.
    """
    try:
        described = sound(file.parent / CONFIG)
        weights: dict[str, Any] = {}
        for part in files(file):
            with safe_open(part, framework="pt") as opened:
                weights |= {name: opened.get_tensor(name) for name in opened.keys()}
    except (SafetensorError, ValueError, RecursionError, OSError) as error:  # of JSON and of its encoding
        raise Damaged(str(error)) from error
    run = described.get("run")
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


def _tokenizer(folder: Path, state: Any) -> Any:
    """Return the tokenizer's entry of a checkpoint."""
    if not isinstance(state, dict) or state.get("kind") == "bytes":
        return state
    try:
        return {**state, "json": read_text(folder / TOKENIZER)}
    except FileNotFoundError:  # a model that was saved alone, which needs it for text only
        return {**state, TOKENIZER: None}
    except (OSError, ValueError) as error:
        raise Damaged(f"its {TOKENIZER} cannot be read ({error})") from error
