"""How fast models read a prompt and decode after it, and their memory: the paper's protocol (appendix A.3).

A request reads a prompt, then tokens of the text follow one by one. Two times are taken: prefill, from an empty memory
to the logits of the last token of the prompt and a memory that is ready; and decoding, of each token after it. The
device has finished when a clock is read. On a CPU the processor time is noted beside the time of the wall: it hardly
changes where other programs run too.

The runs of all cases of a length alternate, as far as they fit beside each other: a disturbance of the machine then
disturbs all of them, and their ratios stay. B requests at once, T tokens.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gsm.cache.memory import of_decoder
from gsm.costs.model import cost
from gsm.costs.room import needs, refusal
from gsm.data.module import TextData
from gsm.engine import Engine
from gsm.errors import within
from gsm.layers.operations import OPS
from gsm.models.base import LanguageModel
from gsm.tables import length_text
from gsm_kernels import explain

from . import machine, models, results, timing
from .machine import watching
from .models import Entry, Model, one_size
from .models import read as read_models
from .pictures import panels
from .results import Asked, Row, mark, rate, read, table
from .timing import Moment, now, rotated, spread

LENGTHS = {"cuda": [256 << n for n in range(11)], "cpu": [256 << n for n in range(7)]}
SIZES, DTYPES = {"cuda": "1p5b", "cpu": "nano"}, {"cuda": "bfloat16", "cpu": "float32"}
WIDTHS = ("float32", "bfloat16", "float16", "float64")
STDLIB, RANDOM = "stdlib", "random"
HEAD = (
    "request", "prefill, tokens/s", "ms (quartiles)", "of a product's rate", "of the floor", "decode, tokens/s",
    "ms a token (quartiles)", "of the floor", "cache, MiB", "of it the decoder's, KiB", "peak GiB",
)  # fmt: skip
AGAINST = (
    "against", "tokens", "prefill, x as fast", "by processor time", "by FLOPs", "decode, x as fast",
    "by processor time", "by bytes", "cache, x",
)  # fmt: skip


@dataclass(frozen=True)
class Protocol:
    """The way of measuring: size of the models, requests at once, tokens of a prompt that are read at a time, tokens
    that follow it, runs that are not timed and that are, seconds after which a case gets no further run (None: never),
    type of the weights, and the text.
    """

    size: str
    batch: int
    chunk: int
    steps: int
    warm_up: int
    runs: int
    seconds: float | None
    dtype: str
    text: str


@dataclass(frozen=True)
class Case:
    """A request that is measured: its model, and the tokens of its prompt."""

    model: str
    tokens: int

    def name(self, protocol: Protocol) -> str:
        """Return the name of its row."""
        at_once = f"{protocol.batch} x " if protocol.batch > 1 else ""
        return f"{self.model} {protocol.size}, {at_once}{length_text(self.tokens)}"


def run(
    models: Sequence[Entry] = models.ALL,
    size: str | None = None,
    lengths: Sequence[int] | None = None,
    batch_size: int = 1,
    chunk: int = 4096,
    steps: int = 64,
    warm_up: int = 2,
    runs: int = 3,
    seconds: float | None = 120.0,
    dtype: str | None = None,
    text: str = STDLIB,
    **asked: Any,
) -> Path:
    """Measure each case, print the table, write it and the picture beside the JSON file; return that file.

    Args: as in configs/benchmark/inference.yaml and configs/benchmark.yaml.

    Raises:
        ValueError: a value out of range, or a file of another benchmark.
        FileNotFoundError: there is no such text.
        Exception: the first that a case raised, once the others were measured.
    """
    how = Asked(**asked)
    if how.results:
        return show(Path(how.results))
    within(1, batch_size=batch_size, chunk=chunk, steps=steps, runs=runs, lengths=min(lengths) if lengths else None)
    within(0, warm_up=warm_up)
    if dtype not in (None, *WIDTHS):
        raise ValueError(f"dtype must be {', '.join(WIDTHS)} or null, got {dtype}")
    where = machine.chosen(how.device)
    chosen = read_models(models)
    size, dtype = one_size(chosen, size, SIZES[where.type]), dtype or DTYPES[where.type]
    protocol = Protocol(size, batch_size, chunk, steps, warm_up, runs, seconds, dtype, text)
    lengths = sorted({*(LENGTHS[where.type] if lengths is None else lengths)})
    cases = [Case(model.name, tokens) for tokens in lengths for model in chosen]
    file, served = how.open("inference", where), _served(chosen, protocol, where)
    by_row = {case.name(protocol): case for case in cases}
    file.given = {name: model.given for name, case in by_row.items() for model in chosen if model.name == case.model}
    with file.showing(show):
        left = [by_row[name] for name in file.left(by_row, asdict(protocol))]
        for _, group in groupby(left, key=lambda case: case.tokens):
            _measure([*group], file, served, protocol)
    return file.path


def _measure(cases: Sequence[Case], file: results.Results, served: Callable[[str], Served], protocol: Protocol) -> None:
    """Measure cases in turns and add their rows."""
    rows = {case.name(protocol): {**vars(case), "kind": "read", "protocol": asdict(protocol)} for case in cases}
    print(f"in turns: {'; '.join(rows)}", flush=True)
    with file.measuring(rows):
        for case, row in take_turns(cases, served):
            name = case.name(protocol)
            file.add(name, {**rows[name], **row, "kernels": explain(OPS)})


def _served(models: Sequence[Model], protocol: Protocol, device: torch.device) -> Callable[[str], Served]:
    """Return the models by name. Each is built when it is first needed, and kept: at every length all of them run."""

    @cache
    def roof() -> timing.Ceilings:
        return timing.ceilings(device)

    @cache
    def build(name: str) -> Served:
        with _default(getattr(torch, protocol.dtype)):
            model = next(model for model in models if model.name == name).build(protocol.size, device=device)
        return Served(model, protocol, prompts(protocol.text, model.vocabulary), roof())

    return build


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    """Inside the block, parameters are made in this type; a model never takes more memory than that."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Text(NamedTuple):
    """Token ids, int64 [N], and the name of their source."""

    ids_N: Tensor
    name: str

    def cut(self, batch: int, length: int) -> Tensor:
        """Return int64 [batch, length]: stretches of the text in order, from the beginning again at its end."""
        count = batch * length
        return self.ids_N.repeat(-(-count // len(self.ids_N)))[:count].view(batch, length)


def prompts(source: str, vocabulary: int) -> Text:
    """Return the text that a size reads.

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
        text: its prompts.
        roof: the highest rates of the device.
    """

    def __init__(self, model: LanguageModel, protocol: Protocol, text: Text, roof: timing.Ceilings) -> None:
        self.model, self.protocol, self.text, self.roof = model.eval().requires_grad_(False), protocol, text, roof
        self.device, self.dtype = model.embedding.weight.device, model.embedding.weight.dtype
        self.cost = cost(model)
        self.weights = sum(p.numel() * p.element_size() for p in model.parameters())
        self._needs = needs(model, protocol.chunk, protocol.batch)

    def cache_bytes(self, tokens: int) -> int:
        """Return the bytes of a memory after the prompt and the tokens behind it, by the formula."""
        whole = tokens + self.protocol.steps
        return self.cost.cache_bytes(whole, self.dtype, self.protocol.batch, whole).total()

    def needed(self, tokens: int) -> int:
        """Return the bytes that a prompt and the tokens behind it need beside the weights, estimated."""
        return self._needs(tokens + self.protocol.steps)

    def engine(self, tokens: int) -> Engine:
        """Return an engine with an empty memory for a prompt and the tokens behind it."""
        batch, chunk = self.protocol.batch, self.protocol.chunk
        return Engine(self.model, batch=batch, capacity=tokens + self.protocol.steps, chunk=chunk)

    def cut(self, tokens: int) -> tuple[Tensor, Sequence[Tensor]]:
        """Return a prompt [B, T], and the tokens that follow it, [B] each."""
        ids_BT = self.text.cut(self.protocol.batch, tokens + self.protocol.steps).to(self.device)
        return ids_BT[:, :tokens].contiguous(), list(ids_BT[:, tokens:].T.contiguous())


class Request:
    """A request that can be run again and again: a prompt is read, and tokens follow.

    Attributes:
        times: of every timed run, by ``prefill`` and ``decode``.
        runs: how many runs were not timed (``warm_up``) and were (``runs``).
        extra: most bytes beside the weights; None where the system does not report it.
    """

    def __init__(self, served: Served, tokens: int) -> None:
        self.served, self.tokens = served, tokens
        self.times: dict[str, list[Moment]] = {}
        self.runs = {"warm_up": 0, "runs": 0}
        self.spent = 0.0  # seconds
        with watching(served.device) as built:
            self.prompt_BT, self.given = served.cut(tokens)
            self.engine = served.engine(tokens)  # all runs use its memory
            self.engine.warm_up()
        self._built, self.extra = built.extra, built.extra

    def run(self, timed: bool) -> None:
        """Run once, unless the time of the case is over and it has been timed."""
        limit = self.served.protocol.seconds
        if limit is not None and self.spent > limit and (self.times or not timed):
            return
        start = time.monotonic()
        with watching(self.served.device) as peak, torch.no_grad():
            laps = self.lap()
        self.spent += time.monotonic() - start
        self.runs["runs" if timed else "warm_up"] += 1
        if self.extra is not None and self._built is not None and peak.extra is not None:
            self.extra = max(self.extra, self._built + peak.extra)
        for part, took in laps.items() if timed else ():
            self.times.setdefault(part, []).append(took)

    def row(self) -> dict[str, Any]:
        """Return the part of a row that the runs have shown, as plain containers."""
        served = self.served
        about = {"weight_bytes": served.weights, "text": served.text.name, "ceilings": served.roof._asdict()}
        gib = None if self.extra is None else (served.weights + self.extra) / 2**30
        return {**about, **self.measured(), "runs": self.runs, "peak_gib": gib}

    def lap(self) -> dict[str, Moment]:
        """Prefill into an empty memory, then decode the tokens. Return the time of the prompt, and that of a token."""
        start = now(self.served.device)
        self.engine.reset()
        self.engine.prefill(self.prompt_BT)
        read = now(self.served.device)
        for token_B in self.given:
            self.engine.decode(token_B)
        decoded = now(self.served.device).since(read, parts=len(self.given))
        return {"prefill": read.since(start), "decode": decoded}

    def measured(self) -> dict[str, Any]:
        """Return times, FLOPs, bytes and rates of the prompt and of a token, and the bytes of the memory. The larger of
        the floors by FLOPs and by bytes counts."""
        (prefill_s, prefill), (decode_s, decode) = self.spreads("prefill"), self.spreads("decode")
        served, tokens, memory = self.served, self.tokens, self.engine.memory
        protocol, costs, roof = served.protocol, served.cost, served.roof
        flops = protocol.batch * costs.prefill_flops(tokens, protocol.chunk).total()
        moved = costs.prefill_bytes(tokens, protocol.chunk, served.dtype, protocol.batch).total()
        prefill |= {
            "tokens_per_second": self.prompt_BT.numel() / prefill_s,
            "flops": flops,
            "bytes": moved,
            "share_of_product": flops / prefill_s / roof.flops,
            "share_of_floor": roof.floor(flops, moved) / 1e3 / prefill_s,
        }
        moved = costs.decode_bytes(tokens, served.dtype, protocol.batch).total()
        decode |= {
            "tokens_per_second": protocol.batch / decode_s,
            "flops": protocol.batch * costs.decode_flops(tokens).total(),
            "bytes": moved,
            "share_of_floor": moved / roof.bytes / decode_s,
        }
        cache = {"bytes": memory.nbytes(), "formula": served.cache_bytes(tokens), "parts": memory.breakdown()}
        return {"prefill": prefill, "decode": decode, "cache": cache}

    def spreads(self, part: str) -> tuple[float, dict[str, Any]]:
        """Return the median in seconds, and the spread of milliseconds as a row has it, with each run's."""
        wall, processor = ({**spread(times)._asdict(), "each": times} for times in zip(*self.times[part], strict=True))
        processor_ms = processor if self.served.device.type == "cpu" else None
        return wall["median"] / 1e3, {"ms": wall, "processor_ms": processor_ms}


def take_turns(cases: Sequence[Case], served: Callable[[str], Served]) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Yield the row of every case. The row of a case that does not fit has a sentence about the largest case that does.

    Args:
        cases: of one length.
        served: the models by name, each built when it is first needed.
    """
    waiting = list(cases)
    while waiting:
        turn: dict[Case, Request | None] = {}
        for case in waiting:
            model = served(case.model)
            fits = model.needed(case.tokens) <= machine.available_bytes(model.device)
            if fits:
                turn[case] = machine.in_memory(lambda case=case, model=model: Request(model, case.tokens))
            elif not any(turn.values()):
                turn[case] = None
        protocol = served(waiting[0].model).protocol
        for number in range(protocol.warm_up + protocol.runs):
            for case in rotated(list(turn), number):
                _run(turn, case, number >= protocol.warm_up)
        together = uuid.uuid4().hex  # rows whose runs alternated have this in common
        for case, request in turn.items():
            row = _refusal(case, served(case.model)) if request is None else request.row()
            yield case, {**row, "turn": together}
        waiting = [case for case in waiting if case not in turn]
        request = None  # its memory is free before the next turn begins
        turn.clear()
        machine.free()


def _run(turn: dict[Case, Request | None], case: Case, timed: bool) -> None:
    """Run a request once; where memory runs out, it is dropped."""
    request = turn[case]
    if request is None:
        return
    done = machine.in_memory(partial(_timed, request, timed))
    if not done:
        turn[case] = request = None
        machine.free()


def _timed(request: Request, timed: bool) -> bool:
    """Run a request; return that it ran."""
    request.run(timed)
    return True


def _refusal(case: Case, model: Served) -> dict[str, str]:
    return {"failed": refusal(model.needed, case.tokens, machine.available_bytes(model.device))}


# The table and the picture of a file.


def show(path: Path) -> Path:
    """Publish a file of results: tables, and a picture for each group of rows that may be compared."""
    content = read(path, "kind")
    tables = groups([{**row, "name": name} for name, row in content["rows"].items()])
    sections = [section for rows in tables for section in _sections(rows)]
    pictures = {}
    for number, rows in enumerate(tables):
        name = f"-{rows[0]['protocol']['size']}-{number + 1}" if len(tables) > 1 else ""
        pictures[name] = partial(picture, rows)
    return results.publish(path, results.measured_on(content), *sections, pictures=pictures)


def groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows in groups of one protocol, device, versions and sources, which may be compared."""
    by_protocol: dict[str, list[Row]] = {}
    for row in rows:
        by_protocol.setdefault(repr((sorted(row["protocol"].items()), mark(row))), []).append(row)
    return list(by_protocol.values())


def _sections(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the title of a group, its protocol and its tables."""
    yield f"## {title(rows)}, commit {rows[0]['commit']}"
    protocol, row = rows[0]["protocol"], next((row for row in rows if "text" in row), None)
    runs = f"{protocol['steps']} tokens after it, {protocol['warm_up']} runs to warm up and {protocol['runs']} timed"
    how = f"Prompts in chunks of {protocol['chunk']} tokens; {runs}"
    if row is not None:
        roof = row["ceilings"]
        products, copies = rate(roof["flops"], "FLOP/s"), rate(roof["bytes"], "B/s")
        how = f"{how}; {row['text']}. Ceilings: {products} in {roof['dtype']}, {copies} copied"
    yield f"{how}."
    yield table(HEAD, map(_cells, rows))
    yield models.described(rows)
    yield against(rows)


def title(rows: Sequence[Row]) -> str:
    """Return the common properties of a group."""
    protocol = rows[0]["protocol"]
    return f"{protocol['size']}, {protocol['dtype']}, batch {protocol['batch']}, {rows[0]['device']}"


def _cells(row: Row) -> tuple[str, ...]:
    name = row["name"]
    if row.get("failed"):
        return name, f"failed: {row['failed']}"
    runs, prefill, decode = row["runs"], row.get("prefill"), row.get("decode")
    if runs != {key: row["protocol"][key] for key in runs}:
        name = f"{name} ({runs['warm_up']} + {runs['runs']} runs)"
    cells = [name, *[""] * 9, "not known" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}"]
    if prefill is not None:
        cells[1:3] = f"{prefill['tokens_per_second']:,.0f}", _ms(prefill["ms"])
        cells[3:5] = f"{prefill['share_of_product']:.1%}", f"{prefill['share_of_floor']:.1%}"
    if decode is not None:
        cells[5:8] = f"{decode['tokens_per_second']:,.1f}", _ms(decode["ms"]), f"{decode['share_of_floor']:.1%}"
        cells[8] = f"{row['cache']['bytes'] / 2**20:.3f}"
        cells[9] = f"{of_decoder(row['cache']['parts']) / 2**10:,.1f}"
    return tuple(cells)


def _ms(times: Mapping[str, float]) -> str:
    return results.quartiles(times) if times["laps"] > 1 else f"{times['median']:.4g} (one run)"


def against(rows: Sequence[Row]) -> str:
    """Return a table: how many times as fast GSM is as every other model at every length, beside the ratio of FLOPs or
    bytes. Where there is no GSM, the first model takes its place."""
    names = [row["model"] for row in rows]
    leader = "gsm" if "gsm" in names else names[0]
    cells = []
    for row in rows:
        ours = find(rows, leader, row["tokens"])
        if ours is None or ours is row or row.get("failed"):
            continue
        apart = "" if ours["turn"] == row["turn"] else " (not in turns)"
        cache_ratio = f"{ours['cache']['bytes'] / row['cache']['bytes']:.3f}" if "cache" in row else ""
        speeds = *_faster(ours, row, "prefill", "flops"), *_faster(ours, row, "decode", "bytes")
        cells.append((f"{row['model']}{apart}", length_text(row["tokens"]), *speeds, cache_ratio))
    return table((f"{leader} {AGAINST[0]}", *AGAINST[1:]), cells) if cells else ""


def find(rows: Sequence[Row], model: str, tokens: int) -> Row | None:
    """Return the row of a case, unless it failed."""
    same = (row for row in rows if (row["model"], row["tokens"]) == (model, tokens) and not row.get("failed"))
    return next(same, None)


def _faster(ours: Row, other: Row, part: str, by: str) -> tuple[str, str, str]:
    """Return the ratio of medians, by the wall and in processor time, and the ratio of the FLOPs or bytes."""
    if part not in ours or part not in other:
        return "", "", ""
    wall, processor = speed_up(ours, other, part, "ms"), speed_up(ours, other, part, "processor_ms")
    processor_ratio = "" if processor is None else f"{processor:.2f}"
    return f"{wall:.2f}", processor_ratio, f"{other[part][by] / ours[part][by]:.2f}"


def speed_up(ours: Row, other: Row, part: str, clock: str = "ms") -> float | None:
    """Return how many times as fast ``prefill`` or ``decode`` is: the ratio of the medians; None without this clock."""
    mine, theirs = ours[part][clock], other[part][clock]
    return theirs["median"] / mine["median"] if mine and theirs else None


def value(row: Row, part: str) -> float:
    """Return tokens a second of ``prefill`` or ``decode``, or MiB of the ``cache``."""
    return row["cache"]["bytes"] / 2**20 if part == "cache" else row[part]["tokens_per_second"]


def picture(rows: Sequence[Row]) -> bytes:
    """Return a PNG of the paper's three panels.

    Raises ValueError if no request was measured, ImportError if matplotlib is missing.
    """
    name = title(rows)
    rows = [row for row in rows if not row.get("failed")]
    if not rows:
        raise ValueError(f"{name}: no request was measured, and so there is no picture")
    labels = {"prefill": "prefill (tokens/s)", "decode": "decode (tokens/s)", "cache": "cache (MiB)"}
    names = dict.fromkeys(row["model"] for row in rows)

    def line(part: str, model: str) -> list[tuple[int, float]]:
        return sorted((row["tokens"], value(row, part)) for row in rows if row["model"] == model)

    return panels(name, {label: {model: line(part, model) for model in names} for part, label in labels.items()})
