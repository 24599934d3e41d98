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

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gsm.cache.ledger import Ledger
from gsm.cache.memory import BankCache, DenseCache, Memory, map_nodes
from gsm.cache.slots import Slots
from gsm.cache.store import Column, State, Window
from gsm.exchange import gathered, passed_on, received, routed, scattered
from gsm.span import document_positions, following_positions

IGNORED = -100


@dataclass(frozen=True, eq=False)
class Context:
    """The ranks that have the pieces of the same sequences.

    Attributes:
        group: these ranks, in the order of the pieces.
        halos: which rows go where, by what that depends on: made once.
    """

    group: dist.ProcessGroup
    halos: dict[tuple, Halos] = field(default_factory=dict, repr=False)

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
        place_YE: int64, for each piece here and each of its places: which of those that have come; -1: nothing stands
            there, before the beginning.
    """

    row_S: Tensor
    sent: list[int]
    got: list[int]
    place_YE: Tensor


class Places(NamedTuple):
    """Where the slots of a bank come from.

    Attributes:
        before_Y: int64, slots that are filled before each piece here.
        source_BF: int64, of each slot: its row among the new ones of all ranks; -1: it is not filled.
        slot_N: int64, of each of these rows: its slot, counted through the batch; -1: it is not used.
    """

    before_Y: Tensor
    source_BF: Tensor
    slot_N: Tensor


class Pieces:
    """The pieces of one batch.

    Args:
        context: the ranks.
        documents_BT: int64, of the whole sequences; None: each is one document.
        shape: of the whole sequences, [B, T].
        each: pieces that a rank has of a sequence, 1 or 2.
        device: where positions are to be.
    """

    def __init__(
        self, context: Context, documents_BT: Tensor | None, shape: tuple[int, int], each: int, device: torch.device
    ):
        self.context, self.each, (self.batch, self.tokens) = context, each, shape
        self.count = each * context.size
        self.length = -(-self.tokens // self.count)
        self.mine = self.of(context.rank)
        nothing_B = torch.full((self.batch,), -1, dtype=torch.int64, device=device)
        if documents_BT is None and self.tokens == self.count * self.length:
            self.documents_BT, document_BT = None, torch.zeros(shape, dtype=torch.int64, device=device)
            position_BT = following_positions(nothing_B, self.tokens)
        else:
            given_BT = torch.zeros(shape, dtype=torch.int64, device=device) if documents_BT is None else documents_BT
            self.documents_BT = document_BT = self.filled(given_BT, -1)
            position_BT = document_positions(document_BT, nothing_B, nothing_B)
        self.position_BT = position_BT
        # What stood before each piece: its document, and the position there.
        self.document_Y, self.position_Y = (self._before(x_BT) for x_BT in (document_BT, position_BT))
        self._places: dict[int | None, Places] = {}

    def of(self, rank: int) -> list[int]:
        """The pieces of a rank, in the order in which its batch has them."""
        return [rank] if self.each == 1 else [rank, self.count - 1 - rank]

    def owner(self, piece: int) -> tuple[int, int]:
        """The rank that has a piece, and which of its pieces that is."""
        if self.each == 1 or piece < self.context.size:
            return piece, 0
        return self.count - 1 - piece, 1

    def filled(self, x_BT: Tensor, value: int) -> Tensor:
        """Whole sequences, lengthened so that all pieces are of one length."""
        missing = self.count * self.length - x_BT.shape[1]
        return torch.nn.functional.pad(x_BT, (0, missing), value=value) if missing else x_BT

    def cut(self, x_BT: Tensor, value: int) -> Tensor:
        """The pieces here, [Y, L], of whole sequences, whose end is filled up with ``value``."""
        x_BPL = self.filled(x_BT, value).unflatten(1, (self.count, self.length))
        return x_BPL[:, self.mine].transpose(0, 1).flatten(0, 1).contiguous()

    def memory(self, empty: dict[str, Any], ledger: Ledger) -> Memory:
        """What a model is given in place of the caches ``empty``."""
        caches = {name: map_nodes(node, KINDS, self._store) for name, node in empty.items()}
        return Memory(self.document_Y, self.position_Y, **caches, ledger=ledger)

    def weighed(self, mean: Tensor) -> Tensor:
        """A mean over the rows here, weighted so that the mean over the ranks is one over all rows."""
        here, everywhere = ((x >= 0).sum() for x in (self.cut(self.position_BT, -1), self.position_BT))
        return mean * (here * self.context.size) / everywhere.clamp(min=1)

    def places(self, ratio: int | None) -> Places:
        """Where the slots come from of a bank with one for every ``ratio`` tokens of a document; None: for every token,
        padding too."""
        if ratio not in self._places:
            self._places[ratio] = self._plan(ratio)
        return self._places[ratio]

    def halos(self, size: int, length: int) -> Halos:
        """Which entries travel where every piece has ``length`` of them, and wants ``size`` that stand before it."""
        key = size, length, self.each, self.position_BT.device
        if key not in self.context.halos:
            self.context.halos[key] = self._route(size, length)
        return self.context.halos[key]

    def _before(self, x_BT: Tensor) -> Tensor:
        """The value at the position before each piece here, [Y]; -1 before the first."""
        x_BT = torch.nn.functional.pad(x_BT, (1, 0), value=-1)
        return torch.cat([x_BT[:, piece * self.length] for piece in self.mine])

    def _store(self, node: Any) -> Any:
        """What stands in for a cache, or for a store in none."""
        if isinstance(node, DenseCache):
            return DenseCache(Shared(self, None), self.places(None).before_Y)
        if isinstance(node, BankCache):
            key = None if node.key is None else Shared(self, node.entry.ratio)
            ratio = node.entry.ratio
            return BankCache(Halo(self, node.pending.size), Shared(self, ratio), key, self.places(ratio).before_Y)
        if isinstance(node, Column):
            return Shared(self, node.ratio)
        return Halo(self, node.size) if isinstance(node, Window) else Relay(self)

    def _plan(self, ratio: int | None) -> Places:
        device, length = self.position_BT.device, self.length
        every = ratio is None
        position_BT = self.filled(self.position_BT, -1)
        ends_BT = torch.ones_like(position_BT, dtype=torch.bool)
        if ratio is not None:
            ends_BT = (position_BT >= 0) & (position_BT % ratio == ratio - 1)
        slot_BT = ends_BT.cumsum(1) - ends_BT.long()  # slots before each position
        new, slots = (length, position_BT.shape[1]) if every else (-(-length // ratio), position_BT.shape[1] // ratio)
        before_BP = slot_BT[:, ::length]
        owners = torch.tensor([self.owner(piece) for piece in range(self.count)], device=device)
        first_P = (owners[:, 0] * self.each + owners[:, 1]) * self.batch
        sequence_BP = first_P + torch.arange(self.batch, device=device)[:, None]
        row_BPL = sequence_BP[..., None] * new + (slot_BT.unflatten(1, (-1, length)) - before_BP[..., None])
        row_BT, rows = row_BPL.flatten(1), self.count * self.batch * new
        source_BF = slot_BT.new_full((self.batch, slots + 1), -1)
        source_BF = source_BF.scatter(1, torch.where(ends_BT, slot_BT, slots), row_BT)[:, :slots]
        flat_BT = slot_BT + torch.arange(self.batch, device=device)[:, None] * slots
        slot_N = slot_BT.new_full((rows + 1,), -1)
        slot_N = slot_N.scatter(0, torch.where(ends_BT, row_BT, rows).flatten(), flat_BT.flatten())[:rows]
        return Places(before_BP[:, self.mine].T.flatten(), source_BF, slot_N)

    def _route(self, size: int, length: int) -> Halos:
        """Ranks in order, each with its pieces in order, each with the places before it in order: so both sides count
        alike."""
        context, device = self.context, self.position_BT.device
        rows: list[Tensor] = []
        sent, came = [0] * context.size, [[] for _ in range(context.size)]  # came: by source, (piece here, places)
        for target in range(context.size):
            for number, piece in enumerate(self.of(target)):
                start = piece * length
                for source in range(max(0, start - size) // length, piece):
                    begin, end = max(start - size, source * length), (source + 1) * length
                    owner, its = self.owner(source)
                    if owner == context.rank:
                        rows.append(torch.arange(begin, end) - source * length + its * length)
                        sent[target] += end - begin
                    if target == context.rank:
                        came[owner].append((number, torch.arange(begin, end) - (start - size)))
        place_YE, number = torch.full((self.each, size), -1), 0
        for pairs in came:
            for piece, place in pairs:
                place_YE[piece, place] = torch.arange(number, number + len(place))
                number += len(place)
        got = [sum(len(place) for _, place in pairs) for pairs in came]
        row_S = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64)
        return Halos(row_S.to(device), sent, got, place_YE.to(device))


@dataclass(frozen=True)
class Halo:
    """The last ``size`` entries before each piece; zeros before the beginning, which no row sees."""

    pieces: Pieces
    size: int

    def extend(self, new_BTC: Tensor) -> tuple[Tensor, Halo]:
        """Those of the pieces before, and the new ones behind them."""
        if not self.size:
            return new_BTC, self
        pieces, width = self.pieces, new_BTC.shape[2]
        halos = pieces.halos(self.size, new_BTC.shape[1])
        mine_NBC = new_BTC.unflatten(0, (pieces.each, -1)).transpose(1, 2).flatten(0, 1)
        came_NBC = routed(mine_NBC.index_select(0, halos.row_S), halos.sent, halos.got, pieces.context.group)
        came_NBC = torch.cat([came_NBC, came_NBC.new_zeros(1, pieces.batch, width)])  # for places of -1, the last one
        place_N = halos.place_YE.flatten().remainder(len(came_NBC))
        before_BEC = came_NBC.index_select(0, place_N).unflatten(0, (pieces.each, -1)).transpose(1, 2).flatten(0, 1)
        return torch.cat([before_BEC, new_BTC], dim=1), self


@dataclass(frozen=True)
class Shared:
    """One value for each slot of all pieces, on every rank."""

    pieces: Pieces
    ratio: int | None

    def place(self, new_BGC: Tensor, slots: Slots) -> tuple[Tensor, Shared]:
        """The values of all slots, as often as there are pieces here."""
        return _Slots.apply(new_BGC, self.pieces.places(self.ratio), self.pieces), self


@dataclass(frozen=True)
class Relay:
    """The state of a recurrence, from piece to piece."""

    pieces: Pieces

    def resume(self, empty_BHRC: Tensor) -> Tensor:
        """The state after the piece before; of the first, the empty one."""
        context = self.pieces.context
        return received(empty_BHRC, context.rank - 1, context.group) if context.rank else empty_BHRC

    def keep(self, after_BHRC: Tensor, out: Tensor) -> tuple[Relay, Tensor]:
        """Passes the state on."""
        context = self.pieces.context
        if context.rank == context.size - 1:
            return self, out
        return self, passed_on(after_BHRC, out, context.rank + 1, context.group)


KINDS = (DenseCache, BankCache, Window, Column, State)


class _Slots(torch.autograd.Function):
    """Gathers the new slots of all ranks and puts each in its place; backward takes each gradient to its owner. Both
    are gathers, since every slot has one source: nothing is added in any order."""

    @staticmethod
    def forward(ctx: Any, new_YGC: Tensor, places: Places, pieces: Pieces) -> Tensor:
        ctx.places, ctx.pieces, ctx.shape = places, pieces, new_YGC.shape
        all_NC = gathered(new_YGC.flatten(0, 1), pieces.context.group)
        return _picked(all_NC, places.source_BF).repeat(pieces.each, 1, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_BFC = grads[0].unflatten(0, (ctx.pieces.each, -1)).sum(0)
        grad_NC = _picked(grad_BFC.flatten(0, 1), ctx.places.slot_N)
        return scattered(grad_NC, ctx.pieces.context.group).view(ctx.shape), None, None


def _picked(x_NC: Tensor, index: Tensor) -> Tensor:
    """The rows of these numbers, zeros for -1: [..., C]."""
    if not len(x_NC):
        return x_NC.new_zeros(*index.shape, x_NC.shape[1])
    return x_NC[index.clamp(min=0)].masked_fill((index < 0)[..., None], 0)
