"""TensorBoard's view of a run beside its curves: events that a resumed run continues, charts that compare runs, and a
table of hyper-parameters."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning
import numpy as np
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData  # pyright: ignore # made at run time
from torch import Tensor
from torch.utils.tensorboard.summary import hparams

from gsm.training.resume import hide_after

# The CUSTOM SCALARS tab: tags that share a chart, of all runs at once. tab -> chart -> tags, as regular
# expressions. A run adds the charts for which it has something. TensorBoard 2.21 drops charts that a third run adds to
# a tab which the second has begun: so a model has all charts of a tab but the first, or none.
LAYOUT = {
    "loss": {
        "bits per byte of held-out text": ["val/bits_per_byte$"],
        "held-out questions answered (fraction)": ["val/accuracy$"],
        "loss in training and held out (nats per token)": ["train/loss$", "val/loss$"],
    },
    "speed": {
        "tokens per second": ["train/tokens_per_second$"],
        "peak memory (GiB)": ["train/peak_memory_gib$"],
    },
    "state": {
        "effective rank of the state": ["val/state/effective_rank$"],
        "length of z": ["val/state/norm$"],
    },
    "stages": {
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
METRICS = (  # columns of the HPARAMS tab, in this order; the first five are shown at first
    "val/bits_per_byte",
    "val/accuracy",
    "val/loss",
    "val/overlap/mean",
    "train/tokens_per_second",
    "train/loss",
    "train/indexer_recall",
    "train/peak_memory_gib",
    "val/perplexity",
)
FIRST = ("arm", "seed", "parameters", "experiment", "steps")  # columns that TensorBoard 2.21 shows at first: five
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
    """Lightning's logger, which can go back to a step.

    Its first event file begins with a mark, as that of a resumed run does: TensorBoard's slower loader
    (``--load_fast=false``, and where there is no fast one) takes the first mark that it meets for the beginning of the
    run, and hides nothing there.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"purge_step": 0, **options})

    def log_image(self, key: str, images: list[np.ndarray], step: int) -> None:
        """Write pictures of uint8 [Y, X, C], as Lightning's logger of Weights & Biases does."""
        for pixels_YXC in images:
            self.experiment.add_image(key, pixels_YXC, step, dataformats="HWC")

    def log_histogram(self, name: str, value_N: Tensor, step: int) -> None:
        """Write the distribution of numbers."""
        self.experiment.add_histogram(name, value_N, step)

    def rewind(self, step: int) -> None:
        """Hide events after ``step``; to be called before anything is logged.

        TensorBoard reads event files by the time in their names. Where the clock was ahead, or a part of a run began in
        this second, the earlier files are named again, in their order.
        """
        files = sorted(Path(self.log_dir).glob("events.out.tfevents.*"))
        if files and int(files[-1].name.split(".")[3]) >= int(time.time()):
            for number, file in enumerate(files):
                _, _, _, _, rest = file.name.split(".", 4)
                file.rename(file.with_name(f"events.out.tfevents.{number:010d}.{rest}"))
        hide_after(self, step)


class Charts(lightning.Callback):
    """Write the layout of the charts for which the run has data, again when there is more. TensorBoard shows the last
    layout of a run, and merges the layouts of all runs."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        """Write after the first metrics were logged."""
        self._write(trainer)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Write after the metrics of a validation were logged."""
        self._write(trainer)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Write after the last step."""
        self._write(trainer)

    def _write(self, trainer: lightning.Trainer) -> None:
        before, self._logged = self._logged, {*trainer.logged_metrics, *self._logged}
        layout = charts(self._logged)
        if layout != charts(before):
            for logger in _boards(trainer):
                logger.experiment.add_custom_scalars(layout)


class Hyperparameters(lightning.Callback):
    """Write the HPARAMS record when training starts; TensorBoard keeps the first one of a run. Other loggers get the
    values alone.

    The tab takes its columns from the record of a single run, the first that it meets. Columns that this record marks
    as different (`FIRST`) come first. So all runs have the same record. Metrics are named in it without a value:
    a run without the metric leaves its cell empty.

    Args:
        config: the composed configuration, plain containers.
        parameters: number of parameters of the model.
    """

    def __init__(self, config: Mapping[str, Any], parameters: int) -> None:
        self.values = {column: look_up(config, path) for column, path in COLUMNS.items()} | {"parameters": parameters}
        self.values["seed"] = str(self.values["seed"])  # a name, not an amount: TensorBoard writes 1 as 1.0000

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Write all hyper-parameters, and the names of all metrics."""
        mine = _boards(trainer)
        for logger in mine:
            logger.hparams.update(self.values)  # for hparams.yaml
            for record in records(self.values, FIRST, METRICS):
                logger.experiment._get_file_writer().add_summary(record)  # as Lightning does it
        for logger in trainer.loggers:
            if logger not in mine and trainer.is_global_zero:
                logger.log_hyperparams(self.values)


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


def records(values: Mapping[str, Any], first: Iterable[str], metrics: Iterable[str]) -> list[Any]:
    """Return the protobufs that the HPARAMS tab reads of a run: its columns and values.

    Columns in ``first`` are marked as different among runs. No scalar is written, whereas ``add_hparams`` and
    Lightning's ``log_hyperparams`` write a scalar for every metric.
    """
    columns, start, end = hparams(dict(values), dict.fromkeys(metrics))
    content = columns.value[0].metadata.plugin_data.content
    experiment = metadata.parse_experiment_plugin_data(content)
    for info in experiment.hparam_infos:
        info.differs = info.name in first
    marked = metadata.create_summary_metadata(HParamsPluginData(experiment=experiment))
    columns.value[0].metadata.CopyFrom(marked)
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
