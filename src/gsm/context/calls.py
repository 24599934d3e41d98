"""How ranks call a model together on sequences that they divide."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gsm.cache.memory import Memory, holds
from gsm.cache.store import RecurrentState
from gsm.context.exchange import summed
from gsm.context.pieces import Pieces, Ranks
from gsm.layers.feed_forward import Balance
from gsm.models.balancing import report_balance
from gsm.models.base import CHUNK, LanguageModel, Output
from gsm.models.checks import IGNORED, check_call, check_memory, whole_number


@dataclass(frozen=True, eq=False)
class Context(Ranks):
    """The ranks that divide the same sequences. Each is given all of them, and all call the same methods together."""

    def call(
        self, model: LanguageModel, tokens: Tensor, documents: Tensor | None = None, targets: Tensor | None = None
    ) -> tuple[Output, Tensor | None]:
        """Return the output of ``model`` in training for the pieces of this rank, and the targets of these pieces.

        The mean over the ranks of the losses, that of the targets weighted by their number, is the loss of one rank
        with the whole sequences; so are the gradients.

        Args:
            model: the same on all ranks.
            tokens, documents, targets: whole sequences, as of ``LanguageModel.forward``.
        """
        arguments, pieces = self.divided(model, tokens, documents, targets)
        out = model(**arguments)
        losses = {name: pieces.weighed(loss) for name, loss in out.losses.items()}
        expert_losses, expert_metrics = report_balance(of_whole_sequences(out.balances, pieces))
        out = replace(out, losses=losses | expert_losses, metrics=out.metrics | expert_metrics)
        return out, arguments["targets"]

    def divided(
        self, model: LanguageModel, tokens: Tensor, documents: Tensor | None = None, targets: Tensor | None = None
    ) -> tuple[dict[str, Any], Pieces]:
        """Return the arguments of ``forward`` for the pieces of this rank, and the pieces."""
        check_call(model.vocabulary, tokens, documents, targets, None)
        documents, shape = None if documents is None else documents.long(), (tokens.shape[0], tokens.shape[1])
        memory = model.start()
        # A state goes from piece to piece, in order; without one, two pieces make the searches of all ranks even.
        each = 1 if holds(memory, RecurrentState) else 2
        pieces = Pieces(self, shape, documents, each=each, device=tokens.device)
        arguments = {
            "tokens": pieces.cut(tokens, 0),
            "documents": None if pieces.documents_BT is None else pieces.cut(pieces.documents_BT, -1),
            "targets": None if targets is None else pieces.cut(targets.long(), IGNORED),
            "memory": pieces.substitute(memory),
        }
        return arguments, pieces

    @torch.no_grad()
    def prefill(
        self,
        model: LanguageModel,
        tokens: Tensor,
        memory: Memory,
        chunk: int = CHUNK,
        documents: Tensor | None = None,
    ) -> Output:
        """Read a prompt together, as ``LanguageModel.prefill`` does; all ranks have the same memory and output then.

        Each rank reads ``chunk`` tokens at a time. Every rank reads the end of the prompt, since upper layers need more
        of it than banks and states.

        Args:
            model: the same on all ranks.
            tokens: int64 [B, T].
            memory: the same on all ranks.
            chunk, documents: as of ``LanguageModel.prefill``.

        Raises:
            ValueError: on all ranks, as ``LanguageModel.prefill``.
        """
        chunk = whole_number("chunk", chunk)
        check_call(model.vocabulary, tokens, documents, None, None, has_memory=True)
        check_memory(memory, model.start().ledger.layout, tokens, 1)
        before = memory.mark() if memory.capacity is not None else None
        start, left = 0, tokens.shape[1] - _suffix(model)
        try:
            while piece := min(chunk, max(0, left - start) // self.size):
                span = slice(start, start + piece * self.size)
                start = span.stop
                part = None if documents is None else documents[:, span].long()
                memory = self._read(model, tokens[:, span], part, memory, tokens.shape[1] - start)
            return model.prefill(
                tokens[:, start:], memory, chunk, documents=None if documents is None else documents[:, start:]
            )
        except BaseException:  # an interruption too: a prompt is read as a whole, or not at all
            if before is not None:
                memory.rewind(before)
            raise

    def _read(
        self, model: LanguageModel, tokens: Tensor, documents: Tensor | None, memory: Memory, later: int
    ) -> Memory:
        """Return the memory after these tokens, one piece for each rank; ``later`` tokens come after them."""
        length = tokens.shape[1]
        narrow = memory.narrow(memory.used + length)
        pieces = Pieces(self, (len(tokens), length), documents, each=1, device=tokens.device, memory=narrow)
        part = None if documents is None else pieces.cut(documents, -1)
        rows = 1 - later - (self.size - 1 - self.rank) * pieces.length
        after = model(pieces.cut(tokens, 0), documents=part, memory=pieces.substitute(narrow), rows=rows).memory
        after = narrow.advance(pieces.concluded(after), length, documents is None, 1 - later)
        return after if memory.capacity is None else memory  # a narrow memory has no room for the next chunk


def of_whole_sequences(balances: Sequence[Balance], pieces: Pieces) -> list[Balance]:
    """Return where the rows of whole sequences were sent. The scores remain the scores of this rank's rows, times the
    number of ranks. So the mean of the ranks' losses is the loss of whole sequences, and each rank has the gradient of
    its own rows."""
    if not balances:
        return []
    counted_LYU = torch.stack([torch.cat([balance.sent_BE, balance.rows_B[:, None]], dim=-1) for balance in balances])
    counted_LBU = summed(counted_LYU.unflatten(1, (pieces.each, -1)).sum(1), pieces.ranks.group)
    result = []
    for balance, counted_BU in zip(balances, counted_LBU, strict=True):
        share_BE = balance.share_BE.unflatten(0, (pieces.each, -1)).sum(0) * pieces.ranks.size
        result.append(balance._replace(sent_BE=counted_BU[:, :-1], share_BE=share_BE, rows_B=counted_BU[:, -1]))
    return result


def _suffix(model: LanguageModel) -> int:
    """Return the length of the end of a prompt: of the tokens before it, a layer needs all positions or none."""
    many = 1 << 40

    def all_or_none(later: int) -> bool:
        rows = model.schedule(many, 1 - later)
        counts = {*rows.encoder, *rows.decoder, rows.writer, rows.state, rows.decoder_input}
        return counts <= {0, many}

    return bisect_left(range(1, many), True, key=all_or_none) + 1
