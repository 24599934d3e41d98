"""The table of an experiment: means and deviations over seeds, as text, CSV and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from records import write_run, write_trial
from short_runs import folder_of

from gsm.experiments.table import list_trial, read_runs, summarise
from gsm.intervals import over_pairs
from gsm.tables import number_text


def test_the_table_holds_mean_and_sample_deviation(tmp_path: Path):
    for seed, value in enumerate([1.0, 2.0, 4.0]):
        write_run(tmp_path, "a", seed, loss=value, memory={"window": 1000 * value})
    write_run(tmp_path, "b", 0, loss=3.0)
    table = summarise(read_runs(tmp_path), ["loss", "memory.window", "nothing"], ["b", "a", "c"])
    assert [row.arm for row in table.rows] == ["b", "a", "c"]
    cell = table.rows[1].cells["loss"]
    assert (cell.count, cell.mean) == (3, pytest.approx(7 / 3))
    assert cell.spread == pytest.approx((sum((v - 7 / 3) ** 2 for v in (1, 2, 4)) / 2) ** 0.5)
    assert table.text().splitlines() == [
        "arm  runs              loss   memory.window  nothing",
        "b       1            3.0000               -        -",
        "a       3  2.3333 +- 1.5275  2,333 +- 1,528        -",
        "c       0                 -               -        -",
        "",
        "loss  seed 0  seed 1  seed 2",
        "b     3.0000       -       -",
        "a     1.0000  2.0000  4.0000",
        "c          -       -       -",
    ]
    assert table.empty_columns() == ["nothing"]
    assert table.csv().splitlines()[-1] == "a,2,4.0,4000.0,"
    assert json.loads(json.dumps(table.plain()))["arms"]["a"]["seeds"]["2"]["loss"] == 4.0


def test_a_difference_that_is_the_same_with_every_seed_has_no_interval(tmp_path: Path):
    for seed, value in enumerate([1.0, 0.5, 0.75]):
        write_run(tmp_path, "a", seed, accuracy=value)
        write_run(tmp_path, "b", seed, accuracy=value)
        write_run(tmp_path, "c", seed, accuracy=value - 0.25 * (seed == 2))
    differences = summarise(read_runs(tmp_path), ["accuracy"], ["a", "b", "c"]).differences()
    assert str(differences["b"]["accuracy"]) == "+0.0000"
    assert str(differences["c"]["accuracy"]) == "-0.0833 [-0.4419, 0.2752]", "t(2) * 0.25 / 3"


def test_runs_that_say_nothing_useful_are_no_numbers(tmp_path: Path):
    write_run(tmp_path, "a", 0, loss=float("nan"), name="x", flag=True)
    write_run(tmp_path, "a", 1, loss=2.0, status="interrupted")
    (write_run(tmp_path, "a", 2) / "summary.json").write_text("{half of")
    (tmp_path / "seedling").mkdir()
    (tmp_path / "seedling/summary.json").write_text("{}")
    runs = read_runs(tmp_path)
    assert [(run.seed, run.finished) for run in runs] == [(0, True), (1, False), (2, False)]
    table = summarise(runs, ["loss", "name", "flag"])
    assert [str(cell) for cell in table.rows[0].cells.values()] == ["-", "-", "-"]
    assert read_runs(tmp_path / "nowhere") == []


def test_a_wide_table_goes_on_below(tmp_path: Path):
    columns = [f"a_rather_long_name_{number}" for number in range(9)]
    for seed in range(15):
        write_run(tmp_path, "arm", seed, **dict.fromkeys(columns, 1.5))
    lines = summarise(read_runs(tmp_path), columns).text(100).splitlines()
    assert max(map(len, lines)) <= 100
    assert all(any(column in line for line in lines) for column in columns)
    assert any("seed 14" in line for line in lines)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0.0000"), (1.69812, "1.6981"), (74.3824, "74.382"), (2274304.0, "2,274,304"), (3e-5, "3e-05")],
)
def test_numbers_have_the_digits_that_matter(value: float | None, text: str):
    assert number_text(value) == text


def test_a_verdict_needs_a_difference_that_a_paired_t_test_finds(tmp_path: Path):
    losses = {"first": (1.0, 1.1, 1.2), "lower": (0.5, 0.61, 0.7), "near": (1.02, 1.08, 1.21)}
    for arm, values in losses.items():
        for seed, value in enumerate(values):
            write_run(tmp_path, arm, seed, val_loss=value, parameters=value)
    write_run(tmp_path, "alone", 0, val_loss=9.0, parameters=9)
    arms = ["first", "lower", "near", "alone"]
    (said,) = summarise(read_runs(tmp_path), ["val_loss"], arms).verdicts()
    assert said.startswith(
        "val_loss (lower is better), beside first: better: lower (-0.4967 [-0.5110, -0.4823], 3 seeds); "
    )
    assert "; not measurably different: near (" in said
    assert said.endswith("3 seeds); too few seeds to tell: alone (+8.0000, one seed)")
    (said,) = summarise(read_runs(tmp_path), ["parameters"], arms).verdicts()
    assert "; " in said and "parameters, beside first: lower: lower (" in said, "no direction is better"
    pair = [run for run in read_runs(tmp_path) if run.seed < 2 and run.arm in ("first", "near")]
    assert "too few seeds to tell: near (+0.0000, 2 seeds)" in summarise(pair, ["val_loss"]).verdicts()[0]
    assert not over_pairs([(20 / 512, 14 / 512), (19 / 512, 13 / 512)]).differs, "one difference, twice, by chance"
    loss, overlap = summarise(pair, ["val_loss", "overlap.mean", "parameters", "by_load.wait.8"]).meanings()
    assert loss.startswith("val_loss: ") and loss.endswith("; lower is better"), "parameters need no explanation"
    assert overlap == "overlap.mean: shared with the encoder's selection (fraction)"


def test_a_trial_of_several_runs_is_one_line_with_the_numbers_of_all(tmp_path: Path):
    """Arms that share a run list its folder each; a run by itself is known by its summary."""
    shared = {"config": {"data": {"context": 32}}, "val_loss": 2.0}
    write_trial(tmp_path, "a", 0, train=shared, extend={"val_loss": 1.0}, ppl={"metrics": {"perplexity": 9.0}})
    list_trial(tmp_path, {"arm": "b", "seed": 0, "runs": {"train": folder_of(tmp_path, "a-seed0-train").name}})
    write_run(tmp_path, "alone", 0, val_loss=3.0)
    a, alone, b = sorted(read_runs(tmp_path), key=lambda run: run.arm)
    assert [run.finished for run in (a, alone, b)] == [True] * 3
    assert [run.value("val_loss") for run in (a, alone, b)] == [1.0, 3.0, 2.0]
    assert a.value("ppl/perplexity") == 9.0 and a.value("runs.train.val_loss") == 2.0
    assert a.folder == folder_of(tmp_path, "a-seed0-extend") and a.curves.parent == b.folder


def test_a_trial_is_as_far_as_its_last_run(tmp_path: Path):
    folders = write_trial(tmp_path, "a", 0, train={}, extend={"status": "interrupted", "reason": "SIGTERM"})
    (run,) = read_runs(tmp_path)
    assert (run.finished, run.summary["status"], run.summary["run"]) == (False, "interrupted", "extend")
    for file in folders["extend"].iterdir():
        file.unlink()
    (run,) = read_runs(tmp_path)
    assert (run.finished, run.summary["run"]) == (False, "extend")
