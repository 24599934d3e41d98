"""The words of RULER's samples and the other choices about them: the benchmark's own, or short ones.

The short template is for small models and short contexts. Results name every choice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from gsm.data.haystack import Haystack, Keys, open_haystack, open_keys


@dataclass(frozen=True)
class Wording:
    """The words around a context.

    Attributes:
        question: has `{context}`.
        prefix: the text before the answer, without the blank between them.
        new_tokens: tokens kept free for the answer.
    """

    question: str
    prefix: str
    new_tokens: int


@dataclass(frozen=True)
class Template:
    """The words of all tasks, and the sizes of their needles and words.

    Attributes:
        name: of the template in results.
        needle: has `{types}` (numbers or uuids) or `{type}`, `{key}` and `{value}`.
        one: asks for one value; has `{type}` and `{key}`.
        many: asks for several; has `{types}` and `{key}`.
        variables: asks for the variables with a value; has `{value}` and `{count}`.
        common: asks for the most common words; has `{count}`.
        frequent: asks for the three most frequent coded words.
        digits: of a number.
        letters: of a variable's name, of one in the example before the question, of a coded word.
        words: number of common words.
        examples: whether tasks with an example before the question have it.
        increment: words (or lines) by which a haystack shrinks for a sample that is too long; None: the benchmark's.
    """

    name: str
    needle: str
    one: Wording
    many: Wording
    variables: Wording
    common: Wording
    frequent: Wording
    digits: int = 7
    letters: tuple[int, int, int] = (5, 3, 6)
    words: int = 10
    examples: bool = True
    increment: int | None = None


TEMPLATES = {
    "ruler": Template(
        "ruler",
        needle="One of the special magic {types} for {key} is: {value}.",
        one=Wording(
            "A special magic {type} is hidden within the following text. Make sure to memorize it. I will quiz you "
            "about the {type} afterwards.\n{context}\nWhat is the special magic {type} for {key} mentioned in the "
            "provided text?",
            " The special magic {type} for {key} mentioned in the provided text is",
            128,
        ),
        many=Wording(
            "Some special magic {types} are hidden within the following text. Make sure to memorize it. I will quiz "
            "you about the {types} afterwards.\n{context}\nWhat are all the special magic {types} for {key} mentioned "
            "in the provided text?",
            " The special magic {types} for {key} mentioned in the provided text are",
            128,
        ),
        variables=Wording(
            "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
            "Question: Find all variables that are assigned the value {value} in the text above.",
            " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are "
            "assigned the value {value}, they are: ",
            30,
        ),
        common=Wording(
            "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
            "that appear most often.\n{context}\nQuestion: What are the {count} most common words in the above list?",
            " Answer: The top {count} words that appear most often in the list are:",
            120,
        ),
        frequent=Wording(
            "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
            "appeared coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
            "What are the three most frequently appeared words in the above coded text?",
            " Answer: According to the coded text above, the three most frequently appeared words are:",
            50,
        ),
    ),
    "short": Template(
        "short",
        needle="The {type} of {key} is {value}.",
        one=Wording("{context}\nWhat is the {type} of {key}?", " The {type} of {key} is", 64),
        many=Wording("{context}\nWhat are the {types} of {key}?", " The {types} of {key} are", 64),
        variables=Wording("{context}\nWhich {count} variables are {value}?", " They are", 32),
        common=Wording("{context}\nWhich {count} words are most common?", " They are", 32),
        frequent=Wording("{context}\nWhich three words are most frequent?", " They are", 32),
        digits=2,
        letters=(2, 2, 2),
        words=3,
        examples=False,
        increment=1,
    ),
}


@dataclass(frozen=True)
class Ingredients:
    """The ingredients of samples.

    Attributes:
        template: the words around everything.
        haystack: running text.
        keys: words for keys.
        digits, increment: as in `Template`; None: the template's.
        new_tokens: tokens kept free for an answer; None: the number of the task's words.

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
            if getattr(self, name) is None and name != "new_tokens":
                object.__setattr__(self, name, getattr(self.template, name))
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise ValueError(f"{name} {getattr(self, name)} is too small; take at least {least}")
        if len(self.keys) < 4:
            raise ValueError(f"the keys {self.keys.name} are {len(self.keys)}, and niah_multikey_1 needs 4 in a sample")

    @cached_property
    def words(self) -> list[str]:
        """Different words to count: those of the keys, then those of the haystack, in lower case."""
        key_words = [*self.keys.nouns, *self.keys.adjectives]
        text_words = sorted({word.lower() for word in self.haystack.words if word.isalpha() and len(word) > 2})
        return list(dict.fromkeys([*key_words, *text_words]))

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
        """Build them from names; see `TEMPLATES`, `open_haystack` and `open_keys`. Raise as they do, and ValueError."""
        if template not in TEMPLATES:
            raise ValueError(f"unknown template {template!r}; the known ones are {', '.join(TEMPLATES)}")
        return cls(TEMPLATES[template], open_haystack(haystack, text_field), open_keys(keys, words), **numbers)

    def facts(self) -> dict[str, str | int | None]:
        """Return the choices for the settings of a result."""
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
