"""Text in many kinds of files: what is read, what is refused, and what is held out."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from packed import STORIES, json_lines, pack

from gsm.data import reading
from gsm.data.corpus import Corpus
from gsm.data.reading import Piece, read_pieces


def parquet(path: Path, texts: list[Any], field: str = "text") -> Path:
    arrow = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
    import pyarrow.parquet

    pyarrow.parquet.write_table(arrow.table({"id": [1] * len(texts), field: texts}), path)
    return path


@pytest.mark.parametrize("packed", ["", ".gz", ".xz", ".zst"])
def test_json_lines_hold_many_documents_however_packed(packed: str, tmp_path: Path) -> None:
    path = pack(tmp_path / f"stories.jsonl{packed}", json_lines(STORIES))
    assert list(read_pieces(path)) == [Piece(text, last=True) for text in STORIES]


@pytest.mark.parametrize("packed", ["", ".gz", ".xz", ".zst"])
def test_a_text_file_is_one_document_however_packed(packed: str, tmp_path: Path) -> None:
    path = pack(tmp_path / f"stories.txt{packed}", "\r\n".join(STORIES).encode())
    assert list(read_pieces(path)) == [Piece("\r\n".join(STORIES), last=True)]


def test_parquet_holds_many_documents(tmp_path: Path) -> None:
    path = parquet(tmp_path / "stories.parquet", [*STORIES, "", None])
    assert [piece.text for piece in read_pieces(path)] == STORIES


def test_a_large_text_is_read_in_pieces_that_end_with_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "WHOLE", 50)
    whole = "".join(STORIES)
    pieces = list(read_pieces(pack(tmp_path / "a.txt", whole.encode())))
    assert "".join(piece.text for piece in pieces) == whole
    assert len(pieces) > 5 and [piece.last for piece in pieces].index(True) == len(pieces) - 1
    assert all(piece.text.endswith("\n") and len(piece.text) < 150 for piece in pieces)
    (document,) = (d for d in Corpus(tmp_path / "a.txt", validation_share=0.001).documents("train"))
    assert whole.startswith(document) and len(document) > len(whole) - 100


def test_empty_documents_and_lines_are_left_out(tmp_path: Path) -> None:
    path = pack(tmp_path / "a.jsonl", json_lines(["one", "", None, "two"]) + b"\n  \n")
    assert [piece.text for piece in read_pieces(path)] == ["one", "two"]


def test_the_mark_that_windows_writes_is_no_text(tmp_path: Path) -> None:
    """It was trained on and counted in bits per byte, and in front of an empty line stopped the run."""
    mark = b"\xef\xbb\xbf"
    assert [piece.text for piece in read_pieces(pack(tmp_path / "a.txt", mark + b"one"))] == ["one"]
    lines = pack(tmp_path / "a.jsonl", mark + b"\r\n" + json_lines(["one", "two"]))
    assert [piece.text for piece in read_pieces(lines)] == ["one", "two"]
    assert not list(read_pieces(pack(tmp_path / "b.txt", mark)))


@pytest.mark.parametrize("name", ["A.TXT", "a.Jsonl", "a.jsonl.GZ", "a.txt.Xz", "a.Txt.zsT"])
def test_endings_may_be_in_letters_of_any_case(name: str, tmp_path: Path) -> None:
    lines = "json" in name.lower()
    content = pack(tmp_path / name.lower(), json_lines(["one"]) if lines else b"one")
    content.rename(tmp_path / name)
    assert [piece.text for piece in read_pieces(tmp_path / name)] == ["one"]
    pack(tmp_path / "other.txt", b"two")
    assert Corpus(tmp_path).description()["files"] == 2


def test_a_long_document_is_cut_at_a_line_and_stays_in_one_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of 100 MB was encoded in one go, which takes the fiftyfold of it."""
    monkeypatch.setattr(reading, "WHOLE", 50)
    long = "".join(STORIES)
    pieces = list(read_pieces(pack(tmp_path / "a.jsonl", json_lines([long, "x" * 120]))))
    assert "".join(piece.text for piece in pieces) == long + "x" * 120
    assert max(len(piece.text) for piece in pieces) <= 50 and [piece.last for piece in pieces].count(True) == 2
    corpus = Corpus(tmp_path / "a.jsonl")
    assert sorted(text for split in ("train", "validation") for text in corpus.documents(split)) == [long, "x" * 120]


def test_surrogates_without_a_partner_become_the_replacement_character(tmp_path: Path) -> None:
    path = pack(tmp_path / "a.jsonl", b'{"text": "a\\ud800b"}\n')
    assert [piece.text for piece in read_pieces(path)] == ["a\N{REPLACEMENT CHARACTER}b"]


def test_bytes_that_are_no_utf8_become_the_replacement_character_in_json_too(tmp_path: Path) -> None:
    """One bad byte in a line stopped the encoding of a whole data set, as it does not in plain text."""
    path = pack(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "a\xffb"}\n')
    assert [piece.text for piece in read_pieces(path)] == ["a\N{REPLACEMENT CHARACTER}b"]


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
@pytest.mark.parametrize("packed", [".gz", ".xz", ".zst"])
def test_a_packed_file_that_was_cut_short_is_named(packed: str, kind: str, tmp_path: Path) -> None:
    """Half a text as .zst was read without a word, and trained on."""
    path = pack(tmp_path / f"a.{kind}{packed}", json_lines([json.dumps(STORIES)[:n] for n in range(1, 900)]))
    sound = path.read_bytes()
    for length in (len(sound) // 2, len(sound) - 1):
        path.write_bytes(sound[:length])
        with pytest.raises(ValueError, match=rf"a\.{kind}\{packed}"):
            list(read_pieces(path))


def test_zstd_frames_may_follow_one_another(tmp_path: Path) -> None:
    frames = [pack(tmp_path / "a.txt.zst", text.encode()).read_bytes() for text in STORIES]
    skipped = b"\x50\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"xyz"  # a frame that holds no text
    (path := tmp_path / "a.txt.zst").write_bytes(frames[0] + skipped + b"".join(frames[1:]))
    assert list(read_pieces(path)) == [Piece("".join(STORIES), last=True)]


def test_a_large_corpus_is_read_for_its_digest_only_when_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gsm.data.corpus.SMALL", 100)
    (tmp_path / "notes").mkdir()
    path = pack(tmp_path / "all.jsonl", json_lines(STORIES))
    digest = Corpus(path, notes=tmp_path / "notes").digest
    assert Corpus(path).digest == digest, "it is the same without notes"
    with monkeypatch.context() as patch:
        patch.setattr("hashlib.file_digest", None)
        assert Corpus(path, notes=tmp_path / "notes").digest == digest
    before = path.stat()
    path.write_bytes(path.read_bytes().replace(b"e", b"i"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as `cp -p` and `rsync -t` do
    assert Corpus(path, notes=tmp_path / "notes").digest == Corpus(path).digest != digest
