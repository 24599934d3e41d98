"""Calls on a static memory with hostile arguments; a growing memory is asked the same, and has to agree."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import gsm
from adversary import inside
from adversary.outcome import Case, Wrong, fault
from adversary.world import World

MODELS: tuple[tuple[str, str], ...] = (
    ("gsm", "model/retriever=separate_indexer"),
    ("gsm", "model/writer=gated"),
    ("gsm", "model/residual=plain"),
    ("baseline", "model/residual=plain"),
    ("transformer", "size=pico"),
    ("sliding_window", "size=pico"),
    ("gated_delta_net", "size=pico"),
    ("delta_product", "size=pico"),
    ("hybrid", "size=pico"),
    ("kimi_linear", "size=pico"),
    ("raven", "size=pico"),
    ("yoco", "size=pico"),
)
BATCH, CAPACITY, READ, VOCABULARY = 2, 24, 10, 64
TINY = (
    "size.dim=32 size.feed_forward_dim=48 size.heads=2 size.entry_dim=16 size.rotary_dim=8 size.query_rank=16".split()
)
TINY += [*"size.output_rank=16 size.index_dim=16 size.context=32".split(), f"size.vocabulary={VOCABULARY}"]
# No deeper than it takes to have a layer of every kind.
TINY += ["size.encoder_layers=3", "size.bank_layers=[2]", "size.stages=[2,3]", "size.decoder_layers=2"]
TINY += ["size.decoder_full=4", "size.decoder_reindex=[5]"]
DTYPES = (torch.int64, torch.int64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
DTYPES += (torch.float32, torch.float64, torch.float16, torch.complex64)
DOCUMENTS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    torch.zeros_like,
    lambda value: (value % 2).cumsum(-1) if value.ndim else value,  # rising
    lambda value: value % 3,  # unsorted
    lambda value: value.sort().values % 2 - 1 if value.ndim else value,  # padded
    lambda value: value - 10**9,
    lambda value: value + 2**62,
)
NUMBERS = (1, 2, 0, -1, 5, 10**9, -(2**63), 2**62)
TOLERANCE = 1e-4


@functools.cache
def model(name: str, override: str) -> Any:
    """Small, and the same for every case."""
    return gsm.build_model(name, "pico", [*TINY, override], seed=0).eval()


def tensor(draw: random.Random, batch: int, length: int, kind: str) -> torch.Tensor:
    """Return ids, often of another shape, dtype or device, or with values out of range."""
    odd = [
        (batch + 1, length),
        (1, length),
        (length,),
        (batch, 0),
        (0, length),
        (batch, length, 1),
        (),
        (length, batch),
    ]
    shape = draw.choice([(batch, length)] * 6 + odd)
    value = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(draw.randrange(2**31)))
    if kind == "documents":
        value = draw.choice(DOCUMENTS)(value)
    elif draw.random() < 0.35 and value.numel():
        value.view(-1)[draw.randrange(value.numel())] = draw.choice([-1, -100, VOCABULARY, 10**6, 2**62, -(2**63)])
    value = value.to(draw.choice(DTYPES))
    if value.is_floating_point() and value.numel() and draw.random() < 0.5:
        value.view(-1)[0] = draw.choice([math.nan, math.inf, 0.5])
    if draw.random() < 0.1:
        value = value.to("meta")
    return value


def case(draw: random.Random, world: World) -> Case:
    """Some hostile calls, one after another, and then what has to come out as if none of them had been."""
    name, override = draw.choice(MODELS)
    made = model(name, override)
    state = draw.getstate()

    def run(folder: Path) -> None:
        draw.setstate(state)
        _model(draw, made)

    return Case(run, f"{name} {override}", (), 30)


@torch.no_grad()
def _model(draw: random.Random, made: Any) -> None:
    chance = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (BATCH, CAPACITY), generator=chance)
    static, growing = made.start(BATCH, CAPACITY), made.start(BATCH)
    made(tokens[:, :READ], memory=static)
    growing = made(tokens[:, :READ], memory=growing).memory
    for _ in range(draw.choice([1, 2, 3])):
        left = CAPACITY - static.used
        length = draw.choice([1, 2, 4, max(left, 1), left + 1])
        one, two = _pair(draw, made, length, static, growing)
        growing = _agree(one, two, static, growing)
    if static.used < CAPACITY and inside.first_row(static) <= static.used:
        rest = tokens[:, static.used :]
        _check_same(made(rest, memory=static).logits, made(rest, memory=growing).logits, "what comes after the calls")


def _pair(
    draw: random.Random, made: Any, length: int, static: Any, growing: Any
) -> tuple[Callable[[], Any], Callable[[], Any] | None]:
    """One call on a static memory, and the same on a growing one (None: it has no such call)."""
    kind = draw.choice(["forward"] * 6 + ["prefill"] * 4 + ["rewind", "load", "expand", "start", "generate"])
    if kind == "forward":
        given: dict[str, Any] = {"tokens": tensor(draw, BATCH, length, "tokens")}
        for name in ("documents", "targets"):
            if draw.random() < 0.5:
                given[name] = tensor(draw, BATCH, length, name)
        if draw.random() < 0.5:
            given["rows"] = draw.choice([*NUMBERS, length, length + 1])
        if draw.random() < 0.6:
            given["tokens"] = torch.randint(VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(3))
        return lambda: made(**given, memory=static), lambda: made(**given, memory=growing)
    if kind == "prefill":
        prompt: Any = tensor(draw, BATCH, length, "tokens")
        if draw.random() < 0.4:
            prompt = [torch.arange(draw.choice([0, 1, 2, 3])) for _ in range(draw.choice([0, 1, 2, 3]))]
        chunk = draw.choice([1, 2, 3, 4096, *NUMBERS])
        papers = tensor(draw, BATCH, length, "documents") if draw.random() < 0.4 else None
        return (
            lambda: made.prefill(prompt, static, chunk, papers),
            lambda: made.prefill(prompt, growing, chunk, papers),
        )
    other = model(*draw.choice(MODELS)).start(draw.choice([1, 2, 3]), draw.choice([CAPACITY, 5, None]))
    if other.batch == BATCH and other.capacity is not None:
        other = made.start(3, CAPACITY)
    number, options = draw.choice([0, -1, -(2**63)]), _options(draw)
    single: dict[str, Callable[[], Any]] = {
        "rewind": lambda: static.rewind(other),
        "load": lambda: static.load(made.start(draw.choice([1, 3]), CAPACITY)),
        "expand": lambda: static.expand(number),
        "start": lambda: made.start(*draw.choice([(number, 5), (1, number), (number,)])),
        "generate": lambda: _check_drawn(made.generate(tensor(draw, 1, 3, "tokens"), **options), options),
    }
    return single[kind], None


def _options(draw: random.Random) -> dict[str, Any]:
    return {
        "max_new_tokens": draw.choice([1, 3, 0, -1]),
        "temperature": draw.choice([0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 1e-30, 1e30]),
        "top_p": draw.choice([1.0, 0.5, 0.0, -1.0, 2.0, math.nan, math.inf, 1e-30]),
    }


def _check_drawn(ids: torch.Tensor, options: dict[str, Any]) -> None:
    if ids.shape[1] != options["max_new_tokens"] or ids.min() < 0 or ids.max() >= VOCABULARY:
        raise Wrong(f"it drew {list(ids.shape)} ids of {int(ids.min())} to {int(ids.max())} with {options}")
    finite = math.isfinite(options["temperature"]) or options["temperature"] == math.inf
    if not finite or not 0 < options["top_p"] <= 1:
        raise Wrong(f"it drew with {options}")


def _agree(one: Callable[[], Any], two: Callable[[], Any] | None, static: Any, growing: Any) -> Any:
    """Both calls refuse, in a sentence, or both give the same. Return the growing memory after them."""
    used = static.used
    got = _tried(one)
    if (two is None or isinstance(got, ValueError)) and static.used != used:
        raise Wrong(f"a refused call has read {static.used - used} tokens")
    if two is None:
        return growing
    want = _tried(two)
    if isinstance(got, ValueError) or isinstance(want, ValueError):
        if type(got) is type(want) or "memory is full" in str(got):
            return growing
        raise Wrong(f"a static memory gives {_short(got)}, and a growing one {_short(want)}")
    _check_same(got.logits, want.logits, "a call that was accepted")
    if static.used != want.memory.used:
        raise Wrong(f"{static.used} tokens are used, and {want.memory.used} in a growing memory")
    return want.memory


def _short(value: Any) -> str:
    return f"{type(value).__name__} {value}"[:150] if isinstance(value, Exception) else "an answer"


def _tried(call: Callable[[], Any]) -> Any:
    """The answer of a call, or its refusal, which has to be a sentence."""
    try:
        return call()
    except ValueError as error:
        if fault(error, ()):
            raise
        return error


def _check_same(got: torch.Tensor, want: torch.Tensor, subject: str) -> None:
    if got.shape != want.shape or not torch.allclose(got, want, atol=TOLERANCE, rtol=TOLERANCE, equal_nan=False):
        raise Wrong(f"{subject}: logits differ from those of a growing memory by {(got - want).abs().max().item():.2e}")
