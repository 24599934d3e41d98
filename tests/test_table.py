"""The table of an experiment: means and deviations over seeds, as text, CSV and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gsm.experiments.table import read_runs, summarise
from gsm.tables import number_text


def write_run(folder: Path, arm: str, seed: int, **summary: Any) -> None:
    run = folder / arm / f"seed{seed}"
    run.mkdir(parents=True)
    (run / "summary.json").write_text(json.dumps({"status": "finished", **summary}))


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
    (tmp_path / "a/seed2").mkdir()
    (tmp_path / "a/seed2/summary.json").write_text("{half of")
    (tmp_path / "a/seedling").mkdir()
    (tmp_path / "a/seedling/summary.json").write_text("{}")
    runs = read_runs(tmp_path)
    assert [(run.seed, run.finished) for run in runs] == [(0, True), (1, False)]
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
    assert "; no difference shown: near (" in said
    assert said.endswith("3 seeds); too few seeds to tell: alone (+8.0000, one seed)")
    (said,) = summarise(read_runs(tmp_path), ["parameters"], arms).verdicts()
    assert "; " in said and "parameters, beside first: lower: lower (" in said, "no direction is better"
    pair = [run for run in read_runs(tmp_path) if run.seed < 2 and run.arm in ("first", "near")]
    assert "too few seeds to tell: near (+0.0000, 2 seeds)" in summarise(pair, ["val_loss"]).verdicts()[0]
    assert summarise(pair, ["val_loss", "overlap.mean"]).meanings()[1].startswith("overlap.mean: fraction of")
