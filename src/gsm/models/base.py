"""What every language model of the project answers to: one ``forward`` for training, prefill and decode, and the same
memory protocol.

The three ways differ in their arguments alone:

                        new positions     rows asked for    memory
    training            the sequence      all               none
    prefill             the prompt        1                 fresh
    chunked prefill     a chunk           1                 of the chunks before
    decode              1                 1                 of all before
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from gsm.memory.memory import Memory, fresh_bookkeeping
from gsm.models.report import Report, count_parameters
from gsm.models.sampling import sample
from gsm.nn.linear import Linear
from gsm.nn.norm import RMSNorm
from gsm.span import Span, document_positions
from gsm_kernels import IndexerLoss, linear_cross_entropy

IGNORED = -100  # target of a position that is not trained on


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
    """

    hidden_BRD: Tensor
    head: nn.Module
    loss: Tensor | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, Tensor] = field(default_factory=dict)
    memory: Memory | None = None

    @property
    def logits(self) -> Tensor:
        """Scores of the next token, [B, R, V]; computed at each access."""
        return self.head(self.hidden_BRD)


@dataclass(frozen=True)
class Trace:
    """What ``LanguageModel.run`` gives back: output before the final norm, stores after the call, and what was seen
    on the way."""

    hidden_BRD: Tensor
    memory: Memory
    learned: list[tuple[str, IndexerLoss]] = field(default_factory=list)
    metrics: dict[str, Tensor] = field(default_factory=dict)


class LanguageModel(nn.Module):
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

    def __init__(self, vocabulary: int, dim: int, *, indexer_weight: float = 1.0):
        super().__init__()
        self.vocabulary, self.dim, self.indexer_weight = vocabulary, dim, indexer_weight
        self.embedding = nn.Embedding(vocabulary, dim)
        nn.init.normal_(self.embedding.weight, std=dim**-0.5)
        self.norm = RMSNorm(dim)
        nn.init.constant_(self.norm.weight, (128 / dim) ** 0.5)
        self.head = Linear(dim, vocabulary)
        self.head.weight = self.embedding.weight

    def run(self, x_BTD: Tensor, span: Span, memory: Memory) -> Trace:
        """The body: from embedded tokens to the hidden states of the rows asked for. Every model defines it."""
        raise TypeError(f"{type(self).__name__} does not define run(x_BTD, span, memory)")

    def empty_memory(self, batch: int) -> dict:
        """The fields of ``Memory`` that this model uses, empty. Every model defines it."""
        raise TypeError(f"{type(self).__name__} does not define empty_memory(batch)")

    def forgetful_memory(self) -> dict:
        """The same fields for training, where nothing is kept. Every model defines it."""
        raise TypeError(f"{type(self).__name__} does not define forgetful_memory()")

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
            memory: what ``start`` or an earlier call returned; never changed.
            rows: trailing positions for which an output is wanted (default: all).

        Raises:
            ValueError: naming field, value and limit.
        """
        self._check(tokens, documents, targets, memory, rows)
        batch, length = tokens.shape
        books = memory or Memory(**fresh_bookkeeping(batch, tokens.device))
        if documents is None:
            documents = books.document_B.clamp(min=0)[:, None].expand(-1, length)
        documents = documents.long()
        position_BT = document_positions(documents, books.document_B, books.position_B)
        inner = memory or replace(books, **self.forgetful_memory())
        span = Span(position_BT, rows or length)
        trace = self.run(self.embedding(tokens) * self.dim**0.5, span, inner)
        hidden_BRD = self.norm(trace.hidden_BRD)
        after = None
        if memory is not None:
            after = replace(trace.memory, document_B=documents[:, -1].clone(), position_B=position_BT[:, -1].clone())
        losses, metrics = self._learned(trace)
        return Output(hidden_BRD, self.head, self._loss(hidden_BRD, targets), losses, metrics, after)

    def start(self, batch: int = 1) -> Memory:
        """An empty memory for ``batch`` sequences. Raises ValueError for a batch below 1."""
        if batch < 1:
            raise ValueError(f"batch must be at least 1, got {batch}")
        device = self.embedding.weight.device
        return Memory(**fresh_bookkeeping(batch, device), **self.empty_memory(batch))

    def prefill(self, prompt: Tensor, memory: Memory, chunk: int = 4096, documents: Tensor | None = None) -> Output:
        """Reads a prompt [B, T] in chunks, computing of each only what its last row needs; returns the last row's
        output.

        Peak memory beyond the caches grows with ``chunk``, not with T.
        """
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1 token, got {chunk}")
        out = None
        for start in range(0, max(prompt.shape[-1], 1), chunk):
            part = None if documents is None else documents[:, start : start + chunk]
            out = self(prompt[:, start : start + chunk], documents=part, memory=memory, rows=1)
            memory = out.memory
        assert out is not None
        return out

    def generate(self, prompt: Tensor, max_new_tokens: int = 64, temperature: float = 0.0, **options) -> Tensor:
        """New token ids [B, max_new_tokens] after a prompt [B, T] or [T]; ``options`` as in ``stream``."""
        return torch.stack(list(self.stream(prompt, max_new_tokens, temperature, **options)), dim=1)

    @torch.no_grad()
    def stream(
        self,
        prompt: Tensor,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        *,
        top_p: float = 1.0,
        chunk: int = 4096,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:
        """Yields one new id per sequence, [B], at a time.

        Args:
            prompt: int64 [B, T] or [T], not empty.
            max_new_tokens: how many.
            temperature: 0 takes the likeliest token, else logits are divided by it and sampled.
            top_p: sample from the smallest set of likeliest tokens that holds this probability.
            chunk: tokens of the prompt read at a time.
            generator: source of randomness on the model's device.
        """
        was_training = self.training
        self.eval()
        try:
            tokens = torch.atleast_2d(torch.as_tensor(prompt, device=self.embedding.weight.device))
            out = self.prefill(tokens, self.start(tokens.shape[0]), chunk)
            for step in range(max_new_tokens):
                token_B = sample(out.logits[:, -1], temperature, top_p, generator)
                yield token_B
                if step + 1 < max_new_tokens:
                    out = self(token_B[:, None], memory=out.memory, rows=1)
        finally:
            self.train(was_training)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Parameters by how an optimiser should treat them: ``decay``, ``no_decay`` (norms, scales, biases, sinks),
        and the same for indexers.

        Grouped by shape, not by name: whatever is not a matrix is not decayed.
        """
        groups: dict[str, list[nn.Parameter]] = {
            k: [] for k in ("decay", "no_decay", "indexer_decay", "indexer_no_decay")
        }
        for name, parameter in self.named_parameters():
            kind = "decay" if parameter.ndim > 1 else "no_decay"
            groups[f"indexer_{kind}" if ".indexer." in name else kind].append(parameter)
        return groups

    def parameter_report(self) -> Report:
        """Parameters in total, active for one token, and by part; works on the meta device."""
        return count_parameters(self)

    def _loss(self, hidden_BRD: Tensor, targets: Tensor | None) -> Tensor | None:
        if targets is None:
            return None
        return linear_cross_entropy(
            hidden_BRD.flatten(0, 1), self.head.weight, targets[:, -hidden_BRD.shape[1] :].reshape(-1), IGNORED
        )

    def _learned(self, trace: Trace) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The indexers' mean loss, and how much of the teacher's mass their Top-K recalls."""
        if not trace.learned:
            return {}, trace.metrics
        loss = torch.stack([result.loss for _, result in trace.learned]).mean()
        losses = {"indexer_kl": self.indexer_weight * loss}
        recall = {name: result.recall for name, result in trace.learned if result.recall is not None}
        if not recall:
            return losses, trace.metrics
        mean = torch.stack(list(recall.values())).mean()
        named = {f"indexer_recall/{name}": value for name, value in recall.items()}
        return losses, {**trace.metrics, **named, "indexer_recall": mean}

    def _check(
        self,
        tokens: Tensor,
        documents: Tensor | None,
        targets: Tensor | None,
        memory: Memory | None,
        rows: int | None,
    ) -> None:
        """Refuses bad input with a sentence. Values are looked at on the CPU alone: elsewhere that would stall the
        device."""
        if tokens.ndim != 2 or tokens.is_floating_point():
            raise ValueError(
                f"tokens must be whole numbers of shape [batch, length], got {tokens.dtype} {list(tokens.shape)}"
            )
        batch, length = tokens.shape
        if batch < 1 or length < 1:
            raise ValueError(f"tokens must hold at least one token, got an empty prompt of shape {list(tokens.shape)}")
        for name, other in (("documents", documents), ("targets", targets)):
            if other is not None and other.shape != tokens.shape:
                raise ValueError(f"{name} must have the shape of tokens, {list(tokens.shape)}, got {list(other.shape)}")
        if memory is not None:
            self._check_memory(memory, batch)
        if rows is not None and not 1 <= rows <= length:
            raise ValueError(f"rows must lie between 1 and the {length} new positions, got {rows}")
        if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
            self._check_range("token id", tokens)
            if targets is not None:
                self._check_range("target", targets.where(targets != IGNORED, 0), f", or {IGNORED} to be left out")

    def _check_range(self, name: str, ids: Tensor, otherwise: str = "") -> None:
        """Refuses ids that the vocabulary does not have."""
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocabulary:
            ends = f"the vocabulary has ids 0 to {self.vocabulary - 1}"
            raise ValueError(f"{name} {low if low < 0 else high} is out of range: {ends}{otherwise}")

    def _check_memory(self, memory: Memory, batch: int) -> None:
        """Refuses a memory for another number of sequences, or of a model with other layers."""
        if memory.batch != batch:
            raise ValueError(
                f"memory is for a batch of {memory.batch}, tokens have a batch of {batch}; use start(batch={batch})"
            )
        own = Memory(memory.document_B, memory.position_B, **self.empty_memory(0))
        if memory.layout() != own.layout():
            raise ValueError(
                "memory was made by another model, or one of other sizes or dtype; use start() of this model"
            )
