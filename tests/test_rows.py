"""Rows of results: one line a run, added once, and tables that are those of the rows."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Trainer
from records import change, write_run, write_trial
from short_runs import folder_of

from gsm import paths
from gsm.config.address import TUNING
from gsm.config.check import ConfigError
from gsm.config.compose import compose
from gsm.config.load import instantiate_model
from gsm.experiments import SEVERAL, rows
from gsm.paths import ROOT
from gsm.provenance import processor
from gsm.training import report

BITS = {"plain": [1.50, 1.54, 1.52], "mhc": [1.48, 1.51, 1.505]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An experiment of two arms with three seeds, and one run that failed."""
    place = tmp_path / "logs/residual"
    for arm, values in {**BITS, "mhc_failed": [None]}.items():
        for seed, bits in enumerate(values):
            status = {"status": "finished"} if bits else {"status": "failed", "reason": "loss is nan"}
            data = {"corpus": "folder", "digest": "00ff"}
            facts = {"bits_per_byte": bits, "commit": "abc123+", "steps": 5, "data": data, **status}
            write_run(place, arm, seed, config(arm, seed), **facts)
    return place


def config(arm: str, seed: int, **optimizer: float) -> dict[str, Any]:
    words = ["experiment=residual", f"arm={arm}", f"seed={seed}", "logs=/scratch", f"{SEVERAL[-1]}=null"]
    optimiser = {"_target_": "gsm.Muon", "learning_rate": 4e-3, **optimizer}
    return {"optimizer": optimiser, "data": {"path": "/home/me/books"}, "overrides": words}


def test_a_row_is_added_once_and_says_where_its_numbers_come_from(folder: Path, tmp_path: Path):
    assert rows.publish(folder, tmp_path, ["bits_per_byte"]).startswith("7 rows added")
    before = (tmp_path / "residual.csv").read_bytes()
    assert rows.publish(folder, tmp_path, ["bits_per_byte"]).startswith("0 rows added")
    assert (tmp_path / "residual.csv").read_bytes() == before
    columns, lines = rows.read(tmp_path / "residual.csv")
    assert columns == [*rows.FACTS, "bits_per_byte"]
    first = next(line for line in lines if line["arm"] == "mhc" and line["seed"] == "1")
    assert first["command"] == "python train.py experiment=residual arm=mhc seed=1"
    expected = {"commit": "abc123", "clean": "no", "corpus": "books", "corpus_sha256": "00ff", "optimizer": "Muon"}
    assert expected.items() <= first.items() and first["learning_rate"] == "0.004" and first["bits_per_byte"] == "1.51"
    failed = next(line for line in lines if line["arm"] == "mhc_failed")
    assert (failed["status"], failed["reason"], failed["bits_per_byte"]) == ("failed", "loss is nan", "")


@pytest.mark.parametrize("name", ["summary.json", "config.yaml"])
@pytest.mark.parametrize("content", ["{a: [", "[1, 2]"])
def test_no_row_is_made_of_a_damaged_file(folder: Path, tmp_path: Path, name: str, content: str):
    for file in folder.rglob(name):
        file.write_text(content)
    with pytest.raises(ConfigError, match=f"{name} is damaged"):
        rows.publish(folder, tmp_path, ["bits_per_byte"])


def test_a_file_with_other_columns_is_not_added_to(folder: Path, tmp_path: Path):
    rows.publish(folder, tmp_path, ["bits_per_byte"])
    with pytest.raises(ConfigError, match=r"^columns .*residual\.csv.*accuracy"):
        rows.publish(folder, tmp_path, ["accuracy"])


def test_a_run_with_other_settings_than_its_arm_gets_no_row(folder: Path, tmp_path: Path):
    """compare.py and publish= took the mean of seeds that were trained with different optimisers."""
    write_run(folder, "mhc", 3, config("mhc", 3, weight_decay=0.9), bits_per_byte=1.5)
    with pytest.raises(ConfigError, match="^seed 3 of mhc "):
        rows.publish(folder, tmp_path, ["bits_per_byte"])
    assert not (tmp_path / "residual.csv").exists()
    shutil.rmtree(folder_of(folder, "mhc-seed3"))
    rows.publish(folder, tmp_path, ["bits_per_byte"])
    shutil.rmtree(folder_of(folder, "plain-seed0"))  # the rows that are there decide, whichever seed is the odd one
    write_run(folder, "plain", 0, config("plain", 0, learning_rate=0.5), bits_per_byte=1.6)
    with pytest.raises(ConfigError, match="^seed 0 of plain .*learning_rate 0.5"):
        rows.publish(folder, tmp_path, ["bits_per_byte"])


def test_attempts_of_tuning_get_rows_too_and_each_value_may_have_its_own_settings(folder: Path, tmp_path: Path):
    for rate in (1e-3, 2e-3):
        own = config("mhc", 0, learning_rate=rate)
        write_run(folder / TUNING, "mhc", 0, {**own, "data": {"held_out": "tuning"}}, bits_per_byte=1.5)
    assert rows.publish(folder, tmp_path, ["bits_per_byte"]).startswith("9 rows added")
    _, lines = rows.read(tmp_path / "residual.csv")
    attempts = [line for line in lines if line["split"] == "tuning"]
    assert [(line["experiment"], line["learning_rate"]) for line in attempts] == [
        ("residual", "0.001"),
        ("residual", "0.002"),
    ]


def test_rows_of_an_arm_that_were_trained_otherwise_are_a_line_of_their_own(folder: Path, tmp_path: Path):
    rows.publish(folder, tmp_path, ["bits_per_byte"])
    columns, (*others, last) = rows.read(tmp_path / "residual.csv")
    with (tmp_path / "residual.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows([*others, {**last, "learning_rate": "0.05"}])
    made = rows.table("residual bits_per_byte", tmp_path)
    assert "| plain | 2 |" in made and "| plain (learning_rate=0.05) | 1 | 1.5200 |" in made and "| mhc | 3 |" in made


def test_a_newer_row_that_failed_leaves_the_finished_one(folder: Path, tmp_path: Path):
    rows.publish(folder, tmp_path, ["bits_per_byte"])
    change(folder_of(folder, "plain-seed1"), status="failed", reason="loss is nan")
    assert rows.publish(folder, tmp_path, ["bits_per_byte"]).startswith("1 rows added")
    assert {(run.arm, run.seed) for run in rows.runs(tmp_path / "residual.csv")} == {
        (arm, seed) for arm in BITS for seed in range(3)
    }


MARKERS = "<<<<<<< HEAD\n{0}=======\n{0}>>>>>>> theirs\n"
TYPED = {"no seed": (",2,", ",seed2,"), "no number": (",1.52", ',"1,52"')}


@pytest.mark.parametrize("odd", [MARKERS, "{0}a,b\n", '{0}"', "{0},\n", *TYPED])
def test_a_file_with_a_line_that_is_no_row_is_refused_with_its_number(folder: Path, tmp_path: Path, odd: str):
    """Of a file with the marks of a merge both sides were read, and the last one was published."""
    rows.publish(folder, tmp_path, ["bits_per_byte"])
    file = tmp_path / "residual.csv"
    *lines, last = file.read_text().splitlines(keepends=True)
    broken = last.replace(*TYPED[odd]) if odd in TYPED else odd.format(last)
    file.write_text("".join([*lines, broken]))
    with pytest.raises(ConfigError, match=r"residual\.csv, line (8|9)"):
        rows.table("residual bits_per_byte", tmp_path)
    with pytest.raises(ConfigError, match=r"residual\.csv, line (8|9)"):
        rows.publish(folder, tmp_path, ["bits_per_byte"])


def test_a_row_is_added_below_a_last_line_without_an_end(folder: Path, tmp_path: Path):
    rows.publish(folder, tmp_path, ["bits_per_byte"])
    file = tmp_path / "residual.csv"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]).rstrip("\n"))
    assert rows.publish(folder, tmp_path, ["bits_per_byte"]).startswith("1 rows added")
    assert len(rows.read(file)[1]) == 7


def test_the_table_of_a_marker_has_the_means_and_the_paired_intervals_of_the_rows(folder: Path, tmp_path: Path):
    rows.publish(folder, tmp_path, ["bits_per_byte"])
    page = "before\n<!-- rows: residual bits_per_byte against=plain -->\nstale 1.23\n<!-- end -->\nafter\n"
    made = rows.tables(page, tmp_path)
    assert made.startswith("before\n") and made.endswith("<!-- end -->\nafter\n") and "1.23" not in made
    apart = [here - there for here, there in zip(BITS["mhc"], BITS["plain"], strict=True)]
    low, high = pytest.importorskip("scipy.stats").t.interval(
        0.95, 2, statistics.fmean(apart), statistics.stdev(apart) / 3**0.5
    )
    mean = f"{statistics.fmean(BITS['mhc']):.4f} +- {statistics.stdev(BITS['mhc']):.4f}"
    assert f"| mhc | 3 | {mean} | {statistics.fmean(apart):+.4f} [{low:+.4f}, {high:+.4f}] |" in made
    assert "mhc_failed" not in made
    assert rows.tables(made, tmp_path) == made


def test_a_table_beside_several_arms_has_the_differences_from_each(folder: Path, tmp_path: Path):
    rows.publish(folder, tmp_path, ["bits_per_byte"])
    made = rows.table("residual bits_per_byte learning_rate against=plain,mhc", tmp_path)
    head, _, *lines = made.splitlines()
    assert head == "| arm | runs | bits per byte of held-out text | minus plain | minus mhc | learning rate |"
    cells = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[1:] for line in lines if line[:1] == "|"}
    assert list(cells) == ["plain", "mhc"] and cells["plain"][2] == cells["mhc"][3] == "-"
    for arm, base, number in (("mhc", "plain", 2), ("plain", "mhc", 3)):
        alone = rows.table(f"residual bits_per_byte against={base}", tmp_path)
        assert re.search(rf"\| {arm} \| 3 \| [^|]* \| {re.escape(cells[arm][number])} \|", alone)
        assert cells[arm][number][0] in "+-"
    absent = rows.table("residual bits_per_byte against=plain,mhc_two_pass", tmp_path).splitlines()
    assert absent[0].endswith("| minus mhc_two_pass |") and all(line.endswith("| - |") for line in absent[2:4])


def test_a_marker_can_name_its_arms_and_their_order(folder: Path, tmp_path: Path):
    rows.publish(folder, tmp_path, ["bits_per_byte"])
    made = rows.table("residual bits_per_byte arms=mhc,plain", tmp_path)
    assert re.findall(r"^\| (mhc|plain) ", made, re.MULTILINE) == ["mhc", "plain"] and "minus mhc" in made
    made = rows.table("residual bits_per_byte arms=plain", tmp_path)
    assert "| plain | 3 |" in made and "mhc" not in made


def test_properties_of_an_arm_have_neither_spread_nor_difference(tmp_path: Path):
    """The number of parameters follows from the arm: only a measured column has a spread and a difference."""
    measured = {"gsm": [1.0, 2.0, 4.0], "baseline": [2.0, 3.0, 5.5]}
    lines(tmp_path, {"accuracy": measured, "parameters": {"gsm": [2000] * 3, "baseline": [1990, 1990, 2050]}})
    made = rows.table("x accuracy parameters against=gsm", tmp_path)
    assert "| gsm | 3 | 2.3333 +- 1.5275 | - | 2,000 |" in made
    assert re.search(r"\| baseline \| 3 \| .* \| 2,010 \+- 35 \|", made), "seeds that differ are shown"
    assert "| baseline | 3 | 2,010 +- 35 | +10 [" in rows.table("x parameters against=gsm", tmp_path)


def test_a_marker_without_rows_makes_a_sentence_without_a_number(tmp_path: Path):
    made = rows.tables("<!-- rows: residual bits_per_byte margin=0.005 picture=a.png -->\n<!-- end -->\n", tmp_path)
    assert made.splitlines()[1] == "`results/residual.csv` has no rows yet."
    assert "a.png)" not in made


def test_without_the_arm_to_compare_with_there_are_no_differences(folder: Path, tmp_path: Path):
    rows.publish(folder, tmp_path, ["bits_per_byte"])
    made = rows.table("residual bits_per_byte against=mhc_two_pass", tmp_path)
    assert "| plain | 3 |" in made and "minus" not in made


def lines(tmp_path: Path, columns: dict[str, dict[str, list[Any]]]) -> None:
    """A file of rows, `x.csv`: by column and arm the values of the seeds."""
    arms = next(iter(columns.values()))
    header = ["arm", "seed", "split", "status", "commit", *columns]
    with (tmp_path / "x.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        for arm in arms:
            for seed in range(len(arms[arm])):
                own = [json.dumps(columns[name][arm][seed]) for name in columns]
                writer.writerow([arm, seed, "validation", "finished", "0123456789ab", *own])


def test_a_column_of_a_ratio_is_the_difference_of_differences(tmp_path: Path):
    """ln(base / GSM) at the long context minus the same at the short one: this is what the interval is of."""
    short = {"gsm": [60.0, 61.0, 63.0], "baseline": [62.0, 64.0, 64.0]}
    long = {"gsm": [58.0, 60.5, 62.0], "baseline": [61.0, 64.5, 64.5]}
    lines(tmp_path, {"p/256": short, "p/4096": long})
    made = rows.table("x ln(p/4096:p/256) against=gsm", tmp_path)
    gaps = [[math.log(b / g) for b, g in zip(of["baseline"], of["gsm"], strict=True)] for of in (short, long)]
    apart = [there - here for here, there in zip(*gaps, strict=True)]
    half = 4.303 * statistics.stdev(apart) / 3**0.5
    mean = statistics.fmean(apart)
    assert f"| {mean:+.4f} [{mean - half:.4f}, {mean + half:.4f}] |" in made


def test_the_interval_over_books_is_of_books_and_the_verdict_of_seeds(tmp_path: Path):
    """Three arms beside gsm: a little worse in every book alike, much worse, and as good on average but not by book."""
    apart = {"gsm": [0.0, 0.0], "near": [0.001, 0.001], "far": [0.1, 0.1], "uneven": [0.06, -0.03]}
    noise, lengths = [0.0, 0.0001, -0.0001], [1000, 2000]
    by_book = {
        arm: [
            [[(2 + more + eps) * n * math.log(2), n] for more, n in zip(books, lengths, strict=True)] for eps in noise
        ]
        for arm, books in apart.items()
    }
    bits = {arm: [sum(s for s, _ in run) / math.log(2) / 3000 for run in runs] for arm, runs in by_book.items()}
    lines(tmp_path, {"books/bits_per_byte": bits, "books/by_document": by_book})
    made = rows.table("x books/bits_per_byte against=gsm without=1", tmp_path)
    assert re.search(r"\| near \| 2 \| .* \| \+0.0010 \|", made) and "seeds 0, 2." in made
    with pytest.raises(ConfigError, match="^without .*0, 1, 2, got 3"):
        rows.table("x books/bits_per_byte without=3", tmp_path)
    with pytest.raises(ConfigError, match="'nea'.*near"):
        rows.table("x books/bits_per_byte arms=gsm,nea", tmp_path)
    made = rows.table("x books/bits_per_byte against=gsm margin=0.005", tmp_path)
    assert "| near | +0.0010 | +0.0010 [+0.0010, +0.0010] | yes |" in made
    assert "| far | +0.1000 | +0.1000 [+0.1000, +0.1000] | no |" in made
    (uneven,) = re.findall(r"\| uneven \| .*? \| (.*?) \| yes \|", made)
    assert re.sub("[+-]0.0000", "0", uneven) == "0 [-0.0300, +0.0600]"


def test_rows_keep_the_sums_of_books_of_an_evaluation(folder: Path, tmp_path: Path):
    for arm in BITS:
        measured = {"bits_per_byte": 1.5, "by_document": [[3.25, 4.0], [1.5, 2.0]]}
        own = {"config": config(arm, 4), "bits_per_byte": 1.5}
        write_trial(folder, f"{arm}_measured", 4, train=own, books={"metrics": measured})
    rows.publish(folder, tmp_path, ["books/bits_per_byte"])
    (run, _) = [run for run in rows.runs(tmp_path / "residual.csv") if run.seed == 4]
    assert run.summary["books/by_document"] == [[3.25, 4.0], [1.5, 2.0]]


def test_an_arm_of_several_runs_has_the_row_of_the_last_that_trains(folder: Path, tmp_path: Path):
    later = {**config("several", 0, learning_rate=1e-3), "overrides": ["seed=0", "start_from=/a b/logs/x/gsm-seed0"]}
    parts = {"train": {"config": config("several", 0)}, "a_later": {"config": later}}
    write_trial(folder, "several", 0, **parts, measured={"metrics": {"bits_per_byte": 1.5}})
    rows.publish(folder, tmp_path, ["measured/bits_per_byte"])
    (made,) = [line for line in rows.read(tmp_path / "residual.csv")[1] if line["arm"] == "several"]
    assert made["measured/bits_per_byte"] == "1.5"
    assert (made["learning_rate"], made["command"]) == (
        "0.001",
        "python train.py seed=0 start_from=logs/x/gsm-seed0",
    )


def test_a_picture_is_drawn_where_a_table_has_changed(folder: Path, tmp_path: Path):
    rows.publish(folder, tmp_path, ["bits_per_byte"])
    page = tmp_path / "page.md"
    page.write_text("<!-- rows: residual bits_per_byte against=plain picture=seeds.png -->\n<!-- end -->\n")
    rows.main([str(page)], tmp_path)
    assert "(seeds.png)" in page.read_text() and (tmp_path / "seeds.png").read_bytes()[1:4] == b"PNG"


def test_the_picture_of_an_evaluation_by_length_has_a_line_an_arm_and_a_panel_a_quantity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    names = "length/answered/96,length/answered/24576,length/cache_bytes/96,length/cache_bytes/24576"
    lines = [f"experiment,arm,seed,status,split,commit,{names}"]
    runs = [(arm, seed) for arm in ("gsm", "other") for seed in (0, 1)]
    lines += [f"x,{arm},{seed},finished,validation,abc,1.0,0.{seed}5,700,9000000" for arm, seed in runs]
    (tmp_path / "x.csv").write_text("\n".join(lines) + "\n")
    drawn: list[Any] = []
    monkeypatch.setattr(rows.plots, "png", lambda figure: drawn.append(figure) or b"png")
    page = tmp_path / "page.md"
    page.write_text("<!-- rows: x length/answered/96 picture=by_length.png -->\n<!-- end -->\n")
    rows.main([str(page)], tmp_path)
    answered, cache = drawn[0].axes
    assert [list(line.get_xydata()[1]) for line in answered.get_lines()] == [[24576, 0.1], [24576, 0.1]]
    assert [label.get_text() for label in answered.get_xticklabels()] == ["96", "24K"]
    low, high = cache.get_ylim()
    ticks = [tick for tick in cache.get_yticks() if low < tick < high]
    assert ticks == [10**power for power in (3, 4, 5, 6, 7)], "of an axis of four decades"


def test_the_stages_of_an_arm_are_drawn_together_with_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    names = "two/overlap/256/1,two/overlap/256/2,two/overlap/1024/1,two/overlap/1024/2,two/chance/256,two/chance/1024"
    rows_of_seeds = [f"x,gsm,{seed},finished,validation,abc,0.3,0.4,0.{seed},0.2,0.25,0.125" for seed in (1, 3)]
    (tmp_path / "x.csv").write_text("\n".join([f"experiment,arm,seed,status,split,commit,{names}", *rows_of_seeds]))
    drawn: list[Any] = []
    monkeypatch.setattr(rows.plots, "png", lambda figure: drawn.append(figure) or b"png")
    page = tmp_path / "page.md"
    page.write_text("<!-- picture: x two/overlap/256/1 draw=together picture=overlap.png -->\n<!-- end -->\n")
    rows.main([str(page)], tmp_path)
    ends = {line.get_label(): list(line.get_xydata()[1]) for line in drawn[0].axes[0].get_lines()}
    assert ends == {"overlap, stage 1": [1024, 0.2], "overlap, stage 2": [1024, 0.2], "chance": [1024, 0.125]}


def test_arms_and_columns_have_the_labels_of_their_experiments_yaml(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rows.publish(folder, tmp_path, ["bits_per_byte"])
    yaml = tmp_path / "configs/experiment/residual.yaml"
    yaml.parent.mkdir(parents=True)
    yaml.write_text("labels:\n  plain: one stream\n  mhc_failed: failed\n  bits_per_byte: bits\n")
    monkeypatch.setattr(paths, "configs", lambda: tmp_path / "configs")
    made = rows.table("residual bits_per_byte arms=plain,mhc against=plain", tmp_path)
    assert made.startswith("| arm | runs | bits | minus one stream |")
    assert "| one stream | 3 |" in made and "| mhc | 3 |" in made
    yaml.write_text("labels: {plain: one, mhc: one}\n")
    with pytest.raises(ConfigError, match=r"^labels\.(plain|mhc) .* one "):
        rows.table("residual bits_per_byte", tmp_path)


def test_a_picture_can_stand_without_its_table_and_show_the_differences_with_their_intervals(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rows.publish(folder, tmp_path, ["bits_per_byte"])
    drawn: list[Any] = []
    monkeypatch.setattr(rows.plots, "png", lambda figure: drawn.append(figure) or b"png")
    page = tmp_path / "page.md"
    marker = "picture: residual bits_per_byte against=plain margin=0.01 draw=differences picture=apart.png"
    page.write_text(f"<!-- {marker} -->\n<!-- end -->\n")
    rows.main([str(page)], tmp_path)
    (image,) = page.read_text().splitlines()[1:2]
    assert image.endswith("(apart.png)") and "| mhc" not in page.read_text()
    axes = drawn[0].axes[0]
    apart = [here - there for here, there in zip(BITS["mhc"], BITS["plain"], strict=True)]
    ((bar,),) = [collection.get_segments() for collection in axes.collections]
    low, high = pytest.importorskip("scipy.stats").t.interval(
        0.95, 2, statistics.fmean(apart), statistics.stdev(apart) / 3**0.5
    )
    assert [bar[0][0], bar[1][0]] == pytest.approx([low, high], abs=1e-4)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["mhc"]


def test_the_picture_of_one_column_against_another_has_a_point_an_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lines(tmp_path, {"loss": {"a": [1.0, 2.0], "b": [3.0, 4.0]}, "cache_bytes": {"a": [10, 10], "b": [900, 900]}})
    drawn: list[Any] = []
    monkeypatch.setattr(rows.plots, "png", lambda figure: drawn.append(figure) or b"png")
    rows.picture("x loss x=cache_bytes picture=b.png", tmp_path / "page.md", tmp_path)
    points = [list(line.get_xydata()[0]) for line in drawn[0].axes[0].get_lines() if line.get_marker() in "os"]
    assert points == [[10, 1.5], [900, 3.5]]


def test_runs_of_your_own_stand_in_place_of_rows_of_the_same_arm_and_seed(folder: Path, tmp_path: Path):
    rows.publish(folder, tmp_path, ["bits_per_byte"])
    own = tmp_path / "own/residual"
    facts = {"commit": "def", "steps": 5, "data": {"corpus": "folder", "digest": "00ff"}, "a/loss/96": 2}
    for seed, bits in {2: 1.7, 3: 1.9}.items():
        write_run(own, "plain", seed, config("plain", seed), bits_per_byte=bits, **facts)
    other = {**facts, "data": {"corpus": "stdlib", "digest": "11"}}
    write_run(own, "plain", 4, config("plain", 4), bits_per_byte=0.5, **other)
    write_run(own, "mhc", 0, config("mhc", 0), status="failed", bits_per_byte=9.0)
    marker = "residual bits_per_byte a/loss/96 arms=plain,mhc picture=seeds.png"
    made = rows.table(marker, tmp_path, own.parent)
    values = [*BITS["plain"][:2], 1.7, 1.9]
    assert f"| plain | 4 | {statistics.fmean(values):.4f} +- {statistics.stdev(values):.4f} |" in made
    assert "| plain (corpus_sha256=11) | 1 | 0.5000 |" in made, "of another text"
    assert f"| mhc | 3 | {statistics.fmean(BITS['mhc']):.4f} +-" in made, "a run that failed leaves the row"
    assert "Rows: `results/residual.csv` and `logs/residual`, commit abc123+, def" in made.replace(
        "abc123,", "abc123+,"
    )
    alone = rows.table(marker.replace("arms=plain,mhc ", ""), tmp_path / "none", own.parent)
    assert "| plain | 2 | 1.8000 +- 0.1414 |" in alone and "Rows: `logs/residual`" in alone
    assert rows.table(marker.replace("a/loss/96 ", ""), tmp_path) == rows.table(
        marker.replace("a/loss/96 ", ""), tmp_path, tmp_path / "none"
    )
    page = tmp_path / "page.md"
    page.write_text(f"<!-- rows: {marker} -->\n{made}\n\n<!-- end -->\n")
    rows.main([str(page)], tmp_path, own.parent)
    assert (tmp_path / "seeds.png").is_file(), "a page of one's own has no pictures yet"


def test_a_time_is_that_of_a_processor():
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    assert report.device(trainer).startswith(f"{processor()}, ") and not processor().startswith("cpu")


@pytest.mark.parametrize("able", [False, True])
def test_a_faster_precision_is_named_where_the_processor_has_it(able: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": able}, raising=False)
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    named = [
        report.could_be_faster(Trainer(accelerator="cpu", precision=precision, **quiet))
        for precision in ("32-true", "bf16-mixed")
    ]
    assert named == [able, False]


MEASURED = """# speed

| prefill | baseline | GSM | paper |
| --- | --: | --: | --: |
| 256 tokens | 1 | 2 |  |
| 4K tokens | 3 | 4 |  |
| 64K tokens |  |  |  |

| decoding | baseline |
| --- | --: |
| 256 tokens | 5 |
"""


def test_lines_that_were_measured_stand_in_a_page_without_empty_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rows, "BENCHMARKS", tmp_path)
    (tmp_path / "speed.md").write_text(MEASURED)
    head = "| prefill | baseline | GSM |\n| --- | --: | --: |\n"
    assert rows.measured("speed.md prefill") == head + "| 256 tokens | 1 | 2 |\n| 4K tokens | 3 | 4 |"
    assert rows.measured("speed.md lines=4K prefill") == head + "| 4K tokens | 3 | 4 |"
    assert "| 256 tokens | 5 |" in rows.measured("speed.md decoding")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/speed.md").write_text(MEASURED.replace("| 5 |", "| 6 |"))
    assert "| 256 tokens | 6 |" in rows.measured("speed.md decoding", tmp_path / "logs")
    with pytest.raises(ConfigError, match="8K"):
        rows.measured("speed.md lines=8K prefill")
    with pytest.raises(ConfigError, match="memory"):
        rows.measured("speed.md memory")


def test_a_table_of_yamls_has_their_openings_and_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "size").mkdir()
    monkeypatch.setattr(paths, "configs", lambda: tmp_path)
    (tmp_path / "size/_base.yaml").write_text("# Others are made of it.\na: 1\n")
    (tmp_path / "size/a.yaml").write_text("# @package _global_\n# P(a|b)?\n# Both.\n#\n# More.\na: 1\n")
    marker = "<!-- yamls: size -->\n{}<!-- end -->\n"
    lines = ["| `size=` | description |", "| --- | --- |", "| `a` | P(a\\|b)? Both. |"]
    assert rows.tables(marker.format("")) == marker.format("\n".join(lines) + "\n\n")
    (tmp_path / "size/b.yaml").write_text("# Why?\n# Two CPU cores take 1.5 hours; model=gsm, ... take longer.\na: 1\n")
    assert rows.yamls("size").splitlines()[2:] == ["| `a` | P(a\\|b)? Both. |  |", "| `b` | Why? | 1.5 hours |"]


def test_without_a_name_the_tables_of_every_page_are_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    pages = [tmp_path / "README.md", tmp_path / "docs/log/x.md"]
    pages[1].parent.mkdir(parents=True)
    for page in pages:
        page.write_text("<!-- rows: x loss -->\n<!-- end -->\n")
    rows.main([], tmp_path)
    assert all("\n`results/x.csv` has no rows yet.\n" in page.read_text() for page in pages)


@pytest.mark.parametrize("page", rows.all_pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_marker_of_a_page_has_the_table_of_its_source(page: Path):
    text = page.read_text()
    assert rows.tables(text) == text, "run: make tables"
    begun = re.findall(r"<!-- (?:rows|picture|costs|measured|yamls|taps):", text)
    assert len(rows.MARKED.findall(text)) == len(begun), "without an end"


EXPERIMENTS = {  # of rows that have another name
    "convolved_1m": "convolved",
    "convolved_tuned": "convolved",
    "encoder_layer": "ablate_encoder_layer",
    "indexer": "ablate_indexer",
    "length": "length size=nano",
    "residual": "ablate_residual",
    "residual_needles": "ablate_residual_needles size=nano",
}


@pytest.mark.parametrize("name", sorted(path.stem for path in rows.RESULTS.glob("*.csv")))
def test_an_arm_has_the_parameters_of_its_rows(name: str):
    """An arm that becomes another model needs another name: its rows are those of the model before."""
    words = f"experiment={EXPERIMENTS.get(name, name)}".split()
    arms = {"gsm": []} if name == "default" else compose(words)["arms"]
    of_rows = {run.arm: run.value("parameters") for run in rows.runs(rows.RESULTS / f"{name}.csv")}
    for arm in arms.keys() & of_rows.keys():
        config = compose([*(() if name == "default" else words), "arms=null", "seeds=null", *arms[arm]])
        with torch.device("meta"):
            assert instantiate_model(config).parameter_report().total == of_rows[arm], arm
