"""The corpus, its division into splits, and the cache of what is made from it."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import tiny_text

from gsm import files
from gsm.config.check import ConfigError
from gsm.config.compose import compose
from gsm.config.stored import checkpoint_folder
from gsm.data import cache
from gsm.data.cache import cache_folder
from gsm.data.corpus import Corpus, fraction, standard_library
from gsm.data.ids import open_ids, write_ids
from gsm.data.reading import Piece
from gsm.data.tokenizer import Tokenizer
from gsm.data.tokens import find_or_encode, find_or_train
from gsm.evaluation.generate import _read as prompt_of


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


def test_of_few_files_the_one_with_the_lowest_hash_is_held_out(tmp_path: Path) -> None:
    names = sorted("abcdef", key=lambda name: fraction(f"{name}.txt"))
    assert fraction(f"{names[0]}.txt") > 0.05
    files = few(tmp_path, **dict.fromkeys(names, 100)).files
    assert files["validation"] == [f"{names[0]}.txt"] and len(files["train"]) == 5


def test_the_standard_library_is_divided_as_it_always_was() -> None:
    """Published losses are of this split."""
    files = standard_library().files
    chosen = {name for name in files["train"] + files["validation"] if fraction(name) < 0.05}
    assert set(files["validation"]) == chosen and 0.03 < len(chosen) / len(files["train"]) < 0.08
    assert {"json/decoder.py", "ast.py"} <= {*files["train"]}


@pytest.mark.parametrize("large", ["held out", "trained on"])
def test_an_odd_division_is_answered_with_the_key(large: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lowest, other = sorted(("book", "note"), key=lambda name: fraction(f"{name}.txt"))
    big = lowest if large == "held out" else other
    corpus = few(tmp_path, **{lowest: 20, other: 20, big: 50_000})
    assert corpus.files == {"train": [f"{other}.txt"], "validation": [f"{lowest}.txt"]}
    assert "data.validation=" in caplog.text


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


def test_the_standard_library_is_its_core_without_tests_and_installed_packages(tmp_path: Path) -> None:
    kept = ["abc.py", "json/decoder.py", "unittest/case.py"]
    left_out = ["test/a.py", "unittest/test/b.py", "ctypes/tests/c.py", "site-packages/torch.py", "idlelib/d.py"]
    left_out += ["config-3.11-x86_64-linux-gnu/e.py", "_sysconfigdata__linux.py", "json/notes.txt", "empty.py"]
    for name in kept + left_out:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty.py" else "x")
    files = standard_library(tmp_path).files
    assert sorted(files["train"] + files["validation"]) == kept


def test_a_text_in_latin1_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every umlaut became U+FFFD without a word."""
    (tmp_path / "a.txt").write_bytes("Zwölf größere Boxkämpfer\n".encode("latin1") * 9)
    (tmp_path / "b.txt").write_text("plain\n" * 999 + "a\0b")
    corpus = Corpus(tmp_path)
    for _ in range(2):
        assert len([text for split in corpus.files for text in corpus.documents(split)]) == 2
    (line,) = [message for message in caplog.messages if "UTF-8" in message]
    assert "a.txt, 36 of 225 characters are NUL or not UTF-8" in line and "iconv -f latin1" in line


def test_links_to_folders_are_followed_and_each_file_is_read_once(tmp_path: Path) -> None:
    """A linked folder was passed over without a word."""
    for name in ("texts/own.txt", "texts/below/deep.txt", "elsewhere/other.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    root = tmp_path / "texts"
    (root / "a_link").symlink_to(tmp_path / "elsewhere")
    (root / "again").symlink_to(root / "below")
    (root / "below" / "circle").symlink_to(root)
    files = Corpus(root).files
    assert sorted(files["train"] + files["validation"]) == ["a_link/other.txt", "below/deep.txt", "own.txt"]


def test_files_left_out_are_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.txt", "b.txt", ".hidden.txt", "c.pdf"):
        (tmp_path / name).write_text("text")
    (tmp_path / "empty.txt").touch()
    with caplog.at_level(logging.INFO):
        files = Corpus(tmp_path).files
        _ = standard_library().files
    assert sorted(files["train"] + files["validation"]) == ["a.txt", "b.txt"]
    (line,) = caplog.messages
    assert line.endswith("3 hidden, empty and other files (.hidden.txt, c.pdf, empty.txt).")


def test_a_text_that_is_a_link_to_nothing_is_refused(tmp_path: Path) -> None:
    """Six texts of twelve were links to nothing, and the other six trained on."""
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    few(tmp_path, a=9, b=9)
    assert Corpus(tmp_path).files
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere.txt")
    with pytest.raises(ValueError, match="gone.txt"):
        _ = Corpus(tmp_path).files


def test_a_path_that_begins_with_a_tilde_is_in_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bash leaves the one behind `=`; a folder called ~ was made, and TensorBoard's events went to the home."""
    home = tmp_path / "hö me"
    (home / "texts").mkdir(parents=True)
    tiny_text.write(home / "texts")
    monkeypatch.setenv("HOME", str(home))
    composed = compose(["data=folder", "data.path='~/texts'", "logs='~'"])
    assert composed["data"]["path"] == f"{home}/texts" and composed["folder"].startswith(f"{home}/default/")
    assert Corpus("~/texts").digest == Corpus(home / "texts").digest
    assert checkpoint_folder("~/run").is_relative_to(home) and cache_folder("~/cache") == home / "cache"
    with pytest.raises(FileNotFoundError, match="tokenizer.*me/tokenizer.json"):
        Tokenizer.from_file("~/tokenizer.json")


@pytest.mark.parametrize("place", ["a folder", "200 MB"])
def test_readers_of_files_that_a_user_names_end_in_a_sentence(place: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if place == "a folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(200 << 20)
    assert files.read_json(path) is None
    with pytest.raises(ConfigError, match=f"file .*{path}"):
        prompt_of(str(path))


def test_a_prompt_from_a_file_or_the_command_line_can_be_written(tmp_path: Path) -> None:
    """A mark of the byte order was read as a token, and bytes of a command line that are no UTF-8 were a traceback."""
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfZw\xc3\xb6lf")
    assert prompt_of(str(tmp_path / "a.txt")) == "Zwölf"


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


@pytest.mark.parametrize("damage", ["truncated", "longer", "missing", "index"])
def test_a_cache_that_is_incomplete_is_made_again(
    damage: str, text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corpus, tokenizer = Corpus(text), Tokenizer.plain_bytes()
    split = find_or_encode(corpus, "train", tokenizer, tmp_path)
    path, index = split.path / "ids.bin", split.path / "index.json"
    sound = path.read_bytes()
    {
        "truncated": lambda: path.write_bytes(sound[:-100]),
        "longer": lambda: path.write_bytes(sound + b"more"),
        "missing": path.unlink,
        "index": lambda: index.write_text('{"tokens": 7}'),
    }[damage]()
    with caplog.at_level(logging.WARNING):
        assert find_or_encode(corpus, "train", tokenizer, tmp_path) == split
    assert "are made again" in caplog.text and path.read_bytes() == sound


def test_a_tokenizer_file_that_was_cut_short_is_made_again(text: Path, tmp_path: Path) -> None:
    first = find_or_train(Corpus(text), 300, tmp_path)
    (file,) = tmp_path.glob("tokenizer-*.json")
    sound = file.read_bytes()
    for damaged in (sound[:1000], sound.replace(b"merges", b"verges")):
        file.write_bytes(damaged)
        assert find_or_train(Corpus(text), 300, tmp_path).digest == first.digest
        assert file.read_bytes() == sound


def test_a_file_whose_making_fails_leaves_nothing_behind_and_the_old_one_untouched(tmp_path: Path) -> None:
    path = tmp_path / "thing.json"
    files.write_json(path, {"of": "before"})
    with pytest.raises(RuntimeError, match="went away"), files.replacing(path) as file:
        file.write(b"half")
        raise RuntimeError("the disk went away")
    assert [found.name for found in tmp_path.iterdir()] == ["thing.json"] and "before" in path.read_text()


def test_a_clone_that_cannot_be_written_to_caches_with_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GSM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setattr(cache, "in_clone", lambda: True)
    monkeypatch.setattr(cache, "ROOT", tmp_path)
    assert cache_folder() == tmp_path / ".cache/gsm"
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(cache, "ROOT", tmp_path / "file")  # where root, too, can make no folder
    assert cache_folder() == tmp_path / "user/gsm"
    monkeypatch.setenv("GSM_CACHE", str(tmp_path / "environment"))
    assert cache_folder() == tmp_path / "environment"


def test_ids_take_two_bytes_while_they_fit(tmp_path: Path) -> None:
    class Large:
        kind, vocabulary, end_of_text, token_lengths_V = "bpe", 70_000, 69_999, np.ones(70_000, np.int64)
        encode_batch = staticmethod(lambda texts: [[69_000] for _ in texts])
        parts = staticmethod(lambda text: [text])

    pieces = [Piece("ab", last=True), Piece("ü", last=True)]
    assert write_ids(tmp_path, pieces, Tokenizer.plain_bytes())["dtype"] == "uint16"
    index = write_ids(tmp_path, pieces, Large())  # type: ignore[arg-type]
    assert index == {"tokens": 4, "bytes": 4, "spelled": 4, "lost": 0, "dtype": "uint32"}
    assert open_ids(tmp_path, 4, "uint32").tolist() == [69_000, 69_999] * 2
