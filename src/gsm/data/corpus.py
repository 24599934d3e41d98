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
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from gsm.data.cache import file_digest
from gsm.data.reading import SUFFIXES, Piece, holds_many, is_text, read_pieces, without_packing
from gsm.paths import at_home

log = logging.getLogger(__name__)

SPLITS = ("train", "validation")
SMALL = 1 << 26  # bytes of a corpus that is read whole for its digest at every start
LEAST = 0.002  # share of bytes: a warning names a held-out part that is smaller

# Tests, large generated or bundled trees, and files that differ between two machines with the same Python.
NOT_CORE = (
    *("test", "tests", "idlelib", "lib2to3", "tkinter", "turtledemo", "ensurepip", "site-packages", "dist-packages"),
    *("__pycache__", "config-*", "_sysconfigdata_*", "sitecustomize.py", "usercustomize.py"),
)


class Corpus:
    """Text files below one folder, or one file of text.

    A file of JSON lines or parquet holds many documents. Any other file is one. Empty texts are left out. Two rules
    decide what is held out for validation:

    * `validation` names files below `root`.
    * Without it, documents are held out by their hash, those in the lowest `validation_share` of all hashes. A file of
      text has the SHA-256 of its module path (`json.decoder`; `json` for `json/__init__.py`); if none is that low, the
      lowest is held out. A document in a file of many has the SHA-256 of its text. So the choice is the same on every
      machine, and does not depend on other documents. Of a single text the last `validation_share` is held out, from
      the next line on.

    No document is in both splits, and no file twice in one, whichever links lead to it.

    Args:
        root: the folder, or the file.
        name: of this corpus in a run's summary.
        files: patterns (as in a shell; `*` crosses folders) of the files to take, relative to `root`; None: all.
        validation: patterns of the files or folders to hold out, relative to `root`; None: by hash.
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
            raise FileNotFoundError(f"path must be a folder or a file with text, got {root}")
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
        for name in self.files[split]:
            if name not in self._divided:
                yield from self._read(name)
            elif holds_many(name):
                yield from self._by_document(name, split)
            else:
                yield from self._by_place(name, split)

    @cached_property
    def files(self) -> dict[str, list[str]]:
        """The sorted names of each split. A file that is divided inside is in both."""
        names = [
            name for name in sorted(self._everything) if self.taken is None or _fits(self._local(name), self.taken)
        ]
        for name in names:
            self._require_readable(name)
        if self.held_out is not None:
            divided = self._by_pattern(names)
        elif names:
            divided = self._by_default(names)
        else:
            raise ValueError(f"path must hold text{self._wanted()}, got {self._place}")
        for name in divided["validation"]:
            self._require_readable(name)
        train, held_out = (sum(self._bytes(name) for name in divided[split]) for split in SPLITS)
        if not LEAST * (held_out + train) <= held_out <= train:
            log.warning(
                "%d bytes are held out and %d trained on: name files to hold out with data.validation=.",
                held_out,
                train,
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
                f"files must end in {_endings(SUFFIXES)}, got {self._path(name)}; convert it, or rename it if it is "
                "plain text"
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
        """Return whether a file is text, by its name. Raise ValueError for a broken link with such a name."""
        if self._is_excluded(path.name) or not path.name.lower().endswith(self.suffixes):
            return False
        if not path.exists():
            raise ValueError(f"path must be free of broken links, got {path}")
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
            fits = "no file" if not held_out else "all files"
            raise ValueError(
                f"data.validation must fit some but not all files, got {patterns}, which fits {fits}: "
                f"{self._place} holds {len(names)} files with text{self._wanted()}; patterns are relative to data.path"
            )
        return {"train": train, "validation": sorted(held_out)}

    def _by_default(self, names: list[str]) -> dict[str, list[str]]:
        """Divide the files of one text by their hashes. All others, and a single text, are in both splits."""
        texts = [name for name in names if not holds_many(name)]
        held_out = {name for name in texts if fraction(name) < self.validation_share}
        if len(names) == 1:
            held_out, texts = set(), []
        elif len(names) == len(texts):
            held_out = held_out or {min(texts, key=fraction)}
        return {
            "train": [name for name in names if name not in held_out],
            "validation": [name for name in names if name in held_out or name not in texts],
        }

    def _wanted(self) -> str:
        named = f" that fits {', '.join(self.taken)}" if self.taken else ""
        return f"{named} ({_endings(self.suffixes)})"

    # A file that is divided inside

    @cached_property
    def _divided(self) -> set[str]:
        return {*self.files["train"]} & {*self.files["validation"]}

    def _by_document(self, name: str, split: str) -> Iterator[Piece]:
        """Yield the documents of one split. The first piece of a document decides its split."""
        begins, taken = True, False
        for piece in self._read(name):
            if begins:
                taken = (_hash(piece.text) < self.validation_share) == (split == "validation")
            begins = piece.last
            if taken:
                yield piece

    def _by_place(self, name: str, split: str) -> Iterator[Piece]:
        """Yield a text before its held-out end, or the end."""
        place, length = 0, self._train_length(name)
        for text, last in self._read(name):
            inside = min(max(0, length - place), len(text))
            part = text[:inside] if split == "train" else text[inside:]
            place += len(text)
            if split == "train" and place >= length:
                yield Piece(part, last=True)
                return
            if part:
                yield Piece(part, last)

    def _train_length(self, name: str) -> int:
        """Return the characters of a text before its held-out end, which starts with a line if it can."""
        total = sum(len(piece.text) for piece in self._read(name))
        place, least = 0, int(total * (1 - self.validation_share))
        if least == 0:
            raise ValueError(f"path must have text to hold out, got {total} characters in {self._path(name)}")
        for text, _ in self._read(name):
            if place + len(text) > least and (line := text.find("\n", least - place) + 1):
                return place + line if place + line < total else least
            place += len(text)
        return least


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


def _patterns(patterns: str | Sequence[str] | None) -> list[str] | None:
    return at_home([patterns] if isinstance(patterns, str) else patterns if patterns is None else list(patterns))


def _fits(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a file's name fits a pattern, or lies in a folder that fits one."""
    return any(fnmatch.fnmatchcase(name, p) or fnmatch.fnmatchcase(name, f"{p.rstrip('/')}/*") for p in patterns)


def _endings(suffixes: Sequence[str]) -> str:
    """Return endings for a sentence, without those of packed files."""
    return ", ".join(ending for ending in suffixes if ending.count(".") == 1)
