"""What is held out for validation: as told, by hash, or the end of a text."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from packed import STORIES, json_lines, pack

from gsm.data import reading
from gsm.data.corpus import SPLITS, Corpus
from gsm.data.module import TextData


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


def test_documents_of_files_that_hold_many_are_divided_by_the_hash_of_their_text(tmp_path: Path) -> None:
    pack(one := tmp_path / "all.jsonl", json_lines(STORIES))
    parts = {split: list(Corpus(one, validation_share=0.2).documents(split)) for split in SPLITS}
    assert sorted(parts["train"] + parts["validation"]) == sorted(STORIES)
    assert 2 <= len(parts["validation"]) <= 16
    pack(one, json_lines(STORIES[:9:-1]))
    pack(tmp_path / "more.jsonl.gz", json_lines(STORIES[:10]))
    (tmp_path / "text.txt").write_text("A text beside them.\n")
    for split in SPLITS:  # however the documents are spread over files
        assert {*Corpus(tmp_path, validation_share=0.2).documents(split)} & {*STORIES} == {*parts[split]}
    whole = [text for split in SPLITS for text in Corpus(tmp_path).documents(split)]
    assert sorted(whole) == sorted([*STORIES, "A text beside them.\n"])


def test_of_a_single_text_the_end_is_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = "".join(STORIES)
    corpus = Corpus(pack(tmp_path / "all.txt.xz", whole.encode()))
    (train,), (validation,) = (list(corpus.documents(split)) for split in ("train", "validation"))
    assert train + validation == whole and train.endswith("\n") and 10 < len(validation) < 0.06 * len(whole)
    monkeypatch.setattr(reading, "WHOLE", 100)
    again = Corpus(tmp_path / "all.txt.xz")
    assert [list(again.documents(split)) for split in ("train", "validation")] == [[train], [validation]]


def written(folder: Path, *names: str) -> Path:
    """Files that say where they lie, which is enough to tell them apart."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"This is {name}.\n" * 5)
    return folder


def test_more_text_held_out_than_trained_on_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(tmp_path, "a.txt", "b.txt")
    _ = Corpus(tmp_path, validation="b.txt").files
    assert not caplog.text
    (tmp_path / "b.txt").write_text("b" * 1000)
    _ = Corpus(tmp_path, validation="b.txt").files
    assert "1000 bytes are held out" in caplog.text and "data.validation=" in caplog.text


# Never in both


def test_of_several_links_to_a_file_one_is_taken(tmp_path: Path) -> None:
    """With a link to b.txt, which was held out, b.txt was trained on as well."""
    written(tmp_path, "b.txt", "c.txt")
    for number in range(20):
        os.symlink("b.txt", tmp_path / f"a{number}.txt")
    files = Corpus(tmp_path).files
    assert sorted(files["train"] + files["validation"]) == ["b.txt", "c.txt"]
    assert Corpus(tmp_path, validation="b.txt").files == {"train": ["c.txt"], "validation": ["b.txt"]}


def test_a_folder_may_be_held_out(tmp_path: Path) -> None:
    written(tmp_path, "here/a.txt", "there/b.txt", "there/deeper/c.md", "there/d.bin")
    files = Corpus(tmp_path, validation="there").files
    assert files == {"train": ["here/a.txt"], "validation": ["there/b.txt", "there/deeper/c.md"]}


# What a split costs, and what tells it from others


def data(folder: Path, **chosen: Any) -> TextData:
    given = {"vocabulary": 257, "context": 8, "batch_size": 2, "tokenizer": "bytes", "path": str(folder / "text")}
    return TextData(**{**given, "cache_dir": str(folder / "cache"), **chosen})


def test_measuring_one_split_does_not_read_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To evaluate 256 held-out sequences, a billion tokens of the train split were encoded first."""
    written(tmp_path, "text/a.txt", "text/b.txt")
    read: list[str] = []
    pieces = Corpus.pieces
    monkeypatch.setattr(Corpus, "pieces", lambda self, split: read.append(split) or pieces(self, split))
    for split in ("validation", "train"):
        made = data(tmp_path, cache_dir=str(tmp_path / split))
        assert len(getattr(made, f"{split}_set")) and made.bytes_of_tokens(split).shape == (257,)
        described = made.description([split])
        assert described["tokens"] == described[f"{split}_tokens"]
        assert read == [split]
        read.clear()


def test_the_fingerprint_tells_whatever_changes_the_ids(tmp_path: Path) -> None:
    written(tmp_path, "text/a.txt", "text/b.txt", "text/c.txt")
    first = data(tmp_path).fingerprint()
    assert data(tmp_path, batch_size=3, cache_dir=str(tmp_path / "other")).fingerprint() == first
    changes = [{"context": 9}, {"max_tokens": 20}, {"max_validation_tokens": 20}, {"tokenizer": "bpe"}]
    changes += [{"validation": "a.txt"}, {"validation": "b.txt"}, {"files": ["a.txt", "b.txt"]}]
    found = [first, *(data(tmp_path, **change).fingerprint() for change in changes)]
    written(tmp_path, "text/d.txt")
    found.append(data(tmp_path).fingerprint())
    assert len({json.dumps(one) for one in found}) == len(found) == len(changes) + 2
    assert all(type(value) in (str, int) for one in found for value in one.values())
