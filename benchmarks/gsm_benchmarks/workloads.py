"""Calls of the operations at the sizes of real models, and the work that the equations ask for.

FLOPs are those of matrix products, on the entries that a row really sees; bytes are each input read once and each
output written once, activations in bfloat16, parameters in float32, slots in int32, statistics for backward in float32.
An implementation may well do more. The geometry is that of the 1.5B model, with 32 heads unless the name of a case has
64, which are the heads of that model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gsm.layers.costs import limited
from gsm_kernels import inverse

CHANNELS, ANGLES = 128, 16
WIDTH, PICKS, RATIO, STATE = 128, 128, 2, 256
MODEL, INNER, VOCABULARY, STREAMS = 2048, 6144, 50304, 4
INDEX_HEADS, INDEX_WIDTH = 8, 64
FIXED = ("cos_BRP", "sin_BRP")  # floating-point arguments without a gradient

Call = dict[str, Any]
Make = Callable[[torch.device, torch.dtype], Call]


class Work(NamedTuple):
    """FLOPs, and bytes to and from memory: of activations in bfloat16, and of parameters in float32."""

    flops: float
    bytes: float
    parameters: float = 0

    def at(self, dtype: torch.dtype) -> tuple[float, float]:
        """FLOPs and all bytes, with activations in this dtype."""
        return self.flops, self.bytes * dtype.itemsize / 2 + self.parameters


@dataclass(frozen=True)
class Case:
    """One operation at one size.

    Attributes:
        name: of its rows.
        op: the operation, an attribute of `gsm_kernels`.
        make: its arguments by name, from a device and the dtype of activations.
        work: by direction: `forward`, `backward`, or `both` where gradients are computed together with the result.
    """

    name: str
    op: str
    make: Make
    work: dict[str, Work]


def gates() -> tuple[Case, ...]:
    """Return the calls that a GPU measures."""
    return (
        attend("attend 4 x 4K", 4, 4096),
        attend("attend 4 x 4K, 64 heads", 4, 4096, heads=64),
        attend("attend 64K", 1, 65536),
        attend("attend 64K, 64 heads", 1, 65536, heads=64),
        attend_band("attend_band 4 x 4K", 4, 4096),
        attend_band("attend_band 4 x 4K, 64 heads", 4, 4096, heads=64),
        attend_band("attend_band 64K", 1, 65536),
        attend_band("attend_band 64K, 64 heads", 1, 65536, heads=64),
        index_top_k("index_top_k 4 x 4K", 4, 4096),
        index_top_k("index_top_k 64K", 1, 65536),
        index_top_k("index_top_k 256K", 1, 262144),
        indexer_kl("indexer_kl 4 x 4K", 4, 4096),
        indexer_kl("indexer_kl 4 x 4K, 64 heads", 4, 4096, heads=64),
        mhc_boundary("mhc_boundary 16K", 16384),
        rms_norm("rms_norm 16K", 16384),
        swiglu("swiglu 16K", 16384),
        linear_cross_entropy("linear_cross_entropy 16K", 16384),
        *decoding(),
    )


def decoding() -> tuple[Case, ...]:
    """Return the calls of one decoded token of the 1.5B model, forward."""
    cases = (
        attend("attend, a token behind 64K", 1, 65536, heads=64, rows=1),
        attend_band("attend_band, a token", 1, 4096, heads=64, rows=1),
        index_top_k("index_top_k, a token behind 16K", 1, 16384, rows=1),
        index_top_k("index_top_k, a token behind 64K", 1, 65536, rows=1),
        mhc_boundary("mhc_boundary, a token", 1),
        rms_norm("rms_norm, a token", 1),
        swiglu("swiglu, a token", 1),
    )
    return tuple(map(_forward, cases))


def on_a_cpu() -> tuple[Case, ...]:
    """Return the calls that one core computes in a few minutes: the attention of small models, forward, and
    `decoding`."""
    small = {"heads": 2, "channels": 64}
    cases = [
        make(f"{make.__name__} {n // 1024}K", 1, n, **small) for make in (attend, attend_band) for n in (4096, 16384)
    ]
    return *map(_forward, cases), *decoding()


def _forward(case: Case) -> Case:
    return replace(case, work={"forward": case.work["forward"]})


def attend(
    name: str,
    batch: int,
    length: int,
    heads: int = 32,
    channels: int = CHANNELS,
    width: int = WIDTH,
    picks: int = PICKS,
    angles: int = ANGLES,
    rows: int | None = None,
) -> Case:
    """One document a sequence; a row's slots lie anywhere among those it sees, one in each of `picks` equal parts.
    `rows`: the last ones of the sequence; None: all."""
    rows = length if rows is None else rows

    def make(device: torch.device, dtype: torch.dtype) -> Call:
        call = _rows(batch, length, rows, width, heads, channels, angles, device, dtype)
        bank = torch.randn(batch, length // RATIO, channels, device=device, dtype=dtype)
        return {**call, "bank_BFC": bank, "index_BRK": picked(batch, length, picks, device, rows)}

    seen = _seen(length, rows, width) + _seen(length, rows, picks, RATIO)
    entries = min(length, rows + width - 1) + min(length // RATIO, rows * picks)
    return Case(name, "attend", make, _attention(batch, rows, heads, channels, seen, entries, 4 * picks))


def attend_band(
    name: str,
    batch: int,
    length: int,
    heads: int = 32,
    channels: int = CHANNELS,
    width: int = STATE,
    angles: int = ANGLES,
    rows: int | None = None,
) -> Case:
    """One document a sequence. `rows`: the last ones of the sequence; None: all."""
    rows = length if rows is None else rows

    def make(device: torch.device, dtype: torch.dtype) -> Call:
        return _rows(batch, length, rows, width, heads, channels, angles, device, dtype)

    seen, entries = _seen(length, rows, width), min(length, rows + width - 1)
    return Case(name, "attend_band", make, _attention(batch, rows, heads, channels, seen, entries, 0))


def index_top_k(name: str, batch: int, length: int, rows: int | None = None) -> Case:
    """Every row searches all slots that are finished before it. `rows`: the last ones of the sequence; None: all."""
    rows = length if rows is None else rows

    def make(device: torch.device, dtype: torch.dtype) -> Call:
        return {**_searched(batch, length, rows, device, dtype), **_ranges(batch, length, rows, device), "k": PICKS}

    pairs = batch * _seen(length, rows, length, RATIO)
    read = rows * INDEX_HEADS * (2 * INDEX_WIDTH + 4) + 2 * INDEX_WIDTH * length / RATIO
    moved = batch * (read + 4 * rows * PICKS)
    return Case(name, "index_top_k", make, {"forward": Work(2 * INDEX_HEADS * INDEX_WIDTH * pairs, moved)})


def indexer_kl(name: str, batch: int, length: int, heads: int = 32, channels: int = CHANNELS) -> Case:
    """The teacher's logits, the scores, and their gradients, which come with the loss, on all slots."""

    def make(device: torch.device, dtype: torch.dtype) -> Call:
        student = {f"index_{key}": x for key, x in _searched(batch, length, length, device, dtype).items()}
        call = attend("", batch, length, heads, channels).make(device, dtype)
        return {**call, **_ranges(batch, length, length, device), **student, "dense": True}

    slots = batch * limited(length, length, RATIO)
    teacher = 2 * heads * channels * (batch * limited(length, WIDTH) + slots)
    scores = 3 * 2 * INDEX_HEADS * INDEX_WIDTH * slots
    tokens = batch * length
    read = 2 * tokens * (heads * channels + channels * (1 + 1 / RATIO))
    moved = read + 4 * tokens * INDEX_WIDTH * (INDEX_HEADS + 1 / RATIO)
    return Case(name, "indexer_kl", make, {"both": Work(teacher + scores, moved)})


def mhc_boundary(name: str, tokens: int, width: int = MODEL) -> Case:
    """Streams written, mixed and read; its parameters are float32, as in training."""
    streams = STREAMS
    numbers = 2 * streams + streams * streams

    def make(device: torch.device, dtype: torch.dtype) -> Call:
        return {
            "streams_BRXD": torch.randn(1, tokens, streams, width, device=device, dtype=dtype),
            "update_BRD": torch.randn(1, tokens, width, device=device, dtype=dtype),
            "phi": torch.randn(numbers, streams * width, device=device) * (streams * width) ** -0.5,
            "bias": torch.randn(numbers, device=device),
            "scale": torch.full((3,), 0.1, device=device),
        }

    products, moved = 2 * numbers * streams * width * tokens, 2 * width * tokens
    parameters = 4 * numbers * streams * width
    forward = 2 * streams + 2  # streams in and out, the mixture out; the update in
    backward = 3 * streams + 3  # also the streams themselves, and the update
    return Case(
        name,
        "mhc_boundary",
        make,
        {
            "forward": Work(products, forward * moved, parameters),
            "backward": Work(3 * products, backward * moved, 2 * parameters),
        },
    )


def rms_norm(name: str, tokens: int, width: int = MODEL) -> Case:
    """Its weight is float32, as in training."""

    def make(device: torch.device, dtype: torch.dtype) -> Call:
        return {
            "x": torch.randn(tokens, width, device=device, dtype=dtype),
            "weight": torch.rand(width, device=device) + 0.5,
        }

    return Case(name, "rms_norm", make, _streaming(tokens * width, 2, 3, 4 * width))


def swiglu(name: str, tokens: int, width: int = INNER) -> Case:
    """The product of two branches."""

    def make(device: torch.device, dtype: torch.dtype) -> Call:
        gate, up = (torch.randn(tokens, width, device=device, dtype=dtype) for _ in range(2))
        return {"gate": gate, "up": up, "limit": 10.0}

    return Case(name, "swiglu", make, _streaming(tokens * width, 3, 5))


def linear_cross_entropy(name: str, tokens: int, width: int = MODEL, vocabulary: int = VOCABULARY) -> Case:
    """Loss and gradients together: three products with the head."""

    def make(device: torch.device, dtype: torch.dtype) -> Call:
        return {
            "hidden_ND": torch.randn(tokens, width, device=device, dtype=dtype),
            "weight_VD": (torch.randn(vocabulary, width, device=device) * width**-0.5).to(dtype),
            "target_N": torch.randint(vocabulary, (tokens,), device=device),
        }

    moved = 6 * width * vocabulary + 4 * width * tokens
    return Case(name, "linear_cross_entropy", make, {"both": Work(6 * tokens * width * vocabulary, moved)})


def picked(batch: int, length: int, picks: int, device: torch.device, rows: int | None = None) -> Tensor:
    """Return ascending slots [B,R,K], one from each of K equal parts of the slots that a row sees. `rows`: the last
    ones of `length` tokens; None: all."""
    rows = length if rows is None else rows
    sees_R1 = (torch.arange(length - rows + 1, length + 1, device=device) // RATIO)[:, None]
    edge_RK = torch.arange(picks + 1, device=device) * sees_R1 // picks
    size_RK = edge_RK.diff()
    chance_BRK = torch.rand(batch, rows, picks, device=device)
    spread_BRK = edge_RK[:, :-1] + (chance_BRK * size_RK).long().clamp(max=(size_RK - 1).clamp(min=0))
    first_K = torch.arange(picks, device=device)
    return torch.where(sees_R1 > picks, spread_BRK, torch.where(first_K < sees_R1, first_K, -1))


def _rows(
    batch: int,
    length: int,
    rows: int,
    width: int,
    heads: int,
    channels: int,
    angles: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Call:
    """Return the arguments of attention of the last rows of a sequence to a window, which holds what they see."""
    position_BR = torch.arange(length - rows, length, device=device).expand(batch, -1)
    angles, entries = min(angles, channels // 2), min(length, rows + width - 1)
    angle_BRP = position_BR[..., None] * 160_000.0 ** -(torch.arange(angles, device=device) / angles)
    return {
        "query_BRHC": torch.randn(batch, rows, heads, channels, device=device, dtype=dtype),
        "window_BEC": torch.randn(batch, entries, channels, device=device, dtype=dtype),
        "position_BR": position_BR,
        "width": width,
        "sink_H": torch.randn(heads, device=device),
        "cos_BRP": angle_BRP.cos(),
        "sin_BRP": angle_BRP.sin(),
    }


def _searched(batch: int, length: int, rows: int, device: torch.device, dtype: torch.dtype) -> Call:
    return {
        "query_BRJI": torch.randn(batch, rows, INDEX_HEADS, INDEX_WIDTH, device=device, dtype=dtype),
        "weight_BRJ": torch.randn(batch, rows, INDEX_HEADS, device=device, dtype=dtype),
        "key_BFI": torch.randn(batch, length // RATIO, INDEX_WIDTH, device=device, dtype=dtype),
    }


def _ranges(batch: int, length: int, rows: int, device: torch.device) -> Call:
    last_BR = (torch.arange(length - rows + 1, length + 1, device=device) // RATIO).expand(batch, -1)
    return {"first_BR": torch.zeros_like(last_BR), "last_BR": last_BR}


def _seen(length: int, rows: int, limit: int, ratio: int = 1) -> int:
    """Return how many entries the last rows of a sequence see in total, each at most `limit`."""
    return limited(length, limit, ratio) - limited(length - rows, limit, ratio)


def _attention(
    batch: int, rows: int, heads: int, channels: int, seen: int, entries: int, index: int
) -> dict[str, Work]:
    """Return the work of attention of the rows of a sequence that see `seen` entries in total, and read `entries` of
    them from memory; the slots of a row take `index` bytes."""
    products = 2 * heads * channels * batch * seen
    forward = rows * (4 * heads * channels + index + 4 * heads) + 2 * channels * entries
    backward = rows * (8 * heads * channels + index + 8 * heads) + 6 * channels * entries
    return {"forward": Work(2 * products, batch * forward), "backward": Work(5 * products, batch * backward)}


def _streaming(numbers: int, forward: float, backward: float, parameters: int = 0) -> dict[str, Work]:
    """Return the work of operations without products, by how many bfloat16 tensors they read or write, and the bytes of
    parameters, whose gradients backward writes."""
    return {
        "forward": Work(0, 2 * numbers * forward, parameters),
        "backward": Work(0, 2 * numbers * backward, 2 * parameters),
    }


def bound(function: Callable[..., Any], call: Mapping[str, Any], direction: str) -> Callable[[], Call]:
    """Return a function without arguments that runs one direction of a call.

    It returns by name the outputs and the gradients (`d query_BRHC`). The gradients of the outputs are the same for all
    functions that return these shapes. For `backward` the forward has run already."""
    if direction == "forward":
        return lambda: _without_gradient(function, call)
    leaves = {name: _leaf(name, value) for name, value in call.items()}
    wanted = {name: x for name, x in leaves.items() if isinstance(x, Tensor) and x.requires_grad}

    def forward() -> tuple[Call, list[Tensor]]:
        outputs = _named(function(**leaves))
        return outputs, [_seed(x) for x in outputs.values() if x.requires_grad]

    def backward(outputs: Call, seeds: list[Tensor], again: bool = True) -> Call:
        inverse.forget()  # every run sorts its selection, as the first backward that reads it does
        learning = [x for x in outputs.values() if x.requires_grad]
        grads = torch.autograd.grad(learning, list(wanted.values()), seeds, retain_graph=again, allow_unused=True)
        return {f"d {name}": x for name, x in zip(wanted, grads, strict=True) if x is not None}

    def both() -> Call:
        outputs, seeds = forward()
        grads = backward(outputs, seeds, again=False)
        return {name: x.detach() for name, x in outputs.items()} | grads

    return both if direction == "both" else partial(backward, *forward())


def _without_gradient(function: Callable[..., Any], call: Mapping[str, Any]) -> Call:
    with torch.no_grad():
        return _named(function(**call))


def _leaf(name: str, value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().requires_grad_(name not in FIXED) if floating else value


def _named(result: Any) -> Call:
    """Outputs by name: of a tuple that has names, those."""
    if isinstance(result, Tensor):
        return {"out": result}
    names = getattr(result, "_fields", None) or [f"out {number}" for number in range(len(result))]
    return {name: x for name, x in zip(names, result, strict=True) if x is not None}


def _seed(x: Tensor) -> Tensor:
    """Return random numbers of a shape, always the same; 1 for a loss."""
    if x.ndim == 0:
        return torch.ones_like(x)
    generator = torch.Generator(x.device).manual_seed(x.numel())
    return torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype)


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest relative error, or share of other slots; infinite where something is missing."""
    if [x.shape for x in found] != [x.shape for x in expected]:
        return math.inf
    pairs = zip(found, expected, strict=True)
    errors = [_relative_error(x, y) if y.is_floating_point() else _other_slots(x, y) for x, y in pairs]
    return max((math.inf if math.isnan(error) else error for error in errors), default=0.0)


def _relative_error(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected|| in float64; the absolute norm if `expected` is zero."""
    found, expected = found.to(torch.float64), expected.to(torch.float64)
    size = torch.linalg.vector_norm(expected).item()
    return torch.linalg.vector_norm(found - expected).item() / (size or 1.0)


def _other_slots(found_BRK: Tensor, expected_BRK: Tensor) -> float:
    """Share of slots, -1 = none, that are not among the expected ones of their row; each is there once."""
    none_K = -1 - torch.arange(found_BRK.shape[-1], device=found_BRK.device)
    both = torch.cat([torch.where(x < 0, none_K, x) for x in (found_BRK, expected_BRK)], -1).sort(-1).values
    shared = (both[..., 1:] == both[..., :-1]).sum().item()
    return 1 - shared / max(1, found_BRK.numel())
