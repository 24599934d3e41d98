"""The bytes that the ids of a tokenizer.json stand for.

There are two kinds of pieces. Byte-level pieces (GPT-2, Llama 3, DeepSeek, Qwen) write every byte as a printable
character: each id is some bytes, and text is their concatenation. Others (SentencePiece's with a sign for a blank,
WordPiece's with `##`) become text through the library's decoder alone. Such an id stands for the text that it adds
behind another id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()


def is_byte_level(bpe: tokenizers.Tokenizer) -> bool:
    """Return whether the pieces of a tokenizer are bytes written as characters."""
    part = bpe.pre_tokenizer if bpe.decoder is None else bpe.decoder
    return part is not None and "ByteLevel" in _types(json.loads(part.__getstate__()))


def spell(bpe: tokenizers.Tokenizer, vocabulary: int) -> list[bytes]:
    """Return the bytes of each of `vocabulary` ids. A special token and a number without a piece stand for none."""
    added = bpe.get_added_tokens_decoder()
    plain = {token: piece for piece, token in bpe.get_vocab().items() if token not in added}
    spelled = _byte_level(plain) if is_byte_level(bpe) else _decoded(bpe, plain)
    spelled |= {token: b"" if entry.special else entry.content.encode() for token, entry in added.items()}
    return [spelled.get(token, b"") for token in range(vocabulary)]


def _byte_level(pieces: Mapping[int, str]) -> dict[int, bytes]:
    byte_of = byte_of_character()
    return {
        token: bytes(byte_of[character] for character in piece) if set(piece) <= byte_of.keys() else piece.encode()
        for token, piece in pieces.items()
    }


def _decoded(bpe: tokenizers.Tokenizer, pieces: Mapping[int, str]) -> dict[int, bytes]:
    """Return the bytes that each id adds behind another id: a decoder may treat the first id of a text specially."""
    anchor = next((token for token, piece in pieces.items() if piece.isascii() and piece.isalpha()), None)
    anchor = next(iter(pieces), 0) if anchor is None else anchor
    before = bpe.decode([anchor])
    after = bpe.decode_batch([[anchor, token] for token in pieces])
    return {
        token: bytes([int(piece[3:5], 16)]) if _is_byte(piece) else text.removeprefix(before).encode()
        for (token, piece), text in zip(pieces.items(), after, strict=True)
    }


def _is_byte(piece: str) -> bool:
    """Return whether a piece is SentencePiece's way to write a byte, `<0x0A>`."""
    return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")


def _types(part: Mapping[str, Any]) -> set[str]:
    """Return the types of a decoder or pre-tokenizer and of its parts."""
    return {part["type"]}.union(*map(_types, part.get("decoders") or part.get("pretokenizers") or ()))


def byte_of_character() -> dict[str, int]:
    """Return the byte of each character of byte-level BPE: printable bytes as they are, the others as 256, 257, ..."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + rank): value for rank, value in enumerate(rest)}
