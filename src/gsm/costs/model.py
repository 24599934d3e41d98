"""What a model costs, in closed form: FLOPs of training, prefill and decoding, bytes that it keeps, and that it moves.

A multiply-add is 2 FLOPs. Matrix products count; norms, softmaxes, rotations, activations, decays, the pooling of a
bank's groups, Sinkhorn's rounds and the choice of the highest scores do not. With weights of a x b numbers,

    a product with weights    2 a b           for each row that meets them
    attention                 4 H C           for each row and entry that it sees (logit and mixture, of all heads)
    index scores              2 J (I + 1)     for each row and slot that it searches (J heads, and their weighted sum)
    hyper-connection          2 X (X + 2) D   for each row (write and mix: X x (X + 1), read: X), besides its weights
    recurrence                2 H C^2         for each token and read or write of its state (of M slots: 4 H M C)
    short convolution         2 w             for each token and channel, of a width w

Entries and slots are those that the equations need, counted exactly, position by position: an early row sees fewer. An
implementation may well compute more, on whole blocks, and hide the rest.

Bytes moved are those that a call cannot do without, if nothing but what is listed lies between two kernels:

    weights         every parameter that the call uses is read once; of experts, those that its rows can choose
    cache read      what rows see is read once by each layer that looks, new entries too, and so is a recurrence's state
    cache written   what the new tokens leave there
    activations     each product with weights reads its input and writes its output, attention and recurrences read
                    their queries (keys, values) and write their output, and a residual site reads streams and update
                    and writes streams and what the next site reads; norms, rotations and SiLU ride along

Every part says itself what it costs (``gsm.costs.primitives``). The numbers are for one sequence that is one document;
no tensors are made, and a model on the meta device will do.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise, repeat

import torch

from gsm.costs.primitives import POOL_BLOCK, Layer, ProductCost, limited, products
from gsm.models.base import CHUNK, LanguageModel
from gsm.models.baseline import Baseline
from gsm.models.gsm import GSM
from gsm.slots.writer.base import StateWriter


class Parts(Counter[str]):
    """Numbers by part: of FLOPs and of bytes moved ``place/what`` (``decoder/attention``, ``decoder/weights``), of
    bytes kept the kinds of ``Memory.breakdown``."""

    def of(self, place: str) -> int:
        """The sum over one place: ``encoder``, ``stages``, ``state``, ``cache``, ``decoder`` or ``head``."""
        return sum(number for part, number in self.items() if part.partition("/")[0] == place)


@dataclass(frozen=True)
class Call:
    """One forward: T new positions, R rows asked for (as of ``LanguageModel.forward``), and what a memory holds
    already."""

    tokens: int
    rows: int
    before: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.before < 0 or self.rows > self.tokens:
            given = f"{self.tokens} tokens, {self.rows} rows, {self.before} before"
            raise ValueError(f"{given}: give tokens >= 1, rows <= tokens and before >= 0")

    @property
    def end(self) -> int:
        """Positions read after it."""
        return self.before + self.tokens


@dataclass(frozen=True)
class Cost:
    """What a model costs; made by ``cost(model)``.

    Attributes:
        model: whose cost it is.
        layers: what each of its layers, stages and caches costs.
        writer, head: products of the state's writer (none without one), and of the final norm and the head.
    """

    model: LanguageModel
    layers: tuple[Layer, ...]
    writer: ProductCost
    head: ProductCost

    def forward_flops(self, tokens: int, rows: int | None = None, before: int = 0) -> Parts:
        """FLOPs of one forward, by part.

        Args:
            tokens: new positions (T).
            rows: trailing positions for which an output is wanted; None: all, as in training; 1: prefill; 0 or less:
                the first one wanted comes 1 - rows positions later.
            before: positions that a memory holds already.

        Raises:
            ValueError: a number is out of range.
        """
        call, parts = Call(tokens, tokens if rows is None else rows, before), Parts()
        for name, each, times in self._products(call):
            parts[name] += 2 * times * each.multiply_adds
        for layer, _, asked in self._layers(call):
            for look in layer.work.looks:
                parts[f"{layer.place}/{look.part}"] += 2 * look.multiply_adds * look.seen(call.end - asked, call.end)
        if self._writer:
            rows = self.model.schedule(call.tokens, call.rows).state
            own = self._writer.multiply_adds(call.end - rows, call.end)
            parts.update({f"state/{part}": 2 * number * self._state_tensors for part, number in own.items()})
        return _present(parts)

    def decode_flops(self, position: int) -> Parts:
        """FLOPs of decoding the one token at a position (from 0): it runs every layer."""
        return self.forward_flops(1, before=position)

    def prefill_flops(self, tokens: int, chunk: int = CHUNK) -> Parts:
        """FLOPs of ``LanguageModel.prefill``: of every chunk what the last row of all needs."""
        return _total(self.forward_flops(*call) for call in _chunks(tokens, chunk))

    def training_flops(self, tokens: int) -> Parts:
        """FLOPs of forward and backward on a sequence, by part: each product is made again for the gradient of either
        factor, 3 in all.

        What indexers project is detached: 2, or 1 where they are frozen. A loss over every slot that they search needs,
        as a teacher, the main attention's logits with these, in the rows that are compared; where selected slots alone
        teach, theirs are known already, and the rows that are compared are those on which recall is measured. Where
        activations are recomputed, all layers run forward once more (selectively: no product is made again). Stages
        count in full even where the writer ignores them.
        """
        forward = self.forward_flops(tokens)
        learned = self.model.indexer_training.slots_with_gradient(tokens)
        taught = self.model.indexer_training.rows_compared(tokens)
        projected = 1 if learned == "none" else 2
        parts = Parts(
            {part: (projected if part.endswith("indexers") else 3) * flops for part, flops in forward.items()}
        )
        for layer in self.layers:
            search, bank = layer.work.search, layer.work.bank
            if search is None or bank is None:
                continue
            searched, compared = search.seen(0, tokens), sum(search.seen(rows.start, rows.stop) for rows in taught)
            chosen = limited(tokens, min(bank.limit or 0, search.limit or sys.maxsize), bank.ratio)
            scored = {"visible": compared, "selected": chosen, "none": 0}[learned]  # no other score has a gradient
            parts[f"{layer.place}/teacher"] += bank.multiply_adds * compared  # logits: half of the attention
            parts[f"{layer.place}/index scores"] -= 4 * search.multiply_adds * (searched - scored)
        return _present(_total([parts, self._again(forward)]))

    def forward_bytes(
        self, tokens: int, rows: int | None = None, before: int = 0, dtype: torch.dtype = torch.bfloat16, batch: int = 1
    ) -> Parts:
        """Bytes that one forward moves, by part, as said above.

        Args:
            tokens, rows, before: as for ``forward_flops``.
            dtype: of weights, activations and caches; states of recurrences are at least float32.
            batch: sequences, which share the weights.
        """
        call, parts = Call(tokens, tokens if rows is None else rows, before), Parts()
        parts["embedding/activations"] = 2 * batch * tokens * self.model.dim
        for name, each, times in self._products(call):
            place = name.partition("/")[0]
            parts[f"{place}/weights"] += each.read(batch * times)
            parts[f"{place}/activations"] += batch * times * each.moved
        for layer, _, asked in self._layers(call):
            looked = sum(look.width * look.read(call.end - asked, call.end) for look in layer.work.looks)
            parts[f"{layer.place}/cache read"] += batch * looked
        if self._writer:
            plan = self.model.schedule(call.tokens, call.rows)
            read = self._writer.reads(call.end - plan.state, call.end)
            parts["state/cache read"] = batch * self._state_tensors * read
            parts["state/cache written"] = batch * self._state_tensors * self._writer.stored(plan.writer)
        moved = Parts({part: dtype.itemsize * numbers for part, numbers in parts.items()})
        for layer, entering, _ in self._layers(call):
            for store in layer.work.stores:
                each = batch * store.width * _itemsize(dtype, store.full)
                moved[f"{layer.place}/cache read"] += each * (store.entries(before) if store.carried else 0)
                moved[f"{layer.place}/cache written"] += each * store.added(call.end - entering, call.end)
        return _present(moved)

    def decode_bytes(self, position: int, dtype: torch.dtype = torch.bfloat16, batch: int = 1) -> Parts:
        """Bytes that the one token at a position moves: weights and caches. What passes between its kernels, a few
        vectors, stays in the device's own caches, and is left out."""
        moved = self.forward_bytes(1, before=position, dtype=dtype, batch=batch)
        return Parts({part: size for part, size in moved.items() if not part.endswith("activations")})

    def prefill_bytes(
        self, tokens: int, chunk: int = CHUNK, dtype: torch.dtype = torch.bfloat16, batch: int = 1
    ) -> Parts:
        """Bytes that ``LanguageModel.prefill`` moves; every chunk reads the weights of the layers that it runs."""
        return _total(self.forward_bytes(*call, dtype, batch) for call in _chunks(tokens, chunk))

    def training_bytes(
        self, tokens: int, batch: int = 1, dtype: torch.dtype = torch.bfloat16, master: torch.dtype = torch.float32
    ) -> Parts:
        """Bytes that one step of training moves: three times those of the forward pass, nothing being kept in a memory.
        In the backward pass everything is read again, and as much is moved for its gradient: of weights, it is written.

        Where activations are recomputed, all layers move theirs once more. An optimiser with two moments (AdamW) reads
        the gradient, and reads and writes weights and moments, in the dtype ``master``. What a teacher of indexers
        reads again, and the casts of weights, are left out.
        """
        forward = self.forward_bytes(tokens, dtype=dtype, batch=batch)
        forward = Parts({part: size for part, size in forward.items() if not part.endswith("cache written")})
        parts = _total([forward, forward, forward, self._again(forward)])
        parts["optimizer"] = 7 * master.itemsize * sum(p.numel() for p in self.model.parameters())
        return parts

    def cache_bytes(
        self, tokens: int, dtype: torch.dtype = torch.bfloat16, batch: int = 1, capacity: int | None = None
    ) -> Parts:
        """Bytes of a memory that has read so many tokens, as ``Memory.breakdown`` names them.

        Windows hold min(T, W) entries, the state what its writer says (the paper's min(T, M) entries), banks and index
        keys T // m slots, a cache T entries, a recurrence its whole state; a static memory (``capacity``) has all of a
        window and of the state, and capacity // m + 1 slots, from the start. Bookkeeping: two whole numbers for every
        sequence, and one more for each bank and cache.
        """
        stores = [store for layer in self.layers for store in layer.work.stores]
        counters = 2 + sum(store.counted for store in stores)
        parts = Parts(bookkeeping=batch * torch.int64.itemsize * counters)
        for store in stores:
            each = batch * store.width * _itemsize(dtype, store.full)
            parts[store.kind] += each * store.entries(tokens, capacity)
        if self._writer:
            held = self._writer.stored(tokens if capacity is None else sys.maxsize)
            parts["shared_state"] = batch * dtype.itemsize * self._state_tensors * held
        return _present(parts)

    @property
    def _writer(self) -> StateWriter | None:
        return self.model.writer if isinstance(self.model, GSM) else None

    @property
    def _state_tensors(self) -> int:
        """Tensors of the state, which is written and kept one by one."""
        return len(self._writer.parts) if self._writer else 0

    def _layers(self, call: Call) -> Iterator[tuple[Layer, int, int]]:
        """Each layer with the positions that enter it, and the rows that it is asked for."""
        plan = self.model.schedule(call.tokens, call.rows)
        rows = {
            "encoder": pairwise([call.tokens, *plan.encoder]),
            "stages": repeat((plan.writer, plan.writer)),
            "cache": repeat((call.tokens, plan.decoder_input)),
            "decoder": pairwise([plan.decoder_input, *plan.decoder]),
        }
        for layer in self.layers:
            entering, asked = next(rows[layer.place])
            yield layer, entering, asked

    def _products(self, call: Call) -> Iterator[tuple[str, ProductCost, int]]:
        """All products that are made by name, and how many rows each meets: of a bank perhaps none."""
        for layer, entering, asked in self._layers(call):
            work = layer.work
            slots = call.end // work.ratio - call.before // work.ratio
            made = [(asked, work.per_row)] if asked else []
            made += [(entering, work.per_token)] if entering else []
            made += [(slots, work.per_slot)] if entering or slots else []
            for times, parts in made:
                yield from ((f"{layer.place}/{part}", each, times) for part, each in parts.items())
        writer = self.model.schedule(call.tokens, call.rows).writer
        yield from [("state/writer", self.writer, writer)] if writer else []
        yield from [("head", self.head, call.rows)] if call.rows > 0 else []

    def _again(self, forward: Parts) -> Parts:
        """What the layers compute or move a second time in the backward pass, if activations are recomputed."""
        stack = getattr(self.model, "decoder", None)
        if getattr(stack, "recompute", False) is not True:
            return Parts()
        return Parts({part: n for part, n in forward.items() if part.startswith(("encoder/", "decoder/"))})


def cost(model: LanguageModel) -> Cost:
    """The cost of a model. Raises ValueError for a part whose cost is not known."""
    writer = model.writer if isinstance(model, GSM) else None
    return Cost(model, tuple(model.layer_costs()), products(writer), products(model.norm, model.head))


def paper_decode(model: GSM | Baseline, tokens: int) -> int:
    """Attention in the decoder for one token after T others, as the paper estimates it (section 2.1).

    baseline: T d_I + (Reindex layers) (slots in the pool) d_I + L_D (K + W) d, GSM: L_D M d; d_I = J I, d = H C.
    """
    shape = model.geometry
    scoring, width = shape.index_heads * shape.index_dim, shape.heads * shape.entry_dim
    if isinstance(model, GSM):
        return shape.decoder_layers * model.state_size * width
    searched = tokens + len(shape.decoder_reindex) * min(tokens, POOL_BLOCK * shape.candidate_blocks)
    return searched * scoring + shape.decoder_layers * (shape.top_k + shape.window) * width


def paper_cache(model: GSM | Baseline, tokens: int) -> int:
    """Numbers that the decoder keeps after T tokens, as the paper estimates them (section 2.1).

    baseline: T C + L_D W C, GSM: M C.
    """
    shape = model.geometry
    entries = model.state_size if isinstance(model, GSM) else tokens + shape.decoder_layers * shape.window
    return entries * shape.entry_dim


def _chunks(tokens: int, chunk: int) -> Iterator[tuple[int, int, int]]:
    """Of each chunk of a prompt its tokens, the rows to ask for, and the tokens before it."""
    if tokens < 1 or chunk < 1:
        raise ValueError(f"{tokens} tokens in chunks of {chunk}: give 1 or more of each")
    for start in range(0, tokens, chunk):
        new = min(chunk, tokens - start)
        yield new, 1 - (tokens - start - new), start


def _itemsize(dtype: torch.dtype, wide: bool) -> int:
    return (torch.promote_types(dtype, torch.float32) if wide else dtype).itemsize


def _total(calls: Iterable[Parts]) -> Parts:
    total = Parts()
    for parts in calls:
        total.update(parts)
    return total


def _present(parts: Parts) -> Parts:
    return Parts({part: number for part, number in parts.items() if number})
