"""A checkpoint in parts: what is missing, damaged, exchanged or a stranger's is named, and nothing of it is run."""

from __future__ import annotations

import io
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from gsm.config.load import CheckpointError, load_model, read_checkpoint
from gsm.training import folder as run_folder
from gsm.training.distributed import shards
from gsm.training.resume import FORMAT


def in_parts(folder: Path, value: float = 1.0, **changes: Any) -> tuple[Path, Path]:
    """A checkpoint in parts, of one tensor, with changes of its entry; and its only part."""
    path, parts = folder / "last.ckpt", folder / shards.FOLDER / "0012-ab"
    with warnings.catch_warnings(action="ignore"):
        writer = dcp.HuggingFaceStorageWriter(str(parts), save_distributed=True)
        dcp.save({"weights/model.x": torch.full((999,), value)}, storage_writer=writer, no_dist=True)
    entry = {"folder": parts.name, "names": [], "files": shards.described(parts, 0), **changes}
    small = {shards.FOLDER: entry, "hyper_parameters": {"config": {"model": {}}}, "global_step": 12}
    torch.save({**small, "format": FORMAT, "optimizer_states": []}, path)
    (part,) = parts.iterdir()
    return path, part


def test_parts_that_are_missing_are_named(tmp_path: Path):
    path = tmp_path / "last.ckpt"
    with pytest.raises(
        shards.DamagedParts, match=r"last.ckpt stands for parts in .*0012-ab, which are not there: move"
    ):
        shards.whole({shards.FOLDER: {"folder": "0012-ab", "names": []}}, path)
    assert shards.whole({"state_dict": {}}, path) == {"state_dict": {}}


def test_parts_that_are_missing_or_cut_off_are_named_before_anything_is_read(tmp_path: Path):
    """PyTorch's own error is no Exception and went past everything that says a sentence, and names no file."""
    path, part = in_parts(tmp_path)
    small = read_checkpoint(path, mmap=True)
    assert torch.equal(shards.whole(small, path)["state_dict"]["model.x"], torch.ones(999))
    part.write_bytes(part.read_bytes()[:100])
    for mmap in (True, False):
        with pytest.raises(CheckpointError, match=f"^{part}, a part of {path}, has 100 bytes instead of [0-9]*$"):
            read_checkpoint(path, mmap=mmap)
    part.unlink()
    with pytest.raises(CheckpointError, match=f"^{part}, a part of {path}, is missing$"):
        read_checkpoint(path, mmap=True)


def test_a_part_that_is_spoilt_inside_is_an_error_like_any_other(tmp_path: Path):
    path, part = in_parts(tmp_path)
    small = read_checkpoint(path, mmap=True)
    part.write_bytes(b"\0" * part.stat().st_size)
    with pytest.raises(shards.DamagedParts, match=f"^the parts in {part.parent} cannot be read: "):
        shards.whole(small, path)
    with pytest.raises(CheckpointError, match=f"^{part}, a part of {path}, is damaged, or another one in its place$"):
        read_checkpoint(path)


def test_a_flipped_bit_in_a_part_or_in_the_index_of_parts_is_found(tmp_path: Path):
    path, part = in_parts(tmp_path)
    assert torch.equal(read_checkpoint(path)["state_dict"]["model.x"], torch.ones(999))
    for file, said in (
        (part, f"^{part}, a part of {path}, is damaged"),
        (path, f"^{path} is truncated or damaged, or no checkpoint: "),
    ):
        written = bytearray(file.read_bytes())
        for place in (written.find(b"files"), len(written) // 3) if file == path else (len(written) // 2,):
            file.write_bytes(bytes([*written[:place], written[place] ^ 4, *written[place + 1 :]]))
            with pytest.raises(CheckpointError, match=said):
                read_checkpoint(path)
        file.write_bytes(written)
    read_checkpoint(path)


@pytest.mark.parametrize("name", ["../elsewhere", "/etc", "a/b", ".."])
def test_a_small_file_stands_for_parts_beside_it_alone(tmp_path: Path, name: str):
    path, _ = in_parts(tmp_path)
    small = torch.load(path, weights_only=True)
    torch.save({**small, shards.FOLDER: {**small[shards.FOLDER], "folder": name}}, path)
    with pytest.raises(CheckpointError, match="stands for parts in .* which are not there"):
        read_checkpoint(path)


def test_a_run_whose_parts_are_missing_says_what_can_be_done(tmp_path: Path):
    """To go on from it ended in a traceback, after the model had been built."""
    path, part = in_parts(tmp_path)
    part.unlink()
    with pytest.raises(CheckpointError, match=f"{part.name}, a part of {path}, is missing; resume=never starts over"):
        run_folder._read_last(path)


def test_parts_go_when_no_checkpoint_stands_for_them_and_stay_when_nobody_knows(tmp_path: Path):
    for name in ("old", "best", "last"):
        (tmp_path / shards.FOLDER / name).mkdir(parents=True)
    for name in ("best", "last"):
        torch.save({shards.FOLDER: {"folder": name}}, tmp_path / f"{name}.ckpt")
    shards.sweep(tmp_path)
    assert {path.name for path in (tmp_path / shards.FOLDER).iterdir()} == {"best", "last"}
    (tmp_path / "last.ckpt").write_bytes(b"broken")
    shards.sweep(tmp_path)
    assert (tmp_path / shards.FOLDER / "last").is_dir()


def test_parts_that_have_changed_places_are_not_taken_for_each_other(tmp_path: Path):
    """Each is sound in itself, and says nowhere which one it is."""
    (one, part), (_, other) = in_parts(tmp_path / "one"), in_parts(tmp_path / "two", 0.0)
    part.write_bytes(other.read_bytes())
    with pytest.raises(CheckpointError, match=f"{part.name}, a part of .* is damaged, or another one in its place"):
        read_checkpoint(one)


class Runs:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.mark}",)


def test_a_part_of_a_checkpoint_and_an_index_beside_it_run_no_code(tmp_path: Path):
    (path, part), bomb = in_parts(tmp_path), io.BytesIO()
    torch.save(Runs(tmp_path / "mark"), bomb)
    small = torch.load(path, weights_only=True)
    part.write_bytes(bomb.getvalue())
    part.with_name(".metadata").write_bytes(pickle.dumps(Runs(tmp_path / "mark")))  # PyTorch's default index
    small["shards"]["files"] = shards.described(part.parent, 0)
    torch.save(small, path)
    for read in (load_model, read_checkpoint):
        with pytest.raises(CheckpointError, match="the parts in .* cannot be read: "):
            read(path)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("files", "refusal"),
    [
        ({"../../../x": [1, 2]}, "is no part of|has a part called"),
        ({Path("x"): [1, 2]}, "cannot read it"),
        ({"x": [1]}, "is no part of"),
        ({}, "is no part of"),
    ],
)
def test_files_of_an_entry_are_its_parts(files: dict[Any, Any], refusal: str, tmp_path: Path):
    with pytest.raises(CheckpointError, match=refusal):
        read_checkpoint(in_parts(tmp_path, files=files)[0])


def test_a_tensor_of_which_a_piece_is_missing_is_refused(tmp_path: Path):
    """Its place in memory would hold zeros."""
    path, part = in_parts(tmp_path)
    content = part.read_bytes()
    part.write_bytes(content.replace(b'saved_offsets\\": [0]', b'saved_offsets\\": [9]'))
    small = torch.load(path, weights_only=True)
    small["shards"]["files"] = shards.described(part.parent, 0)
    torch.save(small, path)
    with pytest.raises(CheckpointError, match="do not hold the whole of 'weights/model.x'"):
        read_checkpoint(path)


def test_parts_of_an_earlier_version_name_the_commit_that_reads_them(tmp_path: Path):
    path, _ = in_parts(tmp_path)
    small = torch.load(path, weights_only=True)
    torch.save({**small, "shards": {name: small["shards"][name] for name in ("folder", "names")}}, path)
    with pytest.raises(CheckpointError, match="Use commit 7ec9846 to make one file of them"):
        read_checkpoint(path)
