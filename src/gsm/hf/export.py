"""Export a trained model to a folder for transformers: configuration, weights, tokenizer and a model card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.utils import logging

from gsm import __version__
from gsm.checkpoint import CONFIG, FACTS, TOKENIZER, is_model
from gsm.config.check import ConfigError
from gsm.config.command_line import path_text
from gsm.config.load import load_sound_weights, tokenizer_of
from gsm.config.stored import checkpoint_folder, read_checkpoint
from gsm.data.spelling import byte_of_character
from gsm.data.tokenizer import END_OF_TEXT, Tokenizer
from gsm.evaluation.checkpoints import home
from gsm.files import read_json
from gsm.hf.config import GSMConfig
from gsm.hf.model import GSMForCausalLM
from gsm.tables import grid_markdown

WEIGHTS = ("float32", "bfloat16", "float16")
# The keys of a configuration from which the model, its tokenizer and its data can be built, or that results name.
SETTINGS = ("model", "data", "recipe", "size", "trainer", "global_batch", "name", "arm", "seed", "choices", "ngrams")
NUMBERS = {  # keys of a run's summary that a model card shows, and their labels
    "parameters": "parameters",
    "tokens": "tokens trained on",
    "steps": "optimiser steps",
    "val_loss": "held-out loss, nats per token",
    "val_perplexity": "held-out perplexity",
    "bits_per_byte": "held-out bits per byte",
    "accuracy": "held-out questions answered",
    "cache_bytes": "cache after one context, bytes",
    "state_bytes": "the decoder's state, bytes",
    "train_seconds": "seconds of training",
    "device": "device",
}


def export(checkpoint: str, to: str, weights: str = "float32") -> Path:
    """Write config.json, model.safetensors, the tokenizer's files and a model card into a folder.

    AutoModelForCausalLM.from_pretrained reads it after import gsm.hf, or with trust_remote_code=True. load_model,
    generate.py, evaluate.py and start_from= read it too.

    Args:
        checkpoint: the folder of a run, or of one of its steps; or nano, a trained model in the package
        to: the folder to write: a new or empty folder, or an earlier export, which is replaced
        weights: data type of the written weights: float32, bfloat16 or float16

    Raises:
        ConfigError, FileNotFoundError: a value out of range, or a file that cannot be used; the message names it.
        OSError: the folder cannot be written.
    """
    if weights not in WEIGHTS:
        raise ConfigError(f"weights must be {', '.join(WEIGHTS)}, got {weights}")
    file, folder = checkpoint_folder(checkpoint), Path(to)
    if folder.is_file():
        raise ConfigError(f"to must be a folder, got the file {to}")
    earlier = is_model(folder) and (read_json(folder / CONFIG) or {}).get("model_type") == GSMConfig.model_type
    if folder.is_dir() and any(folder.iterdir()) and not earlier:
        raise ConfigError(f"to must be a new or an empty folder, or an earlier export, got {to}")
    saved = read_checkpoint(file)
    dtype = getattr(torch, weights)
    content = weights_alone(saved, dtype)
    run_config = content.pop("hyper_parameters")["config"]
    tokenizer = tokenizer_of(saved, file) if saved.get("tokenizer") else None
    model = exported_model(run_config, dtype, tokenizer)
    load_sound_weights(model.model, content, file)
    state = tokenizer.to_state() if tokenizer else {}
    described = {key: content[key] for key in content if key not in ("state_dict", "tokenizer")}
    rest = {key: value for key, value in run_config.items() if key != "model"}
    tokenizer_state = {key: value for key, value in state.items() if key != "json"} or None
    model.config.run = {**described, "config": rest, "tokenizer": tokenizer_state}
    folder.mkdir(parents=True, exist_ok=True)
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    if tokenizer:
        of_transformers(tokenizer).save_pretrained(folder)
        if state["json"]:  # the original file, so that exactly the same tokenizer is loaded
            (folder / TOKENIZER).write_text(state["json"], encoding="utf-8")
    (folder / "README.md").write_text(card(run_config, file, folder), encoding="utf-8")
    print(f"Written to {path_text(folder)}: {', '.join(sorted(path.name for path in folder.iterdir()))}", flush=True)
    return folder


def weights_alone(saved: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the weights of a checkpoint in this dtype, the configuration without the paths of its run, and the facts
    about the run."""
    config = saved["hyper_parameters"]["config"]
    return {
        "state_dict": {name: x.to(dtype) if x.is_floating_point() else x for name, x in saved["state_dict"].items()},
        "hyper_parameters": {"config": {key: config[key] for key in SETTINGS if key in config}},
        **{key: saved[key] for key in FACTS if key in saved},
    }


def exported_model(run_config: Mapping[str, Any], dtype: torch.dtype, tokenizer: Tokenizer | None) -> GSMForCausalLM:
    """Return a model of a checkpoint's configuration, with new weights of this dtype."""
    end = tokenizer.end_of_text if tokenizer else None
    ids = {"eos_token_id": end, "pad_token_id": end}
    config = GSMConfig.of(run_config["model"], run_config.get("size", {}).get("context"), **ids, dtype=dtype)
    model = GSMForCausalLM(config).eval()
    model.model.to(dtype)
    model.generation_config = GenerationConfig(**ids, bos_token_id=end)  # generation without a prompt begins with bos
    return model


def of_transformers(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Return a transformers tokenizer that gives the same ids. Padding is on the left.

    Text that spells the end-of-text token is tokenised as ordinary text.
    """
    state = tokenizer.to_state()
    rust = tokenizers.Tokenizer.from_str(state["json"]) if state["json"] else _bytes()
    end = state.get("end_of_text") or END_OF_TEXT
    limits = {"padding_side": "left", "split_special_tokens": True, "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=rust, eos_token=end, pad_token=end, **limits)


def _bytes() -> tokenizers.Tokenizer:
    """Return the byte tokenizer: each byte is an id. The library requires that a character represents each byte."""
    rust = tokenizers.Tokenizer(models.BPE(vocab=byte_of_character(), merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([END_OF_TEXT])
    return rust


def card(run_config: Mapping[str, Any], file: Path, folder: Path) -> str:
    """Return the model card: a description, the run's numbers, and an example of its use."""
    facts = read_json(home(file) / "summary.json") or {}
    choices = run_config.get("choices", {})
    rows = [[name, f"{facts[key]:,}" if isinstance(facts[key], int) else f"{facts[key]}"]
            for key, name in NUMBERS.items() if facts.get(key) is not None]  # fmt: skip
    run = f"{run_config.get('name')}/{run_config.get('arm')}, seed {run_config.get('seed')}"
    data = choices.get("data") or "unknown"
    numbers = grid_markdown([["run", ""], *rows]) if rows else "The run's summary is missing."
    chosen = ", ".join(
        f"{key}={value}" for key, value in choices.items() if key.split("/")[0] in ("model", "size", "data")
    )
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [gsm]
---

# {choices.get("model", "gsm")}, size {choices.get("size", "unknown")}

A language model trained with gsm-playground {__version__}, run {run}, on `{data}`. Its choices: {chosen}.

{numbers}

```python
import gsm.hf  # pip install gsm-playground[hf]
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder.name}")
tokenizer = AutoTokenizer.from_pretrained("{folder.name}")
print(tokenizer.decode(model.generate(**tokenizer("The ", return_tensors="pt"), max_new_tokens=40)[0]))
```

This is a research model trained on a small amount of text. Do not rely on its output.
"""
