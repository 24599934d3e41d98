"""Where text comes from: files under one folder or a single file, and which of it is held out for validation.

The default is the source code of the running interpreter's standard library, which every machine has and which needs
no download. Another source of text is another class with what `Corpus` has in public.
"""

from __future__ import annotations

import fnmatch
import glob
import hashlib
import json
import logging
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path

from gsm.data.cache import file_digest
from gsm.data.damage import Damage
from gsm.data.names import SURE, fits, fraction, hashed, patterns, role
from gsm.data.reading import LONGEST_LINE, SUFFIXES, Moved, Piece, holds_many, read_pieces

log = logging.getLogger(__name__)

SPLITS = ("train", "validation")
SMALL = 1 << 26  # bytes: a corpus up to this size is read whole for its digest, at every start
FEW = 100  # files, below which their sizes count as well as their hashes
LEAST = 0.002  # of all bytes; where less is held out, that is said
LOOKED_AT = 1000  # documents among which one is held out when the hashes alone would hold out none

# Tests, large generated or bundled trees, and what differs between two machines with the same Python.
NOT_CORE = (
    *("test", "tests", "idlelib", "lib2to3", "tkinter", "turtledemo", "ensurepip", "site-packages", "dist-packages"),
    *("__pycache__", "config-*", "_sysconfigdata_*", "sitecustomize.py", "usercustomize.py"),
)


class Corpus:
    """Text files under one folder, or one file of text.

    A file of JSON lines or parquet holds many documents, any other is one. Empty texts are left out. What
    is held out for validation is, in this order:

    * the files that `validation` names, wherever they lie;
    * where the names of files of text (not of code) say what they are for, in a word of their own as in
      `train-00.jsonl`, `books_validation.txt` or `test/a.txt`: those of validation (or valid, val, dev). Those of test
      (or eval) are then left out of both splits, which is logged; without any of validation, the rest is divided as
      below. There has to be one of train, valid or validation, for other words alone may mean something else;
    * with two files or more, those whose SHA-256 of the module path (`json.decoder`; `json` for `json/__init__.py`, so
      that a module which grows into a package stays where it is) falls into the lowest `validation_share` of all
      hashes: the same on every machine, and unmoved by files that come or go. If none does, the one with the lowest.
      Of fewer than a hundred files, chance may hold out far too little or too much: where that is less than half of
      the bytes that are meant, or more than twice as many, those files that come nearest, tried in the order of hashes;
    * with one file of many documents, those documents whose text's SHA-256 does;
    * with one text, its end: the last `validation_share`, from the next line on.

    No file is in both splits, nor twice in one, whatever links and other ways lead to it.

    Args:
        root: the folder, or the file.
        name: what runs call this corpus.
        files: patterns (as in a shell; `*` crosses folders) of the files to take, relative to `root`; None: all.
        validation: patterns of the files (or folders) to hold out, relative to `root` or absolute; None: as above.
        text_field: where the text stands in a line of JSON, or the name of the column in parquet.
        longest_line: bytes that a line of JSON may have, unpacked: it is read as a whole.
        suffixes: which files are text.
        excluded: patterns of file and folder names that are left out, at every depth.
        validation_share: expected share held out, between 0 and 1.
        notes: folder for the digests of large files, so that they are read once; None: read whenever asked.
        on_corrupt: ``stop`` at a damaged file, or ``skip`` the rest of it; the only file of a corpus always stops.

    Raises:
        FileNotFoundError: there is nothing at `root` (at construction).
        ValueError: there is too little text to divide, or a pattern fits no file (at first use); ``on_corrupt`` is
            unknown.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        name: str = "folder",
        files: str | Sequence[str] | None = None,
        validation: str | Sequence[str] | None = None,
        text_field: str = "text",
        longest_line: int = LONGEST_LINE,
        suffixes: tuple[str, ...] = SUFFIXES,
        excluded: tuple[str, ...] = ("__pycache__", ".*"),
        validation_share: float = 0.05,
        notes: Path | None = None,
        on_corrupt: str = "stop",
    ) -> None:
        self.root, self.name, self.suffixes, self.excluded = Path(root), name, suffixes, excluded
        self.taken, self.held_out = patterns(files), patterns(validation)
        self.text_field, self.validation_share, self.notes = text_field, validation_share, notes
        self.longest_line = longest_line
        self.damage = Damage(on_corrupt)
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
        return self.damage.sound((name, self._read(name, moved)) for name in self.files[split])

    def skipped(self, split: str) -> tuple[str, ...]:
        """What is wrong with the files of a split that were damaged and left out, as far as they were read."""
        return () if self._divided else self.damage.told(self.files[split])

    def size(self, split: str) -> int | None:
        """Bytes of the files that `pieces` reads, as they lie on the disk; None where nobody knows."""
        return sum(self._bytes(name) for name in self.files[split])

    @cached_property
    def files(self) -> dict[str, list[str]]:
        """The sorted names of each split; where the only file is divided inside, both name it."""
        names = self._take()
        self._require_readable(names)
        divided = self._as_told(names) if self.held_out is not None else self._divide(names)
        self._require_readable(divided["validation"])
        if divided["train"] != divided["validation"]:
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

    def _require_readable(self, names: Sequence[str]) -> None:
        """Raises ValueError for a name that is not UTF-8: no index and no log could hold it."""
        for name in names:
            try:
                str(self._path(name)).encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"the name of {str(self._path(name))!a} is not UTF-8; give it another one, or leave it out with "
                    "data.files"
                ) from error

    def _divide(self, names: list[str]) -> dict[str, list[str]]:
        """The splits where nobody said which files to hold out."""
        if not names:
            raise ValueError(
                f"corpus path {self._place} holds 0 files with text{self._wanted()} and needs at least 2, one for "
                "training and one for validation, or one that can be divided; give data.path another folder"
            )
        names, held_out = self._by_role(names)
        if held_out:
            return {"train": names, "validation": held_out}
        return self._hold_out(names) if len(names) > 1 else {split: names for split in SPLITS}

    def _hold_out(self, names: list[str]) -> dict[str, list[str]]:
        """The splits of several files that look alike."""
        held_out = {name for name in names if fraction(name) < self.validation_share} or {min(names, key=fraction)}
        if len(names) < FEW:
            held_out = self._of_fair_size(names, held_out)
        return {"train": [n for n in names if n not in held_out], "validation": [n for n in names if n in held_out]}

    def _of_fair_size(self, names: list[str], held_out: set[str]) -> set[str]:
        """These files, where they are about as large as is meant; else others, at least one and not all."""
        sizes = {name: self._bytes(name) for name in names}
        wanted = self.validation_share * sum(sizes.values())
        if wanted / 2 <= sum(sizes[name] for name in held_out) <= 2 * wanted and len(held_out) < len(names):
            return held_out
        chosen, found = set[str](), 0
        for name in sorted(names, key=fraction):
            if len(chosen) < len(names) - 1 and abs(found + sizes[name] - wanted) < abs(found - wanted):
                chosen, found = {*chosen, name}, found + sizes[name]
        smallest = min((name for name in names if name not in chosen), key=lambda name: (sizes[name], fraction(name)))
        fits_in = found + sizes[smallest] <= sum(sizes.values()) / 2  # or more would be held out than trained on
        return {*chosen, smallest} if found < wanted / 2 and fits_in else chosen or {smallest}

    def _by_role(self, names: list[str]) -> tuple[list[str], list[str]]:
        """What to train on (or to divide), and what to hold out, as far as names tell."""
        roles = {name: role(self._local(name)) for name in names}
        rest = [name for name in names if roles[name][0] == "train"]
        if not (rest and any(word in SURE for _, word in roles.values())):
            return names, []
        left_out = [name for name in names if roles[name][0] == "test"]
        if left_out:
            log.info("Left out of both splits, as their names say test: %s.", ", ".join(left_out))
        return rest, [name for name in names if roles[name][0] == "validation"]

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the names and contents of all files and the split of each, in hexadecimal."""
        total = hashlib.sha256()
        pairs = [(split, name) for split, names in self.files.items() for name in names]
        small = sum(self._bytes(name) for _, name in pairs) <= SMALL
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
        return read_pieces(self._path(name), self.text_field, moved, self.longest_line)

    def _path(self, name: str) -> Path:
        return self.root if self.root.is_file() and name == self.root.name else self.root / name

    def _bytes(self, name: str) -> int:
        return self._path(name).stat().st_size

    def _known_as(self, name: str) -> str:
        """The name that enters the digest: not where a file outside `root` happens to lie."""
        return Path(name).name if os.path.isabs(name) else name

    def _local(self, name: str) -> str:
        """What patterns are compared with."""
        return name

    @property
    def _place(self) -> str:
        """Where the files are, for sentences."""
        return repr(str(self.root))

    # What is taken and what is held out

    def _take(self) -> list[str]:
        names = sorted(self._everything)
        return names if self.taken is None else [name for name in names if fits(self._local(name), self.taken)]

    @cached_property
    def _everything(self) -> list[str]:
        """The names of all files of text, each once: of several ways to one file the one without links."""
        names = [self.root.name] if self.root.is_file() else list(self._walk())
        names.sort(key=lambda name: (self._path(name).is_symlink(), name))
        return list({self._identity(name): name for name in reversed(names)}.values())

    def _identity(self, name: str) -> str:
        return os.path.realpath(self._path(name))

    def _as_told(self, names: list[str]) -> dict[str, list[str]]:
        wanted = self.held_out or []
        known = {self._identity(name): name for name in self._everything}
        held_out = {} if self.root.is_file() else {i: n for i, n in known.items() if fits(self._local(n), wanted)}
        for path in self._elsewhere(wanted):
            real = os.path.realpath(path)
            held_out.setdefault(real, known.get(real, str(path)))
        train = [name for name in names if self._identity(name) not in held_out]
        if not held_out or not train:
            lacks = "data.validation fits no file" if not held_out else "nothing is left to train on"
            raise ValueError(
                f"{lacks}: data.validation is {wanted}, data.files {self.taken}, and {self._place} holds "
                f"{len(names)} of the wanted files with text{self._wanted()}; patterns are relative to data.path"
            )
        return {"train": train, "validation": sorted(held_out.values())}

    def _elsewhere(self, wanted: Sequence[str]) -> Iterator[Path]:
        """The files that absolute patterns name, and those of text below the folders they name."""
        for pattern in filter(os.path.isabs, wanted):
            for found in [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern)):
                yield from self._below(Path(found)) if os.path.isdir(found) else [Path(os.path.abspath(found))]

    def _walk(self) -> Iterator[str]:
        return (path.relative_to(self.root).as_posix() for path in self._below(self.root))

    def _below(self, root: Path) -> Iterator[Path]:
        for folder, folders, files in os.walk(root):
            folders[:] = sorted(name for name in folders if not self._is_excluded(name))
            for name in sorted(files):
                path = Path(folder, name)
                wanted = name.endswith(self.suffixes) and not self._is_excluded(name)
                # A text may be empty; parquet never is, and what was cut to nothing is not to go unnoticed.
                if wanted and path.is_file() and (path.stat().st_size or name.endswith(".parquet")):
                    yield path

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
        return (piece for piece in self._read(name, moved) if (hashed(piece.text) < below) == (split == "validation"))

    @cached_property
    def _threshold(self) -> float:
        """Hashes below this one are held out."""
        hashes = sorted({hashed(piece.text) for piece in islice(self._read(self.files["train"][0]), LOOKED_AT)})
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
