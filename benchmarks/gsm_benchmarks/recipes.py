"""The paper's experiments as they are composed, run by run, on given GPUs: what a step is, and whether it fits.

Composed by ``gsm.experiments``, as ``train.py`` would; memory by the arithmetic of ``gsm_benchmarks.plan``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gsm.config.check import ConfigError
from gsm.config.compose import compose
from gsm.experiments.trainers import batches_a_step
from gsm.experiments.trials import Experiment, Training

from .pictures import short
from .plan import GIB, Assumed, Setting, fits, memory
from .results import Row

COLUMNS = ("experiment", "size", "run", "GPUs", "b", "batches", "sequences a step", "tokens a step", "steps",
           "tokens, 10^9", "GiB, DDP", "GiB, FSDP2", "needs")  # fmt: skip
LARGER = tuple(8 << n for n in range(8))


def rows(recipes: Sequence[str], layouts: Sequence[str], assumed: Assumed, types: Mapping[str, int]) -> Iterator[Row]:
    """A row for every training run of these experiments on each layout.

    Args:
        recipes: overrides with blanks between them, such as ``experiment=paper_main size=1p5b``.
        layouts: GPUs: ``8``, or nodes and GPUs of each: ``2x8``.
        assumed: of the hardware.
        types: bytes in which FSDP2 gathers and reduces, see ``plan.travelling``.

    Raises:
        ConfigError: an experiment that cannot be composed.
    """
    for recipe in recipes:
        given = recipe.split()
        experiment = Experiment(compose(given), given)
        runs: dict[str, dict[str, Any]] = {}  # by name, of every model its configuration
        for trial in experiment.trials():
            for name, job in trial.jobs.items():
                if isinstance(job, Training):
                    runs.setdefault(name, {}).setdefault(job.config["choices"]["model"], job.config)
        for name, configs in runs.items():
            for layout in layouts:
                yield _row(str(experiment.config["name"]), name, configs, layout, assumed, types)


def _row(
    experiment: str, run: str, configs: Mapping[str, Any], layout: str, assumed: Assumed, types: Mapping[str, int]
) -> Row:
    config = next(iter(configs.values()))
    nodes, _, each = layout.rpartition("x")
    gpus, context, b = int(nodes or 1) * int(each), config["data"]["context"], config["data"]["batch_size"]
    row = {"kind": "recipe", "experiment": experiment, "size": config["choices"]["size"], "run": run, "layout": layout}
    row |= {"gpus": gpus, "context": context, "batch_size": b, "steps": config["trainer"]["max_steps"]}
    try:
        batches = batches_a_step(config, gpus)
    except ConfigError as error:
        return {**row, "refused": str(error)}
    settings = {name: _setting(name, one, gpus, types) for name, one in configs.items()}
    bytes_of = {
        sharding: {name: memory(one(sharding, gpus), assumed) for name, one in settings.items()}
        for sharding in ("ddp", "fsdp2")
    }
    held = {sharding: all(fits(parts, assumed) for parts in of.values()) for sharding, of in bytes_of.items()}
    enough = [n for n in LARGER if all(fits(memory(one("fsdp2", n), assumed), assumed) for one in settings.values())]
    return {
        **row,
        "batches": batches,
        "sequences": batches * b * gpus,
        "bytes": {sharding: {name: parts["total"] for name, parts in of.items()} for sharding, of in bytes_of.items()},
        "fits": held,
        "enough": enough[0] if enough else None,
    }


def _setting(name: str, config: Mapping[str, Any], gpus: int, types: Mapping[str, int]) -> Any:
    size, data, recompute = config["choices"]["size"], config["data"], config["model"]["recompute"] is True
    return lambda sharding, n: Setting(name, size, n, sharding, recompute, data["batch_size"], data["context"], **types)


def cells(row: Row) -> tuple[str, ...]:
    """A row of the table."""
    which = row["experiment"], row["size"], row["run"], row["layout"], f"{row['batch_size']} x {short(row['context'])}"
    if "refused" in row:
        return *which, "-", "-", "-", f"{row['steps']:,}", "-", "-", "-", row["refused"]
    tokens = row["sequences"] * row["context"]
    gib = (", ".join(f"{name} {x / GIB:.1f}" for name, x in of.items()) for of in row["bytes"].values())
    counts = str(row["batches"]), str(row["sequences"]), f"{tokens:,}", f"{row['steps']:,}"
    return *which, *counts, f"{tokens * row['steps'] / 1e9:.3g}", *gib, _needs(row)


def _needs(row: Row) -> str:
    if row["fits"]["ddp"]:
        return ""
    if row["fits"]["fsdp2"]:
        return "trainer=fsdp"
    if row["enough"]:
        return f"trainer=fsdp and {row['enough']} GPUs"
    return "larger GPUs: a sequence alone does not fit"
