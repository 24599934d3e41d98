"""The base class of all language models: one ``forward`` for training, prefill and decoding, and one kind of memory.

These modes differ only in the arguments of ``forward``:

                        new positions     requested rows           memory
    training            the sequence      all                      none
    prefill             the prompt        1                        fresh
    chunked prefill     a chunk           1 - tokens after it      of the previous chunks
    decoding            1                 1                        of all previous tokens

B sequences, T new positions of a call, R requested rows: the last R positions, for which outputs are computed.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, overload
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gsm.cache.ledger import Ledger
from gsm.cache.memory import Memory, forgetful, no_last_token
from gsm.errors import within
from gsm.layers.block import Block
from gsm.layers.convolution import ShortConvolution
from gsm.layers.costs import Layer, unknown_cost
from gsm.layers.experts import Experts
from gsm.layers.feed_forward import Balance
from gsm.layers.indexer_training import Frozen, IndexerTraining, indexer_losses
from gsm.layers.linear import Linear, draw, side_by_side
from gsm.layers.norm import RMSNorm
from gsm.models.balancing import layers_with_experts, report_balance
from gsm.models.checks import IGNORED, check_call, check_memory, check_room, check_shape, whole_number
from gsm.models.prompts import Ids, Prompt, as_batch, is_text
from gsm.models.report import ParameterReport, count_parameters
from gsm.models.sampling import check_sampling, continuation
from gsm.models.schedule import Schedule
from gsm.observe import Observable, called, tap
from gsm.shapes import lowered
from gsm.span import Span, document_positions, following_positions
from gsm_kernels import IndexerLoss, linear_cross_entropy

if TYPE_CHECKING:
    from gsm.data.tokenizer import Tokenizer

_switching = threading.Lock()
# For each model: number of open ``evaluating`` blocks in all threads, and the modules that were in training mode.
_evaluating: WeakKeyDictionary[nn.Module, tuple[int, list[nn.Module]]] = WeakKeyDictionary()

CHUNK = 4096  # default number of prompt tokens per call of a chunked prefill


@dataclass(frozen=True)
class Output:
    """The output of a forward.

    Attributes:
        hidden_BRD: normed output of the last layer for the requested rows.
        head: the output projection, for ``logits``.
        loss: mean cross-entropy over the targets (None: the call had no targets).
        losses: named scalars, already weighted, that a trainer adds to ``loss``.
        metrics: named scalars for logging only.
        memory: the memory after the call (None: the call had no memory). It is detached, so no gradient flows from a
            later call into this one.
        balances: in training: the expert loads of every layer with experts, in order.
        modes: whether the call recorded gradients, whether autocast was on, and its dtype.
        head_column: a copy of a column of the head's weight, to notice that the weight has changed (None: the call
            recorded no gradients).
    """

    hidden_BRD: Tensor
    head: nn.Module
    loss: Tensor | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, Tensor] = field(default_factory=dict)
    memory: Memory | None = None
    balances: list[Balance] = field(default_factory=list)
    modes: tuple[bool, bool, torch.dtype] | None = None
    head_column: Tensor | None = None

    def __repr__(self) -> str:
        loss = [] if self.loss is None else [f"loss={float(self.loss.detach()):.4f}"]
        memory = [] if self.memory is None else [f"memory={self.memory}"]
        return f"Output({', '.join([f'hidden_BRD={list(self.hidden_BRD.shape)}', *loss, *memory])})"

    @property
    def load_LE(self) -> Tensor | None:
        """Number of rows that each of L layers sent to each of E experts, int64 (None: no experts, or not in training).
        ``rebalance`` takes the sum over all batches and ranks of an optimiser step."""
        return torch.stack([balance.load_E for balance in self.balances]) if self.balances else None

    @property
    def logits(self) -> Tensor:
        """Scores of the next token, [B, R, V]. Each access computes them, with the gradient mode and autocast of the
        call.

        Raises:
            RuntimeError: if the call recorded gradients and the head's weight has changed since.
        """
        if self.head_column is not None and not torch.equal(self.head_column, column_of(self.head)):
            raise RuntimeError("logits must be read before the head's weight changes, such as in optimizer.step()")
        if self.modes is None or self.modes == modes_of(self.hidden_BRD):
            return self.head(self.hidden_BRD)
        gradients, autocast, dtype = self.modes
        inference = torch.inference_mode(self.hidden_BRD.is_inference() or torch.is_inference_mode_enabled())
        with (
            inference,
            torch.set_grad_enabled(gradients and torch.is_grad_enabled()),
            torch.autocast(self.hidden_BRD.device.type, dtype=dtype, enabled=autocast),
        ):
            return self.head(self.hidden_BRD)


def column_of(head: nn.Module) -> Tensor:
    """Return the first column of a head's weight, [V]. A step of any optimiser changes it, at least for its targets."""
    return next(head.parameters()).detach()[..., 0]


def modes_of(x: Tensor) -> tuple[bool, bool, torch.dtype] | None:
    """Return whether gradients are recorded, whether autocast is on for the device of ``x``, and its dtype."""
    kind = x.device.type
    if kind == "meta":
        return None
    return torch.is_grad_enabled(), torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


@dataclass(frozen=True)
class Trace:
    """The output of ``LanguageModel.run``, the body without final norm and head.

    Attributes:
        hidden_BRD: output of the last layer for the requested rows, before the final norm.
        memory: the stores after the call. ``document_B`` and ``position_B`` are still those from before the call.
        indexer_losses: in training: the loss and recall of each indexer, with its name, such as ``encoder3``.
        metrics: named scalars for logging only.
        balances: in training: the expert loads of every layer with experts, in order.
    """

    hidden_BRD: Tensor
    memory: Memory
    indexer_losses: list[tuple[str, IndexerLoss]] = field(default_factory=list)
    metrics: dict[str, Tensor] = field(default_factory=dict)
    balances: list[Balance] = field(default_factory=list)


class LanguageModel(nn.Module, ABC, Observable):
    """The base class of all models: an embedding, a body (``run``), a final norm and a head tied to the embedding.

    The embedding is drawn with variance 1 / D and its output is scaled by sqrt(D) to unit variance. Because the head is
    tied to it, an untrained model favours the current token, whose logit is sqrt(D) times the final norm's weight. That
    weight starts at sqrt(128 / D), so that this logit does not grow with the width. (At D = 128, smaller initial
    weights learned no faster.)

    Args:
        vocabulary: number of token ids (V).
        dim: model width (D).
        indexer_weight: weight of the indexers' loss, which is the mean over all indexers.

    Raises:
        ValueError: if ``indexer_weight`` is negative.
    """

    indexer_training: IndexerTraining = Frozen()  # the default for models without indexers

    def __init__(self, vocabulary: int, dim: int, *, indexer_weight: float = 1.0):
        super().__init__()
        within(0, indexer_weight=indexer_weight)
        self.vocabulary, self.dim, self.indexer_weight = vocabulary, dim, indexer_weight
        self.embedding = nn.Embedding(vocabulary, dim)
        draw(self.embedding.weight, dim**-0.5)
        self.norm = RMSNorm(dim)
        nn.init.constant_(self.norm.weight, (128 / dim) ** 0.5)
        self.head = Linear(dim, vocabulary)
        self.head.weight = self.embedding.weight
        self.register_load_state_dict_post_hook(_tie)
        self._layouts: dict[torch.dtype, tuple[tuple, ...]] = {}
        self._training_memory: dict[str, Any] | None = None
        self._tokenizer: Tokenizer | None = None
        self._read_tokenizer: Callable[[], Tokenizer] | None = None

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the checkpoint, read at its first use; None if there is no checkpoint or it has none.

        It can be set: ``model.tokenizer = gsm.load_tokenizer("nano")``.
        """
        if self._tokenizer is None and self._read_tokenizer is not None:
            self._tokenizer = self._read_tokenizer()
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer, self._read_tokenizer = tokenizer, None

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text. An empty text gives the end-of-text id, after which a document begins.

        Raises:
            ValueError: if the model has no tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError(
                f"prompt must be token ids, as the model has no tokenizer, got {text!r:.40}; set model.tokenizer, or "
                "load a model that was trained on text"
            )
        return self.tokenizer.encode(text) or [self.tokenizer.end_of_text]

    @property
    def reach(self) -> int | None:
        """The largest distance in positions at which a token can change an output; None: unlimited or unknown."""
        return None

    @property
    def parameter_note(self) -> str:
        """A remark on this model's parameter count, for tables; may be empty."""
        return ""

    def state_bytes(self, memory: Memory) -> int | None:
        """Return the bytes of the memory from which the decoder reads the past: GSM's state, or the whole cache of a
        model for comparison. Return None for the baseline, whose decoder has a bank that grows with the history."""
        return memory.breakdown().get("shared_state")

    @abstractmethod
    def run(self, x_BTD: Tensor, span: Span, memory: Memory) -> Trace:
        """Run the body: from embedded tokens to the hidden states of the requested rows."""

    @abstractmethod
    def schedule(self, new: int, rows: int) -> Schedule:
        """Return the number of rows that each layer computes for ``new`` positions and ``rows`` requested rows."""

    @abstractmethod
    def empty_memory(self, batch: int) -> dict[str, Any]:
        """Return the fields of ``Memory`` that this model uses, empty."""

    def layer_costs(self) -> list[Layer]:
        """Return the costs of the layers in execution order.

        Raises:
            ValueError: if the model or one of its parts has no cost method.
        """
        raise unknown_cost(self, "layer_costs()")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LanguageModel:
        """Apply ``fn`` as ``nn.Module`` does, and keep a tied head tied, also after ``to_empty``."""
        tied = self._tied
        super()._apply(fn, recurse)
        if tied:
            self.head.weight = self.embedding.weight
        return self

    @property
    def _tied(self) -> bool:
        return getattr(self.head, "weight", None) is getattr(self.embedding, "weight", self)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        """Load as ``nn.Module`` does. Raises ValueError if the model is tied and the head differs from the
        embedding."""
        names = [f"{prefix}{part}.weight" for part in ("embedding", "head")]
        pair = [x for x in map(state_dict.get, names) if isinstance(x, Tensor) and not x.is_meta]
        if self._tied and len(pair) == 2 and pair[0] is not pair[1] and pair[0].shape == pair[1].shape:
            table, head = pair
            if not torch.equal(table.nan_to_num(), head.nan_to_num().to(table.device)):
                raise ValueError(
                    f"{names[1]} must equal {names[0]}, as the model ties them, got different values; load the state "
                    "dict of a model with a tied head"
                )
        self._retie = self._tied
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(
        self,
        tokens: Tensor | str,
        documents: Tensor | None = None,
        targets: Tensor | None = None,
        memory: Memory | None = None,
        rows: int | None = None,
    ) -> Output:
        """Run the model: training, prefill, a chunk of a prompt, or decoding.

        Args:
            tokens: int64 [B, T], or a text, which ``tokenizer`` encodes as one sequence.
            documents: int [B, T], the document of each token: contiguous runs of equal ids, -1 for padding. A token
                attends to its own document only. Default: one document, or with a memory the continuation of its last
                document.
            targets: int64 [B, T], the id that follows each token (already shifted); -100 for positions without a loss.
            memory: the memory that ``start`` or an earlier call returned. A growing memory is never changed. A static
                memory is changed if the call succeeds, and is returned as ``Output.memory``.
            rows: number of last positions to compute outputs for (R); default: all. Zero or negative values are for the
                first chunks of a prompt and need a memory: the call computes no output, but what is needed for the
                output ``1 - rows`` tokens after its end.

        Raises:
            ValueError: if an argument is invalid; the message names it, its value and the limit.
        """
        if isinstance(tokens, str):
            tokens = torch.tensor([self.encode(tokens)], device=self.embedding.weight.device)
        check_call(self.vocabulary, tokens, documents, targets, rows, has_memory=memory is not None)
        if memory is not None:
            check_memory(memory, self._layout(), tokens, rows)
        tokens, targets = tokens.long(), None if targets is None else targets.long()
        batch, length = tokens.shape
        # The ledger is passed explicitly because torch.compile cannot trace a dataclass's default factory.
        before = memory or Memory(**no_last_token(batch, tokens.device), **self._training_stores(), ledger=Ledger())
        single_document = documents is None
        if documents is None:
            document_B = before.document_B.clamp(min=0)  # a memory without tokens has document -1
            position_BT = following_positions(before.position_B, length)
        else:
            documents = documents.long()
            document_B = documents[:, -1]
            position_BT = document_positions(documents, before.document_B, before.position_B)
        span = before.continued(Span(position_BT, length if rows is None else rows), single_document)
        # Autocast does not lower the dtype of an embedding, but the residual streams are most of the memory traffic.
        x_BTD = lowered(self.embedding(tokens) * self.dim**0.5)
        called(self)
        tap("position", position_BT, fixed="positions determine the mask; use documents= to restart counting")
        trace = self.run(tap("embedding", x_BTD), span, before)
        hidden_BRD = self.norm(tap("hidden", trace.hidden_BRD))
        modes = modes_of(hidden_BRD)
        losses, metrics = indexer_losses(trace.indexer_losses, self.indexer_weight)
        expert_losses, expert_metrics = report_balance(trace.balances)
        out = Output(
            hidden_BRD,
            self.head,
            loss=self._loss(hidden_BRD, targets),
            losses=losses | expert_losses,
            metrics=trace.metrics | metrics | expert_metrics,
            balances=trace.balances,
            modes=modes,
            head_column=column_of(self.head).clone() if modes and modes[0] else None,
        )
        if memory is None:
            return out
        # The memory advances last, so that a call that fails leaves a static memory unchanged. The documents are
        # copied, because document_B can be a view of the caller's tensor, which the caller may overwrite.
        last_token = {"document_B": document_B.clone(), "position_B": position_BT[:, -1]}
        after = replace(trace.memory, **last_token)
        return replace(out, memory=memory.advance(after, length, single_document, span.rows))

    def start(self, batch: int = 1, capacity: int | None = None) -> Memory:
        """Return an empty memory for ``batch`` sequences.

        Args:
            batch: number of sequences.
            capacity: None for a growing memory: each call returns a new one and leaves the old one unchanged. A number
                of tokens for a static memory: buffers of that capacity, which calls write in place. Then no shape
                depends on the tokens read and no call synchronises with the device, so a CUDA graph can record the
                calls. (A replay runs no Python, so count its tokens with ``memory.ledger.claim``.)

        Raises:
            ValueError: if ``batch`` or ``capacity`` is below 1.
        """
        batch, capacity = whole_number("batch", batch), None if capacity is None else whole_number("capacity", capacity)
        side_by_side(self)
        last_token = no_last_token(batch, self.embedding.weight.device)
        memory = Memory(**last_token, **self.empty_memory(batch), ledger=Ledger(self._layout()))
        return memory if capacity is None else memory.static(capacity)

    @torch.no_grad()
    def prefill(
        self,
        prompt: Prompt,
        memory: Memory,
        chunk: int = CHUNK,
        documents: Tensor | None = None,
    ) -> Output:
        """Read a prompt in chunks, and return the output of its last row.

        Only the rows that the last row needs are computed. Beyond the caches, peak memory grows with ``chunk`` and is
        independent of T. No gradients are recorded; call the model itself if you need them.

        Args:
            prompt: int64 [B, T] or [T], a text, or a sequence of B prompts of any lengths, each of which begins a
                document.
            memory: the memory that ``start`` or an earlier call returned; a fresh one for prompts of different lengths.
            chunk: tokens per call.
            documents: as in ``forward``; only for a tensor [B, T].

        Raises:
            ValueError: as ``forward``. The memory is unchanged if it has no room for the whole prompt.
        """
        chunk = whole_number("chunk", chunk)
        tokens, padding = as_batch(prompt, self.embedding.weight.device, self.encode)
        if padding is not None and (documents is not None or memory.used):
            raise ValueError(
                "documents must be None and memory empty for prompts of different lengths, as each of them begins a "
                f"document, got a memory of {memory.used} tokens"
            )
        documents = padding if documents is None else documents
        if documents is not None:
            check_shape("documents", documents, tokens)
        memory.ledger.require(tokens.shape[1])
        before = memory.mark() if memory.capacity is not None and tokens.shape[1] > chunk else None
        try:
            return self._read(tokens, documents, memory, chunk)
        except BaseException:  # also after an interruption, the memory must hold the whole prompt or none of it
            if before is not None:
                memory.rewind(before)
            raise

    def _read(self, tokens: Tensor, documents: Tensor | None, memory: Memory, chunk: int) -> Output:
        """Read the chunks of a prompt one after the other; return the output of the last row and the memory."""
        out, length = None, tokens.shape[1]
        for start in range(0, max(length, 1), chunk):
            tokens_BT = tokens[:, start : start + chunk]
            documents_BT = None if documents is None else documents[:, start : start + chunk]
            later = max(0, length - start - chunk)
            narrow = memory.narrow(memory.used + tokens_BT.shape[1])
            out = self(tokens_BT, documents=documents_BT, memory=narrow, rows=1 - later)
            memory = out.memory if memory.capacity is None else memory  # a narrow memory has no room for the next chunk
        assert out is not None
        return replace(out, memory=memory)

    @overload
    def generate(self, prompt: str, max_new_tokens: int = 64, temperature: float = 0.0, **options) -> str: ...
    @overload
    def generate(
        self, prompt: list[str], max_new_tokens: int = 64, temperature: float = 0.0, **options
    ) -> list[str]: ...
    @overload
    def generate(
        self, prompt: Ids | Sequence[Ids], max_new_tokens: int = 64, temperature: float = 0.0, **options
    ) -> Tensor: ...
    def generate(
        self, prompt: Prompt, max_new_tokens: int = 64, temperature: float = 0.0, **options
    ) -> Tensor | str | list[str]:
        """Return the continuation of a prompt: ids [B, max_new_tokens], or text for a text. Arguments and errors are
        those of ``stream``.

        Text ends before the end-of-text token. The default memory is static, with just enough capacity, so that a GPU
        never waits for the host; on a CPU it is as fast as a growing one. ``capacity=None`` selects a growing one.
        """
        tokens, _ = as_batch(prompt, self.embedding.weight.device, self.encode)
        options.setdefault("capacity", tokens.shape[1] + whole_number("max_new_tokens", max_new_tokens) - 1)
        new_BN = torch.stack(list(self.stream(prompt, max_new_tokens, temperature, **options)), dim=1)
        if not is_text(prompt):
            return new_BN
        assert self.tokenizer is not None  # it has encoded the prompt
        end = self.tokenizer.end_of_text
        texts = [self.tokenizer.decode(takewhile(lambda token: token != end, ids)) for ids in new_BN.tolist()]
        return texts[0] if isinstance(prompt, str) else texts

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
        """Yield the new tokens one after the other, each as the ids of all sequences, int64 [B].

        Args:
            prompt: int64 [B, T] or [T], a text, or a sequence of B prompts of any lengths; not empty.
            max_new_tokens: number of new tokens per sequence.
            temperature: divisor of the logits; 0 takes the likeliest token.
            top_p: draw from the smallest set of likeliest tokens whose probabilities sum to at least this.
            chunk: tokens of the prompt per call.
            generator: random number generator on the model's device.
            capacity: tokens that the memory can hold, as in ``start``; None: it grows.

        Raises:
            ValueError: as ``forward`` and ``sample``; if ``max_new_tokens`` is below 1 or ``capacity`` too small.
        """
        tokens, documents = as_batch(prompt, self.embedding.weight.device, self.encode)
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
        """Compile each block at its first call in training. Blocks of one kind share one graph.

        In evaluation the blocks run eagerly, because graphs for both modes and for recorded calls would exceed the
        number that PyTorch caches per function.

        Args:
            options: options of ``torch.compile``.
        """
        for part in self.modules():
            if isinstance(part, Block):
                part.compile(**options)
                part._compiled_call_impl = _in_training(part, part._compiled_call_impl)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return the parameters by name of the group. An optimiser can treat each group differently.

        The groups are ``table_decay`` (embedding and head, convolution filters), ``decay`` (other matrices),
        ``no_decay`` (norms, scales, biases, sinks), ``indexer_decay`` and ``indexer_no_decay`` (the last two for
        indexers), and ``expert_decay`` (experts, which ranks may shard differently).

        Parameters with fewer than two dimensions have no weight decay. Tables and experts are recognised by their type,
        indexers by their name.
        """
        groups: dict[str, list[nn.Parameter]] = {
            name: []
            for name in ("table_decay", "decay", "no_decay", "indexer_decay", "indexer_no_decay", "expert_decay")
        }
        kinds = nn.Embedding | ShortConvolution
        tables = {id(table) for part in self.modules() if isinstance(part, kinds) for table in part.parameters()}
        experts = {id(weight) for part in self.modules() if isinstance(part, Experts) for weight in part.parameters()}
        for name, parameter in self.named_parameters():
            if id(parameter) in experts:
                group = "expert_decay"
            elif parameter.ndim < 2:
                group = "no_decay"
            else:
                group = "table_decay" if id(parameter) in tables else "decay"
            groups[f"indexer_{group}" if ".indexer." in name else group].append(parameter)
        return groups

    def rebalance(self, load_LE: Tensor) -> None:
        """Move the routing biases of all experts one step towards even loads. Call this after each optimiser step.

        Args:
            load_LE: ``Output.load_LE``, summed over the batches and ranks of the step.
        """
        for layer, load_E in zip(layers_with_experts(self), load_LE, strict=True):
            layer.rebalance(load_E)

    def parameter_report(self) -> ParameterReport:
        """Count the parameters: total, active for one token, and by part. Works on the meta device too."""
        return count_parameters(self)

    def _loss(self, hidden_BRD: Tensor, targets: Tensor | None) -> Tensor | None:
        if targets is None:
            return None
        # Under autocast the norm may return float32, but the logits must be in the half type.
        hidden_ND = lowered(hidden_BRD).flatten(0, 1)  # N = B R
        return linear_cross_entropy(
            hidden_ND, self.head.weight, targets[:, -hidden_BRD.shape[1] :].reshape(-1), IGNORED
        )

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Switch the model to evaluation mode inside the ``with`` block.

        Blocks of several threads may overlap; the modules return to training mode after the last one ends.
        """
        try:
            with _switching:
                inside, training = _evaluating.get(self, (0, []))
                if not inside and self.training:
                    training = [module for module in self.modules() if module.training]
                _evaluating[self] = inside + 1, training
                for module in training:
                    module.training = False
            yield
        finally:
            with _switching:
                inside, training = _evaluating.pop(self, (1, []))
                if inside > 1:
                    _evaluating[self] = inside - 1, training
                else:
                    for module in training:
                        module.training = True

    def _training_stores(self) -> dict[str, Any]:
        """Return the fields of ``Memory`` for training, whose stores discard all writes. They are made once."""
        if self._training_memory is None:
            self._training_memory = {name: forgetful(node) for name, node in self.empty_memory(0).items()}
        return self._training_memory

    def _layout(self) -> tuple[tuple, ...]:
        """Return the layout of this model's memory. It is made once per dtype."""
        dtype = self.embedding.weight.dtype
        if dtype not in self._layouts:
            last_token = no_last_token(0, self.embedding.weight.device)
            self._layouts[dtype] = Memory(**last_token, **self.empty_memory(0)).layout()
        return self._layouts[dtype]


def _tie(model: LanguageModel, incompatible: Any) -> None:
    """Tie the head to the embedding again after a state dict was loaded, if they were tied before."""
    if vars(model).pop("_retie", False):
        model.head.weight = model.embedding.weight


def _in_training(block: Block, compiled: Any) -> Callable[..., Any]:
    """Return the call of a block: compiled in training, eager in evaluation."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return (compiled if block.training else block._call_impl)(*args, **kwargs)

    return call
