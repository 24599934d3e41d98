"""Sequences that are cut into pieces, of which each rank has some: what a piece needs of the others comes through these
stores, layer by layer, as it comes through those of a memory from earlier calls. No layer knows of it.

    training on one rank      on several ranks, each with its pieces
    all entries are here      ``Halo``     the last entries of the pieces before, from whoever has them
    all slots are here        ``Shared``   the slots of all pieces, on every rank; their gradients go to their owners
    a state begins empty      ``Relay``    the state after the piece before, from the rank that has it

Each rank has two pieces of a sequence, one from its front and one from its end, since a row at the end searches more
than one at the front; both are sequences of its batch. Of models with a recurrent state it has one, for a state goes
from piece to piece.

    2 ranks     piece   0   1   2   3            recurrent     piece   0   1
                rank    0   1   1   0                          rank    0   1

P pieces of L positions, Y = sequences times pieces that a rank has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gsm.cache.ledger import Ledger
from gsm.cache.memory import BankCache, DenseCache, Memory, map_nodes
from gsm.cache.slots import Slots, every_token, plan_slots
from gsm.cache.store import Column, ColumnStore, State, StateStore, StaticColumn, Window, WindowStore
from gsm.exchange import gathered, passed_on, received, routed, scattered, told
from gsm.shapes import last
from gsm.span import document_positions, following_positions
from gsm_kernels.device import in_dtype


@dataclass(frozen=True, eq=False)
class Context:
    """The ranks that have the pieces of the same sequences.

    Attributes:
        group: these ranks, in the order of the pieces.
        known: what training asks for again and again: which rows go where, and who has which piece.
    """

    group: dist.ProcessGroup
    known: dict[tuple, Any] = field(default_factory=dict, repr=False)

    @property
    def rank(self) -> int:
        """This rank among them."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """How many they are (N)."""
        return self.group.size()


class Halos(NamedTuple):
    """Which entries travel so that every piece has the last ones before it.

    Attributes:
        row_S: int64, of the entries here, piece by piece, those that are sent, in the order of the ranks.
        sent, got: how many go to each rank, and come from it.
        place_YE: int64, for each piece here and each place before it: which of those that have come, or behind them
            of the ``size`` that were kept; where something is kept, also for what will be, after all pieces.
    """

    row_S: Tensor
    sent: list[int]
    got: list[int]
    place_YE: Tensor


class Places(NamedTuple):
    """Where the slots come from that all pieces together add to a bank.

    Attributes:
        before_Y: int64, slots that are filled before each piece here.
        source_BG: int64, of each new slot: its row among those of all ranks; -1: it is not used.
        slot_N: int64, of each of these rows: its new slot, counted through the batch; -1: it is not used.
        slots: the plan for all pieces as one call.
    """

    before_Y: Tensor
    source_BG: Tensor
    slot_N: Tensor
    slots: Slots


class Pieces:
    """The pieces of one batch.

    Args:
        context: the ranks.
        shape: of the whole sequences, [B, T].
        documents_BT: int64, theirs; None: all is one document, or the last one of ``memory`` goes on.
        each: pieces that a rank has of a sequence, 1 or 2.
        memory: what was read before, alike on all ranks, by models whose pieces divide T; None: nothing, as in
            training.
        device: where positions are to be.
    """

    def __init__(
        self,
        context: Context,
        shape: tuple[int, int],
        documents_BT: Tensor | None,
        *,
        each: int,
        device: torch.device,
        memory: Memory | None = None,
    ):
        self.context, self.each, (self.batch, self.tokens) = context, each, shape
        self.count = each * context.size
        self.length = -(-self.tokens // self.count)
        self.mine, self.keeps = self.of(context.rank), memory is not None
        nothing_B = torch.full((self.batch,), -1, dtype=torch.int64, device=device)
        document_B, position_B = (nothing_B, nothing_B) if memory is None else (memory.document_B, memory.position_B)
        if documents_BT is None and self.tokens == self.count * self.length:
            self.documents_BT, document_BT = None, document_B.clamp(min=0)[:, None].expand(shape)
            position_BT = following_positions(position_B, self.tokens)
        else:
            given_BT = document_B.clamp(min=0)[:, None].expand(shape) if documents_BT is None else documents_BT
            self.documents_BT = document_BT = self.filled(given_BT, -1)
            position_BT = document_positions(document_BT, document_B, position_B)
        self.position_BT = position_BT
        # Of the last token of all, and of what stood before each piece: its document, and the position there.
        self.last_token = {"document_B": document_BT[:, -1].clone(), "position_B": position_BT[:, -1].clone()}
        self.document_Y = self._before(document_BT, document_B)
        self.position_Y = self._before(position_BT, position_B)
        self._places: dict[int | None, Places] = {}
        self._known: dict[tuple, Any] = {}

    def of(self, rank: int) -> list[int]:
        """The pieces of a rank, in the order in which its batch has them."""
        return [rank] if self.each == 1 else [rank, self.count - 1 - rank]

    def owner(self, piece: int) -> tuple[int, int]:
        """The rank that has a piece, and which of its pieces that is."""
        return owner(piece, self.context.size, self.each)

    def filled(self, x_BT: Tensor, value: float) -> Tensor:
        """Whole sequences, lengthened so that all pieces are of one length."""
        missing = self.count * self.length - x_BT.shape[1]
        end = x_BT.new_full((len(x_BT), missing, *x_BT.shape[2:]), value)
        return torch.cat([x_BT, end], dim=1) if missing else x_BT

    def cut(self, x_BT: Tensor, value: float) -> Tensor:
        """The pieces here, [Y, L], of whole sequences, whose end is filled up with ``value``."""
        x_BPL = self.filled(x_BT, value).unflatten(1, (self.count, self.length))
        return torch.cat([x_BPL[:, piece] for piece in self.mine])

    def memory(self, caches: Mapping[str, Any], ledger: Ledger) -> Memory:
        """What a model is given in place of these caches: in training empty ones, else those of the memory."""
        caches = {name: map_nodes(node, KINDS, self._store) for name, node in caches.items()}
        return Memory(self.document_Y, self.position_Y, **caches, ledger=ledger)

    def concluded(self, after: Memory) -> Memory:
        """What a call has left of such a memory as all pieces together leave it, alike on all ranks."""
        caches = map_nodes(after, (BankCache, DenseCache, Halo, Shared, Relay, Tensor, Ledger), self._kept)
        return replace(caches, **self.last_token)

    def weighed(self, mean: Tensor) -> Tensor:
        """A mean over the rows here, weighted so that the mean over the ranks is one over all rows."""
        here, everywhere = ((x >= 0).sum() for x in (self.cut(self.position_BT, -1), self.position_BT))
        return mean * (here * self.context.size) / everywhere.clamp(min=1)

    def places(self, ratio: int | None, count_B: Tensor | None = None) -> Places:
        """Where the slots come from of a bank with one for every ``ratio`` tokens of a document; None: for every token,
        padding too. All banks of a ratio have filled alike: ``count_B`` slots before."""
        if ratio not in self._places:
            self._places[ratio] = self._plan(ratio, count_B if self.keeps else None)
        return self._places[ratio]

    def halos(self, size: int, length: int) -> Halos:
        """Which entries travel where every piece has ``length`` of them, and wants ``size`` that stand before it."""
        return self._once((size, length), lambda: self._route(size, length))

    def _once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """What a call makes for all layers, and training for all calls: its lengths are few, those of prompts are not.
        It may be made in a validation, and then serves training."""
        known, key = self._known if self.keeps else self.context.known, (*key, self.each, self.position_BT.device)
        if key not in known:
            with torch.inference_mode(False):
                known[key] = make()
        return known[key]

    def _before(self, x_BT: Tensor, x_B: Tensor) -> Tensor:
        """The value at the position before each piece here, [Y]; before the first, that of the memory."""
        x_BT = torch.cat([x_B[:, None], x_BT], dim=1)
        return torch.cat([x_BT[:, piece * self.length] for piece in self.mine])

    def _store(self, node: Any) -> Any:
        """What stands in for a cache, or for a store in none."""
        if isinstance(node, DenseCache):
            return DenseCache(Shared(self, None, self._inner(node.entry)), self.places(None, node.count_B).before_Y)
        if isinstance(node, BankCache):
            key = None if node.key is None else self._store(node.key)
            before_Y = self.places(_ratio(node), node.count_B).before_Y
            return BankCache(self._store(node.pending), self._store(node.entry), key, before_Y)
        if isinstance(node, Column | StaticColumn):
            return Shared(self, node.ratio, self._inner(node))
        return Halo(self, node.size, self._inner(node)) if isinstance(node, Window) else Relay(self, self._inner(node))

    def _inner(self, store: Any) -> Any:
        return store if self.keeps else None

    def _kept(self, node: Any) -> Any:
        """What is left of one."""
        if isinstance(node, DenseCache):
            return DenseCache(self._kept(node.entry), self._filled(None))
        if isinstance(node, BankCache):
            key = None if node.key is None else self._kept(node.key)
            return BankCache(self._kept(node.pending), self._kept(node.entry), key, self._filled(_ratio(node)))
        return node.inner if isinstance(node, Halo | Shared | Relay) else node

    def _filled(self, ratio: int | None) -> Tensor:
        """Slots that a bank of that ratio has after all pieces; a copy for each bank."""
        return self._places[ratio].slots.after_B

    def _plan(self, ratio: int | None, count_B: Tensor | None) -> Places:
        position_BT, device = self.position_BT, self.position_BT.device
        if ratio is None:
            slots, new = every_token(position_BT, count_B), self.length
            ends_BT = torch.ones_like(position_BT, dtype=torch.bool)
        else:  # a piece may begin inside a group: it then ends one more than it could of its own tokens
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
        """Where each piece of each sequence stands among those of all ranks, [B, P]."""
        places = [rank * self.each + its for rank, its in map(self.owner, range(self.count))]
        place_P = self._once(("owners",), lambda: torch.tensor(places, device=device))
        return place_P * self.batch + torch.arange(self.batch, device=device)[:, None]

    def _route(self, size: int, length: int) -> Halos:
        """Ranks in order, each with its pieces in order, each with the places before it in order: so both sides count
        alike. Where something is kept, what would stand before one piece more goes to every rank."""
        context, device = self.context, self.position_BT.device
        further = [self.count] if self.keeps else []
        rows, sent = [torch.zeros(0, dtype=torch.int64)], [0] * context.size
        came: list[list[tuple[int, Tensor]]] = [[] for _ in range(context.size)]  # by source: piece here, places
        for target in range(context.size):
            for number, piece in enumerate(self.of(target) + further):
                first = piece * length - size
                for source in range(max(0, first) // length, piece):
                    begin, end = max(first, source * length), (source + 1) * length
                    owner, its = self.owner(source)
                    if owner == context.rank:
                        rows.append(torch.arange(begin, end) - source * length + its * length)
                        sent[target] += end - begin
                    if target == context.rank:
                        came[owner].append((number, torch.arange(begin, end) - first))
        got = [sum(len(place) for _, place in pairs) for pairs in came]
        wanted = self.mine + further
        # What was kept stands behind what has come: of a piece that begins at s, place e is its entry s + e.
        place_YE = sum(got) + torch.tensor(wanted)[:, None] * length + torch.arange(size)
        number = 0
        for piece, place in (pair for pairs in came for pair in pairs):
            place_YE[piece, place] = torch.arange(number, number + len(place))
            number += len(place)
        return Halos(torch.cat(rows).to(device), sent, got, place_YE.to(device))


def _ratio(bank: BankCache) -> int:
    """Tokens of a slot."""
    return cast(Column | StaticColumn, bank.entry).ratio


def owner(piece: int, ranks: int, each: int) -> tuple[int, int]:
    """Which of so many ranks has a piece, and which of its ``each`` pieces that is."""
    return (piece, 0) if each == 1 or piece < ranks else (2 * ranks - 1 - piece, 1)


@dataclass(frozen=True)
class Halo:
    """The last ``size`` entries before each piece: of other pieces, of the window ``inner`` that was kept before, or
    zeros, which no row sees."""

    pieces: Pieces
    size: int
    inner: Window | None

    def extend(self, new_BTC: Tensor) -> tuple[Tensor, WindowStore]:
        """Those of the pieces before, and the new ones behind them."""
        if not self.size or not new_BTC.shape[1]:  # nothing travels
            return (new_BTC, self) if self.inner is None else self.inner.extend(new_BTC)
        pieces = self.pieces
        halos = pieces.halos(self.size, new_BTC.shape[1])
        mine_NBC = new_BTC.unflatten(0, (pieces.each, -1)).transpose(1, 2).flatten(0, 1)
        came_NBC = routed(mine_NBC.index_select(0, halos.row_S), halos.sent, halos.got, pieces.context.group)
        all_NBC = torch.cat([came_NBC, self.kept(new_BTC)])
        all_YEBC = all_NBC.index_select(0, halos.place_YE.flatten()).unflatten(0, halos.place_YE.shape)
        before_YEC = all_YEBC[: pieces.each].transpose(1, 2).flatten(0, 1)
        seen_BEC = torch.cat([before_YEC, new_BTC], dim=1)
        if self.inner is None:
            return seen_BEC, self
        kept_BEC = self.inner.entry_BEC
        keep = min(self.size, kept_BEC.shape[1] + pieces.count * new_BTC.shape[1])
        after_BEC = in_dtype(last(all_YEBC[-1].transpose(0, 1), keep), kept_BEC.dtype)
        return seen_BEC, replace(self.inner, entry_BEC=after_BEC)

    def kept(self, new_BTC: Tensor) -> Tensor:
        """What was kept before, [E, B, C], with zeros in front of it."""
        zeros_EBC = new_BTC.new_zeros(self.size, self.pieces.batch, new_BTC.shape[2])
        if self.inner is None:
            return zeros_EBC
        kept_EBC = in_dtype(self.inner.entry_BEC, new_BTC.dtype).transpose(0, 1)
        return torch.cat([zeros_EBC, kept_EBC])[-self.size :]


@dataclass(frozen=True)
class Shared:
    """One value for each slot of a bank, on every rank: of all pieces, behind those of ``inner``."""

    pieces: Pieces
    ratio: int | None
    inner: ColumnStore | None

    def place(self, new_BGC: Tensor, slots: Slots) -> tuple[Tensor, ColumnStore]:
        """The values of all slots; in training as often as there are pieces here."""
        pieces = self.pieces
        places = pieces.places(self.ratio)
        new_BGC = _Slots.apply(new_BGC, places, pieces)
        if self.inner is None:
            return new_BGC.repeat(pieces.each, 1, 1), self
        return self.inner.place(new_BGC, places.slots)


@dataclass(frozen=True)
class Relay:
    """The state of a recurrence, from piece to piece; ``inner``: that before the first."""

    pieces: Pieces
    inner: StateStore | None

    def resume(self, empty_BHRC: Tensor) -> Tensor:
        """The state after the piece before."""
        context = self.pieces.context
        if context.rank:
            return received(empty_BHRC, context.rank - 1, context.group)
        return empty_BHRC if self.inner is None else self.inner.resume(empty_BHRC)

    def keep(self, after_BHRC: Tensor, out_BTHC: Tensor) -> tuple[StateStore, Tensor]:
        """Passes the state on."""
        context = self.pieces.context
        if context.rank < context.size - 1:
            out_BTHC = passed_on(after_BHRC, out_BTHC, context.rank + 1, context.group)
        if self.inner is None:
            return self, out_BTHC
        return self.inner.keep(told(after_BHRC, context.size - 1, context.group), out_BTHC)


KINDS = (DenseCache, BankCache, Window, Column, StaticColumn, State)


class _Slots(torch.autograd.Function):
    """Gathers the new slots of all ranks and puts each in its place; backward sums the gradients of all ranks, in their
    own dtype, for its owner. Since every slot has one source, both ways are gathers on each rank."""

    @staticmethod
    def forward(ctx: Any, new_YGC: Tensor, places: Places, pieces: Pieces) -> Tensor:
        ctx.places, ctx.pieces, ctx.shape = places, pieces, new_YGC.shape
        return _picked(gathered(new_YGC.flatten(0, 1), pieces.context.group), places.source_BG)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_NC = _picked(grads[0].flatten(0, 1), ctx.places.slot_N)
        return scattered(grad_NC, ctx.pieces.context.group).view(ctx.shape), None, None


def _picked(x_NC: Tensor, index: Tensor) -> Tensor:
    """The rows of these numbers, zeros for -1: [..., C]."""
    if not len(x_NC):
        return x_NC.new_zeros(*index.shape, x_NC.shape[1])
    return x_NC[index.clamp(min=0)].masked_fill((index < 0)[..., None], 0)
