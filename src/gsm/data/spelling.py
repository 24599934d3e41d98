"""What the ids of a tokenizer.json stand for: which bytes, and which of them ends a document.

Two kinds of pieces are met. Byte-level ones (GPT-2, Llama 3, DeepSeek, Qwen) write every byte as a printable character,
so that each id is some bytes and text is their concatenation. Others (SentencePiece's with a sign for a blank,
WordPiece's with `##`) only make text through the library's decoder; an id then counts as what it adds behind another.
"""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>")
UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()
OPEN = {".xz": lzma.open, ".gz": gzip.open}
NAMES = ("tokenizer.json", "tokenizer.json.xz", "tokenizer.json.gz")


def read_description(given: str) -> str:
    """The text of a tokenizer.json (as it is, or as .xz or .gz), or of the one in a folder.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is no tokenizer.json.
    """
    path = Path(given)
    if path.is_dir():
        path = next((path / name for name in NAMES if (path / name).is_file()), path / NAMES[0])
    if not path.is_file():
        raise FileNotFoundError(
            f"tokenizer file {str(path)!r} does not exist; set data.tokenizer to bpe, bytes or a tokenizer.json"
        )
    try:
        with OPEN.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
            text = file.read()
        if "model" in json.loads(text):
            return text
        reason = "it holds no 'model'"
    except (ValueError, OSError, EOFError, TypeError, lzma.LZMAError) as error:
        reason = str(error)
    raise ValueError(f"{str(path)!r} is not the tokenizer.json of a Hugging Face tokenizer: {reason}")


def prepared(text: str, end: str | None) -> tuple[tokenizers.Tokenizer, str]:
    """The library's tokenizer, closed against special tokens in text, and how its end of text is written.

    Args:
        text: a tokenizer.json.
        end: the token that ends a document; None: the first of `ENDS` that it has.

    Raises:
        ValueError: it has no such token, or the library cannot read it.
    """
    import tokenizers

    described = json.loads(text)
    described["truncation"] = described["padding"] = None
    try:
        read = tokenizers.Tokenizer.from_str(json.dumps(described))
    except Exception as error:  # the library raises nothing more special
        raise ValueError(f"the tokenizer cannot be read by tokenizers {tokenizers.__version__}: {error}") from error
    chosen = end if end is not None else next((name for name in ENDS if read.token_to_id(name) is not None), None)
    if chosen is None or read.token_to_id(chosen) is None:
        lacks = f"none of {', '.join(ENDS)}" if chosen is None else f"no token {chosen!r}"
        added = ", ".join(token.content for token in list(read.get_added_tokens_decoder().values())[:20]) or "none"
        raise ValueError(
            f"the tokenizer has {lacks} to end a document with; set data.end_of_text to one of its tokens, "
            f"for instance an added one (they are: {added})"
        )
    read.add_special_tokens([chosen])  # one that is not special could be spelled by text
    read.encode_special_tokens = True
    return read, chosen


def is_byte_level(bpe: tokenizers.Tokenizer) -> bool:
    """Whether its pieces are bytes written as characters."""
    part = bpe.pre_tokenizer if bpe.decoder is None else bpe.decoder
    return part is not None and "ByteLevel" in _types(json.loads(part.__getstate__()))


def spell(bpe: tokenizers.Tokenizer, vocabulary: int) -> list[bytes]:
    """The bytes of each of `vocabulary` ids; a special token stands for none, and so does a number without a piece."""
    added = bpe.get_added_tokens_decoder()
    plain = {token: piece for piece, token in bpe.get_vocab().items() if token not in added}
    spelled = _byte_level(plain) if is_byte_level(bpe) else _decoded(bpe, plain)
    spelled |= {token: b"" if one.special else one.content.encode() for token, one in added.items()}
    return [spelled.get(token, b"") for token in range(vocabulary)]


def _byte_level(pieces: Mapping[int, str]) -> dict[int, bytes]:
    byte_of = byte_of_character()
    return {
        token: bytes(byte_of[character] for character in piece) if set(piece) <= byte_of.keys() else piece.encode()
        for token, piece in pieces.items()
    }


def _decoded(bpe: tokenizers.Tokenizer, pieces: Mapping[int, str]) -> dict[int, bytes]:
    """What each id adds to the text behind another one, since a decoder may treat the first of a text specially."""
    anchor = next(token for token, piece in pieces.items() if piece.isascii() and piece.isalpha())
    before = bpe.decode([anchor])
    after = bpe.decode_batch([[anchor, token] for token in pieces])
    return {
        token: bytes([int(piece[3:5], 16)]) if _is_byte(piece) else text.removeprefix(before).encode()
        for (token, piece), text in zip(pieces.items(), after, strict=True)
    }


def _is_byte(piece: str) -> bool:
    """Whether a piece is SentencePiece's way to write a byte, `<0x0A>`."""
    return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")


def _types(part: Mapping[str, Any]) -> set[str]:
    """The types of a decoder or pre-tokenizer and of those it is made of."""
    return {part["type"]}.union(*map(_types, part.get("decoders") or part.get("pretokenizers") or ()))


def byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes bytes as printable characters: themselves where printable, else 256, 257, ... in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + rank): value for rank, value in enumerate(others)}
