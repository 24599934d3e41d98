"""The texts of tokens on the page: pieces of text, keys and values of a task, or plain numbers. T tokens."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gsm.data.recall import Alphabet, Task
from gsm.data.tokenizer import Tokenizer
from gsm.models.base import LanguageModel
from gsm.models.checks import IGNORED

# One letter for each way to show a token.
TEXT, PIECE, END, KEY, VALUE, FILLER, NUMBER = "tpekvfn"


class Word(NamedTuple):
    """A token on the page: its text, and its kind of display."""

    text: str
    kind: str


@dataclass(frozen=True)
class Question:
    """Positions of a question.

    Attributes:
        key: where the key is asked.
        needle: where the key and its value were given.
        row: where the answer is due.
    """

    key: int
    needle: int
    row: int


def tokens(named: LanguageModel | Tokenizer | Task | None, source: str | Tensor | Sequence[int]) -> list[str]:
    """Return the text of every token, e.g. for the axis of a figure.

        gsm.tokens(model, "def f(x):")                    # ["def", " f", "(", "x", "):"]
        gsm.tokens(data.task, token_T)                    # ["K8", "V3", "12", ...]

    Args:
        named: names the tokens: a model with a tokenizer, a tokenizer, or a synthetic task; None, or a model without a
            tokenizer: plain numbers.
        source: a text, or the ids of a sequence, [T]. A character of several tokens is at the last of them; the others
            are empty.

    Raises:
        ValueError: a text, and no tokenizer.
    """
    namer = named.tokenizer if isinstance(named, LanguageModel) else named
    if not isinstance(source, str):
        ids = source.tolist() if isinstance(source, Tensor) else list(source)
    elif isinstance(namer, Tokenizer):
        ids = namer.encode(source)
    else:
        raise ValueError(f"source must be ids, as nothing here has a tokenizer, got {source!r:.40}")
    return [word.text for word in words_of(namer, ids)]


def words_of(named: Tokenizer | Task | None, ids: Sequence[int]) -> list[Word]:
    """Return every token of a text, or of a sequence of a task; with neither, as numbers.

    A character of several tokens of a text is at the last of them; the others are empty.
    """
    if not isinstance(named, Tokenizer):
        return [of_id(named, token) for token in ids]
    decoder, words = named.stream(), []
    for token in ids:
        text = decoder.push(token)
        if token == named.end_of_text:
            words.append(Word(text + "end of text", END))
        else:
            words.append(Word(visible(text), TEXT if text else PIECE))
    if (rest := decoder.finish()) and words:
        words[-1] = Word(words[-1].text + rest, TEXT)
    return words


def of_id(named: Tokenizer | Task | None, token: int) -> Word:
    """Return the text of a single token without context."""
    if isinstance(named, Tokenizer):
        if token == named.end_of_text:
            return Word("end of text", END)
        return Word(visible(named.token_bytes(token).decode(errors="replace")), TEXT)
    if not isinstance(named, Alphabet) or token >= named.vocabulary:
        return Word(str(token), NUMBER)
    if token < named.keys:
        return Word(f"K{token}", KEY)
    if token < named.keys + named.values:
        return Word(f"V{token - named.keys}", VALUE)
    return Word(str(token - named.keys - named.values), FILLER)


def visible(text: str) -> str:
    """Return the text with visible replacements of characters that hide, move or reorder others.

    Controls become their pictures; direction marks and line breaks other than a newline become their code points.
    """
    return "".join(map(_visible, text))


def _visible(character: str) -> str:
    code = ord(character)
    if character in "\n\t" or 0x20 <= code < 0x7F:
        return character
    if code < 0x20:
        return chr(0x2400 + code)
    hides = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and code not in (0x200C, 0x200D)
    return f"‹U+{code:04X}›" if hides else character


def questions_of(named: Tokenizer | Task | None, token_T: Tensor) -> list[Question]:
    """Return the questions of a sequence of ``gsm.data.recall``: keys that occur again. Empty for texts and other
    tasks."""
    if not isinstance(named, Alphabet):
        return []
    needles, questions, wait = {}, [], named.wait
    for place, token in enumerate(token_T.tolist()):
        if token < named.keys and token in needles and place + wait < len(token_T):
            questions.append(Question(place, needles[token], place + wait))
        elif token < named.keys:
            needles[token] = place
    return questions


def targets_of(questions: Sequence[Question], token_T: Tensor) -> Tensor:
    """Return the answers to questions, int64 [T], -100 elsewhere: the value after each key, where its answer is due."""
    target_T = torch.full_like(token_T, IGNORED)
    for question in questions:
        target_T[question.row] = token_T[question.needle + 1]
    return target_T
