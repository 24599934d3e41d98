"""Packing, the order of training, `TextData`, and that an interrupted run goes on with the very next batch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import tiny_text
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from gsm.config.compose import compose
from gsm.config.load import instantiate
from gsm.data.corpus import Corpus
from gsm.data.module import TextData
from gsm.data.packing import DOCUMENTS, TrainingOrder, validation_batches, validation_indices
from gsm.models.checks import IGNORED


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text.write(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def make(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TextData]:
    """TextData over the small text, with one cache for the whole file."""
    cache = tmp_path_factory.mktemp("cache")
    defaults: dict[str, Any] = {"vocabulary": 320, "context": 16, "batch_size": 4}
    return lambda **chosen: TextData(**{**defaults, "path": str(text), "cache_dir": str(cache), **chosen})


def test_sequences_are_the_documents_one_after_another(make: Callable[..., TextData], text: Path) -> None:
    data = make()
    expected = [
        token
        for document in Corpus(text).documents("train")
        for token in [*data.tokenizer.encode(document), data.tokenizer.end_of_text]
    ]
    ids = torch.cat([data.train_set[i]["tokens"] for i in range(len(data.train_set))])
    assert ids.tolist() == expected[: len(ids)]
    assert 0 < len(expected) - len(ids) <= data.context, "only what fills no whole sequence may be left over"


def test_targets_are_shifted_and_never_cross_a_boundary(make: Callable[..., TextData]) -> None:
    data = make()
    ids = torch.from_numpy(data.train_set.ids[:].astype(np.int64))
    end = data.tokenizer.end_of_text
    for index, row in enumerate(data.consumed(len(data.train_set))):
        start = int(data.order.indices(index, index + 1)[0]) * data.context
        following = ids[start + 1 : start + 1 + data.context]
        assert torch.equal(row["targets"], torch.where(row["tokens"] == end, IGNORED, following))
    predicted = torch.cat([row["targets"] for row in data.consumed(len(data.train_set))])
    assert (predicted == end).sum() > 20, "an end of text is predicted"


def test_documents_change_exactly_after_an_end_of_text(make: Callable[..., TextData]) -> None:
    data = make()
    owner: dict[int, int] = {}
    for index in range(len(data.train_set)):
        row = data.train_set[index]
        ended = (row["tokens"][:-1] == data.tokenizer.end_of_text).long()
        assert torch.equal(row["documents"].diff(), ended)
        for document in row["documents"].unique().tolist():
            assert owner.setdefault(document, index) == index, "two sequences may not share a document id"


def test_all_targets_count_where_documents_say_so(make: Callable[..., TextData]) -> None:
    plain, every, stream = (make(documents=kind).train_set for kind in DOCUMENTS)
    for index in range(len(plain)):
        row, all_targets, run_through = plain[index], every[index], stream[index]
        assert torch.equal(row["tokens"], all_targets["tokens"]) and torch.equal(row["tokens"], run_through["tokens"])
        assert torch.equal(all_targets["targets"], run_through["targets"])
        told = row["targets"] != IGNORED
        assert torch.equal(row["targets"][told], all_targets["targets"][told])
        assert (all_targets["targets"] != IGNORED).all(), "exactly T targets a sequence"
        assert torch.equal(row["documents"], all_targets["documents"])
        assert len(run_through["documents"].unique()) == 1
    assert len({make(documents=kind).train_set[0]["documents"][0].item() for kind in DOCUMENTS}) == 1
    assert len({str(make(documents=kind).fingerprint()) for kind in DOCUMENTS}) == 3, (
        "a run does not go on with another"
    )


def test_a_sequence_belongs_to_the_document_that_it_begins_in(make: Callable[..., TextData]) -> None:
    sequences = make().train_set
    ids = np.asarray(sequences.ids[: len(sequences.ids)])
    starts = np.arange(len(sequences)) * sequences.context
    wanted = [int((ids[:start] == sequences.end_of_text).sum()) for start in starts]
    assert sequences.documents_of(np.arange(len(sequences))).tolist() == wanted
    assert len(set(wanted)) > 1, "the text has several documents"


def test_batches_are_int64_and_hold_the_same_as_single_sequences(make: Callable[..., TextData]) -> None:
    sequences = make().train_set
    batch = sequences.batch([3, 0])
    assert list(batch) == ["tokens", "targets", "documents"]
    for name, value_BT in batch.items():
        assert value_BT.dtype == torch.int64 and value_BT.shape == (2, 16) and value_BT.is_contiguous()
        assert torch.equal(value_BT[0], sequences[3][name])
    with pytest.raises(IndexError, match="there are"):
        _ = sequences[len(sequences)]


def test_every_pass_takes_every_sequence_once_in_another_order() -> None:
    order = TrainingOrder(10, seed=1)
    passes = order.indices(0, 30).reshape(3, 10)
    assert all(sorted(one) == list(range(10)) for one in passes.tolist())
    assert len({tuple(one) for one in passes.tolist()}) == 3
    assert TrainingOrder(10, seed=2).indices(0, 10).tolist() != passes[0].tolist()


def test_the_order_is_a_function_of_the_place_alone() -> None:
    whole = TrainingOrder(7, seed=3).indices(0, 50)
    for start, stop in ((0, 1), (5, 9), (13, 40), (49, 50), (20, 20)):
        assert TrainingOrder(7, seed=3).indices(start, stop).tolist() == whole[start:stop].tolist()


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("limit", [None, 1, 5, 100])
def test_validation_takes_each_sequence_once_however_many_ranks(world: int, limit: int | None) -> None:
    ranks = [validation_batches(10, limit=limit, batch_size=2, rank=rank, world=world) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1, "a rank with fewer batches would make the others wait"
    taken = np.concatenate([indices for batches in ranks for indices in batches])
    assert sorted(taken[taken >= 0]) == {None: [*range(10)], 1: [0], 5: [0, 2, 4, 6, 8], 100: [*range(10)]}[limit]


def test_a_blank_sequence_has_no_targets(make: Callable[..., TextData]) -> None:
    batch = make().train_set.batch([-1, 1])
    assert (batch["targets"][0] == IGNORED).all() and (batch["targets"][1] != IGNORED).any()


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
@pytest.mark.parametrize("limit", [None, 3])
def test_bytes_per_token_counts_the_predicted_targets(
    kind: str, limit: int | None, make: Callable[..., TextData]
) -> None:
    data = make(tokenizer=kind, validation_sequences=limit, batch_size=2)
    length = count = 0
    for batch in data.val_dataloader():
        targets = batch["targets"][batch["targets"] != IGNORED].tolist()
        length += sum(len(data.tokenizer.token_bytes(token)) for token in targets)
        count += len(targets)
    assert data.bytes_per_token == pytest.approx(length / count, rel=1e-12)
    assert count <= (limit or 10**9) * data.context


def test_the_description_counts_files_bytes_and_tokens(make: Callable[..., TextData], text: Path) -> None:
    data = make(tokenizer="bytes")
    described = data.description()
    size = sum(path.stat().st_size for path in text.glob("*.py"))
    assert described["bytes"] == described["train_bytes"] + described["validation_bytes"] == size
    assert described["files"] == described["train_files"] + described["validation_files"] == 40
    assert described["tokens"] == size + 40, "every byte, and one end of text a file"
    assert described["digest"] == Corpus(text).digest
    assert described["python"] == sys.version.split()[0]
    assert json.loads(json.dumps(described)) == described


def test_a_corpus_smaller_than_a_batch_still_trains(make: Callable[..., TextData]) -> None:
    data = make(batch_size=10_000)
    (batch,) = data.train_dataloader()
    assert batch["tokens"].shape == (10_000, 16)


class Reader(lightning.LightningModule):
    """Learns next to nothing and remembers which batches it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        self.seen.append(batch["tokens"])
        return (self.weight - batch["tokens"].float().mean()) ** 2

    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        """Only so that validation happens in between."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def read(data: TextData, steps: int, folder: Path, *, accumulate: int = 1, resume: bool = False) -> Reader:
    keep = ModelCheckpoint(folder, filename="last", every_n_train_steps=1)
    reader = Reader()
    trainer = lightning.Trainer(
        max_steps=steps,
        accumulate_grad_batches=accumulate,
        callbacks=[keep],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        val_check_interval=3,
        check_val_every_n_epoch=None,
    )
    trainer.fit(reader, datamodule=data, ckpt_path=str(newest(folder)) if resume else None)
    return reader


def newest(folder: Path) -> Path:
    return max(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize(("stop", "accumulate"), [("within a pass", 2), ("at its end", 1), ("in the next pass", 2)])
def test_a_resumed_run_takes_the_batches_it_would_have_taken(
    stop: str, accumulate: int, make: Callable[..., TextData], tmp_path: Path
) -> None:
    def fresh() -> TextData:
        return make(context=64, batch_size=8, validation_sequences=2)

    a_pass = len(fresh().train_set) // (8 * accumulate)
    first = {"within a pass": 2, "at its end": a_pass, "in the next pass": a_pass + 1}[stop]
    total = 2 * a_pass + 1
    before = read(fresh(), first, tmp_path, accumulate=accumulate)
    after = read(fresh(), total, tmp_path, accumulate=accumulate, resume=True)
    expected = torch.stack([row["tokens"] for row in fresh().consumed(total * accumulate * 8)])
    assert torch.equal(torch.cat(before.seen + after.seen), expected)


@pytest.mark.parametrize("data", ["needle", "stdlib"])
def test_a_data_module_can_be_printed_before_anything_is_prepared(data: str):
    made = instantiate(compose(["size=pico", f"data={data}"])["data"], "data")
    assert str(made) == f"{type(made).__name__}: batches of {made.batch_size} sequences of 96 tokens"


@pytest.mark.parametrize(("context", "length", "windows"), [(8, 64, 3), (16, 40, 5), (7, 30, 2), (64, 16, 4)])
def test_a_sample_outside_of_windows_shares_no_id_with_them(make, context: int, length: int, windows: int) -> None:
    """Once a quarter of the separate sample of the paper's long context was the text of its windows."""
    data = make(context=context)
    ids = data.of_length(length, windows)
    assert len(ids) == windows
    read = {
        place
        for index in validation_indices((data.split("validation").tokens - 1) // length, windows)
        for place in range(index * length, (index + 1) * length + 1)
    }
    separate = data.outside(windows, length, most=9)
    assert 1 < len(separate) <= 9 and list(separate) == sorted(set(separate))
    for index in separate:
        assert not read & set(range(index * context, (index + 1) * context + 1))
    everything = data.outside(windows, length, most=None)
    apart = [i for i in range(len(data.validation_set)) if not read & set(range(i * context, (i + 1) * context + 1))]
    assert list(everything) == apart
