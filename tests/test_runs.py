"""Runs that start after one another: their weights, repeated commands, and their summaries."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny_text
import torch
from short_runs import BY_MODEL, TINY, without_pictures
from stored import store

from gsm.checkpoint import newest, read
from gsm.config.check import ConfigError
from gsm.config.compose import compose
from gsm.config.stored import checkpoint_folder, digest, read_checkpoint
from gsm.evaluation import checkpoints, commands
from gsm.evaluation.ruler import Ruler
from gsm.experiments import execute as experiments
from gsm.experiments.entries import parse_runs, read_arms
from gsm.experiments.execute import train_all
from gsm.experiments.runs import Experiment, Run, Trial
from gsm.experiments.table import read_runs
from gsm.files import write_json
from gsm.training.folder import note
from gsm.training.run import train

# The second one does not learn.
EXTEND = "{after: train, data.context: 64, trainer.max_steps: 1, optimizer.learning_rate: 0.0}"
LOSS = "loss: {after: extend, evaluate: {context: 64}}"
THREE = f"runs={{train: {{trainer.max_steps: 2}}, extend: {EXTEND}, {LOSS}}}"
ARMS = "arms={one: [], two: ['++runs.extend.optimizer.weight_decay=0.2']}"


class InThisProcess:
    """In place of a child process."""

    def __init__(self, run: Run, environment: object = None, follow: bool = False) -> None:
        self.code = self.run(run)

    def run(self, run: Run) -> int:
        if run.config:
            train(run.config)
        else:
            commands.call(run.arguments)
        return 0

    def poll(self) -> int:
        return self.code

    def forward(self, signals: object) -> None:
        pass

    def seconds(self) -> float:
        return 0.0


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Jobs leave what a run leaves, and train nothing; the list says which were started, in order. What a test adds to
    `fails` in front of a name fails."""
    names: list[str] = []

    class Pretends(InThisProcess):
        def run(self, run: Run) -> int:
            if f"fails {run.label}" in names:
                run.find_folder().mkdir(parents=True, exist_ok=True)
                run.find_log().write_text("its last words")
                return 3
            names.append(run.label)
            if run.config:
                pretend(run.config)
            else:
                loss = {"part": "text", "sequence": 0, "quantity": "loss", "value": 4.0, "weight": 2}
                asked = {"split": "validation", "documents": "", "context": 32, "sequences": 1, "of": 1, "data": {}}
                lines = {"settings": {"questions": asked}}, loss
                run.find_folder().mkdir(parents=True, exist_ok=True)
                (run.find_folder() / "evaluation.jsonl").write_text("\n".join([*map(json.dumps, lines), "", ""]))
            return 0

    monkeypatch.setattr(experiments, "Child", Pretends)
    return names


def pretend(config: Mapping[str, Any]) -> None:
    place = Path(config["folder"])
    names = {"arm": config["arm"], "seed": config["seed"], "model": "gsm"}
    facts = {"status": "finished", "steps": config["trainer"]["max_steps"], **names}
    write_json(place / "summary.json", facts)
    note(config)
    trained = {"model.x": torch.tensor(float(config["trainer"]["max_steps"]))}
    store(
        place,
        state_dict=trained,
        global_step=config["trainer"]["max_steps"],
        training_state={},
        started_from=digest(config["start_from"]),
        hyper_parameters={"config": config},
    )


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Experiment]:
    """Return the experiment of a command with these overrides."""
    without_pictures(monkeypatch)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "text").mkdir()
    places = [f"data.path={tiny_text.write(tmp_path / 'text')}", f"data.cache_dir={tmp_path / 'cache'}"]

    def make(*words: str) -> Experiment:
        of_model = [] if any(word.startswith("arms=") for word in words) else [BY_MODEL]
        overrides = [*TINY, *places, f"logs={tmp_path / 'logs'}", "name=toy", *of_model, *words]
        return Experiment(compose(overrides), overrides)

    return make


def only(experiment: Experiment) -> Trial:
    (trial,) = experiment.trials()
    return trial


def summary(experiment: Experiment, arm: str = "gsm") -> dict[str, Any]:
    (found,) = (run for run in read_runs(experiment.folder) if run.arm == arm)
    return found.summary


@pytest.mark.slow
def test_each_run_starts_from_the_weights_of_the_one_before(
    asked: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch
):
    """The second run does not learn: after its step, in a longer context, it has the weights of the first run."""
    monkeypatch.setattr(experiments, "Child", InThisProcess)
    made = asked(THREE, "table=[loss/loss, runs.train.steps]")
    table = train_all(made)
    runs, facts = only(made).runs, summary(made)
    first, second = (read_checkpoint(runs[name].find_folder()) for name in ("train", "extend"))
    torch.testing.assert_close(second["state_dict"], first["state_dict"], rtol=0, atol=0)
    assert second["global_step"] == 1 and second["hyper_parameters"]["config"]["data"]["context"] == 64
    assert facts["loss/loss"] == pytest.approx(facts["val_loss"], abs=1e-4), "the weights of the last training run"
    assert facts["runs"]["train"]["steps"] == 2 and facts["steps"] == 1 and facts["status"] == "finished"
    assert table.runs[0].value("runs.train.steps") == 2
    assert checkpoints.checkpoints(str(made.folder)) == [newest(runs["extend"].find_folder())]
    assert only(made).finished()


@pytest.mark.slow
def test_a_branch_of_a_stable_run_is_the_run_of_its_length_bit_for_bit(
    asked: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A branch continues optimiser, step, place in the data and random numbers, also after an interruption."""
    monkeypatch.setattr(experiments, "Child", InThisProcess)
    wsd = ("optimizer.schedule=wsd", "optimizer.warmup_steps=2", "optimizer.decay_fraction=0.25")
    short = "short: {after: stable, start_fresh: false, trainer.max_steps: 12}"
    stable = "stable: {trainer.max_steps: 9, optimizer.decay_fraction: 0.0}"
    long = "long: {after: stable, start_fresh: false, trainer.max_steps: 20}"
    made = asked(f"runs={{{stable}, {short}, {long}}}", *wsd)
    train_all(made)
    assert "Training on from" in capsys.readouterr().out
    for name, steps in (("short", 12), ("long", 20)):
        train_all(asked(*wsd, f"trainer.max_steps={steps}", f"name={name}", "seeds=1"))
        straight = only(asked(*wsd, f"trainer.max_steps={steps}", f"name={name}", "seeds=1")).runs[""]
        alone, branch = (read(checkpoint_folder(run.find_folder())) for run in (straight, only(made).runs[name]))
        torch.testing.assert_close(branch["state_dict"], alone["state_dict"], rtol=0, atol=0)
        moments, expected = (content["optimizer_states"][0]["state"] for content in (branch, alone))
        torch.testing.assert_close(moments, expected, rtol=0, atol=0)
        assert branch["global_step"] == steps
    assert only(made).finished()
    other = asked(f"runs={{{stable}, {short.replace('false', 'true')}}}", *wsd)
    assert not only(other).finished(), "with a fresh optimiser it is another run"


@pytest.mark.slow
def test_a_branch_that_trains_otherwise_is_refused_before_anything_moves(asked: Callable[..., Experiment]):
    stable = asked("trainer.max_steps=2", "name=stable").config
    train(stable)
    start = stable["folder"]
    branch = ("name=branch", f"start_from={start}", "start_fresh=false", "trainer.max_steps=3")
    for more, difference in (
        (("optimizer.learning_rate=1e-4",), r"^start_fresh .* optimizer.learning_rate \("),
        (("seed=1",), r"^start_fresh .* data.seed \(0 there, 1 here\), seed"),
    ):
        with pytest.raises(ConfigError, match=difference):
            train(asked(*branch, *more).config)
    train(asked(*branch, "optimizer.decay_fraction=0.5").config)


def test_what_is_finished_is_not_done_again_and_what_has_changed_is(asked: Callable[..., Experiment], done: list[str]):
    train_all(asked(THREE))
    assert done == ["gsm-seed0-train", "gsm-seed0-extend", "gsm-seed0-loss"]
    changed = (THREE, "++runs.extend.trainer.max_steps=3")
    assert only(asked(THREE)).finished() and not only(asked(*changed)).finished()
    del done[:]
    train_all(asked(THREE))
    assert done == []
    train_all(asked(*changed))
    assert done == ["gsm-seed0-extend", "gsm-seed0-loss"]
    del done[:]
    train_all(asked(THREE, "++runs.loss.evaluate.context=32", "++runs.extend.data.batch_size=2"))
    assert done == ["gsm-seed0-loss"], "of the first extension, which is still there"


def test_a_run_that_two_arms_need_is_trained_once_in_the_folder_of_the_first(
    asked: Callable[..., Experiment], done: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    """Also where one command trains the one arm, and another command the other, whichever was first."""
    train_all(asked(THREE, ARMS))
    assert sorted(done) == [f"one-seed0-{name}" for name in ("extend", "loss", "train")] + [
        f"two-seed0-{name}" for name in ("extend", "loss")
    ]
    one, two = read_runs(asked(THREE, ARMS).folder)
    assert one.parts["train"] == two.parts["train"] and one.parts["extend"] != two.parts["extend"]
    assert two.curves == one.folder.parent / one.parts["train"] / "metrics.jsonl"
    together = json.loads((asked(THREE, ARMS).folder / "loss.json").read_text())["tables"][0]
    assert together[:2] == [["all targets", "one", "two"], ["loss, nats per token", "2.0000", "2.0000"]]
    assert "2 runs: 1 of one, 1 of two" in capsys.readouterr().out, "as evaluate.py says of several checkpoints"
    del done[:]
    for arm in ("arm=two", "arm=one"):
        train_all(asked(THREE, ARMS, f"logs={tmp_path / 'others'}", arm))
    assert done == [
        "one-seed0-train",
        "two-seed0-extend",
        "two-seed0-loss",
        "one-seed0-extend",
        "one-seed0-loss",
    ]


def test_the_papers_experiments_train_every_model_once_among_them(
    done: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    without_pictures(monkeypatch)
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def trained(name: str, *measurements: str) -> Experiment:
        given = [f"experiment={name}", "size=pico", f"logs={tmp_path}", *(f"~runs.{one}" for one in measurements)]
        made = Experiment(compose(given), given)
        del done[:]
        train_all(made)
        return made

    first = trained("paper_main", "standard")
    assert done == ["gsm-seed0-train", "baseline-seed0-train"]
    place = only_folder(first, "gsm-seed0-train")
    second = trained("paper_long_context", "before", "ppl")
    assert done == ["gsm-seed0-extend", "baseline-seed0-extend"]
    assert f"gsm-seed0-train({place})" in "".join(capsys.readouterr().out.split())
    gsm = read_runs(second.folder)[0]
    assert (second.folder / gsm.parts["train"]).resolve() == place and gsm.curves.resolve() == place / "metrics.jsonl"
    trained("paper_cot", "ruler")
    assert done == ["direct-seed0-tune", "cot-seed0-tune"]
    trained("paper_ablate_indexer", "overlap", "untuned", "standard", "ruler")
    assert [name for name in done if name.endswith("-train")] == ["separate_indexer-seed0-train"]


def only_folder(experiment: Experiment, label: str) -> Path:
    (folder,) = experiment.folder.glob(f"{label}-*")
    return folder


def test_another_experiments_run_is_taken_if_it_is_finished_and_none_has_begun_here(
    asked: Callable[..., Experiment], done: list[str]
):
    one = "runs={train: {trainer.max_steps: 2}}"
    train_all(asked(one, "name=first"))
    place = only(asked(one, "name=first")).runs["train"].find_folder()
    facts = json.loads((place / "summary.json").read_text())
    write_json(place / "summary.json", {**facts, "status": "running"})
    here = only(asked(one, "name=second")).runs["train"]
    assert here.find_folder().parent.name == "second" and not here.finished()
    write_json(place / "summary.json", facts)
    there = only(asked(one, "name=second")).runs["train"]
    assert there.find_folder() == place and there.finished()
    here.find_folder().mkdir(parents=True)
    assert only(asked(one, "name=second")).runs["train"].find_folder() == here.find_folder()


def test_an_arm_that_shares_its_training_has_its_own_name(asked: Callable[..., Experiment], done: list[str]):
    """Its row was filed under the arm that had trained."""
    made = asked(
        "runs={train: {}, loss: {after: train, evaluate: {context: 64}}}",
        "arms={one: [], two: ['++runs.loss.evaluate.context=32']}",
    )
    train_all(made)
    assert sorted(done) == ["one-seed0-loss", "one-seed0-train", "two-seed0-loss"]
    assert [summary(made, arm)["arm"] for arm in ("one", "two")] == ["one", "two"]


@pytest.mark.slow
def test_a_run_that_fails_stops_no_other_arm_and_the_same_command_goes_on_there(
    asked: Callable[..., Experiment], done: list[str], capsys: pytest.CaptureFixture[str]
):
    done.append("fails one-seed0-extend")
    with pytest.raises(SystemExit) as stopped:
        train_all(asked(THREE, ARMS))
    assert stopped.value.code == 1
    output = capsys.readouterr().out
    assert "one-seed0-extend: ended with exit code 3" in output
    assert "one-seed0-loss: not started, as one-seed0-extend has failed" in output
    assert output.rindex("its last words") > output.index("sample standard deviation"), "last words come last"
    facts = summary(asked(THREE, ARMS), "one")
    assert (facts["status"], facts["run"], facts["reason"]) == (
        "failed",
        "extend",
        "its process ended with exit code 3",
    )
    assert done[1:] == ["one-seed0-train", "two-seed0-extend", "two-seed0-loss"]
    assert summary(asked(THREE, ARMS), "two")["status"] == "finished"
    del done[:]
    train_all(asked(THREE, ARMS))
    assert done == ["one-seed0-extend", "one-seed0-loss"]


def test_an_arm_with_a_failed_run_has_failed_though_another_run_of_it_ends(
    asked: Callable[..., Experiment], done: list[str]
):
    """Its summary said `running`, with the name of the last run that had started."""
    done.append("fails gsm-seed0-tune")
    tune = "tune: {after: train, trainer.max_steps: 1}, overlap: {after: train, evaluate: {context: 64}}"
    with pytest.raises(SystemExit):
        train_all(asked(f"runs={{train: {{trainer.max_steps: 2}}, {tune}}}"))
    assert done[1:] == ["gsm-seed0-train", "gsm-seed0-overlap"]
    facts = summary(asked())
    assert (facts["status"], facts["run"]) == ("failed", "tune")


def test_a_run_that_chooses_a_group_drops_what_was_said_of_it(asked: Callable[..., Experiment]):
    """data.path=... is for the text of the main training, and questions take no path."""
    made = asked("runs={train: null, tune: {after: train, /data: ruler, data.answers: cot, data.template: short}}")
    runs: Any = only(made).runs
    config = runs["tune"].config["data"]
    assert (config["answers"], config["template"]) == ("cot", "short") and "path" not in config
    assert runs["train"].config["data"]["batch_size"] == 4


def test_a_value_of_one_run_can_be_given_on_the_command_line(asked: Callable[..., Experiment]):
    overrides = ("++runs.train.trainer.max_steps=7", "++runs.loss.evaluate.sequences=2", "trainer.max_steps=9")
    runs: Any = only(asked(THREE, *overrides)).runs
    assert [runs[name].config["trainer"]["max_steps"] for name in ("train", "extend")] == [7, 1]
    assert runs["loss"].words == ("context=64", "sequences=2")


def test_a_run_can_be_left_out_or_be_a_checkpoint_that_is_there(asked: Callable[..., Experiment], done: list[str]):
    """In place of the main training, or of all of it, where only measuring is left."""
    train_all(asked("runs={train: null}", "name=first"))
    first = only(asked("runs={train: null}", "name=first")).runs["train"].find_folder()
    runs: Any = only(asked(THREE, f"runs.train={first}", "~runs.loss")).runs
    assert list(runs) == ["extend"] and runs["extend"].after is None
    assert runs["extend"].config["start_from"] == str(first)
    del done[:]
    measured = asked(THREE, f"runs.extend={first}", "~runs.train")
    train_all(measured)
    assert done == ["gsm-seed0-loss"] and summary(measured)["loss/perplexity"] == math.exp(2)


@pytest.mark.parametrize("wanted", ["{ruler: true, ruler.examples: 20}", "{ruler: {examples: 20}}", "{ruler: true}"])
def test_arguments_with_a_dot_may_be_nested_and_the_command_line_has_the_last_word(
    asked: Callable[..., Experiment], wanted: str
):
    made = asked(f"runs={{a: null, ask: {{after: a, evaluate: {wanted}}}}}", "++runs.ask.evaluate.ruler.examples=5")
    runs: Any = only(made).runs
    assert commands.choose(runs["ask"].words) == (Ruler, ["examples=5"])


def test_values_come_through_the_command_line_as_they_are():
    read = parse_runs({"a": {"name_of": "it's", "x": {"y": [1, "b c", None, True]}, "z": 2.5e-4}})
    assert read[0].lines == (r"name_of='it\'s'", "x.y=[1,'b c',null,true]", "z=0.00025")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([], r"^runs.*"),
        ({"a b": {}}, "^runs: .*'a b'"),
        ({"a": 3}, r"^runs\.a .*3"),
        ({"a": {"model.stages[": 1}}, r"^runs\.a .*model\.stages\[=1"),
        ({"a": {"seed": 3}}, r"^runs\.a .*seed=3"),
        ({"a": {"data": "ruler"}}, r"^runs\.a\.data .*/data: ruler"),
        ({"b": {"after": "a"}}, r"^runs\.b\.after .*a"),
        ({"a": {}, "b": {"after": "a", "evaluate": {}, "seed": 1}}, r"^runs\.b\.evaluate .*seed"),
        ({"a": {}, "b": {"evaluate": {}}}, r"^runs\.b\.evaluate .*runs\.b\.after"),
        ({"a": "x", "b": {"after": "a", "evaluate": {}}, "c": {"after": "b"}}, r"^runs\.c\.after .*b"),
        ({"a": "logs/x"}, "^runs .*a"),
        ({"a": {"evaluate": {"contxt": 4}}}, "runs.a.evaluate: .*'contxt'.*context"),
        ({"a": {"evaluate": {"ruler.words": "many"}}}, "runs.a.evaluate: words .*'many'"),
        ({"a": {"evaluate": {"checkpoint": "x"}}}, r"^runs\.a\.evaluate .*checkpoint=x"),
        ({"a": {"evaluate": {"ruler": {"output": "x"}}}}, r"^runs\.a\.evaluate .*output=x"),
        ({"a": {"evaluate": {"ruler": {}}}}, r"^runs\.a\.evaluate\.ruler "),
    ],
)
def test_a_wrong_entry_of_runs_is_refused(wrong: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        parse_runs(wrong)


def test_a_run_that_does_not_compose_is_named_before_anything_trains(asked: Callable[..., Experiment]):
    with pytest.raises(ConfigError, match="^arm gsm: run b: .*data.contxt"):
        asked("runs={a: null, b: {after: a, data.contxt: 64}}").trials()


def test_an_experiment_leaves_out_arms_of_the_one_it_builds_on():
    assert list(read_arms({"gsm": None, "mine": []})) == ["mine"]
    with pytest.raises(ConfigError, match="^arms .*gsm"):
        read_arms({"gsm": None})
