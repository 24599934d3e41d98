"""Runs of several ranks that are interrupted, or lose a rank: they end as those of one process do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from short_runs import TINY, composed, count_calls, lines, no_death, run_here

from gsm.paths import ROOT
from gsm.runs.consolidate import consolidate
from gsm.runs.load import load_model, read_checkpoint
from gsm.task import LanguageModeling

pytestmark = pytest.mark.slow
FEW = "trainer.max_steps=12 trainer.val_check_interval=12 callbacks.latest.minutes=10 trainer.accelerator=cpu"
FEW += " callbacks.pictures=null"  # a rank that has only its share of the model draws none
EXACT = {"tokens", "loss", "perplexity", "bits_per_byte", "gradient_norm", "learning_rate"}
ALONE = "trainer=default data.batch_size=4 trainer.accumulate_grad_batches=2"
WAYS = {  # the same steps, of two batches of 4 sequences: each of a step's batches counts alike
    "alone": (1, ALONE),
    "ddp": (2, "trainer=ddp data.batch_size=2 trainer.accumulate_grad_batches=2"),
    "lightning": (2, "trainer=ddp trainer.devices=2 data.batch_size=4 trainer.accumulate_grad_batches=1"),
    "fsdp": (2, "trainer=fsdp data.batch_size=2 trainer.accumulate_grad_batches=2"),
}


def given(home: Path, name: str, way: str, *more: str) -> list[str]:
    places = [f"data.path={home / 'text'}", f"data.cache_dir={home / 'cache'}", f"logs={home / 'logs'}"]
    words = [word for word in TINY if not word.startswith(("trainer=", "data.batch", "trainer.acc", "callbacks."))]
    return [*words, *WAYS[way][1].split(), *FEW.split(), *places, f"name={name}", *more]


def in_float64(config: dict[str, Any], log: Path, death: Callable[[], None]) -> None:
    """On one rank: a run, so that two sums in another order are the same to many digits."""
    torch.set_default_dtype(torch.float64)
    run_here(config, log.with_suffix(f".{os.environ['RANK']}"), death)


def run(processes: Any, home: Path, name: str, way: str, death: Callable[[], None] = no_death) -> tuple[list[int], str]:
    """Exit codes, and what the leading rank has printed."""
    log = home / f"{name}-{way}.log"
    log.with_suffix(".0").write_text("")
    codes = ranks.together(processes, WAYS[way][0], in_float64, composed(tuple(given(home, name, way))), log, death)
    return codes, log.with_suffix(".0").read_text()


@pytest.fixture(scope="session")
def whole(home: Path, processes: Any) -> Path:
    """A run of one process that nothing happened to."""
    codes, said = run(processes, home, "whole", "alone")
    assert codes == [0], said
    return home / "logs/whole/gsm/seed0"


def on_rank(chosen: int, death: Callable[[], None]) -> None:
    if int(os.environ["RANK"]) == chosen:
        death()


def sent(number: signal.Signals, count: int) -> None:
    """In some batch, the process gets a signal."""
    trained = count_calls(count)

    def step(self: Any, *given: Any, whole: Callable[..., Any] = LanguageModeling.training_step) -> Any:
        if trained():
            os.kill(os.getpid(), number)
        return whole(self, *given)

    LanguageModeling.training_step = step


def assert_ends_alike(folder: Path, other: Path) -> None:
    one, two = (read_checkpoint(path) for path in (folder, other))
    assert one["global_step"] == two["global_step"] == 12
    for name, value in two["state_dict"].items():
        assert (one["state_dict"][name] - value).abs().max() < 1e-9, name
    for first, second in zip(lines(folder), lines(other), strict=True):
        (*start, value), (*wanted, number) = first.split(","), second.split(",")
        assert start == wanted
        # What else is noted of a step is a mean of each rank's means, and these count by targets, which it is not over.
        near = 1e-5 if first.split(",")[1].rpartition("/")[2] in EXACT else 1e-3
        assert number == "value" or float(value) == pytest.approx(float(number), rel=near), first


@pytest.mark.parametrize(("before", "after"), [("fsdp", "alone"), ("alone", "fsdp"), ("ddp", "fsdp")])
def test_a_run_goes_on_with_another_number_of_ranks(home: Path, processes: Any, whole: Path, before: str, after: str):
    """Weights, place in the data, curves: as if it had been one process all the time. Any rank may get the signal."""
    name, rank = f"{before}-{after}", WAYS[before][0] - 1
    codes, said = run(processes, home, name, before, partial(on_rank, rank, partial(sent, signal.SIGTERM, 13)))
    assert codes == [143] * WAYS[before][0] and "interrupted at step " in said, said
    codes, said = run(processes, home, name, after)
    assert codes == [0] * WAYS[after][0] and "Going on with the unfinished run" in said, said
    assert_ends_alike(home / f"logs/{name}/gsm/seed0", whole)


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_rank_that_is_killed_is_named_and_the_same_call_goes_on(home: Path, processes: Any, whole: Path, way: str):
    name = f"killed-{way}"
    saved = partial(sent, signal.SIGTERM, 7)
    assert run(processes, home, name, way, partial(on_rank, 0, saved))[0] == [143, 143]
    codes, said = run(processes, home, name, way, partial(on_rank, 1, partial(sent, signal.SIGKILL, 3)))
    assert codes == [1, -signal.SIGKILL], said
    assert "error: rank 1 of 2 has ended" in said and "last.ckpt, of step " in said and "to go on:" in said
    assert "Traceback" not in said
    codes, said = run(processes, home, name, way)
    assert codes == [0, 0], said
    assert_ends_alike(home / f"logs/{name}/gsm/seed0", whole)


def typed(home: Path, name: str, way: str, *starter: str) -> tuple[str, Path]:
    command = [sys.executable, *starter, str(ROOT / "train.py"), *given(home, name, way, "callbacks.progress.every=6")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, home / f"logs/{name}/gsm/seed0"


@pytest.mark.timeout(600)
def test_torchrun_starts_ranks_of_which_one_speaks_and_what_they_leave_is_read_as_it_is(home: Path, tmp_path: Path):
    said, folder = typed(home, "torchrun", "fsdp", "-m", "torch.distributed.run", "--nproc-per-node=2")
    assert said.count("model    gsm") == said.count("step 12/12") == said.count("Next:") == 1
    assert "device   2 x cpu" in said
    one = load_model(consolidate(str(folder), str(tmp_path / "one.ckpt"))).state_dict()
    assert all(torch.equal(value, one[name]) for name, value in load_model(folder).state_dict().items())
    assert len(list((folder / "checkpoints/shards").iterdir())) == 1


@pytest.mark.timeout(600)
def test_lightning_starts_ranks_by_itself(home: Path):
    said, folder = typed(home, "lightning", "lightning")
    assert said.count("model    gsm") == said.count("step 12/12") == 1
    assert read_checkpoint(folder)["standing"]["world"] == 2
