"""Encoding into shards: the same ids from any number of processes, after any interruption, across any border."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_text
import torch

from gsm.data import encode, reading, shards, tokens
from gsm.data.corpus import Corpus
from gsm.data.module import TextData
from gsm.data.reading import Piece
from gsm.data.shards import ShardedIds
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


def files(split: Split) -> list[bytes]:
    return [path.read_bytes() for path in sorted(split.path.glob("*.bin"))]


def test_ids_are_the_documents_with_an_end_of_text_each(corpus: Corpus, tokenizer: Tokenizer, whole: Split) -> None:
    expected = [i for text in corpus.documents("train") for i in [*tokenizer.encode(text), tokenizer.end_of_text]]
    assert whole.open()[:].tolist() == expected
    assert whole.bytes == whole.spelled == sum(len(text.encode()) for text in corpus.documents("train"))


@pytest.mark.parametrize("shard", [1000, 1001, 4096])
def test_shards_of_any_size_hold_the_same(
    shard: int, corpus: Corpus, tokenizer: Tokenizer, whole: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD", shard)
    split = find_or_encode(corpus, "train", tokenizer, tmp_path)
    parts = files(split)
    assert b"".join(parts) == files(whole)[0]
    assert {len(part) for part in parts[:-1]} == {2 * shard} and 0 < len(parts[-1]) <= 2 * shard
    assert (split.tokens, split.bytes, split.spelled) == (whole.tokens, whole.bytes, whole.spelled)


def test_a_sequence_may_lie_across_borders(whole: Split, tmp_path: Path) -> None:
    ids = whole.open()[:500]
    for number in range(5):
        ids[100 * number : 100 * number + 100].tofile(shards.shard_path(tmp_path, number))
    sharded = ShardedIds(tmp_path, 500, 100, "uint16")
    assert len(sharded) == 500
    for start, stop in ((0, 500), (99, 101), (100, 200), (50, 350), (399, 400), (400, 500), (7, 7), (480, 10**6)):
        assert np.array_equal(sharded[start:stop], ids[start:stop])


def test_batches_do_not_know_of_shards(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def batches(folder: str, **chosen: Any) -> list[dict[str, torch.Tensor]]:
        data = TextData(
            vocabulary=257,
            context=64,
            batch_size=8,
            tokenizer="bytes",
            path=str(corpus.root),
            cache_dir=str(tmp_path / folder),
            **chosen,
        )
        return list(data.train_dataloader())

    expected = batches("whole")
    monkeypatch.setattr(shards, "SHARD", 777)
    for found in (batches("parts"), batches("parts", num_workers=2)):
        assert len(found) == len(expected)
        assert all(torch.equal(a[name], b[name]) for a, b in zip(found, expected, strict=True) for name in a)


def test_the_number_of_processes_does_not_show(
    corpus: Corpus, tokenizer: Tokenizer, whole: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "PARCEL", 5000)
    split = find_or_encode(corpus, "train", tokenizer, tmp_path, workers=2)
    assert files(split) == files(whole)
    assert (split.tokens, split.bytes, split.spelled) == (whole.tokens, whole.bytes, whole.spelled)


def test_a_process_that_ends_before_its_time_is_a_sentence(corpus: Corpus, tokenizer: Tokenizer) -> None:
    pieces = (Piece(text, last=True) for text in corpus.documents("train"))
    with pytest.raises(ChildProcessError, match="ended before its time.*set data.prepare_workers=1"):
        with encode._processes(tokenizer, 1) as pool:
            pool.submit(os._exit, 1).result()
    assert next(encode.encode_pieces(pieces, tokenizer, 1)).ids.size


@pytest.mark.parametrize("after", [1, 13, 30])
def test_an_interrupted_encoding_goes_on_with_the_shards_it_has(
    after: int, corpus: Corpus, tokenizer: Tokenizer, whole: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD", 1234)
    monkeypatch.setattr(encode, "MOST_PIECES", 3)
    encoded: list[str] = []
    kept = Tokenizer.encode_batch

    def counted(self: Tokenizer, texts: list[str]) -> list[list[int]]:
        encoded.extend(texts)
        return kept(self, texts)

    def stop(pieces: Iterator[Piece], count: int, _: None) -> Iterator[Piece]:
        for number, piece in enumerate(pieces):
            if number == after:
                raise KeyboardInterrupt
            if number >= count:
                yield piece

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tokens, "islice", stop)
        find_or_encode(corpus, "train", tokenizer, tmp_path)
    assert not list(tmp_path.glob("*/*/*.partial")) and not list(tmp_path.glob("*/*/index.json"))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*/*.bin")}
    assert bool(before) == (after > 3)
    monkeypatch.setattr(Tokenizer, "encode_batch", counted)
    split = find_or_encode(corpus, "train", tokenizer, tmp_path)
    assert b"".join(files(split)) == files(whole)[0]
    assert (split.tokens, split.bytes, split.spelled) == (whole.tokens, whole.bytes, whole.spelled)
    assert before == {path: path.stat().st_mtime_ns for path in before}, "shards that were complete stay"
    assert (len(encoded) < len(corpus.files["train"])) == (after > 3), "what they hold is not encoded again"


@pytest.mark.parametrize("limit", [1000, 2000, 2001])
def test_a_limit_takes_the_first_tokens_and_their_bytes(
    limit: int, corpus: Corpus, tokenizer: Tokenizer, whole: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD", 1000)
    split = find_or_encode(corpus, "train", tokenizer, tmp_path, limit=limit)
    ids = whole.open()[:limit]
    assert np.array_equal(split.open()[:], ids) and split.tokens == limit
    assert split.bytes == split.spelled == tokenizer.token_lengths_V[ids].sum()
    assert find_or_encode(corpus, "train", tokenizer, tmp_path).tokens == whole.tokens, "and does not hide the rest"


def test_a_shard_that_only_looks_older_is_read_and_believed(
    corpus: Corpus, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "ALWAYS_CHECKED", 0)
    split = find_or_encode(corpus, "train", tokenizer, tmp_path)
    path = shards.shard_path(split.path, 0)
    with monkeypatch.context() as patch:
        patch.setattr(shards, "checksum", None)
        assert shards.read_index(split.path), "a large one whose size and time are right is not read"
    os.utime(path, (1, 1))
    assert shards.read_index(split.path)
    path.write_bytes(path.read_bytes()[::-1])
    assert shards.read_index(split.path) is None


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
    monkeypatch.setattr("gsm.data.shards.replacing", refuse)
    again = TextData(**data, cache_dir=str(tmp_path))
    assert torch.equal(again.train_set[3]["tokens"], first.train_set[3]["tokens"])


def test_a_cache_that_cannot_be_written_is_named(corpus: Corpus, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot be written.*set data.cache_dir or GSM_CACHE"):
        find_or_encode(corpus, "train", tokenizer, tmp_path / "file")
    with pytest.raises(OSError, match="cannot be written.*set data.cache_dir or GSM_CACHE"):
        find_or_train(corpus, 300, tmp_path / "file")


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


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="asks /proc whether processes live")
def test_workers_do_not_outlive_a_parent_that_was_killed(tmp_path: Path) -> None:
    """After SIGKILL of a run its workers waited for the next parcel for ever."""
    code = (
        "import os, signal\nfrom gsm.data import encode\nfrom gsm.data.tokenizer import Tokenizer\n"
        "if __name__ == '__main__':\n"
        "    with encode._processes(Tokenizer.plain_bytes(), 1) as pool:\n"
        "        print(pool.submit(os.getpid).result(), flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    (tmp_path / "script.py").write_text(code)
    ran = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, timeout=60)
    worker, deadline = Path("/proc", ran.stdout.strip()), time.monotonic() + 20
    assert ran.returncode == -9 and worker.name.isdigit()
    while alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(worker)


def alive(process: Path) -> bool:
    """Whether it runs; one that ended and that nobody has asked about yet is a zombie."""
    try:
        return process.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
