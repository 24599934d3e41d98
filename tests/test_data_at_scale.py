"""Many files, many ranks: who reads what, where it goes on, what is never trained on, and files that are damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packed import pack
from torch import Tensor

from gsm.config.check import ConfigError
from gsm.config.compose import compose
from gsm.config.load import instantiate_data
from gsm.data import reading
from gsm.data.fineweb import FineWeb, text_data
from gsm.data.module import TextData
from gsm.data.reading import Damaged
from gsm.training.folder import differences

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
def make(request: pytest.FixtureRequest, web: Path, tmp_path: Path) -> Any:
    """Parquet files, or a folder of texts."""
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


def together(make: Callable[..., TextData], finished: int, world: int) -> list[dict[str, Tensor]]:
    """The batches of all ranks, step by step as one: of 8 sequences, however many ranks there are."""
    ranks = [batches(make(batch_size=8 // world), finished, rank, world) for rank in range(world)]
    return [{name: torch.cat([part[name] for part in step]) for name in step[0]} for step in zip(*ranks, strict=True)]


def same(one: list[dict[str, Tensor]], two: list[dict[str, Tensor]]) -> bool:
    return len(one) == len(two) and all(
        torch.equal(a[name], b[name]) for a, b in zip(one, two, strict=True) for name in a
    )


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_take_together_what_one_process_takes_alone(world: int, make: Callable[..., TextData]) -> None:
    alone = batches(make(batch_size=8))
    assert same(together(make, 0, world), alone)
    rows = torch.cat([batch["tokens"] for batch in alone])
    starts = torch.cat([batch["documents"][:, 0] for batch in alone])
    assert len(rows) > 100 and len(set(starts.tolist())) == len(starts), "no sequence twice in a pass"


@pytest.mark.parametrize("world", [1, 4])
def test_a_run_goes_on_with_any_number_of_ranks(world: int, make: Callable[..., TextData]) -> None:
    data = make(batch_size=8)
    whole = batches(data) + batches(make(batch_size=8), finished=len(data.train_dataloader()))
    rest = together(make, 2, world)
    assert same(rest, whole[2 : 2 + len(rest)])


def test_what_is_held_out_is_never_trained_on(make: Callable[..., TextData]) -> None:
    data = make(batch_size=1)
    trained, held_out = (bytes(data.split(name).open()[:].astype("uint8")) for name in ("train", "validation"))
    found = [{n for n in range(40) if page(n).encode() in text} for text in (trained, held_out)]
    assert found[0] | found[1] == set(range(40)) and not found[0] & found[1] and found[1]
    assert not {*data.corpus.files["train"]} & {*data.corpus.files["validation"]}


# Damage


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


HARM: dict[str, Callable[[Path], Any]] = {
    "flipped": flip,
    "emptied": lambda path: path.write_bytes(b""),
    "no UTF-8": no_utf8,
}


@pytest.mark.parametrize("kind", list(HARM))
def test_a_damaged_file_stops_the_run_and_is_named(kind: str, web: Path, tmp_path: Path) -> None:
    HARM[kind](web / "001.parquet")
    data = text_data(**NUMBERS, batch_size=1, path=str(web), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(Damaged, match="001.parquet"):
        data.prepare_data()


def test_a_checkpoint_with_withdrawn_arguments_still_opens_its_data(tmp_path: Path) -> None:
    pack(tmp_path / "a.txt", b"x")
    config = compose(["data=folder", f"data.path={tmp_path}", "data.tokenizer=bytes"])
    older = {**config["data"], "on_corrupt": "stop", "longest_line": None, "num_workers": 0, "prepare_workers": None}
    assert instantiate_data(older, None).corpus.root == tmp_path


def test_a_withdrawn_argument_that_changed_the_data_is_refused_where_it_has_a_value() -> None:
    """A model that had learnt numbers of five digits was asked for numbers of two."""
    config = compose(["data=ruler", "data.template=short", "data.tokenizer=bytes"])
    older = {**config, "data": {**config["data"], "digits": None, "increment": None}}
    assert instantiate_data(older["data"], None) and not differences(older, config)
    older["data"]["digits"] = 5
    with pytest.raises(ConfigError, match="^data.digits .*got 5"):
        instantiate_data(older["data"], None)
    assert differences(older, config) == ["data.digits (5 there, nothing here)"]


def test_data_of_ones_own_may_have_an_argument_of_a_withdrawn_name() -> None:
    assert instantiate_data({"_target_": f"{__name__}.Own", "num_workers": 4}, None).num_workers == 4


class Own:
    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers


def test_trouble_of_the_system_is_not_taken_for_damage(web: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be read today is not to be missing from the text for ever."""

    def refuse(*_: object) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(reading, "_documents_of", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        list(FineWeb(web).documents("train"))
