"""The bytes that the ids of a byte-level tokenizer (GPT-2, Llama 3, DeepSeek, Qwen) stand for.

Its pieces write every byte as a printable character: each id is some bytes, and text is their concatenation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()


def is_byte_level(bpe: tokenizers.Tokenizer) -> bool:
    """Return whether the pieces of a tokenizer are bytes written as characters."""
    part = bpe.pre_tokenizer if bpe.decoder is None else bpe.decoder
    return part is not None and "ByteLevel" in _types(json.loads(part.__getstate__()))


def keeps_borders(bpe: tokenizers.Tokenizer) -> bool:
    """Return whether the words of a text have the ids that they have alone: no normalizer looks for where it begins."""
    return bpe.normalizer is None or _types(json.loads(bpe.normalizer.__getstate__())) <= {"Sequence", "NFC"}


def spell(bpe: tokenizers.Tokenizer, vocabulary: int) -> list[bytes]:
    """Return the bytes of each of `vocabulary` ids. A special token and a number without a piece stand for none."""
    added = bpe.get_added_tokens_decoder()
    plain = {token: piece for piece, token in bpe.get_vocab().items() if token not in added}
    byte_of = byte_of_character()
    spelled = {
        token: bytes(byte_of[character] for character in piece) if set(piece) <= byte_of.keys() else piece.encode()
        for token, piece in plain.items()
    }
    spelled |= {token: b"" if entry.special else entry.content.encode() for token, entry in added.items()}
    return [spelled.get(token, b"") for token in range(vocabulary)]


def _types(part: Mapping[str, Any]) -> set[str]:
    """Return the types of a part of a tokenizer and of its own parts."""
    lists = [part.get(kind) or () for kind in ("decoders", "pretokenizers", "normalizers")]
    return {part["type"]}.union(*(_types(below) for below in chain(*lists)))


def byte_of_character() -> dict[str, int]:
    """Return the byte of each character of byte-level BPE: printable bytes as they are, the others as 256, 257, ..."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + rank): value for rank, value in enumerate(rest)}
