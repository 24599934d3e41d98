"""A checkpoint is a folder of named tensors and JSON.

    checkpoints/step_00000120/
        config.json              what the model is: its configuration and that of its run, for transformers too
        tokenizer.json           its tokenizer, where it has one of its own
        model.safetensors        weights and buffers by name; or model-00001-of-00002.safetensors, ... and their index
        optim.safetensors        all other tensors: moments of the optimiser by the parameter's name, averages, ...
        state.json               where training stood, with size and CRC-32 of every file; written last

Without ``state.json`` a step does not exist. A folder with ``config.json`` and weights alone is a model: one of the
package, an export, or what ``save_pretrained`` of transformers has written.

No code from a file runs: safetensors' files hold tensors alone, and the rest is JSON.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gsm.errors import ConfigError
from gsm.files import BLOCK, read_json, read_text, sound, write_json, write_whole

STATE, CONFIG, TOKENIZER = "state.json", "config.json", "tokenizer.json"
WEIGHTS, OTHERS, INDEX = "model.safetensors", "optim.safetensors", "model.safetensors.index.json"
STEP = re.compile(r"step_\d{8,}")
FORMAT = 3
ENTRY = "state."  # begins the name of an entry of the optimiser: state.<parameter>.<entry>
EMBEDDING, HEAD = "model.embedding.weight", "model.head.weight"  # one tensor, which is written once
# Entries of a checkpoint that describe its model, with or without a training that could go on.
FACTS = ("global_step", "tokenizer", "fingerprint", "started_from", "first_sequence")
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip

Tensors = dict[str, Tensor]


class CheckpointError(ConfigError):
    """A folder is no checkpoint of this project, or cannot be used; the message says why."""


def step_folder(checkpoints: Path, step: int) -> Path:
    """Return the folder of a step."""
    return checkpoints / f"step_{step:08}"


def step_of(folder: Path) -> int:
    """Return the number of a step by its folder."""
    return int(folder.name[5:])


def steps(run: Path) -> list[Path]:
    """Return the complete steps in a run's folder, the newest last."""
    found = (path for path in (run / "checkpoints").glob("step_*") if STEP.fullmatch(path.name))
    return sorted((path for path in found if (path / STATE).is_file()), key=step_of)


def newest(run: Path) -> Path | None:
    """Return the last step of a run from which it goes on; None where there is none."""
    return next((path for path in reversed(steps(run)) if (read_json(path / STATE) or {}).get("settled", True)), None)


def is_model(folder: Path) -> bool:
    """Return whether a folder holds a model: a step of a run, a model of the package, or an export."""
    return (folder / CONFIG).is_file() and any((folder / name).is_file() for name in (WEIGHTS, INDEX))


def remove(folder: Path) -> None:
    """Remove a step: ``state.json`` first, so that no moment has half of it."""
    (folder / STATE).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def split(content: Mapping[str, Any]) -> tuple[Tensors, Tensors, dict[str, Any]]:
    """Divide a trainer's checkpoint into its weights, all other tensors by their paths, and a rest for JSON.

    Raises TypeError, with the path, for a value that is neither a tensor nor one of JSON.
    """
    rest, others = {key: value for key, value in content.items() if key != "state_dict"}, {}
    (optimizer,) = rest.get("optimizer_states") or [{"state": {}, "param_groups": []}]
    for group in optimizer["param_groups"]:
        for number, name in zip(group["params"], group["param_names"], strict=True):
            for entry, value in optimizer["state"].get(number, {}).items():
                others[f"{ENTRY}{name}.{entry}"] = value
    groups = [{key: group[key] for key in group if key != "params"} for group in optimizer["param_groups"]]
    rest["optimizer_states"] = [{"param_groups": groups}]

    def plain(value: Any, path: str) -> Any:
        """Return a value as JSON; its tensors move to ``others``, under their path. Raises TypeError."""
        if isinstance(value, Tensor):
            others[path] = value
            return {"tensor": path}
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return {key: plain(below, f"{path}.{key}") for key, below in value.items()}
        if isinstance(value, list | tuple):
            return [plain(below, f"{path}.{number}") for number, below in enumerate(value)]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise TypeError(f"{path} must be a tensor or a value of JSON to be saved, got {value!r:.60}")

    weights = dict(content["state_dict"])
    rest["tied"] = {HEAD, EMBEDDING} <= weights.keys() and _at(weights[HEAD]) == _at(weights[EMBEDDING])
    for kept in (weights, rest.get("current_model_state", {})) if rest["tied"] else ():
        kept.pop(HEAD, None)
    return weights, others, {key: plain(value, key) for key, value in rest.items()}


def _at(x: Tensor) -> tuple[int, torch.Size]:
    """Return where a tensor lies, or the share of it that is here."""
    return getattr(x, "to_local", lambda: x)().data_ptr(), x.shape


def join(weights: Tensors, others: Tensors, rest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trainer's checkpoint: the inverse of ``split``, but for the optimiser's state, which stays by name."""

    def whole(value: Any) -> Any:
        if isinstance(value, Mapping):
            if value.keys() == {"tensor"}:
                return others[value["tensor"]]
            return {key: whole(below) for key, below in value.items()}
        return [whole(below) for below in value] if isinstance(value, list) else value

    content = {key: whole(value) for key, value in rest.items()}
    state: dict[str, Tensors] = {}
    for key, value in others.items():
        if key.startswith(ENTRY):
            name, _, entry = key.removeprefix(ENTRY).rpartition(".")
            state.setdefault(name, {})[entry] = value
    for optimizer in content.get("optimizer_states", ()):
        optimizer["state"] = state
    for kept in (weights, content.get("current_model_state", {})) if content.get("tied") else ():
        if EMBEDDING in kept:
            kept[HEAD] = kept[EMBEDDING]
    return {**content, "state_dict": weights}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> list[int]:
    """Write a file in the format of safetensors; return its size and CRC-32. Raises OSError.

    Unlike safetensors' own writer it has no copy of all tensors in memory, makes the checksum in the same pass, and
    says why a disk refuses.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        x, start = tensors[name], end
        end += x.numel() * x.element_size()
        header[name] = {"dtype": DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    size, checksum = 0, 0
    try:
        with path.open("wb") as file:
            for block in chain((struct.pack("<Q", len(text)), text), (_bytes(tensors[name]) for name in names)):
                file.write(block)
                size, checksum = size + len(block), zlib.crc32(block, checksum)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    return [size, checksum]


def _bytes(x: Tensor) -> memoryview:
    return x.detach().reshape(-1).contiguous().cpu().view(torch.uint8).numpy().data


def write(folder: Path, content: Mapping[str, Any]) -> None:
    """Write a trainer's checkpoint into a folder, which is new or incomplete. Raises OSError, TypeError."""
    weights, others, rest = split(content)
    prepare(folder)
    files = {name: write_tensors(folder / name, x) for name, x in ((WEIGHTS, weights), (OTHERS, others))}
    complete(folder, rest, files)


def prepare(folder: Path) -> None:
    """Make the folder of a step; what a killed process has left there does not count."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STATE).unlink(missing_ok=True)


def complete(folder: Path, rest: Mapping[str, Any], files: Mapping[str, list[int]]) -> None:
    """Write the JSON of a step, ``state.json`` last: from then on the step exists.

    Args:
        folder: of the step.
        rest: of the checkpoint, as `split` returns it.
        files: size and CRC-32 of the files with tensors.
    """
    described = model_files(rest, folder)
    state = {key: value for key, value in rest.items() if key not in (*FACTS, "hyper_parameters", "tied")}
    sizes = {name: checksum(folder / name) for name in described}
    write_json(folder / STATE, {**state, "format": FORMAT, "files": {**files, **sizes}})


def model_files(rest: Mapping[str, Any], folder: Path) -> list[str]:
    """Write ``config.json`` and ``tokenizer.json`` of a checkpoint into a folder, and return their names."""
    config = rest["hyper_parameters"]["config"]
    model, size = config["model"], config.get("size") or {}
    tokenizer = dict(rest.get("tokenizer") or {})
    text = tokenizer.pop("json", None)
    facts = {key: rest[key] for key in FACTS if key in rest} | {"tokenizer": tokenizer or None}
    run = {**facts, "config": {key: value for key, value in config.items() if key != "model"}}
    content = {
        "model_type": "gsm",
        "architectures": ["GSMForCausalLM"],
        "tie_word_embeddings": rest["tied"],
        "max_position_embeddings": size.get("context"),
        "model": model,
        "run": run,
    }
    write_json(folder / CONFIG, content)
    if text is None:
        return [CONFIG]
    write_whole(folder / TOKENIZER, text.encode())
    return [CONFIG, TOKENIZER]


def checksum(path: Path) -> list[int]:
    """Return size and CRC-32 of a file."""
    size, total = 0, 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            size, total = size + len(block), zlib.crc32(block, total)
    return [size, total]


def read_facts(folder: Path) -> dict[str, Any]:
    """Return what a folder says of its model, with the keys of a trainer's checkpoint: ``hyper_parameters`` with the
    configuration, ``global_step``, ``tokenizer``, ... Raises CheckpointError."""
    try:
        described = sound(folder / CONFIG)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / CONFIG} cannot be read ({error})") from error
    run, model = described.get("run") or {}, described.get("model")
    config = run.get("config")
    if described.get("model_type") != "gsm" or not isinstance(config, dict) or not isinstance(model, dict):
        raise CheckpointError(f"{folder / CONFIG} describes no model of this project")
    facts = {key: value for key, value in run.items() if key != "config"}
    return {
        **facts,
        "hyper_parameters": {"config": {**config, "model": model}},
        "tokenizer": _tokenizer(folder, facts.get("tokenizer")),
        "tied": described.get("tie_word_embeddings", True),
    }


def _tokenizer(folder: Path, state: Any) -> Any:
    """Return the state of a tokenizer, with the text of its file where it has one."""
    if not isinstance(state, dict) or state.get("kind") == "bytes":
        return state
    try:
        return {**state, "json": read_text(folder / TOKENIZER)}
    except FileNotFoundError:  # a model that was saved without it, which is needed for text only
        return {**state, "json": None}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / TOKENIZER} cannot be read ({error})") from error


def read_state(folder: Path) -> dict[str, Any] | None:
    """Return where training stood; None for a model that no training can go on from. Raises CheckpointError."""
    try:
        state = sound(folder / STATE)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / STATE} is damaged ({error})") from error
    if state.get("format") != FORMAT or not isinstance(state.get("files"), dict):
        raise CheckpointError(f"{folder} has format {state.get('format')}, and this version reads format {FORMAT}")
    return state


def check(folder: Path, verify: bool = True) -> None:
    """Compare the files of a step with ``state.json``: their sizes, and with ``verify`` their bytes.

    Raises CheckpointError, which names a file that is missing, cut short or damaged. A model without a state has no
    checksums.
    """
    state: dict[str, Any] = read_state(folder) or {"files": {}}
    for name, (size, known) in state["files"].items():
        path = folder / Path(name).name
        there = path.stat().st_size if path.is_file() else None
        if there != size:
            raise CheckpointError(f"{path} {'is missing' if there is None else f'has {there} bytes instead of {size}'}")
        if verify and checksum(path)[1] != known:
            raise CheckpointError(f"{path} is damaged: its checksum is another one")


def tensor_files(folder: Path, first: str = WEIGHTS) -> list[Path]:
    """Return the files with the weights, or with the other tensors (``OTHERS``). Raises CheckpointError."""
    if (folder / first).is_file():
        return [folder / first]
    files = sorted(folder.glob(f"{first.partition('.')[0]}-*-of-*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder / first} is missing")
    return files


def read_tensors(folder: Path, first: str = WEIGHTS) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a folder by name, or the other tensors. Raises CheckpointError."""
    for path in tensor_files(folder, first):
        try:
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 # it is no dict
                    yield name, opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read ({error})") from error


def read_weights(folder: Path) -> Tensors:
    """Return the weights of a folder by name, the head among them. Raises CheckpointError."""
    return join(dict(read_tensors(folder)), {}, {"tied": read_facts(folder)["tied"]})["state_dict"]


def read(folder: Path, take: Callable[[str, Tensor], Tensor] = lambda name, value: value) -> dict[str, Any]:
    """Return the whole checkpoint of a step for a trainer.

    Args:
        folder: of the step.
        take: returns what is kept of a tensor, by its name: all, or the share of a rank.

    Raises CheckpointError.
    """
    state = read_state(folder)
    if state is None:
        raise CheckpointError(f"{folder} has no {STATE}: it is a model, and no training can go on from it")
    weights, others = (
        {name: take(name, value) for name, value in read_tensors(folder, first)} for first in (WEIGHTS, OTHERS)
    )
    return join(weights, others, {**read_facts(folder), **state})


def sweep(run: Path, keep: set[int | None]) -> None:
    """Remove all steps but these, and what killed processes have left of others."""
    with suppress(FileNotFoundError):
        for path in (run / "checkpoints").iterdir():
            if STEP.fullmatch(path.name) and step_of(path) not in keep:
                remove(path)
