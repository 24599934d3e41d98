"""How fast our models are beside one that nobody here wrote: DeepSeek-V4 in transformers, with the same widths.

Both run in one process, in float32, and take turns: a step of training (forward, backward, clipping, AdamW), prefill to
the last position's logits with the memory ready, and decoding. ``gsm.benchmarks.deepseek_v4`` says how they differ.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gsm import paths
from gsm.benchmarks.deepseek_v4 import DeepseekV4, library
from gsm.benchmarks.room import available_bytes, out_of_memory
from gsm.config.compose import compose
from gsm.config.load import instantiate, instantiate_model
from gsm.models.base import LanguageModel
from gsm.models.geometry import Geometry
from gsm.training.optimizer import AdamW
from gsm_kernels import explain
from gsm_kernels.benchmark import machine
from gsm_kernels.benchmark.report import table
from gsm_kernels.benchmark.results import Results, read, usual_path
from gsm_kernels.benchmark.timing import FEWEST, WARM_UP, Run, spread, take_turns

WORK = ("step", "prefill", "decode")
DECODED = 16  # tokens of a lap
CLIP = 1.0
PROBE = 256  # tokens; from one, two and three times as many follows what a longer sequence keeps
BEYOND_KEPT = 1.25  # what a step takes at its peak, as a multiple of what its forward pass keeps
HEAD = (
    "what",
    "ours: ms (quartiles)",
    "theirs: ms (quartiles)",
    "theirs / ours (quartiles)",
    "kept, GiB: ours, theirs",
)


class Contender(Protocol):
    """What is measured of a model."""

    @property
    def model(self) -> nn.Module:
        """With random weights."""
        ...

    @property
    def chosen(self) -> Mapping[str, str]:
        """Which implementations it runs with."""
        ...

    def groups(self) -> dict[str, list[nn.Parameter]]:
        """Parameters by how they are decayed."""
        ...

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """What a step of training minimises."""
        ...

    def prefill(self, tokens_BT: Tensor, room: int) -> tuple[Tensor, Any]:
        """Logits of the last position, and a memory with room for so many more tokens."""
        ...

    def decode(self, token_B1: Tensor, memory: Any) -> tuple[Tensor, Any]:
        """Logits of one more token, and the memory after it."""
        ...


class Ours:
    """A model of this project. Its loss includes the indexers'."""

    def __init__(self, model: LanguageModel):
        self.model, self.chosen = model, explain()

    def groups(self) -> dict[str, list[nn.Parameter]]:
        """Parameters by how they are decayed."""
        return self.model.parameter_groups()

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Cross-entropy and what else the model learns by."""
        out = self.model(tokens_BT, targets=targets_BT)
        return torch.stack([out.loss, *out.losses.values()]).sum()

    def prefill(self, tokens_BT: Tensor, room: int) -> tuple[Tensor, Any]:
        """Into a static memory, as ``generate`` does."""
        out = self.model.prefill(tokens_BT, self.model.start(len(tokens_BT), tokens_BT.shape[1] + room))
        return out.logits, out.memory

    @torch.no_grad()
    def decode(self, token_B1: Tensor, memory: Any) -> tuple[Tensor, Any]:
        """One token through the whole model."""
        out = self.model(token_B1, memory=memory, rows=1)
        return out.logits, out.memory


def run(
    device: str = "auto",
    output: str = "",
    results: str = "",
    force: bool = False,
    minutes: float = 7.5,
    models: Sequence[str] = ("baseline",),
    sizes: Sequence[str] = ("nano", "tiny"),
    contexts: Sequence[int] = (1024, 4096),
    work: Sequence[str] = WORK,
    batch_size: int = 1,
    rounds: int = 5,
    seconds: float = 60.0,
) -> Path:
    """Measures each pair, prints the table and writes it beside the JSON file; returns that file.

    Args:
        device: cpu, cuda; auto: a GPU if there is one.
        output: the file; left out: benchmarks/results/<device>-<date>-clients.json.
        results: a file of results; nothing is measured, and its table is made again.
        force: also what the file holds already.
        minutes: after which nothing new is begun.
        models: variants of the group ``model``, each measured against the client.
        sizes: variants of the group ``size``.
        contexts: tokens of a sequence.
        work: of ``step``, ``prefill``, ``decode``.
        batch_size: sequences.
        rounds: turns that each takes.
        seconds: after which no further round begins, once there were three.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        ValueError: a value out of range, or a file of another benchmark.
        KeyboardInterrupt: after the table of what there is was made.
    """
    if results:
        return _show(Path(results))
    if min(batch_size, rounds, *contexts) < 1 or not set(work) <= set(WORK):
        raise ValueError(
            f"batch_size {batch_size}, rounds {rounds}, contexts {list(contexts)}: give 1 or more; "
            f"work {list(work)}: there are {', '.join(WORK)}"
        )
    where = machine.chosen(device)
    facts = machine.facts(where, paths.PACKAGE, paths.configs())
    facts["versions"] |= {"transformers": library().__version__}
    file = Results(Path(output) if output else usual_path(facts, "clients"), facts)
    rows = [
        (
            f"{name} {size}, {batch_size} x {context}, {task}",
            f"{rounds} rounds",
            partial(measure, name, size, batch_size, context, task, rounds, seconds, where),
        )
        for size, context, name, task in itertools.product(sizes, contexts, models, work)
    ]
    protocol = {"rounds": rounds, "seconds": seconds}
    return file.fill(rows, protocol, force=force, minutes=minutes, show=_show)


def measure(
    name: str, size: str, batch: int, context: int, task: str, rounds: int, seconds: float, device: torch.device
) -> dict[str, Any]:
    """The row of one pair and one kind of work, as plain containers."""
    row = {"model": name, "size": size, "batch_size": batch, "context": context, "work": task, "dtype": "float32"}
    row |= {"tokens": DECODED if task == "decode" else 1}  # that a lap decodes
    gc.collect()  # what the row before has left
    try:
        return {**row, **_found(name, size, batch, context, task, rounds, seconds, device)}
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
    gc.collect()  # only here: until its handler ends, an error holds on to what was taken
    torch.cuda.empty_cache()
    ways = f"batch_size={batch // 2}" if batch > 1 else f"contexts=[{max(1, context // 2)}]"
    return {**row, "failed": f"out of memory with {batch} x {context} tokens; try {ways}"}


def _found(
    name: str, size: str, batch: int, context: int, task: str, rounds: int, seconds: float, device: torch.device
) -> dict[str, Any]:
    """What there is to say of a pair, and its times; or why a step was not begun."""
    config = compose([f"model={name}", f"size={size}"])
    geometry: Geometry = instantiate(config["size"], "size")
    with torch.device(device):
        pair: dict[str, Contender] = {"ours": Ours(instantiate_model(config, seed=0)), "theirs": DeepseekV4(geometry)}
    parameters = {who: sum(p.numel() for p in one.model.parameters()) for who, one in pair.items()}
    row: dict[str, Any] = {"parameters": parameters, "chosen": {who: one.chosen for who, one in pair.items()}}
    tokens_BT = torch.randint(geometry.vocabulary, (batch, context + 1), device=device)
    if task == "step":
        needed = BEYOND_KEPT * max(estimated_bytes(one, tokens_BT) for one in pair.values())
        if needed > (there := available_bytes(device)):
            sizes = f"{needed / 2**30:.3g} GiB besides the weights, of {there / 2**30:.3g}"
            return {**row, "failed": f"a step needs about {sizes} that there are"}
        row["kept_gib"] = {who: kept_bytes(one, tokens_BT) / 2**30 for who, one in pair.items()}
        optimizer = instantiate(config["optimizer"], "optimizer")
        runs = {who: training_step(one, optimizer, tokens_BT) for who, one in pair.items()}
    else:
        make = {"prefill": _prefill, "decode": _decode}[task]
        runs = {who: make(one, tokens_BT[:, :-1], rounds) for who, one in pair.items()}
    return {**row, **paired(runs, device, rounds, seconds)}


def training_step(contender: Contender, optimizer: AdamW, tokens_BT: Tensor) -> Run:
    """One step of training on tokens of which each is the target of the one before."""
    contender.model.train()
    adamw = optimizer.build(contender.groups())

    def step() -> None:
        contender.loss(tokens_BT[:, :-1], tokens_BT[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(contender.model.parameters(), CLIP)
        adamw.step()
        adamw.zero_grad()

    return step


def paired(runs: Mapping[str, Run], device: torch.device, rounds: int, seconds: float) -> dict[str, Any]:
    """Times of ``ours`` and ``theirs``, in turns after one that does not count, and of each round their ratio."""
    for one in runs.values():
        one()
    times, began = {who: [] for who in runs}, time.perf_counter()
    for number in range(rounds):
        if number >= FEWEST and time.perf_counter() - began > seconds:
            break
        order = list(runs)[:: -1 if number % 2 else 1]
        for who, found in take_turns({who: runs[who] for who in order}, device, rounds=1).items():
            times[who].append(found.median)
    ratios = [theirs / ours for ours, theirs in zip(times["ours"], times["theirs"], strict=True)]
    return {**{f"{who}_ms": spread(laps)._asdict() for who, laps in times.items()}, "ratio": spread(ratios)._asdict()}


def estimated_bytes(contender: Contender, tokens_BT: Tensor) -> float:
    """What ``kept_bytes`` would say, without running more than ``3 PROBE`` tokens: from the parabola through three
    shorter sequences, since no tensor of a model has more than two dimensions of the sequence. (DeepSeek-V4 at nano,
    1,024 tokens: 2 % below what it keeps.)"""
    length = tokens_BT.shape[1] - 1
    if length <= 3 * PROBE:
        return kept_bytes(contender, tokens_BT)
    first, second, third = (kept_bytes(contender, tokens_BT[:, : times * PROBE + 1]) for times in (1, 2, 3))
    steps, bend = length / PROBE - 1, third - 2 * second + first
    return first + steps * (second - first) + steps * (steps - 1) / 2 * bend


def kept_bytes(contender: Contender, tokens_BT: Tensor) -> int:
    """What the forward pass of a step keeps for the backward pass, besides parameters."""
    contender.model.train()
    parameters = {one.untyped_storage().data_ptr() for one in contender.model.parameters()}
    storages: dict[int, int] = {}

    def pack(kept: Tensor) -> Tensor:  # it stays alive with the graph, so that no address is used twice
        storages[kept.untyped_storage().data_ptr()] = kept.untyped_storage().nbytes()
        return kept

    with saved_tensors_hooks(pack, lambda kept: kept):
        loss = contender.loss(tokens_BT[:, :-1], tokens_BT[:, 1:])
    found = sum(size for address, size in storages.items() if address not in parameters)
    del loss  # until here it has held the graph
    return found


def _prefill(contender: Contender, tokens_BT: Tensor, rounds: int) -> Run:
    contender.model.eval()
    return lambda: contender.prefill(tokens_BT, DECODED)


def _decode(contender: Contender, tokens_BT: Tensor, rounds: int) -> Run:
    """Decodes on and on from the end of a prompt, so that all laps have nearly its length."""
    contender.model.eval()
    laps = 1 + rounds * (1 + WARM_UP)
    _, memory = contender.prefill(tokens_BT, laps * DECODED)

    def lap() -> None:
        nonlocal memory
        for _ in range(DECODED):
            _, memory = contender.decode(tokens_BT[:, -1:], memory)

    return lap


def _show(path: Path) -> Path:
    """Prints the table of a file of results and writes it beside the file."""
    content = read(path, "work")
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    threads = f"{content['threads']} threads, " if "threads" in content else ""
    opening = f"{content['device']}, {threads}float32, {versions}, commit {content['commit']}, `{content['command']}`."
    sizes = {
        f"{row['model']} {row['size']}": row["parameters"] for row in content["rows"].values() if "parameters" in row
    }
    counts = "; ".join(f"{name} {both['ours']:,}, theirs {both['theirs']:,}" for name, both in sizes.items())
    rows = table(HEAD, [_cells(*row) for row in content["rows"].items()])
    text = f"# {path.stem}\n\n{opening}\n\nParameters: {counts}.\n\n{rows}\n"
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(f"\n{text}")
    return path


def _cells(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    kept = ", ".join(f"{row['kept_gib'][who]:.2f}" for who in ("ours", "theirs")) if "kept_gib" in row else ""
    if row.get("failed"):
        return name, f"failed: {row['failed']}", "", "", kept
    times = (_shown(row[f"{who}_ms"], row["tokens"]) for who in ("ours", "theirs"))
    return f"{name}{' a token' if row['work'] == 'decode' else ''}", *times, _shown(row["ratio"]), kept


def _shown(found: Mapping[str, float], parts: int = 1) -> str:
    median, low, high = (found[key] / parts for key in ("median", "low", "high"))
    return f"{median:.4g} ({low:.4g} to {high:.4g})"
