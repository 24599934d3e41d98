"""What a run takes at the very least, before anything of it is made: memory of one step, and time of all of them.

Numbers are lower bounds, of arithmetic as fast as no machine has it and of what nothing can do without, so that what
is refused could not have been trained here.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from hydra.errors import InstantiationException

from gsm.config.check import ConfigError
from gsm.config.load import instantiate_model
from gsm.costs.model import cost
from gsm.costs.room import available_bytes
from gsm.data.encode import cores
from gsm.experiments import trainers
from gsm.layers.block import Block
from gsm.models.base import LanguageModel

FLOPS = {"cpu": 2e11, "cuda": 2e15}  # a second: of a core, of a GPU
LEAST = 4  # of what products read and write, so many times less is kept for the backward pass: 0.7 to 0.9 on a CPU
PAUSE = 1e-4  # seconds that a batch takes, however small it is
DAY = 24 * 3600
LONG, ENDLESS = 30 * DAY, 36525 * DAY


def refuse_endless(config: Mapping[str, Any], world: int = 1) -> str:
    """A sentence on a run that takes more than a month; empty for others, and where the data do not say their sizes.

    Args:
        config: a composed configuration.
        world: processes among which sequences are shared out.

    Raises ConfigError for a run that takes more memory than there is, or more than a hundred years.
    """
    if not config["data"].keys() >= {"batch_size", "context"}:
        return ""
    chosen = trainers.settings(config)
    gpu = chosen.get("accelerator") != "cpu" and torch.cuda.is_available()
    try:
        with torch.device("meta"):
            model = instantiate_model(config)
    except ConfigError as error:
        if "verflow" not in str(error):
            raise
        raise ConfigError(
            "size or model asks for what no machine has: a number of it is too large to count with"
        ) from error
    except NotImplementedError:  # a part of one's own that takes values: nothing is known of it
        return ""
    except (RuntimeError, OverflowError, MemoryError, InstantiationException) as error:
        if isinstance(error.__cause__, NotImplementedError):
            return ""
        said = str(error.__cause__ or error).partition("\n")[0].rstrip(".")
        raise ConfigError(f"size or model asks for what no machine has: {said}") from error
    strategy = chosen.get("strategy")
    context = strategy.get("context", 1) if isinstance(strategy, Mapping) else 1
    divided = world * context if isinstance(strategy, Mapping) else 1
    _refuse_memory(config, chosen, model, gpu, divided, context)
    return _time(config, trainers.batches_a_step(config, world), chosen["max_steps"], model, gpu, context)


def _refuse_memory(
    config: Mapping[str, Any], chosen: Mapping[str, Any], model: LanguageModel, gpu: bool, divided: int, pieces: int
) -> None:
    parameters = sum(p.numel() for p in model.parameters())
    half = str(chosen.get("precision")) in ("bf16-true", "16-true")
    whole = 3 * (2 if half else 4) * parameters  # weights, gradients and one moment; where ranks divide them, a share
    own, there = _activations(config, chosen, model, gpu) / pieces, _there(gpu)
    need = whole / divided + own
    if need > there:
        batch, context = config["data"]["batch_size"], config["data"]["context"]
        enough = math.ceil(whole / (there - own)) if gpu and own < there else 0
        raise ConfigError(
            f"a step with data.batch_size {batch} of data.context {context} and a model of {parameters:,} parameters "
            f"takes at least {need / 2**30:,.3g} GiB, but {there / 2**30:,.3g} GiB are there: choose a smaller size=, "
            "or smaller numbers of model, size or data"
            + (f"; or trainer=fsdp on {enough} such GPUs at the very least" if enough else "")
        )


def _activations(config: Mapping[str, Any], chosen: Mapping[str, Any], model: LanguageModel, gpu: bool) -> float:
    """Bytes of a batch on its way: its ids, what enters every layer, and without kernels of ours, who sees whom."""
    batch, context = config["data"]["batch_size"], config["data"]["context"]
    layers = sum(isinstance(part, Block) for part in model.modules())
    itemsize = 4 if str(chosen.get("precision", "32")).startswith("32") else 2
    each = 3 * 8 + itemsize * model.dim * layers
    if not gpu:
        windows = (getattr(part, name, 0) for part in model.modules() for name in ("window", "window_size"))
        each += 8 * max(window for window in windows if type(window) is int)
    bound = batch * context * each
    if config["model"].get("recompute") is not False:
        return bound
    with contextlib.suppress(ValueError):  # a part whose cost is not known
        dtype = torch.float32 if itemsize == 4 else torch.bfloat16
        moved = cost(model).forward_bytes(context, dtype=dtype, batch=batch)
        bound = max(bound, sum(size for part, size in moved.items() if part.endswith("activations")) / LEAST)
    return bound


def _there(gpu: bool) -> float:
    """Bytes that this process may still take."""
    if gpu:
        return torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", 0))).total_memory
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    free = available_bytes(torch.device("cpu"))
    if limit == resource.RLIM_INFINITY:
        return free
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return min(free, limit - taken)


def _time(config: Mapping[str, Any], batches: int, steps: int, model: LanguageModel, gpu: bool, pieces: int) -> str:
    batch, context = config["data"]["batch_size"], config["data"]["context"]
    try:
        flops = cost(model).training_flops(context).total()
    except ValueError:  # a part whose cost is not known
        flops = 0
    speed = FLOPS["cuda"] if gpu else FLOPS["cpu"] * cores()
    seconds = steps * batches * max(PAUSE, batch * flops / speed / pieces)
    said = (
        f"trainer.max_steps {steps} of {batches} batches (global_batch) of data.batch_size {batch} and data.context "
        f"{context}"
    )
    if seconds > ENDLESS:
        raise ConfigError(
            f"{said} take at least {seconds / ENDLESS * 100:,.3g} years: choose smaller numbers, or size="
        )
    return f"{said} take at least {seconds / DAY:,.0f} days." if seconds > LONG else ""
