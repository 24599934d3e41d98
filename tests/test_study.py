"""Tuning by Optuna: what is asked for and again after an interruption, what is pruned when, and what is said of it."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from short_runs import BY_MODEL
from test_tune import BEST, RATE, Pretends, asked, leave, real, trained_here

from gsm.config.check import ConfigError
from gsm.experiments import asked as reading
from gsm.experiments import experiment as experiments
from gsm.experiments.asked import Range, read_tune
from gsm.experiments.experiment import train_all
from gsm.experiments.jobs import Job
from gsm.experiments.trials import Experiment
from gsm.experiments.tune import Choice, Values
from gsm.training.callbacks.metrics_file import MetricsFile

pytest.importorskip("optuna", reason="needs the extra tune")
from gsm.experiments.study import STARTUP, Outcome, Study, search  # noqa: E402

__all__ = ["asked", "real"]  # fixtures

RANGE = Range(1e-4, 1e-1, log=True)
ARMS = "arms={low: [], high: ['model.state_size=9']}"
OPTUNA = f"tune={{tuner: optuna, {RATE}: {{low: 1e-4, high: 1e-1, log: true}}, attempts: 8, by: val_loss}}"


def searched(
    space: Mapping[str, Any],
    cost: Callable[[Values], float],
    attempts: int = 12,
    at_once: int = 1,
    seed: int = 0,
    curve: Callable[[Values], dict[int, float]] = lambda _: {},
) -> tuple[list[list[Values]], Choice]:
    """The rounds of a search, and what has won; each round by a study of its own, as a command that was killed."""
    known: dict[str, Outcome] = {}
    rounds: list[list[Values]] = []

    def found(values: Values) -> Outcome | None:
        return known.get(repr(values))

    while True:
        missing, choice = search(Study(space, seed), found, attempts, at_once)
        if choice:
            return rounds, choice
        rounds.append(missing)
        known.update({repr(values): Outcome(cost(values), curve(values)) for values in missing})


def far(values: Values) -> float:
    return abs(math.log(values["a"] / 7e-3))


def test_values_are_of_their_range_with_few_digits_or_of_their_list():
    space = {"a": RANGE, "b": Range(2, 5), "c": Range(-1, 1.5), "d": [[3], [1, 2], None], "e": ["x", 1, True]}
    rounds, choice = searched(space, far, attempts=30)
    tried = [values for one in rounds for values in one]
    assert all(1e-4 <= one["a"] <= 1e-1 and one["a"] == float(f"{one['a']:.3g}") for one in tried)
    assert {one["b"] for one in tried} == {2, 3, 4, 5} and all(type(one["b"]) is int for one in tried)
    assert all(-1 <= one["c"] <= 1.5 for one in tried) and any(one["c"] < 0 for one in tried)
    assert all(one["d"] in space["d"] and one["e"] in space["e"] for one in tried)
    assert choice.values in tried and choice.grids["d"][0] == tried[0]["d"]
    assert sum(one["a"] < 3e-3 for one in tried[:STARTUP]) >= 1, "half of a range by its logarithm"


def test_what_has_won_is_near_the_best():
    found = [searched({"a": RANGE}, far, attempts=20, seed=seed)[1].values["a"] for seed in range(3)]
    assert all(far({"a": one}) < math.log(1.5) for one in found), found


def test_the_same_is_asked_for_again_and_something_else_with_another_seed():
    first, again, other = (searched({"a": RANGE}, far, seed=seed)[0] for seed in (0, 0, 1))
    assert first == again and first != other and first[0] != other[0]


def test_more_attempts_go_on_from_those_that_there_were():
    assert searched({"a": RANGE}, far, attempts=14)[0][:6] == searched({"a": RANGE}, far, attempts=6)[0]


def test_several_at_once_are_asked_for_before_anything_is_heard_of_the_first():
    rounds, _ = searched({"a": RANGE}, far, attempts=8, at_once=3)
    assert [len(one) for one in rounds] == [3, 3, 2]
    assert len({one["a"] for round in rounds for one in round}) == 8
    assert rounds != [one for one in searched({"a": RANGE}, far, attempts=8)[0]]


def test_what_comes_again_is_not_tried_again():
    """Of two values there are not six."""
    rounds, choice = searched({"a": [1e-2, 7e-3]}, far, attempts=6)
    assert sorted(one["a"] for round in rounds for one in round) == [7e-3, 1e-2] and choice.values == {"a": 7e-3}


def told(*curves: dict[int, float]) -> Study:
    study = Study({"a": RANGE}, 0)
    for curve in curves:
        study.tell({"a": 1e-2}, Outcome(min(curve.values()), curve))
    return study


FOUR = [{10: 4.0, 20: 1.0}, {10: 4.2, 20: 2.0}, {10: 4.4, 20: 3.0}, {10: 4.6, 20: 4.0}]


@pytest.mark.parametrize(
    ("curve", "step"),
    [
        ({10: 4.2, 20: 2.4}, None),
        ({10: 4.2, 20: 2.6}, 20),
        ({10: 4.4, 20: 0.1}, 10),
        ({10: 4.2}, None),
        ({}, None),
        ({15: 9.0}, None),
    ],
)
def test_an_attempt_ends_at_the_first_step_at_which_it_is_worse_than_the_median(
    curve: dict[int, float], step: int | None
):
    """Of 4.0, 4.2, 4.4 and 4.6 that is 4.3, and 2.5 later."""
    assert told(*FOUR).ends(curve) == step
    assert told(*FOUR[: STARTUP - 1]).ends({10: 99.0}) is None, "too few to be compared with"


def test_what_was_ended_early_is_nothing_to_be_compared_with():
    study = told(*FOUR)
    for _ in range(9):
        study.tell({"a": 1e-2}, Outcome(math.inf, {10: 9.0}))
    assert study.ends({10: 4.4}) == 10


def test_what_has_diverged_is_avoided_and_cannot_win():
    def cost(values: Values) -> float:
        return math.inf if values["a"] > 1e-3 else far(values)

    rounds, choice = searched({"a": RANGE}, cost, attempts=24)
    tried = [one["a"] for round in rounds for one in round]
    assert choice.found and choice.values["a"] <= 1e-3
    assert sum(one > 1e-3 for one in tried[12:]) < 6, tried
    assert not searched({"a": RANGE}, lambda _: math.inf, attempts=6)[1].found


class Trains(Pretends):
    """Leaves also the curve of its validations, which falls by 1 to what its rate is worth."""

    def run(self, job: Job) -> int:
        code = super().run(job)
        if code == 0:
            self.write(job, (10, 20, 30))
        return code

    def write(self, job: Job, steps: Sequence[int]) -> None:
        config, file = self.compose(job.command), MetricsFile(job.log.parent / "metrics.csv")
        loss = 1 + abs(math.log(config["optimizer"]["learning_rate"] / BEST[config["arm"]]))
        for step in steps:
            now = loss + (30 - step) / 30
            file.log_metrics({"val/loss": now, "val/accuracy": 1 - (now - 1) / 10}, step)


class Watched(Trains):
    """Goes on by ten steps whenever it is looked at, until it is told to end."""

    def __init__(self, job: Job, environment: object = None, follow: bool = False) -> None:
        self.started.append(job.name)
        self.job, self.step, self.ended = job, 0, False
        job.log.parent.mkdir(parents=True, exist_ok=True)

    def poll(self) -> int | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.ended:
            return 128 + signal.SIGTERM
        self.step += 10
        self.write(self.job, [self.step])
        if self.step < 30:
            return None
        leave(self.compose(self.job.command), self.job.log.parent)
        return 0

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def made(asked: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Experiment]:
    """What a command asks for that tunes by Optuna, of runs that leave curves."""
    monkeypatch.setattr(experiments, "Child", Trains)
    monkeypatch.setattr("gsm.experiments.jobs.PAUSE", 0.0)

    def make(*given: str) -> Experiment:
        usual = [] if any(word.startswith("tune") for word in given) else [OPTUNA]
        return asked(*usual, ARMS, "seeds=1", *given)

    return make


def tried(experiment: Experiment) -> dict[str, list[dict[str, Any]]]:
    """By arm, in their order."""
    return {arm: [{**one.values, "pruned": one.pruned} for one in experiment.tried if one.arm == arm] for arm in BEST}


def test_each_arm_has_a_study_of_its_own_and_trains_with_its_best(made: Callable[..., Experiment]):
    ten = OPTUNA.replace("attempts: 8", "attempts: 10")
    table = train_all(experiment := made(ten))
    found = {arm: [name for name in Pretends.started if name.startswith(f".tuning/{arm}/")] for arm in BEST}
    assert [len(names) for names in found.values()] == [10, 10]
    first = [[Path(name).parent.name for name in names] for names in found.values()]
    assert first[0][:STARTUP] == first[1][:STARTUP], "drawn alike"
    assert first[0] != first[1], "then each by what it has learned"
    assert Pretends.started[-2:] == ["low/seed0", "high/seed0"]
    (again := made(ten)).trials()
    for arm, best in BEST.items():
        rates = [one.values[RATE] for one in again.tried if one.arm == arm]
        assert again.choices[arm].values[RATE] == min(rates, key=lambda rate: abs(math.log(rate / best)))
        assert table.tuned[arm][RATE].startswith(str(again.choices[arm].values[RATE]))
    assert experiment.choices["low"].values != experiment.choices["high"].values


@pytest.mark.parametrize("after", [0, 3, 6, 8])
def test_what_was_killed_goes_on_with_the_same_attempts(
    made: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch, after: int
):
    """While the first are drawn, while Optuna chooses, and in the runs that follow; pruned ones among them."""
    train_all(whole := made("name=whole", "arm=low"))
    undisturbed, run = list(Pretends.started), Trains.run
    del Pretends.started[:]

    def killed(self: Trains, job: Job) -> int:
        if len(self.started) == after:
            raise KeyboardInterrupt
        return run(self, job)

    monkeypatch.setattr(Trains, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        train_all(made("name=cut", "arm=low"))
    monkeypatch.setattr(Trains, "run", run)
    train_all(cut := made("name=cut", "arm=low"))
    assert Pretends.started == undisturbed and tried(cut) == tried(whole)
    assert any(one.pruned for one in whole.tried)


def test_one_that_ended_but_of_which_nothing_was_noted_before_the_command_was_killed_is_judged_alike(
    made: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch
):
    train_all(whole := made("name=whole", "arm=low"))
    number = [one.pruned is not None for one in whole.tried].index(True)
    undisturbed, ended = list(Pretends.started), experiments._Work._ended
    del Pretends.started[:]

    def killed(self: Any, job: Job, code: int | None, child: Any = None) -> None:
        if len(Pretends.started) == number + 1:
            raise KeyboardInterrupt
        ended(self, job, code, child)

    monkeypatch.setattr(experiments._Work, "_ended", killed)
    with pytest.raises(KeyboardInterrupt):
        train_all(made("name=cut", "arm=low"))
    monkeypatch.setattr(experiments._Work, "_ended", ended)
    train_all(cut := made("name=cut", "arm=low"))
    assert Pretends.started == undisturbed and tried(cut) == tried(whole)


def test_a_pruned_attempt_is_told_of_and_neither_wins_nor_is_tried_again(
    made: Callable[..., Experiment], capsys: pytest.CaptureFixture[str]
):
    train_all(experiment := made())
    said = " ".join(capsys.readouterr().out.split())
    pruned = [one for one in experiment.tried if one.pruned]
    assert pruned and all(experiment.choices[one.arm].values != one.values for one in pruned)
    shown = "; ".join(f"{one.arm} {RATE}={one.values[RATE]} at step {one.pruned}" for one in pruned)
    assert f"pruned, being worse than the median of those before: {shown}" in said
    assert f"pruned, worse than the median of those before at step {pruned[0].pruned} after" in said
    assert any(
        "pruned, being worse" in line for line in json.loads((experiment.folder / "results.json").read_text())["notes"]
    )
    summary = json.loads((pruned[0].folder / "summary.json").read_text())
    assert summary["status"] == "pruned" and f"at step {pruned[0].pruned}" in summary["reason"]
    del Pretends.started[:]
    train_all(made())
    train_all(made("table=[steps, val_loss]"))
    assert Pretends.started == []
    train_all(made("force=true"))
    assert len(Pretends.started) == 18


def test_an_attempt_that_is_watched_ends_where_it_is_worse_and_one_seen_too_late_counts_alike(
    made: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch
):
    """Otherwise what is tried next would hang on how often the parent looks."""
    train_all(late := made("name=late"))
    monkeypatch.setattr(experiments, "Child", Watched)
    train_all(watched := made("name=watched"))
    assert tried(watched) == tried(late) and {one.pruned for one in watched.tried} >= {None, 10}
    for one in watched.tried:
        steps = {line.split(",")[0] for line in (one.folder / "metrics.csv").read_text().splitlines()[1:]}
        assert len(steps) == (3 if one.pruned is None else one.pruned // 10), "no step more"
        assert (one.folder / "checkpoints/last.ckpt").is_file() == (one.pruned is None)


def test_two_at_a_time_end_alike(made: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(experiments, "Child", Watched)
    train_all(one := made("name=one"))
    train_all(two := made("name=two", "jobs=2"))
    assert tried(one) == tried(two)


def test_where_more_is_better_what_has_less_is_pruned(made: Callable[..., Experiment]):
    train_all(loss := made("name=loss"))
    train_all(accuracy := made("name=accuracy", OPTUNA.replace("by: val_loss", "by: {accuracy: highest}")))
    assert tried(loss) == tried(accuracy) and any(one.pruned for one in loss.tried)


def test_nothing_is_pruned_where_that_is_not_wanted(made: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(experiments, "Child", Watched)
    train_all(experiment := made(OPTUNA.replace("attempts", "prune: false, attempts")))
    assert len(experiment.tried) == 16 and not any(one.pruned for one in experiment.tried)


def test_of_several_seeds_the_mean_decides_and_nothing_is_pruned(made: Callable[..., Experiment]):
    train_all(experiment := made(OPTUNA.replace("attempts: 8", "attempts: 6, seeds: 2"), "arm=low"))
    assert len(Pretends.started) == 13 and not any(one.pruned for one in experiment.tried)
    assert experiment.choices["low"].found


def test_what_was_pruned_with_another_configuration_is_moved_aside_and_tried(made: Callable[..., Experiment]):
    """An unfinished run of another configuration refuses to go on, and one that was pruned stays unfinished."""
    train_all(first := made())
    pruned = sum(one.pruned is not None for one in first.tried)
    del Pretends.started[:]
    train_all(made("optimizer.weight_decay=0.2"))
    assert len(Pretends.started) == 18
    assert len(list((first.folder.parent / ".replaced").rglob("pruned.json"))) == pruned > 0


class Refuses(Watched):
    """Writes nothing, and ends with an error when it has been looked at three times."""

    def poll(self) -> int | None:
        self.step += 10
        return None if self.step <= 30 else 3

    def end(self) -> None:
        raise AssertionError("it has no curve to be ended for")


def test_metrics_of_an_earlier_run_prune_nothing(made: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch):
    """They lie in the folder until the run has moved them aside, or for good where it refuses to."""
    train_all(first := made())
    one = next(one for one in first.tried if one.pruned)
    for name in ("pruned.json", "summary.json"):
        (one.folder / name).unlink()
    monkeypatch.setattr(experiments, "Child", Refuses)
    with pytest.raises(SystemExit):
        train_all(second := made())
    assert not (one.folder / "pruned.json").exists() and second.tried


def test_a_cluster_gets_each_round_and_judges_in_the_end(
    made: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch
):
    train_all(here := made("name=here"))
    handed: list[int] = []

    def launch(parts: Mapping[tuple[str, ...], Sequence[Job]]) -> dict[str, int]:
        jobs = [job for part in parts.values() for job in part]
        handed.append(len(jobs))
        return {job.name: Trains(job).code for job in jobs}

    monkeypatch.setattr(experiments.launcher, "launch", launch)
    train_all(there := made("name=there"), "submitit_local")
    assert handed == [2] * 9 and tried(there) == tried(here)


def test_the_header_says_what_is_tried_and_how_long_all_of_it_takes(
    made: Callable[..., Experiment], capsys: pytest.CaptureFixture[str]
):
    train_all(made())
    said = " ".join(capsys.readouterr().out.split())
    assert f"by val_loss (lowest): {RATE}=0.0001..0.1 (log); 16 attempts that Optuna chooses, low {RATE}=" in said
    assert "then 2 runs with what has won training takes about 25 minutes here" in said, "18, of 90 s each"
    assert f"Optuna chooses: low {RATE}=" in said


RANGED = {RATE: {"low": 1e-3, "high": 1e-2}}


@pytest.mark.parametrize(
    ("tune", "said"),
    [
        (
            RANGED,
            "tune.optimizer.learning_rate is a range, 0.001..0.01, of which a grid tries nothing: list values, or",
        ),
        ({RATE: [1, 2], "tuner": "optna"}, "unknown tuner 'optna'; did you mean optuna"),
        ({RATE: [1, 2], "attempts": 6}, "tune.attempts is 6, which is for tune.tuner=optuna, but it is grid"),
        ({**RANGED, "tuner": "optuna", "grow": 1}, "tune.grow is 1, which is for tune.tuner=grid, but it is optuna"),
        ({**RANGED, "tuner": "optuna", "attempts": 0}, "tune.attempts is 0, but has to be a number of attempts"),
        ({**RANGED, "tuner": "optuna", "at_once": 1.5}, "tune.at_once is 1.5, but has to be a number of attempts"),
        ({**RANGED, "tuner": "optuna", "prune": "no"}, "tune.prune is 'no', but has to be true or false"),
        ({**RANGED, "tuner": "optuna", "prune": True, "seeds": 2}, r"tune.prune is true, but tune.seeds \[0, 1\]: of"),
        (
            {**RANGED, "tuner": "optuna", "prune": True, "by": {"tokens_per_second": "highest"}},
            "tune.prune is true, but tokens_per_second is not known while a run trains: say tune.by as one of val_loss",
        ),
        ({RATE: {"low": 1, "hgh": 2}, "tuner": "optuna"}, "unknown entry 'hgh'; did you mean high"),
        ({RATE: {"low": 1}, "tuner": "optuna"}, "tune.optimizer.learning_rate.high is None, but a range takes two"),
        ({RATE: {"low": "a", "high": 1}, "tuner": "optuna"}, "learning_rate.low is 'a', but a range takes two numbers"),
        ({RATE: {"low": 1, "high": math.inf}, "tuner": "optuna"}, "learning_rate.high is inf, but a range takes two"),
        ({RATE: {"low": 2, "high": 1}, "tuner": "optuna"}, "goes from low 2 to high 1: give low the smaller number"),
        ({RATE: {"low": 0, "high": 1, "log": True}, "tuner": "optuna"}, "learning_rate.low is 0, which has no logarit"),
        ({RATE: {"low": 1, "high": 2, "log": 3}, "tuner": "optuna"}, "learning_rate.log is 3, but has to be true or"),
        ({RATE: 3, "tuner": "optuna"}, "is 3, but takes a list of different values to try, or a range {low: 1e-3"),
        ({"seed": {"low": 0, "high": 9}, "tuner": "optuna"}, "tune sets seed, which is the experiment's"),
        ({"tuner": "optuna"}, "tune names no key to try values of"),
    ],
)
def test_what_cannot_be_tuned_is_said(tune: Any, said: str):
    with pytest.raises(ConfigError, match=said):
        read_tune(tune, ["val_loss"])


def test_a_range_may_be_written_on_several_levels_and_pruning_is_usual_where_it_can_be():
    found = read_tune({"optimizer": {"learning_rate": {"low": 1, "high": 2}}, "tuner": "optuna"}, ["val_loss"])
    assert found and found.grids == {RATE: Range(1, 2)} and found.prune
    for other in ({"seeds": 2}, {"by": {"tokens_per_second": "highest"}}):
        found = read_tune({**RANGED, "tuner": "optuna", **other}, ["val_loss"])
        assert found and not found.prune


def test_an_end_of_a_range_that_cannot_be_trained_is_named_before_anything_trains(made: Callable[..., Experiment]):
    for ends in ("{low: -3.0, high: 0.5}", "{low: 0.1, high: 3.0}"):
        tune = f"tune={{tuner: optuna, {RATE}: {{low: 0.1, high: 1.0}}, optimizer.final_fraction: {ends}}}"
        with pytest.raises(
            ConfigError, match="^arm low with optimizer.learning_rate=.*, optimizer.final_fraction=.*: "
        ):
            made(tune).trials()
    assert Pretends.started == []


def test_without_optuna_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reading, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^tune.tuner=optuna needs the extra tune: pip install .* -e '.\[tune\]'$"):
        read_tune({**RANGED, "tuner": "optuna"}, ["val_loss"])
    assert read_tune({RATE: [1, 2]}, ["val_loss"])


def test_nothing_of_it_is_imported_unless_it_is_asked_for():
    code = "import sys, gsm.experiments.experiment; print('optuna' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.slow
def test_real_runs_are_tuned_by_their_curves(real: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch):
    """Rates up to 300, of which most learn nothing."""

    monkeypatch.setattr(Pretends, "run", trained_here)
    tune = f"tune={{tuner: optuna, {RATE}: {{low: 1e-3, high: 300.0, log: true}}, attempts: 8}}"
    given = (tune, BY_MODEL, "trainer.max_steps=10", "trainer.val_check_interval=2", "seeds=1")
    table = train_all(first := real(*given))
    ended = [one for one in first.tried if one.pruned or one.diverged]
    assert ended and len(first.tried) == 8 and table.rows[0].runs == 1
    assert first.choices["gsm"].values[RATE] < 1 and max(one.values[RATE] for one in ended) > 1
    for one in first.tried:
        assert one.diverged or set(one.curve({"val_loss": False})) == set(range(2, (one.pruned or 8) + 1, 2))
    del Pretends.started[:]
    train_all(real(*given))
    assert Pretends.started == []
