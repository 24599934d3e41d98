"""TensorBoard's view of a run beside its curves: charts that compare runs, and a table of hyper-parameters."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning
import numpy as np
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData  # pyright: ignore # made at run time
from torch import Tensor
from torch.utils.tensorboard.summary import hparams

from gsm.checkpoint import newest, step_of

# The CUSTOM SCALARS tab: tags that share a chart, of all runs at once. tab -> chart -> tags, as regular
# expressions. A run adds the charts for which it has something. TensorBoard 2.21 drops charts that a third run adds to
# a tab which the second has begun: so a model has all charts of a tab but the first, or none.
LAYOUT = {
    "loss": {
        "bits per byte of held-out text": ["val/bits_per_byte$"],
        "held-out questions answered (fraction)": ["val/accuracy$"],
        "held-out loss (nats per token)": ["val/loss$"],
        "loss in training (nats per token)": ["train/loss$"],
    },
    "speed": {
        "tokens per second": ["train/tokens_per_second$"],
        "peak memory (GiB)": ["train/peak_memory_gib$"],
    },
    "state": {
        "loss added without the state (nats per token)": ["val/without_state$"],
        "effective rank of the state": ["val/state/effective_rank$"],
        "length of z": ["val/state/norm$"],
        "weight of the sink by decoder layer": [r"val/sink/decoder\d+$"],
    },
    "stages": {
        "loss added without a stage (nats per token)": [r"val/without_stage\d+$"],
        "share of the state by way: encoder, stages": [r"val/state/share/\w+$"],
        "length of what was retrieved, up to each stage": [r"train/retrieved_norm/stage\d+$"],
    },
    "stages that select for themselves": {
        "overlap with the encoder, of a few sequences": [r"val/overlap_sample/stage\d+$"],
    },
    "indexers": {
        "recall by layer and stage": [r"train/indexer_recall/(encoder|decoder|stage)\d+$"],
    },
}
METRICS = (  # columns of the HPARAMS tab, in this order after the run's own first; the first five are shown at first
    "val/loss",
    "val/without_state",
    "val/overlap/mean",
    "train/tokens_per_second",
    "train/loss",
    "train/indexer_recall",
    "train/peak_memory_gib",
    "val/perplexity",
    "val/bits_per_byte",  # first for text, as accuracy is for questions; the other one has an empty column
    "val/accuracy",
)
FIRST = ("arm", "seed", "parameters", "experiment", "steps")  # columns that TensorBoard 2.21 shows at first: five
OF_ARMS = ("arm", "seed")  # columns of an experiment with arms, before those in which they differ
COLUMNS = {  # columns of the HPARAMS tab: their path in the configuration; a missing value becomes "-"
    "experiment": "name",
    "arm": "arm",
    "seed": "seed",
    "model": "choices.model",
    "size": "choices.size",
    "data": "choices.data",
    "encoder_layer": "choices.model/encoder_layer",
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
    """Lightning's logger, with charts that compare runs.

    Of a run that goes on, TensorBoard hides what was logged after the last saved step. The first part of a run begins
    with such a mark, too: TensorBoard's slower loader (``--load_fast=false``, and where there is no fast one) takes the
    first mark that it meets for the beginning of the run, and hides nothing there.

    Args:
        folder: of the run.
        options: of Lightning's logger, and of the ``SummaryWriter``.
    """

    def __init__(self, folder: str | os.PathLike[str], **options: Any) -> None:
        last = newest(Path(folder))
        chosen = {"name": "", "version": "", "default_hp_metric": False, **options}
        super().__init__(str(folder), **chosen, purge_step=step_of(last) + 1 if last else 0)
        self._tags: set[str] = set()
        self._put_first()

    @rank_zero_only
    def _put_first(self) -> None:
        """Let TensorBoard read the earlier parts of a run first.

        It reads event files by the time in their names. Where the clock was ahead, or a part began in this second, the
        earlier files are named again, in their order.
        """
        files = sorted(Path(self.log_dir).glob("events.out.tfevents.*"))
        if files and int(files[-1].name.split(".")[3]) >= int(time.time()):
            for number, file in enumerate(files):
                file.rename(file.with_name(f"events.out.tfevents.{number:010d}.{file.name.split('.', 4)[4]}"))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write points, and the layout of the charts for which there are some, again when there are more. TensorBoard
        shows the last layout of a run, and merges the layouts of all runs."""
        super().log_metrics(metrics, step)
        before, self._tags = self._tags, {*self._tags, *metrics}
        if (layout := charts(self._tags)) != charts(before):
            self.experiment.add_custom_scalars(layout)

    def log_image(self, key: str, images: list[np.ndarray], step: int) -> None:
        """Write pictures of uint8 [Y, X, C], as Lightning's logger of Weights & Biases does."""
        for pixels_YXC in images:
            self.experiment.add_image(key, pixels_YXC, step, dataformats="HWC")

    def log_histogram(self, name: str, value_N: Tensor, step: int) -> None:
        """Write the distribution of numbers."""
        self.experiment.add_histogram(name, value_N, step)


class Hyperparameters(lightning.Callback):
    """Write the hyper-parameters and a text about the run when training starts; of the HPARAMS record, TensorBoard
    keeps the first one of a run.

    Args:
        config: the composed configuration, plain containers.
        parameters: number of parameters of the model.
        differing: keys of the configuration in which the arms of the experiment differ; a choice without ``choices.``.
        text: about the run, Markdown: the TEXT tab has it.
        metric: the first metric of the HPARAMS tab.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        parameters: int,
        differing: Collection[str] = (),
        text: str = "",
        metric: str = METRICS[0],
    ) -> None:
        column_of = {path.removeprefix("choices."): column for column, path in COLUMNS.items()}
        columns = COLUMNS | {key: key for key in differing if key not in column_of}
        self.values = {column: look_up(config, path) for column, path in columns.items()} | {"parameters": parameters}
        self.values["seed"] = str(self.values["seed"])  # a name, not an amount: TensorBoard writes 1 as 1.0000
        self.differing, self.text = tuple(column_of.get(key, key) for key in differing), text
        self.metric = metric

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Write all hyper-parameters, the names of all metrics, and the text."""
        for logger in trainer.loggers if trainer.is_global_zero else ():
            logger.log_hyperparams(self.values)
        for logger in _boards(trainer):
            for record in records(self.values, self.differing, self.metric):
                logger.experiment.file_writer.add_summary(record)
            if self.text:
                logger.experiment.add_text("run", self.text, trainer.global_step)


def charts(tags: Iterable[str]) -> dict[str, dict[str, list[Any]]]:
    """Return the part of the layout for which there are tags, as ``SummaryWriter.add_custom_scalars`` takes it."""
    tags = list(tags)
    layout = {
        tab: {
            name: ["Multiline", patterns]
            for name, patterns in of.items()
            if any(re.match(pattern, tag) for pattern in patterns for tag in tags)
        }
        for tab, of in LAYOUT.items()
    }
    return {tab: of for tab, of in layout.items() if of}


def records(values: Mapping[str, Any], differing: Collection[str] = (), metric: str = METRICS[0]) -> list[Any]:
    """Return what the HPARAMS tab reads of a run: its columns and values, as torch's ``add_hparams`` writes them.

    The tab takes its columns from the record of a single run, the first that it meets. So all runs of an experiment
    have the same. With arms these are ``OF_ARMS`` and the columns in which arms differ: the others are constant. Else
    the columns in ``FIRST`` are marked as different among runs, and the others follow these. Metrics have no value in
    it, and a run without the metric leaves its cell empty. Lightning's ``log_hyperparams(values, metrics)`` marks no
    column, and writes a point for every metric. ``metric`` comes first, where a narrow window still shows it.
    """
    columns, start, end = hparams(dict(values), dict.fromkeys((metric, *METRICS)))
    plugin = columns.value[0].metadata.plugin_data
    content = HParamsPluginData.FromString(plugin.content)
    infos = {info.name: info for info in content.experiment.hparam_infos}
    first = tuple(dict.fromkeys((*OF_ARMS, *differing))) if differing else FIRST
    for name, info in infos.items():
        info.differs = name in first
    shown = [infos[name] for name in first] if differing else [*infos.values()]
    content.experiment.ClearField("hparam_infos")
    content.experiment.hparam_infos.extend(shown)
    plugin.content = content.SerializeToString()
    return [columns, start, end]


def look_up(config: Mapping[str, Any], path: str) -> str | int | float | bool:
    """Return the value at a path; lists and a missing value as text, since the tab knows numbers, booleans and text."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    if value is None:
        return "-"
    return value if isinstance(value, str | int | float | bool) else str(value)


def _boards(trainer: lightning.Trainer) -> list[TensorBoardLogger]:
    """Return the TensorBoard loggers, on the rank that writes."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero]
