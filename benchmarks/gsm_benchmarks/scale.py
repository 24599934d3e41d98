"""What it takes to divide sequences and experts among GPUs (``trainer=context``, ``trainer.strategy.experts``): memory
of each, what they send, over which links, and what is short first.

Everything is computed. Memory is that of ``plan`` with FSDP2, weights gathered in bfloat16 and recomputation, one
sequence of T tokens in each group of n GPUs; G GPUs, N of them divide the experts, P parameters, P_e of them experts':

    activations, layer at work   an n-th
    gathered banks               slots of the whole sequence, twice (a GPU's two pieces), of all banks, in bfloat16
    weights at work              of a layer, experts an N-th

and for each sequence, where b is 2 bytes forward, 2 when recomputed, and 4 for a gradient:

    weights        b (P - P_e) over all GPUs, and b P_e / N over those with the same experts
    sequences      what ``gsm.costs.traffic`` counts, forward, recomputed and backward
    experts        K D numbers of 2 bytes for a token and layer, there and back, forward, recomputed and backward
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gsm.cache.memory import map_nodes
from gsm.cache.store import Column
from gsm.costs import traffic
from gsm.layers.experts import Experts, MixtureOfExperts, ways_to_divide
from gsm.models.base import LanguageModel

from . import entries, machine, plan, results
from .entries import Model
from .pictures import short
from .plan import GIB, Assumed, Setting
from .results import FOLDER, Row, read, table, write

PASSES = 3  # forward, recomputed, backward: what travels for rows
WAYS = ("weights", "sequences", "experts")
HEAD = ("model", "parameters, B", "tokens", "GPUs", "a sequence on", "experts on", "activations, GiB", "banks, GiB",
        "in all, GiB", "arithmetic, s", *(f"{way}, s" for way in WAYS), "short first")  # fmt: skip


@dataclass(frozen=True)
class Split:
    """How many GPUs divide a sequence, and how many the experts of a layer."""

    sequence: int
    experts: int


def run(
    assumed: Assumed,
    cases: Sequence[Mapping[str, Any]],
    gpus: Sequence[int] = (8, 64, 512, 800),
    contexts: Sequence[int] = (65536, 262144, 1048576),
    output: str = "",
    results: str = "",
) -> Path:
    """Compute, print the table and write it beside the JSON file; return that file.

    Args:
        assumed: of the hardware.
        cases: entries (``entries.read``) with a ``size``, and with ``experts``, GPUs that divide these (left out: 1);
            where so many cannot, the next smaller number that can.
        gpus: numbers of GPUs.
        contexts: tokens of a sequence.
        output: the file; left out: logs/benchmarks/scale.json.
        results: a file of results; nothing is computed, and its table is made again.

    Raises:
        ValueError: a case without a size, or a number below 1.
    """
    if results:
        return _show(Path(results))
    if any("size" not in case for case in cases) or min([*gpus, *contexts], default=0) < 1:
        raise ValueError(f"cases {list(cases)}, gpus {list(gpus)}, contexts {list(contexts)}: give each case a size")
    rows = []
    for case in cases:
        (model,) = entries.read([{key: value for key, value in case.items() if key not in ("size", "experts")}])
        for tokens in contexts:
            for count in gpus:
                row = _row(model, str(case["size"]), tokens, count, int(case.get("experts", 1)), assumed)
                if row not in rows:  # a case whose experts cannot be divided may be there as one without
                    rows.append(row)
    facts = {**machine.facts(torch.device("cpu")), "device": "computed, nothing measured"}
    path = Path(output) if output else FOLDER / "scale.json"
    write(path, {**facts, "assumed": asdict(assumed), "rows": {str(number): row for number, row in enumerate(rows)}})
    return _show(path)


def memory(setting: Setting, split: Split, assumed: Assumed) -> dict[str, float]:
    """Bytes on every GPU by part, as said above; ``total`` is their sum."""
    parts = plan.memory(setting, assumed)
    model, kept = setting.cost.model, plan.kept(setting.model, setting.size, True, setting.context)
    parts["activations"] = kept.fixed + kept.each * setting.tokens / split.sequence
    parts["layer or logits at work"] /= split.sequence
    parts["gathered banks"] = 2.0 * 2 * slots(model, setting.context) if split.sequence > 1 else 0.0
    away = (setting.gathered * 3 + setting.reduced) * max(_experts_of_layers(model)) * (1 - 1 / split.experts)
    parts["weights at work"] -= away
    del parts["total"]
    return {**parts, "total": sum(parts.values())}


def seconds(setting: Setting, split: Split, assumed: Assumed) -> dict[str, float]:
    """Of one sequence: arithmetic, and what each kind of exchange takes if nothing hides it."""
    model, tokens = setting.cost.model, setting.context / split.sequence
    total, experts = sum(p.numel() for p in model.parameters()), sum(_experts_of_layers(model))
    over, copies = 2 * setting.gathered + setting.reduced, setting.gpus // split.experts
    # GPUs with the same experts stand N apart: where a node has N or fewer, each is in another one.
    apart = max(1, assumed.per_node // split.experts)
    weights = assumed.one_pass(over * (total - experts), setting.gpus)
    weights += _spread(over * experts / split.experts, copies, apart, assumed)
    how = {"batch": 1, "tokens": setting.context, "ranks": split.sequence, "number_bytes": 2}
    sent = sum(one.bytes for one in traffic.sent(model, **how)) / split.sequence if split.sequence > 1 else 0.0
    mixtures = [part for part in model.modules() if isinstance(part, MixtureOfExperts)]
    rows = sum(part.chosen * model.dim for part in mixtures) * tokens * 2 * 2
    away = rows * (1 - 1 / split.experts)
    return {
        "arithmetic": setting.cost.training_flops(setting.context).total()
        / split.sequence
        / (assumed.peak * assumed.mfu),
        "weights": weights,
        "sequences": PASSES * _between(sent, split.sequence, assumed),
        "experts": PASSES * _between(away, split.experts, assumed),
    }


def slots(model: LanguageModel, tokens: int) -> int:
    """Numbers in all slots that so many tokens fill, in banks, index keys, and keys and values of dense attention."""
    found: list[int] = []

    def count(store: Column) -> None:
        found.append(-(-tokens // store.ratio) * store.value_BFC.shape[-1])

    with torch.device("meta"):
        map_nodes(model.start(), (Column,), count)
    return sum(found)


def _row(model: Model, size: str, tokens: int, gpus: int, experts: int, assumed: Assumed) -> dict[str, Any]:
    """The least number of GPUs for a sequence that fits; all of them where none does."""
    setting = Setting(model, size, gpus, "fsdp2", True, 1, tokens, 2, 4)
    able = ways_to_divide([part for part in setting.cost.model.modules() if isinstance(part, Experts)], gpus)
    experts = max(n for n in able if n <= experts)
    ways = [n for n in range(1, gpus + 1) if gpus % n == 0 and n & (n - 1) == 0]
    split = _least(setting, ways, experts, assumed)
    parts, times = memory(setting, split, assumed), seconds(setting, split, assumed)
    parameters = sum(p.numel() for p in setting.cost.model.parameters())
    return {
        **setting.cells(), "parameters": parameters, **asdict(split), "memory": parts, "seconds": times,
        "fits": plan.fits(parts, assumed),
    }  # fmt: skip


def _least(setting: Setting, ways: Sequence[int], experts: int, assumed: Assumed) -> Split:
    splits = [Split(n, experts) for n in ways]
    return next((one for one in splits if plan.fits(memory(setting, one, assumed), assumed)), splits[-1])


def _experts_of_layers(model: LanguageModel) -> list[int]:
    """Parameters of the experts of every layer that has some; [0] for none."""
    parts = [part for part in model.modules() if isinstance(part, Experts)]
    return [sum(p.numel() for p in part.parameters()) for part in parts] or [0]


def _between(moved: float, ranks: int, assumed: Assumed) -> float:
    """Seconds in which a GPU sends so many bytes to ranks beside it: to those of its node by NVLink."""
    if ranks < 2:
        return 0.0
    outside = max(0, ranks - assumed.per_node) / (ranks - 1)
    return moved * ((1 - outside) / assumed.nvlink + outside / assumed.network) / assumed.reached


def _spread(moved: float, ranks: int, near: int, assumed: Assumed) -> float:
    """Seconds of one pass over so many bytes among ranks of which ``near`` are in a node; the others of the node move
    as much beside them, each by its own adapter."""
    near = min(near, ranks)
    within, between = (near - 1) / near * moved, (1 - near / ranks) * moved / near
    return (within / assumed.nvlink + between / assumed.network) / assumed.reached


def _short(row: Row) -> str:
    """What is short first: memory where it does not fit, else whatever takes longest."""
    if not row["fits"]:
        return "memory"
    times = row["seconds"]
    longest = max(times, key=times.get)
    return longest if longest == "arithmetic" else f"{longest}, {times[longest] / times['arithmetic']:.1f} x arithmetic"


def _show(path: Path) -> Path:
    """Publish the table of a file of results."""
    content = read(path)
    given = ", ".join(f"{name} {value:g}" for name, value in content["assumed"].items())
    cells = [
        (
            f"{row['model']} {row['size']}", f"{row['parameters'] / 1e9:.2f}", short(row["context"]), str(row["gpus"]),
            str(row["sequence"]), str(row["experts"]), f"{row['memory']['activations'] / GIB:.1f}",
            f"{row['memory']['gathered banks'] / GIB:.2f}", f"{row['memory']['total'] / GIB:.1f}",
            *(f"{row['seconds'][name]:.3g}" for name in ("arithmetic", *WAYS)), _short(row),
        )
        for row in content["rows"].values()
    ]  # fmt: skip
    return results.publish(
        path,
        f"**Computed, nothing measured**. Commit {content['commit']}, `{content['command']}`. Assumed: {given}.",
        "One sequence on the least power of two of GPUs on which it fits, with FSDP2 over all, recomputed, weights "
        "gathered in bfloat16; seconds of one sequence, each exchange as if nothing hid it. Experts are on as many "
        "GPUs as asked for where training takes that number, else on the next smaller that it takes (1: undivided):",
        table(HEAD, cells),
    )
