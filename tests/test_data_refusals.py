"""Data and measures refuse a wrong value, or a damaged file, in one sentence that names it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from packed import STORIES, json_lines, pack

from gsm.data.adaptation import RulerData
from gsm.data.cache import cache_folder
from gsm.data.capacity import Capacity
from gsm.data.corpus import Corpus
from gsm.data.groups import group
from gsm.data.ingredients import Haystack, Ingredients, open_haystack, open_keys
from gsm.data.mad import FuzzyRecall, InContextRecall, SelectiveCopy
from gsm.data.module import TextData
from gsm.data.recall import MultiQueryRecall, Needle, Paraphrase
from gsm.data.ruler import Questions
from gsm.data.state_tracking import StateTracking
from gsm.data.synthetic import SyntheticData
from gsm.data.tokenizer import Tokenizer
from gsm.data.tokens import Split, find_or_encode
from gsm.data.tuning import divide
from gsm.errors import ConfigError
from gsm.evaluation import ngrams
from gsm.evaluation.lengths import Lengths
from gsm.evaluation.records import Measured
from gsm.evaluation.ruler import Ruler
from gsm.paths import ROOT

BYTES = Tokenizer.plain_bytes()
PAGES = ROOT / "docs"
NEEDLE = Needle(keys=12, values=9, fillers=5, pairs=4, gap=20)
WINDOW = {"isolated": [{name: np.zeros(37) for name in ("tokens", "targets", "documents")}]}


def questions(task: str, length: int, template: str = "ruler") -> object:
    return Questions(task, BYTES, Ingredients.choose(template)).sample(0, length)


def examples(**options: object) -> None:
    usual = {"lengths": [360, 440], "context": 640, "batch_size": 3, "new_tokens": 120, "words": 4}
    RulerData(vocabulary=257, tokenizer=BYTES, template="short", **{**usual, **options}).prepare_data()


def ruler(**options: object) -> object:
    asked = Ruler(**{"template": "short", "lengths": (400,), **options})
    return asked.measure(None, BYTES, asked.ingredients(), Measured({}))


def text(**options: object) -> object:
    return TextData(**{"vocabulary": 300, "context": 16, "batch_size": 4, "path": str(PAGES), **options})


def needles(**options: object) -> object:
    return SyntheticData(**{"task": NEEDLE, "vocabulary": 26, "context": 64, "batch_size": 1, **options})


def windows(lengths: list[int], scored: int) -> object:
    return Lengths(lengths=lengths, scored=scored).measure(None, WINDOW, Measured({}))


def grams(order: int = 2, vocabulary: int = 7, **rows: list[float]) -> object:
    row = {name: np.array(rows.get(name, [1, 5, 3])) for name in ("tokens", "targets", "documents")}
    return ngrams.measure([row], [row], order=order, vocabulary=vocabulary, bytes_per_token=1.0)


VALUES: list[tuple[Callable[[], object], str]] = [
    (lambda: questions("niah_single_1", 500), "length=500 "),
    (
        lambda: questions("niah_multikey_1", 200, "short"),
        "length=200 is not allowed because a sample of niah_multikey_1",
    ),
    (lambda: questions("niah_single_4", 500), "task=niah_single_4 with part=evaluation "),
    (lambda: Ingredients.choose("long"), "template=long "),
    (lambda: Ingredients.choose(new_tokens=0), "new_tokens=0"),
    (lambda: open_keys(words=1), "words=1 is not allowed"),
    (lambda: Haystack(" ", "void"), "haystack=void is not allowed because it has no words"),
    (lambda: open_haystack("/nowhere"), "haystack=/nowhere is not allowed because there is no such file"),
    (lambda: examples(new_tokens=30, answers="cot"), "new_tokens must"),
    (lambda: examples(lengths=[360, 200]), "length=200 is not allowed because a sample of niah_single_1"),
    (lambda: examples(lengths=[700]), "lengths must be at most context=640"),
    (lambda: examples(answers="long"), "answers=long is not allowed"),
    (lambda: examples(tasks=["niah"]), "niah_single_1"),
    (lambda: examples(examples=0), "examples=0"),
    (lambda: examples(held_out="tunin"), "held_out=tunin "),
    (lambda: ruler(lengths=(100,)), "length=100 is not allowed because a sample of niah_single_1"),
    (lambda: ruler(lengths=(0,)), "lengths=0"),
    (lambda: ruler(examples=0), "examples=0"),
    (lambda: ruler(tasks=("niah",)), "tasks must"),
    (lambda: ruler(answers="long"), "answers must"),
    (lambda: text(context=1), "context=1 "),
    (lambda: text(batch_size=0), "batch_size=0 "),
    (lambda: text(validation_sequences=0), "validation_sequences=0 "),
    (lambda: text(max_tokens=16), "max_tokens=16 "),
    (lambda: text(end_of_text="</s>"), "end_of_text must"),
    (lambda: text(path=None, files="*"), "files must"),
    (lambda: text(tokenizer="words"), "tokenizer must"),
    (lambda: text(tokenizer="nowhere.json"), "tokenizer must"),
    (lambda: text(vocabulary=256), "size.vocabulary must be at least 257"),
    (lambda: text(vocabulary=100, tokenizer="bytes"), "size.vocabulary must be at least 257 with tokenizer=bytes"),
    (lambda: text(vocabulary=200, tokenizer=BYTES), "got 200"),
    (lambda: text(path="/nowhere"), "path=/nowhere "),
    (lambda: text(corpus=Corpus(PAGES)), "path, files, validation, text_field must"),
    (lambda: text(held_out="tunin"), "held_out=tunin "),
    (lambda: text(documents="apart"), "documents must"),
    (lambda: divide(Split("train", Path(), 10, 10, 10, 0, "uint16"), BYTES), "held_out=tuning needs"),
    (lambda: Tokenizer.from_state({"kind": "words", "json": None}), "tokenizer must"),
    (lambda: Tokenizer.from_state({"kind": "bpe", "json": '{"model":'}), "tokenizer must"),
    (partial(Needle, gap=-1), "gap=-1 "),
    (partial(Needle, gap=1, keys=3, pairs=4), "pairs must be at most keys=3"),
    (partial(Paraphrase, gap=1, names=5), "names must be a divisor of keys=32"),
    (partial(Paraphrase, gap=1, names=8), "pairs must be at most 4"),
    (partial(Paraphrase, gap=1, names=2, literal=1.5), "literal=1.5 "),
    (partial(Paraphrase, gap=1, names=2, left_out=True), "names must be at least 3"),
    (partial(MultiQueryRecall, values=0), "values=0 "),
    (lambda: needles(context=30), "context must be at least 36"),
    (lambda: needles(vocabulary=20), "size.vocabulary=20 "),
    (lambda: needles(batch_size=0), "batch_size=0 "),
    (lambda: needles(shortest=8), "shortest=8 "),
    (lambda: needles(shortest=20, grow_from=0.9), "grow_from=0.9 "),
    (lambda: needles(held_out="tunin"), "held_out=tunin "),
    (lambda: needles(seed=2**32 - 1), "seed=4294967295 "),
    (lambda: needles(seed=2**32 - 2), "seed=4294967294 "),
    (partial(Capacity, loads={"seek": [1]}, gap=1), "loads.seek is not allowed because it is no kind"),
    (partial(Capacity, loads={"find": []}, gap=1), "loads must"),
    (partial(Capacity, loads={"wait": [0]}, gap=1), "Use numbers of 1 or more"),
    (partial(Capacity, loads={"find": [21]}, gap=1, keys=20), "keys must be at least 21"),
    (partial(Capacity, loads={"find": [1]}, gap=-1), "gap=-1 "),
    (partial(InContextRecall, keys=0), "keys=0 "),
    (partial(InContextRecall, noise=1.0), "noise must"),
    (partial(FuzzyRecall, longest=8), "longest=8 "),
    (partial(SelectiveCopy, copied=0), "copied=0 "),
    (partial(group, "A5"), "groups=A5 is not allowed because it is no known group"),
    (partial(group, "S7"), "permutations of n things, 2 to 6"),
    (partial(StateTracking, groups=["S3", "S3"]), "groups must"),
    (partial(StateTracking, groups=[]), "groups must be one"),
    (partial(StateTracking, letters="some"), "letters must"),
    (partial(StateTracking, answers="cot"), "answers must"),
    (partial(StateTracking, answers="steps", ask="end"), "ask must be every"),
    (partial(StateTracking, tested=[0]), "tested must"),
    (lambda: windows([20, 9], 9), "lengths must"),
    (lambda: windows([20], 21), "scored=21 "),
    (lambda: windows([40], 9), "lengths must"),
    (lambda: Lengths(documents=["maybe"]), "got maybe"),
    (lambda: Lengths(documents=[]), "got nothing"),
    (lambda: grams(order=0), "n-gram order 0 is too small"),
    (lambda: grams(vocabulary=4), "lies outside vocabulary 4"),
    (lambda: grams(documents=[0.2, 0.7, 1.0]), "documents must be whole numbers, got float64"),
]


@pytest.mark.parametrize(("make", "words"), VALUES, ids=[words for _, words in VALUES])
def test_a_wrong_value_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises((ValueError, OSError)) as refusal:
        make()
    assert words in str(refusal.value)


FILES: list[tuple[str, bytes, str]] = [  # in a folder with a sound text
    ("a.zip", b"x\n", "a.zip has none of the endings of text (.py, "),
    ("a.json", b"x\n", "a.json has none of the endings of text"),
    ("a.txt", b"ab\0\0" * 99, "a.txt is no text in UTF-8"),
    ("a.txt", "größer".encode("utf-16-le") * 99, "a.txt is no text in UTF-8"),
    ("a.txt", b"x", "path must"),
    ("a.txt", "\ufeffПривет".encode("utf-16-le"), "a.txt is UTF-16; convert it with iconv -f UTF-16 -t UTF-8"),
    ("a.jsonl", "\ufeffПривет".encode("utf-16-be"), "a.jsonl is UTF-16"),
    ("a.txt.gz", "\ufeffПривет".encode("utf-16-le"), "a.txt.gz is UTF-16"),
    ("a.jsonl", json_lines(["fine"]) + b"not json", "a.jsonl, line 2, is not JSON"),
    ("a.jsonl", json_lines(["fine"]) + b"[" * 200_000, "a.jsonl, line 2, is not JSON"),
    ("a.jsonl", json_lines(["fine"]) + b'{"body": "x"}', "line 2, has no field 'text' but fields body; set"),
    ("a.jsonl", json_lines(["fine"]) + b'["x"]', "line 2, has no field 'text' but ['x']"),
    ("a.jsonl", json_lines(["fine"]) + b'{"text": 5}', "line 2, holds 5 in field 'text', which is no text"),
    ("a.parquet", b"no parquet at all", "a.parquet is damaged or cut short"),
]


@pytest.mark.parametrize(("name", "content", "words"), FILES, ids=[f"{name}: {words}" for name, _, words in FILES])
def test_a_file_that_is_no_text_is_refused(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
    path = pack(tmp_path / name, content)
    with pytest.raises(ValueError) as refusal:
        list(Corpus(path).documents("train"))
    assert words in str(refusal.value)


def test_a_choice_of_files_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        pack(tmp_path / f"{name}.jsonl", json_lines(STORIES))
    for options, words in (
        ({"validation": "nothing*"}, "data.validation fits no file: data.validation is ['nothing*']"),
        ({"validation": "*"}, "nothing is left to train on"),
        ({"files": "nothing*"}, "path must hold text that fits nothing*"),
    ):
        with pytest.raises(ValueError) as refusal:
            _ = Corpus(tmp_path, **options).files
        assert words in str(refusal.value)


TOKENIZERS = {
    "no JSON": "{",
    "no model": '{"model_type": 1}',
    "an unknown model": '{"model": {"type": "Unheard", "vocab": {}}}',
    "no bytes": tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}, unk_token="a")).to_str(),
}


@pytest.mark.parametrize("kind", list(TOKENIZERS))
def test_a_file_that_is_no_usable_tokenizer_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(TOKENIZERS[kind])
    with pytest.raises(ConfigError, match="^tokenizer .*a.json"):
        Tokenizer.from_file(str(tmp_path / "a.json"))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for make in (
        lambda: cache_folder(tmp_path / "file"),
        lambda: find_or_encode(Corpus(PAGES), "train", BYTES, tmp_path / "file"),
    ):
        with pytest.raises(OSError, match="set data.cache_dir or GSM_CACHE"):
            make()


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.zst"])
def test_a_missing_package_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ModuleNotFoundError, match=rf"{name} need the package pyarrow.*pip install"):
        list(Corpus(tmp_path / name).documents("train"))
