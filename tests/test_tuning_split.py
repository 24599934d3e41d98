"""What is held out to tune on: disjoint from what is trained on and from what is reported, for every data module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_text
import torch

from gsm.config.compose import compose
from gsm.data import tuning
from gsm.data.adaptation import RulerData
from gsm.data.module import TextData
from gsm.data.recall import MultiQueryRecall
from gsm.data.state_tracking import StateTracking
from gsm.data.synthetic import SyntheticData
from gsm.data.tokenizer import Tokenizer
from gsm.data.tuning import Ranges
from gsm.evaluation import tracking
from gsm.evaluation.held_out import _text
from gsm.evaluation.records import Measured
from gsm.paths import variants

BYTES = Tokenizer.plain_bytes()
MADE = ["needle", "recall", "state_tracking"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TextData]:
    """TextData over a small text, with one cache for the whole file."""
    path, cache = tiny_text.write(tmp_path_factory.mktemp("text")), tmp_path_factory.mktemp("cache")
    defaults: dict[str, Any] = {"vocabulary": 320, "context": 16, "batch_size": 4}
    return lambda **chosen: TextData(**{**defaults, "path": str(path), "cache_dir": str(cache), **chosen})


@pytest.fixture(autouse=True)
def short_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small text has several."""
    monkeypatch.setattr(tuning, "LEAST", 300)


def ids(made: TextData, name: str) -> list[int]:
    return made.split(name).open()[:].tolist()


def test_text_is_trained_on_or_tuned_on_and_both_are_what_was_trained_on_before(text: Callable[..., TextData]):
    plain, tuned = text(), text(held_out="tuning")
    split: Any = tuned.split("validation")
    train, held_out, whole = ids(tuned, "train"), ids(tuned, "validation"), ids(plain, "train")
    assert len(split.ranges) > 2, "from all over the text"
    pieces = [whole[start:stop] for start, stop in split.ranges]
    assert held_out == sum(pieces, [])
    rest, before = [], 0
    for start, stop in split.ranges:
        rest, before = [*rest, *whole[before:start]], stop
    assert train == [*rest, *whole[before:]] and len(train) + len(held_out) == len(whole)
    assert 0.02 * len(whole) < len(held_out) < 0.1 * len(whole)


def test_no_document_of_validation_or_of_training_is_tuned_on(
    text: Callable[..., TextData], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tuning, "LEAST", 1300)  # longer than a document
    plain, tuned = text(), text(held_out="tuning")

    def documents(made: TextData, name: str) -> set[str]:
        row = made.tokenizer.decode(ids(made, name))
        return {one for one in row.split('"""Module ') if one}

    trained, held_out = documents(tuned, "train"), documents(tuned, "validation")
    reported = documents(plain, "validation")
    assert held_out and not (held_out & reported or held_out & trained or trained & reported)
    assert documents(plain, "train") == trained | held_out, "ranges end where documents do, so that no one is cut"


def test_only_ids_at_borders_are_near_where_a_document_is_longer_than_a_range(text: Callable[..., TextData]):
    made = text(held_out="tuning", tokenizer="bytes")
    split: Any = made.split("validation")
    assert len(split.ranges) > 2 and sum(stop - start for start, stop in split.ranges) == split.tokens
    assert all(stop <= start for (_, stop), (start, _) in zip(split.ranges, split.ranges[1:], strict=False))


def test_nothing_is_encoded_or_trained_anew_and_the_reported_split_is_not_even_read(
    text: Callable[..., TextData], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    made = text(held_out="tuning", cache_dir=str(tmp_path))
    read: list[str] = []
    pieces = made.corpus.pieces
    monkeypatch.setattr(made.corpus, "pieces", lambda split, *more: read.append(split) or pieces(split, *more))
    made.prepare_data()
    made.setup("fit")
    assert set(read) == {"train"}
    assert made.tokenizer.digest == text().tokenizer.digest
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    again = text(held_out="tuning", cache_dir=str(tmp_path))
    again.prepare_data()
    assert files == sorted(path for path in tmp_path.rglob("*") if path.is_file())


def test_bytes_are_counted_of_each_part(text: Callable[..., TextData]):
    plain, tuned = text(), text(held_out="tuning")
    parts, whole = [tuned.split(name) for name in ("train", "validation")], plain.split("train")
    assert sum(part.bytes for part in parts) == whole.bytes and sum(part.tokens for part in parts) == whole.tokens
    spelled = len(tuned.tokenizer.decode(ids(tuned, "validation")).encode())
    assert parts[1].bytes == spelled - _ends(tuned), "an end of text has no bytes"
    assert tuned.bytes_per_token is not None and tuned.bytes_per_token > 1


def _ends(made: TextData) -> int:
    ends = ids(made, "validation").count(made.tokenizer.end_of_text)
    return ends * len(made.tokenizer.decode([made.tokenizer.end_of_text]).encode())


def test_a_run_on_a_tuning_split_is_known_for_one(text: Callable[..., TextData]):
    plain, tuned = text(), text(held_out="tuning")
    assert tuned.fingerprint() == {**plain.fingerprint(), "held_out": "tuning"}
    assert tuned.description()["held_out"] == "tuning" and "held_out" not in plain.description()
    assert "to tune on" in tuned.headline()["data"] and "to tune on" not in plain.headline()["data"]


def test_at_most_as_much_is_held_out_as_validation_takes(text: Callable[..., TextData]):
    assert text(held_out="tuning", max_validation_tokens=400).split("validation").tokens < 1200
    assert text(held_out="tuning").split("validation").tokens > 1300


def test_ranges_are_one_row(text: Callable[..., TextData]):
    whole = text().split("train").open()
    ranges = [(3, 10), (20, 21), (40, 100)]
    row = np.concatenate([whole[start:stop] for start, stop in ranges])
    made = Ranges(whole, ranges)
    assert len(made) == len(row) == 68
    for start in range(0, 70, 3):
        for stop in range(start, 72, 5):
            assert made[start:stop].tolist() == row[start:stop].tolist()


def test_sequences_that_are_made_are_others_and_trained_on_alike():
    task = MultiQueryRecall(pairs=2)
    common: dict[str, Any] = {"task": task, "vocabulary": 96, "context": 24, "batch_size": 2}
    common["validation_sequences"] = 40
    plain, tuned = SyntheticData(**common), SyntheticData(**common, held_out="tuning")
    seen = {
        tuple(one["tokens"].tolist())
        for made in (plain, SyntheticData(**common, seed=1))
        for one in (made.training_set(lambda _: 24)[i] for i in range(200))
    }
    reported, chosen_by = ({tuple(one["tokens"].tolist()) for one in made.validation()} for made in (plain, tuned))
    assert len(reported | chosen_by | seen) == len(reported) + len(chosen_by) + len(seen)
    mine = [tuned.training_set(lambda _: 24)[i]["tokens"].tolist() for i in range(20)]
    assert mine == [plain.training_set(lambda _: 24)[i]["tokens"].tolist() for i in range(20)]
    assert tuple(tuned.of_length(24, 1)[0]["tokens"].tolist()) in chosen_by


def test_so_are_questions_of_ruler():
    made: dict[str, Any] = {"lengths": [360], "context": 640, "batch_size": 3, "new_tokens": 120, "words": 4}
    plain, tuned = (
        RulerData(vocabulary=257, tokenizer=BYTES, template="short", validation_sequences=6, held_out=held_out, **made)
        for held_out in ("validation", "tuning")
    )
    asked = [{bytes(one.ids(i, 360)[0]) for i in range(6)} for one in (plain.train_set, plain.validation_set)]
    asked.append({bytes(tuned.validation_set.ids(i, 360)[0]) for i in range(6)})
    assert len(set.union(*asked)) == 18
    assert (plain.train_set.ids(0, 360)[0] == tuned.train_set.ids(0, 360)[0]).all()


def test_words_that_a_model_is_tested_with_after_training_are_others_too(monkeypatch: pytest.MonkeyPatch):
    seen: list[bytes] = []

    def last_states(model: Any, words: list[Any], steps: bool) -> torch.Tensor:
        seen.append(np.stack(words).tobytes())
        return torch.zeros(len(words), dtype=torch.bool)

    monkeypatch.setattr(tracking, "last_states", last_states)
    for seed in tracking.HELD_OUT, tracking.HELD_OUT - 1:
        model: Any = None
        tracking.measure(model, StateTracking(groups=["S3"], tested=[8]), 16, 4, seed)
    assert seen[0] != seen[1]


def test_what_is_measured_of_an_attempt_is_not_called_validation():
    asked = {"split": "validation", "sequences": 1, "context": 8, "documents": ""}
    tuning = {"corpus": "books", "held_out": "tuning"}
    assert _text(Measured({"questions": {**asked, "data": tuning}})).startswith("tuning of books")
    assert _text(Measured({"questions": {**asked, "data": {"corpus": "books"}}})).startswith("validation of books")


@pytest.mark.parametrize("name", variants("data"))
def test_every_data_yaml_has_the_switch_and_validates_on_what_is_reported_unless_it_is_used(name: str):
    path = ["data.path=."] if name == "folder" else []
    assert compose([f"data={name}", *path])["data"]["held_out"] == "validation"
