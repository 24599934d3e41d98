"""The corpus, its division into splits, and the cache of what is made from it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_text

from gsm import files
from gsm.data import shards, tokens
from gsm.data.cache import cache_folder
from gsm.data.corpus import FEW, Corpus, standard_library
from gsm.data.encode import encode_parcel
from gsm.data.module import TextData
from gsm.data.names import fraction
from gsm.data.reading import Piece
from gsm.data.tokenizer import Tokenizer
from gsm.data.tokens import find_or_encode, find_or_train


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text.write(tmp_path_factory.mktemp("text"))


def test_the_split_of_a_file_hangs_on_its_module_path_alone(text: Path, tmp_path: Path) -> None:
    before = Corpus(text).files
    for path in text.glob("*.py"):
        (tmp_path / path.name).write_text("something else")
    (tmp_path / "one_more.py").write_text("x")
    after = Corpus(tmp_path).files
    assert set(before["validation"]) == set(after["validation"]) - {"one_more.py"}


def few(folder: Path, **sizes: int) -> Corpus:
    folder.mkdir(exist_ok=True)
    for name, size in sizes.items():
        (folder / f"{name}.txt").write_text("x" * size)
    return Corpus(folder)


def by_hash(*names: str) -> list[str]:
    return sorted(names, key=lambda name: fraction(f"{name}.txt"))


def test_of_few_files_about_the_share_that_is_meant_is_held_out(tmp_path: Path) -> None:
    """Of a folder of a dozen files, 33,444 tokens were trained on, and one file of 19 tokens was held out."""
    lowest, *others = by_hash(*"abcdefghijkl")
    corpus = few(tmp_path, **{lowest: 19}, **dict.fromkeys(others, 3000))
    held_out, whole = corpus.size("validation"), 19 + 11 * 3000
    assert held_out is not None and 0.05 * whole <= held_out <= 0.1 * whole
    assert f"{lowest}.txt" in corpus.files["validation"], "which hashes alone would hold out"


def test_of_few_files_a_large_one_is_not_held_out_where_others_would_do(tmp_path: Path) -> None:
    """What trains was the smaller part, because a book's name had the lowest hash."""
    lowest, *others = by_hash(*"abcdef")
    corpus = few(tmp_path, **{lowest: 50_000}, **dict.fromkeys(others, 2000))
    assert f"{lowest}.txt" in corpus.files["train"] and corpus.size("validation") == 2000


def test_what_hashes_hold_out_stays_where_its_size_is_fair_and_where_there_are_many_files(tmp_path: Path) -> None:
    names = [f"b{number}" for number in range(60)]
    fair = few(tmp_path / "fair", **dict.fromkeys(names, 100))
    chosen = [f"{name}.txt" for name in sorted(names) if fraction(f"{name}.txt") < 0.05]
    assert chosen and fair.files["validation"] == chosen
    names = [f"b{number}" for number in range(FEW)]
    chosen = [f"{name}.txt" for name in sorted(names) if fraction(f"{name}.txt") < 0.05]
    many = few(tmp_path / "many", **{name: 9000 if f"{name}.txt" in chosen else 1 for name in names})
    assert many.files["validation"] == chosen, "nine tenths of the text, but no folder of this size is divided anew"
    assert len(standard_library().files["train"]) > FEW


def test_two_files_of_which_one_is_tiny_are_answered_with_the_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = few(tmp_path, book=50_000, note=20)
    assert corpus.files == {"train": ["book.txt"], "validation": ["note.txt"]}
    assert "only 20 are held out: name files to hold out with data.validation=" in caplog.text
    data = TextData(vocabulary=257, context=32, batch_size=2, corpus=corpus, tokenizer="bytes", cache_dir=tmp_path)
    with pytest.raises(ValueError, match="validation split has 2.; .* or name files to hold out with data.validation="):
        data.setup()


def test_a_module_that_becomes_a_package_stays_in_its_split(tmp_path: Path) -> None:
    found = []
    for root, name in ((tmp_path / "one", "email.py"), (tmp_path / "two", "email/__init__.py")):
        for path in (name, "json/decoder.py", "abc.py", "tomllib/_parser.py"):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text("x")
        shares = (0.4, 0.5, 0.6, 0.9)
        found.append([name in Corpus(root, validation_share=share).files["validation"] for share in shares])
    assert found[0] == found[1]
    assert set(found[0]) == {False, True}


def test_the_hash_is_the_same_on_every_machine() -> None:
    assert fraction("json/decoder.py") == pytest.approx(0.3414872287, abs=1e-9)


def test_a_file_stays_in_its_split_when_it_is_packed() -> None:
    """`x.txt` could be trained on and `x.txt.gz`, the same text, held out."""
    assert {fraction(f"x.txt{packed}") for packed in ("", ".gz", ".xz", ".zst")} == {fraction("x.txt")}


def test_both_splits_are_sorted_disjoint_and_never_empty(tmp_path: Path) -> None:
    for name in ("b.py", "a.py"):
        (tmp_path / name).write_text("x")
    files = Corpus(tmp_path).files
    assert sorted(files["train"] + files["validation"]) == ["a.py", "b.py"]
    assert len(files["validation"]) == 1


def test_the_standard_library_is_its_core_without_tests_and_installed_packages(tmp_path: Path) -> None:
    kept = ["abc.py", "json/decoder.py", "unittest/case.py"]
    left_out = ["test/a.py", "unittest/test/b.py", "ctypes/tests/c.py", "site-packages/torch.py", "idlelib/d.py"]
    left_out += ["config-3.11-x86_64-linux-gnu/e.py", "_sysconfigdata__linux.py", "json/notes.txt", "empty.py"]
    for name in kept + left_out:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty.py" else "x")
    files = standard_library(tmp_path).files
    assert sorted(files["train"] + files["validation"]) == kept


def test_bytes_that_are_no_utf8_do_not_stop_anything(tmp_path: Path) -> None:
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    (tmp_path / "other.py").write_bytes(b"x")
    corpus = Corpus(tmp_path)
    texts = [text for split in corpus.files for text in corpus.documents(split)]
    assert "# caf\N{REPLACEMENT CHARACTER}\n" in texts


@pytest.mark.parametrize("change", ["content", "name"])
def test_the_digest_notices_another(change: str, tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("xy")
    before = Corpus(tmp_path).digest
    assert Corpus(tmp_path).digest == before
    if change == "content":
        (tmp_path / "a.py").write_text("yx")
    else:
        (tmp_path / "a.py").rename(tmp_path / "c.py")
    assert Corpus(tmp_path).digest != before


def test_a_path_that_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere.*is not a folder or a file; give data.path"):
        Corpus(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds 0 files.*needs at least 2"):
        _ = Corpus(tmp_path).files


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "index"])
def test_a_damaged_cache_is_noticed_and_made_again(
    damage: str, text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD", 10_000)
    corpus, tokenizer = Corpus(text), Tokenizer.plain_bytes()
    split = find_or_encode(corpus, "train", tokenizer, tmp_path)
    shard, index = split.path / "00002.bin", split.path / "index.json"
    sound = [path.read_bytes() for path in sorted(split.path.glob("*.bin"))]
    {
        "truncated": lambda: shard.write_bytes(sound[2][:-100]),
        "flipped": lambda: shard.write_bytes(sound[2][:-1] + bytes([sound[2][-1] ^ 1])),
        "missing": shard.unlink,
        "index": lambda: index.write_text("{"),
    }[damage]()
    with caplog.at_level(logging.WARNING):
        assert find_or_encode(corpus, "train", tokenizer, tmp_path) == split
    assert ("index.json" if damage == "index" else "00002.bin") in caplog.text and "is made again" in caplog.text
    assert [path.read_bytes() for path in sorted(split.path.glob("*.bin"))] == sound


def test_a_damaged_tokenizer_file_is_made_again(text: Path, tmp_path: Path) -> None:
    first = find_or_train(Corpus(text), 300, tmp_path)
    (file,) = tmp_path.glob("tokenizer-*.json")
    sound = file.read_bytes()
    for damaged in (sound[:1000], sound.replace(b'"digest": "', b'"digest": "0')):
        file.write_bytes(damaged)
        assert find_or_train(Corpus(text), 300, tmp_path).digest == first.digest
        assert file.read_bytes() == sound


def test_another_division_into_splits_is_another_cache_entry(text: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.plain_bytes()
    few, many = (Corpus(text, validation_share=share) for share in (0.05, 0.5))
    assert few.files != many.files, "the test needs two divisions"
    paths = {find_or_encode(corpus, "train", tokenizer, tmp_path).path for corpus in (few, many)}
    assert len(paths) == 2


def test_two_processes_may_fill_one_cache_at_once(text: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from gsm.data.corpus import Corpus; from gsm.data import tokens\n"
        "corpus, folder = Corpus(sys.argv[1]), Path(sys.argv[2])\n"
        "tokenizer = tokens.find_or_train(corpus, 300, folder)\n"
        "print(tokens.find_or_encode(corpus, 'train', tokenizer, folder).open()[:].sum())"
    )
    command = [sys.executable, "-c", code, str(text), str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    sums = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert sums[0] == sums[1] != ""
    assert not list(tmp_path.glob(".*partial"))


def test_what_another_process_finished_meanwhile_is_not_made_again(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B looked before A was done and asked for the lock after: it waited for nobody, and deleted A's shards."""
    corpus, tokenizer = Corpus(text), find_or_train(Corpus(text), 300, tmp_path)
    split = find_or_encode(corpus, "train", tokenizer, tmp_path)

    def late(look: Any) -> Any:
        looks = iter([lambda _: None])
        return lambda path: next(looks, look)(path)

    def refuse(*_: object) -> None:
        raise AssertionError("this was made already")

    for maker in ("_encode", "_train"):
        monkeypatch.setattr(tokens, maker, refuse)
    monkeypatch.setattr(tokens, "read_index", late(tokens.read_index))
    monkeypatch.setattr(tokens, "_read_tokenizer", late(tokens._read_tokenizer))
    assert find_or_encode(corpus, "train", tokenizer, tmp_path) == split
    assert find_or_train(corpus, 300, tmp_path).digest == tokenizer.digest


def test_what_a_killed_process_left_half_written_is_swept_away(text: Path, tmp_path: Path) -> None:
    """Each kill left 128 MiB of a shard for ever."""
    corpus, tokenizer = Corpus(text), Tokenizer.plain_bytes()
    split = find_or_encode(corpus, "train", tokenizer, tmp_path)
    (left := split.path / ".00001.bin.999-abcdef.partial").write_bytes(b"half")
    (split.path / "index.json").unlink()
    assert find_or_encode(corpus, "train", tokenizer, tmp_path) == split and not left.exists()


def test_a_file_whose_making_fails_leaves_nothing_behind_and_the_old_one_untouched(tmp_path: Path) -> None:
    path = tmp_path / "thing.json"
    files.write_json(path, {"of": "before"})
    with pytest.raises(RuntimeError, match="went away"), files.replacing(path) as file:
        file.write(b"half")
        raise RuntimeError("the disk went away")
    assert [found.name for found in tmp_path.iterdir()] == ["thing.json"] and "before" in path.read_text()


def test_the_cache_lies_where_it_is_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GSM_CACHE", str(tmp_path / "environment"))
    assert cache_folder(tmp_path / "chosen") == tmp_path / "chosen"
    assert cache_folder() == tmp_path / "environment"
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="set data.cache_dir or GSM_CACHE"):
        cache_folder(tmp_path / "file")


def test_ids_take_two_bytes_while_they_fit() -> None:
    class Large:
        vocabulary, end_of_text = 70_000, 69_999
        encode_batch = staticmethod(lambda texts: [[69_000] for _ in texts])

    pieces = [Piece("ab", last=True), Piece("ü", last=True)]
    assert encode_parcel(pieces, Tokenizer.plain_bytes()).ids.dtype == np.uint16
    encoded = encode_parcel(pieces, Large())  # type: ignore[arg-type]
    assert encoded.ids.dtype == np.uint32 and encoded.ids.tolist() == [69_000, 69_999] * 2
    assert encoded.ends_P.tolist() == [2, 4] and encoded.bytes_P.tolist() == [2, 2]


@pytest.mark.parametrize("held_out", [None, "*fe*"])
def test_a_file_whose_name_is_not_utf8_is_named(held_out: str | None, tmp_path: Path) -> None:
    tiny_text.write(tmp_path)
    try:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff_fe.txt")).write_text("some text of its own")
    except OSError:
        pytest.skip("this file system takes no such name")
    with pytest.raises(
        ValueError, match=r"^the name of '.*\\udcff_fe\.txt' is not UTF-8; give it another one, or leave it"
    ):
        _ = Corpus(tmp_path, validation=held_out).digest
    assert Corpus(tmp_path, files="module_*").digest
