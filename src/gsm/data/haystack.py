"""The parts of RULER's samples: text to hide needles in, its sentences, and words for keys.

The benchmark takes essays that are under copyright and word lists of a package. Both may be given. The defaults are on
every machine, and results repeat their names: numbers measured with them compare with one another, not with published
ones.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from importlib import import_module, resources
from pathlib import Path
from typing import Any

from gsm.data.reading import SUFFIXES, is_text, needed, read_pieces
from gsm.files import read_text

# A sentence ends with one of .!? and perhaps a closing mark, before a blank and the begin of another one.
BORDER = re.compile(r"""(?:(?<=[.!?])|(?<=[.!?]["')\]]))\s(?=["'(\[]?[A-Z0-9])""")
LISTS = {"adjectives": "adjectivelist.txt", "nouns": "nounlist.txt"}  # as the package wonderwords calls them

ADJECTIVES = (
    "amber ancient brave bright calm careful clever cold crisp distant dusty early fancy foggy gentle golden happy "
    "hidden humble icy jolly late lively lucky misty narrow noble polite quiet rapid silver wooden"
).split()
NOUNS = (
    "anchor barrel basket bridge button candle canyon carpet castle cottage desert engine feather forest garden hammer "
    "harbor island kettle ladder lantern market meadow mirror mountain needle orchard pencil river saddle teapot window"
).split()


class Haystack:
    """The words of a text. After the last word comes the first again.

    Args:
        text: of any length, but not empty.
        name: of the haystack in results.

    Raises:
        ValueError: the text has no words.
    """

    def __init__(self, text: str, name: str) -> None:
        self.words, self.name = text.split(), name
        if not self.words:
            raise ValueError(f"the haystack {name} has no words; give a file or a folder with text")
        split, self.splitter = sentence_splitter()
        self.sentences: Callable[[int], list[str]] = lru_cache(8)(lambda count: split(self.first(count)))

    @cached_property
    def digest(self) -> str:
        """The beginning of the SHA-256 of all words."""
        return hashlib.sha256(" ".join(self.words).encode()).hexdigest()[:12]

    def first(self, count: int) -> str:
        """Return the first `count` words, one blank between two of them."""
        repeats = -(-count // len(self.words))
        return " ".join((self.words * repeats)[:count])


class Keys(Sequence[str]):
    """All pairs `adjective-noun` of two lists, without spelling them out.

    Args:
        adjectives, nouns: the lists; a repeated word counts once.
        name: of the keys in results.
        words: number of adjectives and of nouns, the first ones; None: all.
    """

    def __init__(self, adjectives: Sequence[str], nouns: Sequence[str], name: str, words: int | None = None) -> None:
        self.adjectives, self.nouns = (list(dict.fromkeys(some))[:words] for some in (adjectives, nouns))
        self.name = name if words is None else f"{name}, {words} adjectives and {words} nouns"

    def __len__(self) -> int:
        return len(self.adjectives) * len(self.nouns)

    def __getitem__(self, index: int) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]  # no slices
        if not 0 <= index < len(self):
            raise IndexError(f"key {index} does not exist; there are {len(self)}")
        adjective, noun = divmod(index, len(self.nouns))
        return f"{self.adjectives[adjective]}-{self.nouns[noun]}"


def open_haystack(source: str = "python", field: str = "text") -> Haystack:
    """Return text to hide needles in, for `niah_single_2` and `niah_multikey_1`.

    Args:
        source: "python", the prose of the language reference that comes with the interpreter (65,000 words in 3.11); or
            the path of essays: a file or a folder of .txt, .md or .jsonl (also .gz, .xz, .zst), or the benchmark's own
            .json with all of them in one field.
        field: the field of JSON that holds the text.

    Raises:
        FileNotFoundError: there is nothing at that path.
        ValueError: a file is damaged, or a line (named) lacks the field; or there is no text.
    """
    if source == "python":
        return Haystack(" ".join(_reference()), "python's language reference")
    path = Path(source)
    if not (path.is_dir() or path.is_file()):
        raise FileNotFoundError(f"haystack {source} is neither 'python' nor a file or a folder; give one that is there")
    if path.suffix == ".json":
        return Haystack(str(_field(path, field)), path.name)
    if path.is_file() and not is_text(path.name):
        raise ValueError(f"haystack {source} is no file of text ({', '.join(SUFFIXES)}, .json); convert it")
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if is_text(file.name))
    return Haystack(" ".join(piece.text for file in files for piece in read_pieces(file, field)), path.name)


def open_keys(source: str = "builtin", words: int | None = None) -> Keys:
    """Return words for keys.

    Args:
        source: "builtin", 32 adjectives and 32 nouns; "wonderwords", the lists of that package, as in the benchmark; or
            the path of a JSON file with `adjectives` and `nouns`.
        words: as in `Keys`.

    Raises:
        FileNotFoundError: there is no such file.
        ModuleNotFoundError: the package is not installed.
        ValueError: a list is missing or empty, or `words` is below 2.
    """
    if words is not None and words < 2:
        raise ValueError(f"words {words} is too small; take at least 2 adjectives and 2 nouns")
    if source == "builtin":
        return Keys(ADJECTIVES, NOUNS, source, words)
    lists = _package_lists() if source == "wonderwords" else {name: list(_field(Path(source), name)) for name in LISTS}
    for name, entries in lists.items():
        if not entries:
            raise ValueError(f"the {name} of {source} are empty; give a list of words")
    return Keys(lists["adjectives"], lists["nouns"], source if source == "wonderwords" else Path(source).name, words)


def sentence_splitter() -> tuple[Callable[[str], list[str]], str]:
    """Return a function that cuts a text into sentences, and its name.

    It is nltk's "punkt", as in the benchmark, if the package and its data are installed. Else it is "rule": a border
    after . ! or ? (and a closing mark) before a capital or a digit.
    """
    try:
        split = import_module("nltk.tokenize").sent_tokenize
        split("One. Two.")
    except (ImportError, LookupError):  # the package, or its data
        return BORDER.split, "rule"
    return split, "punkt"


def _reference() -> Iterator[str]:
    """Yield the words of the language reference, without the lines that underline its headings."""
    topics = import_module("pydoc_data.topics").topics
    return (word for name in sorted(topics) for word in topics[name].split() if any(map(str.isalnum, word)))


def _package_lists() -> dict[str, list[str]]:
    needed("wonderwords", "wonderwords", "keys of wonderwords", extra="eval")
    assets = resources.files("wonderwords") / "assets"
    texts = {name: (assets / file).read_text(encoding="utf-8") for name, file in LISTS.items()}
    return {name: [line.rstrip() for line in text.splitlines() if line.strip()] for name, text in texts.items()}


def _field(path: Path, field: str) -> Any:
    try:
        content = json.loads(read_text(path))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error})") from error
    if not isinstance(content, dict) or field not in content:
        raise ValueError(f"{path} has no field {field!r}; it has to be an object with that field")
    return content[field]
