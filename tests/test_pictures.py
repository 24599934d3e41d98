"""Pictures of a run show what its model does, and the run does not notice."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from short_runs import assemble, logged
from small import GEOMETRY, build, random_tokens
from test_train_cli import arguments

import gsm
from gsm import plots
from gsm.analysis import figures
from gsm.analysis.attention import decoder_attention, selected_weights
from gsm.analysis.interventions import Answers
from gsm.analysis.views import shares, views
from gsm.config.compose import compose
from gsm.observe import record
from gsm.paths import variants
from gsm.slots.state_reader.shared import Shared
from gsm.training.callbacks import pictures
from gsm.training.callbacks.pictures import TAPS, Pictures
from gsm.training.callbacks.tensorboard import charts

STEPS = ["trainer.max_steps=2", "trainer.log_every_n_steps=1", "trainer.val_check_interval=1", "model/residual=plain"]


class Sizes(lightning.Callback):
    """Record the bytes of tensors that the pictures hold after every validation."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_validation_end(self, trainer, pl_module) -> None:
        for callback in trainer.callbacks:
            if isinstance(callback, Pictures):
                assert set(vars(callback)) - {"log", "log_dict"} == set(vars(Pictures()))
                self.seen.append(sum(value.nbytes for value in callback._batch.values()))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The configuration of all runs here: composing it takes as long as training."""
    overrides = [*arguments(tmp_path_factory.mktemp("text")), *STEPS, "model/retriever=separate_indexer"]
    return compose(overrides)


def trained(
    config: dict[str, Any], folder: Path, **callbacks: None
) -> tuple[dict, dict[str, dict[int, float]], list[int]]:
    """Return the weights after two steps, the metrics without those of the pictures, and the bytes that these held."""
    places = {"jsonl": {"path": str(folder / "metrics.jsonl")}, "tensorboard": {"folder": str(folder)}}
    logger = {name: {**node, **places[name]} for name, node in config["logger"].items()}
    changes = {name: None for name in ("best", "latest")} | callbacks
    run = assemble({**config, "folder": str(folder), "logger": logger, "callbacks": {**config["callbacks"], **changes}})
    sizes = Sizes()
    run.trainer.callbacks.append(sizes)
    run.trainer.fit(run.task, datamodule=run.data)
    of_pictures = ("val/overlap_sample/", "val/state/", "val/sink/", "val/without_")
    others = {name: values for name, values in logged(folder).items() if not name.startswith(of_pictures)}
    return run.model.state_dict(), others, sizes.seen


def test_a_run_is_the_same_with_pictures_and_without_and_they_do_not_grow(config: dict[str, Any], tmp_path: Path):
    with_weights, with_metrics, sizes = trained(config, tmp_path / "with")
    without_weights, without_metrics, nothing = trained(config, tmp_path / "without", pictures=None)
    assert with_metrics == without_metrics and len(with_metrics) > 10
    for name, value in with_weights.items():
        assert torch.equal(value, without_weights[name]), name
    assert sizes == [3 * 3 * 32 * 8] * 2 and not nothing, "tokens, documents and targets of three sequences of 32"


class Drawing(torch.nn.Module):
    """Draws from all generators whenever it is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        random.random(), np.random.rand(), torch.rand(1)
        return x


def test_a_model_that_draws_random_numbers_does_not_draw_others_for_it(config: dict[str, Any]):
    run = assemble(config)
    pictures = next(callback for callback in run.trainer.callbacks if isinstance(callback, Pictures))
    run.model.norm = torch.nn.Sequential(run.model.norm, Drawing())
    pictures._batch = dict.fromkeys(("tokens", "documents", "targets"), torch.zeros(1, 32, dtype=torch.int64))
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    run.model.train()
    pictures._look(run.trainer, run.task)
    pictures._lost(run.trainer, run.task, run.model)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert run.model.training


def test_a_part_is_worth_the_loss_that_is_added_without_it(config: dict[str, Any]):
    run = assemble(config)
    callback, token_BT = Pictures(), random_tokens(2, 32)
    documents = torch.tensor([[0] * 32, [0] * 20 + [1] * 12])
    targets = torch.where(torch.arange(32) % 3 == 0, token_BT.roll(-1, 1), -100)
    callback._batch = {"tokens": token_BT, "documents": documents, "targets": targets}
    found = callback._lost(run.trainer, run.task, run.model)
    assert list(found) == ["without_state", "without_stage1", "without_stage2"]
    run.model.eval()
    with torch.no_grad():
        whole = run.model(token_BT, documents=documents, targets=targets).loss
        with gsm.patch("state/entries", torch.zeros_like):
            without_state = run.model(token_BT, documents=documents, targets=targets).loss
        with gsm.patch("stage/2/increment", torch.zeros_like):
            without_stage = run.model(token_BT, documents=documents, targets=targets).loss
    assert found["without_state"] == pytest.approx(float(without_state - whole), abs=1e-5) and without_state != whole
    assert found["without_stage2"] == pytest.approx(float(without_stage - whole), abs=1e-5) and without_stage != whole
    callback._batch["targets"] = torch.full_like(targets, -100)
    assert all(math.isnan(value) for value in callback._lost(run.trainer, run.task, run.model).values())


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
    weight_LE = decoder_attention(model, seen)
    assert weight_LE.shape == (GEOMETRY.decoder_layers, model.state_size + 1)
    assert torch.allclose(weight_LE.sum(1), torch.ones(4))
    last = seen["decoder/8/weights"]  # of rows 1 to 19, at positions -1, -1, 0, ... and 1, 2, ...
    whole = torch.cat([last[0, positions + 1 :], last[1, positions - 2 :]])
    assert torch.allclose(weight_LE[3].double(), whole.mean((0, 1)), atol=1e-6)


@pytest.mark.parametrize("reader", variants("model/state_reader"))
def test_every_reader_of_the_state_is_drawn(reader: str):
    """Decoder layers with windows of their own compute different numbers of rows."""
    model = build(f"gsm-state_reader={reader}")
    with gsm.record(*TAPS) as seen:
        model(random_tokens(2, 20), rows=5)
    assert torch.allclose(decoder_attention(model, seen).sum(1), torch.ones(4))
    pixels = {name: plots.pixels(picture, 30) for name, picture in views(model, seen)}
    assert list(pixels) == ["decoder_reads", "decoder_reads_by_row", "stages_select", "state_is_made_of"]
    assert all(array.dtype == np.uint8 and array.ndim == 3 for array in pixels.values())


class Newer(Shared):
    """The first decoder layer reads half of the state."""

    def layer(self, shape, *, layer, layers, **common):
        size = common.pop("state_size")
        return super().layer(shape, layer=layer, layers=layers, state_size=size // 2 if layer == 1 else size, **common)


def test_layers_that_read_different_numbers_of_entries_are_drawn():
    model = build("gsm", state_reader=Newer())
    with gsm.record(*TAPS) as seen:
        model(random_tokens(2, 20), rows=5)
    weight_LE, size = decoder_attention(model, seen), model.state_size
    assert weight_LE.shape == (GEOMETRY.decoder_layers, size + 1)
    assert weight_LE.isnan().sum(1).tolist() == [size - size // 2, 0, 0, 0]
    assert torch.allclose(weight_LE.nansum(1), torch.ones(4))
    assert len(list(views(model, seen))) == 4


def test_rows_that_are_all_padding_are_grey():
    model = build("gsm-writer=additive")
    documents = torch.tensor([[0] * 10 + [-1] * 10])
    with gsm.record(*TAPS) as seen:
        model(random_tokens(1, 20), documents=documents, rows=5)
    pictured = dict(views(model, seen))["decoder_reads"]
    assert pictured.axes[0].images[0].get_array().mask.all()
    assert plots.pixels(pictured, 30).any()


@pytest.mark.parametrize(
    "documents", [[0] * 30, [0] * 9 + [1] * 21, [0] * 22 + [-1] * 8], ids=["one", "two", "padding"]
)
def test_what_a_stage_selects_is_drawn_at_the_tokens_of_its_slots(documents: list[int]):
    model, ratio, rows = build("gsm-retriever=separate_indexer"), GEOMETRY.encoder_ratio, 12
    with gsm.record(*TAPS, "*/bank") as seen:
        model(random_tokens(1, 30), documents=torch.tensor([documents]), rows=rows)
    for stage, map_RT in selected_weights(model, seen, rows).items():
        chosen_RK, weight_RE = (
            seen[f"stage/{stage}/top_k"][0, -rows:],
            seen[f"stage/{stage}/weights"][0, -rows:].mean(1),
        )
        slots = chosen_RK.shape[1]
        for row in range(rows):
            start = documents.index(documents[30 - rows + row])
            first = sum(documents.count(earlier) // ratio for earlier in set(documents[:start]))
            want_T = torch.full((30,), torch.nan)
            for slot, weight in zip(chosen_RK[row].tolist(), weight_RE[row, -1 - slots : -1].tolist(), strict=True):
                if slot >= 0:
                    at = start + (slot - first) * ratio
                    want_T[at : at + ratio] = weight
            assert torch.allclose(map_RT[row].float(), want_T, equal_nan=True), (stage, row)


def test_the_sink_of_each_decoder_layer_is_a_curve():
    model = build("gsm-writer=additive")
    with gsm.record(*TAPS) as seen:
        model(random_tokens(2, 20), documents=torch.tensor([[0] * 20, [-1] * 5 + [0] * 15]))
    found = pictures.scalars(model, seen)
    layers = range(GEOMETRY.encoder_layers + 1, GEOMETRY.depth + 1)
    assert [name for name in found if name.startswith("sink/")] == [f"sink/decoder{layer}" for layer in layers]
    for layer in layers:
        sink_BRH = seen[f"decoder/{layer}/weights"][..., -1]
        mean = float(torch.cat([sink_BRH[0], sink_BRH[1, 5:]]).mean())
        assert found[f"sink/decoder{layer}"] == pytest.approx(mean)
    shown = charts(f"val/{name}" for name in found)["state"]
    assert ["Multiline", [r"val/sink/decoder\d+$"]] in shown.values()


def test_what_the_state_is_made_of_sums_to_one_without_padding():
    model = build("gsm-writer=gated")
    with gsm.record(*TAPS) as seen:
        model(random_tokens(2, 20), documents=torch.tensor([[0] * 20, [-1] * 5 + [0] * 15]))
    by_way = shares(model, seen)
    assert list(by_way) == ["state/share/encoder", "state/share/stage1", "state/share/stage2"]
    assert sum(by_way.values()) == pytest.approx(1) and min(by_way.values()) > 0
    assert shares(build("gsm-stages=none"), seen) == {}


def test_selections_have_one_scale_in_all_pictures_and_what_is_read_one_up_to_the_largest():
    for most in (0.01, 1.0):
        _, (selected, read) = plots.figure(2)
        weight_YE = torch.tensor([[0.0, most, most / 2, 1e-9]])
        figures.selection(selected, weight_YE)
        highest = figures.bright_end([weight_YE])
        figures.state_read(read, weight_YE, torch.arange(2, -1, -1), [5], "layer", highest)
        assert selected.images[0].get_clim() == (1e-3, 1)
        assert read.images[0].get_clim() == (0, pytest.approx(most))
        for axes in (selected, read):
            assert axes.images[0].get_array().mask.tolist() == [[True, False, False, False]], "grey is nothing there"


def test_layers_that_read_nearly_the_same_differ_in_colour():
    """On a logarithmic scale from 0.1 % to 100 % the whole picture was one green."""
    model = build("gsm")
    with gsm.record(*TAPS) as seen:
        model(random_tokens(2, 40))
    for name, picture in views(model, seen):
        if name.startswith("decoder_reads"):
            images = [axes.images[0] for axes in picture.axes if axes.images][: GEOMETRY.decoder_layers]
            assert len({image.get_clim() for image in images}) == 1
            drawn = [image.norm(image.get_array()).clip(0, 1) for image in images]
            by_layer = np.ma.stack(drawn) if len(drawn) > 1 else drawn[0]
            assert np.ma.ptp(by_layer, axis=0).max() > 0.2, name


def test_the_legend_of_answers_stands_beside_the_bars():
    answers = Answers(torch.zeros(4), torch.tensor([True, True, True, False]))
    made, (axes,) = plots.figure(width=7.3, height=3)
    figures.accuracies(axes, {name: dict.fromkeys(("whole", "state", "all stages"), answers) for name in "ab"}, 0.25)
    made.draw_without_rendering()
    legend = axes.get_legend()
    assert legend is not None and len(legend.get_texts()) == 4
    assert not legend.get_window_extent().overlaps(axes.get_window_extent())


def test_a_long_sequence_keeps_all_that_was_selected():
    _, (axes,) = plots.figure()
    map_RT = torch.full((3, 5000), torch.nan)
    map_RT[1, 4321] = 0.5
    figures.selection(axes, map_RT)
    drawn = axes.images[0].get_array()
    assert drawn.shape[1] <= figures.COLUMNS and drawn.count() == 1 and drawn.max() == 0.5
    left, right, _, _ = axes.images[0].get_extent()
    assert (left + (right - left) * (drawn.argmax() % drawn.shape[1] + 0.5) / drawn.shape[1]) == pytest.approx(
        4321, abs=5
    )


def test_without_matplotlib_a_run_says_so_once_and_logs_the_numbers(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(pictures, "_can_draw", lambda: False)
    trained(config, tmp_path)
    assert capsys.readouterr().err.count("there will be no pictures: pictures need matplotlib: pip install") == 1
    assert "val/state/share/stage2" in (tmp_path / "metrics.jsonl").read_text()
    with np.load(tmp_path / pictures.FILE) as read:
        assert read["decoder_reads"].shape == (len(read["layers"]), len(read["back"]) + 1)
        assert np.nansum(read["decoder_reads"], axis=1) == pytest.approx(1, abs=1e-5)


def test_of_a_state_far_larger_than_a_sequence_what_exists_is_drawn():
    """Its empty entries took 7.6 GiB."""
    drawn = []
    for size in (100_000, 16):
        model = build("gsm", geometry=GEOMETRY, state_size=size).eval()
        with torch.no_grad(), record(*TAPS) as seen:
            model(random_tokens(2, 16))
        assert seen[f"decoder/{GEOMETRY.depth}/weights"].shape[-1] == 16 + 1
        drawn.append((pictures.scalars(model, seen), seen))
    assert drawn[0][0] == pytest.approx(drawn[1][0]) and [name for name, _ in views(model, drawn[0][1])]
