"""Training begins with dense selection: every visible bank entry is read, until indexers know which ones matter.

A fresh indexer selects at random. So attention hardly ever sees the entries that it should learn to look for, and the
indexer, which learns from attention, has nothing to learn either. DeepSeek-V3.2 warms its indexer up under dense
attention. Here the number of selected entries (K) is then halved until it is the model's own, so that no step takes
away much at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

import lightning
from torch import nn

from gsm.errors import ConfigError, within
from gsm.models.base import LanguageModel
from gsm.training.module import LanguageModeling


class DenseFirst(lightning.Callback):
    """Set K of everything that selects, as a function of the step alone; validation always has the model's own K.

    Args:
        until: fraction of all steps with dense selection.
        shrink: fraction of all steps, after these, over which K is halved again and again.

    Raises:
        ValueError: fractions below 0, or more than 1 together.
    """

    def __init__(self, until: float = 0.5, shrink: float = 0.25) -> None:
        within(0, until=until, shrink=shrink)
        if until + shrink > 1:
            raise ConfigError(f"until must be at most {1 - shrink:g} with shrink={shrink}, got {until}")
        self.until, self.shrink = until, shrink
        self._own: dict[nn.Module, int] = {}

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: LanguageModeling) -> None:
        """Remember the model's own K."""
        self._own = {module: module.top_k for module in selecting(pl_module.model)}
        self._ratio = cast(Any, pl_module.model).geometry.encoder_ratio

    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: LanguageModeling, batch: Any, batch_idx: int
    ) -> None:
        """Set K for the step that begins."""
        length = batch["tokens"].shape[1]
        for module, configured in self._own.items():
            slots = math.ceil(length / getattr(module, "ratio", self._ratio))
            cast(Any, module).top_k = self.top_k(trainer.global_step / trainer.max_steps, configured, slots)

    def on_train_batch_end(self, *_: Any) -> None:
        """Give the model its own K back, for everything that looks at it between two steps."""
        for module, configured in self._own.items():
            cast(Any, module).top_k = configured

    def on_exception(self, *_: Any) -> None:
        """Give the model its own K back when a step breaks off."""
        self.on_train_batch_end()

    def top_k(self, progress: float, own: int, slots: int) -> int:
        """K after this fraction of all steps; a bank has at most ``slots`` entries, the model's K is ``own``."""
        halvings = math.ceil(math.log2(max(1.0, slots / own)))
        if progress < self.until:
            return max(own, slots)
        if progress >= self.until + self.shrink:
            return own
        return max(own, slots >> 1 + int((progress - self.until) / self.shrink * halvings))


def selecting(model: LanguageModel) -> Iterator[Any]:
    """Return the modules of a model that select bank entries."""
    return (module for module in model.modules() if isinstance(getattr(module, "top_k", None), int))
