"""The cost of a part of a model, in plain numbers that the part itself returns; ``gsm.costs.model`` turns them into
FLOPs and bytes.

A feed-forward and a residual site return ``products()``. A sequence mixer returns ``work(kind, below)``: products for
each row, token or slot, the entries that its rows read, and its stores. A retriever returns ``work(bank)``. Blocks and
stages add these up, and a model returns them layer by layer, ``layer_costs()``. A part without such a method has no
known cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import nn

POOL_BLOCK = 8  # slots in a block of a candidate pool


@dataclass(frozen=True)
class ProductCost:
    """The computation of a part for each row.

    Attributes:
        multiply_adds: multiply-adds of matrix products.
        moved: elements of activations that these products read and write.
        weights: parameters that are read, for any number of rows.
        routed, each: number of weights that belong to routed experts, and the number of them that one row needs.
    """

    multiply_adds: int = 0
    moved: int = 0
    weights: int = 0
    routed: int = 0
    each: int = 0

    def __add__(self, other: ProductCost) -> ProductCost:
        return ProductCost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(ProductCost)))

    def read(self, rows: int) -> int:
        """Return the weights that ``rows`` rows read; experts repeat only after all have been chosen."""
        return self.weights - self.routed + min(self.routed, rows * self.each)


def products(*parts: nn.Module | nn.Parameter | None) -> ProductCost:
    """Return the cost of one product per row with every matrix of these parts; vectors are only read."""
    total = ProductCost()
    for part in parts:
        for weight in [part] if isinstance(part, nn.Parameter) else part.parameters() if part is not None else ():
            number = weight.numel()
            if weight.ndim > 1:
                inputs, outputs = number // weight.shape[-2], number // weight.shape[-1]
                total += ProductCost(number, inputs + outputs, number)
            else:
                total += ProductCost(weights=number)
    return total


@dataclass(frozen=True)
class AttentionCost:
    """The entries that a row reads: all, the nearest, or selected entries at or before its position.

    Attributes:
        part: ``attention`` or ``index scores``.
        multiply_adds: multiply-adds for each row and entry.
        width: elements of an entry.
        limit: largest number of entries that a row sees; None: all.
        ratio: tokens per entry (m).
        each: entries per position.
        nearest: whether the limit keeps the last entries, which neighbouring rows share.
        block: entries per block, for a limit in whole blocks: a candidate pool, or selected blocks. The newest block
            may be incomplete.
    """

    part: str
    multiply_adds: int
    width: int
    limit: int | None = None
    ratio: int = 1
    each: int = 1
    nearest: bool = False
    block: int = 1

    def seen(self, first: int, last: int) -> int:
        """Return the entries that the rows at positions [first, last) see: the sum of min((p + 1) // m, limit)."""
        before, until = (pooled(count, self.limit, self.ratio, self.block) for count in (first, last))
        return self.each * (until - before)

    def read(self, first: int, last: int) -> int:
        """Return the number of different entries among these; for selected entries, the largest possible number."""
        entries = last // self.ratio
        if self.nearest and self.limit is not None:
            return self.each * min(entries, last - first + self.limit - 1)
        return self.each * entries if self.limit is None else min(self.each * entries, self.seen(first, last))


@dataclass(frozen=True)
class Store:
    """The entries of one kind that a memory stores for one sequence.

    Attributes:
        kind: label of its bytes in ``Memory.breakdown``.
        width: elements of an entry.
        size: number of stored entries, the last ones; None: one for every m tokens.
        ratio: tokens per entry (m).
        full: whether it has its full size from the start, in at least float32: the state of a recurrence.
        carried: whether every call reads all of it.
        counted: whether an integer of bookkeeping belongs to it.
    """

    kind: str
    width: int
    size: int | None = None
    ratio: int = 1
    full: bool = False
    carried: bool = False
    counted: bool = False

    def entries(self, tokens: int, capacity: int | None = None) -> int:
        """Return the number of entries after ``tokens`` tokens, or in a static memory for ``capacity`` tokens."""
        if self.size is None:
            return tokens // self.ratio if capacity is None else capacity // self.ratio + 1
        return min(tokens, self.size) if capacity is None and not self.full else self.size

    def added(self, first: int, last: int) -> int:
        """Return the number of entries that the tokens at positions [first, last) write."""
        if self.size is None:
            return last // self.ratio - first // self.ratio
        return self.entries(last - first)


@dataclass(frozen=True)
class LayerCost:
    """The products, the reads and the stores of a layer.

    Attributes:
        per_row, per_token, per_slot: products by part for each requested row, each new position, and each bank slot
            that the new positions finish.
        looks: the entries that a row reads.
        stores: the stores of the layer.
        window: cost of reading the window that stages on this layer read, its own or that of the layer below (None: no
            window, or no stage reads it).
        bank: cost of reading a bank or a history that layers above may share (None: there is none).
        pool: largest number of slots that layers above search (None: all).
    """

    per_row: dict[str, ProductCost] = field(default_factory=dict)
    per_token: dict[str, ProductCost] = field(default_factory=dict)
    per_slot: dict[str, ProductCost] = field(default_factory=dict)
    looks: tuple[AttentionCost, ...] = ()
    stores: tuple[Store, ...] = ()
    window: AttentionCost | None = None
    bank: AttentionCost | None = None
    pool: int | None = None

    @property
    def ratio(self) -> int:
        """Tokens per slot (m)."""
        return self.bank.ratio if self.bank else 1

    @property
    def search(self) -> AttentionCost | None:
        """The reads of its indexer (None: it has no indexer)."""
        return next((look for look in self.looks if look.part == "index scores"), None)

    def above(self, below: LayerCost | None) -> LayerCost:
        """Return the cost with window, bank and pool of the layer below, if this layer has neither window nor bank."""
        if below is None or self.window or self.bank:
            return self
        return replace(self, window=below.window, bank=below.bank, pool=below.pool)

    def __add__(self, other: LayerCost) -> LayerCost:
        """Return the sum; window, bank and pool come from ``other``."""
        return LayerCost(
            _merged(self.per_row, other.per_row),
            _merged(self.per_token, other.per_token),
            _merged(self.per_slot, other.per_slot),
            self.looks + other.looks,
            self.stores + other.stores,
            other.window or self.window,
            other.bank or self.bank,
            other.pool or self.pool,
        )


@dataclass(frozen=True)
class Layer:
    """One layer of the encoder or decoder, a stage, or YOCO's cache.

    Attributes:
        place: ``encoder``, ``stages``, ``cache`` or ``decoder``. The layers of a place are in execution order.
        work: its cost.
    """

    place: str
    work: LayerCost


def declared_cost(part: object, method: str, *arguments: object) -> Any:
    """Return the cost that a part declares. Raises ValueError for a part without the method."""
    cost: Callable[..., Any] | None = getattr(part, method, None)
    if cost is None:
        raise unknown_cost(part, "work(kind, below)" if method == "work" else f"{method}()")
    return cost(*arguments)


def unknown_cost(part: object, method: str) -> ValueError:
    """Return the error for a part without a cost method."""
    kind = type(part).__name__
    return ValueError(f"{kind} must have a method {method} for its cost, as in gsm.layers.costs")


def attention(inner: int, width: int, limit: int | None, **options) -> AttentionCost:
    """Return the cost of attention with ``inner`` channels in all heads: logit and mixture for each row and entry."""
    return AttentionCost("attention", 2 * inner, width, limit, **options)


def limited(count: int, limit: int | None, ratio: int = 1) -> int:
    """Return the sum of min(k // m, limit) for k = 1 .. count, where m is the ratio."""
    rising = count if limit is None else min(count, limit * ratio)
    whole, rest = divmod(rising, ratio)
    return ratio * whole * (whole - 1) // 2 + whole * (rest + 1) + (limit or 0) * (count - rising)


def pooled(count: int, pool: int | None, ratio: int, block: int = POOL_BLOCK) -> int:
    """Return the sum of the searched slots for k = 1 .. count positions, with a candidate pool.

    If the k // m visible slots fit into the pool, all are searched. Otherwise the pool is, without the missing slots of
    its newest block, -(k // m) mod the block size.
    """
    if pool is None or block == 1:
        return limited(count, pool, ratio)
    period = block * ratio

    def lacking(k: int) -> int:
        """Return the sum of -(j // m) mod the block size, for j = 0 .. k."""
        periods, rest = divmod(k + 1, period)
        rest_sum = sum(-(j // ratio) % block for j in range(rest))
        return periods * ratio * block * (block - 1) // 2 + rest_sum

    full = pool * ratio
    return limited(count, pool, ratio) - (lacking(count) - lacking(full) if count > full else 0)


def check_pool(pool: int, top_k: int) -> None:
    """Raise ValueError for a pool that can have fewer slots than a row selects, because its newest block is
    incomplete."""
    if pool - POOL_BLOCK + 1 < top_k:
        raise ValueError(
            f"candidate_blocks must make a pool of at least {top_k + POOL_BLOCK - 1} slots for top_k={top_k}, as its "
            f"newest block may lack {POOL_BLOCK - 1}, got {pool}"
        )


def _merged(first: dict[str, ProductCost], second: dict[str, ProductCost]) -> dict[str, ProductCost]:
    parts = dict.fromkeys([*first, *second])
    return {part: first.get(part, ProductCost()) + second.get(part, ProductCost()) for part in parts}
