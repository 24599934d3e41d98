"""Where text comes from: files under one folder, each file one document, split into train and validation by its name.

The default is the source code of the running interpreter's standard library, which every machine has and which needs
no download. Another source of text is another class with `name`, `files`, `documents`, `digest` and `description`.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

SPLITS = ("train", "validation")

# Tests, large generated or bundled trees, and what differs between two machines with the same Python.
NOT_CORE = (
    *("test", "tests", "idlelib", "lib2to3", "tkinter", "turtledemo", "ensurepip", "site-packages", "dist-packages"),
    *("__pycache__", "config-*", "_sysconfigdata_*", "sitecustomize.py", "usercustomize.py"),
)


class Corpus:
    """Text files under one folder.

    A file belongs to validation when the SHA-256 of its module path (`json.decoder`; `json` for `json/__init__.py`, so
    that a module which grows into a package stays where it is) falls into the lowest `validation_share` of all hashes:
    the same on every machine, and unmoved by files that come or go. If no file does, the one with the lowest hash is
    taken. Empty files are left out. Bytes that are not UTF-8 become U+FFFD.

    Args:
        root: the folder.
        name: what runs call this corpus.
        suffixes: which files are text.
        excluded: patterns (as in a shell) of file and folder names that are left out, at every depth.
        validation_share: expected share of files held out, between 0 and 1.

    Raises:
        FileNotFoundError: `root` is not a folder (at construction).
        ValueError: fewer than two files with text lie below it (at first use).
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        name: str = "folder",
        suffixes: tuple[str, ...] = (".py", ".txt", ".md"),
        excluded: tuple[str, ...] = ("__pycache__", ".*"),
        validation_share: float = 0.05,
    ) -> None:
        self.root, self.name, self.suffixes, self.excluded = Path(root), name, suffixes, excluded
        self.validation_share = validation_share
        if not self.root.is_dir():
            raise FileNotFoundError(f"corpus path {str(root)!r} is not a folder; give data.path a folder of text files")
        if not 0 < validation_share < 1:
            raise ValueError(f"validation_share {validation_share} must lie between 0 and 1; 0.05 is usual")

    def documents(self, split: str) -> Iterator[str]:
        """The texts of one split ("train" or "validation"), in the order of their names."""
        return (self._read(name)[0] for name in self.files[split])

    @cached_property
    def files(self) -> dict[str, list[str]]:
        """The sorted names of each split."""
        names = sorted(self._walk())
        if len(names) < 2:
            endings = ", ".join(self.suffixes)
            raise ValueError(
                f"corpus path {str(self.root)!r} holds {len(names)} files with text ({endings}) and needs at least 2, "
                "one for training and one for validation; give data.path another folder"
            )
        held_out = {name for name in names if _fraction(name) < self.validation_share} or {min(names, key=_fraction)}
        return {"train": [n for n in names if n not in held_out], "validation": [n for n in names if n in held_out]}

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the names and contents of all files and the split of each, in hexadecimal."""
        total = hashlib.sha256()
        for split, name in ((split, name) for split, names in self.files.items() for name in names):
            raw = self._read(name)[1]
            total.update(f"{split}:{len(name.encode())}:{len(raw)}:".encode() + name.encode() + raw)
        return total.hexdigest()

    def description(self) -> dict[str, str | int]:
        """What a run's summary says of its text."""
        counts = {f"{split}_files": len(names) for split, names in self.files.items()}
        python = platform.python_version()
        return {"corpus": self.name, "digest": self.digest, "python": python, "files": sum(counts.values()), **counts}

    def _walk(self) -> Iterator[str]:
        for folder, folders, files in os.walk(self.root):
            folders[:] = [name for name in folders if not self._is_excluded(name)]
            for name in files:
                path = Path(folder, name)
                if path.suffix in self.suffixes and not self._is_excluded(name) and path.stat().st_size:
                    yield path.relative_to(self.root).as_posix()

    def _is_excluded(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.excluded)

    def _read(self, name: str) -> tuple[str, bytes]:
        raw = (self.root / name).read_bytes()
        return raw.decode("utf-8", errors="replace"), raw


def standard_library(root: str | os.PathLike[str] | None = None) -> Corpus:
    """The core `.py` files of the running interpreter's standard library (or of the one whose library is at `root`).

    About 560 files and 10.6 MB on CPython 3.11. The tree differs between Python versions, so that losses measured on
    different ones do not compare: `description` records the version and the digest.
    """
    folder = sysconfig.get_path("stdlib") if root is None else root
    return Corpus(folder, name="standard_library", suffixes=(".py",), excluded=NOT_CORE)


def _fraction(name: str) -> float:
    """The hash of a file's module path as a number in [0, 1)."""
    module = name.rpartition(".")[0].replace("/", ".").removesuffix(".__init__")
    return int.from_bytes(hashlib.sha256(module.encode()).digest()[:6], "big") / 2**48
