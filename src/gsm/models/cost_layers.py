"""A built model as the plain numbers that its cost is computed from: one ``Layer`` per attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from gsm.mixers.sparse import SparseAttention
from gsm.mixers.state import StateAttention
from gsm.models.stack import Stack
from gsm.nn.block import Block
from gsm.nn.feed_forward import SwiGLU
from gsm.nn.reader import Reader
from gsm.nn.residual import HyperConnection, Plain
from gsm.retrievers.base import Retriever

POOL_BLOCK = 8  # slots in a block of a candidate pool


@dataclass(frozen=True)
class Layer:
    """One attention with what belongs to it: a layer of the encoder or decoder, or a stage.

    Attributes:
        place: ``encoder``, ``stages`` or ``decoder``.
        per_row, per_token, per_slot: multiply-adds for each row asked for, new position, and bank slot that these
            finish, by part.
        window: positions whose entries, in its window or in the state, a row sees.
        entries_each: entries of each of them.
        ratio: tokens per slot of its bank (m).
        chosen: bank slots that a row attends to at most; 0: no bank.
        searches: whether it has an indexer.
        pool: slots among which that searches at most; None: all that are visible.
        owns: what it stores: ``window``, ``bank``, ``keys``.
    """

    place: str
    per_row: dict[str, int]
    per_token: dict[str, int]
    per_slot: dict[str, int]
    window: int
    ratio: int = 1
    chosen: int = 0
    searches: bool = False
    pool: int | None = None
    owns: tuple[str, ...] = ()
    entries_each: int = 1

    def entries(self, first: int, last: int) -> int:
        """Entries that the rows at positions [first, last) attend to: sum of J min(p + 1, W) + min((p + 1) // m, K)."""
        in_window = self.entries_each * (limited(last, self.window) - limited(first, self.window))
        return in_window + limited(last, self.chosen, self.ratio) - limited(first, self.chosen, self.ratio)

    def searched(self, first: int, last: int) -> int:
        """Slots whose scores these rows compute: sum of (p + 1) // m, or of those in the pool."""
        if not self.searches:
            return 0
        return pooled(last, self.pool, self.ratio) - pooled(first, self.pool, self.ratio)


def stack_layers(stack: Stack, place: str) -> Iterator[Layer]:
    chosen, pool = 0, None
    for block in stack:
        known(block.attention, SparseAttention, StateAttention)
        known(block.feed_forward, SwiGLU)
        attention = block.attention
        per_row = {"feed-forward": weights(block.feed_forward), "hyper-connections": _residual(block)}
        if not isinstance(attention, SparseAttention):
            assert isinstance(attention, StateAttention)
            slots = attention.slots
            positions = attention.window_size // slots
            yield Layer(place, {**per_row, **_reader(attention)}, {}, {}, positions, entries_each=slots)
            continue
        indexer, owns = attention.indexer, ["window"]
        if attention.role == "full":
            chosen, owns = (attention.top_k if indexer else 0), [*owns, "bank", *(["keys"] if indexer else [])]
        per_row |= {**_reader(attention), **_search(indexer)}
        per_token = {"entries": weights(attention.window), "compressors": weights(attention.compressor)}
        yield Layer(
            place, per_row, per_token, _keys(indexer), attention.window_size, attention.ratio,
            chosen, indexer is not None, pool, tuple(owns),
        )  # fmt: skip
        if attention.pool_blocks:
            pool = attention.pool_blocks * POOL_BLOCK
            check_pool(pool, attention.top_k)


def stage_layer(stage: Any, layer: Layer) -> Layer:
    retriever: Retriever = stage.retriever
    indexer, reads = getattr(retriever, "indexer", None), retriever.reads
    chosen = layer.chosen if reads is None else reads
    return Layer(
        "stages", {**_reader(stage), **_search(indexer)}, {}, _keys(indexer), layer.window, layer.ratio, chosen,
        indexer is not None, owns=("keys",) if indexer else (),
    )  # fmt: skip


def check_pool(pool: int, top_k: int) -> None:
    """Raises ValueError for a pool whose newest block may leave a row fewer slots than it selects."""
    if pool - POOL_BLOCK + 1 < top_k:
        raise ValueError(
            f"a pool of {pool} slots, {POOL_BLOCK - 1} of which may still be missing, can hold fewer than "
            f"top_k {top_k}: this cost is not known, raise candidate_blocks"
        )


def weights(*modules: Any) -> int:
    """Numbers in all matrices of these modules: the multiply-adds of a row that meets each of them once."""
    return sum(p.numel() for module in modules if module is not None for p in module.parameters() if p.ndim > 1)


def limited(count: int, limit: int, ratio: int = 1) -> int:
    """sum of min(k // m, limit) for k = 1 .. count, where m is the ratio."""
    rising = min(count, limit * ratio)
    whole, rest = divmod(rising, ratio)
    return ratio * whole * (whole - 1) // 2 + whole * (rest + 1) + limit * (count - rising)


def pooled(count: int, pool: int | None, ratio: int) -> int:
    """The same for the slots in a pool: of v visible ones all, until they fill more blocks than there are; then the
    pool less what its newest block lacks, -v mod 8."""
    if pool is None:
        return limited(count, count, ratio)
    period = POOL_BLOCK * ratio

    def lacking(k: int) -> int:
        """sum of (-j // m) mod 8, that is -(j // m) mod 8, for j = 0 .. k."""
        periods, rest = divmod(k + 1, period)
        rest_sum = sum(-(j // ratio) % POOL_BLOCK for j in range(rest))
        return periods * ratio * POOL_BLOCK * (POOL_BLOCK - 1) // 2 + rest_sum

    full = pool * ratio
    return limited(count, pool, ratio) - (lacking(count) - lacking(full) if count > full else 0)


def known(part: object, *kinds: type) -> None:
    """Raises ValueError unless the part is exactly of one of these kinds: a subclass may compute anything."""
    if type(part) not in kinds:
        names = ", ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"the cost of {type(part).__name__} is not known, only of {names}; extend gsm.models.cost")


def _reader(reader: Reader) -> dict[str, int]:
    return {"projections": weights(reader.query, reader.output)}


def _search(indexer: Any) -> dict[str, int]:
    return {} if indexer is None else {"indexers": weights(indexer.query, indexer.weight)}


def _keys(indexer: Any) -> dict[str, int]:
    return {} if indexer is None else {"indexers": weights(indexer.key)}


def _residual(block: Block) -> int:
    """Multiply-adds of both sites for a row."""
    sites: list[nn.Module] = [block.attention_residual, block.feed_forward_residual]  # pyright: ignore
    total = 0
    for site in sites:
        known(site, HyperConnection, Plain)
        if isinstance(site, HyperConnection):
            total += site.phi.numel() + (site.streams + 2) * site.phi.shape[1]
    return total
