"""Context parallelism: sequences are cut into pieces, and each rank has some of them. The stores of this module
exchange entries, slots and states between ranks, layer by layer. They replace the stores of a memory, so no layer
changes.

    training on one rank      on several ranks, each with its pieces
    all entries are here      ``Halo``     the last entries of the previous pieces, from their ranks
    all slots are here        ``AllSlots`` the slots of all pieces, on every rank; their gradients go to their owners
    a state begins empty      ``Relay``    the state after the previous piece, from its rank

Each rank has two pieces of a sequence, one from its front and one from its end, because a row at the end searches more
slots than a row at the front. Both are sequences of the rank's batch. Models with a recurrent state have one piece per
rank, because a state goes from piece to piece.

    2 ranks     piece   0   1   2   3            recurrent     piece   0   1
                rank    0   1   1   0                          rank    0   1

P pieces of L positions, Y = sequences times pieces per rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gsm.cache.ledger import Ledger
from gsm.cache.memory import BankCache, DenseCache, Memory, map_nodes
from gsm.cache.slots import Slots, every_token, plan_slots
from gsm.cache.store import Column, ColumnStore, RecurrentState, StateStore, StaticColumn, Window, WindowStore
from gsm.context.exchange import broadcast, gathered, passed_on, received, scattered
from gsm.exchange import routed
from gsm.shapes import last_rows
from gsm.span import Span, document_positions, following_positions
from gsm_kernels.device import in_dtype, once

KINDS = (DenseCache, BankCache, Window, Column, StaticColumn, RecurrentState)  # replaced by stores that exchange
CACHES = ("encoder", "stages", "state", "decoder")  # fields of a memory


@dataclass(frozen=True, eq=False)
class Ranks:
    """The ranks that share the same sequences.

    Attributes:
        group: the process group, in the order of the pieces.
        cache: routes and owners of pieces, which training uses in every call.
    """

    group: dist.ProcessGroup
    cache: dict[tuple, Any] = field(default_factory=dict, repr=False)

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """Number of ranks (N)."""
        return self.group.size()


class Halos(NamedTuple):
    """The exchange that gives every piece the last entries before it.

    Attributes:
        row_S: int64, indices of the local entries, piece by piece, that are sent, in the order of the target ranks.
        sent, got: numbers of entries sent to each rank, and received from it.
        place_YE: int64, for each local piece and each place before it: index into the received entries, followed by the
            ``size`` entries of the memory. With a memory there is one more piece, for the window after all pieces.
    """

    row_S: Tensor
    sent: list[int]
    got: list[int]
    place_YE: Tensor


class Places(NamedTuple):
    """The sources of the slots that all pieces together add to a bank.

    Attributes:
        before_Y: int64, slots filled before each local piece.
        source_BG: int64, for each new slot: its row among the rows of all ranks; -1: unused.
        slot_N: int64, for each of these rows: its new slot, counted through the batch; -1: unused.
        slots: the plan for all pieces as one call.
    """

    before_Y: Tensor
    source_BG: Tensor
    slot_N: Tensor
    slots: Slots


class Pieces:
    """The pieces of one batch.

    Args:
        ranks: the ranks.
        shape: shape of the whole sequences, [B, T].
        documents_BT: int64, documents of the whole sequences; None: one document, or the continuation of the last
            document of ``memory``.
        each: pieces of a sequence per rank, 1 or 2.
        memory: the memory before the call, equal on all ranks; the number of pieces must then divide T. None in
            training.
        device: device of the positions.
    """

    def __init__(
        self,
        ranks: Ranks,
        shape: tuple[int, int],
        documents_BT: Tensor | None,
        *,
        each: int,
        device: torch.device,
        memory: Memory | None = None,
    ):
        self.ranks, self.each, (self.batch, self.tokens) = ranks, each, shape
        self.count = each * ranks.size
        self.length = -(-self.tokens // self.count)
        self.mine, self.keeps = self.of(ranks.rank), memory is not None
        nothing_B = torch.full((self.batch,), -1, dtype=torch.int64, device=device)
        document_B, position_B = (nothing_B, nothing_B) if memory is None else (memory.document_B, memory.position_B)
        if documents_BT is None and self.tokens == self.count * self.length:
            self.documents_BT, document_BT = None, document_B.clamp(min=0)[:, None].expand(shape)
            position_BT = following_positions(position_B, self.tokens)
        else:
            whole_BT = document_B.clamp(min=0)[:, None].expand(shape) if documents_BT is None else documents_BT
            self.documents_BT = document_BT = self.filled(whole_BT, -1)
            position_BT = document_positions(document_BT, document_B, position_B)
        self.position_BT = position_BT
        # Document and position of the last token of all, and of the token before each piece.
        self.last_token = {"document_B": document_BT[:, -1].clone(), "position_B": position_BT[:, -1].clone()}
        self.document_Y = self._before(document_BT, document_B)
        self.position_Y = self._before(position_BT, position_B)
        self._places: dict[int | None, Places] = {}
        self._cache: dict[tuple, Any] = {}

    def of(self, rank: int) -> list[int]:
        """Return the pieces of a rank, in the order of its batch."""
        return [rank] if self.each == 1 else [rank, self.count - 1 - rank]

    def owner(self, piece: int) -> tuple[int, int]:
        """Return the rank of a piece, and the index of the piece on that rank."""
        size = self.ranks.size
        return (piece, 0) if piece < size else (2 * size - 1 - piece, 1)

    def filled(self, x_BT: Tensor, value: float) -> Tensor:
        """Return whole sequences, padded with ``value`` so that all pieces have equal lengths."""
        missing = self.count * self.length - x_BT.shape[1]
        end = x_BT.new_full((len(x_BT), missing, *x_BT.shape[2:]), value)
        return torch.cat([x_BT, end], dim=1) if missing else x_BT

    def cut(self, x_BT: Tensor, value: float) -> Tensor:
        """Return the local pieces, [Y, L], of whole sequences padded with ``value``."""
        x_BPL = self.filled(x_BT, value).unflatten(1, (self.count, self.length))
        return torch.cat([x_BPL[:, piece] for piece in self.mine])

    def substitute(self, memory: Memory) -> MemoryOfPieces:
        """Return a memory of the local pieces: the stores of this module around the stores of ``memory``, which is
        empty in training."""
        caches = {name: map_nodes(getattr(memory, name), KINDS, self._store) for name in CACHES}
        ledger = Ledger(memory.ledger.layout)
        return MemoryOfPieces(self.document_Y, self.position_Y, **caches, ledger=ledger, pieces=self)

    def concluded(self, after: Memory) -> Memory:
        """Return the memory after all pieces, equal on all ranks, given the memory after this rank's call."""
        kinds = (BankCache, DenseCache, Halo, AllSlots, Relay, Tensor)
        caches = {name: map_nodes(getattr(after, name), kinds, self._unwrapped) for name in CACHES}
        return Memory(**self.last_token, **caches, ledger=after.ledger)

    def weighed(self, mean: Tensor) -> Tensor:
        """Weight a mean over the local rows so that the mean over the ranks is the mean over all rows."""
        in_piece, everywhere = ((x >= 0).sum() for x in (self.cut(self.position_BT, -1), self.position_BT))
        return mean * (in_piece * self.ranks.size) / everywhere.clamp(min=1)

    def places(self, ratio: int | None, count_B: Tensor | None = None) -> Places:
        """Return the sources of the slots of a bank with one slot for every ``ratio`` tokens of a document.

        A ratio of None means one slot for every token, padding too. All banks of one ratio are equally full: they have
        ``count_B`` slots before the call.
        """
        if ratio not in self._places:
            self._places[ratio] = self._plan(ratio, count_B if self.keeps else None)
        return self._places[ratio]

    def halos(self, size: int, length: int) -> Halos:
        """Return the exchange for pieces of ``length`` entries that need the last ``size`` entries before them."""
        return self._once((size, length), lambda: self._route(size, length))

    def _once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Return the cached result of ``make``: per call for prompts, for all calls in training, which has few lengths.

        Validation may compute a result that training uses later, so it is made outside of inference mode.
        """
        cache, key = self._cache if self.keeps else self.ranks.cache, (*key, self.each, self.position_BT.device)
        if key not in cache:
            with torch.inference_mode(False):
                cache[key] = make()
        return cache[key]

    def _before(self, x_BT: Tensor, x_B: Tensor) -> Tensor:
        """Return the value at the position before each local piece, [Y]; before the first piece, the memory's."""
        x_BT = torch.cat([x_B[:, None], x_BT], dim=1)
        return torch.cat([x_BT[:, piece * self.length] for piece in self.mine])

    def _store(self, node: Any) -> Any:
        """Return the replacement of a cache, or of a store outside of any cache."""
        if isinstance(node, DenseCache):
            return DenseCache(AllSlots(self, None, self._inner(node.entry)), self.places(None, node.count_B).before_Y)
        if isinstance(node, BankCache):
            key = None if node.key is None else self._store(node.key)
            before_Y = self.places(_ratio(node), node.count_B).before_Y
            return BankCache(self._store(node.pending), self._store(node.entry), key, before_Y)
        if isinstance(node, Column | StaticColumn):
            return AllSlots(self, node.ratio, self._inner(node))
        return Halo(self, node.size, self._inner(node)) if isinstance(node, Window) else Relay(self, self._inner(node))

    def _inner(self, store: Any) -> Any:
        return store if self.keeps else None

    def _unwrapped(self, node: Any) -> Any:
        """Return the cache or store inside a replacement."""
        if isinstance(node, DenseCache):
            return DenseCache(self._unwrapped(node.entry), self._places[None].slots.after_B)
        if isinstance(node, BankCache):
            key = None if node.key is None else self._unwrapped(node.key)
            count_B = self._places[_ratio(node)].slots.after_B
            return BankCache(self._unwrapped(node.pending), self._unwrapped(node.entry), key, count_B)
        return node.inner if isinstance(node, Halo | AllSlots | Relay) else node

    def _plan(self, ratio: int | None, count_B: Tensor | None) -> Places:
        position_BT, device = self.position_BT, self.position_BT.device
        if ratio is None:
            slots, new = every_token(position_BT, count_B), self.length
            ends_BT = torch.ones_like(position_BT, dtype=torch.bool)
        else:  # a piece may begin inside a group: it can finish one group more than its tokens alone
            slots, new = plan_slots(position_BT, ratio, count_B), -(-self.length // ratio)
            ends_BT = (position_BT >= 0) & (position_BT % ratio == ratio - 1)
        added, slot_BT = slots.end_BG.shape[1], ends_BT.cumsum(1) - ends_BT.long()  # new slots before each position
        before_BP = slot_BT[:, :: self.length]
        sequence_BP1 = self._numbers(device)[..., None]
        row_BPL = sequence_BP1 * new + slot_BT.unflatten(1, (-1, self.length)) - before_BP[..., None]
        row_BT, rows = row_BPL.flatten(1), self.count * self.batch * new
        source_BG = slot_BT.new_full((self.batch, added + 1), -1)
        source_BG = source_BG.scatter(1, torch.where(ends_BT, slot_BT, added), row_BT)[:, :added]
        flat_BT = slot_BT + torch.arange(self.batch, device=device)[:, None] * added
        slot_N = slot_BT.new_full((rows + 1,), -1)
        slot_N = slot_N.scatter(0, torch.where(ends_BT, row_BT, rows).flatten(), flat_BT.flatten())[:rows]
        before_Y = torch.cat([before_BP[:, piece] + slots.before_B for piece in self.mine])
        return Places(before_Y, source_BG, slot_N, slots)

    def _numbers(self, device: torch.device) -> Tensor:
        """Return the index of each piece of each sequence among the pieces of all ranks, [B, P]."""
        places = [rank * self.each + index for rank, index in map(self.owner, range(self.count))]
        place_P = self._once(("owners",), lambda: torch.tensor(places, device=device))
        return place_P * self.batch + torch.arange(self.batch, device=device)[:, None]

    def _route(self, size: int, length: int) -> Halos:
        """Plan the exchange of entries.

        Sender and receiver use the same order: ranks, then the pieces of a rank, then the places before a piece. With a
        memory, every rank also gets the entries before an imaginary piece after the last one: the next window.
        """
        ranks, device = self.ranks, self.position_BT.device
        further = [self.count] if self.keeps else []
        rows, sent = [torch.zeros(0, dtype=torch.int64)], [0] * ranks.size
        came: list[list[tuple[int, Tensor]]] = [[] for _ in range(ranks.size)]  # by source: piece here, places
        for target in range(ranks.size):
            for number, piece in enumerate(self.of(target) + further):
                first = piece * length - size
                for source in range(max(0, first) // length, piece):
                    begin, end = max(first, source * length), (source + 1) * length
                    owner, index = self.owner(source)
                    if owner == ranks.rank:
                        rows.append(torch.arange(begin, end) - source * length + index * length)
                        sent[target] += end - begin
                    if target == ranks.rank:
                        came[owner].append((number, torch.arange(begin, end) - first))
        got = [sum(len(place) for _, place in pairs) for pairs in came]
        wanted = self.mine + further
        # The entries of the memory follow the received ones: place e of a piece that begins at s is its entry s + e.
        place_YE = sum(got) + torch.tensor(wanted)[:, None] * length + torch.arange(size)
        number = 0
        for piece, place in (pair for pairs in came for pair in pairs):
            place_YE[piece, place] = torch.arange(number, number + len(place))
            number += len(place)
        return Halos(torch.cat(rows).to(device), sent, got, place_YE.to(device))


def _ratio(bank: BankCache) -> int:
    """Return the tokens per slot of a bank."""
    return cast(Column | StaticColumn, bank.entry).ratio


@dataclass(frozen=True)
class MemoryOfPieces(Memory):
    """The memory that a model is given on a rank: its stores exchange with other ranks.

    Attributes:
        pieces: the pieces that it is for.
    """

    pieces: Pieces | None = None

    def continued(self, span: Span, single_document: bool) -> Span:
        """Return the span with the length of the whole sequences."""
        assert self.pieces is not None
        return replace(span, tokens=self.pieces.tokens)

    def advance(self, after: Memory, tokens: int, single_document: bool, rows: int) -> Memory:
        """Return ``after`` as it is: ``Pieces.concluded`` joins the memories of all pieces."""
        return after


@dataclass(frozen=True)
class Halo:
    """The last ``size`` entries before each piece, from other pieces or from the memory's window ``inner``.

    Missing entries are zeros, which no row sees.
    """

    pieces: Pieces
    size: int
    inner: Window | None

    def extend(self, new_BTC: Tensor) -> tuple[Tensor, WindowStore]:
        """Return the entries of the previous pieces followed by the new ones, and the next store."""
        if not self.size or not new_BTC.shape[1]:  # nothing to exchange
            return (new_BTC, self) if self.inner is None else self.inner.extend(new_BTC)
        pieces = self.pieces
        halos = pieces.halos(self.size, new_BTC.shape[1])
        mine_NBC = new_BTC.unflatten(0, (pieces.each, -1)).transpose(1, 2).flatten(0, 1)
        came_NBC = routed(mine_NBC.index_select(0, halos.row_S), halos.sent, halos.got, pieces.ranks.group)
        all_NBC = torch.cat([came_NBC, self.stored(new_BTC)])
        all_YEBC = all_NBC.index_select(0, halos.place_YE.flatten()).unflatten(0, halos.place_YE.shape)
        before_YEC = all_YEBC[: pieces.each].transpose(1, 2).flatten(0, 1)
        seen_BEC = torch.cat([before_YEC, new_BTC], dim=1)
        if self.inner is None:
            return seen_BEC, self
        stored_BEC = self.inner.entry_BEC
        size = min(self.size, stored_BEC.shape[1] + pieces.count * new_BTC.shape[1])
        after_BEC = in_dtype(last_rows(all_YEBC[-1].transpose(0, 1), size), stored_BEC.dtype)
        return seen_BEC, replace(self.inner, entry_BEC=after_BEC)

    def stored(self, new_BTC: Tensor) -> Tensor:
        """Return the entries of the memory's window, [E, B, C], with zeros in front to full length."""
        zeros_EBC = new_BTC.new_zeros(self.size, self.pieces.batch, new_BTC.shape[2])
        if self.inner is None:
            return zeros_EBC
        stored_EBC = in_dtype(self.inner.entry_BEC, new_BTC.dtype).transpose(0, 1)
        return torch.cat([zeros_EBC, stored_EBC])[-self.size :]


@dataclass(frozen=True)
class AllSlots:
    """One value for each slot of a bank, on every rank: the slots of ``inner``, followed by the slots of all pieces."""

    pieces: Pieces
    ratio: int | None
    inner: ColumnStore | None

    def place(self, new_BGC: Tensor, slots: Slots) -> tuple[Tensor, ColumnStore]:
        """Return the values of all slots; in training, one copy for each local piece."""
        pieces = self.pieces
        places = pieces.places(self.ratio)
        new_BGC = _Slots.apply(new_BGC, places, pieces)
        if self.inner is None:
            return new_BGC.repeat(pieces.each, 1, 1), self
        return self.inner.place(new_BGC, places.slots)


@dataclass(frozen=True)
class Relay:
    """The state of a recurrence, passed from piece to piece; ``inner`` is the state before the first piece."""

    pieces: Pieces
    inner: StateStore | None

    def resume(self, empty_BHRC: Tensor) -> Tensor:
        """Return the state after the previous piece."""
        ranks = self.pieces.ranks
        if ranks.rank:
            return received(empty_BHRC, ranks.rank - 1, ranks.group)
        return empty_BHRC if self.inner is None else self.inner.resume(empty_BHRC)

    def keep(self, after_BHRC: Tensor, out_BTHC: Tensor) -> tuple[StateStore, Tensor]:
        """Send the state to the rank of the next piece."""
        ranks = self.pieces.ranks
        if ranks.rank < ranks.size - 1:
            out_BTHC = passed_on(after_BHRC, out_BTHC, ranks.rank + 1, ranks.group)
        if self.inner is None:
            return self, out_BTHC
        return self.inner.keep(broadcast(after_BHRC, ranks.size - 1, ranks.group), out_BTHC)


class _Slots(torch.autograd.Function):
    """Gathers the new slots of all ranks and puts each in its place. The backward sums the gradients of all ranks, in
    their own dtype, for the owner. Every slot has one source, so both directions are gathers on each rank."""

    @staticmethod
    def forward(ctx: Any, new_YGC: Tensor, places: Places, pieces: Pieces) -> Tensor:
        ctx.places, ctx.pieces, ctx.shape = places, pieces, new_YGC.shape
        return _picked(gathered(new_YGC.flatten(0, 1), pieces.ranks.group), places.source_BG)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_NC = _picked(grads[0].flatten(0, 1), ctx.places.slot_N)
        return scattered(grad_NC, ctx.pieces.ranks.group).view(ctx.shape), None, None


def _picked(x_NC: Tensor, index: Tensor) -> Tensor:
    """Return the rows at ``index``, zeros for -1: [..., C]."""
    if not len(x_NC):
        return x_NC.new_zeros(*index.shape, x_NC.shape[1])
    return x_NC[index.clamp(min=0)].masked_fill((index < 0)[..., None], 0)
