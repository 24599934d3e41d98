"""Checkpoints in parts: every rank writes its own share of the tensors, and one small file says where they are.

    last.ckpt                      what an ordinary checkpoint holds, but for weights and the optimiser's state
    shards/00000120-1f3a9c07/      those, as torch.distributed.checkpoint keeps them: one file of each rank, one index

The small file is written last, as a whole or not at all, so that it never stands for parts that are not there. Nothing
in the parts depends on how many ranks have written them.
"""

from __future__ import annotations

import io
import json
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
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from gsm.files import Damaged, verify_archive, write_json

FOLDER = "shards"  # beside the small file; also the key in it
SEAL = "index.json"  # beside the parts: the checksum of their index, and of what each of them says of itself
TAIL = 1 << 12  # bytes: where a piece of a part has its own checksums, at its end
WEIGHTS, OPTIMIZER = "weights/", "optimizer/"
Tensors = dict[str, Tensor]
_Unpickler: Any = pickle._Unpickler  # pyright: ignore[reportAttributeAccessIssue] # the one in Python


class Broken(RuntimeError):
    """Parts of a checkpoint are missing, or cannot be read."""


def take_apart(checkpoint: Mapping[str, Any], names: Sequence[str]) -> tuple[Tensors, dict[str, Any]]:
    """The tensors of a checkpoint by name, and the rest of it.

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
    """The opposite; what it gives stands for no parts any more."""
    numbers = {name: number for number, name in enumerate(names)}
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith(OPTIMIZER):
            name, _, entry = key.removeprefix(OPTIMIZER).rpartition("/")
            state.setdefault(numbers[name], {})[entry] = value
    weights = {key.removeprefix(WEIGHTS): value for key, value in tensors.items() if key.startswith(WEIGHTS)}
    states = [{**one, "state": state} for one in rest["optimizer_states"]]
    rest = {key: value for key, value in rest.items() if key != FOLDER}
    return {**rest, "state_dict": weights, "optimizer_states": states}


def whole(checkpoint: Mapping[str, Any], path: Path, weights_alone: bool = False) -> dict[str, Any]:
    """The ordinary checkpoint that a small file stands for, on the CPU; another one as it is.

    Args:
        checkpoint: what the small file holds.
        path: of that file.
        weights_alone: leave out the optimiser's state, which is twice as large as the weights.

    Raises Broken: its parts are not beside it, or not all of them, or one cannot be read.
    """
    if FOLDER not in checkpoint:
        return dict(checkpoint)
    check(checkpoint, path)
    reader = Reader(folder_of(checkpoint, path))
    wanted = {key: kind for key, kind in reader.kinds().items() if not weights_alone or key.startswith(WEIGHTS)}
    tensors = {key: torch.empty(kind.size, dtype=kind.properties.dtype) for key, kind in wanted.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as is meant here
        fill(tensors, reader, no_dist=True)
    return put_together(checkpoint, tensors, checkpoint[FOLDER]["names"])


def fill(tensors: Tensors, reader: Reader, **options: Any) -> None:
    """Reads tensors from parts, in place. Raises Broken."""
    try:
        dcp.load(tensors, storage_reader=reader, planner=_TensorsAlone(), **options)
    except CheckpointException as error:  # which is no Exception
        causes = [cause for cause, _ in error.failures.values()]
        raise Broken(f"the parts in {reader.path} cannot be read: {causes[0]}") from error


def check(checkpoint: Mapping[str, Any], path: Path, verify: bool = False) -> None:
    """Looks at names and sizes of the parts that a small file stands for; at nothing, for another checkpoint.

    Args:
        checkpoint: what the small file holds.
        path: of that file.
        verify: also compare the contents of all parts with their checksums.

    Raises Broken, which names a part that is missing, cut off or damaged.
    """
    if FOLDER not in checkpoint:
        return
    reader = Reader(folder_of(checkpoint, path))
    places = reader.places()
    sealed = reader.sealed().get("parts") or {}
    for part, pieces in sorted(places.items()):
        end = max(offset + length for offset, length in pieces)
        size = part.stat().st_size if part.is_file() else None
        if size is None or size < end:
            harm = "is missing" if size is None else f"is cut off, after {size} of {end} bytes"
            raise Broken(f"{part}, a part of {path}, {harm}")
        if verify:
            _verify(part, pieces)
        if sealed.get(part.name) not in (None, _tails(part, pieces)):
            raise Broken(f"{part}, a part of {path}, is damaged, or another one in its place")


def _verify(part: Path, pieces: Sequence[tuple[int, int]]) -> None:
    """Every piece of a part is a file of `torch.save` in itself, with checksums. Raises Broken."""
    with part.open("rb") as file:
        for offset, length in sorted(pieces):
            file.seek(offset)
            try:
                verify_archive(io.BytesIO(file.read(length)))
            except Damaged as error:
                raise Broken(f"{part} is damaged from byte {offset} on: {error}") from error


def _tails(part: Path, pieces: Sequence[tuple[int, int]]) -> int:
    """What a part is known by, however large it is: the checksum of the checksums that its pieces end with."""
    value = 0
    with part.open("rb") as file:
        for offset, length in sorted(pieces):
            file.seek(offset + max(0, length - TAIL))
            value = zlib.crc32(file.read(min(length, TAIL)), value)
    return value


def seal(folder: Path) -> None:
    """Notes beside complete parts what they and their index are known by."""
    parts = {part.name: _tails(part, pieces) for part, pieces in Reader(folder).places().items()}
    write_json(folder / SEAL, {"crc32": zlib.crc32((folder / ".metadata").read_bytes()), "parts": parts})


def folder_of(checkpoint: Mapping[str, Any], path: Path) -> Path:
    """Where the parts are. Raises Broken if they are not."""
    name = str(checkpoint[FOLDER]["folder"])
    folder = path.parent / FOLDER / name
    if name in ("", "..") or Path(name).name != name or not (folder / ".metadata").is_file():
        raise Broken(
            f"{path} stands for parts in {folder}, which are not there: move both together, or make one file of them "
            "first with python -m gsm.experiments.consolidate"
        )
    return folder


def sweep(checkpoints: Path, keep: str | None = None) -> None:
    """Removes the parts that no checkpoint in this folder stands for any more, but for those called ``keep``.

    None, where one cannot be read: nobody knows what it stood for.
    """
    if not (checkpoints / FOLDER).is_dir():
        return
    named = {keep}
    for path in checkpoints.glob("*.ckpt"):
        try:
            checkpoint = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
        except (RuntimeError, EOFError, pickle.UnpicklingError, KeyError, OSError):
            return
        named.add(checkpoint.get(FOLDER, {}).get("folder"))
    for folder in (checkpoints / FOLDER).iterdir():
        if folder.name not in named:
            shutil.rmtree(folder, ignore_errors=True)


class Reader(dcp.FileSystemReader):
    """Reads parts without running code from them: their index is a pickle, in which only descriptions are let in."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The index. Raises Broken for one that is damaged, or holds anything else."""
        path = Path(self.path) / ".metadata"
        try:
            content = path.read_bytes()
            sealed = self.sealed()
            if sealed and sealed.get("crc32") != zlib.crc32(content):
                raise ValueError("its checksum is another")
            metadata = _described(_Index(io.BytesIO(content)).load())
        except (
            pickle.UnpicklingError,
            EOFError,
            ValueError,
            AttributeError,
            TypeError,
            LookupError,
            ImportError,
        ) as error:
            raise Broken(f"{path}, the index of a checkpoint's parts, cannot be read: {error}") from error
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def sealed(self) -> dict[str, Any]:
        """What was noted with complete parts; nothing, of older ones. Raises ValueError."""
        seal = Path(self.path) / SEAL
        content = json.loads(seal.read_text(encoding="utf-8")) if seal.is_file() else {}
        if not isinstance(content, dict) or not isinstance(content.get("parts", {}), dict):
            raise ValueError(f"{seal} is not what was written")
        return content

    def places(self) -> dict[Path, list[tuple[int, int]]]:
        """Where each part has its pieces: their first bytes and lengths. Raises Broken."""
        found: dict[Path, list[tuple[int, int]]] = {}
        for place in self.read_metadata().storage_data.values():
            found.setdefault(self.part(place.relative_path), []).append((place.offset, place.length))
        return found

    def part(self, name: str) -> Path:
        """The file of a part, by the name that the index has for it. Raises Broken for one that lies elsewhere."""
        if Path(name).name != name:
            raise Broken(f"the index in {self.path} names {name!r}, which is no file beside it")
        return Path(self.path) / name

    def kinds(self) -> dict[str, TensorStorageMetadata]:
        """Shape and dtype of every tensor, by name."""
        return dict(self.read_metadata().state_dict_metadata)  # pyright: ignore[reportReturnType] # `_described`


class _TensorsAlone(dcp.DefaultLoadPlanner):
    """Reads tensors. What else parts may hold PyTorch reads as a pickle, with whatever that runs."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        """Raises Broken."""
        raise Broken(f"a part holds {read_item.dest_index.fqn!r} as something else than a tensor")


def _described(metadata: Any) -> Metadata:
    """An index of tensors in files, and of nothing else. Types are exact: what derives from one may answer otherwise.

    Raises ValueError.
    """
    if type(metadata) is not Metadata or not metadata.state_dict_metadata:
        raise ValueError("it is no index")
    entries: dict[Any, Any] = metadata.state_dict_metadata
    for name, kind in entries.items():
        chunks: list[Any] = kind.chunks if type(name) is str and type(kind) is TensorStorageMetadata else [None]
        if any(type(chunk) is not ChunkStorageMetadata for chunk in chunks):
            raise ValueError(f"{name!r:.60} in it is no tensor")
        if not all(map(_is_size, (kind.size, *(s for chunk in chunks for s in (chunk.sizes, chunk.offsets))))):
            raise ValueError(f"{name!r:.60} in it has no shape")
    for place, info in (metadata.storage_data or {}).items():
        numbers = (info.offset, info.length) if type(info) is _StorageInfo else (None,)
        named = type(place) is MetadataIndex and type(place.fqn) is str and place.fqn in metadata.state_dict_metadata
        if not named or any(type(n) is not int or n < 0 for n in numbers) or type(info.relative_path) is not str:
            raise ValueError(f"it says no place of {place!r:.60}")
        if getattr(info, "transform_descriptors", None):
            raise ValueError(f"{info.relative_path} in it is to be transformed")
    metadata.planner_data = None
    return metadata


def _is_size(size: Any) -> bool:
    return type(size) is torch.Size and all(type(n) is int and n >= 0 for n in size)


class _Index(_Unpickler):
    """Knows the classes that describe tensors in files, and no others, and sets their fields alone.

    In Python: of the one in C it cannot be said that a class is not to be changed, which would be one for good.
    """

    DESCRIPTIONS = ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING")
    KNOWN = {
        *(("torch.distributed.checkpoint.metadata", name) for name in DESCRIPTIONS),
        *(("torch.distributed.checkpoint.metadata", f"{kind}StorageMetadata") for kind in ("Chunk", "Tensor")),
        *(("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch", "Size")),
        *(("torch.serialization", "_get_layout"), ("pathlib", "PosixPath")),
    }
    dispatch = dict(_Unpickler.dispatch)

    def load_build(self) -> None:
        """Fields of an object of one of these classes. Raises pickle.UnpicklingError for anything else."""
        *_, inst, state = self.stack
        fields = getattr(type(inst), "__dataclass_fields__", None)
        if type(inst) is TensorProperties and isinstance(state, tuple):  # it has a way of its own, without attributes
            return super().load_build()
        if fields is None or type(state) is not dict or not all(type(key) is str and key in fields for key in state):
            raise pickle.UnpicklingError(f"an index of shards changes a {type(inst).__name__}")
        return super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        """A class by name. Raises pickle.UnpicklingError."""
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or (module, name) in self.KNOWN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"an index of shards holds {module}.{name}, which is not of a checkpoint")
