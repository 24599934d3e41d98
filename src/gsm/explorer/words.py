"""What tokens are called on the page: pieces of text, keys and values of a task, or plain numbers. T tokens."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gsm.data.recall import Alphabet, Task
from gsm.data.tokenizer import Tokenizer
from gsm.models.checks import IGNORED

# One letter for each way to show a token.
TEXT, PIECE, END, KEY, VALUE, FILLER, NUMBER = "tpekvfn"


class Word(NamedTuple):
    """A token as it is shown: its text, and which way."""

    text: str
    kind: str


@dataclass(frozen=True)
class Question:
    """Where a key is asked for, where it was told, and where the answer is due; positions."""

    key: int
    told: int
    row: int


def of_text(tokenizer: Tokenizer, ids: Sequence[int]) -> list[Word]:
    """The text of each token. A character of several tokens stands at the last of them, the others are empty pieces."""
    decoder, words = tokenizer.stream(), []
    for token in ids:
        text = decoder.push(token)
        if token == tokenizer.end_of_text:
            words.append(Word(text + "end of text", END))
        else:
            words.append(Word(visible(text), TEXT if text else PIECE))
    if (rest := decoder.finish()) and words:
        words[-1] = Word(words[-1].text + rest, TEXT)
    return words


def of_id(named: Tokenizer | Task | None, token: int) -> Word:
    """A token alone, out of any text."""
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


def words_of(named: Tokenizer | Task | None, ids: Sequence[int]) -> list[Word]:
    """Every token of a text, or of a sequence of a task; without either, their numbers."""
    return of_text(named, ids) if isinstance(named, Tokenizer) else [of_id(named, token) for token in ids]


def visible(text: str) -> str:
    """The text with characters that would hide, move or reorder others written out: controls as their pictures, marks
    of direction and breaks of lines other than a newline by their numbers."""
    return "".join(map(_shown, text))


def _shown(character: str) -> str:
    code = ord(character)
    if character in "\n\t" or 0x20 <= code < 0x7F:
        return character
    if code < 0x20:
        return chr(0x2400 + code)
    hides = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and code not in (0x200C, 0x200D)
    return f"‹U+{code:04X}›" if hides else character


def questions_of(task: Task, token_T: Tensor) -> list[Question]:
    """The questions of a sequence of ``gsm.data.recall``: keys that come a second time. Empty for other tasks."""
    if not isinstance(task, Alphabet):
        return []
    told, found, wait = {}, [], getattr(task, "wait", 0)
    for place, token in enumerate(token_T.tolist()):
        if token < task.keys and token in told and place + wait < len(token_T):
            found.append(Question(place, told[token], place + wait))
        elif token < task.keys:
            told[token] = place
    return found


def targets_of(questions: Sequence[Question], token_T: Tensor) -> Tensor:
    """What questions ask for, int64 [T], -100 elsewhere: the value behind each key, where its answer is due."""
    target_T = torch.full_like(token_T, IGNORED)
    for one in questions:
        target_T[one.row] = token_T[one.told + 1]
    return target_T
