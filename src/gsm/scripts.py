"""The commands: what ``python train.py`` does in a clone, ``gsm-train`` does wherever the package is installed.

Imports that take seconds wait until the arguments were found to be sound.
"""

from __future__ import annotations

import sys

from omegaconf import DictConfig

from gsm import paths
from gsm.config import command_line
from gsm.experiments import jobs


def train() -> None:
    """Trains a model, or all those of an experiment."""
    import hydra

    def run(config: DictConfig) -> None:
        from gsm.experiments import experiment

        command_line.run(experiment.run, config)

    jobs.leave_with_parent()
    command_line.prepare()
    hydra.main(version_base="1.3", config_path=str(paths.configs()), config_name="train")(run)()


def evaluate() -> None:
    """Scores trained checkpoints."""
    from gsm.evaluation import commands

    jobs.leave_with_parent()
    commands.call(sys.argv[1:])


def generate() -> None:
    """Writes text with a trained model."""
    from gsm.evaluation.generate import generate

    command_line.call(generate, "generate.py")


def compare() -> None:
    """Puts the runs of one experiment or several side by side."""
    from gsm.experiments.compare import compare

    command_line.call(compare, "compare.py")


def explore() -> None:
    """Shows what a trained model does at every token of a text."""
    from gsm.explorer.command import write

    command_line.call(write, "explore.py")


def export() -> None:
    """Writes a trained model as a folder for transformers."""
    from gsm.hf.export import export

    command_line.call(export, "export.py")


if __name__ == "__main__":  # python -m gsm.scripts evaluate ..., as an experiment starts it
    globals()[sys.argv.pop(1)]()
