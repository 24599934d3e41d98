"""The one signature of every sequence mixer: ``mixer(x_BTD, span, own, view) -> Mixed``."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from gsm.memory.memory import LayerMemory
from gsm.memory.view import View
from gsm_kernels import IndexerLoss


class Mixed(NamedTuple):
    """What a mixer gives back.

    Attributes:
        update_BRD: its output for the R rows asked for.
        own: its memory after the call (None: it remembers nothing).
        view: what later layers and stages may read.
        learned: loss and recall of its indexer, in training.
    """

    update_BRD: Tensor
    own: LayerMemory | None
    view: View
    learned: IndexerLoss | None = None
