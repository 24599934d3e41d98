"""What every language model of the project answers to: one ``forward`` for training, prefill and decode, and the same
memory protocol.

The three ways differ in their arguments alone:

                        new positions     rows asked for           memory
    training            the sequence      all                      none
    prefill             the prompt        1                        fresh
    chunked prefill     a chunk           1 - what comes after     of the chunks before
    decode              1                 1                        of all before
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from gsm.cache.ledger import Ledger
from gsm.cache.memory import Memory, forgetful, holds, no_last_token
from gsm.cache.pieces import Context, Pieces
from gsm.cache.store import State
from gsm.costs.primitives import Layer, unknown_cost
from gsm.layers.block import Block
from gsm.layers.convolution import ShortConvolution
from gsm.layers.experts import Experts
from gsm.layers.feed_forward import Balance
from gsm.layers.indexer_training import Frozen, IndexerTraining, indexer_losses
from gsm.layers.linear import Linear, draw
from gsm.layers.norm import RMSNorm
from gsm.models.balancing import layers_with_experts, report_balance
from gsm.models.checks import IGNORED, check_call, check_memory, check_room
from gsm.models.prompts import Prompt, as_batch
from gsm.models.report import Report, count_parameters
from gsm.models.sampling import check_sampling, continuation
from gsm.models.schedule import Schedule
from gsm.observe import Calls, called, tap
from gsm.shapes import lowered
from gsm.span import Span, document_positions, following_positions
from gsm_kernels import IndexerLoss, linear_cross_entropy

CHUNK = 4096  # tokens of a long prompt that are read at a time, unless somebody says otherwise


@dataclass(frozen=True)
class Output:
    """What a model returns.

    Attributes:
        hidden_BRD: normed output of the last layer for the rows asked for.
        head: the output projection, for ``logits``.
        loss: mean cross-entropy over the targets (None: no targets were given).
        losses: named scalars that a trainer adds to ``loss``, already weighted.
        metrics: named scalars to look at.
        memory: the memory after the call (None: none was given).
        load_LE: in training with experts: int64, rows that each layer sent to each of its experts; what ``rebalance``
            wants, summed over all batches and ranks of an optimiser step.
    """

    hidden_BRD: Tensor
    head: nn.Module
    loss: Tensor | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, Tensor] = field(default_factory=dict)
    memory: Memory | None = None
    load_LE: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """Scores of the next token, [B, R, V]; computed at each access."""
        return self.head(self.hidden_BRD)


@dataclass(frozen=True)
class Trace:
    """What ``LanguageModel.run`` returns, the body without final norm and head.

    Attributes:
        hidden_BRD: output of the last layer for the rows asked for, before the final norm.
        memory: the stores after the call; of the last token it still says what it said before.
        indexer_losses: in training: loss and recall of each indexer, with its layer's or stage's name (``encoder3``).
        metrics: named scalars to look at.
        balances: in training: of every layer with experts what was sent to them, in order.
    """

    hidden_BRD: Tensor
    memory: Memory
    indexer_losses: list[tuple[str, IndexerLoss]] = field(default_factory=list)
    metrics: dict[str, Tensor] = field(default_factory=dict)
    balances: list[Balance] = field(default_factory=list)


class LanguageModel(nn.Module, ABC, Calls):
    """Embedding, a body (``run``), final norm and a head tied to the embedding.

    The embedding is drawn with variance 1 / D and scaled by sqrt(D) on the way in, so that the first norm meets unit
    variance. With the head tied to it, a fresh model bets on repeating the current token, by a logit of sqrt(D) times
    the final norm's weight; that weight starts at sqrt(128 / D), so that the bet does not grow with the width. (At
    D = 128, smaller ones were tried and learned no faster.)

    Args:
        vocabulary: rows of the embedding (V).
        dim: model width (D).
        indexer_weight: weight of the indexers' loss, the mean over all indexers.
    """

    indexer_training: IndexerTraining = Frozen()  # without indexers nothing is learned

    def __init__(self, vocabulary: int, dim: int, *, indexer_weight: float = 1.0):
        super().__init__()
        self.vocabulary, self.dim, self.indexer_weight = vocabulary, dim, indexer_weight
        self.embedding = nn.Embedding(vocabulary, dim)
        draw(self.embedding.weight, dim**-0.5)
        self.norm = RMSNorm(dim)
        nn.init.constant_(self.norm.weight, (128 / dim) ** 0.5)
        self.head = Linear(dim, vocabulary)
        self.head.weight = self.embedding.weight
        self._layouts: dict[torch.dtype, tuple[tuple, ...]] = {}
        self._forgetful: dict[str, Any] | None = None
        self._empty: dict[str, Any] = {}

    @property
    def reach(self) -> int | None:
        """How many positions back a token can change an output; None: any number, or not known."""
        return None

    @property
    def parameter_note(self) -> str:
        """What a table of parameters should say about this model's number."""
        return ""

    def state_bytes(self, memory: Memory) -> int | None:
        """Bytes of what the decoder knows of the past: of GSM the state, of a comparator all that it keeps; None for
        the baseline, whose decoder's bank grows beside the encoder's."""
        return memory.breakdown().get("shared_state")

    @abstractmethod
    def run(self, x_BTD: Tensor, span: Span, memory: Memory) -> Trace:
        """The body: from embedded tokens to the hidden states of the rows asked for."""

    @abstractmethod
    def schedule(self, new: int, rows: int) -> Schedule:
        """How many rows each layer produces of so many new positions when ``rows`` are asked for."""

    @abstractmethod
    def empty_memory(self, batch: int) -> dict[str, Any]:
        """The fields of ``Memory`` that this model uses, empty."""

    def layer_costs(self) -> list[Layer]:
        """What each layer costs, in the order in which they run. Raises ValueError for a model or a part that does not
        say."""
        raise unknown_cost(self, "layer_costs()")

    def forward(
        self,
        tokens: Tensor,
        documents: Tensor | None = None,
        targets: Tensor | None = None,
        memory: Memory | None = None,
        rows: int | None = None,
    ) -> Output:
        """One forward for everything.

        Args:
            tokens: int64 [B, T].
            documents: int [B, T], contiguous runs of equal ids, -1 for padding; they may differ between sequences.
                Left out: one document, or with a memory the last one goes on.
            targets: int64 [B, T], already shifted, -100 for positions that do not count.
            memory: what ``start`` or an earlier call returned. A growing one is never changed; a static one is, once
                the call has succeeded, and is itself ``Output.memory``.
            rows: trailing positions for which an output is wanted (default: all). With a memory also 0 or less: none,
                and the first one that will be wanted comes 1 - rows positions later; computed is what that one needs.

        Raises:
            ValueError: naming field, value and limit.
        """
        check_call(self.vocabulary, tokens, documents, targets, rows, remembered=memory is not None)
        if memory is not None:
            check_memory(memory, self._layout(), tokens, rows)
        tokens, targets = tokens.long(), None if targets is None else targets.long()
        batch, length = tokens.shape
        # The ledger is named, for torch.compile cannot trace a dataclass that makes one by itself.
        before = memory or Memory(**no_last_token(batch, tokens.device), **self._nothing_kept(), ledger=Ledger())
        single_document = documents is None
        if documents is None:
            document_B = before.document_B.clamp(min=0)
            position_BT = following_positions(before.position_B, length)
        else:
            documents = documents.long()
            document_B = documents[:, -1]
            position_BT = document_positions(documents, before.document_B, before.position_B)
        span = Span(position_BT, length if rows is None else rows)
        if single_document:
            span = replace(span, single_document=True) if memory is None else memory.continued(span)
        pieces = before.ledger.pieces
        if pieces is not None:
            span = replace(span, pieces=pieces.count, tokens=pieces.tokens)
        # Nothing else would round what an embedding gives, and the residual streams are most of what a layer moves.
        x_BTD = lowered(self.embedding(tokens) * self.dim**0.5)
        called(self)
        tap("position", position_BT, fixed="what a row sees follows from it; to count anew, give documents=")
        trace = self.run(tap("embedding", x_BTD), span, before)
        hidden_BRD = self.norm(tap("hidden", trace.hidden_BRD))
        losses, metrics = indexer_losses(trace.indexer_losses, self.indexer_weight)
        if pieces is not None:
            losses = {name: pieces.weighed(loss) for name, loss in losses.items()}
        experts = report_balance(trace.balances, pieces)
        out = Output(
            hidden_BRD,
            self.head,
            loss=self._loss(hidden_BRD, targets),
            losses=losses | experts.losses,
            metrics=trace.metrics | metrics | experts.metrics,
            load_LE=experts.load_LE,
        )
        if memory is None:
            return out
        # Last, so that a call that fails anywhere leaves a static memory as it was. The documents are a copy: of one
        # token, the caller's own tensor would do for the memory, and may be written again.
        last_token = {"document_B": document_B.clone(), "position_B": position_BT[:, -1]}
        after = replace(trace.memory, **last_token)
        if pieces is None:
            after = memory.advance(after, length, single_document, span.rows)
        return replace(out, memory=after)

    def start(self, batch: int = 1, capacity: int | None = None) -> Memory:
        """An empty memory for ``batch`` sequences.

        Args:
            batch: number of sequences.
            capacity: None for a memory that grows: a call returns the next one, and none is ever changed. A number of
                tokens for a static one: buffers for so many, which calls write in place, in which no shape depends on
                what has been read, and for which nobody asks the device: fit for a CUDA graph. (A replay runs no
                Python: count what it reads with ``memory.ledger.claim``.)

        Raises:
            ValueError: for a batch or a capacity below 1.
        """
        if batch < 1:
            raise ValueError(f"batch must be at least 1, got {batch}")
        last_token = no_last_token(batch, self.embedding.weight.device)
        memory = Memory(**last_token, **self.empty_memory(batch), ledger=Ledger(self._layout()))
        return memory if capacity is None else memory.static(capacity)

    def divided(
        self, context: Context, tokens: Tensor, documents: Tensor | None = None, targets: Tensor | None = None
    ) -> dict[str, Any]:
        """What ``forward`` takes on one of the ranks that share these sequences, for its pieces of them.

        The mean over the ranks of what it then returns, weighted by their targets, is what one rank would return; and
        so are the gradients, if each rank weights its loss so and adds ``losses`` as they are.

        Args:
            context: the ranks, all of which are given the same sequences, and call ``forward`` together.
            tokens, documents, targets: as of ``forward``, of whole sequences.
        """
        check_call(self.vocabulary, tokens, documents, targets, None)
        self._nothing_kept()
        documents = None if documents is None else documents.long()
        pieces = Pieces(
            context, (tokens.shape[0], tokens.shape[1]), documents, each=self.pieces_each, device=tokens.device
        )
        ledger = Ledger(self._layout(), single_document=False, pieces=pieces)
        return {
            "tokens": pieces.cut(tokens, 0),
            "documents": None if pieces.documents_BT is None else pieces.cut(pieces.documents_BT, -1),
            "targets": None if targets is None else pieces.cut(targets.long(), IGNORED),
            "memory": pieces.memory(self._empty, ledger),
        }

    @torch.no_grad()
    def prefill(
        self,
        prompt: Prompt,
        memory: Memory,
        chunk: int = CHUNK,
        documents: Tensor | None = None,
        context: Context | None = None,
    ) -> Output:
        """Reads a prompt in chunks, computing of each only what the last row needs; returns the last row's output.

        Peak memory beyond the caches grows with ``chunk``, not with T. No gradients are recorded, because they would
        end at the border of the last chunk; where they are wanted, call the model itself.

        Args:
            prompt: int64 [B, T] or [T], or a sequence of B prompts of any lengths, each the beginning of a document.
            memory: what ``start`` or an earlier call returned; for prompts of different lengths a fresh one.
            chunk: tokens read at a time.
            documents: as in ``forward``; only for a tensor [B, T].
            context: ranks that divide the prompt, each of which is given all of it and reads ``chunk`` tokens at a
                time, and the end, of which upper layers need more than banks, like all others; the same memory and
                output are on all of them then.

        Raises:
            ValueError: as ``forward``; before anything is read if the memory has no room for the whole prompt.
        """
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1 token, got {chunk}")
        tokens, padding = as_batch(prompt, self.embedding.weight.device)
        if padding is not None and (documents is not None or memory.used):
            raise ValueError(
                "prompts of different lengths begin new documents: give them a fresh memory, start(batch=...), "
                f"and no documents of their own; this memory has read {memory.used} tokens"
            )
        documents = padding if documents is None else documents
        if documents is not None and documents.shape != tokens.shape:
            raise ValueError(
                f"documents must have the shape of tokens, {list(tokens.shape)}, got {list(documents.shape)}"
            )
        memory.ledger.require(tokens.shape[1])
        in_parts = tokens.shape[1] > chunk or context is not None
        before = memory.mark() if memory.capacity is not None and in_parts else None
        try:
            if context is None:
                return self._read(tokens, documents, memory, chunk)
            return self._read_together(tokens, documents, memory, chunk, context)
        except BaseException:  # an interruption too: what was half read has not been read
            if before is not None:
                memory.rewind(before)
            raise

    def _read(self, tokens: Tensor, documents: Tensor | None, memory: Memory, chunk: int) -> Output:
        """The chunks of a prompt, one after the other; the output of the last row, with the memory after it."""
        out, length = None, tokens.shape[1]
        for start in range(0, max(length, 1), chunk):
            tokens_BT = tokens[:, start : start + chunk]
            part, later = None if documents is None else documents[:, start : start + chunk], length - start - chunk
            narrow = memory.narrow(memory.used + tokens_BT.shape[1])
            out = self(tokens_BT, documents=part, memory=narrow, rows=1 - max(0, later))
            memory = out.memory if memory.capacity is None else memory  # what is narrow has no room for the next chunk
        assert out is not None
        return replace(out, memory=memory)

    def _read_together(
        self, tokens: Tensor, documents: Tensor | None, memory: Memory, chunk: int, context: Context
    ) -> Output:
        """The chunks of a prompt, as many at a time as there are ranks; its end, of which more than banks and states is
        needed, is read by each of them."""
        check_call(self.vocabulary, tokens, documents, None, None)  # as a whole: all ranks refuse it, or none
        check_memory(memory, self._layout(), tokens, 1)
        start, length = 0, tokens.shape[1]
        while piece := min(chunk, max(0, length - start - self._end) // context.size):
            here = slice(start, start + piece * context.size)
            start = here.stop
            part = None if documents is None else documents[:, here].long()
            tokens_BT, narrow = tokens[:, here], memory.narrow(memory.used + piece * context.size)
            pieces = Pieces(
                context, (len(tokens), tokens_BT.shape[1]), part, each=1, device=tokens.device, memory=narrow
            )
            ledger = Ledger(memory.ledger.layout, single_document=False, pieces=pieces)
            divided = pieces.memory({name: getattr(narrow, name) for name in self.empty_memory(0)}, ledger)
            local = None if part is None else pieces.cut(part, -1)
            later = length - start + (context.size - 1 - context.rank) * piece
            after = self(pieces.cut(tokens_BT, 0), documents=local, memory=divided, rows=1 - later).memory
            given = tokens_BT.shape[1], documents is None, 1 - (length - start)
            after = narrow.advance(pieces.concluded(after), *given)
            memory = after if memory.capacity is None else memory
        return self._read(tokens[:, start:], None if documents is None else documents[:, start:], memory, chunk)

    @cached_property
    def _end(self) -> int:
        """How many tokens of a prompt are its end: of those before it, a layer needs all positions or none."""
        many = 1 << 40

        def all_or_none(later: int) -> bool:
            rows = self.schedule(many, 1 - later)
            found = {*rows.encoder, *rows.decoder, rows.writer, rows.state, rows.decoder_input}
            return found <= {0, many}

        return bisect_left(range(1, many), True, key=all_or_none) + 1

    def generate(self, prompt: Prompt, max_new_tokens: int = 64, temperature: float = 0.0, **options) -> Tensor:
        """New token ids [B, max_new_tokens] after a prompt; arguments and errors as in ``stream``. The length
        being known, the memory is a static one, unless ``capacity`` says otherwise: as fast on a CPU, and a GPU never
        waits."""
        tokens, _ = as_batch(prompt, self.embedding.weight.device)
        options.setdefault("capacity", max(tokens.shape[1] + max_new_tokens - 1, 1))
        return torch.stack(list(self.stream(prompt, max_new_tokens, temperature, **options)), dim=1)

    @torch.no_grad()
    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        *,
        top_p: float = 1.0,
        chunk: int = CHUNK,
        generator: torch.Generator | None = None,
        capacity: int | None = None,
    ) -> Iterator[Tensor]:
        """Yields one new id per sequence, [B], at a time.

        Args:
            prompt: int64 [B, T] or [T], or a sequence of B prompts of any lengths; not empty.
            max_new_tokens: how many.
            temperature: 0 takes the likeliest token, else logits are divided by it and sampled.
            top_p: sample from the smallest set of likeliest tokens that holds this probability.
            chunk: tokens of the prompt read at a time.
            generator: source of randomness on the model's device.
            capacity: as in ``start``: None for a memory that grows.

        Raises:
            ValueError: as ``forward``; for fewer new tokens than 1, or a capacity that does not hold them all.
        """
        tokens, documents = as_batch(prompt, self.embedding.weight.device)
        check_sampling(temperature, top_p, generator, self.embedding.weight.device)
        check_room(capacity, tokens.shape[1], max_new_tokens)
        with self.evaluating():
            out = self.prefill(tokens, self.start(tokens.shape[0], capacity), chunk, documents)
        memory = out.memory

        def step(token_B: Tensor) -> Tensor:
            nonlocal memory
            with self.evaluating():
                out = self(token_B[:, None], memory=memory, rows=1)
            memory = out.memory
            return out.logits[:, -1]

        yield from continuation(out.logits[:, -1], step, max_new_tokens, temperature, top_p, generator)

    def compile_blocks(self, **options: Any) -> None:
        """Compiles block by block when they are first called: blocks of one kind have one graph, whatever the depth.

        In evaluation they run as they are written: graphs of both modes, and of whoever records, would be more than
        PyTorch keeps of one function.

        Args:
            options: of ``torch.compile``.
        """
        for part in self.modules():
            if isinstance(part, Block):
                part.compile(**options)
                part._compiled_call_impl = _in_training(part, part._compiled_call_impl)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Parameters by how an optimiser should treat them: ``table_decay`` (embedding and head, filters), ``decay``
        (what is multiplied with), ``no_decay`` (norms, scales, biases, sinks), the last two for indexers, and
        ``expert_decay``, which ranks may divide otherwise than the rest.

        By shape, so that whatever is not a matrix is not decayed; but tables by type, and indexers by name.
        """
        groups: dict[str, list[nn.Parameter]] = {
            k: [] for k in ("table_decay", "decay", "no_decay", "indexer_decay", "indexer_no_decay", "expert_decay")
        }
        kinds = nn.Embedding | ShortConvolution
        tables = {id(table) for part in self.modules() if isinstance(part, kinds) for table in part.parameters()}
        experts = {id(weight) for part in self.modules() if isinstance(part, Experts) for weight in part.parameters()}
        for name, parameter in self.named_parameters():
            kind = "no_decay" if parameter.ndim < 2 else "table_decay" if id(parameter) in tables else "decay"
            kind = "expert_decay" if id(parameter) in experts else kind
            groups[f"indexer_{kind}" if ".indexer." in name else kind].append(parameter)
        return groups

    def rebalance(self, load_LE: Tensor) -> None:
        """Moves the biases of all experts one step towards even loads: to be called after each optimiser step, with
        ``Output.load_LE`` summed over its batches and ranks."""
        for layer, load_E in zip(layers_with_experts(self), load_LE, strict=True):
            layer.rebalance(load_E)

    def parameter_report(self) -> Report:
        """Parameters in total, active for one token, and by part; works on the meta device."""
        return count_parameters(self)

    def _loss(self, hidden_BRD: Tensor, targets: Tensor | None) -> Tensor | None:
        if targets is None:
            return None
        # Under autocast the norm may return float32; the logits have to be in the half type.
        hidden_ND = lowered(hidden_BRD).flatten(0, 1)  # N = B R
        return linear_cross_entropy(
            hidden_ND, self.head.weight, targets[:, -hidden_BRD.shape[1] :].reshape(-1), IGNORED
        )

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode inside the block; what was in training is so again behind it."""
        training = [module for module in self.modules() if module.training] if self.training else []
        try:
            for module in training:
                module.training = False
            yield
        finally:
            for module in training:
                module.training = True

    def _nothing_kept(self) -> dict[str, Any]:
        """The fields of ``Memory`` for training: what is written there is forgotten. Made once."""
        if self._forgetful is None:
            self._empty = self.empty_memory(0)
            self._forgetful = {name: forgetful(node) for name, node in self._empty.items()}
        return self._forgetful

    @cached_property
    def pieces_each(self) -> int:
        """How many pieces of a sequence a rank has that divides it with others: two, so that searches are even, but one
        where a layer keeps the state of a recurrence, which goes from piece to piece."""
        return 1 if any(holds(node, State) for node in self.empty_memory(0).values()) else 2

    def _layout(self) -> tuple[tuple, ...]:
        """The layout of this model's memory: made once, for it does not change unless the dtype does."""
        dtype = self.embedding.weight.dtype
        if dtype not in self._layouts:
            last_token = no_last_token(0, self.embedding.weight.device)
            self._layouts[dtype] = Memory(**last_token, **self.empty_memory(0)).layout()
        return self._layouts[dtype]


def _in_training(block: Block, compiled: Any) -> Callable[..., Any]:
    """What a block is called by: compiled in training, as it is written in evaluation."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return (compiled if block.training else block._call_impl)(*args, **kwargs)

    return call
