"""`evaluate.py tasks=...`: the paper's table with ours beside it, for one checkpoint and for a sweep."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import tiny_tasks
import tiny_text
import torch
from short_runs import BY_MODEL, TINY, folder_of

from gsm.config.check import ConfigError
from gsm.config.compose import compose
from gsm.config.load import load_model
from gsm.evaluation import commands
from gsm.evaluation.records import by, mean, read, where
from gsm.training.run import train

pytest.importorskip("lm_eval", reason="the extra eval is not installed")
PAPERS = "arc_easy arc_challenge piqa sciq blimp hellaswag winogrande mmlu openbookqa lambada".split()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with documents, and three trained runs of two arms below logs/."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "text").mkdir()
    tiny_text.write(folder / "text")
    given = [f"data.path={folder / 'text'}", f"data.cache_dir={folder / 'cache'}", f"logs={folder}", BY_MODEL]
    for model, seed in (("gsm", 0), ("gsm", 1), ("baseline", 0)):
        train(compose([*TINY, *given, "name=logs", "trainer.max_steps=2", f"model={model}", f"seed={seed}"]))
    tiny_tasks.write(folder / "data")
    return folder


def ask(place: Path, run: str, *more: str) -> None:
    arguments = [f"checkpoint={place / 'logs' / run}", f"data={place / 'data'}", *more]
    commands.call(arguments)


def test_the_papers_table_stands_beside_ours(place: Path, capsys: pytest.CaptureFixture[str]):
    ask(place, "gsm-seed0", "tasks=paper", "batch_size=8")
    printed = capsys.readouterr().out
    lines = {line.split()[0]: line.split() for line in printed.splitlines() if line.strip()}
    assert lines["ARC-Easy+"][2:] == ["51.85", "51.64", "59.09", "58.59", "72.90", "71.55"]
    assert lines["BLiMP"][2:4] == ["77.01", "79.34"]
    assert "SciQ: from the validation split" in printed and "MMLU: 3 of 3 contexts were cut" in printed
    assert printed.isascii() and all(len(line) <= 100 or str(place) in line for line in printed.splitlines())
    folder = folder_of(place / "logs")
    ours = read(folder / "tasks.jsonl")[-1]
    assert list(by(ours.records, "task")) == [(name,) for name in PAPERS]
    each = []
    for name in PAPERS:
        records = ours.where(task=name)
        each.append(mean(where(records, quantity="acc_norm") or where(records, quantity="acc")))
    assert lines["Avg."][1] == f"{100 * statistics.fmean(each):.2f}"
    assert [one["subtask"] for one in ours.where(task="blimp")] == ["blimp_causative"] * 2 + ["blimp_passive_1"]
    assert (folder / "tasks.md").read_text().startswith("| task (%) | gsm | 0.5B base |")


def test_scores_are_the_models_own(place: Path):
    folder = folder_of(place / "logs")
    ask(place, "gsm-seed0", "tasks=openbookqa")
    found = read(folder / "tasks.jsonl")[-1].where(task="openbookqa")[0]["loglikelihoods"]
    model, context = load_model(folder), b"The tides are pulled by"
    for loglikelihood, choice in zip(found, (b" a star", b" the old moon", b" rain"), strict=True):
        ids = torch.tensor([list(context + choice)])[:, -33:]  # it reads as many tokens as in training, 32
        with torch.no_grad():
            logprob_TV = model(ids).logits[0].log_softmax(-1)[-len(choice) - 1 : -1]
        want = float(logprob_TV.gather(1, ids[0, -len(choice) :, None]).sum())
        assert loglikelihood == pytest.approx(want, abs=1e-4)


def test_a_sweep_becomes_means_spreads_and_paired_differences(place: Path, capsys: pytest.CaptureFixture[str]):
    ask(place, "", "tasks=ablation")
    printed = capsys.readouterr().out
    found = json.loads((place / "logs/tasks.json").read_text())
    blimp = {
        (arm, seed): 100.0
        * (mean(read(folder_of(place / "logs", f"{arm}-seed{seed}") / "tasks.jsonl")[-1].where(task="blimp")) or 0.0)
        for arm, seed in (("gsm", 0), ("gsm", 1), ("baseline", 0))
    }
    both = [blimp["gsm", seed] for seed in (0, 1)]
    assert f"{statistics.fmean(both):.2f} +- {statistics.stdev(both):.2f}" in printed
    table, differences = found["tables"]
    rows = {row[0]: row[1:] for row in table}
    assert rows["task (%)"] == ["baseline", "gsm", "separate", "shared"]
    assert rows["Avg."][-2:] == ["64.92", "64.77"]
    assert differences[0] == ["minus baseline, with 95 % interval", "gsm"]
    apart = dict(map(tuple, differences[1:]))["blimp"]
    assert apart.startswith(f"{both[0] - blimp['baseline', 0]:+.2f} ["), "the seed that both arms have"


def test_what_is_measured_is_not_measured_again(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    file = folder_of(place / "logs", "baseline-seed0") / "tasks.jsonl"
    ask(place, "baseline-seed0", "tasks=piqa", "limit=1")
    before = file.read_bytes()
    assert "Limited: PIQA 1 samples." in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr("gsm.evaluation.harness.measure", lambda *_: pytest.fail("this is computed already"))
        ask(place, "baseline-seed0", "tasks=piqa", "limit=1")
    assert file.read_bytes() == before
    ask(place, "baseline-seed0", "tasks=piqa", "limit=1", "context=16")
    assert read(file)[-1].settings["model"]["context"] == 16


@pytest.mark.parametrize(
    ("given", "key"),
    [
        (["tasks=piqua"], "piqua"),
        (["tasks=piqa", "data=/nowhere"], "tasks: /nowhere"),
        (["tasks=piqa", "limit=-1"], "limit"),
        (["tasks=piqa", "batch_size=0"], "batch_size"),
        (["tasks=piqa", "output=/proc/none"], "/proc/none"),
    ],
)
def test_it_explains_what_it_cannot_use(place: Path, given: list[str], key: str):
    with pytest.raises(SystemExit, match=f"^error: .*{key}"):
        ask(place, "gsm-seed0", *given)


def test_a_harness_that_is_missing_is_said_before_anything_is_trained_for_it(monkeypatch: pytest.MonkeyPatch):
    measure = commands.parse(["tasks=paper"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"\[eval\]"):
        measure.require()
    with pytest.raises(ConfigError, match="tasks"):
        measure.evaluate()
    commands.parse(["context=16"]).require()  # held-out loss needs nothing
