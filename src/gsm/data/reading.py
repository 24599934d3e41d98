"""Read text from files: plain text and JSON lines, both also as .gz, .xz and .zst, and parquet.

Python's standard library unpacks .gz and .xz; pyarrow, of the extra `data`, reads .zst and parquet.

The ending of a file's name decides how the file is read, in letters of any case. JSON lines and parquet hold many
documents. Any other file is one document.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import logging
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

import fsspec

from gsm import paths

log = logging.getLogger(__name__)
PACKED = ("", ".gz", ".xz", ".zst")
SUFFIXES = (*(text + pack for text in (".py", ".txt", ".md", ".jsonl") for pack in PACKED), ".parquet")
ROWS = 256  # rows of parquet in memory; fewer where rows are long
WHOLE = 1 << 24  # characters of a piece: a longer document is cut
ILLEGIBLE, ODD = 0.3, 0.001  # shares of NUL and U+FFFD among the characters: refused; named in a warning
MARKS = {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}


class Damaged(ValueError):
    """A file cannot be read as its name and the settings claim. The message names the file."""


class Piece(NamedTuple):
    """A part of a document, nearly always the whole of it. `last` is True for the part that ends the document."""

    text: str
    last: bool


def holds_many(name: str) -> bool:
    """Return whether a file of this name holds many documents."""
    return without_packing(name).lower().endswith((".jsonl", ".parquet"))


def is_text(name: str) -> bool:
    """Return whether a file of this name can be read."""
    return name.lower().endswith(SUFFIXES)


def read_pieces(path: Path | str, field: str = "text") -> Iterator[Piece]:
    """Yield the documents of one file in order, without empty ones.

    In text and JSON, bytes that are not UTF-8 become U+FFFD, and so do the lone surrogates that JSON can spell. In
    parquet they are damage. A JSON null counts as empty. A byte order mark at the beginning is dropped.

    Args:
        path: the file, or an address that fsspec opens, such as `hf://datasets/...`.
        field: the field of a JSON line, or the column of parquet, that holds the text.

    Raises:
        Damaged: the file is cut short, cannot be unpacked, or is hardly text; a line is not JSON; `field` is missing or
            holds no text.
        OSError: the file cannot be opened.
        ModuleNotFoundError: the package that reads such a file is not installed.
    """
    where = str(path)
    kind = without_packing(where).lower()
    with _damage_named(where), _opened(where) as file:
        if kind.endswith(".parquet"):
            pieces = _parquet(where, file, field)
        elif kind.endswith(".jsonl"):
            pieces = _json_lines(where, _unpacked(where, file), field)
        else:
            pieces = _plain(where, _unpacked(where, file))
        yield from _legible(where, pieces)


@contextmanager
def _damage_named(where: str) -> Iterator[None]:
    """Turn errors about the contents of a file into `Damaged`. Errors of the disk and of the network stay as they are.

    Raises:
        Damaged: the contents cannot be unpacked or parsed.
    """
    try:
        yield
    except Damaged:
        raise
    except (EOFError, lzma.LZMAError, zlib.error, ValueError, OSError) as error:
        if isinstance(error, OSError) and (error.errno is not None or type(error) not in (OSError, gzip.BadGzipFile)):
            raise
        reason = " ".join(str(error).split())
        raise Damaged(f"{where} is damaged or cut short ({reason}); fetch it again, or leave it out") from error


def _documents_of(value: object, where: str, field: str) -> Iterator[Piece]:
    """Yield the text in a field as pieces of at most `WHOLE` characters, cut after a line where there is one."""
    if not (isinstance(value, str) or value is None):
        raise Damaged(f"{where} holds {value!r:.40} in field {field!r}, which is no text; set data.text_field")
    text, start = utf8(value or ""), 0
    while len(text) - start > WHOLE:
        end = text.rfind("\n", start, start + WHOLE) + 1 or start + WHOLE
        yield Piece(text[start:end], last=False)
        start = end
    if text:
        yield Piece(text[start:], last=True)


def utf8(text: str) -> str:
    """Return a text that UTF-8 can write: a surrogate without a partner becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def needed(module: str, purpose: str, extra: str = "data") -> Any:
    """Import a module that an extra installs.

    Raises:
        ModuleNotFoundError: it is not installed; the sentence has the command that installs it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{purpose} need the package {module.partition('.')[0]}, which is not installed: {paths.install(extra)}"
        ) from error


def without_packing(name: str) -> str:
    """Return a file's name without the ending of its compression."""
    stem, dot, ending = name.rpartition(".")
    return stem if f"{dot}{ending.lower()}" in PACKED[1:] else name


def _legible(path: str, pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Yield the pieces of a file. Raise Damaged where hardly anything is text; warn where a few characters are odd."""
    characters = strange = 0
    for piece in pieces:
        characters += len(piece.text)
        strange += piece.text.count("\0") + piece.text.count("\N{REPLACEMENT CHARACTER}")
        if strange > max(100, ILLEGIBLE * characters):
            raise Damaged(
                f"{path} is no text in UTF-8, {strange:,} of {characters:,} characters are NUL or not UTF-8; "
                "convert it with iconv, or leave it out with data.files"
            )
        yield piece
    if strange > ODD * characters:
        _warn_once(path, strange, characters)


@cache
def _warn_once(path: str, strange: int, characters: int) -> None:
    log.warning(
        "In %s, %s of %s characters are NUL or not UTF-8, which are read as U+FFFD: if it is Latin-1, convert it "
        "with iconv -f latin1 -t utf-8.",
        path,
        f"{strange:,}",
        f"{characters:,}",
    )


def _opened(where: str) -> Any:
    return fsspec.open(where, "rb") if "://" in where else open(where, "rb")


def _unpacked(path: str, file: BinaryIO) -> IO[bytes]:
    """Return the contents of a file, unpacked as they are read."""
    packed = Path(path).suffix.lower()
    if packed == ".gz":
        return gzip.open(file)  # pyright: ignore[reportReturnType]
    if packed == ".xz":
        return lzma.open(file)
    if packed == ".zst":
        arrow = needed("pyarrow", f"zstd files such as {path}")
        return io.BufferedReader(arrow.CompressedInputStream(arrow.PythonFile(file, mode="r"), "zstd"))
    return file


def _plain(path: str, file: IO[bytes]) -> Iterator[Piece]:
    """Yield one document. Pieces end with a line: hardly any token would cross their border."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    raw = _without_mark(path, _block(file))
    while raw:
        following = _block(file)
        yield Piece(decoder.decode(raw, final=not following), last=not following)
        raw = following


def _block(file: IO[bytes]) -> bytes:
    raw = file.read(WHOLE)
    return raw + file.readline(WHOLE) if len(raw) == WHOLE else raw


def _without_mark(path: str, raw: bytes) -> bytes:
    """Return the beginning of a file without the mark that Windows writes. Raise Damaged for UTF-16."""
    if encoding := MARKS.get(raw[:2]):
        raise Damaged(f"{path} is {encoding}; convert it with iconv -f {encoding} -t UTF-8, or leave it out")
    return raw.removeprefix(codecs.BOM_UTF8)


def _json_lines(path: str, file: IO[bytes], field: str) -> Iterator[Piece]:
    for number, raw in enumerate(file, start=1):
        where, line = f"{path}, line {number},", _without_mark(path, raw)
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8", errors="replace"))
        except (ValueError, RecursionError) as error:  # deep nesting is a RecursionError
            raise Damaged(
                f"{where} is not JSON ({error}); each line has to be an object with its text in field {field!r}"
            ) from error
        if not isinstance(row, dict) or field not in row:
            has = f"fields {', '.join(row)}" if isinstance(row, dict) else f"{row!r:.40}"
            raise Damaged(f"{where} has no field {field!r} but {has}; set data.text_field to the one with the text")
        yield from _documents_of(row[field], where, field)


def _parquet(path: str, file: BinaryIO, field: str) -> Iterator[Piece]:
    parquet = needed("pyarrow.parquet", f"parquet files such as {path}")
    table = parquet.ParquetFile(file, page_checksum_verification=True)
    columns, about = table.schema_arrow.names, table.metadata
    if field not in columns:
        raise Damaged(f"{path} has no column {field!r} but {', '.join(columns)}; set data.text_field")
    unpacked = sum(about.row_group(number).total_byte_size for number in range(about.num_row_groups))
    rows = max(1, min(ROWS, WHOLE * about.num_rows // max(1, unpacked)))
    batches = table.iter_batches(batch_size=rows, columns=[field])
    values = (value for batch in batches for value in batch.column(0).to_pylist())
    for number, value in enumerate(values, start=1):
        yield from _documents_of(value, f"{path}, row {number},", field)
