"""How long a run will take here: a few batches of it are timed before it begins.

B sequences, T tokens.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import torch

from gsm.config.check import ConfigError
from gsm.config.load import instantiate, instantiate_model
from gsm.costs.model import cost
from gsm.experiments import trainers
from gsm.models.base import LanguageModel

SHORT = 20  # steps: so few are over before it could be said how long they take
MOST = {
    "cpu": 2e11,
    "cuda": 1e14,
}  # floating-point operations of what is timed: a second or two, of what computes slowly
FORWARD = 1 / 3  # of the time of a batch, of which two thirds are the backward pass
LENGTHS = 8  # at so many points of a run in which sequences grow
MINUTE, HOUR, DAY = 60, 3600, 24 * 3600


def seconds(config: Mapping[str, Any], begin: int = 0, world: int = 1, gpu: bool = True) -> float | None:
    """How long training and validation take from a step on, by a batch of random tokens timed now, with the optimiser.

    What comes before and after is left out: starting, reading the data, counting n-grams. Draws random numbers.

    Args:
        config: a composed configuration of a single run.
        begin: steps that are done already.
        world: ranks among which sequences are shared out; each is taken to be as fast as this process alone.
        gpu: whether a GPU may be asked; a process that waits for others leaves it to them.

    Returns:
        Seconds; None where they are fewer than it is worth asking for, where the data do not say their sizes, for a
        model that is compiled or divided among ranks, and where no step of it can be computed.
    """
    chosen, data = trainers.settings(config), config["data"]
    steps, strategy = chosen["max_steps"] - begin, chosen.get("strategy")
    divided = isinstance(strategy, Mapping) and "Sharded" in str(strategy.get("_target_"))
    if steps < SHORT or not data.keys() >= {"batch_size", "context"} or config["compile"] or divided:
        return None
    on_gpu = chosen.get("accelerator") != "cpu" and torch.cuda.is_available()
    if on_gpu and not gpu:
        return None
    try:
        each, forward = _timed(config, chosen, world, torch.device("cuda" if on_gpu else "cpu"))
    except (ConfigError, RuntimeError, ValueError, TypeError):  # what is wrong with it, the run says
        return None
    finally:
        if on_gpu:
            torch.cuda.empty_cache()
    interval, count = chosen.get("val_check_interval"), data.get("validation_sequences") or 0
    validations, whole = -(-steps // interval) if interval else 1, count / data["batch_size"] / world
    limit = chosen.get("limit_val_batches")
    batches = whole if limit is None else limit * whole if isinstance(limit, float) else min(limit, whole)
    return steps * each + validations * batches * forward


def _timed(
    config: Mapping[str, Any], chosen: Mapping[str, Any], world: int, device: torch.device
) -> tuple[float, float]:
    """Seconds of one step, and of a batch that is only validated."""
    model = instantiate_model(config).to(device).train()
    lengths, batch_size = _lengths(config["data"]), config["data"]["batch_size"]
    least, most = min(lengths), max(lengths)
    step = _Step(model, config, str(chosen.get("precision", "32")))
    step.time(1, least)  # the first one sets up what later ones find
    long = batch = step.time(batch_size, most)
    if least < most:
        short = step.time(batch_size, least)
        batch = short + (long - short) / (most - least) * (sum(lengths) / len(lengths) - least)
    return trainers.batches_a_step(config, world) * batch + step.optimizer(), FORWARD * long


def told(found: float | None) -> str:
    """So many seconds in words, roughly; empty below a minute, and for what nobody knows."""
    if found is None or found < MINUTE:
        return ""
    if found < 1.5 * HOUR:
        to = 5 if found > 15 * MINUTE else 1
        minutes = to * round(found / MINUTE / to)
        return f"about {minutes} minutes" if minutes > 1 else "about a minute"
    return f"about {found / HOUR:.2g} hours" if found < 2 * DAY else f"about {found / DAY:,.0f} days"


class _Step:
    """What one step consists of, on random tokens."""

    def __init__(self, model: LanguageModel, config: Mapping[str, Any], precision: str) -> None:
        self.model, self.device = model, next(model.parameters()).device
        half = torch.bfloat16 if precision.startswith("bf16") else torch.float16 if precision.startswith("16") else None
        if half and precision.endswith("true"):
            model.to(half)
        self.optimiser = instantiate(config["optimizer"], "optimizer").build(model.parameter_groups())
        mixed = half and precision.endswith("mixed")
        self.context = torch.autocast(self.device.type, half) if mixed else contextlib.nullcontext()

    def time(self, batch: int, length: int) -> float:
        """Seconds of forward and backward; of what would take long, a part is timed and the whole counted up."""
        sequences, tokens = batch, length
        while self._flops(sequences, tokens) > MOST[self.device.type] and (sequences > 1 or tokens > 64):
            sequences, tokens = (sequences // 2, tokens) if sequences > 1 else (1, tokens // 2)
        token_BT = torch.randint(self.model.vocabulary, (sequences, tokens), device=self.device)
        begin = self._now()
        with self.context:
            out = self.model.forward(token_BT, targets=token_BT.roll(-1, 1))
        (out.loss + sum(out.losses.values())).backward()  # pyright: ignore[reportOperatorIssue]
        return (self._now() - begin) * batch * length / (sequences * tokens)

    def optimizer(self) -> float:
        """Seconds of the optimiser."""
        self.optimiser.step()  # the first one makes its state
        begin = self._now()
        self.optimiser.step()
        return self._now() - begin

    def _flops(self, sequences: int, tokens: int) -> float:
        try:
            return sequences * cost(self.model).training_flops(tokens).total()
        except ValueError:  # a part whose cost is not known
            return 0.0

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _lengths(data: Mapping[str, Any]) -> list[int]:
    """Those of the sequences of a run, one after the other: all alike, in turn, or growing."""
    if data.get("shortest"):
        task = instantiate(data, "data")
        return [task.length((i + 0.5) / LENGTHS) for i in range(LENGTHS)]
    return list(data.get("lengths") or [data["context"]])
