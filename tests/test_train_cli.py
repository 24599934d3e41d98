"""`python train.py` as a user runs it: what it prints, what it leaves behind, and what can be done with that."""

from __future__ import annotations

import copy
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
import yaml
from lightning.pytorch.utilities import rank_zero_only
from short_runs import BY_MODEL, BYTES, NO_PICTURES, SIZES, folder_of, typed
from stored import store_model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import gsm
from gsm.checkpoint import steps
from gsm.config import command_line
from gsm.config.check import ConfigError
from gsm.config.compose import compose
from gsm.config.handed import hand_on
from gsm.config.load import CheckpointError, load_tokenizer
from gsm.config.stored import read_checkpoint
from gsm.evaluation.checkpoints import checkpoints
from gsm.evaluation.generate import generate
from gsm.evaluation.held_out import HeldOut
from gsm.evaluation.lengths import Lengths
from gsm.experiments.table import read_runs
from gsm.paths import ROOT
from gsm.training.callbacks.tensorboard import COLUMNS, METRICS
from gsm.training.report import BOARD
from gsm.training.run import train

TINY = [*SIZES, *BYTES, "data.batch_size=2", "data.validation_sequences=3"]
QUICK = ("trainer.max_steps=1", "ngrams=false", "sample=false", NO_PICTURES)


def arguments(folder: Path) -> list[str]:
    text = folder / "text"
    if not text.is_dir():
        text.mkdir(parents=True)
        for number in range(12):
            (text / f"{number}.txt").write_text(f"This is text number {number}, which says little. " * 8)
    return [
        *TINY,
        f"data.path={text}",
        f"data.cache_dir={folder / 'cache'}",
        f"logs={folder / 'logs'}",
        "trainer=cpu",
        BY_MODEL,
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, processes: Any) -> tuple[Path, str]:
    """One run of two steps: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("run")
    words = [*arguments(folder), "trainer.max_steps=2", "seed=1", "model/residual=plain"]
    done = typed(processes, folder, "train.py", *words, COLUMNS="80")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder_of(folder / "logs/default", "gsm-seed1"), done.stdout


def test_a_run_prints_one_screen_of_plain_text(run: tuple[Path, str]):
    folder, printed = run
    root = str(ROOT), shlex.quote(str(ROOT)).strip("'")
    assert printed.replace(root[0], "").replace(root[1], "").isascii(), "a terminal anywhere has to show it"
    for line in printed.splitlines():
        whole = any(path in line for path in (str(folder.parents[2]), *root))
        assert len(line) <= 80 or whole or BOARD in line, f"longer than a terminal is wide: {line}"
    assert printed.count(BOARD) == 1
    address = next(line.removeprefix("  # ") for line in printed.splitlines() if BOARD in line)
    pinned = json.loads(parse_qs(urlsplit(address).query)["pinnedCards"][0])
    assert [card["tag"] for card in pinned] == ["val/bits_per_byte", "val/loss", "train/loss"]
    conclusion = printed[printed.index(f"default/{folder.name}: ") :].splitlines()
    assert len(conclusion) <= 24
    for expected in ("gsm, size nano", "5-gram model", "unigram model", "tensorboard --logdir", "generate.py"):
        assert expected in printed.replace("'", ""), "a path with blanks has quotes"


def test_a_run_leaves_its_folder(run: tuple[Path, str]):
    folder, _ = run
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "summary.json",
    ):
        assert (folder / name).is_file(), name
    assert [path.is_symlink() for path in steps(folder)] in ([False], [False, False]), "the last one and the best"


def test_the_summary_says_what_was_run_and_what_came_out(run: tuple[Path, str]):
    summary = json.loads((run[0] / "summary.json").read_text())
    said = {key: summary[key] for key in ("status", "experiment", "arm", "seed", "size", "steps", "tokens")}
    assert said == {
        "status": "finished",
        "experiment": "default",
        "arm": "gsm",
        "seed": 1,
        "size": "nano",
        "steps": 2,
        "tokens": 2 * 4 * 32,
    }
    for key in (
        "val_loss",
        "val_perplexity",
        "bits_per_byte",
        "tokens_per_second",
        "train_seconds",
        "peak_memory_bytes",
    ):
        assert summary[key] > 0, key
    for key in (
        "unigram_bits_per_byte",
        "bigram_bits_per_byte",
        "five_gram_bits_per_byte",
        "state_bytes",
        "parameters",
    ):
        assert summary[key] > 0, key
    assert summary["state_bytes"] == 8 * 8 * 4, "M = 4 + 4 entries of 8 channels in float32"
    assert {"python", "torch", "lightning", "gsm"} == summary["versions"].keys()


def test_tensorboard_sees_metrics_and_comparable_hyperparameters(run: tuple[Path, str]):
    events = EventAccumulator(str(run[0]), size_guidance={"scalars": 0}).Reload()
    assert set(METRICS) - set(events.Tags()["scalars"]) == {"val/accuracy", "val/overlap/mean"}, (
        "text; shared selection"
    )
    assert [point.step for point in events.Scalars("val/loss")][-1] == 2
    plugin = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    for column in (*COLUMNS, "parameters"):
        assert column.encode() in plugin, f"every run writes every column, {column} too"


def test_a_checkpoint_gives_back_the_model(run: tuple[Path, str]):
    model = gsm.load_model(run[0])
    weights = read_checkpoint(run[0])["state_dict"]
    assert all(torch.equal(value, weights[f"model.{name}"]) for name, value in model.state_dict().items())
    assert not model.training
    assert load_tokenizer(run[0]).kind == "bytes"


def test_generate_goes_on_from_a_prompt(run: tuple[Path, str], capsys: pytest.CaptureFixture[str]):
    prompt = 'def f(x="a, b"):'
    given = [f"checkpoint={run[0]}", f"prompt={prompt}", "max_new_tokens=5", "temperature=0"]
    command_line.call(generate, "generate.py", given)
    assert capsys.readouterr().out.startswith(prompt)


def test_a_model_that_diverged_is_refused_in_one_sentence(run: tuple[Path, str], tmp_path: Path):
    """Its weights are finite, what it computes is not: generate.py and evaluate.py ended in a traceback."""
    saved = read_checkpoint(run[0])
    for name, value in saved["state_dict"].items():
        value *= 1e30 if name.endswith("norm.weight") else 1
    store_model(tmp_path / "diverged", **saved)
    with pytest.raises(ConfigError, match="scores"):
        generate(str(tmp_path / "diverged"), prompt="a", max_new_tokens=2)
    given: dict[str, Any] = {"checkpoint": str(tmp_path / "diverged"), "output": str(tmp_path / "out")}
    for measure in (HeldOut(**given), Lengths(**given, lengths=[16, 32], windows=2)):
        with pytest.raises(ConfigError, match="losses"):
            measure.evaluate()
    assert {file.suffix for file in (tmp_path / "out").iterdir()} <= {".jsonl"}, "no tables"


def test_generate_says_how_much_would_fit(run: tuple[Path, str]):
    with pytest.raises(ConfigError, match=r"^out of memory: .* [1-9][\d,]* tokens"):
        generate(str(run[0]), prompt="a", max_new_tokens=2**31 - 2, device="cpu")


def test_a_bad_checkpoint_is_explained(run: tuple[Path, str], tmp_path: Path):
    good = read_checkpoint(run[0])
    changed, other = copy.deepcopy(good), {**good, "state_dict": {**good["state_dict"]}}
    changed["hyper_parameters"]["config"]["model"]["colour"] = "red"
    other["state_dict"].pop("model.norm.weight")
    for name, content in {"cut": good, "foreign": good, "changed": changed, "other": other}.items():
        store_model(tmp_path / name, **content)
    raw = (tmp_path / "cut/model.safetensors").read_bytes()
    (tmp_path / "cut/model.safetensors").write_bytes(raw[:5000])
    (tmp_path / "foreign/config.json").write_text('{"model_type": "llama"}')
    for name, said in {
        "cut": "model.safetensors",
        "foreign": "foreign",
        "changed": "model.colour",
        "other": "norm.weight",
    }.items():
        with pytest.raises(CheckpointError, match=said):
            gsm.load_model(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="missing"):
        gsm.load_model(tmp_path / "missing")


def test_a_seed_fixes_the_weights_and_leaves_the_generator_alone():
    def weight(seed: int) -> torch.Tensor:
        return gsm.build_model("gsm", overrides=SIZES, seed=seed).embedding.weight

    before = torch.get_rng_state()
    assert torch.equal(weight(3), weight(3))
    assert not torch.equal(weight(3), weight(4))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_says_why_it_refuses_its_values():
    with pytest.raises(ConfigError, match=r"^model\.stages .*got \[9\]"):
        gsm.build_model("gsm", overrides=["model.stages=[9]"])


def test_a_finished_run_is_left_as_it_is_until_its_folder_is_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    config = compose([*arguments(tmp_path), *QUICK])
    first = train(config)
    with monkeypatch.context() as patch:
        patch.setattr("gsm.training.run.build_model", lambda _: pytest.fail("weights are drawn for a finished run"))
        assert train(config) == first and "is finished already" in capsys.readouterr().out
    shutil.rmtree(config["folder"])
    assert train(config)["val_loss"] == first["val_loss"], "the same configuration trains the same"


def test_what_lightning_refuses_late_is_an_error_of_the_configuration(tmp_path: Path):
    """A callback without a logger is refused only in `trainer.fit`."""
    monitor = "+callbacks.x._target_=lightning.pytorch.callbacks.LearningRateMonitor"
    with pytest.raises(ConfigError, match="LearningRateMonitor"):
        train(compose([*arguments(tmp_path), *QUICK, "~logger", monitor]))


def test_n_grams_can_be_asked_for_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The run is the same one, and is not trained again; what is measured stands in its summary from then on."""
    words = [*arguments(tmp_path), *QUICK]
    first = train(compose([*words, "ngrams=false"]))
    assert first["unigram_bits_per_byte"] is None
    second = train(compose([*words, "ngrams=true"]))
    assert second["unigram_bits_per_byte"] > 0 and second["train_seconds"] == first["train_seconds"]
    assert train(compose([*words, "ngrams=false"])) == second
    assert capsys.readouterr().out.count("is finished already") == 2


def test_a_rank_that_is_left_in_the_environment_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Lightning took it for the rank of this process, which wrote no metrics."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(rank_zero_only, "rank", 1)  # as Lightning's import sets it
    config = compose([*arguments(tmp_path), *QUICK])
    train(config)
    assert (Path(config["folder"]) / "metrics.jsonl").is_file()


def test_a_run_that_was_cut_off_after_its_last_step_is_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = compose([*arguments(tmp_path), *QUICK, "trainer.max_steps=4", "callbacks.latest.minutes=1e-9"])
    straight = train(config)
    folder = Path(config["folder"])
    (folder / "summary.json").write_text('{"status": "interrupted"}')
    resumed = train(config)
    assert "Going on with the unfinished run" in capsys.readouterr().out
    assert resumed["val_loss"] == straight["val_loss"]
    assert resumed["tokens"] == straight["tokens"]


SHOWS_ID = """import os, lightning

class Shows(lightning.Callback):
    def __init__(self):
        print("id", os.environ.get("WANDB_RUN_ID"))
"""


@pytest.mark.parametrize(("words", "ids"), [(["-m", "seed=0,1"], ["None", "None"]), (["seed=1"], ["mine"])])
def test_several_runs_of_a_command_are_no_single_run_of_wandb(
    words: list[str], ids: list[str], tmp_path: Path, processes: Any
):
    """An id that was left in the environment was that of all arms and seeds."""
    (tmp_path / "shows.py").write_text(SHOWS_ID)
    given = [*words, *arguments(tmp_path), "data.path=nowhere", "+callbacks.shows._target_=shows.Shows"]
    variables = {"PYTHONPATH": str(tmp_path), "WANDB_RUN_ID": "mine"}
    done = typed(processes, tmp_path, "train.py", *given, **variables)
    assert re.findall(r"^id (\w+)$", done.stdout, re.MULTILINE) == ids, done.stdout + done.stderr


@pytest.mark.timeout(600)
def test_a_sweep_over_seeds_trains_each_once(tmp_path: Path, processes: Any):
    """As in docs/commands.md, with the flag first; and as an error of the command line advises, with the flag last."""
    given = [*arguments(tmp_path), *QUICK, "model/residual=plain"]
    for words in (["-m", "seed=0,1", *given], [*given, "seed=1,2", "-m"]):
        done = typed(processes, tmp_path, "train.py", *words)
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("is finished already") == 1, "the second command had seed 1 to skip"
    assert [run.seed for run in read_runs(tmp_path / "logs/default")] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_variants_stand_side_by_side(tmp_path: Path, processes: Any):
    """Each in a folder of its own, and found again by the same values."""
    given = [word for word in arguments(tmp_path) if word != BY_MODEL]
    given += [*QUICK]
    for words in (["-m", "model/writer=additive,gated", "seed=0,1"], ["model/writer=gated", "callbacks.progress=null"]):
        done = typed(processes, tmp_path, "train.py", *words, *given)
        assert done.returncode == 0, done.stdout + done.stderr
        compared = re.search(r"compare\.py'? logs/default", done.stdout)  # quoted in a folder whose name has spaces
        assert (compared is not None) is ("-m" in words), done.stdout
    assert "is finished already" in done.stdout, "what only watches finds the run again"
    found = checkpoints(str(tmp_path / "logs"))
    runs = {path.parents[1].name.partition("-data_folder")[0] + path.parents[1].name[-15:-9] for path in found}
    assert runs == {f"gsm-writer_{writer}-seed{seed}" for writer in ("additive", "gated") for seed in (0, 1)}
    for path in found:
        assert "model/writer" in (path.parents[1] / "config.yaml").read_text()


def test_a_plan_prints_commands_alone_and_says_apart_what_they_are(tmp_path: Path, processes: Any):
    words = [*arguments(tmp_path), *QUICK, "tune={optimizer.learning_rate: [1e-3, 2e-3]}"]
    done = typed(processes, tmp_path, "train.py", *words, "plan=true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [" arms=null seeds=null tune=null " in line for line in done.stdout.splitlines()] == [True] * 3
    assert "3 of 3 runs" in done.stderr and not (tmp_path / "logs").exists()


def test_a_run_of_an_experiment_trains_what_its_parent_has_composed(tmp_path: Path, processes: Any):
    """Its words may say something else by then: it composes nothing."""
    words = [*arguments(tmp_path), *QUICK]
    planned = compose([*words, "optimizer.weight_decay=0.3"])
    done = typed(processes, tmp_path, "train.py", *words, **hand_on(planned))
    assert done.returncode == 0, done.stdout + done.stderr
    noted = yaml.safe_load((Path(planned["folder"]) / "config.yaml").read_text())
    assert noted["optimizer"]["weight_decay"] == 0.3 and noted["overrides"] == planned["overrides"]


APPLICATION = """
import json, hydra
from hydra.core.hydra_config import HydraConfig
from gsm.config.command_line import again
from gsm.config.compose import compose

@hydra.main(version_base=None, config_path=None)
def main(config):
    compose(["size=pico", "seed=3"])
    print(json.dumps([HydraConfig.get().job.name, again()]))

main()
"""


def test_in_a_hydra_application_its_overrides_are_not_those_of_a_run(tmp_path: Path, processes: Any):
    """Its command was printed as that of the run; the name of its second job was ours."""
    (tmp_path / "app.py").write_text(APPLICATION)
    words = ["-m", "+mine=1,2", f"hydra.sweep.dir={tmp_path}/sweep"]
    done = typed(processes, tmp_path, str(tmp_path / "app.py"), *words)
    printed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    assert printed == [["app", "the same call of train"]] * 2, done.stdout + done.stderr


def test_a_run_may_do_without_loggers_and_callbacks(tmp_path: Path):
    """No curve and no checkpoint are left then, as was asked for."""
    bare = [word for word in QUICK if not word.startswith("callbacks.")]
    config = compose([*arguments(tmp_path), *bare, "~logger", "~callbacks"])
    assert config["logger"] == config["callbacks"] == {}
    facts = train(config)
    assert facts["status"] == "finished" and facts["steps"] == 1
    assert {path.name for path in Path(config["folder"]).rglob("*") if path.is_file()} == {
        "config.yaml",
        "summary.json",
    }
