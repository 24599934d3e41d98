"""The paper's experiments as ``train.py`` composes them, run by run, on given GPUs: what an optimiser step is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gsm.config.check import ConfigError
from gsm.config.compose import compose
from gsm.experiments.trainers import batches_a_step
from gsm.experiments.trials import Experiment, Training

PAPERS = (
    "experiment=paper_main size=0p5b",
    "experiment=paper_main size=1p5b",
    "experiment=paper_main size=8b_a1p5b",
    "experiment=paper_long_context size=8b_a1p5b",
    "experiment=paper_ablate_indexer size=0p5b",
    "experiment=paper_cot size=1p5b",
)


@dataclass(frozen=True)
class Recipe:
    """A training run of an experiment on so many GPUs.

    Attributes:
        experiment, size, run: which one.
        layout, gpus: ``8``, or nodes and the GPUs of each, ``2x8``; and how many that are.
        batch_size, context: sequences on a GPU at a time, and tokens of each.
        steps: of the optimiser.
        batches: of every GPU in a step; None: a step cannot be divided, see ``refused``.
        refused: what the run then says.
        models: the variants of ``model`` that arms train.
        recompute: whether activations are recomputed.
    """

    experiment: str
    size: str
    run: str
    layout: str
    gpus: int
    batch_size: int
    context: int
    steps: int
    batches: int | None
    refused: str
    models: tuple[str, ...]
    recompute: bool

    @property
    def sequences(self) -> int:
        """Of a step, on all GPUs together."""
        return (self.batches or 0) * self.batch_size * self.gpus


def composed(recipes: Sequence[str], layouts: Sequence[str]) -> Iterator[Recipe]:
    """Every training run of these experiments on each layout.

    Args:
        recipes: overrides with blanks between them, such as ``experiment=paper_main size=1p5b``.
        layouts: as in ``Recipe``.

    Raises:
        ConfigError: an experiment that cannot be composed.
        ValueError: a layout that is none.
    """
    wrong = [layout for layout in layouts if not all(part.isdecimal() and int(part) for part in layout.split("x"))]
    if wrong:
        raise ValueError(f"layouts has '{wrong[0]}', but takes GPUs such as 8, or nodes and GPUs of each such as 2x8")
    for recipe in recipes:
        experiment = Experiment(compose(recipe.split()), recipe.split())
        jobs = [(name, job) for trial in experiment.trials() for name, job in trial.jobs.items()]
        runs: dict[str, list[Any]] = {}
        for name, job in jobs:
            if isinstance(job, Training):
                runs.setdefault(name, []).append(job.config)
        for name, configs in runs.items():
            for layout in layouts:
                yield _recipe(name, configs, layout)


def _recipe(run: str, configs: Sequence[Any], layout: str) -> Recipe:
    config = configs[0]
    nodes, _, each = layout.rpartition("x")
    gpus, batches, refused = int(nodes or 1) * int(each), None, ""
    try:
        batches = batches_a_step(config, gpus)
    except ConfigError as error:
        refused = str(error)
    return Recipe(
        experiment=str(config["name"]),
        size=str(config["choices"]["size"]),
        run=run,
        layout=layout,
        gpus=gpus,
        batch_size=config["data"]["batch_size"],
        context=config["data"]["context"],
        steps=config["trainer"]["max_steps"],
        batches=batches,
        refused=refused,
        models=tuple(dict.fromkeys(str(one["choices"]["model"]) for one in configs)),
        recompute=config["model"]["recompute"] is True,
    )
