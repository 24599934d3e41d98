"""What the names of files say: whether a pattern fits, which split they are for, and where their hash lies."""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections.abc import Sequence

from gsm.data.reading import without_packing

# What files are for by the words in their names, and which of these words hardly mean anything else.
ROLES = {
    **dict.fromkeys(["train", "training"], "train"),
    **dict.fromkeys(["valid", "validation", "val", "dev"], "validation"),
    **dict.fromkeys(["test", "eval"], "test"),
}
SURE = {"train", "valid", "validation"}


def patterns(given: str | Sequence[str] | None) -> list[str] | None:
    """One pattern or several as a list."""
    return [given] if isinstance(given, str) else given if given is None else list(given)


def fits(name: str, patterns: Sequence[str]) -> bool:
    """Whether a file's name fits a pattern, or lies in a folder whose name does."""
    return any(fnmatch.fnmatchcase(name, p) or fnmatch.fnmatchcase(name, f"{p.rstrip('/')}/*") for p in patterns)


def fraction(name: str) -> float:
    """The hash of a file's module path as a number in [0, 1), however it is packed."""
    return hashed(without_packing(name).rpartition(".")[0].replace("/", ".").removesuffix(".__init__"))


def role(name: str) -> tuple[str, str]:
    """The split that a file's name tells, by its last word that does, and that word; "train" and none otherwise."""
    *folders, file = without_packing(name).lower().split("/")
    stem, _, kind = file.rpartition(".")
    words = [*folders, *re.findall("[a-z]+", stem)]
    known = [word for word in words if word in ROLES and kind != "py"]
    return (ROLES[known[-1]], known[-1]) if known else ("train", "")


def hashed(text: str) -> float:
    """The SHA-256 of a text as a number in [0, 1)."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48
