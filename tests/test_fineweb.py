"""FineWeb's parquet files of a folder; and of the hub, as far as no network is needed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from gsm.config.compose import compose
from gsm.config.load import instantiate
from gsm.data import fineweb
from gsm.data.fineweb import FineWeb, text_data

arrow = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
datasets = pytest.importorskip("datasets", reason="the extra `data` is not installed")
parquet = pytest.importorskip("pyarrow.parquet", reason="the extra `data` is not installed")


def page(number: int) -> dict[str, Any]:
    """A row in FineWeb's columns."""
    return {
        "text": f"Page {number}: größer\n" * 3,
        "id": f"<urn:uuid:{number}>",
        "dump": "CC-MAIN-2024-10",
        "url": f"https://example.org/{number}",
        "date": "2024-02-20T00:00:00Z",
        "file_path": f"s3://commoncrawl/{number}",
        "language": "en",
        "language_score": 0.97,
        "token_count": 12,
    }


def texts(*numbers: int) -> list[str]:
    return [page(number)["text"] for number in numbers]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files of ten pages."""
    (root := tmp_path / "fineweb").mkdir()
    for rank in range(3):
        rows = [page(number) for number in range(10 * rank, 10 * rank + 10)]
        parquet.write_table(arrow.Table.from_pylist(rows), root / f"{rank:03d}_00000.parquet")
    return root


def test_the_last_file_is_held_out(folder: Path) -> None:
    corpus = FineWeb(folder)
    assert list(corpus.documents("train")) == texts(*range(20))
    assert list(corpus.documents("validation")) == texts(*range(20, 30))


def test_another_file_may_be_held_out_and_some_taken(folder: Path) -> None:
    corpus = FineWeb(folder, files=["000*", "001*"], validation="001*")
    assert list(corpus.documents("train")) == texts(*range(10))
    assert list(corpus.documents("validation")) == texts(*range(10, 20))


def test_the_yaml_takes_a_folder_and_a_number_of_tokens(folder: Path, tmp_path: Path) -> None:
    chosen = ["data.tokenizer=bytes", f"data.path={folder}", f"data.cache_dir={tmp_path / 'cache'}", "size.context=16"]
    limits = ["data.max_tokens=500", "data.max_validation_tokens=200"]
    data = instantiate(compose(["data=fineweb", *chosen, *limits])["data"], "data")
    described = data.description()
    assert (described["corpus"], described["train_tokens"], described["validation_tokens"]) == ("fineweb", 500, 200)
    assert bytes(data.train_set.ids[:50].astype("uint8").tolist()) == texts(0)[0].encode()[:50]


def test_the_hub_is_asked_once_and_its_addresses_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsspec's files in memory stand in for those of the hub, which it opens in the same way."""
    asked: list[tuple[Any, ...]] = []
    names = {path: f"memory://datasets/HuggingFaceFW/fineweb@abc/sample/10BT/{path.name}" for path in folder.iterdir()}
    for path, address in names.items():
        fsspec.filesystem("memory").pipe(address, path.read_bytes())
    addresses = list(names.values())

    def builder(*which: Any, **more: Any) -> Any:
        asked.append((*which, more["revision"]))
        return SimpleNamespace(config=SimpleNamespace(data_files={"train": addresses}))

    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    monkeypatch.setattr(fineweb, "REMOTE", "memory://")
    numbers: dict[str, Any] = {"vocabulary": 300, "context": 16, "batch_size": 2, "max_tokens": 600}
    first, again = (text_data(**numbers, tokenizer="bytes", cache_dir=str(tmp_path / "cache")) for _ in range(2))
    assert first.description() == again.description() and first.description()["train_tokens"] == 600
    assert first.corpus.files["validation"] == [max(addresses)]
    assert asked == [("HuggingFaceFW/fineweb", "sample-10BT", None)]
    chosen = FineWeb(files=["sample/10BT/000*", "sample/10BT/001*"], validation="sample/10BT/001*")
    assert {split: [name[-17:-14] for name in names] for split, names in chosen.files.items()} == {
        "train": ["000"],
        "validation": ["001"],
    }, "patterns are within the repository: a commit stood in their way"
    with pytest.raises(ValueError, match=r"nothing\*.*HuggingFaceFW/fineweb"):
        _ = FineWeb(validation="nothing*").files
    asked[1:] = []
    other = FineWeb(revision="v1")
    assert other.digest == first.corpus.digest and len(asked) == 2, "the same files are the same text"


def test_a_hub_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset_builder", unreachable)
    with pytest.raises(ConnectionError, match="fineweb.*no route.*data.path"):
        list(FineWeb().documents("train"))
