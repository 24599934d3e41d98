"""Lightning's Trainer of a run: what its configuration says, and what the machine and the launcher say."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import lightning
import torch
from lightning.fabric.plugins.environments import ClusterEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.callbacks import Checkpoint
from torch.distributed.constants import default_pg_timeout

from gsm.config.check import ConfigError
from gsm.config.load import construct, instantiate
from gsm.layers.experts import Experts, ways_to_divide, width_of_weights
from gsm.training.callbacks import find
from gsm.training.callbacks.checkpoints import Latest, WholeFiles
from gsm.training.callbacks.interruption import Interruption
from gsm.training.callbacks.summary import Summary
from gsm.training.callbacks.tensorboard import Hyperparameters
from gsm.training.distributed.ranks import sharing
from gsm.training.distributed.sharded import Sharded
from gsm.training.module import LanguageModeling
from gsm.training.resume import ResumeState

OTHER_ENDS = ("max_epochs", "max_time", "min_epochs", "min_steps")
PLACES = ("accelerator", "devices", "num_nodes", "strategy", "plugins")  # what the number of ranks depends on
SILENT = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


def build(
    config: Mapping[str, Any], task: LanguageModeling, summary: Summary, differ: Sequence[str] = ()
) -> lightning.Trainer:
    """The trainer; every run is long enough to be logged at least once, and no checkpoint is half written.

    ``differ`` are the paths in the configuration in which arms of its experiment differ (``asked.differing``).

    Raises ConfigError for values that Lightning refuses, and for what cannot be where every rank has only its share of
    the model.
    """
    chosen = settings(config)
    parts = [instantiate(node, f"callbacks.{name}") for name, node in config["callbacks"].items() if node]
    columns = Hyperparameters(config, summary.facts["parameters"], differ)
    parts += [Interruption(), columns, summary, ResumeState()]
    saves = any(isinstance(part, Checkpoint) for part in parts)
    chosen.setdefault("enable_checkpointing", saves)  # or Lightning would add a callback that nobody asked for
    loggers = [instantiate(node, f"logger.{name}") for name, node in config["logger"].items() if node]
    plugins = [*(chosen.pop("plugins", None) or []), WholeFiles()]
    if SLURMEnvironment.detect() and not TorchElasticEnvironment.detect():
        plugins.append(SLURMEnvironment(auto_requeue=False))  # it would save in the middle of a step: Interruption does
    make = instantiate({**chosen, "_partial_": True}, "trainer")
    objects = {"callbacks": parts, "logger": loggers, "plugins": plugins}
    trainer = construct(make, "trainer", **objects, default_root_dir=config["folder"])
    trainer.accumulate_grad_batches = batches = batches_a_step(config, shares(trainer))
    if type(trainer.val_check_interval) is int:
        trainer.val_check_interval *= batches  # Lightning counts batches, the configuration steps
    refuse_divided(trainer, task)
    return trainer


def quiet() -> None:
    """Leaves out what Lightning tells everybody; its warnings about the run at hand stay."""
    for name in (
        "lightning.pytorch.utilities.rank_zero",
        "lightning.fabric.utilities.seed",
        "lightning.fabric.utilities.distributed",
        "lightning.pytorch.accelerators.cuda",
    ):
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).propagate = False  # it prints by itself; Hydra's logger would say it again
    reduced = r"It is recommended to use `self.log\('(train/|val/|state/|overlap|step)"  # means over all ranks already
    buffers = ".*broadcast_buffers. is deprecated"  # its successor is newer than the oldest PyTorch that will do
    messages = ["Checkpoint directory .* exists and is not empty", ".*LeafSpec.* is deprecated", reduced, buffers]
    if "SLURM_JOB_ID" not in os.environ:
        messages.append("The `srun` command is available")  # a hint for jobs; this may be a cluster's login node
    for message in messages:
        warnings.filterwarnings("ignore", message=message)


def world_size(config: Mapping[str, Any]) -> int:
    """Among how many ranks sequences are shared out: ``devices``, also ``auto``, times nodes, as Lightning itself
    counts them, over the ranks that divide the same sequences (``trainer.context``).

    Raises ConfigError where the machine has not what the configuration asks for.
    """
    quiet()
    asked = {name: node for name, node in settings(config).items() if name in PLACES}
    return shares(instantiate({"_target_": "lightning.Trainer", **asked, **SILENT}, "trainer"))


def shares(trainer: lightning.Trainer) -> int:
    """The same of a trainer. Raises ConfigError where the ranks that divide sequences do not divide all ranks."""
    context: int = getattr(trainer.strategy, "context", 1)
    if trainer.world_size % context:
        fitting = [n for n in range(1, trainer.world_size + 1) if trainer.world_size % n == 0]
        raise ConfigError(
            f"trainer.context is {context}, but has to divide the {trainer.world_size} devices that train together: "
            f"say one of {', '.join(map(str, fitting))}, or change trainer.devices"
        )
    return sharing(trainer)[0]


def refuse_remainder(config: Mapping[str, Any]) -> None:
    """Raises ConfigError for a step that cannot be divided here, before anything that leads to it is trained."""
    if config.get("global_batch") is None:
        return
    try:
        world = world_size(config)
    except ConfigError:  # another machine trains; there it is said
        return
    batches_a_step(config, world)


def batches_a_step(config: Mapping[str, Any], world: int) -> int:
    """How many batches of every rank make up a step of ``global_batch`` sequences; one where that is null.

    Raises ConfigError where they do not come to that number, with values that would fit.
    """
    total, batch = config["global_batch"], config["data"].get("batch_size")
    if total is None:
        return 1
    if batch is None:
        raise ConfigError(
            f"global_batch is {total}, but data has no batch_size that it could be divided by: make it null"
        )
    at_once = world * batch
    if total % at_once == 0:
        return total // at_once
    fitting = [f"data.batch_size={max(n for n in range(1, batch + 1) if total // world % n == 0)}"]
    fitting = fitting if total % world == 0 else []
    fitting.append(
        f"global_batch={' or '.join(str(n * at_once) for n in (total // at_once, total // at_once + 1) if n)}"
    )
    raise ConfigError(
        f"global_batch is {total}, but {world} devices with data.batch_size={batch} take {at_once} sequences at a "
        f"time: say {' or '.join(fitting)}"
    )


def meet(config: Mapping[str, Any]) -> None:
    """Joins the ranks that torchrun or srun has started, so that they can agree before any of them does something.

    Lightning does so when training begins, and then finds it done. Ranks that it starts itself come later: one process
    prepares everything before there are others.
    """
    chosen = settings(config)
    environment, strategy = _environment(chosen), chosen.get("strategy")
    if environment is None or environment.world_size() == 1 or torch.distributed.is_initialized():
        return
    own = strategy if isinstance(strategy, Mapping) else {}
    backend = _with_backend(own, chosen.get("accelerator"))["process_group_backend"]
    devices = chosen.get("devices", "auto")
    are_the_first = devices == "auto" or isinstance(devices, int)
    os.environ |= {"MASTER_ADDR": environment.main_address, "MASTER_PORT": str(environment.main_port)}
    torch.distributed.init_process_group(
        backend,
        rank=environment.global_rank(),
        world_size=environment.world_size(),
        timeout=instantiate(own["timeout"], "trainer.strategy.timeout") if own.get("timeout") else default_pg_timeout,
        device_id=torch.device("cuda", environment.local_rank()) if "nccl" in backend and are_the_first else None,
    )


def _environment(chosen: Mapping[str, Any]) -> ClusterEnvironment | None:
    """Who has started this process as one of several that train together; None: nobody, or Lightning."""
    if TorchElasticEnvironment.detect():
        return TorchElasticEnvironment()
    alone = not chosen.get("strategy") and chosen.get("devices", "auto") == 1 and chosen.get("num_nodes", 1) == 1
    return SLURMEnvironment(auto_requeue=False) if SLURMEnvironment.detect() and not alone else None


def refuse_divided(trainer: lightning.Trainer, task: LanguageModeling) -> None:
    """Raises ConfigError for what cannot be where every rank has only its share of the model."""
    if not isinstance(trainer.strategy, Sharded):
        return
    if not task.optimizer.shardable:
        raise ConfigError(
            f"optimizer {type(task.optimizer).__name__} needs whole matrices, but trainer=fsdp divides them: use "
            "trainer=ddp, or optimizer=adamw"
        )
    among = {"trainer.context": trainer.strategy.context, "trainer.strategy.experts": trainer.strategy.experts}
    for name, count in among.items():
        if count > 1 and task.compiles:
            raise ConfigError(
                f"compile is true, but a compiler cannot follow what devices send where {name} is {count}: say "
                f"compile=false, or {name}=1"
            )
    refuse_shared_experts(trainer, task, trainer.strategy.experts)
    if not find(trainer, Latest):
        raise ConfigError("callbacks.latest is null, but trainer=fsdp concludes a run from its last checkpoint")


def refuse_shared_experts(trainer: lightning.Trainer, task: LanguageModeling, ranks: int) -> None:
    """Raises ConfigError for experts that so many ranks cannot divide, with numbers that can be had."""
    if ranks == 1:
        return
    parts = [part for part in task.model.modules() if isinstance(part, Experts)]
    if not parts:
        raise ConfigError(
            f"trainer.strategy.experts is {ranks}, but the model has no experts: say 1, or model/feed_forward=moe"
        )
    world, ways = trainer.world_size, ways_to_divide(parts, trainer.world_size)
    if ranks in ways:
        return
    remedy = f"say one of {', '.join(map(str, ways))}" if len(ways) > 1 else _other_devices(parts, ranks, world)
    for count, what in [(world, "devices that train together"), *((part.experts, "experts") for part in parts)]:
        if count % ranks:
            raise ConfigError(f"trainer.strategy.experts is {ranks}, but has to divide the {count} {what}: {remedy}")
    raise ConfigError(
        f"trainer.strategy.experts is {ranks}, so that {world // ranks} ranks have the same experts, which cannot "
        f"divide their widths of {' and '.join(map(str, width_of_weights(parts)))}: {remedy}"
    )


def _other_devices(parts: Sequence[Experts], ranks: int, world: int) -> str:
    """What to say instead where so many devices cannot divide the experts: nearest to what was asked for."""
    said = f"{world} devices can only leave experts undivided; say 1"
    fitting = [(ranks, n) for n in range(2, max(world, ranks) + 1) if ranks in ways_to_divide(parts, n)]
    if not fitting:
        fitting = [(ways[-1], n) for n in range(2, world) if len(ways := ways_to_divide(parts, n)) > 1]
    if not fitting:
        return said
    number, devices = fitting[-1]
    return f"{said}, or take {devices} devices" + (f" and say {number}" if number != ranks else "")


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the Trainer is made with. Raises ConfigError for an end of the run that is not a number of steps."""
    chosen = dict(config["trainer"])
    context, strategy = chosen.pop("context", None), chosen.get("strategy")
    divides = strategy.get("context", 1) if isinstance(strategy, Mapping) else 1
    if context is not None and context != divides:  # the strategy has it from there, in trainer=context
        raise ConfigError(
            f"trainer.context is {context}, but the trainer divides sequences among {divides}: say trainer=context, "
            "and the number in trainer.context alone"
        )
    for name in OTHER_ENDS:
        if chosen.get(name) is not None:
            raise ConfigError(
                f"trainer.{name} is {chosen[name]}, but a run ends after trainer.max_steps, since its learning rate "
                f"is a function of their number: leave {name} out"
            )
    if chosen.pop("accumulate_grad_batches", None) is not None:
        raise ConfigError("trainer.accumulate_grad_batches follows from global_batch (sequences a step): say that")
    interval = chosen.get("val_check_interval")
    if interval is not None and type(interval) is not int and chosen.get("check_val_every_n_epoch") is None:
        raise ConfigError(f"trainer.val_check_interval is {interval!r:.40}, but has to be a whole number of steps")
    if chosen.get("limit_train_batches") == 0:
        raise ConfigError("trainer.limit_train_batches is 0, but then nothing is trained: leave it out")
    if chosen["max_steps"] > 0:
        chosen["log_every_n_steps"] = min(chosen.get("log_every_n_steps") or 50, chosen["max_steps"])
    if chosen.get("accelerator") in ("mps", "tpu", "hpu", "xla"):
        raise ConfigError(
            f"trainer.accelerator is {chosen['accelerator']}, where nothing of this was tried: say cpu, gpu or auto"
        )
    if chosen.get("accelerator") == "auto" and not torch.cuda.is_available():
        chosen["accelerator"] = "cpu"  # on a Mac Lightning would take MPS
    if chosen.get("precision") == "auto":
        chosen["precision"] = best_precision(chosen.get("accelerator"))
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun has started the processes already, and says how many
        here, all_ranks = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
        chosen |= {"devices": here, "num_nodes": all_ranks // here}
    if "process_group_backend" in (chosen.get("strategy") or ""):
        chosen["strategy"] = _with_backend(chosen["strategy"], chosen.get("accelerator"))
    return chosen


def _with_backend(strategy: Mapping[str, Any], accelerator: str | None) -> dict[str, Any]:
    """On GPUs, objects and checkpoints travel from host to host (gloo): then no GPU is waited for."""
    gpu = accelerator != "cpu" and torch.cuda.is_available()
    chosen = strategy.get("process_group_backend") or ("cpu:gloo,cuda:nccl" if gpu else "gloo")
    return {**strategy, "process_group_backend": chosen}


def best_precision(accelerator: str | None = None) -> str:
    """``bf16-mixed`` on a GPU that computes in bfloat16, else ``32-true``."""
    gpu = accelerator != "cpu" and torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16-mixed" if gpu else "32-true"
