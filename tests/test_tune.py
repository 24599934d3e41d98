"""Tuning: the attempts of a grid, the value that an arm takes, repeated commands, and the table."""

from __future__ import annotations

import copy
import csv
import functools
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_text
from hydra.core.override_parser.overrides_parser import OverridesParser
from short_runs import BY_MODEL, TINY, composed, folder_of, without_pictures
from test_experiment import TOY
from test_experiment import composed as of_yaml
from test_runs import InThisProcess, pretend

from gsm.config.address import placed
from gsm.config.check import ConfigError
from gsm.config.compose import compose
from gsm.config.stored import read_checkpoint
from gsm.experiments import execute as experiments
from gsm.experiments import runs as planned
from gsm.experiments.compare import compare
from gsm.experiments.execute import expand, train_all
from gsm.experiments.runs import Experiment, Run
from gsm.experiments.table import RunSummary, summarise
from gsm.experiments.tune import Choice, Tuning, choose, combinations, read_tune
from gsm.files import write_json
from gsm.paths import ROOT
from gsm.training.run import train

RATE = "optimizer.learning_rate"
TUNE = f"tune={{{RATE}: [1e-3, 2e-3, 4e-3], by: val_loss}}"
ARMS = "arms={low: ['model.state_size=9'], high: []}"
BEST = {"low": 1e-3, "high": 2e-3}  # so that the first stands at an edge


def test_a_grid_tries_every_combination_and_marks_a_best_value_at_its_edge():
    space = {"a": [1.0, 2.0, 4.0], "b": ["x", "y"]}
    assert len(combinations(space)) == 6 and combinations(space)[1] == {"a": 1.0, "b": "y"}
    choice = choose(space, lambda values: values["a"] + (values["b"] == "x"))
    assert choice.values == {"a": 1.0, "b": "y"} and choice.texts() == {"a": "1.0 (edge)", "b": "y"}
    choice = choose(space, lambda values: abs(values["a"] - 2))
    assert choice.texts() == {"a": "2.0", "b": "x"}, "the first of equal ones"
    assert not choose({"a": [4.0, 8.0]}, lambda _: math.inf).finite


@pytest.mark.parametrize("values", [["a", "b"], [True, False], [1.0], [None, 2.0]])
def test_words_and_single_values_have_no_edge(values: list[Any]):
    assert not Choice({"a": values[0]}, {"a": values}).at_edge("a")


class Pretends(InThisProcess):
    """Leaves the files of a run, whose loss is the distance of its rate from the best."""

    started: list[str] = []
    fails: set[str] = set()  # parts of names
    diverges: set[str] = set()
    signals: set[str] = set()

    def run(self, run: Run) -> int:
        self.started.append(run.label)
        if any(part in run.label for part in self.fails):
            run.find_folder().mkdir(parents=True, exist_ok=True)
            run.find_log().write_text("its last words")
            return 3
        if any(part in run.label for part in self.diverges):
            facts = {"status": "failed", "reason": "FloatingPointError: the loss is nan"}
            write_json(run.find_folder() / "summary.json", facts)
            return 1
        assert run.config
        leave(dict(run.config), run.find_folder())
        return 0


def leave(config: dict[str, Any], place: Path) -> None:
    pretend(config)
    loss = abs(math.log(config["optimizer"]["learning_rate"] / BEST.get(config["arm"], 2e-3)))
    facts = {"val_loss": 1 + loss, "accuracy": 1 - loss / 10}
    summary = json.loads((place / "summary.json").read_text())
    write_json(place / "summary.json", {**summary, **facts, "data": {"held_out": config["data"]["held_out"]}})


def quick(given: Sequence[str], digest: str | None = None) -> dict[str, Any]:
    """Return a configuration without composing it, which takes a third of a second; only values can differ."""
    config = copy.deepcopy(composed((*TINY, "data.path=.")))
    for line in given:
        read = OverridesParser.create().parse_override(line)
        *above, last = read.key_or_group.split(".")
        functools.reduce(lambda node, key: node[key], above, config)[last] = read.value()
    if not any(line.startswith("label=") for line in given):
        config["label"] = "{arm}-seed{seed}".format(**config)
    return placed(config | {"folder": "{logs}/{name}/{label}".format(**config)})


@pytest.fixture
def asked(
    real: Callable[..., Experiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Experiment]:
    """The same, composed in no time."""
    monkeypatch.setattr(planned, "compose", quick)

    def make(*given: str) -> Experiment:
        usual = [] if any(word.startswith(("tune", "arms")) for word in given) else [TUNE, ARMS]
        overrides = [f"logs={tmp_path / 'logs'}", "name=toy", *usual, *given]
        return Experiment(quick(overrides), overrides)

    return make


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Experiment]:
    """Return the experiment of a command; its runs train nothing."""
    for name in ("fails", "diverges", "signals"):
        monkeypatch.setattr(Pretends, name, set())
    monkeypatch.setattr(Pretends, "started", [])
    monkeypatch.setattr(experiments, "Child", Pretends)
    without_pictures(monkeypatch)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "text").mkdir()
    places = [f"data.path={tiny_text.write(tmp_path / 'text')}", f"data.cache_dir={tmp_path / 'cache'}"]

    def make(*given: str) -> Experiment:
        overrides = [*TINY, *places, f"logs={tmp_path / 'logs'}", "name=toy", *given]
        return Experiment(compose(overrides), overrides)

    return make


def attempt(arm: str, rate: str, seed: int = 0) -> str:
    return f"{arm}-optimizer.learning_rate_{rate}-seed{seed}"


FIRST = [attempt(arm, rate) for arm in ("low", "high") for rate in ("0.001", "0.002", "0.004")]


def rates(experiment: Experiment) -> dict[str, float]:
    return {trial.arm: trial.config["optimizer"]["learning_rate"] for trial in Tuning(experiment).settled().trials()}


def test_each_arm_takes_its_best_on_a_part_of_the_training_data_and_trains_all_seeds_on_all_of_it(
    asked: Callable[..., Experiment], capsys: pytest.CaptureFixture[str]
):
    """The table names the value and marks the edge; a changed table trains nothing, a further seed only itself."""
    table = train_all(made := asked("seeds=2", "table=[val_loss]"))
    finals = [f"{arm}-seed{seed}" for seed in (0, 1) for arm in ("low", "high")]
    assert Pretends.started == [*FIRST, *finals] and rates(asked("seeds=2")) == BEST
    for label in Pretends.started:
        tries = RATE in label
        config = read_checkpoint(made.folder / ("tuning" if tries else "") / label)["hyper_parameters"]["config"]
        assert config["data"]["held_out"] == ("tuning" if tries else "validation")
        assert config["seed"] == int(label[-1])
    assert table.tuned == {"low": {RATE: "0.001 (edge)"}, "high": {RATE: "0.002"}}
    assert table.text().splitlines()[:2] == [
        "arm   runs  optimizer.learning_rate          val_loss",
        "low      2             0.001 (edge)  1.0000 +- 0.0000",
    ]
    printed = " ".join(capsys.readouterr().out.split())
    assert f"tuning low, high on a part of the training data, by val_loss (lowest): {RATE}=0.001, 0.002" in printed
    assert f"tuned: low {RATE}=0.001 (edge); high {RATE}=0.002" in printed
    assert f"the best of {RATE}=0.001, 0.002, 0.004; '(edge)' marks the end of the values tried" in printed
    assert f"[1/6] {FIRST[0]}: finished after" in printed
    written = json.loads((made.folder / "results.json").read_text())
    assert written["arms"]["low"]["tuned"] == {RATE: "0.001 (edge)"}
    with (made.folder / "results.csv").open() as file:
        assert [row[RATE] for row in csv.DictReader(file)] == ["0.001", "0.001", "0.002", "0.002"]
    assert compare(str(made.folder)).tuned == table.tuned
    contents = json.loads((made.folder / "experiment.json").read_text())
    assert contents["arms"]["high"] == [f"{RATE}=0.002"], "so that charts know in what arms differ"
    assert {run.folder.name[:-9] for run in table.runs} == {*finals}, "no table sees an attempt"
    del Pretends.started[:]
    train_all(asked("seeds=2", "table=[steps, val_loss]"))
    train_all(asked("seeds=[0,5]"))
    assert Pretends.started == ["low-seed5", "high-seed5"]


def test_yaml_edited_while_running(real: Callable[..., Experiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What follows a tuning is composed when the best values are known, from the yamls as they were at the start."""
    mine = tmp_path / "configs/experiment/mine.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text("# @package _global_\noptimizer: {weight_decay: 0.1}\n")
    monkeypatch.setenv("GSM_CONFIGS", str(tmp_path / "configs"))
    decays: list[float] = []

    def run(self: Pretends, run: Run, whole: Callable[..., int] = Pretends.run) -> int:
        assert run.config
        decays.append(run.config["optimizer"]["weight_decay"])
        mine.write_text(mine.read_text().replace("0.1", "0.9"))
        return whole(self, run)

    monkeypatch.setattr(Pretends, "run", run)
    train_all(real("experiment=mine", TUNE, ARMS, "seeds=1"))
    assert decays == [0.1] * (len(FIRST) + 2)


def test_one_arm_alone_is_tuned_alone_and_two_runs_at_a_time_are_the_same_runs(asked: Callable[..., Experiment]):
    table = train_all(asked("seeds=1", "arm=high"))
    assert Pretends.started == [*FIRST[3:], "high-seed0"]
    assert [run.arm for run in table.runs] == ["high"]
    assert table.columns == ("accuracy", "val_loss"), "without table=, of the usual columns those that the run has"
    del Pretends.started[:]
    assert {run.arm for run in train_all(asked("seeds=1", "jobs=2")).runs} == {"low", "high"}
    assert sorted(Pretends.started) == sorted([*FIRST[:3], "low-seed0"])


def test_an_attempt_that_diverges_is_the_worst_and_is_not_tried_again(
    asked: Callable[..., Experiment], capsys: pytest.CaptureFixture[str]
):
    Pretends.diverges |= {attempt("high", "0.002"), "low-optimizer"}
    with pytest.raises(SystemExit) as stopped:
        train_all(asked("seeds=1"))
    assert stopped.value.code == 1 and Pretends.started[6:] == ["high-seed0"]
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{FIRST[4]} has diverged, which counts as the worst" in printed
    assert f"high {RATE}=0.002" in printed[printed.index("diverged, and counted as the worst: ") :]
    assert f"low: every value that was tried has diverged: {RATE}=0.001, 0.002, 0.004" in printed
    assert rates(asked("seeds=1"))["high"] in (1e-3, 4e-3)
    del Pretends.started[:]
    train_all(asked("seeds=1", "arm=high"))
    assert Pretends.started == []
    train_all(asked("seeds=1", "arm=high", "optimizer.weight_decay=0.2"))
    assert attempt("high", "0.002") in Pretends.started, "of another configuration"


def test_an_experiment_ends_without_a_table_where_all_attempts_of_all_arms_diverge(
    asked: Callable[..., Experiment], capsys: pytest.CaptureFixture[str]
):
    Pretends.diverges |= {"-optimizer"}
    with pytest.raises(SystemExit) as stopped:
        train_all(asked("seeds=1"))
    assert stopped.value.code == 1 and Pretends.started == FIRST
    assert "failed: low, high; to try again" in capsys.readouterr().out


def test_an_attempt_that_fails_otherwise_is_tried_again_by_the_same_command(
    asked: Callable[..., Experiment], capsys: pytest.CaptureFixture[str]
):
    Pretends.fails |= {attempt("high", "0.002")}
    with pytest.raises(SystemExit) as stopped:
        train_all(asked("seeds=1"))
    assert stopped.value.code == 1
    assert "low-seed0" in Pretends.started and "high-seed0" not in Pretends.started
    assert "its last words" in capsys.readouterr().out
    Pretends.fails.clear()
    del Pretends.started[:]
    train_all(asked("seeds=1"))
    assert Pretends.started == [attempt("high", "0.002"), "high-seed0"]


def test_the_attempts_of_a_grid_are_listed_first_and_composed_from_their_overrides(tmp_path: Path):
    words = [*TINY, "data.path=.", f"logs={tmp_path}", "name=toy", TUNE, "seeds=1", "arm=gsm"]
    runs = expand(compose(words), words)
    assert [run.find_folder().parent.name for run in runs] == ["tuning", "tuning", "tuning", "toy"]
    for run in runs:
        assert compose(run.arguments)["folder"] == str(run.find_folder())


def test_tuning_that_is_left_out_is_left_out_of_every_run(tmp_path: Path):
    """`tune=null` went to the parent alone, and every run began to tune by the experiment's yaml."""
    text = TOY + "tune:\n  optimizer.learning_rate: [1e-3, 2e-3]\n"
    trials = of_yaml(tmp_path, "tune=null", text=text).trials()
    assert all("tune=null" in trial.overrides and trial.config["tune"] is None for trial in trials)


def test_a_key_that_is_given_is_not_tuned(asked: Callable[..., Experiment]):
    """On the command line for all arms, or by an arm for itself."""
    table = train_all(made := asked("seeds=1", f"{RATE}=5e-3"))
    assert Pretends.started == ["low-seed0", "high-seed0"] and rates(made) == {"low": 5e-3, "high": 5e-3}
    assert table.tuned == {}
    assert "tuned" not in (made.folder / "results.md").read_text(), "the page said that 5e-3 was tuned"
    del Pretends.started[:]
    table = train_all(asked(TUNE, f"arms={{low: ['{RATE}=7e-3'], high: []}}", "seeds=1", "name=other"))
    assert Pretends.started == [*FIRST[3:], "low-seed0", "high-seed0"]
    assert table.tuned == {"high": {RATE: "0.002"}}
    assert [line.split()[2] for line in table.text().splitlines()[1:3]] == ["0.007", "0.002"], "the rate that it has"
    assert "* high: tuned" in (made.folder.with_name("other") / "results.md").read_text()


@pytest.mark.parametrize("key", ["optimizer", "/optimizer"])
def test_an_arm_beside_a_tuned_one_shows_the_variant_that_it_has(key: str):
    summaries = ({"status": "finished", "accuracy": 1.0, "choices": {"optimizer": name}} for name in ("muon", "adamw"))
    runs = [RunSummary(arm, 0, Path(arm), one, settings={}) for arm, one in zip("ab", summaries, strict=True)]
    table = replace(summarise(runs, ["accuracy"]), tuned={"a": {key: "muon"}})
    assert [line.split()[2] for line in table.text().splitlines()] == [key, "muon", "adamw"]


RATED = "optimizer.learning_rate=1e-3"  # what a pretended run's numbers follow from


def test_a_group_and_several_seeds_can_be_tuned_over(real: Callable[..., Experiment]):
    table = train_all(real("tune={optimizer: [adamw, muon], seeds: 2, by: {accuracy: highest}}", RATED, BY_MODEL))
    names = [f"gsm-optimizer_{name}-seed{seed}" for name in ("adamw", "muon") for seed in (0, 1)]
    assert Pretends.started == [*names, "gsm-seed0"]
    assert table.tuned == {"gsm": {"optimizer": "adamw"}}, "of two that are alike the first"


def test_of_runs_after_one_another_those_that_train_are_tuned_and_nothing_reported_is_measured(
    real: Callable[..., Experiment],
):
    runs = (
        "runs={train: {trainer.max_steps: 2}, loss: {after: train, evaluate: {}}, extend: {after: train, "
        "/data: ruler, data.template: short, trainer.max_steps: 1}}"
    )
    made = real(TUNE, runs, BY_MODEL)
    tried: Any = Tuning(made).attempts()[0].runs
    assert list(tried) == ["train", "extend"]
    assert {run.config["data"]["held_out"] for run in tried.values()} == {"tuning"}
    assert tried["extend"].config["data"]["template"] == "short"
    only = Tuning(real(TUNE.replace("}", ", run: train}"), runs, BY_MODEL)).attempts()[0].runs
    assert list(only) == ["train"]


def test_arms_with_different_best_values_share_no_run(real: Callable[..., Experiment]):
    """Both arms have the same first value; the second arm kept the run that it shared with the first one."""
    runs = "runs={train: {trainer.max_steps: 2}, extend: {after: train, trainer.max_steps: 1}}"
    arms = "arms={low: [], high: ['++runs.extend.optimizer.weight_decay=0.2']}"
    train_all(real(f"tune={{{RATE}: [2e-3, 1e-3], by: val_loss}}", runs, arms, "seeds=1"))
    final = [label for label in Pretends.started if RATE not in label]
    assert final == [f"{arm}-seed0-{name}" for arm in ("low", "high") for name in ("train", "extend")]


@pytest.mark.parametrize(
    ("tune", "sentence"),
    [
        ({"by": "val_loss"}, "^tune "),
        ({RATE: 1e-3}, r"^tune\.optimizer\.learning_rate .*0\.001"),
        ({RATE: [1e-3, 1e-3]}, r"^tune\.optimizer\.learning_rate "),
        ({RATE: []}, r"^tune\.optimizer\.learning_rate "),
        ({RATE: {"low": 1e-3, "high": 1e-2}}, r"^tune\.optimizer\.learning_rate\.low .*0\.001"),
        ({RATE: [1, 2], "attempts": 6}, r"^tune\.attempts .*6"),
        ({RATE: [1, 2], "grow": 1}, r"^tune\.grow .*1"),
        ({"seed": [1, 2]}, "^tune .*seed=1"),
        ({"data.held_out": ["tuning"]}, r"^tune .*data\.held_out="),
        ({"optimizer": [{"learning_rate": 1}]}, r"^tune\.optimizer "),
        ({RATE: [1, 2], "by": "cache_bytes"}, r"^tune\.by .*cache_bytes"),
        ({RATE: [1, 2], "by": {"accuracy": "best"}}, r"^tune\.by .*'best'"),
        ({RATE: [1, 2], "by": {"ppl/loss": "lowest"}}, r"^tune\.by .*ppl/loss"),
        ({RATE: [1, 2], "seeds": []}, r"^tune\.seeds "),
        ({RATE: [1, 2], "run": "extnd"}, "'extnd'.*extend"),
        ({RATE: [1, 2], "tuner": "optuna"}, r"^tune\.tuner .*'optuna'"),
    ],
)
def test_what_cannot_be_tuned_is_refused(tune: Any, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        read_tune(tune, ["val_loss"], {"train": {}, "extend": {"after": "train"}})


def test_a_table_without_a_number_that_is_known_to_be_better_one_way_asks_for_one():
    with pytest.raises(ConfigError, match=r"^tune\.by .*cache_bytes"):
        read_tune({RATE: [1, 2]}, ["cache_bytes"])
    found = read_tune({RATE: [1, 2]}, ["cache_bytes", "runs.a.accuracy", "val_loss"])
    assert found.by == {"runs.a.accuracy": "highest", "val_loss": "lowest"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["tune={optimizer.betas: [3, 4]}", ARMS], r"^arm low with optimizer.betas=3: optimizer.betas .*\b3\b"),
        ([TUNE, BY_MODEL, "arms={gsm: ['start_from=/nowhere']}"], "^arm gsm: start_from .*/nowhere"),
        (
            ["tune={optimizer.learning_rate: [1.0, -1.0]}", ARMS],
            "^arm low with .*: optimizer.learning_rate .*got -1.0",
        ),
        ([TUNE, ARMS, "~data.held_out"], r"tune must .*data\.held_out"),
    ],
)
def test_what_cannot_be_trained_is_named_before_anything_trains(
    real: Callable[..., Experiment], words: list[str], sentence: str
):
    with pytest.raises(ConfigError, match=sentence):
        train_all(real(*words))
    assert Pretends.started == []


def trained_here(self: Pretends, run: Run) -> int:
    """In the place of ``Pretends.run``: trains, in this process."""
    self.started.append(run.label)
    assert run.config
    try:
        train(run.config)
    except FloatingPointError:
        return 1
    return 0


@pytest.mark.slow
def test_real_runs_are_tuned_and_one_that_diverges_counts_as_the_worst(
    real: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A rate of 300 makes the loss infinite within a few steps."""

    monkeypatch.setattr(Pretends, "run", trained_here)
    tune = f"tune={{{RATE}: [3e-3, 1e-2, 300.0]}}"
    table = train_all(made := real(tune, BY_MODEL, "trainer.max_steps=10", "seeds=1"))
    assert f"diverged, and counted as the worst: gsm {RATE}=300.0" in " ".join(capsys.readouterr().out.split())
    assert table.tuned["gsm"][RATE] in ("0.003 (edge)", "0.01") and table.rows[0].runs == 1
    places = folder_of(made.folder / "tuning", attempt("gsm", "0.01")), folder_of(made.folder)
    tuned, final = (json.loads((place / "summary.json").read_text())["data"] for place in places)
    assert tuned["train_tokens"] + tuned["validation_tokens"] == final["train_tokens"]
    assert tuned["held_out"] == "tuning" and "held_out" not in final
    del Pretends.started[:]
    train_all(real(tune, BY_MODEL, "trainer.max_steps=10", "seeds=1"))
    assert Pretends.started == []


@pytest.mark.slow
def test_the_example_with_optuna_tunes_on_the_tuning_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The code of docs/tuning.md, with a smaller model; a second start goes on with the study."""
    pytest.importorskip("optuna", reason="the extra all is not installed")
    (code,) = re.findall(r"```python\n(import optuna.*?)```", (ROOT / "docs/tuning.md").read_text(), re.DOTALL)
    (tmp_path / "text").mkdir()
    places = [f"data.path={tiny_text.write(tmp_path / 'text')}", f"data.cache_dir={tmp_path / 'cache'}"]
    smaller = [*TINY, *places, f"logs={tmp_path / 'logs'}", "trainer.max_steps=6"]
    code = code.replace("FIXED = [", f"FIXED = {smaller} + [").replace("n_trials=20", "n_trials=2")
    monkeypatch.chdir(tmp_path)
    for trials in (2, 4):
        names: dict[str, Any] = {}
        exec(code, names)
        summaries = [json.loads(path.read_text()) for path in tmp_path.rglob("summary.json")]
        assert [one["data"]["held_out"] for one in summaries] == ["tuning"] * trials
        assert names["study"].best_value == min(one["bits_per_byte"] for one in summaries)
        assert len(names["study"].trials) == trials
    command = capsys.readouterr().out.splitlines()[-1]
    assert (
        command.startswith("python train.py -m ") and f"size.window={names['study'].best_params['window']}" in command
    )
