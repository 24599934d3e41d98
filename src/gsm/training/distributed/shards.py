"""A checkpoint in parts: every rank writes its own share of the tensors, and a small file names the parts.

    last.ckpt                   an ordinary checkpoint without weights and optimiser state; names the folder with them
    shards/00000120-1f3a9c07/   weights and optimiser state in torch.distributed.checkpoint's format: one safetensors
                                file of each rank

The small file is written last, as a whole or not at all, so that it never names missing parts. The parts do not depend
on the number of ranks that have written them. There is no index: the header of each file describes it.
"""

from __future__ import annotations

import math
import pickle
import shutil
import warnings
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

FOLDER = "shards"  # beside the small file; also the key in it
WEIGHTS, OPTIMIZER = "weights/", "optimizer/"
Tensors = dict[str, Tensor]
Described = dict[str, tuple[tuple[int, ...], torch.dtype]]


class DamagedParts(RuntimeError):
    """Parts of a checkpoint are missing, or cannot be read."""


def take_apart(checkpoint: Mapping[str, Any], names: Sequence[str]) -> tuple[Tensors, dict[str, Any]]:
    """Return the tensors of a checkpoint by name, and the rest of it.

    Args:
        checkpoint: as Lightning makes it; it has one optimiser, or none.
        names: of the optimiser's parameters, in its order.
    """
    rest = dict(checkpoint)
    tensors = {f"{WEIGHTS}{name}": value for name, value in rest.pop("state_dict").items()}
    states = rest.get("optimizer_states") or []
    for state in states:
        tensors |= {
            f"{OPTIMIZER}{names[number]}/{key}": value
            for number, entry in state["state"].items()
            for key, value in entry.items()
        }
    rest["optimizer_states"] = [{**state, "state": {}} for state in states]
    return tensors, rest


def put_together(rest: Mapping[str, Any], tensors: Tensors, names: Sequence[str]) -> dict[str, Any]:
    """Return the ordinary checkpoint: the inverse of ``take_apart``."""
    numbers = {name: number for number, name in enumerate(names)}
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith(OPTIMIZER):
            name, _, entry = key.removeprefix(OPTIMIZER).rpartition("/")
            state.setdefault(numbers[name], {})[entry] = value
    weights = {key.removeprefix(WEIGHTS): value for key, value in tensors.items() if key.startswith(WEIGHTS)}
    states = [{**optimizer, "state": state} for optimizer in rest["optimizer_states"]]
    rest = {key: value for key, value in rest.items() if key != FOLDER}
    return {**rest, "state_dict": weights, "optimizer_states": states}


def kinds(checkpoint: Mapping[str, Any], path: Path) -> Described:
    """Return shape and dtype of every tensor in the parts, by name. Raises DamagedParts."""
    folder = _folder(checkpoint, path)
    try:
        tensors = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
        kinds = {name: (tuple(metadata.size), metadata.properties.dtype) for name, metadata in tensors.items()}  # pyright: ignore
        pieces = {name: [tuple(chunk.sizes) for chunk in metadata.chunks] for name, metadata in tensors.items()}  # pyright: ignore
    except Exception as error:  # whatever safetensors and json say to a header
        raise DamagedParts(f"the parts in {folder} cannot be read: {error!r:.200}") from error
    for name, (size, _) in kinds.items():
        if sum(map(math.prod, pieces[name])) != math.prod(size) or min(size, default=0) < 0:
            raise DamagedParts(f"the parts in {folder} do not hold the whole of {name!r:.60}")
    return kinds


def whole(checkpoint: Mapping[str, Any], path: Path, weights_alone: bool = False) -> dict[str, Any]:
    """Return the ordinary checkpoint that a small file stands for, on the CPU; any other checkpoint as it is.

    Args:
        checkpoint: content of the small file.
        path: of that file.
        weights_alone: leave out the optimiser's state, which is twice as large as the weights.

    Raises DamagedParts: its parts are not beside it, or not all of them, or one cannot be read.
    """
    if FOLDER not in checkpoint:
        return dict(checkpoint)
    check(checkpoint, path)
    wanted = {
        key: kind for key, kind in kinds(checkpoint, path).items() if not weights_alone or key.startswith(WEIGHTS)
    }
    tensors = {key: torch.zeros(size, dtype=dtype) for key, (size, dtype) in wanted.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as is meant here
        fill(tensors, checkpoint, path, no_dist=True)
    return put_together(checkpoint, tensors, checkpoint[FOLDER]["names"])


def fill(tensors: Tensors, checkpoint: Mapping[str, Any], path: Path, **options: Any) -> None:
    """Read tensors from the parts of the checkpoint at ``path``, in place. Raises DamagedParts."""
    folder = _folder(checkpoint, path)
    try:
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), **options)
    except CheckpointException as error:  # a BaseException, not an Exception
        causes = [cause for cause, _ in error.failures.values()]
        raise DamagedParts(f"the parts in {folder} cannot be read: {causes[0]}") from error


def check(checkpoint: Mapping[str, Any], path: Path, verify: bool = False) -> None:
    """Compare the files of the parts with the small file: names and sizes; with ``verify`` also contents.

    Raises DamagedParts, which names a part that is missing, cut off or damaged.
    """
    if FOLDER not in checkpoint:
        return
    folder, files = _folder(checkpoint, path), checkpoint[FOLDER]["files"]
    for part in folder.glob("*.safetensors"):
        if part.name not in files:
            raise DamagedParts(f"{part} is no part of {path}. Remove it.")
    for name, (size, checksum) in sorted(files.items()):
        part = folder / name
        if part.name != name:
            raise DamagedParts(f"{path} has a part called {name!r:.60}, which is no file in {folder}")
        length = part.stat().st_size if part.is_file() else None
        if length != size:
            harm = "is missing" if length is None else f"has {length} bytes instead of {size}"
            raise DamagedParts(f"{part}, a part of {path}, {harm}")
        if verify and _checksum(part) != checksum:
            raise DamagedParts(f"{part}, a part of {path}, is damaged, or another one in its place")


def described(folder: Path, rank: int) -> dict[str, list[int]]:
    """Return size and CRC-32 of the files that a rank has written, by name."""
    parts = folder.glob(f"shard-{rank + 1:05}-*.safetensors")
    return {part.name: [part.stat().st_size, _checksum(part)] for part in parts}


def separate(tensors: Tensors) -> Tensors:
    """Return the tensors contiguous and without shared memory (a head that is the embedding), as safetensors asks."""
    seen: set[int] = set()
    result: Tensors = {}
    for key, value in tensors.items():
        place = (value.to_local() if isinstance(value, DTensor) else value).data_ptr()
        result[key] = value.clone() if place in seen else value.contiguous()
        seen.add(place)
    return result


def sweep(checkpoints: Path) -> None:
    """Remove the parts that no checkpoint in this folder stands for; none where a checkpoint cannot be read."""
    if not (checkpoints / FOLDER).is_dir():
        return
    named = set()
    for path in checkpoints.glob("*.ckpt"):
        try:
            checkpoint = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
        except (RuntimeError, EOFError, pickle.UnpicklingError, KeyError, OSError):
            return
        named.add(checkpoint.get(FOLDER, {}).get("folder"))
    for folder in (checkpoints / FOLDER).iterdir():
        if folder.name not in named:
            shutil.rmtree(folder, ignore_errors=True)


def _folder(checkpoint: Mapping[str, Any], path: Path) -> Path:
    """Return the folder of the parts. Raises DamagedParts if it is missing, or written by an earlier version."""
    name = str(checkpoint[FOLDER]["folder"])
    folder = path.parent / FOLDER / name
    if name in ("", "..") or Path(name).name != name or not folder.is_dir():
        raise DamagedParts(
            f"{path} stands for parts in {folder}, which are not there: move both together, or make one file of them "
            "first with python -m gsm.experiments.consolidate"
        )
    if "files" not in checkpoint[FOLDER]:
        raise DamagedParts(
            f"{path} stands for parts of an earlier version, which this version does not read. Use commit 7ec9846 to "
            "make one file of them with python -m gsm.experiments.consolidate."
        )
    return folder


def _checksum(part: Path) -> int:
    value = 0
    with part.open("rb") as file:
        while block := file.read(1 << 24):
            value = zlib.crc32(block, value)
    return value
