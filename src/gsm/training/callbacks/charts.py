"""TensorBoard's CUSTOM SCALARS tab: what belongs together on one chart, of all runs at once."""

from __future__ import annotations

import lightning
from lightning.pytorch.loggers import TensorBoardLogger

# tab -> chart -> tags, as regular expressions. Tags that a model does not log are left out of its lines.
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


class Charts(lightning.Callback):
    """Writes the layout once a run, when its training starts for the first time."""

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Gives every TensorBoard logger the layout; TensorBoard itself merges those of all runs."""
        layout = {tab: {name: ["Multiline", tags] for name, tags in of.items()} for tab, of in LAYOUT.items()}
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and not getattr(logger, "continues", False):
                logger.experiment.add_custom_scalars(layout)
