"""A run's folder follows from what was overridden: by itself, from pieces, and composed as a command has it."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from gsm.config import compose as composing
from gsm.config import naming
from gsm.config.compose import compose, parse
from gsm.config.decisive import DIVIDING, IDLE, WATCHING
from gsm.experiments.trials import Experiment


def named(*words: str, variants: dict[str, str] | None = None, groups: tuple[str, ...] = (), **more: Any) -> str:
    """The name of a run whose yamls have nothing but these variants."""

    def composed(kept: Iterable[str]) -> DictConfig:
        chosen = {**(variants or {}), **dict(word.split("=", 1) for word in kept if word.split("=")[0] in groups)}
        return OmegaConf.create({"hydra": {"runtime": {"choices": chosen}}, "trainer": {}})

    return naming.name("gsm", parse(words), groups, composed, composed, **more)


def folder(*words: str) -> str:
    config = compose([*words, "logs=/logs"])
    return str(Path(config["folder"]).relative_to("/logs"))


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("", "default/gsm/seed0"),
        ("model=baseline seed=2", "default/baseline/seed2"),
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
def test_a_folder_is_named_after_what_was_overridden(words: str, place: str):
    assert folder(*words.split()) == place


def test_the_order_of_words_and_how_a_number_is_written_make_no_difference():
    words = ["model/writer=gated", "optimizer.learning_rate=1e-3", "size=pico", "data.seed=4"]
    assert len({folder(*some) for some in itertools.islice(itertools.permutations(words), 0, 24, 9)}) == 1
    assert named("optimizer.learning_rate=0.001") == named("++optimizer.learning_rate=1e-3")


def test_what_is_so_by_default_does_not_enter():
    words = "size=nano model/writer=additive trainer.max_steps=800 optimizer=muon model.indexer_weight=1"
    given = [word for word in words.split() if not word.startswith("trainer")]
    assert folder(*given, "trainer=default", "data.documents=isolated") == "default/gsm/seed0"
    assert folder("size=tiny", "data.context=1024") == "default/gsm-size_tiny/seed0", "as size tiny has it"
    assert folder("experiment=needle", "size=pico", "data.task.pairs=10") == "needle/gsm/seed0", (
        "as the experiment has it"
    )


def test_what_is_a_default_only_without_another_word_enters():
    """`recipe=nano` is the default, but not that of size tiny; the two would have shared a folder with size tiny's."""
    assert folder("size=tiny", "recipe=nano") == "default/gsm-recipe_nano-size_tiny/seed0"
    assert folder("size.context=512", "data.context=256") == "default/gsm-data.context_256-size.context_512/seed0"


def test_a_default_that_arms_set_otherwise_enters():
    assert folder("experiment=ablate_residual", "model/residual=mhc") == "ablate_residual-residual_mhc/gsm/seed0"


@pytest.mark.parametrize(
    "key",
    [
        *(
            *sorted(IDLE),
            *(f"callbacks.{name}.x" for name in sorted(WATCHING)),
            "trainer.enable_checkpointing",
            "logger",
            "logger.x.y",
        ),
        *(
            "seed",
            "seeds",
            "name",
            "arm",
            "logs",
            "folder",
            "resume",
            "jobs",
            "force",
            "table",
            "tune",
            "ngrams",
            "sample",
        ),
        *("compile", "arms", "arms.mine", "runs.ppl.evaluate.windows", "recipe.val_check_interval"),
    ],
)
def test_what_a_run_goes_on_with_all_the_same_never_enters(key: str):
    assert named(f"++{key}=7") == "gsm"


@pytest.mark.parametrize("key", [*(key for key in DIVIDING if key != "global_batch"), "trainer.strategy.x"])
def test_how_a_step_is_divided_enters_only_where_it_decides_how_large_the_step_is(key: str):
    """What eight devices have begun, four find again."""
    assert named(f"{key}=4", divided=True) == "gsm"
    assert named(f"{key}=4") != "gsm"
    assert named("global_batch=4", divided=True) == "gsm-global_batch_4"


def test_devices_do_not_enter_where_the_global_batch_is_given():
    assert folder("global_batch=32", "trainer=ddp", "trainer.devices=2") == "default/gsm-global_batch_32/seed0"
    assert folder("size=0p5b", "trainer=fsdp") == folder("size=0p5b") == "default/gsm-size_0p5b/seed0"
    assert folder("trainer=ddp", "trainer.devices=2") == "default/gsm-trainer_ddp-trainer.devices_2/seed0"


VALUES = [
    *("[]", "none", "[1]", "only.1", "[1,2]", "1.and.2", "[12]", "'[1]'", "[1.5]", "[a]", "[-1]"),
    *("{a: 1}", "{a: 2}", "{a: [1]}"),
    *("1", "'1'", "1.5", "-1", "1e-5", "1e5", "1e20", "true", "'true'", "null", "'null'", "nan", "'nan'", "''", "' '"),
    *("a", "A", "a-b", "a_b", "a-b_c", "a.b", "a/b", "a b", "/a/b", "b", "'a=b'", "a:b", "ä", "${a}"),
    *("b.x00000000", "x00000000", f"{'a' * 40}b", f"{'b' * 40}b", f"{'a' * 40}c", "/" + "a/" * 90),
]


def read(values: Iterable[str]) -> list[str]:
    return [f"data.path={value if value[0] in chr(39) + '[{$' else shlex.quote(value)}" for value in values]


def test_two_values_never_share_a_name():
    found = {word: named(word) for word in read(VALUES)}
    shared = {name for name in found.values() if list(found.values()).count(name) > 1}
    assert not shared, {word: name for word, name in found.items() if name in shared}


def test_a_value_cannot_be_taken_for_another_override():
    assert named("data.a=b-data.c_d") != named("data.a=b", "data.c=d")
    assert named("model.a=b-c_d") != named("model.a=b", "model.c=d")


@pytest.mark.parametrize("word", read(VALUES))
def test_a_name_needs_no_quotes_and_is_short(word: str):
    for found in (named(word), named(f"+model.{word.partition('.')[2]}", "model/mixer@model.x=a", "data.b-c=Z")):
        assert re.fullmatch(r"[a-z0-9_.-]+", found)
        assert shlex.quote(found) == found and parse([f"checkpoint=logs/default/{found}/seed0"])[0].value() == (
            f"logs/default/{found}/seed0"
        )
        assert len(found) < 120


def test_many_overrides_are_cut_to_what_fits_and_still_told_apart():
    words = [f"data.number_{n}={n}" for n in range(30)]
    one, two = named(*words), named(*words[:-1], "data.number_29=28")
    assert one != two and len(one) < 110 and one.startswith("gsm-data.number_0_0-data.number_1_1-data.number_10_10-")
    assert re.search(r"-\d+_more\.x[0-9a-f]{8}$", one)


def test_a_name_is_that_of_other_machines():
    """Only a path as it was typed enters, and no hash is Python's own, which differs between processes."""
    assert named("data.path=texts/mine", "model.stages=[5,8]") == "gsm-stages_5.and.8-data.path_texts.mine.x7f348582"


def test_a_variant_that_cannot_stand_alone_does_not_keep_a_run_from_its_name(tmp_path: Path):
    """The model's yaml leaves the choice to whoever takes it."""
    (tmp_path / "model").mkdir()
    theirs = (composing.paths.configs() / "model/gsm.yaml").read_text().replace("writer: additive", "writer: ???")
    (tmp_path / "model/mine.yaml").write_text(theirs)
    config = compose(["model=mine", "model/writer=gated", "size=nano"], [tmp_path])
    assert config["arm"] == "mine-writer_gated-size_nano"


def test_a_reference_to_the_arm_itself_stands_as_it_is_written():
    config = compose(["size=pico", "start_from=${logs}/other/${arm}/seed0", "logs=/logs"])
    assert config["start_from"] == f"/logs/other/{config['arm']}/seed0"
    assert re.fullmatch(r"gsm-size_pico-start_from_.*\.x[0-9a-f]{8}", config["arm"])


def test_to_name_a_run_composes_once_more_at_most(monkeypatch: pytest.MonkeyPatch):
    """It takes a third of a second. Values are compared with what `finish` composes to check them."""
    done: list[Any] = []
    whole = composing._hydra
    monkeypatch.setattr(composing, "_hydra", lambda *given: done.append(given[0]) or whole(*given))
    composing._remembered.cache_clear()
    composing._overridden.cache_clear()
    counts = []
    for words in (["seed=1"], ["model/writer=gated"], ["model/writer=delta"], ["model.state_size=5"]):
        del done[:]
        compose(words)
        counts.append(len(done))
    assert counts == [2, 2, 1, 1]


def test_the_runs_of_an_experiment_arrive_at_its_folder(tmp_path: Path):
    """Their command lines are other than the parent's: they are told."""
    given = ["experiment=ablate_residual", "size=pico", f"logs={tmp_path}", "trainer.max_steps=3"]
    experiment = Experiment(compose(given), given)
    trial = experiment.trial("plain", 1)
    assert experiment.folder == tmp_path / "ablate_residual-size_pico-trainer.max_steps_3"
    assert trial.folder == experiment.folder / "plain/seed1"
    assert compose(trial.overrides)["folder"] == str(trial.folder)
