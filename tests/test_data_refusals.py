"""Data and measures refuse a wrong value, or a damaged file, by its key, or its place."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

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
from gsm.data.recall import Chain, MultiQueryRecall, Needle, Paraphrase
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


VALUES: list[tuple[str, Callable[[], object]]] = [
    ("length", lambda: questions("niah_single_1", 500)),
    ("length", lambda: questions("niah_multikey_1", 200, "short")),
    ("task", lambda: questions("niah_single_4", 500)),
    ("template", lambda: Ingredients.choose("long")),
    ("new_tokens", lambda: Ingredients.choose(new_tokens=0)),
    ("words", lambda: open_keys(words=1)),
    ("keys", lambda: open_keys("words.json")),
    ("haystack", lambda: Haystack(" ", "void")),
    ("haystack", lambda: open_haystack("/nowhere")),
    ("new_tokens", lambda: examples(new_tokens=30, answers="cot")),
    ("length", lambda: examples(lengths=[360, 200])),
    ("lengths", lambda: examples(lengths=[700])),
    ("answers", lambda: examples(answers="long")),
    ("tasks", lambda: examples(tasks=["niah"])),
    ("examples", lambda: examples(examples=0)),
    ("held_out", lambda: examples(held_out="tunin")),
    ("length", lambda: ruler(lengths=(100,))),
    ("lengths", lambda: ruler(lengths=(0,))),
    ("examples", lambda: ruler(examples=0)),
    ("tasks", lambda: ruler(tasks=("niah",))),
    ("answers", lambda: ruler(answers="long")),
    ("context", lambda: text(context=1)),
    ("context", lambda: text(context=10**6).validation_set),
    ("batch_size", lambda: text(batch_size=0)),
    ("validation_sequences", lambda: text(validation_sequences=0)),
    ("max_tokens", lambda: text(max_tokens=16)),
    ("end_of_text", lambda: text(end_of_text="</s>")),
    ("files", lambda: text(path=None, files="*")),
    ("tokenizer", lambda: text(tokenizer="words")),
    ("tokenizer", lambda: text(tokenizer="nowhere.json")),
    ("size.vocabulary", lambda: text(vocabulary=256)),
    ("size.vocabulary", lambda: text(vocabulary=100, tokenizer="bytes")),
    ("size.vocabulary", lambda: text(vocabulary=200, tokenizer=BYTES)),
    ("path", lambda: text(path="/nowhere")),
    ("path", lambda: text(corpus=Corpus(PAGES))),
    ("held_out", lambda: text(held_out="tunin")),
    ("documents", lambda: text(documents="apart")),
    ("held_out", lambda: divide(Split("train", Path(), 10, 10, 10, 0, "uint16"), BYTES)),
    ("tokenizer", lambda: Tokenizer.from_state({"kind": "words", "json": None})),
    ("tokenizer", lambda: Tokenizer.from_state({"kind": "bpe", "json": '{"model":'})),
    ("gap", partial(Needle, gap=-1)),
    ("pairs", partial(Needle, gap=1, keys=3, pairs=4)),
    ("asked", partial(Needle, gap=1, asked=0)),
    ("asked", partial(Needle, gap=1, pairs=4, asked=5)),
    ("hops", partial(Chain, gap=1, pairs=10, hops=3)),
    ("hops", partial(Chain, gap=1, hops=0)),
    ("names", partial(Paraphrase, gap=1, names=5)),
    ("pairs", partial(Paraphrase, gap=1, names=8)),
    ("literal", partial(Paraphrase, gap=1, names=2, literal=1.5)),
    ("names", partial(Paraphrase, gap=1, names=2, left_out=True)),
    ("values", partial(MultiQueryRecall, values=0)),
    ("context", lambda: needles(context=30)),
    ("size.vocabulary", lambda: needles(vocabulary=20)),
    ("batch_size", lambda: needles(batch_size=0)),
    ("shortest", lambda: needles(shortest=8)),
    ("grow_from", lambda: needles(shortest=20, grow_from=0.9)),
    ("held_out", lambda: needles(held_out="tunin")),
    ("seed", lambda: needles(seed=2**32 - 1)),
    ("seed", lambda: needles(seed=2**32 - 2)),
    ("loads", partial(Capacity, loads={"seek": [1]}, gap=1)),
    ("loads", partial(Capacity, loads={"find": []}, gap=1)),
    ("loads.wait", partial(Capacity, loads={"wait": [0]}, gap=1)),
    ("keys", partial(Capacity, loads={"find": [21]}, gap=1, keys=20)),
    ("gap", partial(Capacity, loads={"find": [1]}, gap=-1)),
    ("keys", partial(InContextRecall, keys=0)),
    ("noise", partial(InContextRecall, noise=1.0)),
    ("longest", partial(FuzzyRecall, longest=8)),
    ("copied", partial(SelectiveCopy, copied=0)),
    ("groups", partial(group, "A5")),
    ("groups", partial(group, "S7")),
    ("groups", partial(StateTracking, groups=["S3", "S3"])),
    ("groups", partial(StateTracking, groups=[])),
    ("letters", partial(StateTracking, letters="some")),
    ("answers", partial(StateTracking, answers="cot")),
    ("ask", partial(StateTracking, answers="steps", ask="end")),
    ("tested", partial(StateTracking, tested=[0])),
    ("lengths", lambda: windows([20, 9], 9)),
    ("scored", lambda: windows([20], 21)),
    ("lengths", lambda: windows([40], 9)),
    ("documents", lambda: Lengths(documents=["maybe"])),
    ("documents", lambda: Lengths(documents=[])),
    ("order", lambda: grams(order=0)),
    ("tokens", lambda: grams(vocabulary=4)),
    ("documents", lambda: grams(documents=[0.2, 0.7, 1.0])),
]


@pytest.mark.parametrize(("key", "make"), VALUES, ids=lambda x: x if isinstance(x, str) else None)
def test_a_wrong_value_is_refused_by_its_key(key: str, make: Callable[[], object]) -> None:
    with pytest.raises((ValueError, OSError), match=rf"^{re.escape(key)}(?![\w.])"):
        make()


FILES: list[tuple[str, bytes, str]] = [  # in a folder with a sound text, and the place that is named
    ("a.zip", b"x\n", "a.zip"),
    ("a.json", b"x\n", "a.json"),
    ("a.txt", b"ab\0\0" * 99, "a.txt"),
    ("a.txt", "größer".encode("utf-16-le") * 99, "a.txt"),
    ("a.txt", b"x", "path"),
    ("a.txt", "\ufeffПривет".encode("utf-16-le"), "a.txt .*UTF-16"),
    ("a.jsonl", "\ufeffПривет".encode("utf-16-be"), "a.jsonl .*UTF-16"),
    ("a.txt.gz", "\ufeffПривет".encode("utf-16-le"), "a.txt.gz .*UTF-16"),
    ("a.jsonl", json_lines(["fine"]) + b"not json", "a.jsonl, line 2"),
    ("a.jsonl", json_lines(["fine"]) + b"[" * 200_000, "a.jsonl, line 2"),
    ("a.jsonl", json_lines(["fine"]) + b'{"body": "x"}', "a.jsonl, line 2.*body"),
    ("a.jsonl", json_lines(["fine"]) + b'["x"]', "a.jsonl, line 2"),
    ("a.jsonl", json_lines(["fine"]) + b'{"text": 5}', "a.jsonl, line 2.* 5 "),
    ("a.parquet", b"no parquet at all", "a.parquet"),
]


@pytest.mark.parametrize(("name", "content", "place"), FILES, ids=[name for name, _, _ in FILES])
def test_a_file_that_is_no_text_is_refused(name: str, content: bytes, place: str, tmp_path: Path) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
    path = pack(tmp_path / name, content)
    with pytest.raises(ValueError, match=place):
        list(Corpus(path).documents("train"))


def test_a_choice_of_files_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        pack(tmp_path / f"{name}.jsonl", json_lines(STORIES))
    cases: list[tuple[str, dict[str, Any]]] = [
        ("data.validation", {"validation": "nothing*"}),
        ("data.validation", {"validation": "*"}),
        ("path", {"files": "nothing*"}),
    ]
    for key, options in cases:
        with pytest.raises(ValueError, match=key):
            _ = Corpus(tmp_path, **options).files


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
        with pytest.raises(OSError, match="data.cache_dir"):
            make()


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.zst"])
def test_a_missing_package_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ModuleNotFoundError, match=f"{name}.*pyarrow"):
        list(Corpus(tmp_path / name).documents("train"))
