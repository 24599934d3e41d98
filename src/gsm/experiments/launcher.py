"""The runs of an experiment, handed to one of Hydra's launchers: a cluster, as an array of jobs.

    python train.py experiment=ablate_residual hydra/launcher=submitit_slurm hydra.launcher.timeout_min=240

A job of the cluster works its part off as this machine would (``gsm.experiments.jobs``): each run is a process with the
same command line, its output in ``train.log``. So a run that fails, or that the cluster's warning interrupts, does not
take the launcher down with it.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig

from gsm import paths
from gsm.errors import ConfigError
from gsm.experiments.jobs import Child, work_off

if TYPE_CHECKING:  # it takes seconds to import
    from gsm.experiments.runs import Run

GROUP = "hydra/launcher"
HERE = "basic"  # Hydra's default, in whose place jobs are processes of this machine
PLUGIN = "hydra_plugins.hydra_submitit_launcher"


def chosen() -> str | None:
    """Return the launcher of the command line; None for processes of this machine."""
    name = HydraConfig.get().runtime.choices.get(GROUP)
    return None if name in (None, HERE) else str(name)


def refuse_single() -> None:
    """Raise ConfigError where a launcher is chosen for a single run, outside of a sweep."""
    if chosen() and HydraConfig.get().mode != RunMode.MULTIRUN:
        raise ConfigError(
            f"{GROUP}={chosen()} is not allowed because it is for experiments. Use seeds=1 for a single run"
        )


def check_available(overrides: Sequence[str]) -> None:
    """Raise ConfigError where submitit's launcher is chosen, but not installed, and for several processes a job."""
    choices = [line for line in overrides if line.startswith(f"{GROUP}=submitit_")]
    if choices and not _installed():
        raise ConfigError(f"{choices[-1]} needs the extra cluster: {paths.install('cluster')}")
    for line in overrides:
        key, _, number = line.partition("=")
        if key in ("hydra.launcher.nodes", "hydra.launcher.tasks_per_node") and number != "1":
            raise ConfigError(
                f"{key}={number} is not allowed because a job is one process, which starts the runs. Use 1; "
                "docs/slurm.sh starts a run on several nodes"
            )


def launch(parts: Mapping[tuple[str, ...], Sequence[Run]]) -> None:
    """Hand all parts over at once, and wait until they have ended. ``Run.finished`` answers how.

    A launcher gives up at the first job that the cluster has killed, whatever the others have done. Its reason is
    printed.

    Args:
        parts: the runs of one job of the cluster, one after another, by the overrides from which Hydra composes the
            job's configuration and folder.
    """
    context = HydraContext(config_loader=GlobalHydra.instance().config_loader(), callbacks=Callbacks())
    try:
        composed = cast(DictConfig, HydraConfig.instance().cfg)
        launcher = Plugins.instance().instantiate_launcher(context, LauncherTask(parts), composed)
        launcher.launch([list(overrides) for overrides in parts], initial_job_idx=0)
    except KeyboardInterrupt:
        print(
            f"\njobs that {chosen()} has accepted go on there; when they have ended, the same command makes the table"
        )
        raise
    except Exception as error:  # a plugin, and the cluster behind it, may raise anything
        print(f"{chosen()} ended with {type(error).__name__}: {error}".strip(), flush=True)


class LauncherTask:
    """Work off one of these parts on the cluster, without the runs that another submission has finished meanwhile."""

    def __init__(self, parts: Mapping[tuple[str, ...], Sequence[Run]]) -> None:
        self.parts = dict(parts)

    def __call__(self, config: DictConfig) -> None:
        """Start the runs of the job that Hydra has composed, one after another."""
        part = self.parts[tuple(HydraConfig.get().overrides.task)]
        stopped = work_off(part, at_once=1, start=Child, ended=lambda run, code, child: None)
        if stopped is not None and callable(signal.getsignal(stopped)):
            signal.raise_signal(stopped)  # the run has saved its state; now the launcher may queue the job once more


def _installed() -> bool:
    try:
        return find_spec(PLUGIN) is not None
    except ModuleNotFoundError:  # not even the namespace is there
        return False
