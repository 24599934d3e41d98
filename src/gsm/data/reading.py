"""Text out of files, a piece at a time: plain text, JSON lines and parquet; the first two also as .gz, .xz and .zst.

What a file is follows from its name. JSON lines and parquet hold many documents, any other file is one document.
"""

from __future__ import annotations

import codecs
import io
import json
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

from gsm import paths

PACKED = ("", ".gz", ".xz", ".zst")
SUFFIXES = (*(text + pack for text in (".py", ".txt", ".md", ".jsonl") for pack in PACKED), ".parquet")
ZSTD_INPUT = 1 << 11  # bytes at a time: what they unpack to, at most 32,000 times as much, is in memory
ROWS = 256  # of parquet at a time
LONGEST_LINE = 1 << 25  # bytes of a line of JSON, unless data.longest_line says otherwise
WHOLE = 1 << 24  # characters: a longer text file is read, and encoded, in pieces of about this size

Moved = Callable[[int], None]


class Damaged(ValueError):
    """A file that cannot be read as what its name and the settings say it is; the sentence names it."""


class Piece(NamedTuple):
    """Some text of a document: nearly always all of it, so that `last` is True."""

    text: str
    last: bool


def holds_many(name: str) -> bool:
    """Whether a file of this name holds many documents."""
    return without_packing(name).endswith((".jsonl", ".parquet"))


def read_pieces(
    path: Path, field: str = "text", moved: Moved | None = None, longest_line: int = LONGEST_LINE
) -> Iterator[Piece]:
    """The documents of one file in their order, those without any text left out.

    In text and JSON, bytes that are not UTF-8 become U+FFFD, and so do the lone surrogates that JSON can spell; null is
    no text. In parquet, whose texts are UTF-8 by definition, other bytes are damage.

    Args:
        path: the file.
        field: where the text stands in a line of JSON, or the name of the column in parquet.
        moved: called now and then with the number of bytes of the file that were taken in since the last call.
        longest_line: bytes that a line of JSON may have, unpacked.

    Raises:
        Damaged: the file is cut short, a line is not JSON or too long, parquet is not UTF-8 or has no rows, or `field`
            is missing or no text.
        ModuleNotFoundError: the package that reads such a file is not installed.
    """
    moved = moved or (lambda count: None)
    kind = without_packing(path.name)
    if kind.endswith(".parquet"):
        yield from _parquet(path, field, moved)
    else:
        with _opened(path, moved) as file:
            yield from _json_lines(path, file, field, longest_line) if kind.endswith(".jsonl") else _plain(file)


def sound_text(value: object, where: str, field: str) -> str:
    """A document's text as it can be written in UTF-8.

    Raises:
        Damaged: the value is no text; `where` says in which place of which file.
    """
    if not isinstance(value, str):
        raise Damaged(f"{where} holds {value!r:.40} in field {field!r}, which is no text; set data.text_field")
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def _plain(file: IO[bytes]) -> Iterator[Piece]:
    """One document. Pieces end with a line, so that hardly any token would have crossed their border."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    raw = _block(file)
    while raw:
        following = _block(file)
        yield Piece(decoder.decode(raw, final=not following), last=not following)
        raw = following


def _block(file: IO[bytes]) -> bytes:
    raw = file.read(WHOLE)
    return raw + file.readline(WHOLE) if len(raw) == WHOLE else raw


def _json_lines(path: Path, file: IO[bytes], field: str, longest: int) -> Iterator[Piece]:
    for number, line in enumerate(iter(lambda: file.readline(longest + 1), b""), start=1):
        where = f"{path}, line {number},"
        if len(line) > longest:
            raise Damaged(f"{where} has more than {longest:,} bytes; cut it, or set data.longest_line to what it has")
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8", errors="replace").removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}"))
        except (ValueError, RecursionError) as error:  # what is nested too deep is a RecursionError
            raise Damaged(
                f"{where} is not JSON ({error}); each line has to be an object with its text in field {field!r}"
            ) from error
        if not isinstance(row, dict) or field not in row:
            has = f"fields {', '.join(row)}" if isinstance(row, dict) else f"{row!r:.40}"
            raise Damaged(f"{where} has no field {field!r} but {has}; set data.text_field to the one with the text")
        if row[field] is not None and (text := sound_text(row[field], where, field)):
            yield Piece(text, last=True)


def _parquet(path: Path, field: str, moved: Moved) -> Iterator[Piece]:
    parquet = needed("pyarrow.parquet", "pyarrow", f"parquet files such as {path.name}")
    with sound_parquet(path), parquet.ParquetFile(path, page_checksum_verification=True) as file:
        columns = file.schema_arrow.names
        if field not in columns:
            raise Damaged(f"{path} has no column {field!r} but {', '.join(columns)}; set data.text_field")
        if not file.metadata.num_rows:
            raise Damaged(f"{path} has no rows; fetch it again, or remove it")
        row, share = 0, path.stat().st_size / file.metadata.num_rows
        for batch in file.iter_batches(batch_size=ROWS, columns=[field]):
            for row, value in enumerate(batch.column(0).to_pylist(), start=row + 1):  # noqa: B020
                if value is not None and (text := sound_text(value, f"{path}, row {row},", field)):
                    yield Piece(text, last=True)
            moved(int(share * batch.num_rows))


@contextmanager
def sound_parquet(where: object) -> Iterator[None]:
    """Reading a parquet file; what pyarrow finds wrong with its contents is said with the file's name.

    Raises:
        Damaged: the contents are not sound. An error of the system, or of the network, is left as it is.
    """
    arrow = needed("pyarrow", "pyarrow", f"parquet files such as {where}")
    try:
        yield
    except (arrow.ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None):
            raise
        said = " ".join(str(error).split())
        raise Damaged(f"{where} is no sound parquet file ({said}); fetch it again") from error


def needed(module: str, package: str, purpose: str, extra: str = "data") -> Any:
    """A module that only some data need; `extra` is the one that installs it.

    Raises:
        ModuleNotFoundError: it is not installed; the sentence says how to install it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{purpose} need the package {package}, which is not installed: {paths.install(extra)}"
        ) from error


@contextmanager
def _opened(path: Path, moved: Moved) -> Iterator[IO[bytes]]:
    """The file's contents, unpacked on the way; what goes wrong in unpacking is said with the file's name."""
    broken = (EOFError, lzma.LZMAError, zlib.error, OSError, _zstd_error(path))
    with path.open("rb") as raw:
        counted = _Counted(raw, moved)
        try:
            with _unpacking(counted, path) as file:
                yield file
        except broken as error:
            raise Damaged(f"{path} is damaged or cut short ({error}); fetch it again") from error


def _unpacking(raw: Any, path: Path) -> Any:
    if path.suffix == ".gz":
        import gzip

        return gzip.GzipFile(fileobj=raw, mode="rb")
    if path.suffix == ".xz":
        return lzma.LZMAFile(raw)
    if path.suffix == ".zst":
        zstd = _zstd(path)
        if hasattr(zstd, "ZstdFile"):
            return zstd.ZstdFile(raw)  # the standard library's, from Python 3.14
        return io.BufferedReader(_Frames(raw, zstd.ZstdDecompressor().decompressobj), 1 << 20)
    return raw


def _zstd(path: Path) -> Any:
    if sys.version_info >= (3, 14):
        return import_module("compression.zstd")
    return needed("zstandard", "zstandard", f"zstd files such as {path.name}")


def _zstd_error(path: Path) -> type[Exception]:
    return _zstd(path).ZstdError if path.suffix == ".zst" else EOFError


class _Counted:
    """A file that says how far it was read."""

    def __init__(self, file: BinaryIO, moved: Moved) -> None:
        self._file, self._moved, self._told = file, moved, 0

    def __enter__(self) -> _Counted:
        return self

    def __exit__(self, *_: object) -> None:
        """The file is closed where it was opened."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __iter__(self) -> Iterator[bytes]:
        while line := self.readline():
            yield line

    def read(self, size: int = -1) -> bytes:
        return self._tell(self._file.read(size))

    def readline(self, size: int = -1) -> bytes:
        return self._tell(self._file.readline(size))

    def _tell(self, raw: bytes) -> bytes:
        place = self._file.tell()
        if place > self._told:
            self._moved(place - self._told)
            self._told = place
        return raw


class _Frames(io.RawIOBase):
    """The contents of zstd frames, one behind the other.

    The package's own reader takes a file that was cut within a frame for one that ends there.
    """

    def __init__(self, file: Any, begin: Callable[[], Any]) -> None:
        super().__init__()
        self._file, self._begin = file, begin
        self._frame: Any = None  # the one that is being read
        self._raw, self._ready = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        """As of `io.RawIOBase`; raises EOFError where the file ends inside of a frame."""
        while not self._ready:
            self._raw = self._raw or self._file.read(ZSTD_INPUT)
            if not self._raw:
                if self._frame is not None:
                    raise EOFError("its last frame has no end")
                return 0
            self._frame = self._frame or self._begin()
            self._ready = memoryview(self._frame.decompress(self._raw))
            self._raw = self._frame.unused_data
            self._frame = None if self._frame.eof else self._frame
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


def without_packing(name: str) -> str:
    """A file's name without the ending that says how it is packed."""
    return name.removesuffix(".gz").removesuffix(".xz").removesuffix(".zst")
