"""Pictures of a run show what its model does, and the run does not notice."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from short_runs import UNSTEADY
from small import GEOMETRY, build, random_tokens
from test_train_cli import arguments

import gsm
from gsm.analysis.attention import decoder_attention
from gsm.config.compose import compose
from gsm.experiments.fit import assemble
from gsm.observe import tap
from gsm.paths import variants
from gsm.training.callbacks.pictures import TAPS, Pictures, heat_map, histograms, images

STEPS = ["trainer.max_steps=2", "trainer.log_every_n_steps=1", "trainer.val_check_interval=1", "model/residual=plain"]


class Sizes(lightning.Callback):
    """Notes how many bytes of tensors the pictures hold on to after every validation."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_validation_end(self, trainer, pl_module) -> None:
        for held in (vars(one) for one in trainer.callbacks if isinstance(one, Pictures)):
            assert set(held) - {"log", "log_dict"} == set(vars(Pictures()))
            self.seen.append(sum(value.nbytes for value in held["_batch"].values()))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of all runs here: to compose it takes as long as to train."""
    given = [*arguments(tmp_path_factory.mktemp("text")), *STEPS, "model/retriever=separate_indexer"]
    return compose(given)


def trained(config: dict[str, Any], folder: Path, **callbacks: None) -> tuple[dict, list[str], list[int]]:
    """The weights after two steps, the metrics but for those of the pictures, and what these held on to."""
    places = {"csv": {"path": str(folder / "metrics.csv")}, "tensorboard": {"save_dir": str(folder)}}
    logger = {name: {**node, **places[name]} for name, node in config["logger"].items()}
    own = {name: None for name in ("best", "latest")} | callbacks
    run = assemble({**config, "folder": str(folder), "logger": logger, "callbacks": {**config["callbacks"], **own}})
    sizes = Sizes()
    run.trainer.callbacks.append(sizes)
    run.trainer.fit(run.task, datamodule=run.data)
    lines = (folder / "metrics.csv").read_text().splitlines()
    names = [line.split(",")[1] for line in lines]
    skipped = [name in UNSTEADY or name.startswith(("overlap_sample/", "state/")) for name in names]
    kept = [line for line, skip in zip(lines, skipped, strict=True) if not skip]
    return run.model.state_dict(), kept, sizes.seen


def test_a_run_is_the_same_with_pictures_and_without_and_they_do_not_grow(config: dict[str, Any], tmp_path: Path):
    with_weights, with_lines, sizes = trained(config, tmp_path / "with")
    without_weights, without_lines, nothing = trained(config, tmp_path / "without", pictures=None)
    assert with_lines == without_lines and len(with_lines) > 20
    for name, value in with_weights.items():
        assert torch.equal(value, without_weights[name]), name
    assert sizes == [2 * 3 * 32 * 8] * 2 and not nothing, "tokens and documents of three sequences of 32"


class Drawing(torch.nn.Module):
    """Draws from all generators whenever it is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        random.random(), np.random.rand(), torch.rand(1)
        return x


def test_a_model_that_draws_random_numbers_does_not_draw_others_for_it(config: dict[str, Any]):
    run = assemble(config)
    pictures = next(one for one in run.trainer.callbacks if isinstance(one, Pictures))
    run.model.norm = torch.nn.Sequential(run.model.norm, Drawing())
    pictures._batch = {"tokens": torch.zeros(1, 32, dtype=torch.int64), "documents": torch.zeros(1, 32).long()}
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    run.model.train()
    pictures._look(run.trainer, run.task)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert run.model.training


@pytest.mark.parametrize(("every", "steps"), [(1, [2, 4, 6]), (3, [2, 6]), (100, [2])])
def test_they_are_drawn_at_validations_once_enough_steps_were_taken(monkeypatch, every: int, steps: list[int]):
    drawn: list[int] = []
    monkeypatch.setattr(Pictures, "_draw", lambda self, trainer, task, **_: drawn.append(trainer.global_step))
    pictures, trainer = Pictures(every), lightning.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    for step in (2, 4, 6):
        monkeypatch.setattr(lightning.Trainer, "global_step", step)
        pictures.on_validation_start(trainer, None)
    assert drawn == steps
    resumed = Pictures(every)
    resumed.load_state_dict(pictures.state_dict())
    monkeypatch.setattr(lightning.Trainer, "global_step", 7)
    resumed.on_validation_start(trainer, None)
    assert drawn == steps + ([7] if every == 1 else []), "a resumed run goes on counting from its last pictures"


@pytest.mark.parametrize("writer", ["additive", "multi_slot"])
def test_the_decoders_attention_is_the_mean_over_heads_and_rows_that_see_a_whole_state(writer: str):
    model = build(f"gsm-writer={writer}")
    positions = model.writer.positions
    with gsm.record(*TAPS) as seen:
        model(random_tokens(2, 20), documents=torch.tensor([[-1] * 3 + [0] * 17, [0] * 20]), rows=19)
    found = decoder_attention(model, seen)
    assert found.shape == (GEOMETRY.decoder_layers, model.state_size + 1)
    assert torch.allclose(found.sum(1), torch.ones(4))
    last = seen["decoder/8/weights"]  # of rows 1 to 19, at positions -1, -1, 0, ... and 1, 2, ...
    whole = torch.cat([last[0, positions + 1 :], last[1, positions - 2 :]])
    assert torch.allclose(found[3].double(), whole.mean((0, 1)), atol=1e-6)


@pytest.mark.parametrize("reader", variants("model/state_reader"))
def test_every_reader_of_the_state_is_drawn(reader: str):
    """Layers that keep a window of their own compute rows for one another, each another number."""
    model = build(f"gsm-state_reader={reader}")
    with gsm.record(*TAPS) as seen:
        model(random_tokens(2, 20), rows=5)
    assert torch.allclose(decoder_attention(model, seen).sum(1), torch.ones(4))
    maps = {name: heat_map(value_YX) for name, value_YX in images(model, seen)}
    assert all(one.dtype == torch.uint8 for one in maps.values()) and "decoder/attention" in maps


def test_rows_that_are_all_padding_draw_nothing():
    model = build("gsm-writer=additive")
    documents = torch.tensor([[0] * 10 + [-1] * 10])
    with gsm.record(*TAPS) as seen:
        model(random_tokens(1, 20), documents=documents, rows=5)
    maps = {name: heat_map(value_YX) for name, value_YX in images(model, seen)}
    assert (maps["decoder/attention"].flatten(1) == maps["decoder/attention"][:, 0, 0, None]).all()


def test_a_writers_gate_has_a_histogram():
    model = build("gsm-stages=none")
    with gsm.record(*TAPS) as seen:
        model(random_tokens(1, 8))
        tap("state/gate", torch.full((1, 8, 16), 0.25))
    assert [(name, value.unique().tolist()) for name, value in histograms(model, seen)] == [("state/gate", [0.25])]


def test_a_heat_map_has_the_colours_of_its_ends_and_grows_brighter_between_them():
    picture = heat_map(torch.tensor([[0.0, 0.01, 0.25, 1.0]]))
    assert picture.dtype == torch.uint8 and picture.shape == (3, 8, 32)
    cells = picture[:, 0, ::8].T
    assert cells[0].tolist() == [68, 1, 84] and cells[-1].tolist() == [253, 231, 37]
    brightness = cells.float() @ torch.tensor([0.2126, 0.7152, 0.0722])
    assert (brightness.diff() > 0).all()
    assert torch.equal(heat_map(torch.zeros(1, 1))[:, 0, 0], cells[0]), "nothing there is dark, not a division by zero"


@pytest.mark.parametrize("field", ["every", "sequences", "rows"])
def test_a_number_below_one_is_named(field: str):
    with pytest.raises(ValueError, match=f"callbacks.pictures.{field} is 0"):
        Pictures(**{field: 0})
