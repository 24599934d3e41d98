"""What is measured: calls of the operations at the sizes of real models, and the work that the equations ask for.

FLOPs are those of matrix products, on the entries that a row really sees; bytes are each input read once and each
output written once, activations in bfloat16, slots in int32, statistics for backward in float32. An implementation may
well do more. The geometry is that of the 1.5B model, with 32 heads unless the name of a case says 64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gsm_kernels
from gsm_kernels import inverse
from gsm_kernels.testing import relative_error

CHANNELS, ANGLES = 128, 16
WIDTH, PICKS, RATIO, STATE = 128, 128, 2, 256
MODEL, INNER, VOCABULARY, STREAMS = 2048, 6144, 50304, 4
INDEX_HEADS, INDEX_WIDTH = 8, 64
FIXED = ("cos_BRP", "sin_BRP")  # floating-point arguments without a gradient

Call = dict[str, Any]
Make = Callable[[torch.device, torch.dtype], Call]


class Work(NamedTuple):
    """FLOPs, and bytes to and from memory, with activations in bfloat16."""

    flops: float
    bytes: float

    def at(self, dtype: torch.dtype) -> Work:
        """The same with activations in another dtype, which are nearly all of the bytes."""
        return Work(self.flops, self.bytes * dtype.itemsize / 2)


@dataclass(frozen=True)
class Case:
    """One operation at one size.

    Attributes:
        name: what its rows are called.
        op: the operation, an attribute of `gsm_kernels`.
        make: its arguments by name, from a device and the dtype of activations.
        work: by direction: `forward`, `backward`, or `both` where gradients are computed together with the result.
    """

    name: str
    op: str
    make: Make
    work: dict[str, Work]

    @property
    def has_kernels(self) -> bool:
        """Whether its operation has Triton kernels of its own."""
        return any(impl.name == "triton" for impl in getattr(gsm_kernels, self.op).fast)

    def launch(self) -> None:
        """Call it once in all its directions, in bfloat16 on the CPU: what would be launched is compiled elsewhere."""
        torch.manual_seed(0)
        call = self.make(torch.device("cpu"), torch.bfloat16)
        for direction in self.work:
            bound(getattr(gsm_kernels, self.op), call, direction)()


def gates() -> tuple[Case, ...]:
    """The sizes that goals are set for, on a GPU."""
    return (
        attend("attend 4 x 4K", 4, 4096),
        attend("attend 64K", 1, 65536),
        attend("attend 64K, 64 heads", 1, 65536, heads=64),
        attend_band("attend_band 4 x 4K", 4, 4096),
        attend_band("attend_band 64K", 1, 65536),
        attend_band("attend_band 64K, 64 heads", 1, 65536, heads=64),
        index_top_k("index_top_k 4 x 4K", 4, 4096),
        index_top_k("index_top_k 64K", 1, 65536),
        index_top_k("index_top_k 256K", 1, 262144),
        indexer_kl("indexer_kl 4 x 4K", 4, 4096),
        mhc_boundary("mhc_boundary 16K", 16384),
        mhc_boundary("mhc_boundary 16K, mixed precision", 16384, mixed=True),
        rms_norm("rms_norm 16K", 16384),
        swiglu("swiglu 16K", 16384),
        pool_groups("pool_groups 16K", 16384),
        linear_cross_entropy("linear_cross_entropy 16K", 16384),
    )


def on_a_cpu() -> tuple[Case, ...]:
    """What one core computes in a few minutes: the attention of small models, forward."""
    small = {"heads": 2, "channels": 64}
    cases = [
        make(f"{make.__name__} {n // 1024}K", 1, n, **small) for make in (attend, attend_band) for n in (4096, 16384)
    ]
    return tuple(Case(c.name, c.op, c.make, {"forward": c.work["forward"]}) for c in cases)


def attend(
    name: str,
    batch: int,
    length: int,
    heads: int = 32,
    channels: int = CHANNELS,
    width: int = WIDTH,
    picks: int = PICKS,
    angles: int = ANGLES,
) -> Case:
    """One document a sequence; a row's slots lie anywhere among those it sees, one in each of `picks` equal parts."""

    def make(device: torch.device, dtype: torch.dtype) -> Call:
        rows = _rows(batch, length, heads, channels, angles, device, dtype)
        bank = torch.randn(batch, length // RATIO, channels, device=device, dtype=dtype)
        return {
            **rows,
            "width": width,
            "bank_BFC": bank,
            "index_BRK": picked(batch, length, picks, device),
        }

    seen = seen_entries(length, width) + seen_entries(length, picks, RATIO)
    return Case(name, "attend", make, _attention(batch, length, heads, channels, seen, 1 + 1 / RATIO, 4 * picks))


def attend_band(
    name: str,
    batch: int,
    length: int,
    heads: int = 32,
    channels: int = CHANNELS,
    width: int = STATE,
    angles: int = ANGLES,
) -> Case:
    """One document a sequence."""

    def make(device: torch.device, dtype: torch.dtype) -> Call:
        return {**_rows(batch, length, heads, channels, angles, device, dtype), "width": width}

    return Case(
        name, "attend_band", make, _attention(batch, length, heads, channels, seen_entries(length, width), 1, 0)
    )


def index_top_k(name: str, batch: int, length: int, heads: int = INDEX_HEADS, width: int = INDEX_WIDTH) -> Case:
    """Every row searches all slots that are finished before it."""

    def make(device: torch.device, dtype: torch.dtype) -> Call:
        return {**_searched(batch, length, heads, width, device, dtype), **_ranges(batch, length, device), "k": PICKS}

    pairs = batch * seen_entries(length, length, RATIO)
    moved = batch * length * (heads * (2 * width + 4) + 2 * width / RATIO + 4 * PICKS)
    return Case(name, "index_top_k", make, {"forward": Work(2 * heads * width * pairs, moved)})


def indexer_kl(
    name: str,
    batch: int,
    length: int,
    heads: int = 32,
    channels: int = CHANNELS,
    dense: bool = True,
    index_heads: int = INDEX_HEADS,
    index_width: int = INDEX_WIDTH,
) -> Case:
    """The teacher's logits, the scores, and their gradients, which come with the loss: on all slots, or the picked."""

    def make(device: torch.device, dtype: torch.dtype) -> Call:
        searched = _searched(batch, length, index_heads, index_width, device, dtype)
        student = {f"index_{key}": x for key, x in searched.items()}
        return {
            **attend("", batch, length, heads, channels).make(device, dtype),
            **_ranges(batch, length, device),
            **student,
            "dense": dense,
        }

    slots = batch * seen_entries(length, length if dense else PICKS, RATIO)
    teacher = 2 * heads * channels * (batch * seen_entries(length, WIDTH) + slots)
    scores = 3 * 2 * index_heads * index_width * slots
    tokens = batch * length
    read = 2 * tokens * (heads * channels + channels * (1 + 1 / RATIO))
    moved = read + 4 * tokens * index_width * (index_heads + 1 / RATIO)
    return Case(name, "indexer_kl", make, {"both": Work(teacher + scores, moved)})


def mhc_boundary(name: str, tokens: int, width: int = MODEL, mixed: bool = False, streams: int = STREAMS) -> Case:
    """Streams written, mixed and read; its parameters are float32, as in training. In mixed precision the streams are
    float32 too, since nothing rounds what the embedding gives."""
    numbers = 2 * streams + streams * streams

    def make(device: torch.device, dtype: torch.dtype) -> Call:
        return {
            "streams_BRXD": torch.randn(
                1, tokens, streams, width, device=device, dtype=torch.float32 if mixed else dtype
            ),
            "update_BRD": torch.randn(1, tokens, width, device=device, dtype=dtype),
            "phi": torch.randn(numbers, streams * width, device=device) * (streams * width) ** -0.5,
            "bias": torch.randn(numbers, device=device),
            "scale": torch.full((3,), 0.1, device=device),
        }

    products, moved = 2 * numbers * streams * width * tokens, 2 * width * tokens
    wide = 2 if mixed else 1
    per_token = wide * (2 * streams + 1) + 1  # streams in and out, the mixture out; the update in
    backward = wide * (3 * streams + 1) + 2  # also the streams themselves, and the update
    return Case(
        name,
        "mhc_boundary",
        make,
        {"forward": Work(products, per_token * moved), "backward": Work(3 * products, backward * moved)},
    )


def rms_norm(name: str, tokens: int, width: int = MODEL) -> Case:
    """Its weight is float32, as in training."""

    def make(device: torch.device, dtype: torch.dtype) -> Call:
        return {
            "x": torch.randn(tokens, width, device=device, dtype=dtype),
            "weight": torch.rand(width, device=device) + 0.5,
        }

    return Case(name, "rms_norm", make, _streaming(tokens * width, 2, 3))


def swiglu(name: str, tokens: int, width: int = INNER) -> Case:
    """The product of two branches."""

    def make(device: torch.device, dtype: torch.dtype) -> Call:
        gate, up = (torch.randn(tokens, width, device=device, dtype=dtype) for _ in range(2))
        return {"gate": gate, "up": up, "limit": 10.0}

    return Case(name, "swiglu", make, _streaming(tokens * width, 3, 5))


def pool_groups(name: str, tokens: int, channels: int = CHANNELS, ratio: int = RATIO) -> Case:
    """Groups of `ratio` tokens; of one token, without gates, which would change nothing."""

    def make(device: torch.device, dtype: torch.dtype) -> Call:
        value, gate = (torch.randn(1, tokens, channels, device=device, dtype=dtype) for _ in range(2))
        return {
            "value_BSC": value,
            "gate_BSC": gate if ratio > 1 else None,
            "end_BF": torch.arange(ratio - 1, tokens, ratio, device=device)[None],
            "ratio": ratio,
        }

    read = 2 if ratio > 1 else 1
    return Case(name, "pool_groups", make, _streaming(tokens * channels, read + 1 / ratio, 2 * read + 1 / ratio))


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


def score_slots(name: str, batch: int, length: int, heads: int = INDEX_HEADS, width: int = INDEX_WIDTH) -> Case:
    """The scores of slots that were picked."""

    def make(device: torch.device, dtype: torch.dtype) -> Call:
        searched = _searched(batch, length, heads, width, device, dtype)
        return {**searched, "index_BRK": picked(batch, length, PICKS, device)}

    products = 2 * heads * width * batch * seen_entries(length, PICKS, RATIO)
    moved = batch * length * (2 * heads * width + 2 * width / RATIO + 6 * PICKS)
    return Case(
        name, "score_slots", make, {"forward": Work(products, moved), "backward": Work(2 * products, 2 * moved)}
    )


def candidate_pool(name: str, batch: int, length: int, blocks: int = 512) -> Case:
    """The best blocks of eight slots."""

    def blocks_of(call: Call) -> Call:
        return {**{key: x for key, x in call.items() if key != "k"}, "blocks": blocks}

    return changed(index_top_k("", batch, length), name, blocks_of, op="candidate_pool")


def attend_range(
    name: str, batch: int, length: int, heads: int = 16, groups: int = 4, channels: int = CHANNELS
) -> Case:
    """Causal attention of the comparators: one document a sequence, every row sees all before it."""

    def make(device: torch.device, dtype: torch.dtype) -> Call:
        key, value = (torch.randn(batch, length, groups, channels, device=device, dtype=dtype) for _ in range(2))
        last_BR = torch.arange(1, length + 1, device=device).expand(batch, -1)
        return {
            "query_BRHC": torch.randn(batch, length, heads, channels, device=device, dtype=dtype),
            **{"key_BFGC": key, "value_BFGC": value},
            **{"first_BR": torch.zeros_like(last_BR), "last_BR": last_BR, "whole": True},
        }

    products = 4 * heads * channels * batch * seen_entries(length, length)
    moved = 4 * batch * length * channels * (heads + groups)
    return Case(
        name, "attend_range", make, {"forward": Work(products, moved), "backward": Work(2.5 * products, 2 * moved)}
    )


def attend_blocks(
    name: str,
    batch: int,
    length: int,
    heads: int = 16,
    groups: int = 1,
    channels: int = CHANNELS,
    block: int = 64,
    blocks: int = 16,
) -> Case:
    """The same on blocks that every row has chosen, its own among them: one document a sequence."""

    def make(device: torch.device, dtype: torch.dtype) -> Call:
        call = attend_range("", batch, length, heads, groups, channels).make(device, dtype)
        own_R1 = torch.arange(length, device=device)[:, None] // block
        score_BRGN = torch.rand(batch, length, groups, -(-length // block), device=device)
        hidden_R1N = (torch.arange(score_BRGN.shape[3], device=device) >= own_R1)[:, None]
        others = min(blocks, score_BRGN.shape[3]) - 1
        best = score_BRGN.masked_fill(hidden_R1N, 2).topk(others, largest=False)
        drawn_BRGN = torch.where(best.values < 2, best.indices, -1)
        chosen_BRGN = torch.cat((own_R1[:, None].expand(batch, -1, groups, -1), drawn_BRGN), dim=-1)
        del call["whole"]
        return {**call, "chosen_BRGN": chosen_BRGN, "block": block, "own": True}

    seen = sum(min(t // block, blocks - 1) * block + t % block + 1 for t in range(length))
    products = 4 * heads * channels * batch * seen
    moved = 4 * batch * length * channels * (heads + groups)
    work = {"forward": Work(products, moved), "backward": Work(2.5 * products, 2 * moved)}
    return Case(name, "attend_blocks", make, work)


def delta_rule(
    name: str, batch: int, length: int, heads: int = 16, channels: int = CHANNELS, by_channel: bool = False
) -> Case:
    """The gated delta rule, one document a sequence; a decay for each head, or for each of its channels."""

    def make(device: torch.device, dtype: torch.dtype) -> Call:
        query, key, value = (torch.randn(batch, length, heads, channels, device=device).to(dtype) for _ in range(3))
        start_BT = _starts(batch, length, device)
        decay = -torch.rand(*(key.shape if by_channel else key.shape[:3]), device=device) / 16
        return {
            **{"query_BTHC": query, "key_BTHC": torch.nn.functional.normalize(key, dim=-1), "value_BTHC": value},
            "beta_BTH": torch.rand(batch, length, heads, device=device, dtype=dtype),
            "log_decay_BTH": None if by_channel else decay,
            **{"start_BT": start_BT, "live_BT": torch.ones_like(start_BT)},
            **{"state_BHCC": torch.zeros(batch, heads, channels, channels, device=device), "scale": channels**-0.5},
            "channel_decay_BTHC": decay if by_channel else None,
        }

    products, moved = 6 * batch * length * heads * channels**2, (8 + 4 * by_channel) * batch * length * heads * channels
    return Case(name, "delta_rule", make, {"forward": Work(products, moved), "backward": Work(2 * products, 2 * moved)})


def slot_attention(
    name: str, batch: int, length: int, heads: int = 16, channels: int = CHANNELS, slots: int = 64
) -> Case:
    """Gated slot attention, one document a sequence."""

    def make(device: torch.device, dtype: torch.dtype) -> Call:
        query, key, value = (torch.randn(batch, length, heads, channels, device=device).to(dtype) for _ in range(3))
        start_BT, decay = _starts(batch, length, device), -torch.rand(batch, length, heads, slots, device=device) / 16
        return {
            **{"query_BTHC": query, "key_BTHC": key, "value_BTHC": value},
            **{"write_BTHM": -decay.expm1(), "log_decay_BTHM": decay},
            **{"start_BT": start_BT, "live_BT": torch.ones_like(start_BT)},
            **{"state_BHMU": torch.zeros(batch, heads, slots, 2 * channels, device=device), "scale": channels**-0.5},
        }

    products = 8 * batch * length * heads * slots * channels
    moved = 8 * batch * length * heads * (channels + slots)
    work = {"forward": Work(products, moved), "backward": Work(2 * products, 2 * moved)}
    return Case(name, "slot_attention", make, work)


def _starts(batch: int, length: int, device: torch.device) -> torch.Tensor:
    """Where the one document of each sequence starts."""
    start_BT = torch.zeros(batch, length, dtype=torch.bool, device=device)
    start_BT[:, 0] = True
    return start_BT


def grouped_linear(name: str, rows: int, groups: int = 56, width: int = MODEL, inner: int = 768) -> Case:
    """One matrix of the experts; groups are of unequal sizes, one of them empty."""

    def make(device: torch.device, dtype: torch.dtype) -> Call:
        share_E = torch.rand(groups, device=device)
        share_E[0] = 0
        end_E = (share_E.cumsum(0) / share_E.sum() * rows).round().to(torch.int32)
        return {
            "x_MD": torch.randn(rows, width, device=device, dtype=dtype),
            "weight_END": (torch.randn(groups, inner, width, device=device) * width**-0.5).to(dtype),
            "end_E": end_E,
        }

    products, moved = 2 * rows * width * inner, 2 * (rows * (width + inner) + groups * width * inner)
    return Case(
        name, "grouped_linear", make, {"forward": Work(products, moved), "backward": Work(2 * products, 2 * moved)}
    )


def changed(case: Case, name: str, change: Callable[[Call], Call], **others: Any) -> Case:
    """The case of another name whose calls are changed."""
    return replace(case, name=name, make=lambda device, dtype: change(case.make(device, dtype)), **others)


def last_rows(case: Case, rows: int, work: dict[str, Work] | None = None) -> Case:
    """The last rows of every sequence of a case, in memory of their own: a part of larger tensors may begin at an
    address that does not divide by 16, for which other kernels are compiled. Given `work`, a case of its own name."""

    def cut(call: Call) -> Call:
        return {name: x[:, -rows:].clone() if "_BR" in name else x for name, x in call.items()}

    if work is None:
        return changed(case, case.name, cut)
    return changed(case, f"{case.name}, {'one row' if rows == 1 else f'{rows} rows'}", cut, work=work)


def seen_entries(length: int, most: int, ratio: int = 1) -> int:
    """Entries that all rows of one document see: the sum of min(t // ratio, most) over t = 1 .. length."""
    full = min(length, most * ratio + ratio - 1)  # from here on, a row sees all that it may
    groups, rest = divmod(full + 1, ratio)
    return ratio * groups * (groups - 1) // 2 + rest * groups + (length - full) * most


def picked(batch: int, length: int, picks: int, device: torch.device) -> Tensor:
    """Ascending slots [B,R,K], one from each of K equal parts of what a row sees; all where it sees no more than K."""
    sees_R1 = (torch.arange(1, length + 1, device=device) // RATIO)[:, None]
    edge_RK = torch.arange(picks + 1, device=device) * sees_R1 // picks
    size_RK = edge_RK.diff()
    chance_BRK = torch.rand(batch, length, picks, device=device)
    spread_BRK = edge_RK[:, :-1] + (chance_BRK * size_RK).long().clamp(max=(size_RK - 1).clamp(min=0))
    first_K = torch.arange(picks, device=device)
    return torch.where(sees_R1 > picks, spread_BRK, torch.where(first_K < sees_R1, first_K, -1))


def _rows(
    batch: int, length: int, heads: int, channels: int, angles: int, device: torch.device, dtype: torch.dtype
) -> Call:
    position_BR = torch.arange(length, device=device).expand(batch, -1)
    angles = min(angles, channels // 2)
    angle_BRP = position_BR[..., None] * 160_000.0 ** -(torch.arange(angles, device=device) / angles)
    return {
        "query_BRHC": torch.randn(batch, length, heads, channels, device=device, dtype=dtype),
        "window_BEC": torch.randn(batch, length, channels, device=device, dtype=dtype),
        "position_BR": position_BR,
        "sink_H": torch.randn(heads, device=device),
        "cos_BRP": angle_BRP.cos(),
        "sin_BRP": angle_BRP.sin(),
    }


def _searched(batch: int, length: int, heads: int, width: int, device: torch.device, dtype: torch.dtype) -> Call:
    return {
        "query_BRJI": torch.randn(batch, length, heads, width, device=device, dtype=dtype),
        "weight_BRJ": torch.randn(batch, length, heads, device=device, dtype=dtype),
        "key_BFI": torch.randn(batch, length // RATIO, width, device=device, dtype=dtype),
    }


def _ranges(batch: int, length: int, device: torch.device) -> Call:
    last_BR = (torch.arange(1, length + 1, device=device) // RATIO).expand(batch, -1)
    return {"first_BR": torch.zeros_like(last_BR), "last_BR": last_BR}


def _attention(
    batch: int, length: int, heads: int, channels: int, seen: int, entries: float, index: int
) -> dict[str, Work]:
    """Of attention on `seen` entries a sequence; `entries` a token are stored, and its slots take `index` bytes."""
    tokens, products = batch * length, 2 * heads * channels * batch * seen
    forward = tokens * (4 * heads * channels + 2 * channels * entries + index + 4 * heads)
    backward = tokens * (8 * heads * channels + 6 * channels * entries + index + 8 * heads)
    return {"forward": Work(2 * products, forward), "backward": Work(5 * products, backward)}


def _streaming(numbers: int, forward: float, backward: float) -> dict[str, Work]:
    """Of operations without products: so many bfloat16 tensors of this size are read or written."""
    return {"forward": Work(0, 2 * numbers * forward), "backward": Work(0, 2 * numbers * backward)}


def bound(
    function: Callable[..., Any], call: Mapping[str, Any], direction: str, dtype: torch.dtype | None = None
) -> Callable[[], Call]:
    """A function of nothing that runs one direction on these arguments, and returns by name what that makes: outputs,
    and gradients (`d query_BRHC`), given gradients of the outputs that are the same for all who return these shapes,
    rounded to `dtype`. For `backward` the forward has run already."""
    if direction == "forward":
        return lambda: _without_gradient(function, call)
    leaves = {name: _leaf(name, value) for name, value in call.items()}
    wanted = {name: x for name, x in leaves.items() if isinstance(x, Tensor) and x.requires_grad}

    def forward() -> tuple[Call, list[Tensor]]:
        outputs = _named(function(**leaves))
        return outputs, [_seed(x, dtype or x.dtype) for x in outputs.values() if x.requires_grad]

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


def _seed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Random numbers of a shape, the same for all who return it; 1 for a loss."""
    if x.ndim == 0:
        return torch.ones_like(x)
    generator = torch.Generator(x.device).manual_seed(x.numel())
    return torch.randn(x.shape, generator=generator, device=x.device).to(dtype).to(x.dtype)


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest relative error, or share of other slots; infinite where something is missing."""
    if [x.shape for x in found] != [x.shape for x in expected]:
        return math.inf
    pairs = zip(found, expected, strict=True)
    errors = [relative_error(x, y) if y.is_floating_point() else _other_slots(x, y) for x, y in pairs]
    return max((math.inf if math.isnan(error) else error for error in errors), default=0.0)


def _other_slots(found_BRK: Tensor, expected_BRK: Tensor) -> float:
    """Share of slots, -1 = none, that are not among the expected ones of their row; each is there once."""
    none_K = -1 - torch.arange(found_BRK.shape[-1], device=found_BRK.device)
    both = torch.cat([torch.where(x < 0, none_K, x) for x in (found_BRK, expected_BRK)], -1).sort(-1).values
    shared = (both[..., 1:] == both[..., :-1]).sum().item()
    return 1 - shared / max(1, found_BRK.numel())
