"""Where text comes from: files below one folder, or one file, and which of them are held out for validation.

The default is the source code of the standard library of the running interpreter. Every machine has it, without a
download. A class with the public members of `Corpus` can take its place.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import logging
import os
import platform
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path

from gsm.data.cache import file_digest
from gsm.data.reading import SUFFIXES, Piece, holds_many, is_text, read_pieces, without_packing
from gsm.paths import at_home

log = logging.getLogger(__name__)

SPLITS = ("train", "validation")
SMALL = 1 << 26  # bytes of a corpus that is read whole for its digest at every start
FEW = 100  # files: below this number their sizes count as well as their hashes
LEAST = 0.002  # share of bytes: a warning names a held-out part that is smaller
LOOKED_AT = 1000  # documents that are read for the lowest hash

# Tests, large generated or bundled trees, and files that differ between two machines with the same Python.
NOT_CORE = (
    *("test", "tests", "idlelib", "lib2to3", "tkinter", "turtledemo", "ensurepip", "site-packages", "dist-packages"),
    *("__pycache__", "config-*", "_sysconfigdata_*", "sitecustomize.py", "usercustomize.py"),
)
# Words in the names of files, and the split that they name; the words that hardly have another meaning.
ROLES = {
    **dict.fromkeys(["train", "training"], "train"),
    **dict.fromkeys(["valid", "validation", "val", "dev"], "validation"),
    **dict.fromkeys(["test", "eval"], "test"),
}
SURE = {"train", "valid", "validation"}


class Corpus:
    """Text files below one folder, or one file of text.

    A file of JSON lines or parquet holds many documents. Any other file is one. Empty texts are left out. The first of
    these rules that applies decides which part is held out for validation:

    * `validation` names files below `root`.
    * The names of text files (not of code) have a word for a split, as in `train-00.jsonl`, `books_validation.txt` or
      `test/a.txt`. Those of validation (valid, val, dev) are held out. Those of test (eval) are in neither split, and
      the log names them. One name has to have train, valid or validation, as the other words have other meanings too.
    * Several files: each has the SHA-256 of its module path (`json.decoder`; `json` for `json/__init__.py`). Held out
      are the files with a hash in the lowest `validation_share` of all hashes, or the one with the lowest. They are the
      same on every machine, and other files may come and go. Of fewer than a hundred files, this may hold out less than
      half of the bytes that are meant, or more than twice: then those files that come nearest, in the order of hashes.
    * One file of many documents: the documents with such a hash of their text.
    * One text: its end, from the line after the place where the last `validation_share` begins.

    No file is in both splits, or twice in one, whichever links lead to it.

    Args:
        root: the folder, or the file.
        name: of this corpus in a run's summary.
        files: patterns (as in a shell; `*` crosses folders) of the files to take, relative to `root`; None: all.
        validation: patterns of the files or folders to hold out, relative to `root`; None: see above.
        text_field: the field of a JSON line, or the column of parquet, that holds the text.
        suffixes: endings of the files to take.
        excluded: patterns of names of files and folders to leave out, at every depth.
        validation_share: expected share held out, between 0 and 1.
        notes: folder for the digests of large files, which are then read once; None: they are read at every start.

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
        self.root, self.name, self.suffixes, self.excluded = Path(at_home(str(root))), name, suffixes, excluded
        self.taken, self.held_out = _patterns(files), _patterns(validation)
        self.text_field, self.validation_share, self.notes = text_field, validation_share, notes
        if not (self.root.is_dir() or self.root.is_file()):
            raise FileNotFoundError(
                f"path={root} is not allowed because there is no such folder or file. Use a folder with text files."
            )
        if not 0 < validation_share < 1:
            raise ValueError(f"validation_share must be in (0, 1), got {validation_share}")

    def documents(self, split: str) -> Iterator[str]:
        """Yield the texts of one split ("train" or "validation"), in the order of their files' names."""
        parts: list[str] = []
        for text, last in self.pieces(split):
            parts.append(text)
            if last:
                yield "".join(parts)
                parts = []

    def pieces(self, split: str) -> Iterator[Piece]:
        """Yield the texts in pieces of bounded size."""
        if self._divided:
            return self._divided(split)
        return (piece for name in self.files[split] for piece in self._read(name))

    @cached_property
    def files(self) -> dict[str, list[str]]:
        """The sorted names of each split. Both name the only file, which is then divided inside."""
        names = [
            name for name in sorted(self._everything) if self.taken is None or _fits(self._local(name), self.taken)
        ]
        for name in names:
            self._require_readable(name)
        divided = self._by_pattern(names) if self.held_out is not None else self._divide(names)
        for name in divided["validation"]:
            self._require_readable(name)
        train, held_out = (sum(self._bytes(name) for name in divided[split]) for split in SPLITS)
        if held_out > train:
            log.warning("More is held out (%d bytes) than trained on (%d): set data.validation.", held_out, train)
        elif held_out < LEAST * (held_out + train):
            log.warning(
                "Of %d bytes only %d are held out: name files to hold out with data.validation=, or cut the text "
                "into more files.",
                held_out + train,
                held_out,
            )
        return divided

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the names and contents of all files and the split of each, in hexadecimal."""
        total = hashlib.sha256()
        pairs = [(split, name) for split, names in self.files.items() for name in names]
        small = sum(self._bytes(name) for _, name in pairs) <= SMALL
        for split, name in pairs:
            raw = self._path(name).read_bytes() if small else file_digest(self._path(name), self.notes).encode()
            total.update(f"{split}:{len(name.encode())}:{len(raw)}:".encode() + name.encode() + raw)
        if self._divided or any(holds_many(name) for _, name in pairs):
            total.update(json.dumps([self.text_field, self.validation_share if self._divided else None]).encode())
        return total.hexdigest()

    def description(self) -> dict[str, str | int]:
        """Return the facts about the text for a run's summary."""
        return {
            "corpus": self.name,
            "digest": self.digest,
            "python": platform.python_version(),
            "files": len({name for names in self.files.values() for name in names}),
            **{f"{split}_files": len(names) for split, names in self.files.items()},
        }

    # A file. A corpus that does not lie on this disk overrides these.

    def _read(self, name: str) -> Iterator[Piece]:
        return read_pieces(self._path(name), self.text_field)

    def _path(self, name: str) -> Path:
        return self.root if self.root.is_file() and name == self.root.name else self.root / name

    def _bytes(self, name: str) -> int:
        return self._path(name).stat().st_size

    def _identity(self, name: str) -> str:
        return os.path.realpath(self._path(name))

    def _local(self, name: str) -> str:
        """Return the name that patterns are compared with."""
        return name

    @property
    def _place(self) -> str:
        """Where the files are, for error messages."""
        return repr(str(self.root))

    def _require_readable(self, name: str) -> None:
        """Raise ValueError for a file that is not text."""
        if not is_text(name):
            raise ValueError(
                f"{self._path(name)} has none of the endings of text ({_endings(SUFFIXES)}); convert it to one of "
                "them, or rename it if it is plain text"
            )

    # All files

    @cached_property
    def _everything(self) -> list[str]:
        """The names of all text files, each once. Of several ways to one file the way without a link counts."""
        names = [self.root.name] if self.root.is_file() else list(self._walk())
        names.sort(key=lambda name: (self._path(name).is_symlink(), name))
        return list({self._identity(name): name for name in reversed(names)}.values())

    def _walk(self) -> Iterator[str]:
        """Yield the names of the text files, through links as well. One line of the log names the files left out."""
        left_out: list[str] = []
        visited, waiting = set[str](), [str(self.root)]
        while waiting:  # linked folders come last: their files are known by their own place
            for folder, folders, files in os.walk(waiting.pop(0), onerror=lambda error: log.warning("%s", error)):
                if (real := os.path.realpath(folder)) in visited:
                    folders.clear()
                    continue
                visited.add(real)
                folders[:] = sorted(name for name in folders if not self._is_excluded(name))
                waiting += filter(os.path.islink, (os.path.join(folder, name) for name in folders))
                for name in sorted(files):
                    path = Path(folder, name)
                    if self._is_taken(path):
                        yield path.relative_to(self.root).as_posix()
                    else:
                        left_out.append(path.relative_to(self.root).as_posix())
        if left_out and self.name != "standard_library":
            names = ", ".join(left_out[:3]) + ", ..." * (len(left_out) > 3)
            log.info("Left out of %s: %d hidden, empty and other files (%s).", self.root, len(left_out), names)

    def _is_taken(self, path: Path) -> bool:
        """Return whether a file is text. Raise ValueError for a link to nothing that is called as text is."""
        if self._is_excluded(path.name) or not path.name.lower().endswith(self.suffixes):
            return False
        if not path.exists():
            raise ValueError(f"{path} is not allowed because it is a link to nothing. Remove it.")
        # A text may be empty. Parquet never is: a file that was cut to nothing is damaged.
        return path.is_file() and (path.stat().st_size > 0 or path.name.lower().endswith(".parquet"))

    def _is_excluded(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.excluded)

    # Which files are held out

    def _by_pattern(self, names: list[str]) -> dict[str, list[str]]:
        """Divide by the patterns in `held_out`."""
        patterns = self.held_out or []
        held_out = [name for name in self._everything if _fits(self._local(name), patterns)]
        train = [name for name in names if name not in held_out]
        if not held_out or not train:
            lacks = "data.validation fits no file" if not held_out else "nothing is left to train on"
            raise ValueError(
                f"{lacks}: data.validation is {patterns}, data.files {self.taken}, and {self._place} holds "
                f"{len(names)} of the wanted files with text{self._wanted()}; patterns are relative to data.path"
            )
        return {"train": train, "validation": sorted(held_out)}

    def _divide(self, names: list[str]) -> dict[str, list[str]]:
        """Divide by names, else by hashes; a single file is in both splits."""
        if not names:
            raise ValueError(
                f"path={self._place} is not allowed because it holds 0 files with text{self._wanted()}. Use a folder "
                "with one file for training and one for validation, or with one that can be divided."
            )
        roles = {name: _role(self._local(name)) for name in names}
        rest = [name for name in names if roles[name][0] == "train"]
        if rest and any(word in SURE for _, word in roles.values()):
            if left_out := [name for name in names if roles[name][0] == "test"]:
                log.info("Left out of both splits, as their names say test: %s.", ", ".join(left_out))
            if held_out := [name for name in names if roles[name][0] == "validation"]:
                return {"train": rest, "validation": held_out}
            names = rest
        return self._hold_out(names) if len(names) > 1 else {split: names for split in SPLITS}

    def _hold_out(self, names: list[str]) -> dict[str, list[str]]:
        """Divide several files by their hashes; few files also by their sizes."""
        held_out = {name for name in names if fraction(name) < self.validation_share} or {min(names, key=fraction)}
        if len(names) < FEW:
            held_out = self._of_fair_size(names, held_out)
        return {"train": [n for n in names if n not in held_out], "validation": [n for n in names if n in held_out]}

    def _of_fair_size(self, names: list[str], held_out: set[str]) -> set[str]:
        """Return `held_out` if its size is fair, else other files: at least one, and not all."""
        sizes = {name: self._bytes(name) for name in names}
        fair = self.validation_share * sum(sizes.values())
        if fair / 2 <= sum(sizes[name] for name in held_out) <= 2 * fair and len(held_out) < len(names):
            return held_out
        chosen, size = set[str](), 0
        for name in sorted(names, key=fraction):
            if len(chosen) < len(names) - 1 and abs(size + sizes[name] - fair) < abs(size - fair):
                chosen, size = {*chosen, name}, size + sizes[name]
        smallest = min((name for name in names if name not in chosen), key=lambda name: (sizes[name], fraction(name)))
        fits_in = size + sizes[smallest] <= sum(sizes.values()) / 2  # or more would be held out than trained on
        return {*chosen, smallest} if size < fair / 2 and fits_in else chosen or {smallest}

    def _wanted(self) -> str:
        named = f" that fit {', '.join(self.taken)}" if self.taken else ""
        return f"{named} ({_endings(self.suffixes)})"

    # One file, divided inside

    @cached_property
    def _divided(self) -> Callable[[str], Iterator[Piece]] | None:
        if self.held_out is not None or self.files["train"] != self.files["validation"]:
            return None
        return self._by_document if holds_many(self.files["train"][0]) else self._by_place

    def _by_document(self, split: str) -> Iterator[Piece]:
        below = self._threshold
        return (piece for value, piece in self._hashed() if (value < below) == (split == "validation"))

    def _hashed(self) -> Iterator[tuple[float, Piece]]:
        """Yield the pieces of the only file, each with the hash of its document's first piece."""
        (name,) = self.files["train"]
        value = None
        for piece in self._read(name):
            value = _hash(piece.text) if value is None else value
            yield value, piece
            value = None if piece.last else value

    @cached_property
    def _threshold(self) -> float:
        """The hash below which documents are held out."""
        hashes = sorted({value for value, _ in islice(self._hashed(), LOOKED_AT)})
        if len(hashes) < 2:
            path = self._path(self.files["train"][0])
            raise ValueError(
                f"path must have 2 different documents, one to hold out, or set data.validation, got {path}"
            )
        threshold = self.validation_share if hashes[0] < self.validation_share else hashes[1]
        return min(threshold, hashes[-1])

    def _by_place(self, split: str) -> Iterator[Piece]:
        (name,) = self.files[split]
        place, length = 0, self._train_length
        for text, last in self._read(name):
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
        """Characters of the only text before its held-out end, which starts with a line if it can."""
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
        raise ValueError(f"path must have text to hold out, got {total} characters in {self._path(name)}")


def standard_library(root: str | os.PathLike[str] | None = None) -> Corpus:
    """Return the core `.py` files of the running interpreter's standard library, or of the library at `root`.

    About 560 files and 10.6 MB on CPython 3.11. The tree differs between Python versions, so that losses measured on
    different ones do not compare: `description` records the version and the digest.
    """
    folder = sysconfig.get_path("stdlib") if root is None else root
    return Corpus(folder, name="standard_library", suffixes=(".py",), excluded=NOT_CORE)


def fraction(name: str) -> float:
    """Return the hash of a file's module path as a number in [0, 1), however the file is packed."""
    return _hash(without_packing(name).rpartition(".")[0].replace("/", ".").removesuffix(".__init__"))


def _hash(text: str) -> float:
    """Return the SHA-256 of a text as a number in [0, 1)."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


def _role(name: str) -> tuple[str, str]:
    """Return the split in a file's name by its last word for one, and the word; "train" and "" without a word."""
    *folders, file = without_packing(name).lower().split("/")
    stem, _, kind = file.rpartition(".")
    words = [word for word in (*folders, *re.findall("[a-z]+", stem)) if word in ROLES and kind != "py"]
    return (ROLES[words[-1]], words[-1]) if words else ("train", "")


def _patterns(patterns: str | Sequence[str] | None) -> list[str] | None:
    return at_home([patterns] if isinstance(patterns, str) else patterns if patterns is None else list(patterns))


def _fits(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a file's name fits a pattern, or lies in a folder that fits one."""
    return any(fnmatch.fnmatchcase(name, p) or fnmatch.fnmatchcase(name, f"{p.rstrip('/')}/*") for p in patterns)


def _endings(suffixes: Sequence[str]) -> str:
    """Return endings for a sentence, without those of packed files."""
    return ", ".join(ending for ending in suffixes if ending.count(".") == 1)
