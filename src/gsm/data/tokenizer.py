"""Text to token ids and back: a byte-level BPE trained on the corpus, plain bytes, or a tokenizer.json. V vocabulary.

All kinds end every document with one end of text, and never produce that id from text that spells it. A checkpoint
carries `to_state`, so that generation needs nothing else.

Bits per byte count the bytes of the text. They are the bytes of its tokens, `token_lengths_V`, unless a normalizer
changes the text: `gsm.data.module.TextData.token_bytes_V` then scales these to the bytes of the text.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from gsm.data.description import mark_end, opened, read_description
from gsm.data.reading import utf8
from gsm.data.spelling import UNKNOWN, is_byte_level, keeps_borders, spell
from gsm.errors import ConfigError

if TYPE_CHECKING:
    import tokenizers

KINDS = ("bpe", "bytes", "file")  # the last one is made by from_file alone
END_OF_TEXT = "<|endoftext|>"
SMALLEST = 257  # 256 bytes and the end of text
PART = 1 << 16  # characters that the library gets at a time: it takes some two hundred bytes for each
# Places that no token reaches across: those of GPT-2's pieces, and of any byte-level tokenizer's.
BORDER, BLANK = re.compile(r"(?<=\S)[ \n]"), re.compile(r"(?<=\S) ")
LONGEST = 1024  # bytes of a piece that merges may not cross: the library takes the square of its length


class Tokenizer:
    """A tokenizer of one of `KINDS`; made by `train`, `plain_bytes`, `from_file` or `from_state`.

    Attributes:
        kind: "bpe", "bytes" or "file".
        vocabulary: number of ids, `end_of_text` included.
        end_of_text: the id that closes a document.
    """

    def __init__(self, bpe: tokenizers.Tokenizer | None, kind: str = "bpe", end: str = END_OF_TEXT) -> None:
        self._bpe, self._end = bpe, end
        self.kind = "bytes" if bpe is None else kind
        self.vocabulary = SMALLEST if bpe is None else max(bpe.get_vocab().values(), default=-1) + 1
        token = SMALLEST - 1 if bpe is None else bpe.token_to_id(end)
        if token is None:
            raise ValueError(f"the tokenizer has no {end} token; train it with one, as Tokenizer.train does")
        self.end_of_text: int = token

    @classmethod
    def train(cls, texts: Iterable[str], vocabulary: int) -> Tokenizer:
        """Train a byte-level BPE of at most `vocabulary` ids; a short text gives fewer.

        Merges do not cross the pieces of GPT-2. Ctrl-C is heard after the training.

        Raises:
            ValueError: `vocabulary` is below 257.
        """
        require_vocabulary("bpe", vocabulary)
        return cls(opened(_learn(texts, vocabulary, END_OF_TEXT), "its training"))

    @classmethod
    def plain_bytes(cls) -> Tokenizer:
        """Return a tokenizer with an id for every byte, and 256 for the end of text."""
        return cls(None)

    @classmethod
    def from_file(cls, path: str, end_of_text: str | None = None) -> Tokenizer:
        """Read a Hugging Face tokenizer.json (also .xz or .gz), or the one in a folder.

        Args:
            path: the file or the folder.
            end_of_text: the token that ends a document; None: `<|endoftext|>`, `</s>` or another usual one.

        Raises:
            FileNotFoundError: there is no such file.
            ConfigError: it cannot be read, is not byte-level, or has no end of text.
        """
        return cls._of_file(read_description(path), path, end_of_text)

    @classmethod
    def _of_file(cls, text: str, where: str, end_of_text: str | None) -> Tokenizer:
        read = opened(text, where)
        if not is_byte_level(read):
            raise ConfigError(
                f"tokenizer must be byte-level, as that of GPT-2, Llama 3, DeepSeek or Qwen, and not SentencePiece's, "
                f"got {where}"
            )
        return cls(read, "file", mark_end(read, end_of_text))

    @classmethod
    def from_state(cls, state: dict[str, str | None]) -> Tokenizer:
        """Build the tokenizer of a state of `to_state`.

        Raises:
            ConfigError: the kind is unknown, or the description of a BPE is missing or damaged.
        """
        require_kind(state.get("kind"))
        if state["kind"] == "bytes":
            return cls.plain_bytes()
        text, where = state.get("json") or "", "the state of a tokenizer"
        return (
            cls._of_file(text, where, state.get("end_of_text")) if state["kind"] == "file" else cls(opened(text, where))
        )

    def to_state(self) -> dict[str, str | None]:
        """Return plain strings for `from_state`: `{"kind": ..., "json": ...}`; no json for bytes."""
        state = {"kind": self.kind, "json": None if self._bpe is None else self._bpe.to_str()}
        return {**state, "end_of_text": self._end} if self.kind == "file" else state

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the state, in hexadecimal."""
        return hashlib.sha256(json.dumps(self.to_state(), sort_keys=True).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without an end of text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of many texts. A BPE works on them in parallel."""
        if self._bpe is None:
            return [list(utf8(text).encode()) for text in texts]
        return [row.ids for row in self._bpe.encode_batch_fast(list(map(utf8, texts)), add_special_tokens=False)]

    def parts(self, text: str) -> Iterator[str]:
        """Yield a text in parts whose ids, one after another, are those of the text."""
        if self._bpe and self.kind == "file":
            return _parts(text, BLANK) if keeps_borders(self._bpe) else iter([text])
        return _parts(text)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of some ids. Broken UTF-8 becomes U+FFFD, an end of text becomes nothing, as in `stream`."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def stream(self) -> StreamDecoder:
        """Return a decoder that takes one id at a time."""
        return StreamDecoder(self)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that an id stands for. A model's padding id beyond the vocabulary stands for U+FFFD.

        Raises:
            ValueError: the id is negative.
        """
        if token < 0:
            raise ValueError(f"token must be at least 0, got {token}")
        return self._spelling[token] if token < self.vocabulary else UNKNOWN

    @cached_property
    def token_lengths_V(self) -> np.ndarray:
        """The bytes that each id stands for, int64 [V]; 0 for the end of text."""
        return np.array([len(piece) for piece in self._spelling], dtype=np.int64)

    def require_fit(self, vocabulary: int) -> None:
        """Raise ValueError for a model with fewer ids than this tokenizer."""
        if self.vocabulary > vocabulary:
            raise ValueError(
                f"size.vocabulary must be at least {self.vocabulary}, the tokenizer's ids, got {vocabulary}"
            )

    @cached_property
    def _spelling(self) -> list[bytes]:
        if self._bpe is None:
            return [bytes([value]) for value in range(256)] + [b""]
        return spell(self._bpe, self.vocabulary)


class StreamDecoder:
    """Decode ids one by one. Bytes of an unfinished character wait for the next id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Return the text that this id completes, possibly none."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """Return U+FFFD for an unfinished last character, else nothing."""
        return self._decoder.decode(b"", final=True)


def require_kind(kind: str | None) -> None:
    """Raise ConfigError for a `kind` that is not one of `KINDS`."""
    if kind not in KINDS:
        raise ConfigError(f"tokenizer must be bpe, bytes or the path of a tokenizer.json, got {kind}")


def require_vocabulary(kind: str, vocabulary: int) -> None:
    """Raise ValueError if no tokenizer of this kind fits into `vocabulary` ids."""
    if vocabulary < SMALLEST:
        raise ValueError(f"size.vocabulary must be at least {SMALLEST} with tokenizer={kind}, got {vocabulary}")


def _parts(text: str, border: re.Pattern[str] = BORDER) -> Iterator[str]:
    start = 0
    while found := border.search(text, start + PART):
        yield text[start : found.start()]
        start = found.start()
    yield text[start:]


def _learn(texts: Iterable[str], vocabulary: int, end: str) -> str:
    """Return the description (tokenizer.json) of a byte-level BPE of at most ``vocabulary`` ids. Id 0 is ``end``.

    The longest pieces of GPT-2 are cut. No ordinary text has a piece of that length.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    bpe = tokenizers.Tokenizer(models.BPE())
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pieces, pre_tokenizers.FixedLength(length=LONGEST)])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[end], initial_alphabet=pieces.alphabet(), show_progress=False
    )
    bpe.train_from_iterator((part for text in texts for part in _parts(text)), trainer)
    bpe.pre_tokenizer = pieces
    return bpe.to_str()
