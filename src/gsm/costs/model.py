"""The cost of a model in closed form: FLOPs of training, prefill and decoding, bytes of its memory, and bytes moved.

    costs = cost(model)
    costs.training_flops(4096).total()            # one sequence, forward and backward
    costs.cache_bytes(4096)["shared_state"]

A multiply-add is 2 FLOPs. Only matrix products are counted; norms, softmaxes, rotations, activations, decays, the
pooling of a bank's groups, Sinkhorn rounds and the top-k selection are omitted. For weights of a x b elements,

    a product with weights    2 a b           for each row
    attention                 4 H C           for each row and visible entry (logit and mixture, of all heads)
    index scores              2 J (I + 1)     for each row and searched slot (J heads, and their weighted sum)
    hyper-connection          2 X (X + 2) D   for each row (write and mix: X x (X + 1), read: X), without its weights
    recurrence                2 H C^2         for each token and read or write of its state (with M slots: 4 H M C)
    short convolution         2 w             for each token and channel, with width w

Visible entries and slots are counted exactly for each position, so early rows count fewer. An implementation that
computes whole blocks and masks them does more work.

Bytes moved are the minimum for a call whose kernels exchange only the activations listed here:

    weights         every parameter that the call uses is read once; experts count if its rows can choose them
    cache read      each layer reads its visible entries once, including new ones, and the state of a recurrence
    cache written   the new tokens' entries
    activations     each product with weights reads its input and writes its output, attention and recurrences read
                    their queries (keys, values) and write their output, and a residual site reads streams and update
                    and writes streams and the next site's input; norms, rotations and SiLU are fused

Every part declares its cost (``gsm.layers.costs``). Each sequence is taken as one document. No tensors are allocated,
so the model can be on the meta device.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise, repeat

import torch

from gsm.layers.costs import POOL_BLOCK, Layer, ProductCost, limited, products
from gsm.models.base import CHUNK, LanguageModel
from gsm.models.baseline import Baseline
from gsm.models.gsm import GSM
from gsm.slots.writer.base import StateWriter


class Parts(Counter[str]):
    """Numbers by part of the model; ``total()`` sums them.

    The keys of FLOPs and of bytes moved are ``place/part`` (``decoder/attention``, ``decoder/weights``). The keys of
    cache bytes are those of ``Memory.breakdown``.
    """

    def of(self, place: str) -> int:
        """Return the sum over one place: ``encoder``, ``stages``, ``state``, ``cache``, ``decoder`` or ``head``."""
        return sum(number for part, number in self.items() if part.partition("/")[0] == place)


@dataclass(frozen=True)
class Call:
    """One forward pass.

    Attributes:
        tokens: T, new positions.
        rows: R, requested rows, as in ``LanguageModel.forward``.
        before: tokens already in the memory.

    Raises:
        ValueError: a number is out of range.
    """

    tokens: int
    rows: int
    before: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.before < 0 or self.rows > self.tokens:
            call = f"tokens={self.tokens}, rows={self.rows}, before={self.before}"
            raise ValueError(f"tokens must be at least 1, rows at most tokens and before at least 0, got {call}")

    @property
    def end(self) -> int:
        """Number of positions read after the call."""
        return self.before + self.tokens


@dataclass(frozen=True)
class Cost:
    """The cost of a model, as returned by ``cost(model)``.

    Attributes:
        model: the model.
        layers: the cost of each of its layers, stages and caches.
        writer: products of the state's writer; zero without one.
        head: products of the final norm and the head.
    """

    model: LanguageModel
    layers: tuple[Layer, ...]
    writer: ProductCost
    head: ProductCost

    def forward_flops(self, tokens: int, rows: int | None = None, before: int = 0) -> Parts:
        """Return the FLOPs of one forward pass for one sequence, by part.

        Args:
            tokens: new positions (T).
            rows: requested rows, the last of the new positions. None: all, as in training; 1: as in prefill; 0 or less:
                none, and the next requested position is 1 - rows tokens after the call, as in a chunk of a prompt.
            before: positions already in the memory.

        Raises:
            ValueError: a number is out of range.
        """
        call, parts = Call(tokens, tokens if rows is None else rows, before), Parts()
        for name, each, times in self._products(call):
            parts[name] += 2 * times * each.multiply_adds
        for layer, _, wanted in self._layers(call):
            for look in layer.work.looks:
                parts[f"{layer.place}/{look.part}"] += 2 * look.multiply_adds * look.seen(call.end - wanted, call.end)
        if self._writer:
            rows = self.model.schedule(call.tokens, call.rows).state
            writing = self._writer.multiply_adds(call.end - rows, call.end)
            parts.update({f"state/{part}": 2 * number * len(self._writer.parts) for part, number in writing.items()})
        return _present(parts)

    def decode_flops(self, position: int) -> Parts:
        """Return the FLOPs of decoding the token at a position (from 0), by part."""
        return self.forward_flops(1, before=position)

    def prefill_flops(self, tokens: int, chunk: int = CHUNK) -> Parts:
        """Return the FLOPs of ``LanguageModel.prefill`` with a prompt of ``tokens`` tokens, by part.

        Every chunk computes only what the last row of the prompt depends on.
        """
        return _total(self.forward_flops(*call) for call in _chunks(tokens, chunk))

    def training_flops(self, tokens: int) -> Parts:
        """Return the FLOPs of forward and backward on one sequence, by part.

        - Each product costs 3 times its forward, because the gradient of each factor is another product.
        - The inputs of indexers are detached, so their projections cost 2 times their forward, or 1 time if frozen.
        - The teacher of the indexer's loss needs the main attention's logits for all searched slots, in the compared
          rows. With a loss over selected slots these logits exist, and the compared rows are those that measure recall.
        - With recomputation of activations, all layers run forward once more. Selective recomputation repeats no
          product.
        - Stages count in full even if the writer ignores them.
        """
        forward = self.forward_flops(tokens)
        slots = self.model.indexer_training.slots_with_gradient(tokens)
        compared_rows = self.model.indexer_training.rows_compared(tokens)
        projected = 1 if slots == "none" else 2
        parts = Parts(
            {part: (projected if part.endswith("indexers") else 3) * flops for part, flops in forward.items()}
        )
        for layer in self.layers:
            search, bank = layer.work.search, layer.work.bank
            if search is None or bank is None:
                continue
            searched = search.seen(0, tokens)
            compared = sum(search.seen(rows.start, rows.stop) for rows in compared_rows)
            selected = limited(tokens, min(bank.limit or 0, search.limit or sys.maxsize), bank.ratio)
            scored = {"visible": compared, "selected": selected, "none": 0}[slots]  # no other score has a gradient
            parts[f"{layer.place}/teacher"] += bank.multiply_adds * compared  # logits: half of the attention
            parts[f"{layer.place}/index scores"] -= 4 * search.multiply_adds * (searched - scored)
        return _present(_total([parts, self._recomputed(forward)]))

    def forward_bytes(
        self, tokens: int, rows: int | None = None, before: int = 0, dtype: torch.dtype = torch.bfloat16, batch: int = 1
    ) -> Parts:
        """Return the bytes that one forward pass moves, by part, as defined at the top of this module.

        Args:
            tokens, rows, before: as in ``forward_flops``.
            dtype: dtype of weights, activations and caches; states of recurrences are in float32 if it is narrower.
            batch: number of sequences, which share the weights.
        """
        call, parts = Call(tokens, tokens if rows is None else rows, before), Parts()
        parts["embedding/activations"] = 2 * batch * tokens * self.model.dim
        for name, each, times in self._products(call):
            place = name.partition("/")[0]
            parts[f"{place}/weights"] += each.read(batch * times)
            parts[f"{place}/activations"] += batch * times * each.moved
        for layer, _, wanted in self._layers(call):
            elements = sum(look.width * look.read(call.end - wanted, call.end) for look in layer.work.looks)
            parts[f"{layer.place}/cache read"] += batch * elements
        if self._writer:
            plan = self.model.schedule(call.tokens, call.rows)
            read = self._writer.reads(call.end - plan.state, call.end)
            parts["state/cache read"] = batch * len(self._writer.parts) * read
            parts["state/cache written"] = batch * len(self._writer.parts) * self._writer.stored(plan.writer)
        moved = Parts({part: dtype.itemsize * numbers for part, numbers in parts.items()})
        for layer, entering, _ in self._layers(call):
            for store in layer.work.stores:
                each = batch * store.width * _itemsize(dtype, store.full)
                moved[f"{layer.place}/cache read"] += each * (store.entries(before) if store.carried else 0)
                moved[f"{layer.place}/cache written"] += each * store.added(call.end - entering, call.end)
        return _present(moved)

    def decode_bytes(self, position: int, dtype: torch.dtype = torch.bfloat16, batch: int = 1) -> Parts:
        """Return the bytes moved to decode the token at a position (from 0): weights and caches, by part.

        Activations are omitted, because they are a few vectors that stay in the device's caches.
        """
        moved = self.forward_bytes(1, before=position, dtype=dtype, batch=batch)
        return Parts({part: size for part, size in moved.items() if not part.endswith("activations")})

    def prefill_bytes(
        self, tokens: int, chunk: int = CHUNK, dtype: torch.dtype = torch.bfloat16, batch: int = 1
    ) -> Parts:
        """Return the bytes that ``LanguageModel.prefill`` moves, by part. Every chunk reads the weights again."""
        return _total(self.forward_bytes(*call, dtype, batch) for call in _chunks(tokens, chunk))

    def training_bytes(
        self, tokens: int, batch: int = 1, dtype: torch.dtype = torch.bfloat16, master: torch.dtype = torch.float32
    ) -> Parts:
        """Return the bytes that one training step moves, by part.

        Forward and backward move three times the bytes of a forward pass without a memory: backward reads all tensors
        again, and moves as many bytes of gradients. With recomputation of activations, all layers move their bytes once
        more. An optimiser with two moments (AdamW) reads gradients, and reads and writes weights and moments, all in
        the dtype ``master``. The reads of the indexers' teacher and casts of weights are omitted.

        Args:
            tokens: length of each sequence.
            batch: number of sequences.
            dtype: dtype of weights and activations.
            master: dtype of the optimiser's tensors.
        """
        forward = self.forward_bytes(tokens, dtype=dtype, batch=batch)
        forward = Parts({part: size for part, size in forward.items() if not part.endswith("cache written")})
        parts = _total([forward, forward, forward, self._recomputed(forward)])
        parts["optimizer"] = 7 * master.itemsize * sum(p.numel() for p in self.model.parameters())
        return parts

    def cache_bytes(
        self, tokens: int, dtype: torch.dtype = torch.bfloat16, batch: int = 1, capacity: int | None = None
    ) -> Parts:
        """Return the bytes of a memory after T = ``tokens`` tokens, with the keys of ``Memory.breakdown``.

        A window has min(T, W) entries, a bank and its index keys T // m slots, a cache T entries, and a recurrence its
        whole state. The writer defines the size of the shared state (in the paper min(T, M) entries). A static memory
        has full windows, a full state and capacity // m + 1 slots from the start. Bookkeeping is two integers per
        sequence, and one more for each bank and cache.

        Args:
            tokens: T, tokens read.
            dtype: dtype of the entries.
            batch: number of sequences.
            capacity: capacity of a static memory in tokens; None: the memory grows.
        """
        stores = [store for layer in self.layers for store in layer.work.stores]
        counters = 2 + sum(store.counted for store in stores)
        parts = Parts(bookkeeping=batch * torch.int64.itemsize * counters)
        for store in stores:
            each = batch * store.width * _itemsize(dtype, store.full)
            parts[store.kind] += each * store.entries(tokens, capacity)
        if self._writer:
            held = self._writer.stored(tokens if capacity is None else sys.maxsize)
            parts["shared_state"] = batch * dtype.itemsize * len(self._writer.parts) * held
        return _present(parts)

    @property
    def _writer(self) -> StateWriter | None:
        return self.model.writer if isinstance(self.model, GSM) else None

    def _layers(self, call: Call) -> Iterator[tuple[Layer, int, int]]:
        """Yield each layer with the number of positions that enter it, and the number of rows that it computes."""
        plan = self.model.schedule(call.tokens, call.rows)
        rows = {
            "encoder": pairwise([call.tokens, *plan.encoder]),
            "stages": repeat((plan.writer, plan.writer)),
            "cache": repeat((call.tokens, plan.decoder_input)),
            "decoder": pairwise([plan.decoder_input, *plan.decoder]),
        }
        for layer in self.layers:
            entering, wanted = next(rows[layer.place])
            yield layer, entering, wanted

    def _products(self, call: Call) -> Iterator[tuple[str, ProductCost, int]]:
        """Yield the name, the cost and the number of rows of all products; a bank may have 0 rows."""
        for layer, entering, wanted in self._layers(call):
            work = layer.work
            slots = call.end // work.ratio - call.before // work.ratio
            counts = [(wanted, work.per_row)] if wanted else []
            counts += [(entering, work.per_token)] if entering else []
            counts += [(slots, work.per_slot)] if entering or slots else []
            for times, parts in counts:
                yield from ((f"{layer.place}/{part}", each, times) for part, each in parts.items())
        writer = self.model.schedule(call.tokens, call.rows).writer
        yield from [("state/writer", self.writer, writer)] if writer else []
        yield from [("head", self.head, call.rows)] if call.rows > 0 else []

    def _recomputed(self, forward: Parts) -> Parts:
        """Return the part of a forward pass that backward repeats; empty without recomputation of activations."""
        stack = getattr(self.model, "decoder", None)
        if getattr(stack, "recompute", False) is not True:
            return Parts()
        return Parts({part: n for part, n in forward.items() if part.startswith(("encoder/", "decoder/"))})


def cost(model: LanguageModel) -> Cost:
    """Return the cost of a model, which may be on the meta device.

    Raises:
        ValueError: a part does not declare its cost.
    """
    writer = model.writer if isinstance(model, GSM) else None
    return Cost(model, tuple(model.layer_costs()), products(writer), products(model.norm, model.head))


def paper_decode(model: GSM | Baseline, tokens: int) -> int:
    """Return the paper's estimate of the attention of all decoder layers for one token, in multiply-adds.

    Equation (1), baseline: N d_I + J P d_I + L_D (K + W) d. Equation (2), GSM: L_D M d.

    N = ``tokens`` is the number of tokens so far, including this one. d_I is the width of an index head times their
    number, d the width of an entry times the query heads, L_D the number of decoder layers, J that of Reindex layers,
    and P the slots in the candidate pool of the size, even if the baseline is built without a pool. The paper counts
    one multiply-add per entry and channel; an implementation needs two, for the logit and for the mixture.
    """
    shape = model.geometry
    scoring, width = shape.index_heads * shape.index_dim, shape.heads * shape.entry_dim
    if isinstance(model, GSM):
        return shape.decoder_layers * model.state_size * width
    searched = tokens + len(shape.decoder_reindex) * min(tokens, POOL_BLOCK * shape.candidate_blocks)
    return searched * scoring + shape.decoder_layers * (shape.top_k + shape.window) * width


def paper_cache(model: GSM | Baseline, tokens: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Return the paper's estimate of the decoder's entries after ``tokens`` tokens (N), in bytes of ``dtype``.

    Equation (3), baseline: (N + L_D W) d_KV. Equation (4), GSM: M d_KV. They hold for N >= W and N >= M; d_KV is the
    width of an entry, which is both key and value. The encoder's entries and the indexers' keys are not counted.
    """
    shape = model.geometry
    entries = model.state_size if isinstance(model, GSM) else tokens + shape.decoder_layers * shape.window
    return entries * shape.entry_dim * dtype.itemsize


def _chunks(tokens: int, chunk: int) -> Iterator[tuple[int, int, int]]:
    """Yield the arguments of ``forward_flops`` for each chunk of a prompt: tokens, rows, before."""
    if tokens < 1 or chunk < 1:
        raise ValueError(f"tokens and chunk must be at least 1, got {tokens} and {chunk}")
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
