"""A checkpoint in parts: every rank writes its own share of the tensors, and one small file says where they are.

    last.ckpt                   what an ordinary checkpoint holds but for weights and the optimiser's state, and where
                                those are
    shards/00000120-1f3a9c07/   those, as torch.distributed.checkpoint keeps them: one file of each rank

The small file is written last, as a whole or not at all, so that it never stands for parts that are not there. Nothing
in the parts depends on how many ranks have written them. PyTorch's own index of parts is a pickle: none is written, and
none is read.
"""

from __future__ import annotations

import io
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

from gsm.files import Damaged, verify_archive

FOLDER = "shards"  # beside the small file; also the key in it
TAIL = 1 << 12  # bytes: where a piece of a part has its own checksums, at its end
WEIGHTS, OPTIMIZER = "weights/", "optimizer/"
# What the small file says of its parts, as `gsm.config.load.SHAPE` describes entries: the folder, the names of the
# optimiser's parameters in its order, every tensor with its pieces, and what each file is known by.
PIECE = {"offsets": [int], "sizes": [int], "file": str, "start": int, "length": int}
TENSORS = {...: {"dtype": torch.dtype, "size": [int], "pieces": [PIECE]}}
SHAPE = {"folder": str, "names": [str], "tensors": TENSORS, "tails": {...: int}}
Tensors = dict[str, Tensor]
Described = dict[str, tuple[tuple[int, ...], torch.dtype]]


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


def kinds(checkpoint: Mapping[str, Any]) -> Described:
    """Shape and dtype of every tensor in the parts, by name."""
    return {name: (tuple(one["size"]), one["dtype"]) for name, one in checkpoint[FOLDER]["tensors"].items()}


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
    wanted = {key: kind for key, kind in kinds(checkpoint).items() if not weights_alone or key.startswith(WEIGHTS)}
    tensors = {key: torch.empty(size, dtype=dtype) for key, (size, dtype) in wanted.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as is meant here
        fill(tensors, checkpoint, path, no_dist=True)
    return put_together(checkpoint, tensors, checkpoint[FOLDER]["names"])


def fill(tensors: Tensors, checkpoint: Mapping[str, Any], path: Path, **options: Any) -> None:
    """Reads tensors from the parts of the checkpoint at ``path``, in place. Raises Broken."""
    reader = _Reader(checkpoint, path)
    try:
        dcp.load(tensors, storage_reader=reader, **options)
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
    folder, tensors = _folder(checkpoint, path), checkpoint[FOLDER]["tensors"]
    for name, one in tensors.items():
        pieces = [[*of["offsets"], *of["sizes"], of["start"], of["length"]] for of in one["pieces"]]
        if any(number < 0 for number in [*one["size"], *sum(pieces, [])]):
            raise Broken(f"{path} describes {name!r:.60} by a number below 0")
    for name, places in sorted(_places(tensors).items()):
        part, end = folder / name, max(start + length for start, length in places)
        if Path(name).name != name:
            raise Broken(f"{path} has a part called {name!r:.60}, which is no file in {folder}")
        size = part.stat().st_size if part.is_file() else None
        if size is None or size < end:
            harm = "is missing" if size is None else f"is cut off, after {size} of {end} bytes"
            raise Broken(f"{part}, a part of {path}, {harm}")
        if verify:
            _verify(part, places)
        if checkpoint[FOLDER]["tails"].get(name) != _tails(part, places):
            raise Broken(f"{part}, a part of {path}, is damaged, or another one in its place")


def described(metadata: Metadata, folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """What the small file says of complete parts.

    Args:
        metadata: of ``dcp.save`` with a `Writer`.
        folder: where the parts are.
        names: of the optimiser's parameters, in its order.
    """
    tensors: dict[str, Any] = {}
    for name, kind in metadata.state_dict_metadata.items():
        assert isinstance(kind, TensorStorageMetadata)
        pieces = []
        for chunk in kind.chunks:
            place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            lies = {"file": place.relative_path, "start": place.offset, "length": place.length}
            pieces.append({"offsets": [*chunk.offsets], "sizes": [*chunk.sizes], **lies})
        tensors[name] = {"dtype": kind.properties.dtype, "size": [*kind.size], "pieces": pieces}
    tails = {name: _tails(folder / name, places) for name, places in _places(tensors).items()}
    return {"folder": folder.name, "names": list(names), "tensors": tensors, "tails": tails}


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


class Writer(dcp.FileSystemWriter):
    """Writes parts; where they are, the small file says (`described`)."""

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Completes the metadata, which ``dcp.save`` returns."""
        metadata.storage_data = {one.index: one.storage_data for of_rank in results for one in of_rank}


class _Reader(dcp.FileSystemReader):
    """Reads parts of the checkpoint at ``path`` as its small file describes them."""

    def __init__(self, checkpoint: Mapping[str, Any], path: Path) -> None:
        super().__init__(_folder(checkpoint, path))
        self._tensors = checkpoint[FOLDER]["tensors"]

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The same description in PyTorch's own words."""
        found: dict[str, Any] = {}
        places: dict[MetadataIndex, _StorageInfo] = {}
        for name, one in self._tensors.items():
            chunks = []
            for piece in one["pieces"]:
                chunks.append(ChunkStorageMetadata(torch.Size(piece["offsets"]), torch.Size(piece["sizes"])))
                place = _StorageInfo(piece["file"], piece["start"], piece["length"])
                places[MetadataIndex(name, piece["offsets"])] = place
            found[name] = TensorStorageMetadata(TensorProperties(one["dtype"]), torch.Size(one["size"]), chunks)
        return Metadata(found, storage_data=places, storage_meta=StorageMeta(load_id=self.load_id))


def _folder(checkpoint: Mapping[str, Any], path: Path) -> Path:
    """Where the parts are. Raises Broken if they are not, or if nothing says where each tensor lies."""
    name = str(checkpoint[FOLDER]["folder"])
    folder = path.parent / FOLDER / name
    if name in ("", "..") or Path(name).name != name or not folder.is_dir():
        raise Broken(
            f"{path} stands for parts in {folder}, which are not there: move both together, or make one file of them "
            "first with python -m gsm.experiments.consolidate"
        )
    if "tensors" not in checkpoint[FOLDER]:
        raise Broken(
            f"{path} stands for parts whose index is a pickle, which this version does not read: make one file of them "
            "with python -m gsm.experiments.consolidate of the version that has written them"
        )
    return folder


def _places(tensors: Mapping[str, Any]) -> dict[str, list[tuple[int, int]]]:
    """Where each file of the parts has its pieces: their first bytes and lengths, in order."""
    found: dict[str, list[tuple[int, int]]] = {}
    for piece in (piece for one in tensors.values() for piece in one["pieces"]):
        found.setdefault(piece["file"], []).append((piece["start"], piece["length"]))
    return {name: sorted(places) for name, places in found.items()}


def _verify(part: Path, places: Sequence[tuple[int, int]]) -> None:
    """Every piece of a part is a file of `torch.save` in itself, with checksums. Raises Broken."""
    with part.open("rb") as file:
        for start, length in places:
            file.seek(start)
            try:
                verify_archive(io.BytesIO(file.read(length)))
            except Damaged as error:
                raise Broken(f"{part} is damaged from byte {start} on: {error}") from error


def _tails(part: Path, places: Sequence[tuple[int, int]]) -> int:
    """What a part is known by, however large it is: the checksum of the checksums that its pieces end with."""
    value = 0
    with part.open("rb") as file:
        for start, length in places:
            file.seek(start + max(0, length - TAIL))
            value = zlib.crc32(file.read(min(length, TAIL)), value)
    return value
