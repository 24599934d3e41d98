"""An experiment in TensorBoard: curves of its arms, from the runs' metrics.jsonl; what its page says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from test_compare import drawn, experiment, write_run

from gsm import plots
from gsm.experiments.compare import compare
from gsm.experiments.curves import minus_first
from gsm.experiments.table import read_runs, summarise
from gsm.training.callbacks.pictures import FILE

__all__ = ["drawn", "experiment"]  # fixtures


def read(folder: Path) -> EventAccumulator:
    """The events of a run."""
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0, "images": 0}).Reload()


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The scalars of a run by tag."""
    events = read(folder)
    return {tag: [(p.step, p.value) for p in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_every_arm_has_one_curve_and_one_of_its_differences(experiment: Path, capsys: pytest.CaptureFixture[str]):
    compare(str(experiment))
    paper, control = (points(experiment / f"{arm}-seed-mean") for arm in ("paper", "control"))
    assert set(paper) == {"mean/loss"} and set(control) == {"mean/loss", "minus_paper/loss"}
    assert paper["mean/loss"] == [(5, pytest.approx(2 - 0.45)), (10, pytest.approx(2 - 0.9))]
    assert control["minus_paper/loss"] == [(5, pytest.approx(0.35)), (10, pytest.approx(0.7))]
    said = capsys.readouterr().out
    address = next(line for line in said.splitlines() if line.startswith("http"))
    pinned = json.loads(parse_qs(urlsplit(address).query)["pinnedCards"][0])
    assert [card["tag"] for card in pinned] == ["mean/loss", "minus_paper/loss", "val/loss"]
    compare(str(experiment), against="control")
    assert set(points(experiment / "paper-seed-mean")) == {"mean/loss", "minus_control/loss"}, "not beside the old one"


def test_differences_are_of_seeds_that_both_have_at_steps_that_both_have():
    curves = {
        "a": {(0, ""): {1.0: 1.0, 2.0: 2.0}, (1, ""): {1.0: 5.0}},
        "b": {(0, ""): {2.0: 2.5}, (2, ""): {1.0: 9.0}},
    }
    assert minus_first(curves) == {"a": {}, "b": {(0, ""): {2.0: 0.5}}}
    assert minus_first({}) == {}


def test_the_tables_and_the_pictures_are_there_and_a_tab_of_charts(experiment: Path):
    compare(str(experiment))
    events = read(experiment / "comparison")
    assert events.Tags()["images"] == ["comparison/arms", "comparison/curves", "comparison/values"]
    (text,) = events.Tensors("comparison/text_summary")
    assert b"| control | 3 | -0.7000 [-0.9484, -0.4516] |" in text.tensor_proto.string_val[0]
    for arm in ("paper", "control"):
        (layout,) = read(experiment / f"{arm}-seed-mean").Tensors("custom_scalars__config__")
        (tab,) = layout_pb2.Layout.FromString(layout.tensor_proto.string_val[0]).category
        assert tab.title == "arms"
        assert [list(chart.multiline.tag) for chart in tab.chart] == [["mean/loss$"], ["minus_paper/loss$"]], arm


def test_the_first_picture_is_narrow_and_for_the_board_alone(experiment: Path, monkeypatch: pytest.MonkeyPatch):
    """As thumbnails, pictures of three panels cannot be read."""
    figures: list[Any] = []
    monkeypatch.setattr(plots, "pixels", lambda figure: [figures.append(figure), np.zeros((2, 2, 3), np.uint8)][1])
    compare(str(experiment), columns="accuracy,val_loss")
    assert min(read(experiment / "comparison").Tags()["images"]) == "comparison/arms"
    (axes,) = figures[0].axes
    assert figures[0].get_figwidth() < 4 and axes.get_xlabel() == plots.label("accuracy")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["paper", "control"]
    assert not (experiment / "comparison_arms.png").exists()


def test_an_arms_name_cannot_leave_the_folder(tmp_path: Path):
    write_run(tmp_path / "logs/x", "plain", 0, 0.5)
    run = write_run(tmp_path / "logs/x", "other", 0, 0.5)
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**summary, "arm": "../../../gone"}))
    compare(str(tmp_path / "logs/x"))
    assert not list(tmp_path.glob("gone*")) and not list(tmp_path.parent.glob("gone*"))
    assert list((tmp_path / "logs/x").glob("*gone-seed-mean/events*"))


def test_what_arms_differ_in_inside_is_drawn_side_by_side(experiment: Path, drawn: list[Any]):
    for number, run in enumerate(read_runs(experiment)):
        lines = [{"step": 10, "val/state/share/stage1": number / 10, "val/without_stage1": number / 5}]
        (run.folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        weight_LE = np.full((2, 4), 0.02, np.float32)
        np.savez(run.folder / FILE, decoder_reads=weight_LE, layers=np.array([3, 4]), back=np.array([2, 1, 0]))
    compare(str(experiment))
    assert (experiment / "comparison_state.png").is_file()
    state, reads = (figure for figure in drawn[-2:])
    assert [axes.get_xlabel() for axes in state.axes] == [
        "share of stage 1 in the state",
        "loss added without stage 1\n(nats per token)",
    ]
    panels = [axes for axes in reads.axes if axes.images]
    assert [axes.get_title() for axes in panels[:2]] == ["paper", "control"]
    for axes in panels[:2]:
        assert axes.images[0].get_clim() == (0, pytest.approx(0.02)), "up to what is there, the same for all"


def test_a_model_that_a_bigram_beats_is_named(tmp_path: Path):
    counted = {"unigram_bits_per_byte": 3.5, "bigram_bits_per_byte": 2.5, "five_gram_bits_per_byte": 2.0}
    for arm, bits in (("bad", 2.8), ("fair", 2.2), ("good", 1.9)):
        write_run(tmp_path / "x", arm, 0, 0.5, bits_per_byte=bits, **counted)
    table = summarise(read_runs(tmp_path / "x"), ["bits_per_byte"], ["bad", "fair", "good"])
    assert table.baselines() == [
        "bits per byte of n-gram models of the same training tokens: unigram 3.5000, bigram 2.5000, 5-gram 2.0000; "
        "worse than the bigram: bad; worse than the 5-gram: fair"
    ]
    assert summarise(read_runs(tmp_path / "x"), ["accuracy"]).baselines() == []


def test_a_finished_run_has_the_lines_that_open_it(experiment: Path):
    run = write_run(experiment, "paper", 5, 0.5, memory_bytes={"shared_state": 1}, fingerprint={"tokenizer": "x"})
    compare(str(experiment))
    page = (experiment / "comparison.html").read_text()
    assert page.count("gsm.load_model(") == 7 and page.count("explore") == 1 and run.name in page
