"""Runs in phases: what each starts from, what is done again, and what the run says in the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_text
import torch
from short_runs import TINY

from gsm.config import command_line
from gsm.config.check import ConfigError
from gsm.config.compose import compose
from gsm.config.load import read_checkpoint
from gsm.evaluation import checkpoints, commands
from gsm.experiments import phases, weights
from gsm.experiments.arms import read_arms
from gsm.experiments.fit import train
from gsm.experiments.phases import Phased, read_phases
from gsm.files import write_json

# The second one does not learn.
EXTEND = "{data.context: 64, trainer.max_steps: 1, optimizer.learning_rate: 0.0}"
THREE = f"phases={{train: {{trainer.max_steps: 2}}, extend: {EXTEND}, loss: {{evaluate: {{context: 64}}}}}}"


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Phases leave what a run leaves, and train nothing; the list says which were worked off, in order."""
    names: list[str] = []

    def carry_out(command: Sequence[str], log: Path) -> tuple[int, None]:
        names.append(f"{log.parent.parent.parent.name}/{log.parent.name}")
        if log.name == "train.log":
            pretend(compose(command))
        else:
            measured = {"loss": 2.0, "perplexity": 7.4, "bits_per_byte": None}
            write_json(log.parent / "evaluation.json", {"text": measured})
        return 0, None

    monkeypatch.setattr(phases, "carry_out", carry_out)
    return names


def pretend(config: dict[str, Any]) -> None:
    place = Path(config["folder"])
    write_json(place / "summary.json", {"status": "finished", "steps": config["trainer"]["max_steps"]})
    (place / "checkpoints").mkdir(exist_ok=True)
    known = {"state_dict": {}, "global_step": 1, "started_from": weights.digest(config["start_from"])}
    torch.save({**known, "hyper_parameters": {"config": config}}, place / "checkpoints/last.ckpt")


def in_this_process(command: Sequence[str], log: Path) -> tuple[int, None]:
    if log.name == "train.log":
        train(compose(command))
    else:
        chosen, words = commands.choose(command[2:])
        command_line.call(chosen.evaluate, chosen.name, words)
    return 0, None


@pytest.fixture
def phased(tmp_path: Path) -> Callable[..., Phased]:
    (tmp_path / "text").mkdir()
    places = [f"data.path={tiny_text.write(tmp_path / 'text')}", f"data.cache_dir={tmp_path / 'cache'}"]

    def make(*given: str) -> Phased:
        overrides = [*TINY, *places, f"logs={tmp_path / 'logs'}", "name=toy", *given]
        return Phased(compose(overrides), overrides)

    return make


def test_each_phase_starts_from_the_weights_of_the_one_before(
    phased: Callable[..., Phased], monkeypatch: pytest.MonkeyPatch
):
    """One that does not learn has those of the first one, in a longer context, after one step of its own."""
    monkeypatch.setattr(phases, "carry_out", in_this_process)
    made = phased(THREE)
    found = phases.run(made, [])
    first, second = (read_checkpoint(made.home / name) for name in ("train", "extend"))
    torch.testing.assert_close(second["state_dict"], first["state_dict"], rtol=0, atol=0)
    assert second["global_step"] == 1 and second["hyper_parameters"]["config"]["data"]["context"] == 64
    assert found["loss/loss"] == pytest.approx(found["val_loss"], abs=1e-4), "measured is what was trained last"
    assert found["phases"]["train"]["steps"] == 2 and found["steps"] == 1 and found["status"] == "finished"
    assert json.loads((made.home / "summary.json").read_text()) == found
    assert checkpoints.checkpoints(str(made.home.parent.parent)) == [made.home / "extend/checkpoints/last.ckpt"]
    assert made.finished()


def test_what_is_finished_is_not_done_again_and_what_has_changed_is(phased: Callable[..., Phased], done: list[str]):
    phases.run(phased(THREE), [])
    assert phased(THREE).finished()
    changed = phased(THREE, "++phases.extend.data.batch_size=2")
    assert not changed.finished()
    del done[:]
    phases.run(phased(THREE), [])
    assert done == []
    phases.run(changed, [])
    assert done == ["gsm/extend", "gsm/loss"]
    del done[:]
    phases.run(phased(THREE, "force=true"), [])
    assert done == ["gsm/train", "gsm/extend", "gsm/loss"]


@pytest.mark.slow
def test_what_two_arms_train_alike_is_trained_once(phased: Callable[..., Phased], done: list[str]):
    phases.run(phased(THREE, "arm=one"), [])
    found = phases.run(phased(THREE, "arm=two", "++phases.extend.data.batch_size=2"), [])
    assert done == ["one/train", "one/extend", "one/loss", "two/extend", "two/loss"]
    assert found["phases"]["train"]["folder"] == found["curves"] == "../../one/seed0/train"


def test_a_phase_that_fails_ends_the_run_and_the_same_command_goes_on_there(
    phased: Callable[..., Phased],
    done: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    works = phases.carry_out

    def fails(command: Sequence[str], log: Path) -> tuple[int, int | None]:
        return (3, None) if log.parent.name == "extend" else works(command, log)

    monkeypatch.setattr(phases, "carry_out", fails)
    with pytest.raises(SystemExit) as stopped:
        phases.run(phased(THREE), [])
    assert stopped.value.code == 3
    assert "phase extend of" in capsys.readouterr().out
    summary = json.loads((phased(THREE).home / "summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("failed", "phase extend failed with exit code 3")
    monkeypatch.setattr(phases, "carry_out", works)
    phases.run(phased(THREE), [])
    assert done == ["gsm/train", "gsm/extend", "gsm/loss"]


def test_a_phase_that_chooses_a_group_drops_what_was_said_of_it(phased: Callable[..., Phased]):
    """data.path=... is for the text of the main training, and questions take no path."""
    made = phased("phases={train: {}, tune: {/data: ruler, data.answers: cot, data.template: short}}")
    config = made._configs["tune"]["data"]
    assert (config["answers"], config["template"]) == ("cot", "short") and "path" not in config
    assert made._configs["train"]["data"]["batch_size"] == 4


def test_what_every_phase_says_otherwise_is_known(phased: Callable[..., Phased]):
    both = "phases={a: {trainer.max_steps: 2}, b: {trainer.max_steps: 1, optimizer.warmup_steps: 1}}"
    assert phased(both).without_effect() == ["trainer.max_steps=30"]


def test_a_value_of_one_phase_can_be_given_on_the_command_line(phased: Callable[..., Phased]):
    made = phased(
        THREE, "++phases.train.trainer.max_steps=7", "++phases.loss.evaluate.sequences=2", "trainer.max_steps=9"
    )
    assert [made._configs[name]["trainer"]["max_steps"] for name in ("train", "extend")] == [7, 1]
    assert made.phases[2].lines == ("context=64", "sequences=2")


@pytest.mark.parametrize("asked", ["{ruler: true, ruler.examples: 20}", "{ruler: {examples: 20}}", "{ruler: true}"])
def test_arguments_with_a_dot_may_be_nested_and_the_command_line_has_the_last_word(
    phased: Callable[..., Phased], asked: str
):
    made = phased(f"phases={{train: {{}}, ask: {{evaluate: {asked}}}}}", "++phases.ask.evaluate.ruler.examples=5")
    assert commands.choose(made.phases[1].lines) == (commands.RULER, ["examples=5"])


@pytest.mark.slow
def test_a_run_may_measure_what_it_starts_from(phased: Callable[..., Phased], done: list[str]):
    phases.run(phased("phases={train: {}}", "arm=one"), [])
    first = phased("phases={train: {}}", "arm=one").home / "train"
    steps = "phases={before: {evaluate: {}}, extend: {trainer.max_steps: 1}}"
    found = phases.run(phased(steps, "arm=two", f"start_from={first}"), [])
    assert done == ["one/train", "two/before", "two/extend"] and found["before/perplexity"] == 7.4


def test_a_run_all_of_whose_weights_are_another_arm_s_has_no_checkpoint_of_its_own(tmp_path: Path):
    """What lies in its folder is of a phase that it does not have any more."""
    for arm in ("one", "two"):
        (tmp_path / arm / "seed0/old/checkpoints").mkdir(parents=True)
        (tmp_path / arm / "seed0/old/checkpoints/last.ckpt").touch()
    write_json(tmp_path / "two/seed0/summary.json", {"trained": ["new"]})
    assert checkpoints.checkpoints(str(tmp_path)) == [tmp_path / "one/seed0/old/checkpoints/last.ckpt"]


def test_values_come_through_the_command_line_as_they_are():
    read = read_phases({"a": {"name_of": "it's", "x": {"y": [1, "b c", None, True]}, "z": 2.5e-4}})
    assert read[0].lines == (r"name_of='it\'s'", "x.y=[1,'b c',null,True]", "z=0.00025")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([], r"phases is \[\], but maps names to overrides"),
        ({"a b": {}}, "phases has the name 'a b'"),
        ({"a": 3}, "phases.a is 3, but maps keys to values"),
        ({"a": ["model.stages=["]}, r"phases.a: cannot read 'model.stages=\['"),
        ({"a": {"seed": 3}}, "phases.a sets seed, which is the run's: leave seed=3 out"),
        ({"a": {"data": "ruler"}}, "phases.a.data is 'ruler', but data is a group: write /data: ruler"),
        ({"a": {"evaluate": {}, "seed": 1}}, "phases.a has evaluate beside other keys"),
        ({"a": {"evaluate": {"lengths": 4}}}, "phases has a alone, which measure: one has to train"),
        ({"a": {"evaluate": {"contxt": 4}}}, "phases.a.evaluate: unknown argument 'contxt'; did you mean context"),
        ({"a": {"evaluate": {"ruler.words": "many"}}}, "phases.a.evaluate: words is 'many', but takes int"),
        ({"a": {"evaluate": {"checkpoint": "x"}}}, "phases.a.evaluate has checkpoint=x, which is the run's to say"),
        ({"a": {"evaluate": {"ruler": {"output": "x"}}}}, "phases.a.evaluate has output=x, which is the run's to say"),
        ({"a": {"evaluate": {"ruler": {}}}}, "phases.a has ruler without a value: give it one, or leave it out"),
    ],
)
def test_what_cannot_be_a_phase_is_said(wrong: Any, said: str):
    with pytest.raises(ConfigError, match=said):
        read_phases(wrong)


def test_a_phase_that_does_not_compose_is_named_before_anything_trains(phased: Callable[..., Phased]):
    with pytest.raises(ConfigError, match="^phase extend: unknown key 'data.contxt'; did you mean context"):
        phased("phases={train: {}, extend: {data.contxt: 64}}")


def test_to_measure_takes_something_that_was_trained(phased: Callable[..., Phased]):
    with pytest.raises(ConfigError, match="phase loss measures, but nothing was trained before: say start_from="):
        phases.run(phased("phases={loss: {evaluate: {context: 64}}, train: {}}"), [])


def test_an_experiment_leaves_out_arms_of_the_one_it_builds_on():
    assert list(read_arms({"gsm": None, "mine": []})) == ["mine"]
