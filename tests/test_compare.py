"""Comparisons of runs: sentences, files and pictures of compare.py, from summaries that were written by hand."""

from __future__ import annotations

import json
import math
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records
from short_runs import folder_of
from test_experiment import TOY, composed

from gsm import plots
from gsm.config import command_line
from gsm.config.address import noted
from gsm.config.check import ConfigError
from gsm.experiments import rows
from gsm.experiments.compare import compare, write
from gsm.experiments.table import read_runs, summarise
from gsm.plots import pixels, png
from gsm.training.callbacks.metrics_file import MetricsFile, read_metrics
from gsm.training.folder import held

ACCURACY = {"paper": (0.9, 0.8, 1.0), "control": (0.1, 0.2, 0.3)}


def write_run(experiment: Path, arm: str, seed: int, accuracy: float, **given: Any) -> Path:
    facts = {"accuracy": accuracy, "val_loss": 2 - accuracy, "steps": 10, "tokens": 1000, "cache_bytes": 512}
    run = records.write_run(experiment, arm, seed, **{**facts, **given})
    lines = [{"step": step, "val/loss": 2 - accuracy * step / 10, "train/tokens": step**2} for step in (5, 10)]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return run


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """Two arms of three seeds; of these, paper is the first."""
    folder = tmp_path / "logs/recall"
    for arm, values in ACCURACY.items():
        for seed, value in enumerate(values):
            write_run(folder, arm, seed, value)
    (folder / "experiment.json").write_text('{"arms": {"paper": [], "control": []}, "table": ["accuracy"]}')
    return folder


@pytest.fixture(autouse=True)
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures, in order; to make files of them takes most of the time."""
    figures: list[Any] = []
    monkeypatch.setattr(plots, "png", lambda figure, *_: [figures.append(figure), b"a picture"][1])
    monkeypatch.setattr(plots, "svg", lambda figure, name: "<svg></svg>")
    monkeypatch.setattr(plots, "pixels", lambda figure: np.zeros((2, 2, 3), np.uint8))
    return figures


def test_arms_come_in_the_experiments_order_with_paired_differences(experiment: Path):
    table = compare(str(experiment))
    assert [row.arm for row in table.rows] == ["paper", "control"]
    assert table.columns == ("accuracy",)
    found = table.differences()["control"]["accuracy"]
    apart = [-0.8, -0.6, -0.7]
    assert (found.count, found.mean) == (3, pytest.approx(sum(apart) / 3))
    half = 4.303 * 0.1 / 3**0.5  # Student's t of two degrees of freedom
    assert found.spread == pytest.approx(half), "of differences seed by seed; unpaired it would be larger"
    assert "| control | 3 | -0.7000 [-0.9484, -0.4516] |" in (experiment / "comparison.md").read_text()
    plain = json.loads((experiment / "comparison.json").read_text())
    assert plain["differences"]["to"] == "paper"
    assert plain["arms"]["control"]["columns"]["accuracy"]["mean"] == pytest.approx(0.2)
    assert (experiment / "comparison.csv").read_text().splitlines()[1] == "paper,0,0.9"


def test_the_variant_that_leads_is_the_first_arm_of_the_experiments_description(tmp_path: Path):
    arms = "arms: ${variants:model/residual,plain}\n"
    text = TOY[: TOY.index("arms:")] + arms + TOY[TOY.index("seeds:") :]
    experiment = composed(tmp_path, "seeds=1", text=text)
    assert list(experiment.arms) == ["plain", "by_size", "mhc", "mhc_two_pass"]
    assert experiment.columns == ["bits_per_byte", "data.train_tokens"]


def test_only_seeds_that_both_arms_have_are_paired(experiment: Path):
    write_run(experiment, "control", 7, 100.0)
    assert compare(str(experiment)).differences()["control"]["accuracy"].mean == pytest.approx(-0.7)


def test_the_arm_to_compare_with_can_be_chosen(experiment: Path):
    table = compare(str(experiment), against="control", columns="[val_loss, steps]")
    assert table.columns == ("val_loss", "steps")
    assert table.differences()["paper"]["val_loss"].mean == pytest.approx(-0.7)


def test_runs_that_are_not_finished_are_named_and_do_not_count(experiment: Path, capsys: pytest.CaptureFixture[str]):
    write_run(experiment, "paper", 3, 0.0, status="failed", steps=4, reason="FloatingPointError: the loss is nan")
    killed = write_run(experiment, "paper", 4, 0.0, status="running", steps=2)
    (write_run(experiment, "control", 3, 0.0) / "summary.json").unlink()
    table = compare(str(experiment))
    assert [row.runs for row in table.rows] == [3, 3]
    for said in (capsys.readouterr().out, (experiment / "comparison.md").read_text()):
        found = dict(re.findall(r"not finished: \S*/(\S+)-[0-9a-f]{8}, (.*)", said))
        assert found.keys() == {"paper-seed3", "paper-seed4", "control-seed3"}
        assert found["paper-seed3"] == "failed at step 4: FloatingPointError: the loss is nan"
        assert found["paper-seed4"] == "unfinished at step 10", "as its curves say, not as when it began"

    with held(noted(killed)):
        compare(str(experiment))
    assert f"{killed.name}, running at step 10" in capsys.readouterr().out


def test_arms_of_one_name_in_two_experiments_are_told_apart(tmp_path: Path, experiment: Path):
    other = tmp_path / "logs/longer"
    write_run(other, "paper", 0, 0.5)
    write_run(other, "wide", 0, 0.6)
    table = compare(str(experiment), str(other))
    assert [row.arm for row in table.rows] == ["recall/paper", "control", "longer/paper", "wide"]
    assert (tmp_path / "logs/comparison.md").is_file(), "in the folder above both"


def test_differences_stay_within_a_task(tmp_path: Path):
    """A difference was taken between the arms of one task and the first arm of another."""
    values = {"recall": {"additive": 0.9, "gated": 0.95}, "needle": {"additive": 0.6, "gated": 0.5}}
    for data, arms in values.items():
        for arm, value in arms.items():
            for seed in range(3):
                facts = {"choices": {"data": data}, "fingerprint": {"task": data.title()}}
                write_run(tmp_path / data, arm, seed, value + seed / 1000, **facts)
    table = compare(*(str(tmp_path / data) for data in values), columns="accuracy", output=str(tmp_path))
    assert [row.arm for row in table.rows] == [f"{data}/{arm}" for data, arms in values.items() for arm in arms]
    assert [cells["accuracy"].count for cells in table.differences().values()] == [3, 0, 0]
    assert table.differences()["recall/gated"]["accuracy"].mean == pytest.approx(0.05)


def test_arms_of_one_task_each_are_not_subtracted_from_one_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for arm, task in (("copy", "SelectiveCopy"), ("recall", "Recall"), ("recall_wide", "Recall")):
        for seed in (0, 1):
            write_run(tmp_path / "mad", arm, seed, 0.5, fingerprint={"task": task})
    table = compare(str(tmp_path / "mad"))
    assert table.columns == ("accuracy", "val_loss")
    assert {cell.count for cells in table.differences().values() for cell in cells.values()} == {0}
    assert "minus" not in capsys.readouterr().out


def test_one_folder_in_two_spellings_is_one_experiment(experiment: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(experiment.parent)
    table = compare(str(experiment), experiment.name, f"{experiment}/../recall")
    assert [(row.arm, row.runs) for row in table.rows] == [("paper", 3), ("control", 3)]
    assert (experiment / "comparison.md").is_file()


def test_what_does_not_compare_is_said_of_every_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Only the first run of each arm was looked at."""
    runs = [("a", 0, 96, 10), ("a", 1, 128, 10), ("a", 2, 128, 10), ("b", 0, 96, 10), ("b", 1, 96, 20)]
    for arm, seed, context, steps in runs:
        facts = {"steps": steps, "tokens": 100 * steps, "fingerprint": {"context": context}}
        write_run(tmp_path, arm, seed, 0.5, **facts)
    compare(str(tmp_path))
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("compare with care")]
    assert said == [
        "compare with care: a (seed 1, seed 2) differs from a (seed 0) in the data's context (96 there, 128 here)",
        "compare with care: b (seed 1) differs from a (seed 0) in the steps (10 there, 20 here), the tokens trained on "
        "(1,000 there, 2,000 here)",
    ]


@pytest.mark.parametrize("documents", ["isolated", "isolated_all_targets"])
def test_two_tokenizers_have_no_difference_where_first_tokens_do_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], documents: str
):
    """Bits per byte of one text were 0.30, 0.11 and 0.00 by tokenizer, and compared with care."""
    for arm, tokenizer in (("bytes", "5f"), ("bpe", "77ab"), ("large", "77ab")):
        for seed in range(3):
            facts = {"corpus": "c0", "tokenizer": tokenizer, "documents": documents}
            told = {"fingerprint": facts, "choices": {"data": "mine"}, "commit": "0123"}
            write_run(tmp_path, arm, seed, 0.5 + seed / 100, **told)
    counts = {
        arm: cells["accuracy"].count for arm, cells in compare(str(tmp_path), against="bpe").differences().items()
    }
    assert counts == {"bytes": 0 if documents == "isolated" else 3, "large": 3}
    said = capsys.readouterr().out
    assert ("documents=isolated_all_targets" in said) is (documents == "isolated")
    rows.publish(tmp_path, tmp_path, ["accuracy"])
    made = rows.table(f"{tmp_path.name} accuracy val_loss against=bpe", tmp_path)
    assert "| large | 3 | +0.0000 |" in made and ("| bytes | 3 | +0.0000 |" in made) is (documents != "isolated")
    assert ("documents=isolated_all_targets" in made) is (documents == "isolated")


@pytest.mark.parametrize("part", ["", "train"])
def test_runs_of_an_arm_with_other_settings_have_a_line_of_their_own(tmp_path: Path, part: str):
    """The mean of an arm was taken over seeds with different learning rates, and nothing said so."""
    for arm, values in ACCURACY.items():
        for seed, accuracy in enumerate(values):
            rate = 0.05 if (arm, seed) == ("paper", 1) else 0.006
            own = {"optimizer": {"learning_rate": rate}, "data": {"seed": seed, "path": f"/disk{seed}/text"}}
            given = {"config": {**own, "origin": {"run": f"{seed}" * 8, "settings": "0"}}, "accuracy": accuracy}
            if part:
                records.write_trial(tmp_path, arm, seed, **{part: given}, measured={"metrics": {"loss": 1.0}})
            else:
                records.write_run(tmp_path, arm, seed, **given)
    tuned = {arm: {"optimizer.learning_rate": {"shown": "0.006 (edge)"}} for arm in ACCURACY}
    contents = {"arms": dict.fromkeys(ACCURACY, []), "table": ["accuracy"], "tuned": tuned}
    (tmp_path / "experiment.json").write_text(json.dumps(contents))
    table = compare(str(tmp_path))
    odd = f"paper ({f'{part}: ' if part else ''}optimizer.learning_rate=0.05)"
    assert [(row.arm, row.runs) for row in table.rows] == [("paper", 2), (odd, 1), ("control", 3)]
    assert table.tuned["paper"] and (part or not table.tuned[odd]), "it was set by hand"
    with pytest.raises(ConfigError, match=r"^publish .*optimizer\.learning_rate=0\.05"):
        compare(str(tmp_path), publish=str(tmp_path))
    for name in ("comparison.md", "comparison.html", "comparison.csv"):
        assert odd in (tmp_path / name).read_text()


@pytest.mark.parametrize(("code", "lines"), [("b", 1), ("a", 2)])
def test_a_key_that_one_of_two_versions_lacks_is_not_compared(tmp_path: Path, code: str, lines: int):
    for seed, optimizer in enumerate(({"learning_rate": 1}, {"learning_rate": 1, "z": 2})):
        write_run(tmp_path, "paper", seed, 0.5, config={"optimizer": optimizer}, sources=("a", code)[seed])
    assert [row.arm.partition(" ")[0] for row in compare(str(tmp_path)).rows] == ["paper"] * lines


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"columns": "acuracy"}, "'acuracy'.*accuracy"),
        ({"x": "cache_bites", "y": "accuracy"}, "'cache_bites'.*cache_bytes"),
        ({"x": "cache_bytes"}, "^x and y .*x=cache_bytes"),
        ({"against": "papper"}, "'papper'.*paper"),
        ({"metric": "val/los"}, "'val/los'.*val/loss"),
        ({"axis": "epoch"}, "^axis .*step or tokens.*epoch"),
    ],
    ids=str,
)
def test_an_unknown_name_is_answered_with_the_known_ones(experiment: Path, given: dict[str, str], said: str):
    with pytest.raises(ValueError, match=said):
        compare(str(experiment), **given)
    assert not (experiment / "comparison.md").exists()


def test_a_folder_without_finished_runs_is_said(tmp_path: Path, experiment: Path):
    with pytest.raises(ValueError, match="folder"):
        compare()
    with pytest.raises(FileNotFoundError, match="^folder .*nowhere"):
        compare(str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="recall"):
        compare(str(experiment.parent))
    write_run(tmp_path / "begun", "paper", 0, 0.5, status="interrupted")
    with pytest.raises(ValueError, match="begun.*paper-seed0-.* 10"):
        compare(str(tmp_path / "begun"))


def test_pictures_are_written_where_they_are_shown(experiment: Path):
    pytest.importorskip("matplotlib")
    compare(str(experiment), x="cache_bytes", y="accuracy")
    text = (experiment / "comparison.md").read_text()
    for name in ("curves", "values", "accuracy_by_cache_bytes"):
        assert (experiment / f"comparison_{name}.png").read_bytes() == b"a picture"
        assert f"(comparison_{name}.png)" in text


def test_curves_are_means_over_the_seeds_by_step_or_by_the_tokens_until_then(experiment: Path, drawn: list[Any]):
    """Tokens were steps times their mean number, which is wrong where sequences grow."""
    pytest.importorskip("matplotlib")
    compare(str(experiment))
    compare(str(experiment), axis="tokens")
    for figure, across in ((drawn[0], [5, 10]), (drawn[2], [25, 100])):
        paper, control = figure.axes[0].lines
        assert (paper.get_label(), control.get_label()) == ("paper", "control")
        assert list(paper.get_xdata()) == list(control.get_xdata()) == across
        assert list(paper.get_ydata()) == pytest.approx([1.55, 1.1])
        assert list(control.get_ydata()) == pytest.approx([1.9, 1.8])
    assert drawn[2].axes[0].get_xlabel() == "tokens trained on"


def test_a_legend_below_names_what_any_panel_shows():
    pytest.importorskip("matplotlib")
    figure, panels = plots.figure(2)
    plots.curves(panels[0], {"a": [{1: 1.0}], "b": []}, "x", "y")
    plots.curves(panels[1], {"a": [{1: 1.0}], "b": [{1: 2.0}]}, "x", "y")
    plots.legend_below(panels)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b"]
    assert [axes.get_legend() for axes in panels] == [None, None]


def test_curves_have_the_names_for_readers(experiment: Path, drawn: list[Any]):
    pytest.importorskip("matplotlib")
    told = {"arms": {"paper": [], "control": []}, "labels": {"paper": "GSM", "accuracy": "answers"}}
    (experiment / "experiment.json").write_text(json.dumps(told))
    compare(str(experiment), columns="accuracy")
    curves, values = drawn
    assert [line.get_label() for line in curves.axes[0].lines] == ["GSM", "control"]
    assert "minus GSM" in curves.axes[1].get_ylabel() and values.axes[0].get_xlabel() == "answers"


def test_runs_that_were_tested_at_several_lengths_get_a_panel_for_each_task(tmp_path: Path, drawn: list[Any]):
    for arm, long in (("direct", 0.25), ("steps", 1.0)):
        for seed in (0, 1):
            tested = {"parity": {"8": 1.0, "32": 1.0 - seed / 2}, "S5": {"8": 1.0, "32": long}}
            write_run(tmp_path / "logs/tracking", arm, seed, 0.5, by_length=tested)
    compare(str(tmp_path / "logs/tracking"), columns="by_length.S5.32")
    parity, s5 = drawn[2].axes
    assert (parity.get_title(), s5.get_title(), parity.get_legend()) == ("parity", "S5", None)
    lines = {line.get_label(): list(line.get_ydata()) for line in s5.get_lines()}
    assert lines == {"direct": [1.0, 0.25], "steps": [1.0, 1.0]}
    assert [list(line.get_ydata()) for line in parity.get_lines()] == [[1.0, 0.75]] * 2, "means over seeds"
    assert [label.get_text() for label in s5.get_xticklabels()] == ["8", "32"]
    assert "comparison_lengths.png" in (tmp_path / "logs/tracking/comparison.md").read_text()


def test_arms_are_drawn_with_what_they_differ_in():
    shared = "data_folder-data.path_books.x477a4dbf"
    drawn = plots.named([f"gsm-{shared}", f"gsm-writer_gated-{shared}", f"gsm-lr_1e-4-{shared}"])
    assert list(drawn.values()) == ["gsm", "writer_gated", "lr_1e-4"], "a hyphen in a value divides nothing"
    assert list(plots.named(["paper", "control"]).values()) == ["paper", "control"]
    assert list(plots.named(["gsm-size_pico"]).values()) == ["gsm-size_pico"], "one alone has nothing in common"
    turned = ["m-a_1-b_2", "m-b_2-a_1"]
    assert list(plots.named(turned).values()) == turned, "two arms never share a label"


def test_arms_with_long_names_leave_room_for_what_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn: list[Any]
):
    """Legends covered the axes, and matplotlib said that it could not lay them out."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(plots, "png", lambda figure, *_: [drawn.append(figure), png(figure)][1])
    arm = ""
    for folder, own in (("like", "-size_pico-data_needle"), ("unlike", "")):
        for letter in "ab":
            arm = f"gsm{own}-" + "_".join([letter * 8] * 10)[: 90 - len(own) - 4]
            assert len(arm) == 90
            tested = {"parity": {"8": 1.0, "32": 0.5}}
            write_run(tmp_path / folder, arm, 0, 0.5, by_length=tested, cache_bytes=ord(letter))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compare(str(tmp_path / folder), columns="accuracy,val_loss", x="cache_bytes", y="accuracy")
        assert arm in (tmp_path / folder / "comparison.md").read_text(), "the table has the full name"
    for figure in drawn:
        for axes in figure.axes:
            box = axes.get_window_extent().transformed(figure.dpi_scale_trans.inverted())
            assert box.width > 1.2 and box.height > 1
            for legend in filter(None, [axes.get_legend(), *figure.legends]):
                assert not legend.get_window_extent().overlaps(axes.get_window_extent())


def test_final_values_and_pairs_are_those_of_the_summaries(experiment: Path, drawn: list[Any]):
    pytest.importorskip("matplotlib")
    write_run(experiment, "paper", 3, 0.6, cache_bytes=1024)
    compare(str(experiment), columns="accuracy,val_loss", x="cache_bytes", y="accuracy")
    left, right = drawn[1].axes
    assert [list(line.get_xdata()) for line in left.lines[::2]] == [[0.9, 0.8, 1.0, 0.6], [0.1, 0.2, 0.3]]
    assert list(right.lines[3].get_xdata()) == pytest.approx([1.8]), "the bar is the mean of control's loss"
    points = [(*box[0].get_xdata(), *box[0].get_ydata()) for box in drawn[2].axes[0].containers]
    assert points == [pytest.approx((640, 0.825)), pytest.approx((512, 0.2))]
    assert drawn[2].axes[0].get_xlabel() == "everything remembered (bytes)"


def test_an_arm_without_a_curve_is_named_beside_the_picture(experiment: Path, capsys: pytest.CaptureFixture[str]):
    file = write_run(experiment, "old", 0, 0.5) / "metrics.jsonl"
    file.write_text('{"step": 5, "val/loss": 1.5}\n')
    compare(str(experiment), axis="tokens")
    assert "not in the learning curves, as they lack val/loss by tokens: old\n" in capsys.readouterr().out


def test_an_arm_without_runs_lacks_no_curve(experiment: Path, tmp_path: Path):
    write_run(experiment, "old", 0, 0.5, cache_bytes=None)
    table = summarise(read_runs(experiment), ["accuracy"], ["paper", "control", "old", "untrained"])
    said = "\n".join(write(table, tmp_path, [experiment], x="cache_bytes", y="accuracy"))
    assert "lack one of the two: old\n" in said and "untrained" not in said


def test_a_figure_is_a_file_and_what_a_notebook_shows(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(plots, "png", png)
    figure: Any = plots.figure(width=1, height=1)[0]
    assert png(figure).startswith(b"\x89PNG")
    assert figure._repr_png_() == (png(figure, 200), {"width": 100, "height": 100})


def test_without_matplotlib_there_are_tables(
    experiment: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    compare(str(experiment))
    assert "pictures need matplotlib: pip install -c constraints.txt -e '.[plots]'" in capsys.readouterr().out
    assert "paper" in (experiment / "comparison.md").read_text()
    assert not list(experiment.glob("*.png"))
    page = (experiment / "comparison.html").read_text()
    assert "pictures need matplotlib" in page and "<svg" not in page


def test_a_curve_is_the_mean_of_what_all_seeds_have_in_a_band(float64: None):
    pytest.importorskip("matplotlib")
    _, (axes,) = plots.figure()
    plots.curves(axes, {"none": [], "a": [{1: 1.0, 2: 4.0, 3: 9.0}, {1: 3.0, 2: 8.0}]}, "step", "loss")
    line: Any = axes.lines[0]
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([1, 2], [2.0, 6.0])
    band: Any = axes.collections[0].get_paths()[0].vertices
    assert sorted({float(y) for x, y in band if x == 1}) == [1.0, 3.0], "from the lowest seed to the highest"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss")


@pytest.mark.parametrize("values", [(0.12, 700.0), (3.1, 4.9), (2.05, 2.06), (21.0, 24.0), (1.5, 3.0), (95.0, 102.4)])
def test_a_logarithmic_axis_has_numbers_also_below_a_decade(values: tuple[float, float]):
    pytest.importorskip("matplotlib")
    figure = plots.quantities({"seconds": {"a": [dict(zip((96, 384), values, strict=True))]}})
    pixels(figure)
    (axes,) = figure.axes
    low, high = axes.get_ylim()
    words = [tick.label1.get_text() for tick in axes.yaxis.get_major_ticks() if low <= float(tick.get_loc()) <= high]
    numbers = [float(word.replace(",", "")) for word in words]
    assert axes.get_yscale() == "log" and len(numbers) > 1 and numbers == sorted(set(numbers))


def test_metrics_are_read_without_what_was_garbled(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    assert read_metrics(file) == {}
    whole = b'{"step": 1, "val/loss": 2.5}\n{"step": 1, "val/loss": 2.25}\n'
    file.write_bytes(whole + b'\0\0\0\n\xff{"step": 2, "a": 1}\n{"step": 3, "val/lo')
    assert read_metrics(file) == {"val/loss": {1: 2.25}}
    log = MetricsFile(file)
    for step, loss in ((3, 1.5), (6, math.inf)):
        log.log_metrics({"val/loss": loss, "val/accuracy": 0.5, "epoch": 0}, step)
    assert read_metrics(file) == {"val/loss": {1: 2.25, 3: 1.5}, "val/accuracy": {3: 0.5, 6: 0.5}}


def test_words_that_are_no_arguments_are_folders(capsys: pytest.CaptureFixture[str]):
    taken: list[Any] = []

    def script(*folders: str, columns: str = "") -> None:
        """Compares."""
        taken.append((folders, columns))

    command_line.call(script, "compare.py", ["logs/a", "columns=x,y", "logs/lr=3", "b"])
    assert taken == [(("logs/a", "logs/lr=3", "b"), "x,y")]
    command_line.call(script, "compare.py", ["--help"])
    assert capsys.readouterr().out.startswith("python compare.py folders ... name=value ...\n\nCompares.")
    with pytest.raises(SystemExit, match="'colums'.*columns"):
        command_line.call(script, "compare.py", ["logs/a", "colums=x"])


def test_loads_are_drawn_as_cells(experiment: Path, drawn: list):
    write_run(experiment, "control", 7, 0.5, by_load={"find": {"1": 1.0, "64": 0.25}, "wait": {"2": 0.5}})
    compare(str(experiment))
    (figure,) = [one for one in drawn if one.axes[0].get_title() == "find"]
    assert [text.get_text() for axes in figure.axes[:2] for text in axes.texts] == ["1.00", "0.25", "0.50"]


TAMPERED = {
    "a list": "[1]",
    "cut off": '{"status": "fini',
    "nested without end": "[" * 5000,
}


@pytest.mark.parametrize("case", TAMPERED)
def test_a_summary_that_no_run_has_written_is_named_and_left_out(experiment: Path, case: str):
    """Each was a traceback of its own, somewhere in the table or on the page."""
    (folder_of(experiment, "paper-seed0") / "summary.json").write_text(TAMPERED[case])
    assert [len(row.cells) and row.runs for row in compare(str(experiment)).rows] == [2, 3]
    assert "summary.json is damaged" in (experiment / "comparison.md").read_text()


def test_an_arm_without_the_number_is_named_beside_the_picture(experiment: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    write_run(experiment, "bare", 0, 0.5, cache_bytes=None)
    compare(str(experiment), x="cache_bytes", y="accuracy")
    assert "not in the picture of accuracy against cache_bytes" in (said := capsys.readouterr().out)
    assert "lack one of the two: bare\n" in said


def test_fourteen_arms_look_different():
    assert len(set(plots.styles(map(str, range(14))).values())) == 14
    looks = {(style.colour, style.line) for style in plots.styles(map(str, range(14))).values()}
    assert len(looks) == 14, "lines of one colour have to differ"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("val_loss", "held-out loss (nats per token)"),
        ("peak_memory_bytes", "peak memory (bytes)"),
        ("data.train_tokens", "data, train (tokens)"),
        ("runs.plateau.train_seconds", "plateau: training time (s)"),
        ("several/answered/65536", "answered at 65,536 (several)"),
        ("overlap/overlap/256/2", "overlap at 256, stage 2 (overlap)"),
        ("parameters", "parameters"),
    ],
)
def test_labels_have_units(name: str, text: str):
    assert plots.label(name) == text
