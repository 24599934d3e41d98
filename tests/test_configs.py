"""Configurations: all of them compose, and whatever is misspelt in one is named at once, with what was meant."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import hydra
import pytest
from omegaconf import OmegaConf

from gsm import paths
from gsm.config import command_line
from gsm.config.check import ConfigError, fits
from gsm.config.compose import _hydra, compose, quoted, register_resolvers
from gsm.config.options import listing
from gsm.experiments.runs import Experiment
from gsm.paths import configs, variants

GROUPS = sorted(
    {
        file.parent.relative_to(configs()).as_posix()
        for file in configs().rglob("*.yaml")
        if file.parent != configs() and "hydra" not in file.relative_to(configs()).parts
    }
)
ELSEWHERE = ("experiment", "model", "model/mixer", "size")  # test_experiments and test_sizes compose these
TOGETHER = [group for group in GROUPS if group not in (*ELSEWHERE, "benchmark")]


@pytest.mark.parametrize("number", range(max(len(variants(group)) for group in TOGETHER)))
def test_every_yaml_composes(number: int):
    """One of each group at once, since a composition takes half a second."""
    chosen = {group: variants(group)[number % len(variants(group))] for group in TOGETHER}
    given = [f"{group}={name}" for group, name in chosen.items()]
    choices = compose([*given, "data.path=/some/where"] if chosen["data"] == "folder" else given)["choices"]
    assert {group: choices[group] for group in chosen} == chosen


@pytest.mark.parametrize("name", variants("benchmark"))
def test_every_benchmark_composes(name: str):
    assert compose([f"benchmark={name}"], script="benchmark")["choices"]["benchmark"] == name


def test_a_mixer_composes_in_the_place_of_another():
    place = "model/mixer@model.mixers.attention"
    config = compose(["model=transformer", f"{place}=kda"])
    assert config["choices"][place] == "kda"
    assert config["model"]["mixers"]["attention"]["_partial_"] is True


@pytest.mark.parametrize("name", ["jürgen", "some where/gsm/a,b='c'"])
def test_yamls_and_runs_may_lie_in_a_folder_of_any_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An experiment hands its paths to the runs that it starts, and Hydra reads letters beyond ASCII in quotes only."""
    home = tmp_path / name
    for group, text in (("size", "dim: 32\n"), ("experiment", "arms: {größer: []}\nruns: {a: null, b: {after: a}}\n")):
        (home / group).mkdir(parents=True)
        top = "# @package _global_\n" if group == "experiment" else "defaults: [pico, _self_]\n"
        (home / group / "mine.yaml").write_text(top + "# Mine.\n" + text, encoding="utf-8")
    monkeypatch.setenv("GSM_CONFIGS", str(home))
    given = ["experiment=mine", "size=mine", f"logs={quoted(home / 'logs')}", "table=[val_loss]"]
    (trial,) = Experiment(compose(given), given).trials()
    folders = [run.find_folder() for run in trial.runs.values()]
    assert {folder.parent for folder in folders} == {home / "logs/mine-size_mine"}
    assert [folder.name[:-9] for folder in folders] == ["größer-seed0-a", "größer-seed0-b"]


@pytest.mark.parametrize("other", [7200, -7200], ids=["another is ahead", "an older one replaces it"])
def test_an_edited_yaml_is_read_again_whatever_its_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: int):
    """The newest of all dates decided: in a notebook, the old model was built."""
    (tmp_path / "size").mkdir()
    mine, beside = tmp_path / "size/mine.yaml", tmp_path / "size/beside.yaml"
    monkeypatch.setenv("GSM_CONFIGS", str(tmp_path))
    beside.write_text("defaults: [pico, _self_]\n")
    os.utime(beside, (time.time() + other, time.time() + other))
    for dim in (32, 96):
        mine.write_text(f"defaults: [pico, _self_]\ndim: {dim}\n")
        os.utime(mine, (time.time() - dim, time.time() - dim))
        assert compose(["size=mine"])["model"]["geometry"]["dim"] == dim
    mine.unlink()
    with pytest.raises(ConfigError, match="size/mine"):
        compose(["size=mine"])


def test_an_edited_yaml_behind_a_link_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Hydra follows links to folders, so the digest of all yamls has to."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/size").symlink_to(tmp_path / "shared")
    monkeypatch.setenv("GSM_CONFIGS", str(tmp_path / "mine"))
    for dim in (32, 96):
        (tmp_path / "shared/mine.yaml").write_text(f"defaults: [pico, _self_]\ndim: {dim}\n")
        assert compose(["size=mine"])["model"]["geometry"]["dim"] == dim


def test_a_run_has_its_place():
    config = compose(["model=baseline", "seed=3", "logs=/tmp/logs"])
    assert re.fullmatch(r"/tmp/logs/default/baseline-seed3-[0-9a-f]{8}", config["folder"])
    assert config["data"]["seed"] == 3


REFUSED = """
sed=1
model.indexer_wait=1
+model.indexer_wait=1 -> model.indexer_wait
+size.dimm=4 -> size.dimm
+logger.wandb.project=a -> logger.wandb
model=gms
model=baseline model/writer=gated -> model/writer
model.retriever=shared_topk -> model/retriever
experiment=ablate_writer data=needle -> data.task.power
seed
seed=0,1
optimizer.learning_rate=fast
model.stages=2
seed=x
seed=-1
jobs=0
compile=1
~model -> model
~model.geometry -> model.geometry
data=folder -> data.path
name=../../x
name=null
arm=..
logs=/
folder=''
"""  # words of a command line; the error names the first key in them, or the one behind the arrow


@pytest.mark.parametrize("case", REFUSED.strip().splitlines())
def test_what_is_wrong_in_a_configuration_is_named(case: str):
    words, _, key = case.partition(" -> ")
    with pytest.raises(ConfigError) as caught:
        compose(words.split(" "))
    assert (key or words.partition("=")[0]) in str(caught.value)


def test_a_misspelt_key_is_told_what_is_spelled_like_it():
    with pytest.raises(ConfigError, match="indexer_weight"):
        compose(["+model.indexer_wait=1"])


WORDS = (
    [],
    ["seed=3"],
    ["trainer.max_steps=3", "trainer.max_steps=4", "name='a b'"],
    ["model.state_size=64", "size=pico", "optimizer.learning_rate=1e-2"],
    ["size.dim=32", "size.heads=${size.dim}"],
    ["model/mixer@model.mixers.attention=kda", "model=transformer"],
    ["experiment=ablate_writer", "arm=[gated]", "model.geometry={dim: 3}"],
    ["+callbacks.x._target_=a.B", "callbacks.x._target_=c.D"],
    ["~logger", "++model.state_size=7", "model.state_size=8"],
    ["~model.stages", "seed=2"],
)


@pytest.mark.parametrize("words", WORDS, ids=str)
def test_a_kept_composition_with_values_in_it_is_the_one_that_hydra_makes(words: list[str]):
    """Each is composed twice, after the variants alone, so that theirs is kept."""
    compose([word for word in words if word.partition("=")[0] in ("size", "model", "experiment")])
    register_resolvers()
    with hydra.initialize_config_dir(str(configs()), job_name="train", version_base="1.3"):
        made = hydra.compose("train", words, return_hydra_config=True)
    for _ in range(2):
        found = _hydra(tuple(words), (configs(),), "train", paths.digest([configs()]))
        for config in (made, found):
            OmegaConf.set_struct(config, False)
            config.hydra.job.override_dirname = ""  # no configuration of ours reads it
        assert OmegaConf.to_container(found) == OmegaConf.to_container(made)


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("file", "text", "key"),
    [
        ("experiment", "model:\n  indxer: 1\n", "model.indxer"),
        ("experiment", "nmae: mine\n", "nmae"),
        ("experiment", "callbacks:\n  progess:\n    every: 1\n", "callbacks.progess"),
        ("experiment", "defaults:\n  - override /model: gms\n", "model/gms"),
        ("experiment", "optimizer:\n  betas: 0.9\n", "optimizer.betas"),
        ("experiment", "model: [1, 2]\n", "experiment/mine"),
        ("experiment", "trainer:\n\tmax_steps: 3\n", "mine.yaml"),
        ("optimizer", "_target_: gsm.training.optimizer.AdamW\nlearning_rat: 1\n", "optimizer.learning_rat"),
        ("trainer", "_target_: lightning.Trainer\nmax_step: 1\n", "trainer.max_step"),
        ("data", "defaults: [stdlib]\ncontxt: 3\n", "data.contxt"),
        ("size", "defaults: [nano]\nwindo: 3\n", "size.windo"),
        ("model", "_target_: gsm.models.gms.GSM\n", "gsm.models.gms.GSM"),
    ],
)
def test_what_is_wrong_in_a_yaml_is_named(tmp_path: Path, file: str, text: str, key: str):
    top = "# @package _global_\n" if file == "experiment" else ""
    folder = write(tmp_path, f"{file}/mine.yaml", top + text)
    with pytest.raises(ConfigError) as caught:
        compose([f"{file}=mine"], [folder])
    assert key in str(caught.value)


def test_an_experiment_without_its_package_is_told_of_it(tmp_path: Path):
    with pytest.raises(ConfigError, match="@package _global_"):
        compose(["experiment=mine"], [write(tmp_path, "experiment/mine.yaml", "seed: 1\n")])


def test_files_of_editors_are_no_variants(tmp_path: Path):
    (tmp_path / "model/writer").mkdir(parents=True)
    (tmp_path / "model/writer/.#gated.yaml").symlink_to("me@host.1:2")
    (tmp_path / "model/writer/._gated.yaml").write_bytes(b"\0\xff")
    assert compose(["experiment=ablate_writer"], [tmp_path])["arms"] == compose(["experiment=ablate_writer"])["arms"]
    assert "._gated" not in listing("train", [configs(), tmp_path], {})


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
    assert "/mine/small-seed1-" in alone["folder"]


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


def test_help_begins_with_the_checkpoint_and_gives_defaults(capsys: pytest.CaptureFixture[str]):
    def act(prompt: str = "", top: float = 0.9, checkpoint: str = "", force: bool = False) -> None:
        """Acts.

        Args:
            prompt: a text
            top: a number that
                goes on here
            checkpoint: a file
            force: again

        Raises:
            ConfigError: never.
        """

    command_line.call(act, "act.py", ["--help"])
    assert capsys.readouterr().out.splitlines()[2:] == [
        *("Acts.", "", "Args:", "    checkpoint: a file", "    prompt: a text", "    top: a number that"),
        *("        goes on here (default: 0.9)", "    force: again (default: false)"),
    ]


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
