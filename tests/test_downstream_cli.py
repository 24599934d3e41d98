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
    ours = {name: json.loads((folder / f"tasks/{name}.json").read_text()) for name in PAPERS}
    each = [
        scores["acc_norm" if "acc_norm" in scores else "acc"] for scores in (one["scores"] for one in ours.values())
    ]
    assert lines["Avg."][1] == f"{100 * statistics.fmean(each):.2f}"
    samples = ours["blimp"]["samples"]
    assert [one["subtask"] for one in samples] == ["causative", "causative", "passive_1"]
    assert ours["blimp"]["scores"]["acc"] == statistics.fmean(one["acc"] for one in samples)
    kept = json.loads((folder / "tasks.json").read_text())["runs"][0]
    assert kept["tasks"]["piqa"]["acc"] == ours["piqa"]["scores"]["acc"] and kept["arm"] == "gsm" and kept["step"] == 2
    assert (folder / "tasks.md").read_text().startswith("| task (%) | gsm | 0.5B base |")


def test_scores_are_the_models_own(place: Path):
    folder = folder_of(place / "logs")
    ask(place, "gsm-seed0", "tasks=openbookqa")
    found = json.loads((folder / "tasks/openbookqa.json").read_text())["samples"][0]["loglikelihoods"]
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
    runs = {(run["arm"], run["seed"]): run["tasks"]["blimp"]["acc"] for run in found["runs"]}
    both = [100 * runs["gsm", seed] for seed in (0, 1)]
    assert f"{statistics.fmean(both):.2f} +- {statistics.stdev(both):.2f}" in printed
    table, differences = found["tables"]
    rows = {row[0]: row[1:] for row in table}
    assert rows["task (%)"] == ["baseline", "gsm", "separate", "shared"]
    assert rows["Avg."][-2:] == ["64.92", "64.77"]
    assert differences[0] == ["minus baseline, with 95 % interval", "gsm"]
    blimp = dict(map(tuple, differences[1:]))["blimp"]
    assert blimp.startswith(f"{both[0] - 100 * runs['baseline', 0]:+.2f} ["), "the seed that both arms have"
    assert found["runs"][0]["tasks"]["piqa"]["settings"]["context"] == 32


def test_it_goes_on_where_it_was_and_says_when_it_cannot(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    file = folder_of(place / "logs", "baseline-seed0") / "tasks_limit1/piqa.json"
    ask(place, "baseline-seed0", "tasks=piqa", "limit=1")
    before = file.read_bytes()
    assert "Limited: PIQA 1 samples." in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr("gsm.evaluation.harness.measure", lambda *_: pytest.fail("this is computed already"))
        ask(place, "baseline-seed0", "tasks=piqa", "limit=1")
    assert file.read_bytes() == before and "begins again" not in capsys.readouterr().out
    ask(place, "baseline-seed0", "tasks=piqa", "limit=1", "context=16")
    assert "piqa.json begins again: it was made with another context" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["tasks=piqua"], "'piqua'.*piqa"),
        (["tasks=piqa", "data=/nowhere"], "tasks.*/nowhere.*piqa_validation.jsonl"),
        (["tasks=piqa", "limit=-1"], "limit .*got -1"),
        (["tasks=piqa", "batch_size=0"], "batch_size .*got 0"),
        (["tasks=piqa", "output=/proc/none"], "/proc/none/tasks.json"),
    ],
)
def test_it_explains_what_it_cannot_use(place: Path, given: list[str], said: str):
    with pytest.raises(SystemExit, match=f"^error: .*{said}"):
        ask(place, "gsm-seed0", *given)


def test_a_harness_that_is_missing_is_said_before_anything_is_trained_for_it(monkeypatch: pytest.MonkeyPatch):
    measure = commands.parse(["tasks=paper"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"\.\[eval\]"):
        measure.require()
    with pytest.raises(ConfigError, match=r"\.\[eval\]"):
        measure.evaluate()
    commands.parse(["context=16"]).require()  # held-out loss needs nothing
