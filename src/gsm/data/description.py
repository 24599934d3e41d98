"""Read the description of a tokenizer, a tokenizer.json, and give it to the library."""

from __future__ import annotations

import gzip
import io
import json
import lzma
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gsm.paths import at_home

if TYPE_CHECKING:
    import tokenizers

ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>")
NAMES = ("tokenizer.json", "tokenizer.json.xz", "tokenizer.json.gz")
OPEN = {".xz": lzma.LZMAFile, ".gz": gzip.GzipFile}
OF_A_CALL = ("truncation", "padding", "post_processor")  # settings that cut, fill up or repeat the ids of a text
LARGEST = 1 << 27  # bytes of a description; the largest in use have 4e7


def read_description(given: str) -> dict[str, Any]:
    """Return the content of a tokenizer.json (plain, .xz or .gz), or of the tokenizer.json in a folder.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a sound tokenizer.json.
    """
    path = Path(at_home(given))
    if path.is_dir():
        path = next((path / name for name in NAMES if (path / name).exists()), path / NAMES[0])
    if not path.exists():
        raise FileNotFoundError(
            f"tokenizer={path} is not allowed because there is no such file. Use bpe, bytes or a tokenizer.json."
        )
    try:
        with path.open("rb") as raw, OPEN.get(path.suffix.lower(), io.BufferedReader)(raw) as file:
            return description(file.read(LARGEST + 1).decode("utf-8-sig"))
    except (ValueError, OSError, EOFError, lzma.LZMAError) as error:
        raise ValueError(f"{str(path)!r} is not the tokenizer.json of a Hugging Face tokenizer: {error}") from error


def description(text: str) -> dict[str, Any]:
    """Return the content of a tokenizer.json after the checks.

    Raise ValueError: it is not JSON, or has no model.
    """
    if len(text) > LARGEST:
        raise ValueError(f"it is larger than {LARGEST:,} bytes")
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise ValueError("it holds no 'model'")
    return content


def opened(content: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Return the library's tokenizer of a checked description. The ids of a text depend on the text alone.

    A description also holds settings of the last call, which cut texts or pad them, a template around them, and a
    probability of leaving out merges. They are off. Normalizer, pre-tokenizer, model and added tokens stay.

    Raise ValueError: the library cannot read it.
    """
    import tokenizers

    model = {key: value for key, value in content["model"].items() if key != "dropout"}
    off = dict.fromkeys(OF_A_CALL)
    post = content.get("post_processor")
    if isinstance(post, dict) and post.get("type") == "ByteLevel":
        del off["post_processor"]  # it moves offsets alone, and is part of the digest of cached text
    with of_library(f"be read by tokenizers {tokenizers.__version__}"):
        read = tokenizers.Tokenizer.from_str(json.dumps({**content, **off, "model": model}))
    read.encode_special_tokens = True  # so that text which spells the end of text stays text
    return read


def mark_end(read: tokenizers.Tokenizer, end: str | None) -> str:
    """Return the token that ends a document, and make it special: text can spell any other token.

    Args:
        read: a tokenizer.
        end: the token; None: the first of `ENDS` that the tokenizer has.

    Raise ValueError: the tokenizer has no such token.
    """
    chosen = end if end is not None else next((name for name in ENDS if read.token_to_id(name) is not None), None)
    if chosen is None or read.token_to_id(chosen) is None:
        lacks = f"none of {', '.join(ENDS)}" if chosen is None else f"no token {chosen!r}"
        added = ", ".join(token.content for token in list(read.get_added_tokens_decoder().values())[:20]) or "none"
        raise ValueError(
            f"the tokenizer has {lacks} to end a document with; set data.end_of_text to one of its tokens, "
            f"for instance an added one (they are: {added})"
        )
    read.add_special_tokens([chosen])
    return chosen


@contextmanager
def of_library(task: str) -> Iterator[None]:
    """Turn everything that the library raises into a ValueError. Its panics are no `Exception`."""
    try:
        yield
    except BaseException as error:
        if not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
            raise
        raise ValueError(f"the tokenizer cannot {task}: {error}") from error
