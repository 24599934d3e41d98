"""Runs of a second or two in processes of their own, for tests of how runs end and go on."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gsm.config import command_line
from gsm.config.compose import compose
from gsm.config.load import instantiate
from gsm.paths import ROOT
from gsm.training import run
from gsm.training.callbacks.metrics_file import read_metrics
from gsm.training.callbacks.summary import Summary
from gsm.training.folder import Begin
from gsm.training.module import LanguageModeling
from gsm.training.run import Parts, build_model, open_data, train
from gsm.training.trainer import build

SIZES = (
    "size.vocabulary=257 size.context=32 size.dim=16 size.feed_forward_dim=32 size.heads=2 size.entry_dim=8 "
    "size.rotary_dim=4 size.query_rank=8 size.output_rank=8 size.index_dim=8 size.window=4 size.top_k=4"
).split()
NO_PICTURES = "callbacks.pictures=null"  # they would be a third of the time
BYTES = ("data=folder", "data.tokenizer=bytes")
TINY = ["model/residual=plain", *SIZES, *BYTES]
TINY += (
    "data.batch_size=4 data.validation_sequences=10 trainer=cpu trainer.max_steps=30 "
    "global_batch=8 trainer.val_check_interval=7 trainer.log_every_n_steps=3 "
    "callbacks.latest.minutes=1e-9 callbacks.latest.share=1e9 "
    "ngrams=false sample=false"
).split()
TINY += [NO_PICTURES]
BY_MODEL = "arm=${hydra:runtime.choices.model}"  # in a folder that is named after the model alone
UNSTEADY = {"train/tokens_per_second", "train/peak_memory_gib"}


def assemble(config: dict[str, Any], start: Begin | None = None) -> Parts:
    """Build the parts of a run as `train` does, up to its first step."""
    model, optimizer = build_model(config), instantiate(config["optimizer"], "optimizer")
    summary = Summary(Path(config["folder"]) / "summary.json")
    trainer = build(config, summary)
    return run.assemble(config, start or Begin(), open_data(config), model, optimizer, trainer, summary)


def count_calls(until: int) -> Callable[[], bool]:
    """A function that is true the `until`-th time it is called."""
    left = [until]

    def called() -> bool:
        left[0] -= 1
        return left[0] == 0

    return called


def at_call(method: str, count: int, act: Callable[[], object]) -> None:
    """In a child process: when this method of the task is called for the ``count``-th time, something happens first."""
    called, whole = count_calls(count), getattr(LanguageModeling, method)

    def instead(self: Any, *given: Any) -> Any:
        if called():
            act()
        return whole(self, *given)

    setattr(LanguageModeling, method, instead)


def sent(number: signal.Signals, method: str, count: int) -> None:
    """In a child process: there it gets a signal."""
    at_call(method, count, partial(os.kill, os.getpid(), number))


def started(processes: Any, given: list[str], log: Path, death: Callable[[], None]) -> Any:
    """A child process that trains, started. Its configuration is composed here: that takes about as long as the run."""
    child = processes.Process(target=run_here, args=(composed(tuple(given)), log, death))
    child.start()
    return child


@cache
def composed(given: tuple[str, ...]) -> dict[str, Any]:
    """Once for all runs that are given the same."""
    return compose(given)


def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let matplotlib be missing: to draw takes longer than all else."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


def run_here(config: dict[str, Any], log: Path, death: Callable[[], None]) -> None:
    """In a child process: one run, with what it prints in a file."""
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = log.open("a", encoding="utf-8")
    death()
    with command_line.errors_as_sentences():
        train(config)


def typed(processes: Any, folder: Path, script: str, *words: str, **environment: str) -> CompletedProcess[str]:
    """Run a script of the project in a folder, in a fresh process that has its imports done already.

    Args:
        processes: the fixture of this name.
        folder: the process's current folder.
        environment: variables of the process in addition to those of this one.
    """
    with tempfile.TemporaryDirectory() as outputs:
        streams = [Path(outputs) / "stdout", Path(outputs) / "stderr"]
        variables = {**os.environ, **environment}
        child = processes.Process(target=be_the_script, args=(folder, streams, script, words, variables))
        child.start()
        child.join()
        stdout, stderr = (stream.read_text() for stream in streams)
    return CompletedProcess([script, *words], child.exitcode, stdout, stderr)


def be_the_script(
    folder: Path, streams: list[Path], script: str, words: tuple[str, ...], environment: dict[str, str]
) -> None:
    """In a child process: be a script, with its output in two files."""
    for number, stream in enumerate(streams, 1):
        with stream.open("ab") as file:
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ |= environment
    sys.path += filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.argv = [str(ROOT / script), *words]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except Exception:  # as Python does at the end of a script
        sys.excepthook(*sys.exc_info())
        raise SystemExit(1) from None


def arguments(home: Path, name: str, *more: str) -> list[str]:
    places = [f"data.path={home / 'text'}", f"data.cache_dir={home / 'cache'}", f"logs={home / 'logs'}"]
    return [*TINY, *places, f"name={name}", BY_MODEL, *more]


def place_of(home: Path, name: str, *more: str) -> Path:
    """The folder of a run that is started with these arguments."""
    return Path(composed(tuple(arguments(home, name, *more)))["folder"])


def folder_of(experiment: Path, label: str = "gsm-seed0") -> Path:
    """The folder of the only run with this label, without its address."""
    (folder,) = (path for path in experiment.glob(f"{label}-*") if "-" not in path.name[len(label) + 1 :])
    return folder


def no_death() -> None:
    pass


def logged(folder: Path) -> dict[str, dict[int, float]]:
    """The metrics that a run has logged, without those that depend on the machine."""
    metrics = read_metrics(folder / "metrics.jsonl")
    assert "train/loss" in metrics
    return {name: values for name, values in metrics.items() if name not in UNSTEADY}


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows: of every tag, its steps and values."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    tags = sorted(set(events.Tags()["scalars"]) - UNSTEADY)
    return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in tags}


def below(root: int) -> list[int]:
    """The processes below one, nearest first."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [root]
    for one in found:
        found += [process for process, parent in parents.items() if parent == one]
    return found[1:]


def called(process: int) -> str:
    """A process's command line, in short."""
    with suppress(OSError):
        words = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return " ".join(
            [Path(words[0]).name, *(Path(word).name if word.startswith("/") else word for word in words[1:])]
        )[:40]
    return "nobody"
