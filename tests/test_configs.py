"""Configurations: all of them compose, and whatever is misspelt in one is named at once, with what was meant."""

from __future__ import annotations

from pathlib import Path

import hydra
import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from gsm.config import command_line
from gsm.config.check import ConfigError, fits
from gsm.config.compose import compose, register_resolvers
from gsm.paths import configs, variants

GROUPS = sorted(
    {
        file.parent.relative_to(configs()).as_posix()
        for file in configs().rglob("*.yaml")
        if file.parent != configs() and "hydra" not in file.parts
    }
)
ELSEWHERE = ("experiment", "model", "size")  # test_experiments and test_sizes compose these too
CHOICES = [
    pytest.param(group, name, marks=[pytest.mark.slow] if group in ELSEWHERE else [])
    for group in GROUPS
    if group != "model/mixer"
    for name in variants(group)
]


@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_every_yaml_composes(group: str, name: str):
    path = ["data.path=/some/where"] if (group, name) == ("data", "folder") else []
    script = "benchmark" if group == "benchmark" else "train"
    assert compose([f"{group}={name}", *path], script=script)["choices"][group] == name


@pytest.mark.parametrize("name", variants("model/mixer"))
def test_every_mixer_composes_in_the_place_of_another(name: str):
    place = "model/mixer@model.mixers.attention"
    config = compose(["model=transformer", f"{place}={name}"])
    assert config["choices"][place] == name
    assert config["model"]["mixers"]["attention"]["_partial_"] is True


def test_a_run_has_its_place():
    config = compose(["model=baseline", "seed=3", "logs=/tmp/logs"])
    assert config["folder"] == "/tmp/logs/default/baseline/seed3"
    assert config["data"]["seed"] == 3


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.indexer_wait=1", ["unknown key 'model.indexer_wait'", "indexer_weight", "state_size"]),
        ("+model.indexer_wait=1", ["unknown key 'model.indexer_wait'", "indexer_weight", "state_size"]),
        ("sed=1", ["unknown key 'sed'", "did you mean seed", "trainer"]),
        ("learning_rate=1", ["unknown key 'learning_rate'", "did you mean optimizer.learning_rate"]),
        ("trainer.max_step=2", ["unknown key 'trainer.max_step'", "did you mean max_steps", "precision"]),
        ("+size.dimm=4", ["unknown key 'size.dimm'", "did you mean dim?"]),
        ("callbacks.progres.every=1", ["unknown key 'callbacks.progres'", "did you mean progress"]),
        ("model=gms", ["unknown variant 'gms'", "did you mean gsm", "baseline"]),
        ("model=gsm,bsaeline", ["unknown variant 'bsaeline'", "did you mean baseline"]),
        ("model/retriver=shared_topk", ["unknown group 'model/retriver'", "did you mean model/retriever"]),
        ("model.retriever=shared_topk", ["model.retriever is a group", "model/retriever="]),
        ("seed", ["cannot read 'seed'", "key=value"]),
        ("optimizer.learning_rate=fast", ["optimizer.learning_rate is 'fast' (str), but takes float"]),
        ("model.stages=2", ["model.stages is 2 (int), but takes Sequence[int]"]),
        ("seed=x", ["seed is 'x' (str), but takes int"]),
        ("jobs=x", ["jobs is 'x' (str), but takes int"]),
        ("force=1", ["force is 1 (int), but takes bool"]),
        ("seds=2", ["unknown key 'seds'", "did you mean seeds"]),
        ("compile=1", ["compile is 1 (int), but takes bool"]),
        ("data=folder", ["data.path has no value", "data.path=..."]),
    ],
)
def test_what_is_wrong_on_the_command_line_is_named(override: str, said: list[str]):
    with pytest.raises(ConfigError) as caught:
        compose([override])
    for part in said:
        assert part in str(caught.value)


def test_the_scripts_end_with_the_sentence_alone():
    with pytest.raises(SystemExit, match="^error: unknown key 'model.indxer'"):
        command_line.prepare(["model.indxer=1"])


@pytest.mark.parametrize(
    ("word", "meant"), [("--resume=never", "resume=never"), ("--resume", "resume=..."), ("-x=1", "x=1")]
)
def test_an_option_with_dashes_is_told_how_values_are_given(word, meant):
    with pytest.raises(SystemExit, match=f"there is no option {word}: values are given without dashes, {meant}; see "):
        command_line.prepare([word])


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model:\n  indxer: 1\n", ["unknown key 'model.indxer' in experiment/mine.yaml", "indexer_weight"]),
        ("trainer:\n  max_step: 1\n", ["unknown key 'trainer.max_step' in experiment/mine.yaml", "max_steps"]),
        ("nmae: mine\n", ["unknown key 'nmae' in experiment/mine.yaml", "did you mean name"]),
        ("callbacks:\n  progess:\n    every: 1\n", ["unknown key 'callbacks.progess'", "did you mean progress"]),
        ("defaults:\n  - override /model: gms\n", ["unknown variant 'gms' in", "did you mean gsm", "baseline"]),
        ("optimizer:\n  betas: 0.9\n", ["optimizer.betas is 0.9 (float), but takes Sequence[float]"]),
    ],
)
def test_what_is_wrong_in_an_experiment_is_named(tmp_path: Path, text: str, said: list[str]):
    folder = write(tmp_path, "experiment/mine.yaml", f"# @package _global_\n{text}")
    with pytest.raises(ConfigError) as caught:
        compose(["experiment=mine"], [folder])
    for part in said:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("group", "text", "said"),
    [
        (
            "optimizer",
            "_target_: gsm.training.optimizer.AdamW\nlearning_rat: 1\n",
            ["'optimizer.learning_rat'", "learning_rate"],
        ),
        ("trainer", "_target_: lightning.Trainer\nmax_step: 1\n", ["'trainer.max_step'", "did you mean max_steps"]),
        ("data", "defaults: [stdlib]\ncontxt: 3\n", ["'data.contxt'", "did you mean context"]),
        ("size", "defaults: [nano]\nwindo: 3\n", ["'size.windo'", "did you mean window"]),
        ("model", "_target_: gsm.models.gms.GSM\n", ["_target_ 'gsm.models.gms.GSM' cannot be imported"]),
    ],
)
def test_what_is_wrong_in_a_groups_yaml_is_named(tmp_path: Path, group: str, text: str, said: list[str]):
    folder = write(tmp_path, f"{group}/mine.yaml", text)
    with pytest.raises(ConfigError) as caught:
        compose([f"{group}=mine"], [folder])
    for part in said:
        assert part in str(caught.value)


def test_an_experiment_may_change_anything_there_is(tmp_path: Path):
    text = "# @package _global_\ndefaults:\n  - override /model: baseline\nname: mine\ntrainer:\n  max_steps: 7\n"
    config = compose(["experiment=mine", "seed=2"], [write(tmp_path, "experiment/mine.yaml", text)])
    assert (config["name"], config["arm"], config["trainer"]["max_steps"]) == ("mine", "baseline", 7)


def test_an_experiment_has_arms_of_any_name(tmp_path: Path):
    text = "# @package _global_\narms:\n  small: [model.state_size=4]\n  large: []\nseeds: [0, 1]\ntable: [val_loss]\n"
    folder = write(tmp_path, "experiment/mine.yaml", text)
    config = compose(["experiment=mine", "arm=[small,large]"], [folder])
    assert (config["arms"]["small"], config["seeds"], config["jobs"]) == (["model.state_size=4"], [0, 1], 1)
    alone = compose(["experiment=mine", "arms=null", "seeds=null", "arm=small", "seed=1"], [folder])
    assert (alone["arms"], alone["seeds"]) == (None, None)
    assert alone["folder"].endswith("/mine/small/seed1")


def test_a_new_variant_is_one_more_arm_of_the_experiment_on_its_slot(tmp_path: Path):
    folder = write(
        tmp_path, "model/writer/mine.yaml", "_target_: gsm.slots.writer.additive.Additive\n_partial_: true\n"
    )
    arms = compose(["experiment=ablate_writer"], [folder])["arms"]
    assert next(iter(arms)) == "additive" and arms["mine"] == ["model/writer=mine"]
    assert "shared_topk" not in compose(["experiment=ablate_retriever"])["arms"]


@pytest.mark.parametrize("asked", ["model/writr,additive", "model/writer,aditive"])
def test_arms_of_a_group_or_a_variant_that_does_not_exist_are_an_error(tmp_path: Path, asked: str):
    text = f"# @package _global_\narms: ${{variants:{asked}}}\n"
    with pytest.raises(ConfigError, match="additive|model/writer"):
        compose(["experiment=mine"], [write(tmp_path, "experiment/mine.yaml", text)])


@pytest.mark.parametrize(
    ("given", "folder"),
    [([], "default/gsm/seed0"), (["seeds=2"], "default"), (["arms={a: []}", "name=n", "arm=a"], "n")],
)
def test_the_parent_of_several_runs_leaves_its_configuration_beside_them(
    given: list[str], folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    register_resolvers()
    given = [f"logs={tmp_path}", *given]
    with hydra.initialize_config_dir(str(configs()), job_name="train", version_base="1.3"):
        config = hydra.compose("train", given, return_hydra_config=True)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    HydraConfig.instance().set_config(config)
    command_line.run(lambda plain: None, OmegaConf.masked_copy(config, [key for key in config if key != "hydra"]))
    assert (tmp_path / folder / ".hydra/overrides.yaml").read_text().startswith(f"- logs={tmp_path}")
    assert "${recipe.max_steps}" in (tmp_path / folder / ".hydra/config.yaml").read_text()


def test_a_callback_of_ones_own_can_be_added():
    config = compose(["+callbacks.mine._target_=lightning.Callback"])
    assert config["callbacks"]["mine"] == {"_target_": "lightning.Callback"}


@pytest.mark.parametrize(
    ("value", "hint", "fitting"),
    [
        (1, int, True),
        (1, float, True),
        (1.5, int, False),
        (True, int, False),
        (None, int | None, True),
        (None, int, False),
        ([1, 2], list[int], True),
        ([1, "a"], list[int], False),
        ([0.9, 1], tuple[float, float], True),
        ("a", list[str], False),
        ("anything", object, True),
    ],
)
def test_values_are_held_against_type_hints(value: object, hint: object, fitting: bool):
    assert fits(value, hint) is fitting
