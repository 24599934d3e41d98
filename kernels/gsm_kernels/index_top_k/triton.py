"""Exact selection of slots without a row of scores ever being stored: groups of neighbouring slots first.

    1. one kernel computes all scores tile by tile and keeps the highest of every GROUP neighbouring slots;
    2. of these maxima a row's k highest are found, ties to the first;
    3. the scores of the k * GROUP slots of these groups are computed once more, and the k highest of them written.

The k best slots lie in the k best groups: ahead of a slot of any other group stand k groups, each with a higher maximum
or with an equal one further left, and so k slots. With few slots GROUP is 1, and 2 ends the work. Of many rows, 2 goes
the same way once more, in one kernel: first the k best spans of neighbouring groups, then the groups of these. Steps 2
and 3 hold what they choose from in registers and find the k-th highest bit by bit, so no place is sorted and none is
approximate. A row's buffers hold F / GROUP <= 8,192 numbers and k GROUP scores.

A score that is computed twice, in tiles of different shapes, may differ in its last bit where the sums are not exact;
the slots chosen are the best by the second one, in groups chosen by the first. On whole numbers there is no difference.

A candidate pool narrows the choice by masks; all scores are still computed, since gathering a pool's keys for every row
by itself would cost as much as it saves. `candidate_pool` keeps the scores of a chunk of rows, and takes the maxima of
blocks that are counted from the first slot of each row.

Source: the score is that of DeepSeek-V3.2's lightning indexer; finding a threshold bit by bit is radix selection with
digits of one bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..indexer import Indexer
from ..launch import cdiv, in_float32, launch, power_of_two
from ..register import register
from ..rows import Rows, lines_of, row_chunks
from ..score_slots.triton import score_listed
from ..tiles import Tile, launch_fastest
from .inputs import Inputs, chosen

GROUPS = 8192  # groups among which one block of threads chooses: 16 in each of its 512 threads' registers
ALONE = 132  # rows that are chosen for at the same time, each by a multiprocessor: looking once, wide, is soonest over
MOST = 16384  # slots or blocks among which it can choose


def refuses(inputs: Inputs) -> str | None:
    """Return why this call is not for the kernels."""
    slots = inputs.key_BFI.shape[1]
    group = group_size(slots)
    if max(inputs.k * group, slots // group) > MOST or group > 64:
        return f"chooses among {MOST} slots at a time: too few for k = {inputs.k} of {slots}"
    return inputs.indexer.unfit() or in_float32(inputs.query_BRJI, inputs.key_BFI)


def refuses_pool(inputs: Inputs) -> str | None:
    """Return why this call is not for the kernels."""
    slots, blocks, block = inputs.key_BFI.shape[1], inputs.k, inputs.block
    if max(blocks, cdiv(slots, block)) > MOST:
        return f"chooses among {MOST} blocks, got {slots} slots in blocks of {block} and {blocks} to choose"
    return inputs.indexer.unfit() or in_float32(inputs.query_BRJI, inputs.key_BFI)


@torch.no_grad()
def index_top_k(inputs: Inputs) -> Tensor:
    """See `gsm_kernels.index_top_k`."""
    return _slots(*inputs)


@torch.no_grad()
def candidate_pool(inputs: Inputs) -> Tensor:
    """See `gsm_kernels.index_top_k`."""
    return _blocks(*inputs)


def _index_top_k(*arguments: Any) -> Tensor:
    inputs = Inputs(*arguments)
    search, index = Search.of(inputs), chosen(*arguments)
    slots, k, pool, block = inputs.key_BFI.shape[1], inputs.k, inputs.pool_BRN, inputs.block
    group = group_size(slots)
    per_row = cdiv(slots, group) + (k * (group + 1) if group > 1 else 0) + (0 if pool is None else slots // block // 4)
    for part in row_chunks(index.shape, per_row):
        search.top_k(part, group, pool, block, lines_of(index, part))
    return index


def _candidate_pool(*arguments: Any) -> Tensor:
    inputs = Inputs(*arguments)
    search, pool, block = Search.of(inputs), chosen(*arguments), inputs.block
    for part in row_chunks(pool.shape, inputs.key_BFI.shape[1]):
        search.choose_blocks(search.best_of_groups(part, 1, None, block), part, block, lines_of(pool, part))
    return pool


_slots = register("index_top_k", _index_top_k, chosen, takes=Inputs)
_blocks = register("candidate_pool", _candidate_pool, chosen, takes=Inputs)


class Search(NamedTuple):
    """What is searched, contiguous, with the launches of the kernels for a chunk of rows."""

    indexer: Indexer
    first: Tensor
    last: Tensor

    @classmethod
    def of(cls, inputs: Inputs) -> Search:
        """The search of a call."""
        return cls(inputs.indexer.readable(), inputs.first_BR.contiguous(), inputs.last_BR.contiguous())

    def top_k(self, part: Rows, group: int, pool: Tensor | None, block: int, out: Tensor) -> None:
        """Write the best slots of a chunk. Its buffers are gone before the next chunk's are made."""
        member = None if pool is None else members_of(pool, part, self.indexer.key_BFI.shape[1], block)
        best = self.best_of_groups(part, group, member, block)
        if group == 1:
            self.choose(best, part, 1, out)
            return
        groups = torch.empty((part.lines, out.shape[-1]), dtype=torch.int32, device=best.device)
        self.choose(best, part, group, groups)
        del best
        self.choose_listed(groups, part, group, member, block, out)

    def best_of_groups(self, part: Rows, group: int, member: Tensor | None, block: int) -> Tensor:
        """[lines, groups] float32; not written where no row of a tile sees a slot."""
        from .kernels import best_of_groups

        key = self.indexer.key_BFI
        slots, (heads, width) = key.shape[1], self.indexer.query_BRJI.shape[2:]
        best = key.new_empty((part.lines, cdiv(slots, group)), dtype=torch.float32)
        pooled = best if member is None else member
        tensors = (*self.indexer, self.first, self.last, pooled, best)
        counts = (*part.place(self.first.shape[1]), slots, best.shape[1], pooled.shape[1], block)
        sizes = {"J": heads, "I": width, "GROUP": group, "POOLED": member is not None, "WIDTH": power_of_two(width, 16)}
        tiles = score_tiles(part.rows, key.dtype)

        def grid(tile: dict[str, int]) -> tuple[int]:
            return (part.batches * cdiv(part.rows, tile["ROWS"]) * cdiv(slots, tile["SLOTS"]),)

        launch_fastest("index_top_k.best_of_groups", best_of_groups, grid, (*tensors, *counts), tiles, **sizes)
        return best

    def choose(self, best: Tensor, part: Rows, group: int, out: Tensor) -> None:
        """Write each row's best groups."""
        from .kernels import choose

        sizes = (*part.place(self.first.shape[1]), best.shape[1], out.shape[-1])
        span = span_size(best.shape[1], out.shape[-1]) if part.lines > ALONE else 1
        options = {**choice(cdiv(best.shape[1], span), out.shape[-1], span), "GROUP": group, "SPAN": span}
        launch(choose, (part.lines,), best, self.first, self.last, out, *sizes, **options)

    def choose_listed(
        self, groups: Tensor, part: Rows, group: int, member: Tensor | None, block: int, out: Tensor
    ) -> None:
        """Write the best slots of each row's groups."""
        from .kernels import choose_listed

        k = groups.shape[1]
        score = score_listed(self.indexer, groups, part, group)
        pooled = groups if member is None else member
        sizes = (*part.place(self.first.shape[1]), k * group, pooled.shape[1], block, k)
        options = {**choice(k * group, k), "GROUP": group, "POOLED": member is not None}
        launch(choose_listed, (part.lines,), score, groups, self.first, self.last, pooled, out, *sizes, **options)

    def choose_blocks(self, score: Tensor, part: Rows, block: int, out: Tensor) -> None:
        """Write each row's best blocks."""
        from .kernels import choose_blocks

        sizes = (*part.place(self.first.shape[1]), score.shape[1], block, out.shape[-1])
        options = choice(cdiv(score.shape[1], block), out.shape[-1])
        launch(choose_blocks, (part.lines,), score, self.first, self.last, out, *sizes, **options)


def score_tiles(rows: int, dtype: torch.dtype) -> tuple[Tile, ...]:
    """Return the candidates for a program's tile of scores, ROWS x SLOTS.

    64 x 128 products of one head and as many sums over heads are 64 registers each in 128 threads, so that two programs
    share a multiprocessor: one multiplies matrices while the other adds up. Few rows need small programs, of which
    there are then enough; float32 has no matrix units to feed.
    """
    if rows <= 16:
        shapes = [(16, 128, 2)]
    else:
        shapes = [(32, 64, 2)] if dtype == torch.float32 else [(64, 128, 3), (64, 64, 3)]
    names = ("ROWS", "SLOTS", "num_stages")
    return tuple((*zip(names, shape, strict=True), ("num_warps", 4)) for shape in shapes)


def choice(size: int, k: int, span: int = 1) -> dict[str, int]:
    """How one block of threads chooses k of `size`, then k of the `k span` behind these: 16 of them a thread, which
    leaves registers for the sums."""
    sizes = {"SIZE": power_of_two(size, 16), "K": power_of_two(k, 1)}
    most = max(sizes["SIZE"], sizes["K"] * span)
    return {**sizes, "num_warps": min(max(most // 512, 4), 16)}


def group_size(slots: int) -> int:
    """Neighbouring slots that count as one at first: as few as leave GROUPS groups or less."""
    return power_of_two(cdiv(slots, GROUPS), 1)


def span_size(groups: int, k: int) -> int:
    """Neighbouring groups that count as one before k are chosen among all: the numbers that are looked at again and
    again are then `groups / span` and `k span`, whose sum is least at the root of `groups / k`."""
    span = power_of_two(int((groups / k) ** 0.5) + 1) // 2
    return span if span > 2 else 1


def members_of(pool_BRN: Tensor, part: Rows, slots: int, block: int) -> Tensor:
    """Which blocks of slots are in a row's pool, int8 [lines, ordinals]."""
    ordinals = slots // block + 1
    pool = pool_BRN[part.batch0 : part.batch0 + part.batches, part.row0 : part.row0 + part.rows].flatten(0, 1)
    member = torch.zeros((part.lines, ordinals + 1), dtype=torch.int8, device=pool.device)
    return member.scatter_(1, torch.where(pool < 0, ordinals, pool.clamp(max=ordinals)), 1)
