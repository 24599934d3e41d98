"""The words of RULER's samples, and what else may be chosen about them: the benchmark's own, or short ones.

The short template is for small models and short contexts; results name it, as they do whatever else is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gsm.data.haystack import Haystack, Keys, open_haystack, open_keys


@dataclass(frozen=True)
class Template:
    """The words around key, number and haystack.

    Attributes:
        name: what results call it.
        needle: has `{key}` and `{value}`.
        question: has `{context}` and `{key}`.
        prefix: has `{key}`; the answer follows it, after a blank.
        digits: of a number.
        new_tokens: kept free for the answer.
        increment: words (or lines) by which a haystack shrinks for a sample that is too long; None: the benchmark's.
    """

    name: str
    needle: str
    question: str
    prefix: str
    digits: int = 7
    new_tokens: int = 128
    increment: int | None = None


TEMPLATES = {
    "ruler": Template(
        "ruler",
        needle="One of the special magic numbers for {key} is: {value}.",
        question="A special magic number is hidden within the following text. Make sure to memorize it. I will quiz "
        "you about the number afterwards.\n{context}\nWhat is the special magic number for {key} mentioned in the "
        "provided text?",
        prefix=" The special magic number for {key} mentioned in the provided text is",
    ),
    "short": Template(
        "short",
        needle="The number of {key} is {value}.",
        question="{context}\nWhat is the number of {key}?",
        prefix=" The number of {key} is",
        digits=2,
        new_tokens=64,
        increment=1,
    ),
}


@dataclass(frozen=True)
class Ingredients:
    """What samples are made of.

    Attributes:
        template: the words around everything.
        haystack: running text.
        keys: words for keys.
        digits, new_tokens, increment: as in `Template`; None: the template's.

    Raises:
        ValueError: a number is out of range, or there are fewer than 4 keys.
    """

    template: Template = TEMPLATES["ruler"]
    haystack: Haystack = field(default_factory=open_haystack)
    keys: Keys = field(default_factory=open_keys)
    digits: int | None = None
    new_tokens: int | None = None
    increment: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("digits", 2), ("new_tokens", 1), ("increment", 1)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(self.template, name))
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise ValueError(f"{name} {getattr(self, name)} is too small; take at least {least}")
        if len(self.keys) < 4:
            raise ValueError(f"the keys {self.keys.name} are {len(self.keys)}, and niah_multikey_1 needs 4 in a sample")

    @classmethod
    def choose(
        cls,
        template: str = "ruler",
        haystack: str = "python",
        keys: str = "builtin",
        words: int | None = None,
        text_field: str = "text",
        **numbers: int | None,
    ) -> Ingredients:
        """The same from names; see `TEMPLATES`, `open_haystack` and `open_keys`. Raises as they do, and ValueError."""
        if template not in TEMPLATES:
            raise ValueError(f"unknown template {template!r}; the known ones are {', '.join(TEMPLATES)}")
        return cls(TEMPLATES[template], open_haystack(haystack, text_field), open_keys(keys, words), **numbers)

    def facts(self) -> dict[str, str | int | None]:
        """What results say of them."""
        numbers = {name: getattr(self, name) for name in ("digits", "new_tokens", "increment")}
        return {
            "template": self.template.name,
            "haystack": self.haystack.name,
            "haystack_digest": self.haystack.digest,
            "sentences": self.haystack.splitter,
            "keys": self.keys.name,
            "different_keys": len(self.keys),
            **numbers,
        }
