"""What TensorBoard shows of a run beside its curves: events that a resumed run continues, charts that compare runs, and
the same hyper-parameters in every run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.loggers import TensorBoardLogger

from gsm.training.resume import hide_after

# The CUSTOM SCALARS tab: what belongs together on one chart, of all runs at once. tab -> chart -> tags, as regular
# expressions. Tags that a model does not log are left out of its lines.
LAYOUT = {
    "loss": {
        "training and validation": ["train/loss$", "val/loss$"],
        "bits per byte": ["val/bits_per_byte$"],
        "accuracy": ["val/accuracy$"],
    },
    "retrieval": {
        "indexer recall by stage": [r"train/indexer_recall/stage\d+$"],
        "indexer recall by layer": [r"train/indexer_recall/(encoder|decoder)\d+$"],
        "overlap of stages with the encoder, of a few sequences": [r"overlap_sample/stage\d+$"],
        "length of what was retrieved, up to each stage": [r"train/retrieved_norm/stage\d+$"],
    },
    "state": {
        "length of z": ["state/norm$"],
        "effective rank of the state": ["state/effective_rank$"],
    },
    "speed": {
        "tokens per second": ["train/tokens_per_second$"],
        "peak memory in GiB": ["train/peak_memory_gib$"],
    },
}
METRICS = (  # of the HPARAMS tab
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
COLUMNS = {  # of the HPARAMS tab: where in the configuration; what a model does not have becomes "-"
    "experiment": "name",
    "arm": "arm",
    "seed": "seed",
    "model": "choices.model",
    "size": "choices.size",
    "data": "choices.data",
    "encoder_reading": "choices.model/encoder_reading",
    "retriever": "choices.model/retriever",
    "stage_input": "choices.model/stage_input",
    "stage_query": "choices.model/stage_query",
    "writer": "choices.model/writer",
    "decoder_start": "choices.model/decoder_start",
    "state_reader": "choices.model/state_reader",
    "residual": "choices.model/residual",
    "feed_forward": "choices.model/feed_forward",
    "indexer_training": "choices.model/indexer_training",
    "stages": "model.stages",
    "state_size": "model.state_size",
    "window": "size.window",
    "top_k": "size.top_k",
    "steps": "trainer.max_steps",
    "context": "data.context",
    "batch_size": "data.batch_size",
    "global_batch": "global_batch",
    "learning_rate": "optimizer.learning_rate",
    "weight_decay": "optimizer.weight_decay",
    "precision": "trainer.precision",
}


class TensorBoard(TensorBoardLogger):
    """Lightning's logger, which can go back to a step.

    Attributes:
        continues: the folder holds the events of an earlier part of this run, hyper-parameters included.
    """

    continues: bool = False

    def rewind(self, step: int) -> None:
        """Hides what was logged after ``step``; has to be called before anything is logged."""
        self.continues = any(Path(self.log_dir).glob("events.out.tfevents.*"))
        hide_after(self, step)


class Charts(lightning.Callback):
    """Writes the layout once a run, when its training starts; TensorBoard merges those of all runs."""

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Gives every TensorBoard logger the layout."""
        layout = {tab: {name: ["Multiline", tags] for name, tags in of.items()} for tab, of in LAYOUT.items()}
        for logger in _beginning(trainer):
            logger.experiment.add_custom_scalars(layout)


class Hyperparameters(lightning.Callback):
    """Writes the HPARAMS record when training starts for the first time: the same columns in every run.

    The tab takes its columns from the record of one run and ignores a second record of the same run. So all keys are
    written at the start of every run, metrics as NaN; their values arrive later as scalars of the same name.

    Args:
        config: the composed configuration, plain containers.
        parameters: how many parameters the model has.
    """

    def __init__(self, config: Mapping[str, Any], parameters: int) -> None:
        self.values = {column: look_up(config, path) for column, path in COLUMNS.items()} | {"parameters": parameters}

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Writes all hyper-parameters, and all metrics as not yet measured."""
        for logger in _beginning(trainer):
            logger.log_hyperparams(self.values, dict.fromkeys(METRICS, math.nan))


def look_up(config: Mapping[str, Any], path: str) -> str | int | float | bool:
    """The value at a path; lists and a missing value as text, since the tab knows numbers, booleans and text."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    if value is None:
        return "-"
    return value if isinstance(value, str | int | float | bool) else str(value)


def _beginning(trainer: lightning.Trainer) -> Iterator[TensorBoardLogger]:
    """The TensorBoard loggers of a run that is not continued: a second record at step 0 would draw lines back to it."""
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger) and not getattr(logger, "continues", False):
            yield logger
