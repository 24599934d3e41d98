"""Text in many kinds of files: what is read, what is refused, and what is held out."""

from __future__ import annotations

import gzip
import json
import lzma
import sys
from pathlib import Path
from typing import Any

import pytest

from gsm.data import reading
from gsm.data.corpus import Corpus
from gsm.data.reading import Piece, read_pieces

STORIES = [f"Story {number}: größer, 東京.\n\nIt ends.\n" for number in range(40)]


def pack(path: Path, raw: bytes) -> Path:
    """Writes `raw` as the ending of `path` says."""
    if path.suffix == ".zst":
        raw = pytest.importorskip("zstandard").ZstdCompressor().compress(raw)
    path.write_bytes({".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)(raw))
    return path


def json_lines(texts: list[Any], field: str = "text") -> bytes:
    return "".join(json.dumps({field: text, "id": 1}) + "\n" for text in texts).encode()


def parquet(path: Path, texts: list[Any], field: str = "text") -> Path:
    arrow = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
    import pyarrow.parquet

    pyarrow.parquet.write_table(arrow.table({"id": [1] * len(texts), field: texts}), path)
    return path


@pytest.mark.parametrize("packed", ["", ".gz", ".xz", ".zst"])
def test_json_lines_hold_many_documents_however_packed(packed: str, tmp_path: Path) -> None:
    path = pack(tmp_path / f"stories.jsonl{packed}", json_lines(STORIES))
    moved: list[int] = []
    assert list(read_pieces(path, moved=moved.append)) == [Piece(text, last=True) for text in STORIES]
    assert sum(moved) == path.stat().st_size


@pytest.mark.parametrize("packed", ["", ".gz", ".xz", ".zst"])
def test_a_text_file_is_one_document_however_packed(packed: str, tmp_path: Path) -> None:
    path = pack(tmp_path / f"stories.txt{packed}", "\r\n".join(STORIES).encode())
    assert list(read_pieces(path)) == [Piece("\r\n".join(STORIES), last=True)]


def test_parquet_holds_many_documents(tmp_path: Path) -> None:
    path = parquet(tmp_path / "stories.parquet", [*STORIES, "", None])
    assert [piece.text for piece in read_pieces(path)] == STORIES


def test_the_text_may_stand_in_another_field(tmp_path: Path) -> None:
    path = pack(tmp_path / "a.jsonl", json_lines(STORIES, "body"))
    assert [piece.text for piece in read_pieces(path, "body")] == STORIES


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
    path = pack(tmp_path / "a.jsonl", json_lines(["one", "", "two"]) + b"\n  \n")
    assert [piece.text for piece in read_pieces(path)] == ["one", "two"]


def test_surrogates_without_a_partner_become_the_replacement_character(tmp_path: Path) -> None:
    path = pack(tmp_path / "a.jsonl", b'{"text": "a\\ud800b"}\n')
    assert [piece.text for piece in read_pieces(path)] == ["a\N{REPLACEMENT CHARACTER}b"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b"not json", r"a\.jsonl, line 2, is not JSON .*text in field 'text'"),
        (b'{"body": "x", "id": 3}', r"a\.jsonl, line 2, has no field 'text' but fields body, id; set data.text_field"),
        (b'["x"]', r"a\.jsonl, line 2, has no field 'text' but \['x'\]"),
        (b'{"text": 5}', r"a\.jsonl, line 2, holds 5 in field 'text', which is no text"),
        (b'{"text": "\xff"}', r"a\.jsonl, line 2, is not JSON"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(line: bytes, sentence: str, tmp_path: Path) -> None:
    path = pack(tmp_path / "a.jsonl", json_lines(["fine"]) + line)
    with pytest.raises(ValueError, match=sentence):
        list(read_pieces(path))


def test_a_parquet_file_without_the_column_is_named(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", STORIES, "body")
    with pytest.raises(ValueError, match=r"a\.parquet has no column 'text' but id, body; set data.text_field"):
        list(read_pieces(path))
    path.write_bytes(b"no parquet at all")
    with pytest.raises(ValueError, match=r"a\.parquet is no sound parquet file"):
        list(read_pieces(path))


@pytest.mark.parametrize("packed", [".gz", ".xz", ".zst"])
def test_a_packed_file_that_was_cut_short_is_named(packed: str, tmp_path: Path) -> None:
    path = pack(tmp_path / f"a.jsonl{packed}", json_lines([json.dumps(STORIES)[:n] for n in range(1, 900)]))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=rf"a\.jsonl\{packed}.*is (damaged or cut short|not JSON)"):
        list(read_pieces(path))


@pytest.mark.parametrize(("name", "package"), [("a.parquet", "pyarrow"), ("a.jsonl.zst", "zstandard")])
def test_a_missing_package_is_named(name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if package == "zstandard" and sys.version_info >= (3, 14):
        pytest.skip("the standard library reads zstd from Python 3.14 on")
    for module in (package, f"{package}.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ModuleNotFoundError, match=rf"{name} need the package {package}.*pip install"):
        list(read_pieces(tmp_path / name))


# What is held out


def shelves(folder: Path) -> Path:
    for number in range(3):
        pack(folder / f"books-train-{number}.jsonl.xz", json_lines(STORIES[10 * number : 10 * number + 10]))
    pack(folder / "books-validation.jsonl.xz", json_lines(STORIES[30:]))
    pack(folder / "web.jsonl.gz", json_lines(["a web page"]))
    return folder


def test_files_to_take_and_to_hold_out_may_be_named(tmp_path: Path) -> None:
    corpus = Corpus(shelves(tmp_path), files="books-train-*", validation="books-validation*")
    assert list(corpus.documents("train")) == STORIES[:30]
    assert list(corpus.documents("validation")) == STORIES[30:]
    everything = Corpus(tmp_path, validation=["web.*", "*-2.*"])
    assert everything.files["validation"] == ["books-train-2.jsonl.xz", "web.jsonl.gz"]
    assert len(everything.files["train"]) == 3


def test_what_is_held_out_may_lie_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    pack(tmp_path / "here" / "a.txt", b"train")
    held_out = pack(tmp_path / "there" / "b.txt", b"validation")
    for root in (tmp_path / "here", tmp_path / "here" / "a.txt"):
        corpus = Corpus(root, validation=str(held_out))
        assert [list(corpus.documents(split)) for split in ("train", "validation")] == [["train"], ["validation"]]
    before = corpus.digest
    (moved := tmp_path / "moved").mkdir()
    assert Corpus(root, validation=str(held_out.rename(moved / "b.txt"))).digest == before


@pytest.mark.parametrize(
    ("chosen", "sentence"),
    [
        ({"validation": "nothing*"}, r"data.validation fits no file: data.validation is \['nothing\*'\]"),
        ({"validation": "*"}, "nothing is left to train on"),
        ({"files": "nothing*"}, r"holds 0 files with text that fit nothing\*"),
    ],
)
def test_a_pattern_that_leaves_nothing_is_named(chosen: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        _ = Corpus(shelves(tmp_path), **chosen).files


def test_several_files_are_divided_by_file_and_one_by_document(tmp_path: Path) -> None:
    corpus = Corpus(shelves(tmp_path))
    assert not set(corpus.documents("train")) & set(corpus.documents("validation"))
    assert len(corpus.files["train"]) == 4 and len(corpus.files["validation"]) == 1
    pack(one := tmp_path / "all.jsonl", json_lines(STORIES))
    parts = {split: list(Corpus(one, validation_share=0.2).documents(split)) for split in ("train", "validation")}
    assert sorted(parts["train"] + parts["validation"]) == sorted(STORIES)
    assert 2 <= len(parts["validation"]) <= 16
    pack(one, json_lines(STORIES[::-1]))
    assert set(Corpus(one, validation_share=0.2).documents("validation")) == set(parts["validation"])


@pytest.mark.parametrize("share", [1e-9, 1 - 1e-9])
def test_one_file_of_documents_always_gives_both_splits(share: float, tmp_path: Path) -> None:
    corpus = Corpus(pack(tmp_path / "all.jsonl", json_lines(STORIES)), validation_share=share)
    counts = [len(list(corpus.documents(split))) for split in ("train", "validation")]
    assert sum(counts) == 40 and min(counts) == 1
    lone = Corpus(pack(tmp_path / "lone.jsonl", json_lines(["a", "a"])))
    with pytest.raises(ValueError, match="fewer than 2 documents that differ"):
        list(lone.documents("train"))


def test_of_a_single_text_the_end_is_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = "".join(STORIES)
    corpus = Corpus(pack(tmp_path / "all.txt.xz", whole.encode()))
    (train,), (validation,) = (list(corpus.documents(split)) for split in ("train", "validation"))
    assert train + validation == whole and train.endswith("\n") and 10 < len(validation) < 0.06 * len(whole)
    monkeypatch.setattr(reading, "WHOLE", 100)
    again = Corpus(tmp_path / "all.txt.xz")
    assert [list(again.documents(split)) for split in ("train", "validation")] == [[train], [validation]]
    with pytest.raises(ValueError, match="has 1 characters, too few to hold some out"):
        list(Corpus(pack(tmp_path / "short.txt", b"x")).documents("train"))


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
    pack(path, json_lines(STORIES[:-1] + ["Another end."]))
    assert Corpus(path, notes=tmp_path / "notes").digest != digest
