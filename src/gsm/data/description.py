"""Open a tokenizer.json, the description of a Hugging Face tokenizer. The library checks it."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path
from typing import TYPE_CHECKING

from gsm.errors import ConfigError
from gsm.paths import at_home

if TYPE_CHECKING:
    import tokenizers

ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>")
NAMES = ("tokenizer.json", "tokenizer.json.xz", "tokenizer.json.gz")
OPEN = {".xz": lzma.open, ".gz": gzip.open}
LARGEST = 1 << 27  # bytes of a description; the largest in use have 4e7


def read_description(given: str) -> str:
    """Return the text of a tokenizer.json (plain, .xz or .gz), or of the one in a folder.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: it cannot be unpacked, is not UTF-8, or is larger than `LARGEST`.
    """
    path = Path(at_home(given))
    if path.is_dir():
        path = next((path / name for name in NAMES if (path / name).exists()), path / NAMES[0])
    if not path.exists():
        raise FileNotFoundError(f"tokenizer must be bpe, bytes or the path of a tokenizer.json, got {path}")
    try:
        with OPEN.get(path.suffix.lower(), open)(path, "rb") as file:
            raw = file.read(LARGEST + 1)
        if len(raw) > LARGEST:
            raise ValueError(f"more than {LARGEST:,} bytes")
        return raw.decode("utf-8-sig")
    except (ValueError, OSError, EOFError, lzma.LZMAError) as error:
        raise ConfigError(f"tokenizer must be a readable tokenizer.json, got {path}: {error}") from error


def opened(text: str, where: str) -> tokenizers.Tokenizer:
    """Return the library's tokenizer of a description. The ids of a text depend on the text alone.

    A description also holds settings of the last call, which cut texts or pad them, a template around them, and a
    probability of leaving out merges. They are off. Normalizer, pre-tokenizer, model and added tokens stay.

    Args:
        text: the content of a tokenizer.json.
        where: the file that it comes from, for the error.

    Raises:
        ConfigError: the library cannot read it.
    """
    import tokenizers

    try:
        read = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises no narrower type
        raise ConfigError(f"tokenizer must be a tokenizer.json that the library reads, got {where}: {error}") from error
    read.no_truncation()
    read.no_padding()
    if not isinstance(
        read.post_processor, tokenizers.processors.ByteLevel
    ):  # it moves offsets alone, and is in digests
        read.post_processor = None  # pyright: ignore[reportAttributeAccessIssue] # which the library takes
    if isinstance(read.model, tokenizers.models.BPE):
        read.model.dropout = None
    read.encode_special_tokens = True  # so that text which spells the end of text stays text
    return read


def mark_end(read: tokenizers.Tokenizer, end: str | None) -> str:
    """Return the token that ends a document, and make it special: text can spell any other token.

    Args:
        read: a tokenizer.
        end: the token; None: the first of `ENDS` that the tokenizer has.

    Raises:
        ConfigError: the tokenizer has no such token.
    """
    chosen = end if end is not None else next((name for name in ENDS if read.token_to_id(name) is not None), None)
    if chosen is None or read.token_to_id(chosen) is None:
        added = ", ".join(token.content for token in list(read.get_added_tokens_decoder().values())[:20]) or "none"
        raise ConfigError(
            f"end_of_text must be a token of the tokenizer, such as one of its added tokens ({added}), "
            f"got {'none of ' + ', '.join(ENDS) if end is None else end}"
        )
    read.add_special_tokens([chosen])
    return chosen
