"""TensorBoard's HPARAMS tab: the same columns in every run, so that it can compare them.

The tab takes its columns from the record of one run and ignores a second record of the same run. So all keys are
written at the start of every run, metrics as NaN; their values arrive later as scalars of the same name. A run that is
continued has its record: metrics that are NaN at step 0 once more would draw a line back through the chart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import lightning
from lightning.pytorch.loggers import TensorBoardLogger

METRICS = (
    "train/loss",
    "train/tokens_per_second",
    "train/peak_memory_gib",
    "train/indexer_recall",
    "val/loss",
    "val/perplexity",
    "val/bits_per_byte",
    "val/accuracy",
    "overlap/mean",
)
COLUMNS = {  # column: where in the configuration; what a model does not have becomes "-"
    "experiment": "name",
    "arm": "arm",
    "seed": "seed",
    "model": "choices/model",
    "size": "choices/size",
    "data": "choices/data",
    "encoder_reading": "choices/model/encoder_reading",
    "retriever": "choices/model/retriever",
    "stage_query": "choices/model/stage_query",
    "writer": "choices/model/writer",
    "state_reader": "choices/model/state_reader",
    "residual": "choices/model/residual",
    "feed_forward": "choices/model/feed_forward",
    "indexer_training": "choices/model/indexer_training",
    "stages": "model/stages",
    "state_size": "model/state_size",
    "window": "size/window",
    "top_k": "size/top_k",
    "steps": "trainer/max_steps",
    "context": "data/context",
    "batch_size": "data/batch_size",
    "global_batch": "global_batch",
    "learning_rate": "optimizer/learning_rate",
    "weight_decay": "optimizer/weight_decay",
    "precision": "trainer/precision",
}


class Hyperparameters(lightning.Callback):
    """Writes the record when training starts.

    Args:
        config: the composed configuration, plain containers.
        parameters: how many parameters the model has.
    """

    def __init__(self, config: Mapping[str, Any], parameters: int) -> None:
        self.values = {column: look_up(config, path) for column, path in COLUMNS.items()} | {"parameters": parameters}

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Writes all hyper-parameters, and all metrics as not yet measured."""
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and not getattr(logger, "continues", False):
                logger.log_hyperparams(self.values, dict.fromkeys(METRICS, math.nan))


def look_up(config: Mapping[str, Any], path: str) -> str | int | float | bool:
    """The value at a path; lists and a missing value as text, since the tab knows numbers, booleans and text."""
    head, _, rest = path.partition("/")
    if head == "choices":
        value = config.get("choices", {}).get(rest)
    else:
        value = config.get(head)
        for key in rest.split("/") if rest else []:
            value = value.get(key) if isinstance(value, Mapping) else None
    if value is None:
        return "-"
    return value if isinstance(value, str | int | float | bool) else str(value)
