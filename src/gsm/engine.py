"""Fast generation: a model with a static memory, whose calls are recorded and replayed without Python, as CUDA graphs
or, on a CPU, as tapes of operations.

    engine = gsm.Engine(model, capacity=4096)
    for token_B in engine.stream(prompt, 100, temperature=0.8):
        ...
    engine.reset()

A decoding step is recorded once for all lengths: positions and counts are on the device, no shape depends on the number
of tokens read, and the host counts them separately. (On a CPU there is one recording for each power of two tokens,
because most operations compute the whole capacity of the recording.) On a GPU, short prompts are recorded too, because
Python takes longer than their computation: one recording for each power of two tokens, with padding on the left. Longer
prompts are read in chunks. On a GPU one recording serves all chunks except the last two, which need other rows.
Otherwise chunks are plain calls on the part of the memory that can be filled by then.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from gsm.cache.memory import Memory
from gsm.graphs import Call, CudaGraphs, Recorder, Snapshot
from gsm.layers.linear import side_by_side
from gsm.models.base import CHUNK, LanguageModel
from gsm.models.checks import check_call, check_room, check_type, whole_number
from gsm.models.prompts import Prompt, as_batch
from gsm.models.sampling import check_sampling, continuation
from gsm.observe import observed
from gsm.tape import HostRead, Tapes

MIN_BUCKET = 16  # tokens of the smallest bucket of prompts; the others are larger powers of two
MIN_CHUNKS = 8  # smallest number of chunks for which a recording is made; it takes the time of four plain chunks


P = ParamSpec("P")
T = TypeVar("T")


def _exclusive(method: Callable[Concatenate[Engine, P], T]) -> Callable[Concatenate[Engine, P], T]:
    """Make a method raise RuntimeError while another call of the engine runs, and count its calls for open streams."""

    @functools.wraps(method)
    def call(self: Engine, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the method under the engine's lock."""
        if self._lock.locked():
            raise RuntimeError(
                "engine must be used by one call at a time, got a second one during the first; use an Engine for "
                "each thread"
            )
        with self._lock:
            self._calls += 1
            return method(self, *args, **kwargs)

    return call


class Bucket(NamedTuple):
    """A recorded prefill and the buffers that it reads, [B, T] both; a chunk reads the tokens only."""

    tokens: Tensor
    documents: Tensor
    replay: Call


class Engine:
    """Prefill and decoding of one model in one static memory.

    Results of recorded calls are the engine's own buffers, valid until the next call; clone them to keep them. A
    recording holds pointers to the weights, so weights may be changed in place (an optimiser's step, a state dict).
    After any other change (addresses of weights, a module, a hook, autocast), calls are recorded again; the memory
    keeps its contents. Replays run no Python, so inside ``gsm.record`` and ``gsm.patch``, and for a model with forward
    hooks, all calls are plain.

    A copy (``copy.deepcopy``, ``pickle``) has a memory of its own and no recordings. After an exception,
    ``memory.used`` shows whether the call has read its tokens. An engine serves one text at a time: a second thread, or
    another call while a stream is open, gets a RuntimeError.

    Args:
        model: any language model; it computes in evaluation mode, whatever its mode.
        batch: number of sequences.
        capacity: tokens that the memory holds.
        chunk: tokens per chunk of a long prompt.
        graphs: whether to record calls, or a recorder.

    Raises:
        ValueError: for a batch, capacity or chunk below 1.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        batch: int = 1,
        capacity: int,
        chunk: int = CHUNK,
        graphs: bool | Recorder = True,
    ):
        check_type("model", model, LanguageModel, "gsm.load_model(...), without torch.compile or another wrapper")
        chunk = whole_number("chunk", chunk)
        if capacity is None:
            raise ValueError(
                "capacity must be a number of tokens, got None; model.stream reads into a memory that grows"
            )
        self.model, self.batch, self.chunk = model, batch, chunk
        self.device = model.embedding.weight.device
        self._graphs = graphs
        with torch.inference_mode(False):  # buffers made in inference mode cannot be written outside of it
            self._memory = model.start(batch, capacity)
            self._token_B = torch.zeros(batch, dtype=torch.int64, device=self.device)
        self._begin()

    def _begin(self) -> None:
        """Set the attributes that a copy of an engine does not share."""
        self._recorder = _recorder(self._graphs, self.device)
        self._lock, self._calls = threading.Lock(), 0
        self._forget()

    def _forget(self) -> None:
        """Drop all recordings."""
        self._steps: dict[int, Call] = {}
        self._buckets: dict[int, Bucket] = {}
        self._chunk: Bucket | None = None
        self._snapshot: Snapshot | None = None

    def __getstate__(self) -> dict[str, Any]:
        names = ("model", "batch", "chunk", "device", "_graphs", "_memory", "_token_B")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    @property
    def memory(self) -> Memory:
        """The static memory: always the same object with the same buffers."""
        return self._memory

    @property
    def capacity(self) -> int:
        """Tokens that the memory holds."""
        return self._memory.capacity or 0

    @_exclusive
    def reset(self) -> None:
        """Empty the memory."""
        self._memory.rewind(self.model.start(self.batch, capacity=1))

    @_exclusive
    def load(self, memory: Memory) -> None:
        """Copy the contents of another static memory of the same batch, capacity and model, e.g. a prefix saved with
        ``engine.memory.clone()``. Raises ValueError for any other memory."""
        self._memory.load(memory)

    @_exclusive
    @torch.no_grad()
    def prefill(self, prompt: Prompt, documents: Tensor | None = None) -> Tensor:
        """Read a prompt after the contents of the memory.

        Args:
            prompt: int64 [B, T] or [T], or, with an empty memory, a sequence of B prompts of any lengths.
            documents: as in ``LanguageModel.forward``; only for a tensor [B, T].

        Returns:
            logits_BV, scores of the token after the prompt.

        Raises:
            ValueError: as ``LanguageModel.prefill``. If there is no room for the prompt, nothing is read.
        """
        tokens_BT, padding_BT = as_batch(prompt, self.device, self.model.encode)
        size = self._bucket_size(tokens_BT)
        if size is None or padding_BT is not None and documents is not None:
            unpadded = padding_BT is None and documents is None and tokens_BT.shape[:-1] == (self.batch,)
            if unpadded and self._records_chunks(tokens_BT.shape[1], MIN_CHUNKS if self._chunk is None else 2):
                return self._read_long(tokens_BT)
            with self.model.evaluating():
                return self.model.prefill(prompt, self._memory, self.chunk, documents).logits[:, -1]
        documents = padding_BT if documents is None else documents
        check_call(self.model.vocabulary, tokens_BT, documents, None, None)
        return self._read_at_once(tokens_BT, documents, size)

    @_exclusive
    @torch.no_grad()
    def decode(self, token_B: Tensor) -> Tensor:
        """Read one token of every sequence, int64 [B]; return the scores of the next token, logits_BV.

        Raises:
            ValueError: for a token of another shape or, on a CPU, out of range. If the memory is full, nothing is read.
        """
        if not isinstance(token_B, Tensor):
            raise ValueError(f"token_B must be a tensor [{self.batch}] of whole numbers, got {token_B!r:.40}")
        if token_B.shape != (self.batch,):
            raise ValueError(
                f"token_B must have the shape [{self.batch}], one token for each sequence, got {list(token_B.shape)}"
            )
        if token_B.is_meta and self.device.type != "meta":
            raise ValueError("token_B must have values, got a tensor on the meta device")
        if self._recording() is None:
            return self._plain(token_B.to(self.device)[:, None])
        check_call(self.model.vocabulary, token_B[:, None], None, None, None)
        self._memory.ledger.require(1)
        self._token_B.copy_(token_B)
        try:
            step = self._decoding(self._memory.used + 1)
        except HostRead:  # e.g. the host reads the numbers of rows per expert
            self._recorder = None
            return self._plain(token_B.to(self.device)[:, None])
        return self._replay(step, 1)

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:
        """Yield one new id per sequence, [B], at a time, after the contents of the memory and the prompt.

        The arguments are those of ``LanguageModel.stream``. The last new id is not read.

        Raises:
            ValueError: as ``prefill``. If there is no room for prompt and new tokens, nothing is read.
            RuntimeError: if there was another call of the engine since the last token.
        """
        tokens_BT, _ = as_batch(prompt, self.device, self.model.encode)
        check_sampling(temperature, top_p, generator, self.device)
        check_room(self.capacity, tokens_BT.shape[1], max_new_tokens, self._memory.used)
        calls = self._calls + 1

        def require_turn() -> None:
            if self._calls != calls:
                raise RuntimeError(
                    "stream must be the engine's only call while it is open, got another one since; use an Engine "
                    "for each stream, or read a stream to its end"
                )

        def step(token_B: Tensor) -> Tensor:
            nonlocal calls
            require_turn()
            calls += 1
            return self.decode(token_B)

        logits_BV = self.prefill(prompt)
        for token_B in continuation(logits_BV, step, max_new_tokens, temperature, top_p, generator):
            require_turn()
            yield token_B

    def generate(self, prompt: Prompt, max_new_tokens: int = 64, temperature: float = 0.0, **options) -> Tensor:
        """Return all new ids, [B, max_new_tokens]; arguments and errors as in ``stream``."""
        return torch.stack(list(self.stream(prompt, max_new_tokens, temperature, **options)), dim=1)

    @_exclusive
    @torch.no_grad()
    def warm_up(self) -> None:
        """Record now the calls that would be recorded at their first use; the memory does not change.

        These are the next step of decoding, a chunk if the memory holds several and, while it is empty, all buckets of
        prompts that fit.
        """
        recorder = self._recording()
        if recorder is None:
            return
        with suppress(HostRead):  # each token is then a plain call
            self._decoding(min(self._memory.used + 1, self.capacity))
        if self._records_chunks(self.capacity, least=2):
            self._recorded_chunk()
        size = MIN_BUCKET
        while not self._memory.used and size <= self._longest(recorder):
            self._bucket(size)
            size *= 2

    def _recording(self) -> Recorder | None:
        """Return the recorder, or None if calls are plain. Drop the recordings if the model has changed.

        Raises ValueError if the model was moved to another device.
        """
        if self._recorder is None or observed():
            return None
        if self._snapshot is None or not self._snapshot.holds():
            device = self.model.embedding.weight.device
            if device != self.device:
                raise ValueError(
                    f"model must stay on {self.device}, where the engine's memory is, got {device}; make a new Engine"
                )
            self._forget()
            side_by_side(self.model)
            self._snapshot = Snapshot(self.model)
        return None if self._snapshot.hooked else self._recorder

    def _replay(self, call: Call, tokens: int, **options: Any) -> Tensor:
        """Replay a recording, and count the tokens that it reads."""
        ledger = self._memory.ledger
        used, call.written = ledger.used, False
        try:
            result = call()
            ledger.claim(tokens, **options)
        except BaseException:
            if call.written and ledger.used == used:  # interrupted after the last write
                ledger.claim(tokens, **options)
            raise
        return result

    def _plain(self, tokens_BT: Tensor) -> Tensor:
        """Run a call without a recording, on the part of the memory that it can reach."""
        narrow = self._memory.narrow(self._memory.used + tokens_BT.shape[1])
        with self.model.evaluating():
            return self.model(tokens_BT, memory=narrow, rows=1).logits[:, -1]

    def _decoding(self, tokens: int) -> Call:
        """Return the recorded decoding step with room for ``tokens`` tokens."""
        assert self._recorder is not None
        room = self._recorder.room
        size = self.capacity if room is None else min(self.capacity, max(room, 1 << (tokens - 1).bit_length()))
        if size not in self._steps:
            self._steps[size] = self._record(self._token_B[:, None], None, size)
        return self._steps[size]

    def _longest(self, recorder: Recorder) -> int:
        """Return the tokens of the longest prompt that is recorded."""
        return min(recorder.prompts, self.capacity, self.chunk)

    def _bucket_size(self, tokens_BT: Tensor) -> int | None:
        """Return the size of the bucket for a prompt, or None for plain calls.

        Calls are plain for a prompt that is too long or not the first in the memory, or that needs padding in a memory
        that stores padding.
        """
        length = tokens_BT.shape[1] if tokens_BT.ndim == 2 else 0
        recorder = self._recording()
        if recorder is None or self._memory.used or len(tokens_BT) != self.batch or not length:
            return None
        size = max(MIN_BUCKET, 1 << (length - 1).bit_length())
        if size > self._longest(recorder) or size > length and self._memory.keeps_padding:
            return None
        return size

    def _bucket(self, size: int) -> Bucket:
        """Return the recorded prefill of ``size`` tokens."""
        if size not in self._buckets:
            with torch.inference_mode(False):  # as in the constructor
                tokens = torch.zeros(self.batch, size, dtype=torch.int64, device=self.device)
                documents = torch.zeros_like(tokens)
            self._buckets[size] = Bucket(tokens, documents, self._record(tokens, documents, self.capacity))
        return self._buckets[size]

    def _read_at_once(self, tokens_BT: Tensor, documents_BT: Tensor | None, size: int) -> Tensor:
        """Read a prompt as the end of a bucket. The padding before it is in no document, and takes no room."""
        bucket, padding = self._bucket(size), size - tokens_BT.shape[1]
        bucket.documents[:, :padding] = -1
        bucket.documents[:, padding:] = 0 if documents_BT is None else documents_BT
        bucket.tokens[:, padding:] = tokens_BT
        return self._replay(bucket.replay, tokens_BT.shape[1], single_document=documents_BT is None)

    def _records_chunks(self, tokens: int, least: int) -> bool:
        """Return whether a prompt of ``tokens`` tokens has at least ``least`` chunks and is read by a recording.

        The recording is for the whole capacity; only attention to every slot is slower for it.
        """
        recorder = self._recording()
        if recorder is None or self._memory.keeps_padding:
            return False
        return self.chunk <= recorder.chunks and tokens >= least * self.chunk

    def _recorded_chunk(self) -> Bucket:
        """Return the recorded prefill of a chunk that is followed by another one, so that no row is requested."""
        if self._chunk is None:
            with torch.inference_mode(False):  # as in the constructor
                tokens = torch.zeros(self.batch, self.chunk, dtype=torch.int64, device=self.device)
            self._chunk = Bucket(tokens, tokens, self._record(tokens, None, self.capacity, rows=1 - self.chunk))
        return self._chunk

    def _read_long(self, tokens_BT: Tensor) -> Tensor:
        """Read a prompt in chunks, with the recording while a whole chunk follows. Errors leave the memory
        unchanged."""
        check_call(self.model.vocabulary, tokens_BT, None, None, None)
        self._memory.ledger.require(tokens_BT.shape[1])
        chunk, mark = self._recorded_chunk(), self._memory.mark()
        try:
            while tokens_BT.shape[1] >= 2 * self.chunk:
                chunk.tokens.copy_(tokens_BT[:, : self.chunk])
                self._replay(chunk.replay, self.chunk, rows=1 - self.chunk)
                tokens_BT = tokens_BT[:, self.chunk :]
            with self.model.evaluating():
                return self.model.prefill(tokens_BT, self._memory, self.chunk).logits[:, -1]
        except BaseException:
            self._memory.rewind(mark)
            raise

    def _record(self, tokens_BT: Tensor, documents_BT: Tensor | None, room: int, rows: int = 1) -> Call:
        """Record a call of the model on these buffers, for any number of tokens up to ``room``.

        The memory does not change.
        """
        assert self._recorder is not None
        memory, ledger = self._memory, self._memory.ledger
        mark, narrow = memory.mark(), replace(memory.narrow(room), narrowed_to=None)

        def call() -> Tensor:
            """Return the logits of the last row [B, V]; [B, 0, V] with ``rows=0``."""
            ledger.used = self.capacity - tokens_BT.shape[1]  # an arbitrary value: the recording is for all lengths
            with self.model.evaluating():
                out = self.model(tokens_BT, documents=documents_BT, memory=narrow, rows=rows)
            return out.logits[:, -1] if rows > 0 else out.logits

        try:
            with torch.inference_mode(False), torch.no_grad():  # as in the constructor
                recorded = self._recorder(call, lambda: memory.rewind(mark))
        except BaseException:  # out of memory, or interrupted: undo all writes
            memory.rewind(mark)
            raise
        self._snapshot = Snapshot(self.model)  # includes attributes that the call itself has set
        return recorded


def _recorder(graphs: bool | Recorder, device: torch.device) -> Recorder | None:
    """Return the recorder for calls; None: calls are not recorded."""
    if not isinstance(graphs, bool):
        return graphs
    if not graphs or device.type not in ("cuda", "cpu"):
        return None
    return CudaGraphs(device) if device.type == "cuda" else Tapes()
