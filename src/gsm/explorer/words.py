"""The texts of tokens on the page: pieces of text, keys and values of a task, or plain numbers."""

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
    """A token on the page: its text, and the letter of its display."""

    text: str
    kind: str


@dataclass(frozen=True)
class Question:
    """The positions of a question in its sequence.

    Attributes:
        key: position of the question, a key.
        needle: position where the key was given, with its value after it.
        row: position where the answer is predicted.
    """

    key: int
    needle: int
    row: int


def tokens(named: LanguageModel | Tokenizer | Task | None, source: str | Tensor | Sequence[int]) -> list[str]:
    """Return the text of every token, for example for the axis of a figure.

        gsm.tokens(model, "def f(x):")                    # ["def", " f", "(", "x", "):"]
        gsm.tokens(data.task, token_T)                    # ["K8", "V3", "12", ...]

    Args:
        named: a tokenizer, a model with a tokenizer, or a synthetic task; None, or a model without a tokenizer: the
            tokens become plain numbers.
        source: a text, or token ids [T]. If a character takes several tokens, it is the text of the last one, and the
            others are empty.

    Raises:
        ValueError: ``source`` is a text, and there is no tokenizer.
    """
    namer = named.tokenizer if isinstance(named, LanguageModel) else named
    if not isinstance(source, str):
        ids = source.tolist() if isinstance(source, Tensor) else list(source)
    elif isinstance(namer, Tokenizer):
        ids = namer.encode(source)
    else:
        raise ValueError(f"source must be token ids without a tokenizer, got {source!r:.40}")
    return [word.text for word in words_of(namer, ids)]


def words_of(named: Tokenizer | Task | None, ids: Sequence[int]) -> list[Word]:
    """Return the words of token ids: by a tokenizer, by a task, or with None as plain numbers.

    If a character takes several tokens, it is the text of the last one, and the others are empty.
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
    """Return the word of a single token, without its context."""
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
    """Return the text with invisible characters, and those that reorder others, replaced by visible ones.

    ASCII control characters become their Unicode pictures; other controls, direction marks and line separators become
    their code points. Newlines and tabs stay.
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
    """Return the questions of a sequence of ``gsm.data.recall``, which are keys that occur again; empty for texts and
    other tasks."""
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
    """Return the targets of questions, int64 [T]: at the row of each question the value of its key, elsewhere -100."""
    target_T = torch.full_like(token_T, IGNORED)
    for question in questions:
        target_T[question.row] = token_T[question.needle + 1]
    return target_T
