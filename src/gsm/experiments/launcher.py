"""The runs of an experiment, handed to one of Hydra's launchers: a cluster, as an array of jobs.

    python train.py experiment=ablate_residual hydra/launcher=submitit_slurm hydra.launcher.timeout_min=240

What a job does there is what a run does here: a child process with the same command line, its output in ``train.log``.
So a run that fails, or that the cluster's warning interrupts, does not take the launcher down with it.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, cast

from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.types import HydraContext
from omegaconf import DictConfig

from gsm.config.check import ConfigError
from gsm.config.compose import from_job
from gsm.experiments.children import Child, work_off

if TYPE_CHECKING:
    from gsm.experiments.experiment import Job

GROUP = "hydra/launcher"
HERE = "basic"  # Hydra's default, in whose place runs are processes of this machine (gsm.experiments.children)
PLUGIN = "hydra_plugins.hydra_submitit_launcher"


class GaveUp(Exception):
    """A launcher has ended with an error, so that nobody knows how its runs have; the message is its reason."""


def chosen() -> str | None:
    """The launcher that the command line asks for; None where the runs are to be processes of this machine."""
    name = HydraConfig.get().runtime.choices.get(GROUP)
    return None if name in (None, HERE) else str(name)


def check_available(overrides: Sequence[str]) -> None:
    """Raises ConfigError where submitit's launcher is asked for, but not installed."""
    asked = [line for line in overrides if line.startswith(f"{GROUP}=submitit_")]
    if asked and not _installed():
        raise ConfigError(f"{asked[-1]} needs the extra cluster: pip install -c constraints.txt -e '.[cluster]'")


def launch(jobs: Sequence[Job], script: Sequence[str]) -> list[int]:
    """Hands all runs over at once, and waits until they have ended.

    Args:
        jobs: to train.
        script: the command that trains one run, as words; overrides are added to it.

    Returns:
        The exit code of each.

    Raises:
        GaveUp: as a launcher does at the first job that the cluster has killed, whatever the others have done.
    """
    context = HydraContext(config_loader=GlobalHydra.instance().config_loader(), callbacks=Callbacks())
    try:
        composed = cast(DictConfig, HydraConfig.instance().cfg)
        launcher = Plugins.instance().instantiate_launcher(context, Task(script), composed)
        returned = launcher.launch([list(job.overrides) for job in jobs], initial_job_idx=0)
        return [result.return_value for result in returned]
    except KeyboardInterrupt:
        print(f"\nwhat {chosen()} has accepted goes on there; when it has ended, the same command makes the table")
        raise
    except Exception as error:  # a plugin, and the cluster behind it, may raise anything
        raise GaveUp(f"{chosen()} ended with {type(error).__name__}: {error}".strip()) from error


class Task:
    """What a job does, in a process that the launcher starts somewhere: trains one run in a child process.

    Args:
        script: the command that trains one run, as words; the overrides of the job are added to it.
    """

    def __init__(self, script: Sequence[str]) -> None:
        self.script = list(script)

    def __call__(self, config: DictConfig) -> int:
        """Trains, unless another submission has meanwhile; returns the exit code."""
        if _is_finished(config):
            return 0
        command = [*self.script, *HydraConfig.get().overrides.task]
        ended: list[int] = []
        start = partial(Child, command, Path(config["folder"]) / "train.log", {}, follow=False)
        stopped = work_off([start], 1, lambda number, child, code: ended.append(code))
        if stopped is not None and callable(signal.getsignal(stopped)):
            signal.raise_signal(stopped)  # the run has saved what it has; now the launcher may queue the job once more
        return ended[0]


def _is_finished(config: DictConfig) -> bool:
    from gsm.config.load import CheckpointError
    from gsm.experiments.folder import finished

    try:
        return finished(from_job(config))
    except CheckpointError:  # which the run itself says, with what can be done
        return False


def _installed() -> bool:
    try:
        return find_spec(PLUGIN) is not None
    except ModuleNotFoundError:  # not even the namespace is there
        return False
