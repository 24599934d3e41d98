"""Many files, many ranks: who reads what, where it goes on, what is never trained on, and files that are damaged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packed import json_lines, pack
from torch import Tensor

from gsm.config.compose import compose
from gsm.config.load import instantiate
from gsm.data import reading, shards
from gsm.data.corpus import Corpus
from gsm.data.fineweb import FineWeb, text_data
from gsm.data.module import TextData
from gsm.data.reading import Damaged

NUMBERS: dict[str, Any] = {"vocabulary": 257, "context": 16, "tokenizer": "bytes"}


def page(number: int) -> str:
    return f"Page {number:04d} of the web.\n" * 3


def table(path: Path, numbers: range) -> Path:
    """A parquet file of these pages, in row groups of four."""
    arrow = pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
    import pyarrow.parquet

    path.parent.mkdir(exist_ok=True, parents=True)
    texts = arrow.table({"id": list(numbers), "text": [page(number) for number in numbers]})
    pyarrow.parquet.write_table(texts, path, row_group_size=4)
    return path


@pytest.fixture
def web(tmp_path: Path) -> Path:
    """Four files of ten pages."""
    for rank in range(4):
        table(tmp_path / f"web/{rank:03d}.parquet", range(10 * rank, 10 * rank + 10))
    return tmp_path / "web"


@pytest.fixture(params=["fineweb", "folder"])
def make(request: pytest.FixtureRequest, web: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Parquet files, or a folder of texts, as data whose shards are much shorter than a pass over them."""
    monkeypatch.setattr(shards, "SHARD", 301)
    given = {**NUMBERS, "path": str(web), "cache_dir": str(tmp_path / "cache")}
    if request.param == "fineweb":
        return lambda **chosen: text_data(**given, **chosen)
    (tmp_path / "texts").mkdir()
    for number in range(40):
        pack(tmp_path / f"texts/{number:02d}.txt", page(number).encode())
    return lambda **chosen: TextData(**{**given, "path": str(tmp_path / "texts")}, **chosen)


def batches(data: TextData, finished: int = 0, rank: int = 0, world: int = 1) -> list[dict[str, Tensor]]:
    """A pass as one rank takes it in a trainer that has finished so many batches."""
    data.trainer = SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]
        accumulate_grad_batches=1,
        distributed_sampler_kwargs={"num_replicas": world, "rank": rank},
        global_step=finished,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )
    return list(data.train_dataloader())


def together(make: Callable[..., TextData], finished: int, world: int, workers: int) -> list[dict[str, Tensor]]:
    """The batches of all ranks, step by step as one: of 8 sequences, however many ranks there are."""
    ranks = [batches(make(batch_size=8 // world, num_workers=workers), finished, rank, world) for rank in range(world)]
    return [{name: torch.cat([part[name] for part in step]) for name in step[0]} for step in zip(*ranks, strict=True)]


def same(one: list[dict[str, Tensor]], two: list[dict[str, Tensor]]) -> bool:
    return len(one) == len(two) and all(
        torch.equal(a[name], b[name]) for a, b in zip(one, two, strict=True) for name in a
    )


@pytest.mark.parametrize(("world", "workers"), [(2, 0), (4, 0), (2, 1)])
def test_ranks_and_workers_take_together_what_one_process_takes_alone(
    world: int, workers: int, make: Callable[..., TextData]
) -> None:
    alone = batches(make(batch_size=8))
    assert same(together(make, 0, world, workers), alone)
    rows = torch.cat([batch["tokens"] for batch in alone])
    starts = torch.cat([batch["documents"][:, 0] for batch in alone])
    assert len(rows) > 100 and len(set(starts.tolist())) == len(starts), "no sequence twice in a pass"


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (1, 1), (4, 0)])
def test_a_run_goes_on_within_a_shard_with_any_number_of_workers_and_ranks(
    world: int, workers: int, make: Callable[..., TextData]
) -> None:
    """Two steps are 256 ids, less than a shard of 301, and every sequence lies somewhere in one of seven."""
    data = make(batch_size=8)
    whole = batches(data) + batches(make(batch_size=8), finished=len(data.train_dataloader()))
    rest = together(make, 2, world, workers)
    assert len(list(data.split("train").path.glob("*.bin"))) > 5
    assert same(rest, whole[2 : 2 + len(rest)])


def test_what_is_held_out_is_never_trained_on(make: Callable[..., TextData]) -> None:
    data = make(batch_size=1)
    trained, held_out = (bytes(data.split(name).open()[:].astype("uint8")) for name in ("train", "validation"))
    found = [{n for n in range(40) if page(n).encode() in text} for text in (trained, held_out)]
    assert found[0] | found[1] == set(range(40)) and not found[0] & found[1] and found[1]
    assert not {*data.corpus.files["train"]} & {*data.corpus.files["validation"]}


# Damage


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-50])


def flip(path: Path) -> None:
    """Pages that cannot be unpacked, in the last row group: what comes before them is sound."""
    raw = bytearray(path.read_bytes())
    arrow = pytest.importorskip("pyarrow.parquet")
    column = arrow.ParquetFile(path).metadata.row_group(2).column(1)
    for place in range(column.dictionary_page_offset or column.data_page_offset, column.data_page_offset + 40):
        raw[place] ^= 0xFF
    path.write_bytes(bytes(raw))


def no_utf8(path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    offsets = arrow.py_buffer(b"".join(n.to_bytes(4, "little") for n in (0, 2, 4)))
    texts = arrow.Array.from_buffers(arrow.string(), 2, [None, offsets, arrow.py_buffer(b"ok\xff\xfe")])
    pyarrow.parquet.write_table(arrow.table({"text": texts}), path)


def renamed(path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), path)


HARM: dict[str, tuple[Callable[[Path], Any], str, int]] = {  # what happens, what is said, pages that come before it
    "truncated": (cut, "is no sound parquet file", 0),
    "flipped": (flip, "is no sound parquet file", 8),
    "emptied": (lambda path: path.write_bytes(b""), "is no sound parquet file .*0 bytes", 0),
    "without rows": (lambda path: table(path, range(0)), "has no rows", 0),
    "no UTF-8": (no_utf8, "is no sound parquet file .*utf-8", 0),
    "without the column": (renamed, "has no column 'text' but body", 0),
}


@pytest.mark.parametrize("kind", list(HARM))
def test_a_damaged_file_is_named_and_stops_or_is_skipped(
    kind: str, web: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "ROWS", 4)
    harm, said, before = HARM[kind]
    harm(web / "001.parquet")
    with pytest.raises(Damaged, match=f"001.parquet {said}.*data.on_corrupt=skip"):
        list(FineWeb(web).documents("train"))
    chosen = {**NUMBERS, "batch_size": 1, "path": str(web), "cache_dir": str(tmp_path / "cache")}
    with caplog.at_level(logging.WARNING):
        data = text_data(**chosen, on_corrupt="skip")
        data.prepare_data()
    trained = list(data.corpus.documents("train"))
    assert trained == [page(n) for n in [*range(10), *range(10, 10 + before), *range(20, 30)]]
    assert data.split("train").tokens == sum(len(text) + 1 for text in trained)
    assert caplog.text.count("Skipped: ") == 1 and "train split 1 files are skipped" in caplog.messages[-1]
    caplog.clear()
    again = text_data(**chosen, on_corrupt="skip")
    assert again.description()["skipped_files"] == 1 and "damaged files skipped" in again.headline()["data"]
    assert [message for message in caplog.messages if "001.parquet" in message], "also when nothing is read any more"


def test_an_interrupted_encoding_skips_the_same_again(
    web: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(web / "001.parquet")
    monkeypatch.setattr(reading, "ROWS", 4)
    monkeypatch.setattr(shards, "SHARD", 301)
    given = {**NUMBERS, "batch_size": 1, "path": str(web), "on_corrupt": "skip"}
    whole = text_data(**given, cache_dir=str(tmp_path / "whole")).split("train")

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shards.ShardWriter, "finish", interrupt)
        text_data(**given, cache_dir=str(tmp_path / "parts")).prepare_data()
    assert list((tmp_path / "parts").glob("*/train/*.bin"))
    parts = text_data(**given, cache_dir=str(tmp_path / "parts")).split("train")
    assert (parts.open()[:] == whole.open()[:]).all() and parts.skipped == whole.skipped != ()


def test_a_document_that_damage_cut_off_ends_before_the_next_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "WHOLE", 5000)
    text = "".join(f"Line {number * 7919 % 10007} of it.\n" for number in range(2000))
    cut(pack(tmp_path / "a.txt.gz", text.encode()))
    pack(tmp_path / "b.txt", b"whole")
    pack(tmp_path / "c.txt", b"held out")
    cut_off, whole = Corpus(tmp_path, validation="c.txt", on_corrupt="skip").documents("train")
    assert text.startswith(cut_off) and len(cut_off) > 5000 and whole == "whole"


def test_where_no_file_is_sound_skipping_all_of_them_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        pack(tmp_path / f"{name}.jsonl", b"no json\n")
    pack(tmp_path / "c.jsonl", json_lines(["held out"]))
    corpus = Corpus(tmp_path, validation="c.jsonl", on_corrupt="skip")
    with pytest.raises(Damaged, match=r"of 2 files none is sound: .*a\.jsonl, line 1, is not JSON"):
        list(corpus.documents("train"))


def test_another_choice_is_refused(tmp_path: Path) -> None:
    pack(tmp_path / "a.txt", b"x")
    with pytest.raises(ValueError, match="on_corrupt 'ignore' is unknown; give data.on_corrupt one of stop, skip"):
        TextData(**NUMBERS, batch_size=1, path=str(tmp_path), on_corrupt="ignore")


def test_the_yaml_of_a_folder_hands_the_choice_on(tmp_path: Path) -> None:
    pack(tmp_path / "a.txt", b"x")
    config = compose(["data=folder", f"data.path={tmp_path}", "data.on_corrupt=skip", "data.tokenizer=bytes"])
    assert instantiate(config["data"], "data").corpus.damage.choice == "skip"


def test_trouble_of_the_system_is_not_taken_for_damage(web: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be read today is not to be missing from the text for ever."""

    def refuse(*_: object) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(reading, "sound_text", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        list(FineWeb(web, on_corrupt="skip").documents("train"))
