"""A model file from a stranger is safe to open: it names parts that a yaml names, and nothing else is even imported."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hydra.utils import instantiate
from short_runs import arguments, typed
from small import mostly_nightly
from stored import store

from gsm import checkpoint, notebook, paths
from gsm.config.address import CONFIG, noted
from gsm.config.check import ConfigError
from gsm.config.compose import compose
from gsm.config.load import CheckpointError, build_model, instantiate_model, load_model
from gsm.config.trust import vetted
from gsm.evaluation.generate import generate
from gsm.evaluation.held_out import HeldOut, open_data
from gsm.experiments.table import read_runs
from gsm.training.run import train

PAYLOADS: dict[str, Any] = {
    "writes a file": {"_target_": "builtins.open", "file": "{folder}/mark", "mode": "w"},
    "copies a file": {"_target_": "shutil.copyfile", "src": "{folder}/hubconf.py", "dst": "{folder}/mark"},
    "runs a command": {"_target_": "torch.utils.collect_env.run", "command": "touch {folder}/mark"},
    "runs a shell": {"_target_": "os.system", "command": "touch {folder}/mark"},
    "starts a child of ours": {"_target_": "gsm.experiments.jobs.Child", "command": ["touch", "{folder}/mark"]},
    "reads a pickle": {"_target_": "torch.load", "f": "{folder}/pickle", "weights_only": False},
    "evaluates an expression": {
        "_target_": "builtins.len",
        "_args_": [{"_target_": "sympy.parsing.sympy_parser.parse_expr", "s": "open('{folder}/mark', 'w')"}],
    },
    "fetches code": {"_target_": "torch.hub.load", "repo_or_dir": "{folder}", "model": "model", "source": "local"},
    "calls what Hydra has": {"_target_": "hydra.utils.call", "config": {"_target_": "os.getcwd"}},
    "gets an object": {"_target_": "hydra.utils.get_object", "path": "os.system"},
    "imports a module": {"_target_": "strangers_module.anything"},
    "a part of another group": {"_target_": "lightning.Trainer", "default_root_dir": "{folder}/mark"},
    "a benchmark of ours": {"_target_": "gsm_benchmarks.plan.run", "output": "{folder}/mark"},
    "no name": {"_target_": ["os.system"]},
    "a name with a space": {"_target_": " gsm.models.gsm.GSM"},
}


def filled(payload: Any, folder: Path) -> Any:
    if isinstance(payload, dict):
        return {key: filled(value, folder) for key, value in payload.items()}
    if isinstance(payload, list):
        return [filled(value, folder) for value in payload]
    return payload.replace("{folder}", str(folder)) if isinstance(payload, str) else payload


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return compose(["size=pico", "data=needle"])


@functools.cache
def weights() -> dict[str, torch.Tensor]:
    return {f"model.{name}": value for name, value in build_model("gsm", "pico", seed=0).state_dict().items()}


def saved(folder: Path, config: dict[str, Any]) -> Path:
    """Write the checkpoint of a run with this configuration, with a stranger's files beside it; return its path."""
    path = store(folder, state_dict=weights(), hyper_parameters={"config": config})
    (folder / "strangers_module.py").write_text(f"import pathlib\npathlib.Path({str(folder / 'mark')!r}).touch()\n")
    (folder / "hubconf.py").write_text((folder / "strangers_module.py").read_text() + "def model(): pass\n")
    return path


PLACES = {
    "as the model": lambda config, payload: config.update(model=payload),
    "as a value of the model": lambda config, payload: config["model"].update(state_size=payload),
    "as a part of it": lambda config, payload: config["model"].update(writer=payload),
    "within a part of a part": lambda config, payload: config["model"]["retriever"].update(deeper={"still": payload}),
    "in a list": lambda config, payload: config["model"].update(stages=[2, [payload]]),
}


@pytest.mark.parametrize("place", mostly_nightly(PLACES, "within a part of a part"))
@pytest.mark.parametrize("name", PAYLOADS)
def test_no_code_of_a_checkpoint_s_choice_runs(name, place, config, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    changed = copy.deepcopy(config)
    PLACES[place](changed, filled(PAYLOADS[name], tmp_path))
    path = saved(tmp_path, changed)
    with pytest.raises(CheckpointError, match="not trusted: model"):
        load_model(path)
    assert not (tmp_path / "mark").exists() and "strangers_module" not in sys.modules


@pytest.mark.parametrize("name", PAYLOADS)
def test_an_untrusted_target_is_refused_when_the_data_of_a_checkpoint_open(name, config, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    payload = filled(PAYLOADS[name], tmp_path)
    for data in (payload, {**config["data"], "task": payload}):
        changed = {**config, "data": data}
        with pytest.raises(CheckpointError, match="not trusted: data"):
            open_data({"hyper_parameters": {"config": changed}})
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        saved(folder, changed)
        with pytest.raises(CheckpointError, match="not trusted: data"):
            notebook.load(folder)
    assert not (tmp_path / "mark").exists() and "strangers_module" not in sys.modules


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"state_size": "${oc.env:HOME}"}, "model.state_size .*oc.env:HOME"),
        ({"${oc.env:HOME}": 1}, "model.*oc.env:HOME"),
        ({"state_size": torch.ones(2)}, "model.state_size .*Tensor"),
        ({"_recursive_": False}, "model .*'_recursive_'"),
        ({"_args_": [1]}, "model .*'_args_'"),
        ({(1, 2): 3}, "model .*tuple"),
        ({7: 3}, "model .*7"),
        ({"_partial_": True}, "model .*_target_"),
    ],
)
def test_a_value_that_is_not_plain_is_refused(change, key, config):
    with pytest.raises(ConfigError, match=key):
        vetted({**config["model"], **change}, "model")


@pytest.mark.parametrize("change", [{"geometry": 3}, {"retriever": 3}, {"writer": [1]}, {"feed_forward": {}}])
def test_values_that_fit_no_part_are_refused(change, config, tmp_path):
    path = saved(tmp_path, {**config, "model": {**config["model"], **change}})
    with pytest.raises(CheckpointError, match="model: |model.geometry"):
        load_model(path)


def test_a_value_nested_without_end_is_refused(config):
    deep: Any = 1
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(ConfigError, match="^model.state_size.* 32 "):
        vetted({**config["model"], "state_size": deep}, "model")


@pytest.mark.parametrize("model", paths.variants("model"))
def test_every_model_of_the_project_is_trusted(model):
    node = compose([f"model={model}", "size=pico"])["model"]
    assert vetted(node, "model") == node


@pytest.mark.parametrize("data", paths.variants("data"))
def test_all_data_of_the_project_are_trusted(data):
    node = compose([f"data={data}", "data.path=." if data == "folder" else "seed=0"])["data"]
    assert vetted(node, "data") == node


def test_a_file_does_not_say_where_a_cache_is_made(config, tmp_path):
    node = {**compose(["data=stdlib"])["data"], "cache_dir": str(tmp_path)}
    assert vetted(node, "data")["cache_dir"] is None
    (tmp_path / "tokens-0a1b").mkdir()
    assert vetted(node, "data")["cache_dir"] == str(tmp_path), "it is one already"


def test_a_broken_yaml_beside_the_others_vouches_for_nothing(config, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/broken.yaml").write_text("_target_: os.system\na: [1\n!!python/name:os.system")
    assert vetted(config["model"], "model", [tmp_path]) == config["model"]
    with pytest.raises(ConfigError, match=r"model\.writer\._target_ .*'os\.system'"):
        vetted({**config["model"], "writer": {"_target_": "os.system"}}, "model", [tmp_path])


def test_a_users_part_needs_a_class_and_a_yaml_and_no_third_file(config, tmp_path, monkeypatch):
    """They are in folders of the user, which Python or the command line names."""
    yamls = own_part(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    composed = compose(["size=pico", "data=needle", "model/writer=own"], [yamls])
    assert instantiate_model(composed) is not None, "a composed configuration needs no trust"
    path = saved(tmp_path, composed)
    with pytest.raises(CheckpointError, match=r"model\.writer\._target_ .*own_writer\.Own.*GSM_CONFIGS"):
        load_model(path)
    assert type(load_model(path, directories=[yamls]).writer).__name__ == "Own"
    monkeypatch.setenv("GSM_CONFIGS", str(yamls))
    assert type(load_model(path).writer).__name__ == "Own"


def own_part(folder: Path, name: str = "own") -> Path:
    """Write a user's writer and its yaml; return the folder of the yaml."""
    (folder / f"{name}_writer.py").write_text(
        "from gsm.slots.writer.additive import Additive\nclass Own(Additive): pass\n"
    )
    yaml = folder / f"{name}_yamls/model/writer/{name}.yaml"
    yaml.parent.mkdir(parents=True)
    yaml.write_text(f"_target_: {name}_writer.Own\n_partial_: true\n")
    return folder / f"{name}_yamls"


def refused(processes: Any, folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Type a command that trains nothing: its last word is refused after all others were checked."""
    overrides = ["size=pico", "data=needle", "trainer=cpu", f"logs={folder / 'logs'}", "trainer.max_steps=1"]
    overrides += ["+trainer.max_time=1", *words]
    return typed(processes, folder, "train.py", *overrides, PYTHONPATH=str(folder), **environment)


def test_folders_of_yamls_are_added_up(tmp_path, monkeypatch, processes):
    """Once the folder of --config-dir replaced those in GSM_CONFIGS, which train.py did not read."""
    first, second = own_part(tmp_path, "one"), own_part(tmp_path, "two")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("GSM_CONFIGS", str(second))
    assert compose(["size=pico", "model/writer=two"])["model"]["writer"]["_target_"] == "two_writer.Own"
    done = refused(processes, tmp_path, "model/writer=two", "--config-dir", str(first))
    assert "trainer.max_time" in done.stderr
    printed = refused(processes, tmp_path, GSM_CONFIGS=str(tmp_path / "gone")).stderr
    assert printed == f"error: GSM_CONFIGS names {tmp_path / 'gone'}, but there is no such folder\n"


def test_a_model_that_could_not_be_loaded_again_is_not_trained(tmp_path, processes):
    """Once a class from the command line trained, and its checkpoint could not be evaluated."""
    yamls = own_part(tmp_path)
    words = ["model.writer._target_=own_writer.Own"]
    for more in ([], ["arms={one: []}", "seeds=1"]):
        done = refused(processes, tmp_path, *words, *more)
        assert done.returncode == 1 and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
        assert "model.writer._target_" in done.stderr and "'own_writer.Own'" in done.stderr
    assert not list((tmp_path / "logs").rglob("*.safetensors"))
    assert "trainer.max_time" in refused(processes, tmp_path, *words, "--config-dir", str(yamls)).stderr


class Touches:
    """In a pickle: makes a file when it is read."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


# What a stranger does to a run. Each returns how a careless program would read it.


def leaves_a_pickle(name: str, run: Path, mark: Path) -> Callable[[], Any]:
    """In place of a file of the checkpoint."""
    step = last(run)
    torch.save({"state_dict": Touches(mark)}, step / name)
    seal(step)
    return lambda: torch.load(io.BytesIO((step / name).read_bytes()), weights_only=False)


def names_a_foreign_class(run: Path, mark: Path) -> Callable[[], Any]:
    """For every part, in the configuration of the checkpoint and in the one beside it."""
    step, payload = last(run), {"_target_": "shutil.copyfile", "src": __file__, "dst": str(mark)}
    content, beside = json.loads((step / checkpoint.CONFIG).read_text()), yaml.safe_load((run / CONFIG).read_text())
    for config in (content["run"]["config"], beside):
        config.update(dict.fromkeys(("model", "data", "optimizer", "trainer", "callbacks", "logger"), payload))
    (step / checkpoint.CONFIG).write_text(json.dumps({**content, "model": payload}))
    (run / CONFIG).write_text(yaml.safe_dump(beside))
    seal(step)
    return lambda: instantiate(payload)


def tags_a_yaml(run: Path, mark: Path) -> Callable[[], Any]:
    """With a tag of Python's yaml that calls a function."""
    (run / CONFIG).write_text(f"!!python/object/apply:os.system ['touch {mark}']")
    return lambda: yaml.unsafe_load((run / CONFIG).read_text())


TRAPS: dict[str, Callable[[Path, Path], Callable[[], Any]]] = {
    "a yaml with a tag": tags_a_yaml,
    "foreign classes": names_a_foreign_class,
    **{
        f"a pickle as {name}": functools.partial(leaves_a_pickle, name)
        for name in (checkpoint.WEIGHTS, checkpoint.OTHERS, checkpoint.CONFIG, checkpoint.STATE, checkpoint.TOKENIZER)
    },
}


def last(run: Path) -> Path:
    step = checkpoint.newest(run)
    assert step is not None
    return step


def seal(step: Path) -> None:
    """Write the checksums of files that have changed."""
    with contextlib.suppress(ValueError):  # the state itself is a pickle
        state = json.loads((step / checkpoint.STATE).read_text())
        state["files"] = {name: checkpoint.checksum(step / name) for name in state["files"]}
        (step / checkpoint.STATE).write_text(json.dumps(state))


@pytest.fixture(scope="module")
def trained(home: Path) -> list[str]:
    """The words of a run that is trained."""
    words = arguments(home, "strange", "data.tokenizer=bpe", "size.vocabulary=300", "trainer.max_steps=1")
    train(compose(words))
    return words


@pytest.mark.parametrize("trap", TRAPS)
def test_nothing_in_a_run_s_folder_is_run(trap: str, trained: list[str], tmp_path: Path):
    mark, logs, again = tmp_path / "mark", f"logs={tmp_path / 'logs'}", compose(trained)
    run = tmp_path / "logs/strange" / Path(again["folder"]).name
    shutil.copytree(again["folder"], run)
    (run / "summary.json").write_text('{"status": "running", "arm": "gsm", "seed": 0}')
    TRAPS[trap](run, mark)()
    assert mark.exists(), "the trap works"
    mark.unlink()
    uses: list[Callable[[], Any]] = [
        lambda: noted(run),
        lambda: load_model(run),
        lambda: generate(str(run), "a", max_new_tokens=1, device="cpu"),
        lambda: HeldOut(str(run), sequences=1, device="cpu").evaluate(),
        lambda: [summary.curves for summary in read_runs(run.parent)],
        lambda: train(compose([*trained, "name=new", logs, f"start_from={run}"])),
        lambda: train(compose([*trained, logs])),
    ]
    for use in uses:
        with contextlib.suppress(ValueError, OSError):  # refused or not, it is not run
            use()
    assert not mark.exists()
