"""Where text comes from: files under one folder or a single file, and which of it is held out for validation.

The default is the source code of the running interpreter's standard library, which every machine has and which needs
no download. Another source of text is another class with what `Corpus` has in public.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import json
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path

from gsm.data.cache import file_digest
from gsm.data.reading import SUFFIXES, Moved, Piece, holds_many, read_pieces

SPLITS = ("train", "validation")
SMALL = 1 << 26  # bytes: a corpus up to this size is read whole for its digest, at every start
LOOKED_AT = 1000  # documents among which one is held out when the hashes alone would hold out none

# Tests, large generated or bundled trees, and what differs between two machines with the same Python.
NOT_CORE = (
    *("test", "tests", "idlelib", "lib2to3", "tkinter", "turtledemo", "ensurepip", "site-packages", "dist-packages"),
    *("__pycache__", "config-*", "_sysconfigdata_*", "sitecustomize.py", "usercustomize.py"),
)


class Corpus:
    """Text files under one folder, or one file of text.

    A file of JSON lines or parquet holds many documents, any other is one. Empty files and documents are left out. What
    is held out for validation is, in this order:

    * the files that `validation` names;
    * with two files or more, those whose SHA-256 of the module path (`json.decoder`; `json` for `json/__init__.py`, so
      that a module which grows into a package stays where it is) falls into the lowest `validation_share` of all
      hashes: the same on every machine, and unmoved by files that come or go. If none does, the one with the lowest;
    * with one file of many documents, those documents whose text's SHA-256 does;
    * with one text, its end: the last `validation_share`, from the next line on.

    Args:
        root: the folder, or the file.
        name: what runs call this corpus.
        files: patterns (as in a shell; `*` crosses folders) of the files to take, relative to `root`; None: all.
        validation: patterns of the files to hold out, relative to `root` or absolute; None: as above.
        text_field: where the text stands in a line of JSON, or the name of the column in parquet.
        suffixes: which files are text.
        excluded: patterns of file and folder names that are left out, at every depth.
        validation_share: expected share held out, between 0 and 1.
        notes: folder for the digests of large files, so that they are read once; None: read whenever asked.

    Raises:
        FileNotFoundError: there is nothing at `root` (at construction).
        ValueError: there is too little text to divide, or a pattern fits no file (at first use).
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        name: str = "folder",
        files: str | Sequence[str] | None = None,
        validation: str | Sequence[str] | None = None,
        text_field: str = "text",
        suffixes: tuple[str, ...] = SUFFIXES,
        excluded: tuple[str, ...] = ("__pycache__", ".*"),
        validation_share: float = 0.05,
        notes: Path | None = None,
    ) -> None:
        self.root, self.name, self.suffixes, self.excluded = Path(root), name, suffixes, excluded
        self.taken, self.held_out = _patterns(files), _patterns(validation)
        self.text_field, self.validation_share, self.notes = text_field, validation_share, notes
        if not self.root.exists():
            raise FileNotFoundError(
                f"corpus path {str(root)!r} is not a folder or a file; give data.path a folder of text files"
            )
        if not 0 < validation_share < 1:
            raise ValueError(f"validation_share {validation_share} must lie between 0 and 1; 0.05 is usual")

    def documents(self, split: str) -> Iterator[str]:
        """The texts of one split ("train" or "validation"), in the order of their files' names."""
        parts: list[str] = []
        for text, last in self.pieces(split):
            parts.append(text)
            if last:
                yield "".join(parts)
                parts = []

    def pieces(self, split: str, moved: Moved | None = None) -> Iterator[Piece]:
        """The same in pieces of bounded size; `moved` is told how many bytes of `size` were taken in."""
        if self._divided:
            return self._divided(split, moved)
        return (piece for name in self.files[split] for piece in self._read(name, moved))

    def size(self, split: str) -> int | None:
        """Bytes of the files that `pieces` reads, as they lie on the disk; None where nobody knows."""
        return sum(self._path(name).stat().st_size for name in self.files[split])

    @cached_property
    def files(self) -> dict[str, list[str]]:
        """The sorted names of each split; where the only file is divided inside, both name it."""
        names = self._take()
        if self.held_out is not None:
            return self._as_told(names)
        if len(names) == 1:
            return {split: names for split in SPLITS}
        if not names:
            raise ValueError(
                f"corpus path {str(self.root)!r} holds 0 files with text{self._wanted()} and needs at least 2, one for "
                "training and one for validation, or one that can be divided; give data.path another folder"
            )
        held_out = {name for name in names if _fraction(name) < self.validation_share} or {min(names, key=_fraction)}
        return {"train": [n for n in names if n not in held_out], "validation": [n for n in names if n in held_out]}

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the names and contents of all files and the split of each, in hexadecimal."""
        total = hashlib.sha256()
        pairs = [(split, name) for split, names in self.files.items() for name in names]
        small = sum(self._path(name).stat().st_size for _, name in pairs) <= SMALL
        for split, name in pairs:
            raw = self._path(name).read_bytes() if small else file_digest(self._path(name), self.notes).encode()
            known = self._known_as(name)
            total.update(f"{split}:{len(known.encode())}:{len(raw)}:".encode() + known.encode() + raw)
        if self._divided or any(holds_many(name) for _, name in pairs):
            total.update(json.dumps([self.text_field, self.validation_share if self._divided else None]).encode())
        return total.hexdigest()

    def description(self) -> dict[str, str | int]:
        """What a run's summary says of its text."""
        counts = {f"{split}_files": len(names) for split, names in self.files.items()}
        total = len({name for names in self.files.values() for name in names})
        return {
            "corpus": self.name,
            "digest": self.digest,
            "python": platform.python_version(),
            "files": total,
            **counts,
        }

    def _read(self, name: str, moved: Moved | None = None) -> Iterator[Piece]:
        return read_pieces(self._path(name), self.text_field, moved)

    def _path(self, name: str) -> Path:
        return self.root if self.root.is_file() and name == self.root.name else self.root / name

    def _known_as(self, name: str) -> str:
        """The name that enters the digest: not where a file outside `root` happens to lie."""
        return Path(name).name if os.path.isabs(name) else name

    # What is taken and what is held out

    def _take(self) -> list[str]:
        names = sorted([self.root.name] if self.root.is_file() else self._walk())
        return names if self.taken is None else [name for name in names if _fits(name, self.taken)]

    def _as_told(self, names: list[str]) -> dict[str, list[str]]:
        patterns = self.held_out or []
        held_out = {name for name in self._walk() if _fits(name, patterns)} if self.root.is_dir() else set()
        outside = [Path(found) for pattern in patterns if os.path.isabs(pattern) for found in glob.glob(pattern)]
        held_out |= {path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)
                     for path in outside}  # fmt: skip
        train = [name for name in names if name not in held_out]
        if not held_out or not train:
            lacks = "data.validation fits no file" if not held_out else "nothing is left to train on"
            raise ValueError(
                f"{lacks}: data.validation is {patterns}, data.files {self.taken}, and {str(self.root)!r} holds "
                f"{len(names)} of the wanted files with text{self._wanted()}; patterns are relative to data.path"
            )
        return {"train": train, "validation": sorted(held_out)}

    def _walk(self) -> Iterator[str]:
        for folder, folders, files in os.walk(self.root):
            folders[:] = [name for name in folders if not self._is_excluded(name)]
            for name in files:
                path = Path(folder, name)
                if name.endswith(self.suffixes) and not self._is_excluded(name) and path.stat().st_size:
                    yield path.relative_to(self.root).as_posix()

    def _is_excluded(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.excluded)

    def _wanted(self) -> str:
        named = f" that fit {', '.join(self.taken)}" if self.taken else ""
        return f"{named} ({', '.join(ending for ending in self.suffixes if ending.count('.') == 1)})"

    # One file, divided inside

    @cached_property
    def _divided(self) -> Callable[[str, Moved | None], Iterator[Piece]] | None:
        if self.held_out is not None or self.files["train"] != self.files["validation"]:
            return None
        return self._by_document if holds_many(self.files["train"][0]) else self._by_place

    def _by_document(self, split: str, moved: Moved | None) -> Iterator[Piece]:
        (name,) = self.files[split]
        below = self._threshold
        return (piece for piece in self._read(name, moved) if (_hashed(piece.text) < below) == (split == "validation"))

    @cached_property
    def _threshold(self) -> float:
        """Hashes below this one are held out."""
        hashes = sorted({_hashed(piece.text) for piece in islice(self._read(self.files["train"][0]), LOOKED_AT)})
        if len(hashes) < 2:
            raise ValueError(
                f"{self._path(self.files['train'][0])} holds fewer than 2 documents that differ, and one has to be "
                "held out; set data.validation to a file to hold out, or give data.path more text"
            )
        wanted = self.validation_share if hashes[0] < self.validation_share else hashes[1]
        return min(wanted, hashes[-1])

    def _by_place(self, split: str, moved: Moved | None) -> Iterator[Piece]:
        (name,) = self.files[split]
        place, length = 0, self._train_length
        for text, last in self._read(name, moved):
            inside = min(max(0, length - place), len(text))
            part = text[:inside] if split == "train" else text[inside:]
            place += len(text)
            if split == "train" and place >= length:
                yield Piece(part, last=True)
                return
            if part:
                yield Piece(part, last)

    @cached_property
    def _train_length(self) -> int:
        """Characters of the only text that come before its held-out end, which starts with a line if it can."""
        (name,) = self.files["train"]
        total = sum(len(piece.text) for piece in self._read(name))
        least = int(total * (1 - self.validation_share))
        place = 0
        for text, _ in self._read(name):
            if place + len(text) > least:
                line = text.find("\n", least - place) + 1
                length = place + line if line else least
                if 0 < length < total:
                    return length
                if 0 < least < total:
                    return least
                break
            place += len(text)
        raise ValueError(
            f"{self._path(name)} has {total} characters, too few to hold some out; give data.path more text"
        )


def standard_library(root: str | os.PathLike[str] | None = None) -> Corpus:
    """The core `.py` files of the running interpreter's standard library (or of the one whose library is at `root`).

    About 560 files and 10.6 MB on CPython 3.11. The tree differs between Python versions, so that losses measured on
    different ones do not compare: `description` records the version and the digest.
    """
    folder = sysconfig.get_path("stdlib") if root is None else root
    return Corpus(folder, name="standard_library", suffixes=(".py",), excluded=NOT_CORE)


def _patterns(given: str | Sequence[str] | None) -> list[str] | None:
    return [given] if isinstance(given, str) else given if given is None else list(given)


def _fits(name: str, patterns: Sequence[str]) -> bool:
    """Whether a file's name fits a pattern, or lies in a folder whose name does."""
    return any(fnmatch.fnmatchcase(name, p) or fnmatch.fnmatchcase(name, f"{p.rstrip('/')}/*") for p in patterns)


def _fraction(name: str) -> float:
    """The hash of a file's module path as a number in [0, 1)."""
    return _hashed(name.rpartition(".")[0].replace("/", ".").removesuffix(".__init__"))


def _hashed(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48
