"""The cost of each part of a model, in numbers that the part returns. ``gsm.costs.model`` turns them into FLOPs and
bytes.

- A feed-forward and a residual connection have ``products()``.
- A sequence mixer has ``work(kind, below)``: products for each row, token or slot, the entries that its rows read, and
  its stores.
- A retriever has ``work(bank)``.
- Blocks and stages add these up; ``layer_costs()`` of a model returns them layer by layer.

The cost of a model with a part that lacks such a method raises ValueError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import nn

POOL_BLOCK = 8  # slots in a block of a candidate pool


@dataclass(frozen=True)
class ProductCost:
    """The matrix products of a part.

    Attributes:
        multiply_adds: multiply-adds per row.
        moved: elements of activations that these products read and write per row.
        weights: parameters that are read, for any number of rows.
        routed, each: number of weights of all routed experts, and of the experts that one row needs.
    """

    multiply_adds: int = 0
    moved: int = 0
    weights: int = 0
    routed: int = 0
    each: int = 0

    def __add__(self, other: ProductCost) -> ProductCost:
        return ProductCost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(ProductCost)))

    def read(self, rows: int) -> int:
        """Return the number of weights that ``rows`` rows read, if no two rows share an expert until all are in use."""
        return self.weights - self.routed + min(self.routed, rows * self.each)


def products(*parts: nn.Module | nn.Parameter | None) -> ProductCost:
    """Return the cost of one product per row with every matrix of these parts. Vectors count as weights only."""
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
    """The cost of attention to entries at or before a row's position: all, the nearest, or selected ones.

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
        """Return how many entries the rows at positions p in [first, last) see: the sum of min((p + 1) // m, limit)."""
        before, until = (pooled(count, self.limit, self.ratio, self.block) for count in (first, last))
        return self.each * (until - before)

    def read(self, first: int, last: int) -> int:
        """Return how many of these entries are different; for selected entries, the largest possible number."""
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
        full: whether it has its full size from the start, in at least float32, as the state of a recurrence has.
        carried: whether every call reads all of it.
        counted: whether the memory also stores an integer count for it.
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
        looks: the attention costs of a row.
        stores: the stores of the layer.
        window: cost of attention to the window that a stage on this layer reads: its own or that of the layer below
            (None: no window, or no stage reads it).
        bank: cost of attention to a bank or a history that layers above may share (None: there is none).
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
        """The cost of its indexer's search (None: it has no indexer)."""
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
    """Return the result of a part's cost method.

    Raises:
        ValueError: if the part has no such method.
    """
    cost: Callable[..., Any] | None = getattr(part, method, None)
    if cost is None:
        raise unknown_cost(part, "work(kind, below)" if method == "work" else f"{method}()")
    return cost(*arguments)


def unknown_cost(part: object, method: str) -> ValueError:
    """Return the error for a part without a cost method."""
    kind = type(part).__name__
    return ValueError(f"{kind} must have a method {method} for its cost, as in gsm.layers.costs")


def attention(inner: int, width: int, limit: int | None, **options) -> AttentionCost:
    """Return the cost of attention with ``inner`` channels in all heads: the logit and the weighted sum of values."""
    return AttentionCost("attention", 2 * inner, width, limit, **options)


def limited(count: int, limit: int | None, ratio: int = 1) -> int:
    """Return the sum of min(k // m, limit) for k = 1 .. count, where m is the ratio."""
    rising = count if limit is None else min(count, limit * ratio)
    whole, rest = divmod(rising, ratio)
    return ratio * whole * (whole - 1) // 2 + whole * (rest + 1) + (limit or 0) * (count - rising)


def pooled(count: int, pool: int | None, ratio: int, block: int = POOL_BLOCK) -> int:
    """Return the sum over k = 1 .. count of the slots that the row at position k - 1 searches in a candidate pool.

    If the k // m visible slots fit into the pool, all are searched. Otherwise the pool is searched, whose newest block
    lacks -(k // m) mod ``block`` slots.
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
    """Raise ValueError if a pool of ``pool`` slots can have fewer than ``top_k``, as its newest block may be
    incomplete."""
    if pool - POOL_BLOCK + 1 < top_k:
        raise ValueError(
            f"candidate_blocks must make a pool of at least {top_k + POOL_BLOCK - 1} slots for top_k={top_k}, as its "
            f"newest block may lack {POOL_BLOCK - 1}, got {pool}"
        )


def _merged(first: dict[str, ProductCost], second: dict[str, ProductCost]) -> dict[str, ProductCost]:
    parts = dict.fromkeys([*first, *second])
    return {part: first.get(part, ProductCost()) + second.get(part, ProductCost()) for part in parts}
