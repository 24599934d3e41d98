"""Tuning by Optuna: which values it chooses, that an interrupted search goes on the same, and refusals."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from test_tune import BEST, RANGED, RATE, Pretends, asked, real

from gsm.config.check import ConfigError
from gsm.experiments import tune as tuning
from gsm.experiments.execute import train_all
from gsm.experiments.runs import Experiment, Run
from gsm.experiments.tune import STARTUP, Choice, Study, Tune, Tuning, Values, next_or_best, read_tune

optuna = pytest.importorskip("optuna", reason="needs the extra tune")

__all__ = ["asked", "real"]  # fixtures

IMPORTS = (ast.Import, ast.ImportFrom)
RANGE = optuna.distributions.FloatDistribution(1e-4, 1e-1, log=True)
INTEGERS = optuna.distributions.IntDistribution(2, 5)
LINEAR = optuna.distributions.FloatDistribution(-1, 1.5)
ARMS = "arms={low: [], high: ['model.state_size=9']}"
OPTUNA = f"tune={{tuner: optuna, {RATE}: {{low: 1e-4, high: 1e-1, log: true}}, attempts: 8, by: val_loss}}"


def searched(
    place: Path,
    space: Mapping[str, Any],
    cost: Callable[[Values], float],
    attempts: int = 12,
    at_once: int = 1,
    seed: int = 0,
    reopen: bool = False,
) -> tuple[list[list[Values]], Choice]:
    """The rounds of a search, and the best; with ``reopen`` each round opens the journal again, as a new process."""
    known: dict[str, float] = {}
    rounds: list[list[Values]] = []
    tune = Tune(dict(space), {"val_loss": "lowest"}, [seed], attempts=attempts, at_once=at_once)
    study = Study(place / "optuna.jsonl", space, tune, "same")

    def found(values: Values) -> float | None:
        return known.get(repr(values))

    while True:
        study = Study(place / "optuna.jsonl", space, tune, "same") if reopen else study
        missing, choice = next_or_best(study, found)
        if choice:
            return rounds, choice
        rounds.append(missing)
        known |= {repr(values): cost(values) for values in missing}


def far(values: Values) -> float:
    return abs(math.log(values["a"] / 7e-3))


def test_values_are_of_their_range_with_few_digits_or_of_their_list(tmp_path: Path):
    space = {"a": RANGE, "b": INTEGERS, "c": LINEAR, "d": [[3], [1, 2], None], "e": ["x", 1, True]}
    rounds, choice = searched(tmp_path, space, far, attempts=30)
    tried = [values for one in rounds for values in one]
    assert all(1e-4 <= one["a"] <= 1e-1 and one["a"] == float(f"{one['a']:.3g}") for one in tried)
    assert {one["b"] for one in tried} == {2, 3, 4, 5} and all(type(one["b"]) is int for one in tried)
    assert all(-1 <= one["c"] <= 1.5 for one in tried) and any(one["c"] < 0 for one in tried)
    assert all(one["d"] in space["d"] and one["e"] in space["e"] for one in tried)
    assert choice.values in tried and far(choice.values) == min(map(far, tried))
    assert sum(one["a"] < 3e-3 for one in tried[:STARTUP]) >= 1, "half of a range by its logarithm"


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_search_that_is_opened_again_before_every_round_is_the_same(tmp_path: Path, at_once: int):
    whole = searched(tmp_path / "whole", {"a": RANGE}, far, at_once=at_once)
    assert whole == searched(tmp_path / "cut", {"a": RANGE}, far, at_once=at_once, reopen=True)
    assert {len(one) for one in whole[0]} == {at_once} and far(whole[1].values) < math.log(3)
    assert whole[0] != searched(tmp_path / "other", {"a": RANGE}, far, at_once=at_once, seed=1)[0]


def test_more_attempts_go_on_from_the_earlier_ones(tmp_path: Path):
    six = searched(tmp_path, {"a": RANGE}, far, attempts=6)[0]
    assert searched(tmp_path, {"a": RANGE}, far, attempts=10)[0][0] == [one[0] for one in six]


def test_values_that_come_again_are_not_tried_again(tmp_path: Path):
    """There are only two."""
    rounds, choice = searched(tmp_path, {"a": [1e-2, 7e-3]}, far, attempts=6)
    assert sorted(one["a"] for round in rounds for one in round) == [7e-3, 1e-2] and choice.values == {"a": 7e-3}


def test_diverged_values_are_avoided_and_cannot_win(tmp_path: Path):
    def cost(values: Values) -> float:
        return math.inf if values["a"] > 1e-3 else far(values)

    rounds, choice = searched(tmp_path, {"a": RANGE}, cost, attempts=24)
    tried = [one["a"] for round in rounds for one in round]
    assert choice.finite and choice.values["a"] <= 1e-3
    assert sum(one > 1e-3 for one in tried[12:]) < 6, tried
    assert not searched(tmp_path / "all", {"a": RANGE}, lambda _: math.inf, attempts=6)[1].finite


@pytest.mark.parametrize("damage", [b"x\n", b'{"op_code": 99}\n{}\n', b"[1]\n"])
def test_a_damaged_journal_is_refused(tmp_path: Path, damage: bytes):
    searched(tmp_path, {"a": RANGE}, far, attempts=2)
    file = tmp_path / "optuna.jsonl"
    file.write_bytes(damage + file.read_bytes())
    with pytest.raises(ConfigError, match="optuna.jsonl is damaged .* Delete it"):
        searched(tmp_path, {"a": RANGE}, far, attempts=2)


@pytest.fixture
def made(asked: Callable[..., Experiment]) -> Callable[..., Experiment]:
    """An experiment that tunes by Optuna."""

    def make(*given: str) -> Experiment:
        usual = [] if any(word.startswith("tune") for word in given) else [OPTUNA]
        return asked(*usual, ARMS, "seeds=1", *given)

    return make


def test_each_arm_has_a_study_of_its_own_and_trains_with_its_best(made: Callable[..., Experiment]):
    table = train_all(made())
    tuning = Tuning(made())
    tuning.attempts()
    choices: Any = {arm: search.choice for arm, search in tuning.searches.items()}
    rates = {arm: choices[arm].tried[RATE] for arm in BEST}
    assert [len(one) for one in rates.values()] == [8, 8] and rates["low"][:STARTUP] == rates["high"][:STARTUP]
    assert Pretends.started[-2:] == ["low/seed0", "high/seed0"]
    for arm, best in BEST.items():
        rate = min(rates[arm], key=lambda rate: abs(math.log(rate / best)))
        assert choices[arm].values[RATE] == rate and table.tuned[arm][RATE].startswith(str(rate))
    del Pretends.started[:]
    train_all(made())
    train_all(made("table=[steps, val_loss]"))
    assert Pretends.started == []


@pytest.mark.parametrize("after", [3, 8])
def test_an_experiment_that_was_killed_goes_on_with_the_same_attempts(
    made: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch, after: int
):
    """Among the random attempts, and in the runs that follow."""
    train_all(made("name=whole", "arm=low"))
    undisturbed, whole_run = list(Pretends.started), Pretends.run
    del Pretends.started[:]

    def killed(self: Pretends, run: Run) -> int:
        if len(self.started) == after:
            raise KeyboardInterrupt
        return whole_run(self, run)

    monkeypatch.setattr(Pretends, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        train_all(made("name=cut", "arm=low"))
    monkeypatch.setattr(Pretends, "run", whole_run)
    train_all(made("name=cut", "arm=low"))
    assert Pretends.started == undisturbed


def test_another_configuration_has_another_study(made: Callable[..., Experiment]):
    train_all(made("arm=low"))
    del Pretends.started[:]
    train_all(made("arm=low", "optimizer.weight_decay=0.2"))
    assert len(Pretends.started) == 9


@pytest.mark.parametrize(
    ("tune", "sentence"),
    [
        ({**RANGED, "attempts": 0}, r"^tune\.attempts .*0"),
        ({**RANGED, "at_once": 1.5}, r"^tune\.at_once .*1\.5"),
        ({RATE: {"low": 1, "high": 2, "lgo": 2}}, r"^tune\.optimizer\.learning_rate\.lgo .*2"),
        ({RATE: {"low": 1}}, r"^tune\.optimizer\.learning_rate "),
        ({RATE: {"low": "a", "high": 1}}, r"^tune\.optimizer\.learning_rate "),
        ({RATE: {"low": 1, "high": math.inf}}, r"^tune\.optimizer\.learning_rate "),
        ({RATE: {"low": 2, "high": 1}}, r"^tune\.optimizer\.learning_rate .*low <= high"),
        ({RATE: {"low": 0, "high": 1, "log": True}}, r"^tune\.optimizer\.learning_rate .*log"),
        ({RATE: {"low": 1, "high": 2, "log": 3}}, r"^tune\.optimizer\.learning_rate .*log"),
        ({RATE: 3}, r"^tune\.optimizer\.learning_rate .*{low: 1e-3"),
        ({"seed": {"low": 0, "high": 9}}, "^tune .*seed=0"),
        ({}, "^tune "),
    ],
)
def test_what_cannot_be_tuned_is_refused(tune: Any, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        read_tune({**tune, "tuner": "optuna"}, ["val_loss"])


def test_a_range_may_be_written_on_several_levels():
    found = read_tune({"optimizer": {"learning_rate": {"low": 1, "high": 2}}, "tuner": "optuna"}, ["val_loss"])
    assert found.space == {RATE: optuna.distributions.IntDistribution(1, 2)}


def test_an_end_of_a_range_that_cannot_be_trained_is_named_before_anything_trains(made: Callable[..., Experiment]):
    for ends in ("{low: -3.0, high: 0.5}", "{low: 0.1, high: 3.0}"):
        tune = f"tune={{tuner: optuna, {RATE}: {{low: 0.1, high: 1.0}}, optimizer.final_fraction: {ends}}}"
        with pytest.raises(
            ConfigError, match="^arm low with optimizer.learning_rate=.*, optimizer.final_fraction=.*: "
        ):
            Tuning(made(tune))
    assert Pretends.started == []


def test_without_optuna_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tuning, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^tune.tuner=optuna needs the extra tune: pip install .* -e '.\[tune\]'$"):
        read_tune({**RANGED, "tuner": "optuna"}, ["val_loss"])
    assert read_tune({RATE: [1, 2]}, ["val_loss"])


def test_optuna_is_imported_only_where_it_is_asked_for():
    """The extra may be missing, and takes a second."""
    top = [node for node in ast.parse(Path(tuning.__file__).read_text()).body if isinstance(node, IMPORTS)]
    assert top and not any("optuna" in ast.unparse(node) for node in top)
