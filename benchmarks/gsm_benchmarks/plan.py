"""What training at the paper's scales takes on many GPUs: memory of each, time of a run, and what breaks first.

Everything is computed: FLOPs and caches by ``gsm.costs.model``, activations by ``kept``, the rest from
the parameters P and what is assumed of the hardware (``Assumed``). With G GPUs, of which n share a node, b bytes:

    weights, gradients, AdamW   4 P + 4 P + 8 P in float32: on every GPU (DDP), or a G-th of it (FSDP2)
    buckets                     4 P: DDP's copy of the gradients, unless they are views of it
    weights at work             2 P, autocast's copies in bfloat16, held to the end of the forward pass; none with FSDP2
                                that gathers bfloat16. FSDP2: g of the embedding and of two layers, g + r of a gradient
    one pass over the links     (n - 1) / n  b / NVLink  +  (1 - n / G)  b / n / network
    DDP, a step                 two passes over 4 P (reduce-scatter and all-gather)
    FSDP2, a micro-batch        two passes over g P (weights), one over r P (gradients)
    time of a step              FLOPs / (peak MFU), and the communication that is not hidden behind it

g and r are the bytes in which ``trainer=fsdp`` gathers a weight and averages a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import torch

from gsm.config.compose import compose
from gsm.config.load import instantiate
from gsm.costs.model import Cost
from gsm.models.base import LanguageModel
from gsm.models.stack import Stack
from gsm_kernels import using
from gsm_kernels.device import triton_version
from gsm_kernels.launch import launching
from gsm_kernels.linear_cross_entropy.triton import chunk_rows

from . import entries, machine, paper, results
from .entries import Entry, Model, known_cost
from .pictures import short
from .recipes import PAPERS, Recipe, composed
from .results import FOLDER, Row, read, table, write

GIB = 2**30
SHARDINGS = ("ddp", "fsdp2")
ENOUGH = tuple(8 << n for n in range(8))  # GPUs that are tried
# How a recipe may be sharded, what comes first being simpler: by how many bytes FSDP2 gathers and reduces, too.
WAYS = {
    "trainer=ddp": ("ddp", 4, 4),
    "trainer=fsdp": ("fsdp2", 4, 4),
    "trainer=fsdp trainer.strategy.gathered=bfloat16 trainer.strategy.reduced=float32": ("fsdp2", 2, 4),
}
PARTS = ("weights", "gradients", "optimizer", "buckets", "weights at work", "activations", "layer or logits at work")
MEMORY = ("size", "model", "GPUs", "sharding", "recomputed", "b", *PARTS, "GiB in all", "fits")
TIME = ("size", "model", "GPUs", "sharding", "sequences a step", "step, s", "communication, s", "of the arithmetic",
        "steps", "hours", "hours at the paper's MFU")  # fmt: skip
RECIPES = ("experiment", "size", "run", "GPUs", "b", "batches", "sequences a step", "tokens a step", "steps",
           "tokens, 10^9", "GiB, DDP", "GiB, FSDP2", "GiB, bfloat16 gathered", "needs")  # fmt: skip
LENGTHS = ("size", "model", "GPUs", "tokens", "activations, GiB", "GiB in all", "fits", "else divided over",
           "indexers, of FLOPs", "seconds on one GPU", "cache, GiB")  # fmt: skip


@dataclass(frozen=True)
class Assumed:
    """What is taken for granted; the yaml says where each number comes from.

    Attributes:
        peak: FLOP/s of a GPU.
        mfu: share of it that a step reaches, recomputed FLOPs counted.
        hbm, reserve: GiB of a GPU, and how many of these training cannot use.
        nvlink, network: bytes/s of a GPU to its node and to others, in each direction.
        reached: share of both that collectives reach.
        hidden: share of communication that runs beside arithmetic.
        backward: gradients that live beside the activations of the layer at work, as a share of these.
        sequences, context: of a step, and tokens of each.
        micro_batch: sequences that a GPU takes at a time, at most.
        per_node: GPUs of a node.
    """

    peak: float
    mfu: float
    hbm: float
    reserve: float
    nvlink: float
    network: float
    reached: float
    hidden: float
    backward: float
    sequences: int
    context: int
    micro_batch: int
    per_node: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            share = name in ("mfu", "reached", "hidden")
            if value < 0 or (share and value > 1) or (value == 0 and name not in ("hidden", "backward", "reserve")):
                raise ValueError(f"assumed.{name} is {value}; give {'a share, up to 1' if share else 'more than 0'}")

    def one_pass(self, moved: float, gpus: int) -> float:
        """Seconds in which so many bytes are gathered, or reduced, over all GPUs: within nodes, then between them,
        each of a node's GPUs with its share."""
        near = min(gpus, self.per_node)
        within, between = (near - 1) / near * moved, (1 - near / gpus) * moved / near
        return (within / self.nvlink + between / self.network) / self.reached


@dataclass(frozen=True)
class Setting:
    """One way to train: which model, on how many GPUs, and how; FSDP2 with so many bytes of a weight that is gathered
    and of a gradient that is reduced."""

    model: Model
    size: str
    gpus: int
    sharding: str
    recompute: bool
    micro_batch: int
    context: int
    gathered: int = 4
    reduced: int = 4

    @property
    def tokens(self) -> int:
        """On a GPU at a time."""
        return self.micro_batch * self.context

    @property
    def cost(self) -> Cost:
        """Of the model."""
        return known_cost(self.model, self.size, (_recompute(self.recompute),))

    def cells(self) -> dict[str, Any]:
        """As its row has it."""
        given = {"given": self.model.given} if self.model.given else {}
        return {**asdict(self), "model": self.model.name, **given}


@dataclass(frozen=True)
class Kept:
    """Bytes that wait for the backward pass, in bfloat16 as autocast has it: ``fixed + each * tokens`` on a device.

    Attributes:
        fixed: the float32 gradient of the head's weight, which is made together with the loss.
        each: of a token, of all layers.
        block: of a token, of one layer (the mean of all) whose activations are not recomputed.
    """

    fixed: int
    each: float
    block: float

    def total(self, tokens: int) -> float:
        """With so many tokens on a device at a time."""
        return self.fixed + self.each * tokens


def kept(model: Model, size: str, recompute: bool, context: int) -> Kept:
    """Of a model of a size, for sequences of this length.

    Raises:
        ValueError: there is no Triton on this machine, whose operations say what they keep.
    """
    return _counted(model, size, min(context, 1024) if context <= 4096 else 8192)[recompute]


@lru_cache(maxsize=64)
def _counted(model: Model, size: str, tokens: int) -> tuple[Kept, Kept]:
    """Without and with recomputation, by so many tokens: what is kept is linear in them, but that indexers learn from
    fewer slots beyond 4,096."""
    if triton_version() is None:
        raise ValueError("Triton is not installed: what its operations keep cannot be counted; pip install triton")
    plain, bare = _built(model, size, False), _built(model, size, True)
    fixed, parts = 4 * plain.embedding.weight.numel(), [part for part in plain.children() if isinstance(part, Stack)]
    whole, rest = ((saved_bytes(built, tokens) - fixed) / tokens for built in (plain, bare))
    block = (whole - rest) / sum(len(part.blocks) for part in parts)
    # What enters the layers is held by a checkpoint, outside of what autograd saves.
    return Kept(fixed, whole, block), Kept(fixed, rest + sum(map(_entering, parts)), block)


def saved_bytes(model: LanguageModel, tokens: int) -> int:
    """Bytes of all tensors but parameters that autograd has saved after the loss of one sequence, counted on tensors
    without memory: the model runs on the meta device with the GPU's kernels, of which nothing is launched."""
    ids_BT = torch.zeros(1, tokens, dtype=torch.int64, device="meta")

    def forward() -> torch.Tensor:
        out = model(ids_BT, documents=ids_BT, targets=ids_BT)
        assert out.loss is not None  # there were targets
        return torch.stack([out.loss, *out.losses.values()]).sum()

    with launching(lambda *_: None), using("auto"):
        return machine.saved_bytes(forward, model.parameters())


def _entering(part: Stack) -> int:
    """Bytes of a token at the doors of a stack's layers: X streams, and what the first site reads of them. The streams
    that enter the first layer are X views of that."""
    dim = next(iter(part)).attention_norm.weight.numel()
    return 2 * dim * ((part.streams + 1) * len(part.blocks) - part.streams)


def _built(model: Model, size: str, recompute: bool) -> LanguageModel:
    return model.bare(size, [_recompute(recompute)]).to(torch.bfloat16).train()


def _recompute(wanted: bool) -> str:
    return f"model.recompute={str(wanted).lower()}"


def memory(setting: Setting, assumed: Assumed) -> dict[str, float]:
    """Bytes on every GPU by part, as said above; the last is their sum."""
    model = setting.cost.model
    parameters = sum(p.numel() for p in model.parameters())
    embedding, layer = model.embedding.weight.numel(), max(_layer_parameters(model))
    whole = setting.sharding == "ddp"
    activations = kept(setting.model, setting.size, setting.recompute, setting.context)
    at_work = (setting.recompute + assumed.backward) * activations.block * setting.tokens
    chunk = min(setting.tokens, chunk_rows(model.vocabulary)) * model.vocabulary * (4 + 2)
    shards, copies = 1 if whole else setting.gpus, 2 * parameters * (whole or setting.gathered > 2)
    travelling = setting.gathered * (embedding + 2 * layer) + (setting.gathered + setting.reduced) * layer
    parts = {
        "weights": 4 * parameters / shards,
        "gradients": 4 * parameters / shards,
        "optimizer": 8 * parameters / shards,
        "buckets": 4.0 * parameters if whole else 0.0,
        "weights at work": float(copies + (0 if whole else travelling)),
        "activations": activations.total(setting.tokens),
        "layer or logits at work": max(at_work, chunk),
    }
    return {**parts, "total": sum(parts.values())}


def timing(setting: Setting, assumed: Assumed, mfu: float | None = None) -> dict[str, float]:
    """Seconds of a step in arithmetic and communication, and the step as a whole; and its tokens. Sequences are those
    of ``assumed``, or one for each GPU if there are more GPUs."""
    sequences = max(assumed.sequences, setting.gpus)
    tokens = sequences * setting.context
    micro_batches = math.ceil(sequences / setting.gpus / setting.micro_batch)
    flops = sequences * setting.cost.training_flops(setting.context).total()
    arithmetic = flops / setting.gpus / (assumed.peak * (mfu or assumed.mfu))
    parameters = sum(p.numel() for p in setting.cost.model.parameters())
    over = 2 * 4 if setting.sharding == "ddp" else micro_batches * (2 * setting.gathered + setting.reduced)
    communication = assumed.one_pass(over * parameters, setting.gpus)
    shown = max((1 - assumed.hidden) * communication, communication - arithmetic)
    return {
        "arithmetic": arithmetic,
        "communication": communication,
        "step": arithmetic + shown,
        "tokens": tokens,
    }


def paper_mfu(variant: str, assumed: Assumed) -> float | None:
    """The share of the peak that the paper's own 1.5B reaches, by its tokens/s on 8 GPUs with recomputation; None for a
    variant of ``model`` that it has not measured."""
    if variant not in paper.TRAINING:
        return None
    setting = Setting(Model(variant), "1p5b", 8, "ddp", True, assumed.micro_batch, 4096)
    flops = setting.cost.training_flops(4096).total() / 4096
    return paper.TRAINING[variant]["tokens_per_second"] / 8 * flops / assumed.peak


def travelling(overrides: Sequence[str] = ()) -> dict[str, int]:
    """Bytes in which ``trainer=fsdp`` gathers a weight and averages a gradient, as its yaml and these overrides say.

    Raises ConfigError for others than the yaml takes.
    """
    policy = instantiate(compose(["trainer=fsdp", *overrides])["trainer"]["strategy"], "trainer.strategy").policy
    gathered = policy.param_dtype or torch.float32
    return {"gathered": gathered.itemsize, "reduced": (policy.reduce_dtype or gathered).itemsize}


def run(
    assumed: Assumed,
    budgets: Mapping[str, float],
    fsdp: Sequence[str] = (),
    output: str = "",
    results: str = "",
    models: Sequence[Entry] = entries.PAIR,
    gpus: Sequence[int] = (8, 64, 800),
    contexts: Sequence[int] = (4096, 16384, 65536, 262144, 1048576),
    recipes: Sequence[str] = PAPERS,
    layouts: Sequence[str] = ("1", "8", "64", "2x8"),
) -> Path:
    """Compute, print the tables and write them beside the JSON file; return that file.

    Args:
        assumed: of the hardware and of a step.
        budgets: tokens of the run of every size.
        fsdp: overrides of ``trainer=fsdp``; without any, FSDP2 is what its yaml makes it.
        output: the file; left out: logs/benchmarks/plan.json.
        results: a file of results; nothing is computed, and its tables are made again.
        models: entries (``entries.read``); checkpoints count at their own size alone.
        gpus: numbers of GPUs, in whole nodes.
        contexts: tokens of the one sequence that a GPU takes, with recomputation and FSDP2.
        recipes, layouts: experiments, and GPUs that they are composed for, as in ``recipes.composed``.

    Raises:
        ValueError: an entry that is none, GPUs that fill no whole nodes, or no length.
    """
    if results:
        return show(Path(results))
    broken = [n for n in gpus if n < 1 or n % assumed.per_node]
    if broken or not contexts or min(contexts) < 1:
        raise ValueError(
            f"gpus {list(gpus)}, contexts {list(contexts)}: give multiples of {assumed.per_node} GPUs, and lengths of "
            "1 or more"
        )
    known = entries.read(models)
    pairs = entries.at_sizes(known, [*budgets], "budgets")
    types = travelling(fsdp)
    runs = [
        _run(
            Setting(model, size, n, sharding, recompute, _batch(n, assumed), assumed.context, **types), budgets, assumed
        )
        for (size, model), n, sharding, recompute in product(pairs, gpus, SHARDINGS, (False, True))
    ]
    lengths = [
        _length(Setting(model, size, n, "fsdp2", True, 1, context, **types), assumed)
        for (size, model), n, context in product(pairs, gpus[:2], contexts)
    ]
    made = [_recipe(one, assumed) for one in composed(recipes, layouts)]
    facts = {**machine.facts(torch.device("cpu")), "device": "computed, nothing measured"}
    shares = {name: share for name in entries.PAIR if (share := paper_mfu(name, assumed))}
    content = {
        **facts,
        "assumed": asdict(assumed),
        "fsdp2": types,
        "paper_mfu": shares,
        "paper_gib": {name: paper.TRAINING[name]["peak_gib"] for name in entries.PAIR},
    }
    rows = {f"{row['kind']} {number}": row for number, row in enumerate([*runs, *lengths, *made])}
    path = Path(output) if output else FOLDER / "plan.json"
    write(path, {**content, "rows": rows})
    return show(path)


def _run(setting: Setting, budgets: Mapping[str, float], assumed: Assumed) -> dict[str, Any]:
    """The row of a run: memory, a step, and hours for its tokens at the assumed and at the paper's speed."""
    parts, fast = memory(setting, assumed), timing(setting, assumed)
    share, tokens = paper_mfu(setting.model.variant or setting.model.name, assumed), float(budgets[setting.size])
    speeds = {"hours": fast, **({"hours_at_papers_mfu": timing(setting, assumed, share)} if share else {})}
    hours = {name: tokens / one["tokens"] * one["step"] / 3600 for name, one in speeds.items()}
    return {
        "kind": "run", **setting.cells(), "memory": parts, "fits": fits(parts, assumed), "budget": tokens,
        "steps": tokens / fast["tokens"], "seconds": fast, **hours,
    }  # fmt: skip


def _length(setting: Setting, assumed: Assumed) -> dict[str, Any]:
    """The row of a length: memory of one sequence, over how many GPUs its activations would have to be divided, what
    part of its FLOPs indexers take, and the cache of one that was read."""
    parts, flops = memory(setting, assumed), setting.cost.training_flops(setting.context)
    divided = parts["activations"] + parts["layer or logits at work"]
    room = (assumed.hbm - assumed.reserve) * GIB - (parts["total"] - divided)
    searching = sum(n for part, n in flops.items() if part.endswith(("index scores", "teacher")))
    return {
        "kind": "length", **setting.cells(), "memory": parts, "fits": fits(parts, assumed),
        "divided_over": math.ceil(divided / room) if room > 0 else None, "searching": searching / flops.total(),
        "cache_bytes": setting.cost.cache_bytes(setting.context).total(),
        "seconds": flops.total() / (assumed.peak * assumed.mfu),
    }  # fmt: skip


def _recipe(recipe: Recipe, assumed: Assumed) -> dict[str, Any]:
    """The row of a recipe: memory of every model by the way of sharding, and which way fits, on how many GPUs."""

    def held(way: str, gpus: int) -> dict[str, float]:
        sharding, *types = WAYS[way]
        each = recipe.size, gpus, sharding, recipe.recompute, recipe.batch_size, recipe.context
        return {name: memory(Setting(Model(name), *each, *types), assumed)["total"] for name in recipe.models}

    def enough(models: Mapping[str, float]) -> bool:
        return all(fits({"total": total}, assumed) for total in models.values())

    memories = {way: held(way, recipe.gpus) for way in WAYS}
    needs = next((way for way, models in memories.items() if enough(models)), None)
    last = [*WAYS][-1]
    more = next((f"{n} GPUs, {last}" for n in ENOUGH if n > recipe.gpus and enough(held(last, n))), "larger GPUs")
    row = {**asdict(recipe), "sequences": recipe.sequences, "memory": memories}
    return {"kind": "recipe", **row, "needs": needs or more}


def fits(parts: Mapping[str, float], assumed: Assumed) -> bool:
    """Whether so much is left of a GPU once it has its reserve."""
    return parts["total"] <= (assumed.hbm - assumed.reserve) * GIB


def _batch(gpus: int, assumed: Assumed) -> int:
    """Sequences on a GPU at a time: never more than it has in a step, never less than one."""
    return max(1, min(assumed.micro_batch, assumed.sequences // gpus))


def _layer_parameters(model: torch.nn.Module) -> list[int]:
    blocks = [block for part in model.children() for block in getattr(part, "blocks", ())]
    return [sum(p.numel() for p in block.parameters()) for block in blocks]


def show(path: Path) -> Path:
    """Publish the tables of a file of results. Raises ValueError for a file that is none of a plan."""
    content = read(path, "kind")
    kinds = ("run", "length", "recipe")
    runs, lengths, made = ([row for row in content["rows"].values() if row["kind"] == kind] for kind in kinds)
    assumed, shown = content["assumed"], {row["gpus"] for row in lengths}
    given = ", ".join(f"{name} {value:g}" for name, value in assumed.items())
    opening = (
        "**Computed, nothing measured**. "
        f"Commit {content['commit']}, `{content['command']}`. Assumed: {given}. "
        "Bytes in which FSDP2 gathers a weight and averages a gradient, by `trainer=fsdp`: "
        f"{content['fsdp2']['gathered']} and {content['fsdp2']['reduced']}."
    )
    composition = (
        "The experiments as they are composed for so many GPUs (2x8: two nodes of eight), b sequences at a time:"
    )
    shares = "; ".join(f"{model}: {share:.1%}" for model, share in content["paper_mfu"].items())
    return results.publish(
        path,
        opening,
        _checked(content, runs),
        entries.described(runs),
        "Memory of a GPU in GiB; b sequences at a time:",
        table(MEMORY, [_memory_cells(row) for row in runs if row["gpus"] in shown]),
        "Time of the whole run, recomputed where it does not fit otherwise; what does not fit at all is left out. "
        f"The paper's MFU, of its 1.5B ({shares}), is its tokens/s times these FLOPs, over the peak:",
        table(TIME, map(_time_cells, _best(runs))),
        "One sequence on a GPU, with FSDP2 and recomputation; where it does not fit, over how many GPUs its "
        "activations would have to be divided (`benchmark=scale` says what that takes):",
        table(LENGTHS, map(_length_cells, lengths)),
        *([composition, table(RECIPES, map(_recipe_cells, made))] if made else []),
    )


def _checked(content: Mapping[str, Any], runs: Sequence[Row]) -> str:
    """The paper's measured memory beside what is computed for the same setting."""
    wanted = {"size": "1p5b", "gpus": 8, "sharding": "ddp", "recompute": True, "micro_batch": 4, "context": 4096}
    mine = [row for row in runs if row["model"] in content["paper_gib"]]
    alike = [row for row in mine if all(row[name] == value for name, value in wanted.items())]
    words = [
        f"{name} {row['memory']['total'] / GIB:.1f} GiB (the paper measured {content['paper_gib'][name]})"
        for row in alike
        for name in [row["model"]]
    ]
    return (
        f"Held against the paper, 1.5B on 8 GPUs, 4 x 4,096 each, DDP, recomputed: {', '.join(words)}." if words else ""
    )


def _memory_cells(row: Row) -> tuple[str, ...]:
    numbers = [f"{row['memory'][name] / GIB:.1f}" for name in (*PARTS, "total")]
    return *_which(row), row["sharding"], _yes(row["recompute"]), str(row["micro_batch"]), *numbers, _yes(row["fits"])


def _recipe_cells(row: Row) -> tuple[str, ...]:
    which = row["experiment"], row["size"], row["run"], row["layout"], f"{row['batch_size']} x {short(row['context'])}"
    if row["refused"]:
        return *which, "", "", "", f"{row['steps']:,}", "", "", "", "", row["refused"]
    tokens = row["sequences"] * row["context"]
    counts = str(row["batches"]), str(row["sequences"]), f"{tokens:,}", f"{row['steps']:,}"
    gib = (", ".join(f"{name} {x / GIB:.1f}" for name, x in of.items()) for of in row["memory"].values())
    return *which, *counts, f"{tokens * row['steps'] / 1e9:.3g}", *gib, row["needs"]


def _best(runs: Sequence[Row]) -> list[Row]:
    """Of each way to shard, the one without recomputation if it fits, else the one with, if that does."""
    best: dict[tuple, Row] = {}
    for row in runs:
        if row["fits"]:
            best.setdefault((*_which(row), row["sharding"]), row)
    return list(best.values())


def _time_cells(row: Row) -> tuple[str, ...]:
    seconds, sharding = row["seconds"], row["sharding"] + (", recomputed" if row["recompute"] else "")
    part = seconds["communication"] / seconds["arithmetic"]
    step = f"{seconds['step']:.3g}", f"{seconds['communication']:.3g}", f"{part:.1%}"
    slow = row.get("hours_at_papers_mfu")  # of what the paper has measured
    hours = f"{row['hours']:,.3g}", f"{slow:,.3g}" if slow else ""
    sequences = f"{seconds['tokens'] // row['context']:,}"
    return *_which(row), sharding, sequences, *step, f"{row['steps']:,.0f}", *hours


def _length_cells(row: Row) -> tuple[str, ...]:
    parts, over = row["memory"], row["divided_over"]
    sizes = f"{parts['activations'] / GIB:.1f}", f"{parts['total'] / GIB:.1f}"
    divided = "" if row["fits"] else f"{over:,}" if over else "no number"
    rest = f"{row['searching']:.1%}", f"{row['seconds']:.3g}", f"{row['cache_bytes'] / GIB:.3g}"
    return *_which(row), short(row["context"]), *sizes, _yes(row["fits"]), divided, *rest


def _which(row: Row) -> tuple[str, str, str]:
    return row["size"], row["model"], str(row["gpus"])


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"
