"""Runs of several ranks that are interrupted, or lose a rank: they end as those of one process do."""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from short_runs import BY_MODEL, TINY, at_call, below, called, composed, count_calls, logged, no_death, run_here, sent
from small import mostly_nightly
from test_experiment import until
from test_jobs import running
from test_survival import signalled_twice

from gsm import checkpoint, exchange
from gsm.config.load import load_model
from gsm.config.stored import read_checkpoint
from gsm.paths import ROOT

pytestmark = pytest.mark.slow
FEW = "trainer.max_steps=12 trainer.val_check_interval=12 callbacks.latest.minutes=10 trainer.accelerator=cpu"
FEW += " optimizer=adamw callbacks.pictures=null"  # a rank that has only its share of the model draws none
EXACT = {"tokens", "loss", "perplexity", "bits_per_byte", "gradient_norm", "learning_rate"}
ALONE = "trainer=default data.batch_size=4 global_batch=8"
WAYS = {  # the same steps, of 8 sequences
    "alone": (1, ALONE),
    "ddp": (2, "trainer=ddp data.batch_size=2 global_batch=8"),
    "lightning": (2, "trainer=ddp trainer.devices=2 data.batch_size=4 global_batch=8"),
    "fsdp": (2, "trainer=fsdp data.batch_size=2 global_batch=8"),
    "context": (2, "trainer=context data.batch_size=4 global_batch=8"),
    "mesh": (4, "trainer=context data.batch_size=2 global_batch=8"),
    "experts": (2, "trainer=fsdp trainer.strategy.experts=2 data.batch_size=2 global_batch=8"),
}


def overrides(home: Path, name: str, way: str, *more: str) -> list[str]:
    places = [f"data.path={home / 'text'}", f"data.cache_dir={home / 'cache'}", f"logs={home / 'logs'}"]
    words = [word for word in TINY if not word.startswith(("trainer=", "data.batch", "global_batch", "callbacks."))]
    return [*words, *WAYS[way][1].split(), *FEW.split(), *places, f"name={name}", BY_MODEL, *more]


def place(home: Path, name: str, way: str, *more: str) -> Path:
    """Return the folder of a run, the same for all ways."""
    return Path(composed(tuple(overrides(home, name, way, *more)))["folder"])


def in_float64(config: dict[str, Any], log: Path, death: Callable[[], None]) -> None:
    """Run on one rank in float64, so that sums in another order agree to many digits."""
    torch.set_default_dtype(torch.float64)
    run_here(config, log.with_suffix(f".{os.environ['RANK']}"), death)


def run(
    processes: Any, home: Path, name: str, way: str, death: Callable[[], None] = no_death, *more: str
) -> tuple[list[int], str]:
    """Return the exit codes, and the output of the leading rank."""
    log = home / f"{name}-{way}.log"
    log.with_suffix(".0").write_text("")
    config = composed(tuple(overrides(home, name, way, *more)))
    codes = ranks.together(processes, WAYS[way][0], in_float64, config, log, death)
    return codes, log.with_suffix(".0").read_text()


@pytest.fixture(scope="session")
def whole(home: Path, processes: Any) -> Path:
    """An uninterrupted run of one process."""
    codes, output = run(processes, home, "whole", "alone")
    assert codes == [0], output
    return place(home, "whole", "alone")


def on_rank(number: int, death: Callable[..., None], *arguments: Any) -> None:
    if int(os.environ["RANK"]) == number:
        death(*arguments)


def assert_same_end(folder: Path, other: Path, tolerance: float = 1e-3) -> None:
    """Compare the checkpoints and curves of two runs; ``tolerance`` is relative, for metrics that are not exact."""
    checkpoint, expected = (read_checkpoint(path) for path in (folder, other))
    assert checkpoint["global_step"] == expected["global_step"] == 12
    for name, value in expected["state_dict"].items():
        assert (checkpoint["state_dict"][name] - value).abs().max() < 1e-9, name
    curves, wanted = logged(folder), logged(other)
    assert curves.keys() == wanted.keys()
    for name, values in curves.items():
        # Every other metric is a mean of the ranks' means, without the weights of their targets. It differs little if a
        # rank has whole sequences, and more if one rank has the middle of a sequence and another rank has the ends.
        near = 1e-5 if name.rpartition("/")[2] in EXACT else tolerance
        assert values == pytest.approx(wanted[name], rel=near), name


CHANGES = mostly_nightly(
    [("fsdp", "alone"), ("alone", "fsdp"), ("ddp", "fsdp"), ("context", "alone"), ("mesh", "context")],
    ("alone", "fsdp"),
    ("mesh", "context"),
)


def in_an_exchange(rank: int, number: int) -> None:
    """Kill the rank before its ``number``-th exchange, forward or backward."""
    called, whole = count_calls(number), exchange.count_sent

    def count_and_die(*arguments: Any) -> None:
        if called():
            os.kill(os.getpid(), signal.SIGKILL)
        whole(*arguments)

    if int(os.environ["RANK"]) == rank:
        exchange.count_sent = count_and_die


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_a_run_goes_on_with_another_number_of_ranks_also_when_one_was_killed(
    home: Path, processes: Any, whole: Path, before: str, after: str
):
    """Weights, place in the data and curves are those of one process. Any rank may get the signal, and the others end
    with a rank that is killed."""
    name, rank = f"{before}-{after}", WAYS[before][0] - 1
    codes, output = run(
        processes, home, name, before, partial(on_rank, rank, sent, signal.SIGTERM, "training_step", 13)
    )
    assert codes == [143] * WAYS[before][0] and "interrupted at step " in output, output
    if WAYS[after][0] > 1:
        in_a_step = partial(on_rank, 1, sent, signal.SIGKILL, "training_step", 3)
        death, begun = partial(in_an_exchange, 1, 40) if after == "context" else in_a_step, time.monotonic()
        codes, output = run(processes, home, name, after, death)
        assert codes == [1, -signal.SIGKILL] and time.monotonic() - begun < 60, output
    codes, output = run(processes, home, name, after)
    assert codes == [0] * WAYS[after][0] and "Going on with the unfinished run" in output, output
    assert_same_end(place(home, name, after), whole, 0.05 if "context" in (before, after) else 1e-3)


@pytest.mark.parametrize(
    ("before", "after"),
    mostly_nightly([("experts", "alone"), ("alone", "experts"), ("fsdp", "experts")], ("fsdp", "experts")),
)
def test_a_run_goes_on_with_experts_divided_or_not(home: Path, processes: Any, before: str, after: str):
    name, experts = f"moe-{before}-{after}", "model/feed_forward=moe"
    assert run(processes, home, f"moe-{after}", after, no_death, experts)[0] == [0] * WAYS[after][0]
    stop = partial(on_rank, 0, sent, signal.SIGTERM, "training_step", 13)
    assert run(processes, home, name, before, stop, experts)[0] == [143] * WAYS[before][0]
    codes, output = run(processes, home, name, after, no_death, experts)
    assert codes == [0] * WAYS[after][0] and "Going on with the unfinished run" in output, output
    gone_on, straight = (place(home, run_name, after, experts) for run_name in (name, f"moe-{after}"))
    assert_same_end(gone_on, straight, 0.2)  # the busiest expert of a rank is not that of all


@pytest.mark.parametrize("number", [0, 1])
def test_a_second_signal_ends_any_rank_at_once(home: Path, processes: Any, number: int):
    """The others end, too: they lose it in the middle of a step."""
    name, begun = f"twice{number}", time.monotonic()
    death = partial(on_rank, number, at_call, "training_step", 5, signalled_twice)
    codes, output = run(processes, home, name, "ddp", death)
    assert sorted(codes) == [1, 143] and codes[number] == 143 and time.monotonic() - begun < 60, output
    summary = json.loads((place(home, name, "ddp") / "summary.json").read_text())
    assert summary["status"] == ("failed" if number else "interrupted")


def as_srun_does() -> None:
    """Give this rank the environment that srun sets."""
    rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
        del os.environ[name]
    os.environ |= {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": "0", "SLURM_JOB_NAME": "gsm"}
    os.environ |= {"SLURM_NTASKS": world, "SLURM_NTASKS_PER_NODE": world}


def test_ranks_that_srun_starts_train_one_run(home: Path, processes: Any, whole: Path):
    codes, output = run(processes, home, "srun", "lightning", as_srun_does)
    assert codes == [0, 0], output
    assert_same_end(place(home, "srun", "lightning"), whole)


def test_a_refusal_of_the_leading_rank_ends_all_ranks(home: Path, processes: Any, whole: Path):
    """The other ranks would wait for it."""
    codes, output = run(
        processes, home, "refused", "ddp", no_death, f"start_from={whole}", "start_fresh=false", "global_batch=12"
    )
    assert codes == [1, 1] and re.search(r"error: start_fresh .*global_batch \(8 there, 12 here\)", output), output


def no_room() -> None:
    """Make the disk of a rank full in its second save."""

    def full(path: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    saved = count_calls(3)  # of two files a step

    def write(path: Path, tensors: Any, whole: Callable[..., Any] = checkpoint.write_tensors) -> Any:
        return full(path) if saved() else whole(path, tensors)

    checkpoint.write_tensors = write


@pytest.mark.parametrize(("way", "rank"), mostly_nightly([("ddp", 0), ("fsdp", 0), ("fsdp", 1)], ("fsdp", 1)))
def test_a_disk_that_is_full_for_a_rank_that_writes_ends_all_with_its_words(
    home: Path, processes: Any, way: str, rank: int
):
    """Once the other ranks waited for a rank that was gone, and printed that it was."""
    name = f"full-{way}-{rank}"
    often = ("callbacks.latest.minutes=1e-9", "callbacks.latest.share=1e9")
    codes, output = run(processes, home, name, way, partial(on_rank, rank, no_room), *often)
    other = (home / f"{name}-{way}.1").read_text()
    assert codes == [1, 1] and "Traceback" not in output + other, output + other
    for words in (output, other):
        assert re.search(r"error: \S*safetensors: No space left on device", words)
    assert read_checkpoint(place(home, name, way))["global_step"] == 3


def typed(home: Path, name: str, way: str, *starter: str) -> tuple[str, Path]:
    words = overrides(home, name, way)
    command = [sys.executable, *starter, str(ROOT / "train.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, place(home, name, way)


@pytest.mark.timeout(600)
def test_with_torchrun_one_rank_prints_and_the_checkpoint_of_all_ranks_loads(home: Path):
    """Rank 0 composes for all: with a name of its own, each rank would have a folder of its own."""
    output, _ = typed(home, "torchrun-${now:%S%f}", "fsdp", "-m", "torch.distributed.run", "--nproc-per-node=2")
    (folder,) = home.glob("logs/torchrun-*/gsm-seed0-*")
    assert output.count("model    gsm") == output.count("step 12/12") == output.count("Next:") == 1
    assert "device   2 x " in output
    (step,) = checkpoint.steps(folder)
    names = {path.name for path in step.iterdir()}
    assert {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", checkpoint.INDEX} < names
    weights = checkpoint.read_weights(step)
    assert all(torch.equal(x, weights[f"model.{name}"]) for name, x in load_model(folder).state_dict().items())
    transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
    importlib.import_module("gsm.hf")  # which tells transformers of the model
    theirs, loaded = transformers.AutoModelForCausalLM.from_pretrained(step, output_loading_info=True)
    assert not any(loaded[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, load_model(folder)(tokens).logits)


@pytest.mark.timeout(600)
def test_lightning_starts_ranks_by_itself(home: Path):
    output, folder = typed(home, "lightning", "lightning")
    assert output.count("model    gsm") == output.count("step 12/12") == 1
    assert read_checkpoint(folder)["global_step"] == 12


EDITED = """import os, lightning, pathlib

class Edited(lightning.Callback):
    def __init__(self, file):
        if "LOCAL_RANK" not in os.environ:
            pathlib.Path(file).write_text(pathlib.Path(file).read_text().replace("1e-3", "3e-2"))

    def on_train_start(self, trainer, task):
        folder = pathlib.Path(task.hparams["config"]["folder"])
        rate = task.hparams["config"]["optimizer"]["learning_rate"]
        (folder / f"rank{trainer.global_rank}").write_text(str(rate))
"""


@pytest.mark.timeout(600)
def test_a_rank_that_lightning_starts_composes_nothing(home: Path, tmp_path: Path):
    """A yaml that was saved meanwhile, or a name with the time, made another run of it, in another folder."""
    (tmp_path / "own/experiment").mkdir(parents=True)
    mine = tmp_path / "own/experiment/mine.yaml"
    mine.write_text("# @package _global_\noptimizer: {learning_rate: 1e-3}\n")
    (tmp_path / "edited.py").write_text(EDITED)
    words = ["experiment=mine", *overrides(home, "composed-${now:%S%f}", "lightning")]
    words += ["+callbacks.edited._target_=edited.Edited", f"+callbacks.edited.file={mine}"]
    flag = f"--config-dir={tmp_path / 'own'}"
    left = {"MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "1", "LOCAL_RANK": "0"}  # of an earlier launcher
    variables = {**os.environ, **left, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, str(ROOT / "train.py"), *words, flag]  # behind which Lightning adds words of its own
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {file.name: file.read_text() for file in home.glob("logs/composed-*/*/rank*")}
    assert found == {"rank0": "0.001", "rank1": "0.001"} and "3e-2" in mine.read_text()


SCRIPT = """import pathlib, sys
from gsm.config.compose import compose
from gsm.training import run

def edit(*given, announce=run._announce):
    announce(*given)
    for path in pathlib.Path("text").iterdir():
        path.write_text(path.read_text() + "one more line\\n")

run._announce = edit  # only the leading rank calls it, when it has opened its data
run.train(compose(sys.argv[1:]))
"""


@pytest.mark.timeout(600)
def test_a_rank_that_lightning_starts_with_other_data_is_refused(home: Path, tmp_path: Path):
    """They were compared before there were any."""
    shutil.copytree(home / "text", tmp_path / "text")
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [word.replace(str(home), str(tmp_path)) for word in overrides(home, "data", "lightning")]
    done = subprocess.run(
        [sys.executable, "script.py", *words], cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode and re.search(r"ConfigError: the data's corpus ", done.stderr), done.stdout + done.stderr
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
def test_a_rank_that_lightning_has_just_started_ends_with_its_leader(home: Path, tmp_path: Path):
    """Once such a rank, which had not met the others, looked for them for half an hour."""
    command = [sys.executable, str(ROOT / "train.py"), *overrides(home, "orphan", "lightning")]
    with (tmp_path / "log").open("w") as log:
        leader = subprocess.Popen(command, stdout=log, stderr=log)
    until(lambda: bool(started_by(leader.pid)))
    other = started_by(leader.pid)[0]
    leader.kill()
    leader.wait()
    until(lambda: not running(other))


def started_by(leader: int) -> list[int]:
    """Return the process ids of the other ranks; each runs train.py again."""
    return [child for child in below(leader) if "train.py" in called(child)]
