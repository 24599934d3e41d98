"""What data ask of the trainer they are attached to: where it stands, and which share of the data is this rank's."""

from __future__ import annotations

import lightning


class Placed(lightning.LightningDataModule):
    """Data that know their place in a run. Without a trainer they stand at its beginning, on one rank."""

    @property
    def _finished(self) -> int:
        """Batches that are finished, not batches that were fetched: a checkpoint may be written in between."""
        progress = self.trainer.fit_loop.epoch_loop.batch_progress.total if self.trainer else None
        return progress.processed if progress else 0  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def _accumulated(self) -> int:
        """Batches that make up a step."""
        return self.trainer.accumulate_grad_batches if self.trainer else 1

    @property
    def _on_gpu(self) -> bool:
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"

    @property
    def _rank(self) -> int:
        return self._shares["rank"]

    @property
    def _world(self) -> int:
        return self._shares["num_replicas"]

    @property
    def _shares(self) -> dict[str, int]:
        """Among how many the data is divided, and which of them this process is; tensor-parallel ranks share theirs."""
        shares = self.trainer.distributed_sampler_kwargs if self.trainer else None
        return dict(shares or {"num_replicas": 1, "rank": 0})
