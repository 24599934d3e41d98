"""Encoding into a file: all ids, or none after an interruption."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_text
import torch

from gsm.data import ids, reading, tokens
from gsm.data.corpus import Corpus
from gsm.data.ids import read_index, write_ids
from gsm.data.module import TextData
from gsm.data.reading import Piece
from gsm.data.tokenizer import Tokenizer
from gsm.data.tokens import Split, find_or_encode, find_or_train, sample


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus(tiny_text.write(tmp_path_factory.mktemp("text")))


@pytest.fixture(scope="module")
def tokenizer(corpus: Corpus) -> Tokenizer:
    return Tokenizer.train(corpus.documents("train"), 320)


@pytest.fixture(scope="module")
def whole(corpus: Corpus, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Split:
    """Everything in one file."""
    return find_or_encode(corpus, "train", tokenizer, tmp_path_factory.mktemp("whole"))


def content(split: Split) -> bytes:
    assert sorted(path.name for path in split.path.iterdir()) == ["ids.bin", "index.json"]
    return (split.path / "ids.bin").read_bytes()


def test_ids_are_the_documents_with_an_end_of_text_each(corpus: Corpus, tokenizer: Tokenizer, whole: Split) -> None:
    expected = [i for text in corpus.documents("train") for i in [*tokenizer.encode(text), tokenizer.end_of_text]]
    assert whole.open()[:].tolist() == expected
    assert whole.bytes == whole.spelled == sum(len(text.encode()) for text in corpus.documents("train"))


def test_an_interrupted_encoding_leaves_no_index_and_begins_again(
    corpus: Corpus, tokenizer: Tokenizer, whole: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ids, "MOST_PIECES", 3)
    pieces = corpus.pieces

    def stop(split: str) -> Iterator[Piece]:
        yield from islice(pieces(split), 13)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(corpus, "pieces", stop)
        find_or_encode(corpus, "train", tokenizer, tmp_path)
    assert [path.name for path in tmp_path.glob("*/train/*")] == ["ids.bin"]
    split = find_or_encode(corpus, "train", tokenizer, tmp_path)
    assert content(split) == content(whole)
    assert (split.tokens, split.bytes, split.spelled) == (whole.tokens, whole.bytes, whole.spelled)


def test_two_writers_without_a_lock_write_the_same(
    corpus: Corpus, tokenizer: Tokenizer, whole: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second process starts while the first has written a part, and the first goes on when it is done."""
    monkeypatch.setattr(ids, "MOST_PIECES", 1)
    pieces = list(corpus.pieces("train"))

    def complete(rest: list[Piece]) -> Iterator[Piece]:
        for piece in rest:
            assert (tmp_path / "ids.bin").read_bytes() == content(whole)
            yield piece

    def first() -> Iterator[Piece]:
        yield pieces[0]
        write_ids(tmp_path, pieces, tokenizer)
        yield from complete(pieces[1:])

    index = write_ids(tmp_path, first(), tokenizer)
    assert read_index(tmp_path) == index
    assert write_ids(tmp_path, complete(pieces), tokenizer) == index, "a third one shortens nothing that others read"
    assert (tmp_path / "ids.bin").read_bytes() == content(whole)


@pytest.mark.parametrize("limit", [1000, 2000, 2001])
def test_a_limit_takes_the_first_tokens_and_their_bytes(
    limit: int, corpus: Corpus, tokenizer: Tokenizer, whole: Split, tmp_path: Path
) -> None:
    split = find_or_encode(corpus, "train", tokenizer, tmp_path, limit=limit)
    first = whole.open()[:limit]
    assert np.array_equal(split.open()[:], first) and split.tokens == limit
    assert split.bytes == split.spelled == tokenizer.token_lengths_V[first].sum()
    assert find_or_encode(corpus, "train", tokenizer, tmp_path).tokens == whole.tokens, "and does not hide the rest"


def test_a_cache_that_is_only_read_is_enough_when_it_is_complete(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    data: dict[str, Any] = {"vocabulary": 300, "context": 16, "batch_size": 2, "path": str(corpus.root)}
    first = TextData(**data, cache_dir=str(tmp_path))
    first.prepare_data()
    monkeypatch.setattr("gsm.data.cache.fcntl.flock", refuse)
    monkeypatch.setattr("gsm.files.replacing", refuse)
    again = TextData(**data, cache_dir=str(tmp_path))
    assert torch.equal(again.train_set[3]["tokens"], first.train_set[3]["tokens"])


def test_a_tokenizer_learns_from_all_of_a_small_text_and_from_slices_of_a_large_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = ["".join(chr(65 + number) for _ in range(90)) for number in range(20)]
    assert sample(iter(texts), 1800) == texts
    monkeypatch.setattr(tokens, "SLICE", 30)
    few = sample(iter(texts), 500)
    assert sum(map(len, few)) <= 500 and len({part[0] for part in few}) >= 12
    assert {part[0] for part in few} & set("QRST"), "from the end too"
    assert not {part[0] for part in sample(iter(texts), 500, passed_over=900)} & set("QRST")


def test_a_tokenizer_reads_hardly_more_than_will_be_trained_on(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For a thousand tokens of a streamed data set, a billion characters were fetched to learn a tokenizer from."""
    for name in ("SAMPLE", "SLICE"):
        monkeypatch.setattr(tokens, name, 1000)
    read: list[int] = []
    pieces = corpus.pieces
    monkeypatch.setattr(corpus, "pieces", lambda split: (p for p in pieces(split) if not read.append(len(p.text))))
    with caplog.at_level("INFO"):
        find_or_train(corpus, 300, tmp_path, tokens=1000)
    assert 8000 <= sum(read) < 13_000 and "later ones are not read" in caplog.text


def test_a_tokenizer_never_holds_a_large_file_in_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of 50 GB was joined into one string before the first slice was taken."""
    monkeypatch.setattr(reading, "WHOLE", 2000)
    (tmp_path / "long.txt").write_text("A line of a long text, and then another.\n" * 2000)
    longest: list[int] = []
    train = Tokenizer.train
    monkeypatch.setattr(
        Tokenizer, "train", lambda texts, size: longest.append(max(map(len, texts))) or train(texts, size)
    )
    find_or_train(Corpus(tmp_path / "long.txt"), 300, tmp_path / "cache")
    assert longest and longest[0] < 2100


def test_the_library_gets_a_long_text_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "long.txt").write_text("A line of a long text, and then another.\n" * 500)
    (tmp_path / "short.txt").write_text("Another text.\n" * 9)
    data: dict[str, Any] = {"vocabulary": 300, "context": 16, "batch_size": 2, "path": str(tmp_path)}
    whole = TextData(**data, cache_dir=str(tmp_path / "whole"))
    monkeypatch.setattr("gsm.data.tokenizer.PART", 1000)
    longest: list[int] = []
    encode = Tokenizer.encode_batch
    monkeypatch.setattr(
        Tokenizer, "encode_batch", lambda self, texts: longest.append(max(map(len, texts))) or encode(self, texts)
    )
    parts = TextData(**data, cache_dir=str(tmp_path / "parts"))
    assert np.array_equal(parts.split("train").open(), whole.split("train").open())
    assert parts.split("train").bytes == whole.split("train").bytes and max(longest) < 1100
