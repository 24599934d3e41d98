"""What a part of a model costs, in plain numbers that the part itself gives; ``gsm.costs.model`` makes FLOPs and bytes
of them.

A feed-forward and a residual site say their ``products()``, a sequence mixer its ``work(kind, below)``: products for
each row, token or slot, what its rows look at, and what it keeps; a retriever its ``work(bank)``. Blocks and stages add
these up, and a model gives them layer by layer, ``layer_costs()``. A part that says nothing has no known cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn

POOL_BLOCK = 8  # slots in a block of a candidate pool


@dataclass(frozen=True)
class ProductCost:
    """What is computed for each row that a part meets.

    Attributes:
        multiply_adds: of matrix products.
        moved: numbers of activations that these read and write.
        weights: parameters that are read, however many rows there are.
        routed, each: of these weights, those of experts, and how many of them one row needs.
    """

    multiply_adds: int = 0
    moved: int = 0
    weights: int = 0
    routed: int = 0
    each: int = 0

    def __add__(self, other: ProductCost) -> ProductCost:
        return ProductCost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(ProductCost)))

    def read(self, rows: int) -> int:
        """Weights that so many rows read, if no two choose the same expert before every expert is chosen."""
        return self.weights - self.routed + min(self.routed, rows * self.each)


def products(*parts: nn.Module | nn.Parameter | None) -> ProductCost:
    """Every matrix of these parts once for a row, reading its input and writing its output; vectors are only read."""
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
    """What a row sees of the entries at or before it, one for every m tokens: all, the nearest, or chosen ones.

    Attributes:
        part: ``attention`` or ``index scores``.
        multiply_adds: for each row and entry.
        width: numbers of an entry.
        limit: entries that a row sees at most; None: all.
        ratio: tokens of an entry (m).
        each: entries of a position, side by side.
        nearest: whether the limit leaves the last entries, which neighbouring rows share.
        block: the limit is so many entries in whole blocks of this size, of which the newest may lack some: a candidate
            pool, or blocks that rows choose.
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
        """Entries that the rows at positions [first, last) see, one by one: the sum of min((p + 1) // m, limit)."""
        before, until = (pooled(count, self.limit, self.ratio, self.block) for count in (first, last))
        return self.each * (until - before)

    def read(self, first: int, last: int) -> int:
        """Different entries among these; of chosen ones, as many as can be."""
        there = last // self.ratio
        if self.nearest and self.limit is not None:
            return self.each * min(there, last - first + self.limit - 1)
        return self.each * there if self.limit is None else min(self.each * there, self.seen(first, last))


@dataclass(frozen=True)
class Store:
    """What is kept of one kind for one sequence, as ``Memory.breakdown`` names it.

    Attributes:
        kind: what its bytes are called.
        width: numbers of an entry.
        size: the last so many entries are kept; None: one for every m tokens.
        ratio: tokens of an entry (m).
        full: it has its size from the start, in at least float32: the state of a recurrence.
        carried: every call reads all of it, whatever rows look at.
        counted: a whole number of bookkeeping goes with it.
    """

    kind: str
    width: int
    size: int | None = None
    ratio: int = 1
    full: bool = False
    carried: bool = False
    counted: bool = False

    def entries(self, tokens: int, capacity: int | None = None) -> int:
        """Entries after so many tokens, or in a static memory for ``capacity`` tokens."""
        if self.size is None:
            return tokens // self.ratio if capacity is None else capacity // self.ratio + 1
        return min(tokens, self.size) if capacity is None and not self.full else self.size

    def added(self, first: int, last: int) -> int:
        """Entries written when the tokens at positions [first, last) come in."""
        if self.size is None:
            return last // self.ratio - first // self.ratio
        return self.entries(last - first)


@dataclass(frozen=True)
class LayerCost:
    """What a layer computes, looks at and keeps.

    Attributes:
        per_row, per_token, per_slot: products by part for each row asked for, each new position, and each bank slot
            that these finish.
        looks: what a row sees.
        stores: what is kept.
        window: of the looks, how rows attend to the layer's window (None: it has none, or nobody above reads it).
        bank: how rows attend to a bank or a history that layers above may share (None: there is none).
        pool: slots among which layers above search at most (None: all).
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
        """Tokens of a slot (m)."""
        return self.bank.ratio if self.bank else 1

    @property
    def search(self) -> AttentionCost | None:
        """The look of its indexer (None: it has none)."""
        return next((look for look in self.looks if look.part == "index scores"), None)

    def __add__(self, other: LayerCost) -> LayerCost:
        """Both together; window, bank and pool are those of the second where it has them."""
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
    """One layer of the encoder or decoder, a stage, or what YOCO caches.

    Attributes:
        place: ``encoder``, ``stages``, ``cache`` or ``decoder``. In each they are in the order in which they run.
        work: what it costs.
    """

    place: str
    work: LayerCost


def told(part: object, method: str, *arguments: object) -> Any:
    """What a part says of its cost. Raises ValueError for one that says nothing."""
    answer: Callable[..., Any] | None = getattr(part, method, None)
    if answer is None:
        raise unknown_cost(part, "work(kind, below)" if method == "work" else f"{method}()")
    return answer(*arguments)


def unknown_cost(part: object, method: str) -> ValueError:
    """The error for a part that lacks the method which says its cost."""
    kind = type(part).__name__
    return ValueError(f"the cost of {kind} is not known; give it a method {method}, as gsm.costs.primitives tells")


def attention(inner: int, width: int, limit: int | None, **options) -> AttentionCost:
    """A look of heads with ``inner`` channels together: logit and mixture for each row and entry."""
    return AttentionCost("attention", 2 * inner, width, limit, **options)


def limited(count: int, limit: int | None, ratio: int = 1) -> int:
    """sum of min(k // m, limit) for k = 1 .. count, where m is the ratio."""
    rising = count if limit is None else min(count, limit * ratio)
    whole, rest = divmod(rising, ratio)
    return ratio * whole * (whole - 1) // 2 + whole * (rest + 1) + (limit or 0) * (count - rising)


def pooled(count: int, pool: int | None, ratio: int, block: int = POOL_BLOCK) -> int:
    """The same for the slots in a pool: of v visible ones all, until they fill more blocks than there are; then the
    pool less what its newest block lacks, -v mod its size."""
    if pool is None or block == 1:
        return limited(count, pool, ratio)
    period = block * ratio

    def lacking(k: int) -> int:
        """sum of (-j // m) mod the block, that is -(j // m) mod it, for j = 0 .. k."""
        periods, rest = divmod(k + 1, period)
        rest_sum = sum(-(j // ratio) % block for j in range(rest))
        return periods * ratio * block * (block - 1) // 2 + rest_sum

    full = pool * ratio
    return limited(count, pool, ratio) - (lacking(count) - lacking(full) if count > full else 0)


def check_pool(pool: int, top_k: int) -> None:
    """Raises ValueError for a pool whose newest block may leave a row fewer slots than it selects."""
    if pool - POOL_BLOCK + 1 < top_k:
        raise ValueError(
            f"a pool of {pool} slots, {POOL_BLOCK - 1} of which may still be missing, can hold fewer than "
            f"top_k {top_k}: this cost is not known, raise candidate_blocks"
        )


def _merged(one: dict[str, ProductCost], other: dict[str, ProductCost]) -> dict[str, ProductCost]:
    parts = dict.fromkeys([*one, *other])
    return {part: one.get(part, ProductCost()) + other.get(part, ProductCost()) for part in parts}
