"""Generation at the speed of the device: a model with a static memory, and its calls recorded and repeated without
their Python, as CUDA graphs or, on a CPU, as tapes of operations.

    engine = gsm.Engine(model, capacity=4096)
    for token_B in engine.stream(prompt, 100, temperature=0.8):
        ...
    engine.reset()

A step of decoding is recorded once for all lengths: positions and counts are on the device, no shape depends on what
has been read, and how much that is, is counted on the host. (On a CPU once for each power of two tokens: most of its
operations compute what there is room for.) Short prompts, for which a GPU waits for Python longer than it computes, are
recorded there too, one for each power of two tokens, filled up on the left with padding. What is longer is read in
chunks: on a GPU those of a long prompt by one recording for all of them, but for the last two, of which other rows are
needed; else by plain calls that do not look at slots which cannot be filled yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from gsm.cache.memory import Memory
from gsm.graphs import Call, CudaGraphs, Recorder
from gsm.models.base import CHUNK, LanguageModel
from gsm.models.checks import check_call, check_room
from gsm.models.prompts import Prompt, as_batch
from gsm.models.sampling import check_sampling, continuation
from gsm.observe import observed
from gsm.tape import Looked, Tapes

SHORTEST = 16  # tokens of the least bucket of prompts; the others are powers of two
MANY = 8  # chunks that are worth a recording: it takes the time of four plain ones


class Bucket(NamedTuple):
    """A recorded prefill and the buffers that it reads, [B, T] both; of a chunk the tokens alone."""

    tokens: Tensor
    documents: Tensor
    replay: Call


class Engine:
    """Prefill and decoding of one model in one static memory.

    Results are the engine's own buffers where they come from a recording: valid until the next call, to be cloned if
    they are wanted longer. A recording reads the weights where they lie: values may change (an optimiser's step, a
    state dict), places may not (``model.to(...)``), and autocast is as it was then. Inside of ``gsm.record`` and
    ``gsm.patch`` all calls are plain: what is repeated has no taps.

    Args:
        model: any language model; it computes in evaluation mode, whatever mode it is in.
        batch: number of sequences.
        capacity: tokens that the memory holds.
        chunk: tokens of a long prompt that are read at a time.
        graphs: whether to record calls, or what with.

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
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1 token, got {chunk}")
        if capacity is None:
            raise ValueError("an engine needs a capacity in tokens; for a memory that grows use model.stream")
        self.model, self.batch, self.chunk = model, batch, chunk
        self.device = model.embedding.weight.device
        self._recorder = _recorder(graphs, self.device)
        with torch.inference_mode(False):  # buffers made inside of that mode could not be written outside
            self._memory = model.start(batch, capacity)
            self._token_B = torch.zeros(batch, dtype=torch.int64, device=self.device)
        self._steps: dict[int, Call] = {}
        self._buckets: dict[int, Bucket] = {}
        self._chunk: Bucket | None = None

    @property
    def memory(self) -> Memory:
        """The static memory; the same object, and the same buffers, for life."""
        return self._memory

    @property
    def capacity(self) -> int:
        """Tokens that the memory holds."""
        return self._memory.capacity or 0

    def reset(self) -> None:
        """Forgets everything that was read."""
        self._memory.rewind(self.model.start(self.batch, capacity=1))

    def load(self, memory: Memory) -> None:
        """Goes on from what another static memory of the same batch, capacity and model holds, e.g. from a prefix that
        was kept as ``engine.memory.clone()``. Raises ValueError for any other."""
        self._memory.load(memory)

    @torch.no_grad()
    def prefill(self, prompt: Prompt, documents: Tensor | None = None) -> Tensor:
        """Reads a prompt, going on from what has been read before.

        Args:
            prompt: int64 [B, T] or [T], or a sequence of B prompts of any lengths; these only into an empty memory.
            documents: as in ``LanguageModel.forward``; only for a tensor [B, T].

        Returns:
            logits_BV, scores of the token after the last.

        Raises:
            ValueError: as ``LanguageModel.prefill``; before anything is read if there is no room for the prompt.
        """
        tokens_BT, padding_BT = as_batch(prompt, self.device)
        size = self._bucket_size(tokens_BT)
        if size is None or padding_BT is not None and documents is not None:
            whole = padding_BT is None and documents is None and tokens_BT.shape[:-1] == (self.batch,)
            if whole and self._records_chunks(tokens_BT.shape[1], MANY if self._chunk is None else 2):
                return self._read_long(tokens_BT)
            with self.model.evaluating():
                return self.model.prefill(prompt, self._memory, self.chunk, documents).logits[:, -1]
        documents = padding_BT if documents is None else documents
        check_call(self.model.vocabulary, tokens_BT, documents, None, None)
        return self._read_at_once(tokens_BT, documents, size)

    @torch.no_grad()
    def decode(self, token_B: Tensor) -> Tensor:
        """Reads one token of every sequence, int64 [B], and returns the scores of the next, logits_BV.

        Raises:
            ValueError: for a token of another shape or, on a CPU, out of range; before anything is read if the memory
                is full.
        """
        if token_B.shape != (self.batch,):
            raise ValueError(f"token_B must have the shape [{self.batch}] of the batch, got {list(token_B.shape)}")
        if token_B.is_meta and self.device.type != "meta":
            raise ValueError("token_B lies on the meta device, where tensors have no values; give it some")
        if self._recorder is None or observed():
            return self._plain(token_B.to(self.device)[:, None])
        check_call(self.model.vocabulary, token_B[:, None], None, None, None)
        self._memory.ledger.require(1)
        self._token_B.copy_(token_B)
        try:
            step = self._decoding(self._memory.used + 1)
        except Looked:  # such as experts, of whom the host has to know how many rows each has
            self._recorder = None
            return self._plain(token_B.to(self.device)[:, None])
        logits_BV = step()
        self._memory.ledger.claim(1)
        return logits_BV

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:
        """Yields one new id per sequence, [B], at a time; the arguments are those of ``LanguageModel.stream``. Goes on
        from what has been read before; the last new id is not read itself.

        Raises:
            ValueError: as ``prefill``; before anything is read if there is no room for prompt and new tokens.
        """
        tokens_BT, _ = as_batch(prompt, self.device)
        check_sampling(temperature, top_p, generator, self.device)
        check_room(self.capacity, tokens_BT.shape[1], max_new_tokens, self._memory.used)
        logits_BV = self.prefill(prompt)
        yield from continuation(logits_BV, self.decode, max_new_tokens, temperature, top_p, generator)

    def generate(self, prompt: Prompt, max_new_tokens: int = 64, temperature: float = 0.0, **options) -> Tensor:
        """All new ids at once, [B, max_new_tokens]; arguments and errors as in ``stream``."""
        return torch.stack(list(self.stream(prompt, max_new_tokens, temperature, **options)), dim=1)

    @torch.no_grad()
    def warm_up(self) -> None:
        """Records now what would be recorded at its first use: the next step of decoding, a chunk if the memory holds
        several and, while it is empty, all prompts that fit. The memory is left as it was."""
        if self._recorder is None or observed():
            return
        with suppress(Looked):  # each token is then a plain call
            self._decoding(min(self._memory.used + 1, self.capacity))
        if self._records_chunks(self.capacity, least=2):
            self._recorded_chunk()
        size = SHORTEST
        while not self._memory.used and size <= self._longest(self._recorder):
            self._bucket(size)
            size *= 2

    def _plain(self, tokens_BT: Tensor) -> Tensor:
        """One call that is not recorded, which does not pay for slots that it cannot reach."""
        seen = self._memory.narrow(self._memory.used + tokens_BT.shape[1])
        with self.model.evaluating():
            return self.model(tokens_BT, memory=seen, rows=1).logits[:, -1]

    def _decoding(self, tokens: int) -> Call:
        """The recorded step of decoding with room for so many tokens."""
        assert self._recorder is not None
        room = self._recorder.room
        size = self.capacity if room is None else min(self.capacity, max(room, 1 << (tokens - 1).bit_length()))
        if size not in self._steps:
            self._steps[size] = self._record(self._token_B[:, None], None, size)
        return self._steps[size]

    def _longest(self, recorder: Recorder) -> int:
        """Tokens of the longest prompt that is recorded."""
        return min(recorder.prompts, self.capacity, self.chunk)

    def _bucket_size(self, tokens_BT: Tensor) -> int | None:
        """Length of the recording that reads a prompt; None if it is to be read by plain calls: too long, not the first
        in the memory, or of a length that is wasted on a memory which keeps padding."""
        length = tokens_BT.shape[1] if tokens_BT.ndim == 2 else 0
        if self._recorder is None or observed() or self._memory.used or len(tokens_BT) != self.batch or not length:
            return None
        size = max(SHORTEST, 1 << (length - 1).bit_length())
        if size > self._longest(self._recorder) or size > length and self._memory.keeps_padding:
            return None
        return size

    def _bucket(self, size: int) -> Bucket:
        """The recorded prefill of so many tokens."""
        if size not in self._buckets:
            with torch.inference_mode(False):  # as in the beginning
                tokens = torch.zeros(self.batch, size, dtype=torch.int64, device=self.device)
                documents = torch.zeros_like(tokens)
            self._buckets[size] = Bucket(tokens, documents, self._record(tokens, documents, self.capacity))
        return self._buckets[size]

    def _read_at_once(self, tokens_BT: Tensor, documents_BT: Tensor | None, size: int) -> Tensor:
        """A prompt as the end of a bucket. What fills it up is in no document, and takes no room."""
        bucket, padding = self._bucket(size), size - tokens_BT.shape[1]
        bucket.documents[:, :padding] = -1
        bucket.documents[:, padding:] = 0 if documents_BT is None else documents_BT
        bucket.tokens[:, padding:] = tokens_BT
        logits_BV = bucket.replay()
        self._memory.ledger.claim(tokens_BT.shape[1], single_document=documents_BT is None)
        return logits_BV

    def _records_chunks(self, tokens: int, least: int) -> bool:
        """Whether a prompt of so many tokens has at least so many chunks, and a recording reads them. It has room for
        all that the memory holds, which nobody pays for but attention to every slot."""
        if self._recorder is None or observed() or self._memory.keeps_padding:
            return False
        return self.chunk <= self._recorder.chunks and tokens >= least * self.chunk

    def _recorded_chunk(self) -> Bucket:
        """The recorded reading of a chunk behind which another one follows, so that no row of it is wanted."""
        if self._chunk is None:
            with torch.inference_mode(False):  # as in the beginning
                tokens = torch.zeros(self.batch, self.chunk, dtype=torch.int64, device=self.device)
            self._chunk = Bucket(tokens, tokens, self._record(tokens, None, self.capacity, rows=1 - self.chunk))
        return self._chunk

    def _read_long(self, tokens_BT: Tensor) -> Tensor:
        """A prompt in chunks, by the recording as long as a whole one follows. An error leaves the memory as it was."""
        check_call(self.model.vocabulary, tokens_BT, None, None, None)
        self._memory.ledger.require(tokens_BT.shape[1])
        chunk, mark = self._recorded_chunk(), self._memory.mark()
        try:
            while tokens_BT.shape[1] >= 2 * self.chunk:
                chunk.tokens.copy_(tokens_BT[:, : self.chunk])
                chunk.replay()
                self._memory.ledger.claim(self.chunk, rows=1 - self.chunk)
                tokens_BT = tokens_BT[:, self.chunk :]
            with self.model.evaluating():
                return self.model.prefill(tokens_BT, self._memory, self.chunk).logits[:, -1]
        except BaseException:
            self._memory.rewind(mark)
            raise

    def _record(self, tokens_BT: Tensor, documents_BT: Tensor | None, room: int, rows: int = 1) -> Call:
        """Records a call of the model on these buffers, for any number of tokens up to ``room``; the memory is left as
        it was."""
        assert self._recorder is not None
        memory, ledger = self._memory, self._memory.ledger
        mark, narrow = memory.mark(), replace(memory.narrow(room), narrowed_to=None)

        def call() -> Tensor:
            ledger.used = self.capacity - tokens_BT.shape[1]  # whatever is used: the recording is for all lengths
            with self.model.evaluating():
                out = self.model(tokens_BT, documents=documents_BT, memory=narrow, rows=rows)
            return out.logits[:, -1] if rows > 0 else out.logits

        try:
            with torch.inference_mode(False), torch.no_grad():  # as in the beginning
                return self._recorder(call, lambda: memory.rewind(mark))
        except BaseException:  # out of memory, or interrupted: of what was tried nothing stays
            memory.rewind(mark)
            raise


def _recorder(graphs: bool | Recorder, device: torch.device) -> Recorder | None:
    """What calls are recorded with; None: they are not."""
    if not isinstance(graphs, bool):
        return graphs
    if not graphs or device.type not in ("cuda", "cpu"):
        return None
    return CudaGraphs(device) if device.type == "cuda" else Tapes()
