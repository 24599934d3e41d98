"""The parts of RULER's samples: the words around everything, text to hide needles in, its sentences, words for keys.

The benchmark takes essays that are under copyright and word lists of a package. Both may be chosen. The defaults are on
every machine, and the short template is for small models and short contexts. A rule cuts sentences, where the benchmark
takes nltk's punkt. Results name every choice: numbers measured with the defaults compare with one another, not with
published ones.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import import_module, resources
from pathlib import Path
from typing import Any

from gsm.data.reading import SUFFIXES, is_text, needed, read_pieces
from gsm.errors import within
from gsm.files import read_text

# A sentence ends with one of .!? and perhaps a closing mark, before a blank and the begin of another one.
BORDER = re.compile(r"""(?:(?<=[.!?])|(?<=[.!?]["')\]]))\s(?=["'(\[]?[A-Z0-9])""")

ADJECTIVES = (
    "amber ancient brave bright calm careful clever cold crisp distant dusty early fancy foggy gentle golden happy "
    "hidden humble icy jolly late lively lucky misty narrow noble polite quiet rapid silver wooden"
).split()
NOUNS = (
    "anchor barrel basket bridge button candle canyon carpet castle cottage desert engine feather forest garden hammer "
    "harbor island kettle ladder lantern market meadow mirror mountain needle orchard pencil river saddle teapot window"
).split()


@dataclass(frozen=True)
class Template:
    """The words around a context, and the sizes of its needles.

    Attributes:
        name: of the template in results.
        needle: has `{key}` and `{value}`.
        question: has `{context}` and `{key}`.
        prefix: the text before the answer, without the blank between them; has `{key}`.
        new_tokens: tokens kept free for the answer.
        digits: of a number.
        increment: words (or lines) by which a haystack shrinks for a sample that is too long; None: the benchmark's.
    """

    name: str
    needle: str
    question: str
    prefix: str
    new_tokens: int
    digits: int
    increment: int | None


TEMPLATES = {
    "ruler": Template(
        name="ruler",
        needle="One of the special magic numbers for {key} is: {value}.",
        question="A special magic number is hidden within the following text. Make sure to memorize it. I will quiz "
        "you about the number afterwards.\n{context}\nWhat is the special magic number for {key} mentioned in the "
        "provided text?",
        prefix=" The special magic number for {key} mentioned in the provided text is",
        new_tokens=128,
        digits=7,
        increment=None,
    ),
    "short": Template(
        name="short",
        needle="The number of {key} is {value}.",
        question="{context}\nWhat is the number of {key}?",
        prefix=" The number of {key} is",
        new_tokens=64,
        digits=2,
        increment=1,
    ),
}


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
            raise ValueError(f"haystack must have words, got none in {name}")
        self.sentences: Callable[[int], list[str]] = lru_cache(8)(lambda count: BORDER.split(self.first(count)))

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


@dataclass(frozen=True)
class Ingredients:
    """The ingredients of samples.

    Attributes:
        template: the words around everything.
        haystack: running text.
        keys: words for keys.
        new_tokens: tokens kept free for an answer; None: the template's number.

    Raises:
        ValueError: `new_tokens` is below 1, or there are fewer than 4 keys.
    """

    template: Template
    haystack: Haystack
    keys: Keys
    new_tokens: int | None = None

    def __post_init__(self) -> None:
        within(1, new_tokens=self.new_tokens)
        if len(self.keys) < 4:
            raise ValueError(f"keys must be at least 4, as many as niah_multikey_1 draws, got {len(self.keys)}")

    def needle(self, key: str, value: str) -> str:
        """Return the sentence that gives a number to a key."""
        return self.template.needle.format(key=key, value=value)

    @classmethod
    def choose(
        cls,
        template: str = "ruler",
        haystack: str = "python",
        keys: str = "builtin",
        words: int | None = None,
        text_field: str = "text",
        new_tokens: int | None = None,
    ) -> Ingredients:
        """Build ingredients from names of `TEMPLATES`, and arguments of `open_haystack` and `open_keys`.

        Raises ValueError for an unknown template, and as these functions do.
        """
        if template not in TEMPLATES:
            raise ValueError(f"template must be {' or '.join(TEMPLATES)}, got {template}")
        return cls(TEMPLATES[template], open_haystack(haystack, text_field), open_keys(keys, words), new_tokens)

    def facts(self) -> dict[str, str | int | None]:
        """Return the choices for the settings of a result."""
        return {
            "template": self.template.name,
            "haystack": self.haystack.name,
            "haystack_digest": self.haystack.digest,
            "sentences": "rule",  # runs of before had nltk's, or these
            "keys": self.keys.name,
            "different_keys": len(self.keys),
            "digits": self.template.digits,
            "new_tokens": self.new_tokens,
            "increment": self.template.increment,
        }


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
        raise FileNotFoundError(f"haystack must be python or the path of a file or folder, got {source}")
    if path.suffix == ".json":
        return Haystack(str(_field(path, field)), path.name)
    if path.is_file() and not is_text(path.name):
        raise ValueError(f"haystack must be a folder or a file with {', '.join(SUFFIXES)} or .json, got {source}")
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if is_text(file.name))
    return Haystack(" ".join(piece.text for file in files for piece in read_pieces(file, field)), path.name)


def open_keys(source: str = "builtin", words: int | None = None) -> Keys:
    """Return words for keys.

    Args:
        source: "builtin", 32 adjectives and 32 nouns; or "wonderwords", the lists of that package, as in the benchmark.
        words: as in `Keys`.

    Raises:
        ModuleNotFoundError: the package is not installed.
        ValueError: `source` is unknown, or `words` is below 2.
    """
    within(2, words=words)
    if source == "builtin":
        return Keys(ADJECTIVES, NOUNS, source, words)
    if source != "wonderwords":
        raise ValueError(f"keys must be builtin or wonderwords, got {source}")
    needed("wonderwords", "keys of wonderwords", extra="eval")
    assets = resources.files("wonderwords") / "assets"
    texts = ((assets / name).read_text(encoding="utf-8") for name in ("adjectivelist.txt", "nounlist.txt"))
    adjectives, nouns = ([line.rstrip() for line in text.splitlines() if line.strip()] for text in texts)
    return Keys(adjectives, nouns, source, words)


def _reference() -> Iterator[str]:
    """Yield the words of the language reference, without the lines that underline its headings."""
    topics = import_module("pydoc_data.topics").topics
    return (word for name in sorted(topics) for word in topics[name].split() if any(map(str.isalnum, word)))


def _field(path: Path, field: str) -> Any:
    try:
        content = json.loads(read_text(path))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error})") from error
    if not isinstance(content, dict) or field not in content:
        raise ValueError(f"{path} has no field {field!r}; it has to be an object with that field")
    return content[field]
