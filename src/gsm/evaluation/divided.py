"""The processes that torchrun has started for one measure: each computes its share, and the first one writes.

torchrun --nproc-per-node=2 evaluate.py checkpoint=logs/default lengths=256:4096
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from gsm.training.distributed.ranks import PREPARING, agreed, portable

Part = TypeVar("Part")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Ranks:
    """This process among those that measure together: its number, and how many they are."""

    rank: int = 0
    world: int = 1

    def divided(self, parts: Iterable[Part], compute: Callable[[Part], Found]) -> list[Found]:
        """Return what ``compute`` finds of every part, in their order, on all ranks. Rank r of n computes the parts r,
        r + n, r + 2 n, ... An error of any rank is raised on all of them."""
        own: Any = []
        try:
            own = [compute(part) for number, part in enumerate(parts) if number % self.world == self.rank]
        except Exception as error:
            if self.world == 1:
                raise
            own = portable(error)
        if self.world == 1:
            return own
        shares: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(shares, own)
        for share in shares:
            if isinstance(share, Exception):
                raise share
        return [shares[number % self.world][number // self.world] for number in range(sum(map(len, shares)))]

    def of_first(self, decide: Callable[[], Found]) -> Found:
        """Return what the first rank decides, on all ranks; an error of it, too."""
        return decide() if self.world == 1 else agreed(decide, torch.distributed.group.WORLD)


def join() -> Ranks:
    """Join the processes that torchrun has started; a process that was started alone is its own first rank.

    They exchange their results through the hosts (gloo). Where there are GPUs, each takes its own for ``cuda``.
    """
    if not torch.distributed.is_torchelastic_launched() or os.environ["WORLD_SIZE"] == "1":
        return Ranks()
    if count := torch.cuda.device_count():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % count)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", timeout=PREPARING)
    return Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size())
