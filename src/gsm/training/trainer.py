"""Lightning's Trainer of a run, from its configuration, the machine and the launcher."""

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
from gsm.config.load import construct, instantiate, sketch
from gsm.errors import within
from gsm.layers.experts import Experts, ways_to_divide
from gsm.training.callbacks import find
from gsm.training.callbacks.checkpoints import Folders, Latest
from gsm.training.callbacks.interruption import Interruption
from gsm.training.callbacks.summary import Summary
from gsm.training.distributed.ranks import sharing
from gsm.training.distributed.sharded import Sharded
from gsm.training.module import LanguageModeling
from gsm.training.resume import ResumeState
from gsm_kernels.launch import unready

# Arguments of Lightning's Trainer that would change what a step or a run is, and the keys to use instead. Lightning
# checks the values of all others.
INSTEAD = {
    "accumulate_grad_batches": "global_batch",
    **dict.fromkeys(["max_epochs", "min_epochs", "min_steps", "max_time", "fast_dev_run"], "trainer.max_steps"),
    "overfit_batches": "data.max_tokens",
    "check_val_every_n_epoch": "trainer.val_check_interval",
    "gradient_clip_algorithm": "trainer.gradient_clip_val, which clips the norm",
    "callbacks": "the group callbacks",
    "enable_checkpointing": "callbacks.latest",
    "logger": "the group logger",
    "default_root_dir": "folder",
    "model_registry": "the group logger",
    "enable_autolog_hparams": "the group logger",
}
STRATEGIES = ("auto", "ddp", "ddp_find_unused_parameters_true", "ddp_find_unused_parameters_false")  # by name
MACHINE = ("accelerator", "context")  # where another machine may train


def build(config: Mapping[str, Any], summary: Summary) -> lightning.Trainer:
    """Build the Trainer. Every run is long enough to be logged at least once, and no checkpoint is half written.

    Args:
        config: the composed configuration.
        summary: the callback that writes ``summary.json``.

    Raises ConfigError for values that Lightning rejects, for a step that cannot be divided among the devices, for
    ``compile`` on a CPU, and for a Hopper GPU whose kernels cannot be built.
    """
    chosen = trainer_arguments(config)
    parts = [instantiate(node, f"callbacks.{name}") for name, node in config["callbacks"].items() if node]
    parts += [Interruption(), summary, ResumeState()]
    # Else Lightning adds a checkpoint callback of its own.
    chosen["enable_checkpointing"] = any(isinstance(part, Checkpoint) for part in parts)
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # its logger would send facts of this machine
    loggers = [instantiate(node, f"logger.{name}") for name, node in config["logger"].items() if node]
    nodes = chosen.pop("plugins", None) or []
    plugins = [instantiate(node, "trainer.plugins") for node in (nodes if isinstance(nodes, list) else [nodes])]
    plugins.append(Folders())
    if SLURMEnvironment.detect() and not TorchElasticEnvironment.detect():
        plugins.append(SLURMEnvironment(auto_requeue=False))  # it would save in the middle of a step: Interruption does
    make = instantiate({**chosen, "_partial_": True}, "trainer")
    objects = {"callbacks": parts, "logger": loggers, "plugins": plugins}
    trainer = construct(make, "trainer", **objects, default_root_dir=config["folder"])
    refuse_context(trainer)
    trainer.accumulate_grad_batches = batches = batches_a_step(config, sharing(trainer)[0])
    if type(trainer.val_check_interval) is int:
        trainer.val_check_interval *= batches  # Lightning counts batches, the configuration steps
    if config["compile"] and trainer.strategy.root_device.type == "cpu":
        raise ConfigError(
            "compile must be false on a CPU, where it takes minutes and a step is hardly faster, got true; `python "
            "-m gsm_kernels` shows the kernels that make a CPU fast"
        )
    if trainer.strategy.root_device.type == "cuda" and (reason := unready()) is not None:
        raise ConfigError(
            f"trainer.accelerator must be a device that is ready, got {config['trainer']['accelerator']}: {reason}"
        )
    return trainer


def quiet() -> None:
    """Silence Lightning's general advice; its warnings about this run stay."""
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
    messages.append("Be aware that when using `ckpt_path`")  # pictures of the earlier part may be off now
    if "SLURM_JOB_ID" not in os.environ:
        messages.append("The `srun` command is available")  # a hint for jobs; this may be a cluster's login node
    for message in messages:
        warnings.filterwarnings("ignore", message=message)


def ranks_in(config: Mapping[str, Any]) -> int | None:
    """Return the number of ranks that take different sequences, from the configuration alone, without a Trainer.

    None: only the Trainer of the run can count them.
    """
    chosen = config["trainer"]
    devices, strategy = chosen.get("devices", "auto"), chosen.get("strategy")
    if devices == "auto":
        devices = 1 if chosen.get("accelerator") == "cpu" else max(torch.cuda.device_count(), 1)
    context = strategy.get("context", 1) if isinstance(strategy, Mapping) else 1
    if type(devices) is not int or type(context) is not int or min(devices, context) < 1:
        return None  # Lightning and the strategy raise an error for these
    world = devices * (chosen.get("num_nodes") or 1)
    return None if world < 1 or world % context else world // context


def refuse_context(trainer: lightning.Trainer) -> None:
    """Raise ConfigError if the ranks that divide the same sequences (``trainer.context``) do not divide all ranks."""
    context: int = getattr(trainer.strategy, "context", 1)
    if trainer.world_size % context:
        fitting = [n for n in range(1, trainer.world_size + 1) if trainer.world_size % n == 0]
        raise ConfigError(
            f"trainer.context must divide the {trainer.world_size} devices that train together, got {context}; use "
            f"{' or '.join(map(str, fitting))}, or change trainer.devices"
        )


def refuse_early(config: Mapping[str, Any]) -> None:
    """Check a run's model, optimiser, task and trainer before the runs that it depends on start. Raises ConfigError."""
    if "model" in config:
        sketch(config)
    if "optimizer" in config:
        instantiate(config["optimizer"], "optimizer")
    if "task" in config.get("data", {}):  # other data read files
        instantiate(config["data"], "data")
    if chosen := config.get("trainer"):
        refuse_arguments({name: value for name, value in chosen.items() if name not in MACHINE})
    if "data" in config and (world := ranks_in(config)):
        batches_a_step(config, world)


def batches_a_step(config: Mapping[str, Any], world: int) -> int:
    """Return the number of batches of every rank in a step of ``global_batch`` sequences.

    Raises ConfigError, with values that fit, if the batches cannot add up to that number.
    """
    batches = _divided(config, world)
    limit = config.get("trainer", {}).get("limit_train_batches")
    if limit not in (None, 1.0) and (isinstance(limit, float) or limit % batches):
        raise ConfigError(
            f"trainer.limit_train_batches must be a multiple of {batches}, the batches of a step, got {limit}"
        )
    return batches


def _divided(config: Mapping[str, Any], world: int) -> int:
    """Return the same number, without a check of ``limit_train_batches``. Raises ConfigError."""
    total, batch = config["global_batch"], config["data"].get("batch_size")
    if type(total) is not int:
        raise ConfigError(f"global_batch must be a whole number of sequences, got {total!r}")
    within(1, global_batch=total)
    if batch is None:
        raise ConfigError(f"data.batch_size must be given: it divides the steps of global_batch={total} sequences")
    at_once = world * batch
    if total % at_once == 0:
        return total // at_once
    fitting = [f"data.batch_size={max(n for n in range(1, batch + 1) if total // world % n == 0)}"]
    fitting = fitting if total % world == 0 else []
    fitting.append(
        f"global_batch={' or '.join(str(n * at_once) for n in (total // at_once, total // at_once + 1) if n)}"
    )
    raise ConfigError(
        f"global_batch must be a multiple of {at_once} on {world} device{'s' * (world > 1)} with "
        f"data.batch_size={batch}, got {total}; use {' or '.join(fitting)}"
    )


def meet(config: Mapping[str, Any]) -> None:
    """Connect the ranks that torchrun or srun has started, so that they can agree before any of them writes a file.

    Lightning would connect them when training begins. Ranks that Lightning starts itself come later: until then one
    process prepares everything.

    Raises ConfigError if a rank does not connect in time.
    """
    chosen = trainer_arguments(config)
    environment, strategy = _environment(chosen), chosen.get("strategy")
    if environment is None or environment.world_size() == 1 or torch.distributed.is_initialized():
        return
    options = strategy if isinstance(strategy, Mapping) else {}
    backend = _with_backend(options, chosen.get("accelerator"))["process_group_backend"]
    devices = chosen.get("devices", "auto")
    are_the_first = devices == "auto" or isinstance(devices, int)
    os.environ |= {"MASTER_ADDR": environment.main_address, "MASTER_PORT": str(environment.main_port)}
    patience = (
        instantiate(options["timeout"], "trainer.strategy.timeout") if options.get("timeout") else default_pg_timeout
    )
    try:
        torch.distributed.init_process_group(
            backend,
            rank=environment.global_rank(),
            world_size=environment.world_size(),
            timeout=patience,
            device_id=torch.device("cuda", environment.local_rank()) if "nccl" in backend and are_the_first else None,
        )
    except torch.distributed.DistError as error:
        raise ConfigError(
            f"some of the {environment.world_size()} ranks did not connect within {patience}: look for an error in "
            f"the output of each rank, and check that it reaches {environment.main_address}:{environment.main_port}"
        ) from error


def _environment(chosen: Mapping[str, Any]) -> ClusterEnvironment | None:
    """Return the launcher that started this process with others; None if it runs alone or Lightning starts them."""
    if TorchElasticEnvironment.detect():
        return TorchElasticEnvironment()
    alone = not chosen.get("strategy") and chosen.get("devices", "auto") == 1 and chosen.get("num_nodes", 1) == 1
    return SLURMEnvironment(auto_requeue=False) if SLURMEnvironment.detect() and not alone else None


def refuse_divided(trainer: lightning.Trainer, task: LanguageModeling) -> None:
    """Raise ConfigError for features that need the whole model on every rank, if ranks have shards of it."""
    if not isinstance(trainer.strategy, Sharded):
        return
    if not task.optimizer.shardable:
        raise ConfigError(
            "optimizer must be adamw with trainer=fsdp, which divides matrices, got "
            f"{type(task.optimizer).__name__.lower()}; or use trainer=ddp"
        )
    among = {"trainer.context": trainer.strategy.context, "trainer.strategy.experts": trainer.strategy.experts}
    for name, count in among.items():
        if count > 1 and task.compiles:
            raise ConfigError(
                f"compile must be false with {name}={count}, an exchange that a compiler cannot follow, got true"
            )
    parts = [part for part in task.model.modules() if isinstance(part, Experts)]
    refuse_shared_experts(parts, trainer.strategy.experts, trainer.world_size)
    if not find(trainer, Latest):
        raise ConfigError(
            "callbacks.latest must be kept with trainer=fsdp, which ends a run with its last checkpoint, got null"
        )


def refuse_shared_experts(parts: Sequence[Experts], ranks: int, world: int) -> None:
    """Raise ConfigError for experts that ``ranks`` neighbours of all ``world`` ranks cannot divide."""
    ways = ways_to_divide(parts, world)
    if ranks not in ways:
        raise ConfigError(
            f"trainer.strategy.experts must be {' or '.join(map(str, ways))}, to divide the experts among {world} "
            f"devices, got {ranks}"
        )


def trainer_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the Trainer. Raises ConfigError for an argument that a run does not take."""
    chosen = dict(config["trainer"])
    context, strategy = chosen.pop("context", None), chosen.get("strategy")
    divides = strategy.get("context", 1) if isinstance(strategy, Mapping) else 1
    if context is not None and context != divides:  # the strategy has it from there, in trainer=context
        raise ConfigError(
            f"trainer.context must be that of trainer.strategy ({divides}), got {context}; use trainer=context "
            f"trainer.context={context} without a number in trainer.strategy"
        )
    refuse_arguments(chosen)
    chosen["log_every_n_steps"] = min(chosen.get("log_every_n_steps") or 50, chosen["max_steps"])
    if chosen.get("accelerator") == "auto" and not torch.cuda.is_available():
        chosen["accelerator"] = "cpu"  # on a Mac Lightning would take MPS
    if chosen.get("precision") == "auto":
        chosen["precision"] = best_precision(chosen.get("accelerator"))
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun has started the processes already, and says how many
        devices, all_ranks = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
        chosen |= {"devices": devices, "num_nodes": all_ranks // devices}
    if "process_group_backend" in (chosen.get("strategy") or ""):
        chosen["strategy"] = _with_backend(chosen["strategy"], chosen.get("accelerator"))
    return chosen


def refuse_arguments(chosen: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument of the Trainer that a run does not take, or not with this value."""
    for name, value in chosen.items():
        if name in INSTEAD and value is not None:
            raise ConfigError(f"trainer.{name} must be left out, got {value!s:.40}; use {INSTEAD[name]}")
    # Lightning would train uphill, for ever or not at all, and not say so.
    steps = {name: chosen.get(name) for name in ("max_steps", "log_every_n_steps", "val_check_interval")}
    within(1, **{f"trainer.{name}": value for name, value in steps.items() if isinstance(value, int | float)})
    within(0, **{"trainer.gradient_clip_val": chosen.get("gradient_clip_val")})
    strategy = chosen.get("strategy")
    if not (strategy is None or strategy in STRATEGIES or isinstance(strategy, Mapping)):
        raise ConfigError(
            f"trainer.strategy must be chosen by trainer=ddp, trainer=fsdp or trainer=context, got {strategy!s:.40}"
        )
    interval, accelerator = chosen.get("val_check_interval"), chosen.get("accelerator")
    if type(interval) is not int:
        raise ConfigError(
            f"trainer.val_check_interval must be a whole number of steps, such as 100, got {interval!s:.40}"
        )
    if chosen.get("limit_train_batches") == 0:
        raise ConfigError("trainer.limit_train_batches must be above 0, or left out, got 0")
    if accelerator in ("mps", "tpu", "hpu", "xla"):
        raise ConfigError(f"trainer.accelerator must be cpu, gpu or auto, got {accelerator}")


def _with_backend(strategy: Mapping[str, Any], accelerator: str | None) -> dict[str, Any]:
    """Return a strategy with its backend. With GPUs, objects and checkpoints go from host to host by gloo, so no GPU
    waits for them."""
    gpu = accelerator != "cpu" and torch.cuda.is_available()
    chosen = strategy.get("process_group_backend") or ("cpu:gloo,cuda:nccl" if gpu else "gloo")
    return {**strategy, "process_group_backend": chosen}


def best_precision(accelerator: str | None = None) -> str:
    """Return ``bf16-mixed`` on a GPU that computes in bfloat16, else ``32-true``."""
    gpu = accelerator != "cpu" and torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16-mixed" if gpu else "32-true"
