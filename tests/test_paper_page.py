"""`make paper` and docs/paper.md: commands that compose, and tables that the commands can fill."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from records import write_trial

from gsm.config.compose import compose
from gsm.evaluation import paper
from gsm.experiments import rows
from gsm.experiments.execute import expand
from gsm.paths import ROOT

PAGE = ROOT / "docs/paper.md"
EXPERIMENT = {"length": "length", "length_code": "length"}  # of rows that have another name than their experiment
OF_BOOKS = "/texts/books"


def recipe(*words: str) -> list[str]:
    """The lines that `make paper` would run."""
    if not shutil.which("make"):
        pytest.skip("needs make")
    command = ["make", "-n", "-o", ".venv/.installed", "paper", *words]
    plain = {"PATH": os.environ["PATH"]}  # without the variables of a `make test` around it
    return subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True, check=True).stdout.splitlines()


def test_a_machine_with_a_gpu_takes_larger_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    without = recipe()
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho GPU 0\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    changed = [line for line in recipe() if line not in without]
    assert ["benchmark.size=1p5b" in changed[0], "experiment=paper_main size=tiny" in changed[1]] == [True, True]


def trainings(*words: str) -> list[list[str]]:
    return [shlex.split(line)[2:] for line in recipe(*words) if "train.py" in line]


def on_the_page() -> list[list[str]]:
    """The words of each `python train.py` on the page."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").split("\n")]
    books = "data=folder data.path=/texts 'data.files=[books-train-0*,books-test*]' 'data.validation=books-test*'"
    given = [shlex.split(line.replace("TEXT", books), comments=True) for line in lines]
    return [words[2:] for words in given if words[:2] == ["python", "train.py"]]


def asked(config: dict[str, Any], run: str) -> dict[str, Any]:
    return config["runs"][run]["evaluate"]


def test_the_first_seed_of_everything_comes_before_the_others_and_the_page_after_each():
    lines = recipe()
    told = [re.search(r"experiment=(\w+) seeds=(\d)", line) for line in lines]
    seeds = [(match[1], match[2]) for match in told if match]
    names = [name for name, seed in seeds if seed == "1"]
    assert seeds == [*((name, "1") for name in names), ("retrieval", "3")] and len(names) > 2
    pages = [number for number, line in enumerate(lines) if "rows logs/paper.md logs=logs" in line]
    assert len(pages) == 2 and "benchmark=paper" in lines[0] and pages[-1] > max(n for n, m in enumerate(told) if m)


def test_books_and_days_come_only_if_they_are_asked_for():
    evening = trainings()
    assert not [words for words in evening if "data=folder" in words]
    on_books, days, everything = trainings(f"BOOKS={OF_BOOKS}"), trainings("ARGS=all"), trainings("ARGS=all", "BOOKS=x")
    assert len(evening) < len(on_books) < len(everything) and len(evening) < len(days) < len(everything)
    assert all(f"data.path={OF_BOOKS}" in words for words in on_books if "data=folder" in words)


def test_every_command_composes_and_names_what_it_trains(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    commands = {tuple(words): None for words in [*trainings("ARGS=all", f"BOOKS={OF_BOOKS}"), *on_the_page()]}
    for words in commands:
        config = compose([word for word in words if not word.startswith("trainer.context")])
        named = next((word.partition("=")[2] for word in words if word.startswith("name=")), None)
        assert named in (None, config["name"])
        chosen = next((word[5:-1].split(",") for word in words if word.startswith("arm=[")), [])
        assert set(chosen) <= set(config["arms"] or chosen), words


@pytest.mark.slow
@pytest.mark.parametrize("words", trainings(), ids=" ".join)
def test_a_plan_lists_the_runs_of_an_experiment(words: list[str], tmp_path: Path):
    words = [word.replace("seeds=3", "seeds=[1]") for word in words]
    given = [*words, f"logs={tmp_path}"]
    runs = expand(compose(given), given)
    assert {run.program for run in runs} == {"train", "evaluate"} and not any(run.finished() for run in runs)


def test_the_columns_of_the_page_are_what_the_experiments_measure():
    """A column `<run>/<quantity>/<length>` names a run that measures, and a length that it asks."""
    checked = 0
    for match in rows.MARKED.finditer(PAGE.read_text()):
        name, *words = match["words"].split()
        if match["kind"] != "rows" or name == "indexer":  # ablate_indexer, with other values
            continue
        config = compose([f"experiment={EXPERIMENT.get(name, name)}", *(["size=nano"] if name in EXPERIMENT else [])])
        for run, length in re.findall(r"(\w+)/\w+/(\d+)", " ".join(word for word in words if "picture" not in word)):
            lengths = next(
                value for key, value in asked(config, run).items() if key in ("answers", "lengths", "overlap_lengths")
            )
            assert int(length) in [*map(int, lengths.split(",") if isinstance(lengths, str) else lengths)], match[0]
            checked += 1
        for option in (word for word in words if word.startswith(("arms=", "against="))):
            assert set(option.partition("=")[2].split(",")) <= set(config["arms"])
    assert checked > 20


def test_the_page_takes_the_runs_that_make_paper_leaves(tmp_path: Path):
    measured = {f"answered/{length}": 0.5 for length in (96, 1536, 6144, 24576, 65536)}
    for arm, seed in (("direct", 0), ("direct", 9), ("steps", 0), ("steps", 9)):
        write_trial(tmp_path / "logs/chain", arm, seed, train={"train_seconds": 9.0}, length={"metrics": measured})
    made = rows.tables(PAGE.read_text(), logs=tmp_path / "logs")
    assert re.search(r"\| GSM, step by step \| 2 \| 0\.5000 \+- 0\.0000 \|.*", made), (
        "the committed row of seed 0 has another value"
    )
    (line,) = re.findall(r"^Rows: `results/chain.csv` and `logs/chain`.*", made, re.MULTILINE)
    assert line.endswith(", 9.")


def test_the_papers_numbers_are_those_of_its_tables():
    published, text = paper.tables(), PAGE.read_text()
    numbers = [f"{value:.2f}" for value in [*published["paper"]["average"], *published["ruler"]["average"]]]
    numbers += [f"{value:.2f}" for values in published["ruler"]["by_length"].values() for value in values]
    numbers += [f"{value:.3f}" for value in published["ablation"]["average"]]
    numbers += [f"{value:.5f}" for values in published["perplexity"]["rows"].values() for value in values]
    numbers += [f"{value:.3f}" for values in published["overlap"]["by_length"].values() for value in values]
    assert [number for number in numbers if number not in text] == []


@pytest.mark.parametrize("size", ["tiny", "nano", "pico"])
def test_the_configurations_are_those_of_the_yamls(size: str):
    (line,) = re.findall(rf"^\| `size={size}` \|.*", PAGE.read_text(), re.MULTILINE)
    cells = [cell.strip() for cell in line.split("|")[2:6]]
    one = compose([f"size={size}"])["size"]
    seen = one["window"], one["top_k"], one["window"] + one["top_k"]
    layers = one["encoder_layers"] + one["decoder_layers"]
    assert cells[0] == str(layers) and cells[1] == f"{one['dim']:,}, {one['feed_forward_dim']:,}"
    assert cells[2] == ", ".join(map(str, seen)) and cells[3] == f"{one['context']:,}"
