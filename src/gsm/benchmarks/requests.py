"""Requests to a model: a prompt is read, then so many tokens follow one by one, each of them given.

What is timed is what the paper times (appendix on efficiency measurement): prefill, from an empty memory to the logits
of the prompt's last token and a memory that is ready; then the given tokens, each with its logits and with what it
leaves in the memory. The device has finished when a clock is read. On a CPU the processor's own time is noted beside
that of the wall: it hardly changes where other programs run too. B requests at once, T tokens.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gsm.benchmarks.counters import Operations, counting, kernels
from gsm.benchmarks.room import GUESS, Room, watching
from gsm.benchmarks.texts import Text
from gsm.cache.synthetic import synthetic_memory
from gsm.costs.model import Parts, cost
from gsm.engine import Engine
from gsm.models.base import LanguageModel
from gsm_kernels.benchmark.ceilings import Ceilings
from gsm_kernels.benchmark.timing import spread

COUNTED = 1  # token more than a request takes, with which operations are counted


@dataclass(frozen=True)
class Protocol:
    """How is measured: size of the models, requests at once, tokens of a prompt that are read at a time, tokens that
    follow it, runs that are not timed and that are, seconds after which a case gets no more of them than one that is,
    type of the weights, and the text."""

    size: str
    batch: int
    chunk: int
    steps: int
    warm_up: int
    runs: int
    seconds: float
    dtype: str
    text: str


class Moment(NamedTuple):
    """Milliseconds by the clock on the wall, and of processor time of this process."""

    wall: float
    processor: float

    def since(self, start: Moment, parts: int = 1) -> Moment:
        """What went by, of each of so many equal parts."""
        return Moment((self.wall - start.wall) / parts, (self.processor - start.processor) / parts)


class Served:
    """A model on a device, and everything that its requests have in common.

    Args:
        model: in the type of the protocol, on the device.
        protocol: how it is measured.
        text: what it reads.
        roof: what the device can do.
    """

    def __init__(self, model: LanguageModel, protocol: Protocol, text: Text, roof: Ceilings) -> None:
        self.model, self.protocol, self.text, self.roof = model.eval().requires_grad_(False), protocol, text, roof
        self.device, self.dtype = model.embedding.weight.device, model.embedding.weight.dtype
        self.cost = cost(model)
        self.weights = sum(p.numel() * p.element_size() for p in model.parameters())
        self.room = Room(self.cache_bytes, protocol.chunk, protocol.batch, GUESS * model.dim * self.dtype.itemsize)

    def capacity(self, tokens: int) -> int:
        """Tokens that the memory of a request to so many has room for."""
        return tokens + self.protocol.steps + COUNTED

    def cache_bytes(self, tokens: int) -> int:
        """Bytes of that memory after the given tokens, by the formula."""
        read, capacity = tokens + self.protocol.steps, self.capacity(tokens)
        return self.cost.cache_bytes(read, self.dtype, self.protocol.batch, capacity).total()

    def engine(self, tokens: int) -> Engine:
        """An engine with that memory, empty."""
        batch, chunk = self.protocol.batch, self.protocol.chunk
        return Engine(self.model, batch=batch, capacity=self.capacity(tokens), chunk=chunk)

    def cut(self, tokens: int) -> tuple[Tensor, Sequence[Tensor], Tensor]:
        """A prompt [B, T], the tokens that follow it, and one more to count with, [B] each."""
        ids_BT = self.text.cut(self.protocol.batch, self.capacity(tokens)).to(self.device)
        *given, counted_B = ids_BT[:, tokens:].T.contiguous()
        return ids_BT[:, :tokens].contiguous(), given, counted_B

    def facts(self) -> dict[str, Any]:
        """What is the same in every row."""
        about = {"protocol": asdict(self.protocol), "weight_bytes": self.weights, "text": self.text.name}
        return {**about, "ceilings": self.roof._asdict()}


class Request(ABC):
    """A case that is ready to be run again and again; one class for each kind.

    Attributes:
        times: what every timed run took, by what was timed.
        runs: how many there were to warm up, and how many timed (``runs``); under the protocol's names.
        extra: bytes that it took at most besides the weights; None where the system does not say.
    """

    def __init__(self, served: Served, tokens: int) -> None:
        self.served, self.tokens = served, tokens
        self.times: dict[str, list[Moment]] = {}
        self.runs = {"warm_up": 0, "runs": 0}
        with watching(served.device) as built:
            self.prompt_BT, self.given, self.counted_B = served.cut(tokens)
            self.prepare()
        self._built, self.extra = built.extra, built.extra

    def run(self, timed: bool) -> None:
        """Once through everything."""
        with watching(self.served.device) as peak, torch.no_grad():
            laps = self.lap()
        self.runs["runs" if timed else "warm_up"] += 1
        if self.extra is not None and self._built is not None and peak.extra is not None:
            self.extra = max(self.extra, self._built + peak.extra)
        for what, took in laps.items() if timed else ():
            self.times.setdefault(what, []).append(took)

    def row(self) -> dict[str, Any]:
        """What the runs have shown, as plain containers."""
        gib = None if self.extra is None else (self.served.weights + self.extra) / 2**30
        return {**self.served.facts(), **self.found(), "runs": self.runs, "peak_gib": gib}

    @abstractmethod
    def prepare(self) -> None:
        """Makes what all runs use."""

    @abstractmethod
    def lap(self) -> dict[str, Moment]:
        """One run; what it took, by what was timed."""

    @abstractmethod
    def found(self) -> dict[str, Any]:
        """The part of a row that this kind of request shows."""

    def now(self) -> Moment:
        """This moment, when the device has done everything."""
        if self.served.device.type == "cuda":
            torch.cuda.synchronize(self.served.device)
        return Moment(1e3 * time.perf_counter(), 1e3 * time.process_time())

    def spreads(self, what: str) -> tuple[float, dict[str, Any]]:
        """Seconds that something took, the median; the spread of milliseconds as a row has it, and each run's."""
        wall, processor = ({**spread(times)._asdict(), "each": times} for times in zip(*self.times[what], strict=True))
        own = processor if self.served.device.type == "cpu" else None
        return wall["median"] / 1e3, {"ms": wall, "processor_ms": own}

    def prefilled(self, parts: Parts) -> dict[str, Any]:
        """Times, FLOPs and rates of prompts, of which each takes these FLOPs. They move at least the bytes that a
        pruned prefill does: with the FLOPs, that is the floor."""
        served, (seconds, times) = self.served, self.spreads("prefill")
        protocol, flops = served.protocol, served.protocol.batch * parts.total()
        moved = served.cost.prefill_bytes(self.tokens, protocol.chunk, served.dtype, protocol.batch).total()
        return {
            **times,
            "tokens_per_second": self.prompt_BT.numel() / seconds,
            "flops": flops,
            "bytes": moved,
            "share_of_product": flops / seconds / served.roof.flops,
            "share_of_floor": served.roof.floor(flops, moved) / 1e3 / seconds,
        }


class Unpruned(Request):
    """A prompt of which every layer computes every row, in the same chunks; logits of the last one. But for the rows it
    is what ``LanguageModel.prefill`` does."""

    def prepare(self) -> None:
        """The memory."""
        self.memory = self.served.model.start(self.served.protocol.batch, self.tokens)

    def lap(self) -> dict[str, Moment]:
        """One prompt, from an empty memory."""
        model, memory, out, start = self.served.model, self.memory, None, self.now()
        memory.rewind(model.start(self.served.protocol.batch, capacity=1))
        for part_BT in self.prompt_BT.split(self.served.protocol.chunk, dim=1):
            out = model(part_BT, memory=memory.narrow(memory.used + part_BT.shape[1]))
        assert out is not None  # a prompt has a token
        out.head(out.hidden_BRD[:, -1:])
        return {"prefill": self.now().since(start)}

    def found(self) -> dict[str, Any]:
        """The prefill."""
        every, last = (self.served.cost.forward_flops(self.tokens, rows=rows) for rows in (self.tokens, 1))
        return {"prefill": self.prefilled(Parts(every | {"head": last["head"]}))}


class Decode(Request):
    """The given tokens alone, after a memory that looks as if so many tokens had been read."""

    synthetic = True

    def prepare(self) -> None:
        """The engine, and the memory that every run begins with."""
        self.engine = self.served.engine(self.tokens)
        generator = torch.Generator(self.served.device).manual_seed(0)
        capacity, batch = self.served.capacity(self.tokens), self.served.protocol.batch
        self.prefix = synthetic_memory(self.served.model, self.tokens, capacity, batch, generator)
        self.engine.load(self.prefix)  # no prompt will be read: decoding alone is recorded
        self.engine.warm_up()

    def lap(self) -> dict[str, Moment]:
        """The given tokens."""
        self.engine.load(self.prefix)
        return self.go_on()

    def go_on(self) -> dict[str, Moment]:
        """Decodes the given tokens; what one took, on average."""
        start = self.now()
        for token_B in self.given:
            self.engine.decode(token_B)
        return {"decode": self.now().since(start, parts=len(self.given))}

    def found(self) -> dict[str, Any]:
        """Times, bytes and rates of a token; what is kept; what one token more asks of the device."""
        served, memory = self.served, self.engine.memory
        kept = {"bytes": memory.nbytes(), "formula": served.cache_bytes(self.tokens), "parts": memory.breakdown()}
        (seconds, times), batch = self.spreads("decode"), served.protocol.batch
        read = served.cost.decode_bytes(self.tokens, served.dtype, batch).total()
        launched, whole, decoder = self.counted()
        decode = {
            **times,
            "tokens_per_second": batch / seconds,
            "flops": batch * served.cost.decode_flops(self.tokens).total(),
            "bytes": read,
            "share_of_floor": read / served.roof.bytes / seconds,
            "kernels": launched,
            "operations": whole["operations"],
        }
        return {"decode": decode, "decoder": decoder, "cache": kept, "synthetic": self.synthetic}

    @torch.no_grad()
    def counted(self) -> tuple[int | None, Mapping[str, int], Mapping[str, int]]:
        """Kernels of one token, without a graph; operations and bytes, of the whole model and of the decoder."""
        model = self.served.model

        def call() -> None:
            model(self.counted_B[:, None], memory=self.engine.memory, rows=1).logits  # noqa: B018

        with counting(model.get_submodule("decoder")) as inside, Operations() as whole:
            launched = kernels(call, self.served.device)
        return launched, whole.found(), inside.found()


class Read(Decode):
    """A whole request: a prompt is read, and the given tokens follow."""

    synthetic = False

    def prepare(self) -> None:
        """The engine, with its graphs."""
        self.engine = self.served.engine(self.tokens)
        self.engine.warm_up()

    def lap(self) -> dict[str, Moment]:
        """Prefill, from an empty memory, then the given tokens."""
        start = self.now()
        self.engine.reset()
        self.engine.prefill(self.prompt_BT)
        return {"prefill": self.now().since(start), **self.go_on()}

    def found(self) -> dict[str, Any]:
        """The prefill, and what a token shows."""
        parts = self.served.cost.prefill_flops(self.tokens, self.served.protocol.chunk)
        return {"prefill": self.prefilled(parts), **super().found()}


KINDS: dict[str, type[Request]] = {"read": Read, "unpruned": Unpruned, "decode": Decode}
MEMORIES = {"read": 1, "unpruned": 1, "decode": 2}  # that a request holds: a synthetic one is copied into the engine's
