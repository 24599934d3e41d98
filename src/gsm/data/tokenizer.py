"""Text to token ids and back: a byte-level BPE trained on the corpus, plain bytes, or a tokenizer.json. V vocabulary.

All kinds end every document with one end of text and never produce that id from text, even from text that spells it
out. The first two, and every byte-level tokenizer.json, spell any text exactly. `to_state` is what a checkpoint
carries, so that generation needs nothing else.

Bits per byte count bytes of the text. Where tokens spell it exactly these are the bytes of the tokens. Others add a
blank before a document, or lower its case: `token_lengths_V` is then what each token looks like, and whoever knows the
text (`gsm.data.module.TextData.token_bytes_V`) scales it to the bytes that were there.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from gsm.data.merges import learned
from gsm.data.spelling import UNKNOWN, is_byte_level, prepared, read_description, spell

if TYPE_CHECKING:
    import tokenizers

KINDS = ("bpe", "bytes", "file")  # the last one is made by from_file alone
END_OF_TEXT = "<|endoftext|>"
SMALLEST = 257  # 256 bytes and the end of text


class Tokenizer:
    """One of `KINDS`; made by `train`, `plain_bytes`, `from_file` or `from_state`.

    Attributes:
        kind: "bpe", "bytes" or "file".
        vocabulary: number of ids, `end_of_text` included.
        end_of_text: the id that closes a document.
    """

    def __init__(self, bpe: tokenizers.Tokenizer | None, kind: str = "bpe", end: str = END_OF_TEXT) -> None:
        self._bpe, self._end = bpe, end
        self.kind = "bytes" if bpe is None else kind
        self.vocabulary = SMALLEST if bpe is None else max(bpe.get_vocab().values()) + 1
        self.exact = bpe is None or is_byte_level(bpe)
        token = SMALLEST - 1 if bpe is None else bpe.token_to_id(end)
        if token is None:
            raise ValueError(f"the tokenizer has no {end} token; train it with one, as Tokenizer.train does")
        self.end_of_text: int = token
        if bpe is not None:
            bpe.encode_special_tokens = True  # so that text which spells the end of text stays text

    @classmethod
    def train(cls, texts: Iterable[str], vocabulary: int) -> Tokenizer:
        """A byte-level BPE of at most `vocabulary` ids (fewer when the text is too short to learn so many).

        The pieces that merges may not cross are GPT-2's. Ctrl-C ends it (`gsm.data.merges`).

        Raises:
            ValueError: `vocabulary` is below 257.
            ChildProcessError: the process that learns from much text ended before its time.
        """
        require_vocabulary("bpe", vocabulary)
        import tokenizers

        return cls(tokenizers.Tokenizer.from_str(learned(texts, vocabulary, END_OF_TEXT)))

    @classmethod
    def plain_bytes(cls) -> Tokenizer:
        """Every byte its own id, and 256 for the end of text."""
        return cls(None)

    @classmethod
    def from_file(cls, path: str, end_of_text: str | None = None) -> Tokenizer:
        """The tokenizer of a Hugging Face tokenizer.json (also .xz or .gz), or of the folder that holds one.

        Args:
            path: the file or the folder.
            end_of_text: the token that ends a document; None: `<|endoftext|>`, `</s>` or another usual one.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it cannot be read, or has no end of text.
        """
        return cls._of_file(read_description(path), end_of_text)

    @classmethod
    def _of_file(cls, text: str, end_of_text: str | None) -> Tokenizer:
        read, end = prepared(text, end_of_text)
        return cls(read, "file", end)

    @classmethod
    def from_state(cls, state: dict[str, str | None]) -> Tokenizer:
        """The tokenizer that `to_state` described.

        Raises:
            ValueError: the kind is unknown, or the description of a BPE is missing or damaged.
        """
        require_kind(state.get("kind"))
        if state["kind"] == "bytes":
            return cls.plain_bytes()
        import tokenizers

        text = state.get("json")
        try:
            described = "model" in json.loads(text or "")
        except json.JSONDecodeError:
            described = False
        if not (text and described):
            raise ValueError("the tokenizer's state has no readable 'json'; take it again from Tokenizer.to_state()")
        if state["kind"] == "file":
            return cls._of_file(text, state.get("end_of_text"))
        return cls(tokenizers.Tokenizer.from_str(text))

    def to_state(self) -> dict[str, str | None]:
        """Plain strings that `from_state` takes: `{"kind": ..., "json": ...}`; no json for bytes."""
        state = {"kind": self.kind, "json": None if self._bpe is None else self._bpe.to_str()}
        return {**state, "end_of_text": self._end} if self.kind == "file" else state

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the state, in hexadecimal."""
        return hashlib.sha256(json.dumps(self.to_state(), sort_keys=True).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without an end of text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts (a BPE works on them in parallel)."""
        if self._bpe is None:
            return [list(text.encode("utf-8", errors="replace")) for text in texts]
        return [encoding.ids for encoding in self._bpe.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids. Broken UTF-8 becomes U+FFFD, an end of text becomes nothing, as in `stream`."""
        if not self.exact:
            return self._decode_by_library(list(ids))
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def stream(self) -> StreamDecoder:
        """A decoder that takes one id at a time."""
        return StreamDecoder(self)

    def token_bytes(self, token: int) -> bytes:
        """The bytes an id stands for; a model's padding id beyond the vocabulary stands for U+FFFD.

        Raises:
            ValueError: the id is negative.
        """
        if token < 0:
            raise ValueError(f"token id {token} is negative; only ids from 0 to {self.vocabulary - 1} spell text")
        return self._spelling[token] if token < self.vocabulary else UNKNOWN

    def _decode_by_library(self, ids: list[int]) -> str:
        assert self._bpe is not None
        text, known = "", []
        for token in [*ids, None]:
            if token is not None and 0 <= token < self.vocabulary:
                known.append(token)
                continue
            text += self._bpe.decode(known)
            text += "" if token is None else self.token_bytes(token).decode()
            known = []
        return text

    @cached_property
    def token_lengths_V(self) -> np.ndarray:
        """int64 [V]: bytes that each id stands for by itself, 0 for the end of text."""
        return np.array([len(piece) for piece in self._spelling], dtype=np.int64)

    def require_fit(self, vocabulary: int) -> None:
        """Raises ValueError when a model with `vocabulary` ids cannot hold this tokenizer's."""
        if self.vocabulary > vocabulary:
            raise ValueError(
                f"the tokenizer has {self.vocabulary} ids and the model's vocabulary only {vocabulary}: "
                f"set size.vocabulary to at least {self.vocabulary}, or train a smaller tokenizer"
            )

    @cached_property
    def _spelling(self) -> list[bytes]:
        if self._bpe is None:
            return [bytes([value]) for value in range(256)] + [b""]
        return spell(self._bpe, self.vocabulary)


class StreamDecoder:
    """Text from ids one by one: bytes that do not yet make a whole character wait for the next id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._ids: list[int] = []  # with a decoder that looks at neighbours: the last that were told, and new ones
        self._told = 0  # how many of them were

    def push(self, token: int) -> str:
        """The text that is complete after this id, possibly empty."""
        if self._tokenizer.exact:
            return self._decoder.decode(self._tokenizer.token_bytes(token))
        self._ids.append(token)
        text = self._new_text()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._ids, self._told = self._ids[self._told :], len(self._ids) - self._told
        return text

    def finish(self) -> str:
        """U+FFFD if the last character stayed unfinished, else nothing."""
        return self._decoder.decode(b"", final=True) if self._tokenizer.exact else self._new_text()

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._ids[: self._told])
        return self._tokenizer.decode(self._ids)[len(before) :]


def require_kind(kind: str | None) -> None:
    """Raises ValueError when `kind` is not one of `KINDS`."""
    if kind not in KINDS:
        raise ValueError(f"unknown tokenizer {kind!r}; the known ones are bpe, bytes and the path of a tokenizer.json")


def require_vocabulary(kind: str, vocabulary: int) -> None:
    """Raises ValueError when no tokenizer of this kind fits into `vocabulary` ids."""
    if vocabulary < SMALLEST:
        raise ValueError(
            f"vocabulary {vocabulary} cannot hold a {kind!r} tokenizer, which needs {SMALLEST} ids "
            f"(256 bytes and the end of text); set size.vocabulary to at least {SMALLEST}"
        )
