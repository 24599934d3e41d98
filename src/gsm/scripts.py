"""The commands: ``python train.py`` in a clone, ``gsm-train`` in an installed package.

Slow imports happen after the arguments are checked.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import hydra
from omegaconf import DictConfig

from gsm import paths, threads
from gsm.config import command_line
from gsm.config.handed import take_over
from gsm.experiments import SEVERAL
from gsm.signals import leave_with_parent


def train() -> None:
    """Train a model, or all models of an experiment."""

    def run(config: DictConfig) -> None:
        threads.settle()
        command_line.run(job, config)

    def job(plain: dict[str, Any]) -> None:
        several = any(plain[name] is not None for name in (*SEVERAL, "runs"))
        if several or command_line.sweeping():
            os.environ.pop("WANDB_RUN_ID", None)  # W&B would take them for one run
        if several or plain["plan"]:
            from gsm.experiments import execute

            (execute.print_plan if plain["plan"] else execute.run)(plain)
        else:
            from gsm.training import run as training

            training.train(plain)

    leave_with_parent()
    command_line.prepare()
    if composed := take_over():
        from gsm.training import run as training

        threads.settle()
        with command_line.errors_as_sentences():
            training.train(composed)
        return
    hydra.main(version_base="1.3", config_path=str(paths.configs()), config_name="train")(run)()


def evaluate() -> None:
    """Score trained checkpoints."""
    from gsm.evaluation import commands

    threads.settle()
    leave_with_parent()
    commands.call(sys.argv[1:])


def generate() -> None:
    """Write text with a trained model."""
    from gsm.evaluation.generate import generate

    threads.settle()
    command_line.call(generate, "generate.py")


def compare() -> None:
    """Compare the runs of one or several experiments."""
    from gsm.experiments.compare import compare

    command_line.call(compare, "compare.py")


def explore() -> None:
    """Show the computation of a trained model at every token of a text."""
    _require("explorer")
    from gsm.explorer.command import write

    threads.settle()
    command_line.call(write, "explore.py")


def export() -> None:
    """Write a trained model as a folder for transformers."""
    _require("hf")
    try:
        from gsm.hf.export import export
    except ModuleNotFoundError as error:
        raise SystemExit(f"error: export.py needs {error.name}: {paths.install('hf')}") from error

    command_line.call(export, "export.py")


def _require(part: str) -> None:
    if not paths.has(part):
        raise SystemExit(f"error: this command needs src/gsm/{part}, which has been deleted. Use a whole copy of GSM.")


if __name__ == "__main__":  # python -m gsm.scripts evaluate ..., used by experiments
    globals()[sys.argv.pop(1)]()
