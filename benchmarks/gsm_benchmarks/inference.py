"""How fast models read a prompt and go on from it, and what they keep: the paper's protocol, one row at a time.

A request reads a prompt, then so many tokens follow one by one, each of them given. What is timed is what the paper
times (appendix A.3): prefill, from an empty memory to the logits of the prompt's last token and a
memory that is ready; then the given tokens, each with its logits and with what it leaves in the memory. The device has
finished when a clock is read. On a CPU the processor's own time is noted beside that of the wall: it hardly changes
where other programs run too.

The runs of all cases of a length that fit beside each other alternate, so that what disturbs a machine for a while
disturbs all of them, and their ratios stay what they are. B requests at once, T tokens.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gsm.cache.synthetic import synthetic_memory
from gsm.costs.model import Parts, cost
from gsm.costs.room import GUESS, Room, available_bytes
from gsm.data.module import TextData
from gsm.engine import Engine
from gsm.models.base import LanguageModel
from gsm_kernels import explain

from . import entries, inference_report, machine, timing
from .counters import Operations, counting, kernels
from .entries import Entry, Model
from .inference_report import short
from .machine import watching
from .results import Asked, Errors, sentence
from .timing import Moment, now, rotated, spread

LENGTHS = {"cuda": [256 << n for n in range(11)], "cpu": [256 << n for n in range(7)]}
SYNTHETIC = {"cuda": [4096, 65536, 262144], "cpu": [1024, 65536]}
SIZES, DTYPES = {"cuda": "1p5b", "cpu": "nano"}, {"cuda": "bfloat16", "cpu": "float32"}
WIDTHS = ("float32", "bfloat16", "float16", "float64")
STDLIB, RANDOM = "stdlib", "random"
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


@dataclass(frozen=True)
class Case:
    """What is measured: ``read``, a whole request; ``unpruned``, a prompt of which every layer computes every row;
    ``decode``, given tokens alone, after a synthetic memory."""

    model: str
    tokens: int
    kind: str

    def name(self, protocol: Protocol) -> str:
        """The name of its row."""
        at_once = f"{protocol.batch} x " if protocol.batch > 1 else ""
        return f"{self.model} {protocol.size}, {at_once}{short(self.tokens)}, {self.kind}"


def run(
    models: Sequence[Entry] = entries.ALL,
    size: str | None = None,
    lengths: Sequence[int] | None = None,
    synthetic_lengths: Sequence[int] | None = None,
    unpruned: Sequence[str] = (),
    batch_size: int = 1,
    chunk: int = 4096,
    steps: int = 64,
    warm_up: int = 2,
    runs: int = 3,
    seconds: float = 120.0,
    dtype: str | None = None,
    text: str = STDLIB,
    **asked: Any,
) -> Path:
    """Measure each case, print the table, write it and the pictures beside the JSON file; return that file.

    Args: as in configs/benchmark/inference.yaml and configs/benchmark.yaml, which say what they mean.

    Raises:
        ValueError: a value out of range, or a file of another benchmark.
        FileNotFoundError: there is no such text.
        KeyboardInterrupt: after the table of what there is was made.
        Exception: the first that a case raised, once the others were measured; machine.Lost at once, where the GPU
            takes no more work from this process.
    """
    how = Asked(**asked)
    if how.results:
        return inference_report.show(Path(how.results))
    counts = {"batch_size": batch_size, "chunk": chunk, "steps": steps, "runs": runs}
    wrong = [f"{name} {value}" for name, value in counts.items() if value < 1] + ["warm_up"] * (warm_up < 0)
    if wrong or min([*(lengths or [1]), *(synthetic_lengths or [1])]) < 1:
        raise ValueError(f"{', '.join(wrong) or 'a length'}: give 1 or more")
    if dtype not in (None, *WIDTHS):
        raise ValueError(f"dtype is '{dtype}'; say {', '.join(WIDTHS)}, or null for what suits the device")
    where = machine.chosen(how.device)
    kind = where.type
    known = entries.read(models)
    further = [name for name in unpruned if name not in {model.name for model in known}]
    known += entries.read(further) if further else []
    size, dtype = entries.one_size(known, size, SIZES[kind]), dtype or DTYPES[kind]
    protocol = Protocol(size, batch_size, chunk, steps, warm_up, runs, seconds, dtype, text)
    cases = plan(
        [model.name for model in known[: len(models)]],
        LENGTHS[kind] if lengths is None else lengths,
        SYNTHETIC[kind] if synthetic_lengths is None else synthetic_lengths,
        unpruned,
        first=size == inference_report.SIZE,
    )
    file = how.open("inference", where, models=True)
    served, errors = _served(known, protocol, where), Errors()
    file.given = {case.name(protocol): model.given for case in cases for model in known if model.name == case.model}
    left = [case for case in cases if how.force or not file.measured(case.name(protocol), asdict(protocol))]
    groups = _groups(left, lambda case: file.times(case.name(protocol)))
    try:
        for group in file.in_time(groups, lambda group: max(file.times(case.name(protocol)) for case in group)):
            names = [case.name(protocol) for case in group]
            print(f"in turns: {'; '.join(names)}", flush=True)
            with errors.kept("; ".join(names)), file.trying(*names):
                for case, row in take_turns(group, served):
                    how = {"protocol": asdict(protocol), "kernels": explain(), "clocks": machine.clocks(where)}
                    file.add(case.name(protocol), {**row, **how})
    finally:
        if file.rows:
            inference_report.show(file.path)
    errors.raise_first()
    return file.path


def plan(
    models: Sequence[str],
    lengths: Sequence[int],
    synthetic_lengths: Sequence[int],
    unpruned: Sequence[str] = (),
    first: bool = False,
) -> list[Case]:
    """All cases, length by length; of a length those that take seconds first.

    Args:
        models: by name.
        lengths, synthetic_lengths, unpruned: as in ``run``.
        first: whether cases with goals come before all others, and of these decoding alone.
    """
    cases = []
    for tokens in sorted({*lengths, *synthetic_lengths}):
        if tokens in synthetic_lengths:
            cases += [Case(model, tokens, "decode") for model in models]
        if tokens in lengths:
            cases += [Case(model, tokens, "read") for model in models]
            cases += [Case(model, tokens, "unpruned") for model in unpruned]

    def place(case: Case) -> int:
        wanted = first and inference_report.first(case.model, case.tokens, case.kind)
        return (0 if case.kind == "decode" else 1) if wanted else 2

    return sorted(cases, key=place)


def _groups(cases: Sequence[Case], times: Callable[[Case], int]) -> list[list[Case]]:
    """What is measured in turns: neighbours of one length that read prompts, or that decode after synthetic memories.
    What has failed or not ended before, by itself: one of those took the others with it."""
    new = [case for case in cases if not times(case)]
    groups = groupby(new, key=lambda case: (case.tokens, case.kind == "decode"))
    return [*(list(group) for _, group in groups), *([case] for case in cases if times(case))]


def _served(models: Sequence[Model], protocol: Protocol, device: torch.device) -> Callable[[str], Served]:
    """The models by name, each built when it is asked for, and kept: at every length all of them run."""

    @cache
    def roof() -> timing.Ceilings:
        return timing.ceilings(device)

    @cache
    def made(name: str) -> Served:
        with _default(getattr(torch, protocol.dtype)):
            model = next(one for one in models if one.name == name).build(protocol.size, device=device)
        return Served(model, protocol, prompts(protocol.text, model.vocabulary), roof())

    return made


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    """Inside the block, parameters are made in this type: there is no time at which a model takes up more."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Text(NamedTuple):
    """Token ids, int64 [N], and what they are."""

    ids_N: Tensor
    name: str

    def cut(self, batch: int, length: int) -> Tensor:
        """int64 [batch, length]: one stretch of the text behind the other, from the beginning again where it ends."""
        count = batch * length
        return self.ids_N.repeat(-(-count // len(self.ids_N)))[:count].view(batch, length)


def prompts(source: str, vocabulary: int) -> Text:
    """The text that a size reads, gone through again and again where it is too short.

    Args:
        source: ``stdlib``, Python's standard library; ``random``, ids drawn uniformly; else a folder or a file of
            texts. A BPE of the model's vocabulary is trained on it, once, and kept.
        vocabulary: of the size.

    Raises:
        FileNotFoundError: there is nothing at that path.
    """
    if source == RANDOM:
        generator = torch.Generator().manual_seed(0)
        return Text(torch.randint(vocabulary, (1 << 18,), generator=generator), "ids drawn at random")
    path = None if source == STDLIB else source
    data = TextData(vocabulary=vocabulary, context=2, batch_size=1, path=path)
    ids = data.split("train").open()
    return Text(torch.from_numpy(ids[: len(ids)].astype("int64")), f"{data.corpus.name}, {len(ids):,} tokens")


class Served:
    """A model on a device, and everything that its requests have in common.

    Args:
        model: in the type of the protocol, on the device.
        protocol: how it is measured.
        text: what it reads.
        roof: what the device can do.
    """

    def __init__(self, model: LanguageModel, protocol: Protocol, text: Text, roof: timing.Ceilings) -> None:
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
        model, memory, out, start = self.served.model, self.memory, None, now(self.served.device)
        memory.rewind(model.start(self.served.protocol.batch, capacity=1))
        for part_BT in self.prompt_BT.split(self.served.protocol.chunk, dim=1):
            out = model(part_BT, memory=memory.narrow(memory.used + part_BT.shape[1]))
        assert out is not None  # a prompt has a token
        out.head(out.hidden_BRD[:, -1:])
        return {"prefill": now(self.served.device).since(start)}

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
        start = now(self.served.device)
        for token_B in self.given:
            self.engine.decode(token_B)
        return {"decode": now(self.served.device).since(start, parts=len(self.given))}

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
        start = now(self.served.device)
        self.engine.reset()
        self.engine.prefill(self.prompt_BT)
        return {"prefill": now(self.served.device).since(start), **self.go_on()}

    def found(self) -> dict[str, Any]:
        """The prefill, and what a token shows."""
        parts = self.served.cost.prefill_flops(self.tokens, self.served.protocol.chunk)
        return {"prefill": self.prefilled(parts), **super().found()}


KINDS: dict[str, type[Request]] = {"read": Read, "unpruned": Unpruned, "decode": Decode}
MEMORIES = {"read": 1, "unpruned": 1, "decode": 2}  # that a request holds: a synthetic one is copied into the engine's


class Entrant:
    """A case in its turn: a request that runs, or the reason why it does not."""

    def __init__(self, case: Case, served: Served) -> None:
        self.case, self.served = case, served
        self.request: Request | None = None
        self.failed: str | None = None
        self.error: Exception | None = None
        self.spent = 0.0  # seconds

    def fits(self) -> bool:
        """Whether there is memory for it now."""
        need = self.served.room.needed(self.case.tokens, MEMORIES[self.case.kind])
        return need <= available_bytes(self.served.device)

    def begin(self) -> None:
        """Make the request ready; refuse one for which there is no memory, before the machine suffers from it."""
        if self.fits():
            make = KINDS[self.case.kind]
            self._attempt(lambda: setattr(self, "request", make(self.served, self.case.tokens)))
        else:
            self._refuse()

    def run(self, timed: bool) -> None:
        """One run, unless it has failed, or its time is over and it has been timed."""
        over = self.spent > self.served.protocol.seconds
        if self.request is None or over and (self.request.times or not timed):
            return
        start = time.monotonic()
        self._attempt(lambda: self.request and self.request.run(timed))
        self.spent += time.monotonic() - start

    def row(self) -> dict[str, Any]:
        """What was found, and how much memory a request takes, for the next one."""
        row: dict[str, Any] = {**vars(self.case)}
        self._attempt(lambda: self.request and row.update(self.request.row()))
        if self.request is None:
            return {**row, **self.served.facts(), "failed": self.failed}
        if self.case.kind == "read":
            self.served.room.learn(self.request.extra, self.case.tokens)
        return row

    def _attempt(self, call: Callable[[], object]) -> None:
        """Run a call; of what goes wrong, only what has lost the GPU concerns the others. The call must not hold on to
        the request, which is to be free when it is said what would fit."""
        errors = Errors()
        with errors.kept(f"{self.case.model}, {short(self.case.tokens)}, {self.case.kind}"):
            if machine.in_memory(lambda: (call(),)):
                return
        self.request, self.error = None, errors.first
        machine.free()
        if self.error is None:
            self._refuse(tried=True)
        else:
            self.failed = sentence(self.error)

    def _refuse(self, tried: bool = False) -> None:
        there = available_bytes(self.served.device)
        self.failed = self.served.room.refusal(self.case.tokens, there, MEMORIES[self.case.kind], tried)


def take_turns(cases: Sequence[Case], served: Callable[[str], Served]) -> Iterator[tuple[Case, dict[str, Any]]]:
    """The row of every case; of one that does not fit, a row that says what would.

    Args:
        cases: of one length.
        served: the models by name, each made when it is first asked for, and kept.

    Raises:
        Exception: the first that is no lack of memory, after all rows, of which its own says it too.
        machine.Lost: at once, where the GPU takes no more work from this process.
    """
    waiting, errors = [], Errors()
    for case in cases:
        failed = "the model could not be made: see the error above"
        with errors.kept(case.model):
            made = machine.in_memory(partial(served, case.model))
            failed = None if made else "out of memory: the weights do not fit; try a smaller size or dtype"
            made = None
        if failed is None:
            waiting.append(case)
        else:
            machine.free()
            yield case, {**vars(case), "failed": failed}
    while waiting:
        turn, waiting = _turn(waiting, served)
        _alternate(turn)
        mark = uuid.uuid4().hex  # of rows whose runs alternated: ratios are taken run by run
        yield from ((entrant.case, {**entrant.row(), "turn": mark}) for entrant in turn)
        errors.first = errors.first or next((entrant.error for entrant in turn if entrant.error), None)
        turn = []
        machine.free()
    errors.raise_first()


def _turn(cases: Sequence[Case], served: Callable[[str], Served]) -> tuple[list[Entrant], list[Case]]:
    """Those that there is memory for at once, at least one of them, and those that wait until these are done."""
    turn, later = [], []
    for case in cases:
        entrant = Entrant(case, served(case.model))
        if any(other.request for other in turn) and not entrant.fits():
            later.append(case)
        else:
            entrant.begin()
            turn.append(entrant)
    return turn, later


def _alternate(turn: Sequence[Entrant]) -> None:
    """All runs; the one that begins changes from round to round."""
    protocol = turn[0].served.protocol
    for number in range(protocol.warm_up + protocol.runs):
        for entrant in rotated(turn, number):
            entrant.run(number >= protocol.warm_up)
