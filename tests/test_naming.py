"""A run's folder follows from the overrides: by itself, and composed as a command has it."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from gsm.config import compose as composing
from gsm.config import naming
from gsm.config.compose import compose, parse
from gsm.config.decisive import DIVIDING, IDLE, WATCHING
from gsm.experiments import SEVERAL
from gsm.experiments.runs import Experiment

# Values that a name shows as they are, values that need a hash, and pairs that differ in one letter.
VALUES = [
    *(
        "[]",
        "[1]",
        "[1,2]",
        "[1.5]",
        "[a]",
        "[-1]",
        "{a: 1}",
        "{a: 2}",
        "1",
        "1.5",
        "-1",
        "1e-5",
        "1e20",
        "true",
        "null",
    ),
    *("''", "a", "A", "a-b", "a_b", "a-b_c", "a.b", "a/b", "a b", "/a/b", "'a=b'", "a:b", "ä", "${a}"),
    *(f"{'a' * 40}b", f"{'b' * 40}b", "/" + "a/" * 90),
]


def named(*words: str, **more: Any) -> str:
    return naming.name("gsm", words, **more)


def folder(*words: str) -> str:
    config = compose([*words, "logs=/logs"])
    return str(Path(config["folder"]).relative_to("/logs"))


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("", "default/gsm/seed0"),
        ("model=baseline seed=2", "default/baseline/seed2"),
        ("model=gsm size=nano", "default/gsm-size_nano/seed0"),
        ("model/writer=gated", "default/gsm-writer_gated/seed0"),
        ("model/writer=multi_slot model.writer.slots=3", "default/gsm-writer_multi_slot-writer.slots_3/seed0"),
        ("model=baseline model/residual=plain name=mine", "mine/baseline-residual_plain/seed0"),
        ("size=tiny trainer.max_steps=1000", "default/gsm-size_tiny-trainer.max_steps_1000/seed0"),
        (
            "data=folder data.path=/path/to/texts",
            "default/gsm-data_folder-data.path_path.to.texts.x477a4dbf/seed0",
        ),
        ("model/writer=gated arm=mine", "default/mine/seed0"),
        ("model/writer=gated folder=/logs/here", "here"),
        ("~callbacks", "default/gsm-callbacks_null/seed0"),
        ("model.stages=[]", "default/gsm-stages_none/seed0"),
        ("model.stages=[2]", "default/gsm-stages_only.2/seed0"),
        ("model.stages=[1,4]", "default/gsm-stages_1.and.4/seed0"),
        ("seeds=3 model.state_size=64", "default/gsm-state_size_64/seed0"),
        ("experiment=ablate_residual", "ablate_residual/gsm/seed0"),
        ("experiment=ablate_residual size=tiny jobs=2 seeds=[0] arm=plain", "ablate_residual-size_tiny/plain/seed0"),
        ("experiment=ablate_residual size=tiny name=mine", "mine/gsm/seed0"),
        ("experiment=ablate_residual model=baseline", "ablate_residual-model_baseline/baseline/seed0"),
        ("experiment=paper_main size=0p5b ~runs.standard", "paper_main-size_0p5b/gsm/seed0"),
        ("experiment=needle arms=null size=nano", "needle/gsm-size_nano/seed0"),
        (
            "experiment=paper_long_context ++runs.extend.trainer.max_steps=6 ++runs.ppl.evaluate.windows=2",
            "paper_long_context-runs.extend.trainer.max_steps_6/gsm/seed0",
        ),
    ],
)
def test_a_folder_is_named_after_the_overrides(words: str, place: str):
    assert folder(*words.split()) == place


def test_the_order_of_words_and_how_a_number_is_written_make_no_difference():
    words = ["model/writer=gated", "optimizer.learning_rate=1e-3", "size=pico", "data.seed=4"]
    assert len({named(*some) for some in itertools.permutations(words)}) == 1
    assert named("optimizer.learning_rate=0.001") == named("++optimizer.learning_rate=1e-3")


@pytest.mark.parametrize(
    "key",
    [
        *(*sorted(IDLE), *(f"callbacks.{name}.x" for name in sorted(WATCHING)), "trainer.enable_checkpointing"),
        *(*SEVERAL, "logger", "seed", "name", "arm", "logs", "folder", "resume", "jobs", "table"),
        *("ngrams", "sample", "compile", "arms.mine", "runs.ppl.evaluate.windows"),
    ],
)
def test_a_key_that_does_not_change_training_never_enters(key: str):
    assert named(f"++{key}=7") == "gsm"


@pytest.mark.parametrize("key", [*(key for key in DIVIDING if key != "global_batch"), "trainer.strategy.x"])
def test_how_a_step_is_divided_does_not_enter(key: str):
    """Four devices find the run that eight have begun."""
    assert named(f"{key}=4") == "gsm"
    assert named("global_batch=4") == "gsm-global_batch_4"


def test_devices_do_not_enter():
    assert folder("global_batch=32", "trainer.devices=2") == "default/gsm-global_batch_32/seed0"
    assert folder("trainer=ddp", "trainer.devices=2") == "default/gsm-trainer_ddp/seed0"


def words(values: list[str]) -> list[str]:
    return [f"data.path={value if value[0] in chr(39) + '[{$' else shlex.quote(value)}" for value in values]


def test_values_have_names_of_their_own():
    assert len({named(word) for word in words(VALUES)}) == len(VALUES)
    assert named("data.a=b-data.c_d") != named("data.a=b", "data.c=d")


@pytest.mark.parametrize("first", ["gsm", "g" * 100, "g" * 200])
@pytest.mark.parametrize("word", words(VALUES))
def test_a_name_needs_no_quotes_and_is_no_longer_than_a_disk_allows(word: str, first: str):
    key = word.partition(".")[2]
    for overrides in ((word,), (f"+model.{key}", "model/mixer@model.x=a", "data.b-c=Z"), (word, *many(40))):
        found = naming.name(first, overrides)
        assert re.fullmatch(r"[a-z0-9_.-]+", found) and shlex.quote(found) == found
        assert parse([f"checkpoint=logs/default/{found}/seed0"])[0].value() == f"logs/default/{found}/seed0"
        assert len(found) <= naming.LONGEST


def many(number: int) -> list[str]:
    return [f"data.number_{n}={n}" for n in range(number)]


def test_many_overrides_are_cut_with_a_hash_of_all():
    one, two = named(*many(30)), named(*many(29), "data.number_29=28")
    assert one != two and one.startswith("gsm-data.number_0_0-data.number_1_1-data.number_10_10-")
    assert re.search(r"\.x[0-9a-f]{8}$", one)


def test_a_name_is_that_of_other_machines():
    """A path enters as it was typed, and no hash is Python's own, which differs between processes."""
    assert named("data.path=texts/mine", "model.stages=[5,8]") == "gsm-stages_5.and.8-data.path_texts.mine.x7f348582"


def test_a_reference_to_the_arm_itself_stands_as_it_is_written():
    config = compose(["size=pico", "start_from=${logs}/other/${arm}/seed0", "logs=/logs"])
    assert config["start_from"] == f"/logs/other/{config['arm']}/seed0"
    assert re.fullmatch(r"gsm-size_pico-start_from_.*\.x[0-9a-f]{8}", config["arm"])


def test_hydra_composes_each_choice_of_variants_once(monkeypatch: pytest.MonkeyPatch):
    """It reads some thirty files, for a third of a second. Values are set in a copy."""
    done: list[Any] = []
    whole = composing.hydra.compose
    monkeypatch.setattr(composing.hydra, "compose", lambda *given, **rest: done.append(given) or whole(*given, **rest))
    composing._composed.cache_clear()
    counts = []
    for line in (["seed=1"], ["model/writer=gated"], ["model.state_size=5"], ["model.state_size=6", "seed=2"]):
        del done[:]
        compose(line)
        counts.append(len(done))
    assert counts[0] and counts[2:] == [0, 0]
    assert compose(["model.state_size=5"])["model"]["state_size"] == 5 != compose([])["model"]["state_size"]


def test_the_runs_of_an_experiment_arrive_at_its_folder(tmp_path: Path):
    """Their command lines are other than the parent's, so these give the name."""
    given = ["experiment=ablate_residual", "size=pico", f"logs={tmp_path}", "trainer.max_steps=3"]
    experiment = Experiment(compose(given), given)
    trial = experiment.trial("plain", 1)
    assert experiment.folder == tmp_path / "ablate_residual-size_pico-trainer.max_steps_3"
    assert trial.folder == experiment.folder / "plain/seed1"
    assert compose(trial.overrides)["folder"] == str(trial.folder)
