"""The page docs/plan.md: the cost of a token at any length, and the memory of large training runs.

Everything is computed, nothing is measured: FLOPs, bytes and caches by ``gsm.costs.model``, traffic by
``gsm_benchmarks.traffic``, activations by ``kept``, and the rest from the number P of parameters. With G GPUs:

    weights, gradients, AdamW   4 P + 4 P + 8 P in float32: on every GPU (DDP), or a G-th of it (FSDP2)
    buckets                     4 P: DDP's copy of the gradients
    whole gradients             4 P with FSDP2, where a step has several batches
    weights at work             2 P, autocast's copies in bfloat16, until the end of the forward pass; none with FSDP2
                                that gathers bfloat16. FSDP2: g of the embedding and of two layers, g + 4 of a gradient

g is the bytes of a gathered weight: 4, or 2 with ``trainer.strategy.gathered=bfloat16``. A sequence that S GPUs divide
has an S-th of the activations on each, and gathered banks: slots of the whole sequence, twice, in bfloat16.
"""

from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import cast

import torch
from torch import nn

from gsm.cache.memory import map_nodes
from gsm.cache.store import Column
from gsm.costs.model import Cost
from gsm.models.base import LanguageModel
from gsm.models.geometry import Geometry
from gsm.models.stack import Stack
from gsm.tables import length_text
from gsm_benchmarks import traffic
from gsm_kernels import using
from gsm_kernels.device import triton_version
from gsm_kernels.launch import launching
from gsm_kernels.linear_cross_entropy.triton import chunk_rows

from . import machine, models, paper
from .models import Model, known_cost
from .results import FOLDER, table

GIB = 2**30
GSM = Model("gsm", "gsm")
# Ways to divide the states of training, the simplest first: kind, and bytes of a gathered weight.
WAYS = {"DDP": ("ddp", 4), "float32 gathered": ("fsdp2", 4), "`trainer=fsdp`": ("fsdp2", 2)}
COMPARED: dict[str, Callable[[Cost, int], int]] = {
    "prefill FLOPs": lambda model, tokens: model.prefill_flops(tokens).total(),
    "decode FLOPs": lambda model, tokens: model.decode_flops(tokens).total(),
    "decode bytes": lambda model, tokens: model.decode_bytes(tokens).total(),
    "cache": lambda model, tokens: model.cache_bytes(tokens).total(),
}
TOKEN = ("model", "tokens", "prefill, GFLOP a token", "decode, GFLOP", "decode, GB moved", "cache, MiB")
RUN = ("size", "GPUs", "sequences on each", *(f"{way}, GiB (recomputed)" for way in WAYS))
LONG = ("size", "tokens", "GPUs", "a sequence on", "GiB")


@dataclass(frozen=True)
class Assumed:
    """The assumptions; the yaml names their sources.

    Attributes:
        hbm, reserve: GiB of a GPU, and GiB of these that training cannot use.
        backward: gradients that live beside the activations of the layer at work, as a share of these.
        sequences, context: of a step, and tokens of each.
        micro_batch: sequences that a GPU takes at a time, at most.
    """

    hbm: float
    reserve: float
    backward: float
    sequences: int
    context: int
    micro_batch: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 0 or (value == 0 and name not in ("backward", "reserve")):
                raise ValueError(f"assumed.{name} must be above 0, got {value}")


@dataclass(frozen=True)
class Setting:
    """A way to train a model of a size.

    Attributes:
        sharding: ``ddp`` or ``fsdp2``.
        gathered: bytes in which FSDP2 gathers a weight.
        divided: GPUs that divide a sequence.
        batches: of a step.
    """

    model: Model
    size: str
    gpus: int
    sharding: str
    recompute: bool
    micro_batch: int
    context: int
    gathered: int = 4
    divided: int = 1
    batches: int = 1

    @property
    def cost(self) -> Cost:
        """The cost of the model."""
        return known_cost(self.model, self.size, (f"model.recompute={str(self.recompute).lower()}",))


@dataclass(frozen=True)
class Kept:
    """Bytes that wait for the backward pass, in bfloat16 as autocast has it: ``fixed + each * tokens`` on a device.

    Attributes:
        fixed: the float32 gradient of the head's weight, which is made together with the loss.
        each: bytes of a token, over all layers.
        block: bytes of a token in one layer that is not recomputed, the mean over all layers.
    """

    fixed: int
    each: float
    block: float

    def total(self, tokens: float) -> float:
        """Return the bytes for tokens that are on a device at the same time."""
        return self.fixed + self.each * tokens


def kept(model: Model, size: str, recompute: bool, context: int) -> Kept:
    """Return the activations of a model of a size, for sequences of this length.

    Raises ValueError without Triton: its operations declare the tensors that they keep.
    """
    return _counted(model, size, min(context, 1024) if context <= 4096 else 8192)[recompute]


@lru_cache(maxsize=64)
def _counted(model: Model, size: str, tokens: int) -> tuple[Kept, Kept]:
    """Return the activations without and with recomputation, by a sequence of these tokens. They are linear in tokens,
    but that indexers learn from fewer slots beyond 4,096."""
    if triton_version() is None:
        raise ValueError(
            "Triton is not installed, whose operations declare the tensors that they keep. pip install triton"
        )
    plain, bare = _built(model, size, False), _built(model, size, True)
    fixed, parts = 4 * plain.embedding.weight.numel(), [part for part in plain.children() if isinstance(part, Stack)]
    whole, rest = ((saved_bytes(built, tokens) - fixed) / tokens for built in (plain, bare))
    block = (whole - rest) / sum(len(part.blocks) for part in parts)
    # A checkpoint holds the input of its layers, outside of the tensors that autograd saves.
    return Kept(fixed, whole, block), Kept(fixed, rest + sum(map(_entering, parts)), block)


def saved_bytes(model: LanguageModel, tokens: int) -> int:
    """Return the bytes of all tensors but parameters that autograd saves for the loss of one sequence.

    The model runs on the meta device with the GPU's kernels; none of them is launched."""
    ids_BT = torch.zeros(1, tokens, dtype=torch.int64, device="meta")

    def forward() -> torch.Tensor:
        out = model(ids_BT, documents=ids_BT, targets=ids_BT)
        assert out.loss is not None  # there were targets
        return torch.stack([out.loss, *out.losses.values()]).sum()

    with launching(lambda *_: None), using("auto"):
        return machine.saved_bytes(forward, model.parameters())


def _entering(part: Stack) -> int:
    """Return the bytes of a token that enter the layers of a stack: X streams, and the input of the first site. The
    streams that enter the first layer are X views of that."""
    dim = next(iter(part)).attention_norm.weight.numel()
    return 2 * dim * ((part.streams + 1) * len(part.blocks) - part.streams)


def _built(model: Model, size: str, recompute: bool) -> LanguageModel:
    overrides = [f"model.recompute={str(recompute).lower()}"]
    return model.build(size, overrides, "meta").to(torch.bfloat16).train()


def memory(setting: Setting, assumed: Assumed) -> dict[str, float]:
    """Return the bytes on every GPU by part, as listed above; ``total`` is their sum."""
    model = setting.cost.model
    parameters, embedding, layer = _count([model]), model.embedding.weight.numel(), max(_layers(model))
    ddp = setting.sharding == "ddp"
    activations = kept(setting.model, setting.size, setting.recompute, setting.context)
    tokens = setting.micro_batch * setting.context / setting.divided
    at_work = (setting.recompute + assumed.backward) * activations.block * tokens
    chunk = min(tokens, chunk_rows(model.vocabulary) / setting.divided) * model.vocabulary * (4 + 2)
    shards, copies = 1 if ddp else setting.gpus, 2 * parameters * (ddp or setting.gathered > 2)
    travelling = setting.gathered * (embedding + 2 * layer) + (setting.gathered + 4) * layer
    parts = {
        "weights": 4 * parameters / shards,
        "gradients": 4 * parameters / shards,
        "optimizer": 8 * parameters / shards,
        "buckets": 4.0 * parameters if ddp else 0.0,
        "whole gradients": 4.0 * parameters if not ddp and setting.batches > 1 else 0.0,
        "weights at work": copies + (0 if ddp else travelling),
        "activations": activations.total(tokens),
        "layer or logits at work": max(at_work, chunk),
        "gathered banks": 2.0 * 2 * slots(model, setting.context) if setting.divided > 1 else 0.0,
    }
    return {**parts, "total": sum(parts.values())}


def fits(setting: Setting, assumed: Assumed) -> bool:
    """Whether a GPU holds it beside its reserve."""
    return memory(setting, assumed)["total"] <= (assumed.hbm - assumed.reserve) * GIB


def sent(model: LanguageModel, tokens: int, ranks: int) -> float:
    """Return the bytes that each rank sends in a forward pass in bfloat16, for one sequence that all ranks divide."""
    if ranks == 1:
        return 0.0
    messages = traffic.sent(model, batch=1, tokens=tokens, ranks=ranks, number_bytes=2)
    return sum(message.bytes for message in messages) / ranks


def slots(model: LanguageModel, tokens: int) -> int:
    """Return the numbers in all slots that these tokens fill: banks, index keys, dense keys and values."""
    widths: list[int] = []

    def count(store: Column) -> None:
        widths.append(-(-tokens // store.ratio) * store.value_BFC.shape[-1])

    with torch.device("meta"):
        map_nodes(model.start(), (Column,), count)
    return sum(widths)


def _count(parts: Iterable[nn.Module]) -> int:
    return sum(p.numel() for part in parts for p in part.parameters())


def _layers(model: nn.Module) -> list[int]:
    """Return the number of parameters of every layer."""
    return [_count([block]) for part in model.children() for block in getattr(part, "blocks", ())]


def below(mine: Callable[[int], int], other: Callable[[int], int], longest: int) -> list[tuple[int, int]]:
    """Return the lengths at which mine is below the other: first and last of each range, from 1 to the longest.

    Found by doubling and bisection, which sees one crossing at most between two lengths that it tries.
    """
    ranges, start = [], 1 if mine(1) < other(1) else None
    tried = [*itertools.takewhile(lambda n: n < longest, (1 << k for k in itertools.count())), longest]
    for low, high in itertools.pairwise(tried):
        inside = start is not None
        if (mine(high) < other(high)) == inside:
            continue
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if (mine(middle) < other(middle)) == inside else (low, middle)
        if inside:
            ranges.append((start, low))
        start = None if inside else high
    return ranges if start is None else [*ranges, (start, longest)]


# The page.


def run(
    assumed: Assumed,
    sizes: Sequence[str] = ("0p5b", "1p5b", "8b_a1p5b"),
    size: str = "1p5b",
    gpus: Sequence[int] = (8, 64, 800),
    contexts: Sequence[int] = (4096, 65536, 1048576),
    output: str = "",
) -> Path:
    """Compute the page, print it and write it; return its file.

    Args:
        assumed: about the hardware and a step.
        sizes: of the tables of training.
        size: of the table of tokens, and of that of traffic.
        gpus: numbers of GPUs.
        contexts: tokens of a sequence.
        output: the file; empty: logs/benchmarks/plan.md.

    Raises:
        ValueError: no GPU, or no length.
    """
    if not gpus or not contexts or min(*gpus, *contexts) < 1:
        raise ValueError(f"gpus and contexts must be numbers of 1 or more, got {list(gpus)} and {list(contexts)}")
    path = Path(output) if output else FOLDER / "plan.md"
    assumptions = ", ".join(f"{name} {value:g}" for name, value in asdict(assumed).items())
    chosen = models.read(models.ALL)
    costs = {model.name: known_cost(model, size) for model in chosen}
    sections = (
        "# Large runs, computed",
        "Look up how many GPUs a run needs, and what a token costs. **Every number is computed, not measured**, by "
        f"`{shlex.join(['python', *sys.argv])}`; "
        "`benchmarks/gsm_benchmarks/plan.py` has the formulas, `configs/benchmark/plan.yaml` the assumptions: "
        f"{assumptions}.",
        "## A token",
        f"Size {size}, bfloat16, one sequence, prompts in chunks of 4,096 tokens:",
        table(TOKEN, _token_cells(costs, contexts)),
        f"Lengths, in tokens, up to {max(contexts):,}, at which GSM needs less:",
        table(("than", *COMPARED), _crossing_cells(costs, max(contexts))),
        "## Training on many GPUs",
        "GSM; GiB of a GPU, and in brackets with `model.recompute=true`:",
        table(RUN, [_run_cells(name, n, assumed) for name in sizes for n in gpus]),
        _checked(assumed),
        "`float32 gathered` stands for `trainer=fsdp trainer.strategy.gathered=null`. Where a step has several "
        "batches, each GPU keeps whole gradients until the last of them "
        "(`trainer.strategy.average_each_batch=true` saves them).",
        "## Long sequences, divided",
        "GSM with FSDP2, weights gathered in bfloat16, recomputed: one sequence on the least power of two of GPUs on "
        "which it fits ([how](distributed.md#sequences-divided-among-devices)):",
        table(LONG, _long_cells(sizes, gpus, contexts, assumed)),
        f"Each rank sends in a forward pass in bfloat16, for one sequence of 64K tokens at {size} (backward sends the "
        "same number again, recomputed layers twice; ring attention is that of a dense Transformer of this depth):",
        table(("ranks", *costs, "ring attention"), [_sent_cells(costs, ranks) for ranks in (2, 8)]),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    print(path.read_text(encoding="utf-8"))
    return path


def _token_cells(costs: Mapping[str, Cost], contexts: Sequence[int]) -> list[tuple[str, ...]]:
    cells = []
    for name, model in costs.items():
        for tokens in contexts:
            prefill, decode, moved, stored = (count(model, tokens) for count in COMPARED.values())
            numbers = f"{prefill / tokens / 1e9:.3g}", f"{decode / 1e9:.3g}", f"{moved / 1e9:.3g}"
            cells.append((name, f"{tokens:,}", *numbers, f"{stored / 2**20:,.3g}"))
    return cells


def _crossing_cells(costs: Mapping[str, Cost], longest: int) -> list[tuple[str, ...]]:
    cells = []
    for name, other in costs.items():
        if name != "gsm":
            pairs = [(cache(partial(count, costs["gsm"])), cache(partial(count, other))) for count in COMPARED.values()]
            cells.append((name, *(_words(below(mine, theirs, longest), longest) for mine, theirs in pairs)))
    return cells


def _words(ranges: Sequence[tuple[int, int]], longest: int) -> str:
    words = [f"from {first:,}" if last == longest else f"{first:,} to {last:,}" for first, last in ranges]
    return "everywhere" if ranges == [(1, longest)] else ", ".join(words) or "nowhere"


def _run_cells(size: str, gpus: int, assumed: Assumed) -> tuple[str, ...]:
    """Return the memory of a run by the way of dividing it."""
    batch = max(1, min(assumed.micro_batch, assumed.sequences // gpus))
    batches, cells = -(-assumed.sequences // (batch * gpus)), []
    for sharding, gathered in WAYS.values():
        one = Setting(GSM, size, gpus, sharding, False, batch, assumed.context, gathered, 1, batches)
        both = one, replace(one, recompute=True)
        plain, bare = (memory(setting, assumed)["total"] / GIB for setting in both)
        cells.append(f"{plain:.1f} ({bare:.1f})")
    return size, str(gpus), str(batch), *cells


def _long_cells(
    sizes: Iterable[str], gpus: Sequence[int], contexts: Sequence[int], assumed: Assumed
) -> list[tuple[str, ...]]:
    cells = []
    for size, tokens, count in itertools.product(sizes, contexts, gpus):
        setting = _least(Setting(GSM, size, count, "fsdp2", True, 1, tokens, 2), assumed)
        divided = str(setting.divided) if fits(setting, assumed) else "does not fit"
        cells.append((size, length_text(tokens), str(count), divided, f"{memory(setting, assumed)['total'] / GIB:.1f}"))
    return cells


def _least(setting: Setting, assumed: Assumed) -> Setting:
    """Return the setting with the fewest GPUs for a sequence on which it fits, else with all of them."""
    ways = [
        replace(setting, divided=n) for n in range(1, setting.gpus + 1) if setting.gpus % n == 0 and n & (n - 1) == 0
    ]
    return next((way for way in ways if fits(way, assumed)), ways[-1])


def _sent_cells(costs: Mapping[str, Cost], ranks: int) -> tuple[str, ...]:
    geometry = cast(Geometry, costs["gsm"].model.geometry)
    ring = traffic.ring(geometry, batch=1, tokens=65536, ranks=ranks, number_bytes=2) / ranks
    each = [sent(cost.model, 65536, ranks) for cost in costs.values()]
    return str(ranks), *(f"{moved / 1e6:,.0f} MB" for moved in (*each, ring))


def _checked(assumed: Assumed) -> str:
    """Return the paper's measured memory beside the computed memory of the same setting."""
    words = []
    for model in models.read(models.PAIR):
        computed = memory(Setting(model, paper.SIZE, 8, "ddp", True, 4, 4096), assumed)["total"] / GIB
        words.append(f"{model.name} {computed:.1f} GiB (the paper measured {paper.TRAINING[model.name]['peak_gib']})")
    return f"Compared with the paper, 1.5B on 8 GPUs, 4 x 4,096 each, DDP, recomputed: {', '.join(words)}."
