"""What a run prints before and after training: plain ASCII, one screen, at most 80 columns but for the address."""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import torch

from gsm import threads
from gsm.analysis import overlap
from gsm.config.command_line import command, path_text, typed
from gsm.evaluation import paper
from gsm.evaluation.questions import MEASURES
from gsm.paths import has, in_clone
from gsm.provenance import multiplies_bfloat16, processor
from gsm.tables import SCREEN, grid_lines
from gsm.training.callbacks.progress import clock
from gsm.training.callbacks.summary import VALIDATION

if TYPE_CHECKING:
    from lightning import Trainer

    from gsm.data.base import DataModule
    from gsm.models.base import LanguageModel

# TensorBoard's address: a colour for each arm rather than for each run, and curves as they are.
BOARD = "http://localhost:6006/?" + urlencode(
    {"runColorGroup": r"regex:(.*)-seed\d*(.*)-", "smoothing": 0}, safe=":/()*"
)

# Of a step at size nano on one thread: docs/training.md.
FASTER = "trainer.precision=bf16-mixed: 10 to 15 % less time, other numbers"


def header(config: Mapping[str, Any], facts: Mapping[str, Any], trainer: Trainer, data: DataModule, note: str) -> str:
    """Return the announcement: the model, the data and the folder of the run; ``facts`` are those of its summary."""
    sizes = ""
    if data.context:
        sizes = f" of {config['global_batch'] * data.context:,} tokens ({data.context} a sequence)"
    rows = {
        "model": f"{facts['model']}, size {facts['size']}: {facts['parameters']:,} parameters",
        **data.headline(),
        "steps": f"{trainer.max_steps:,}{sizes}, seed {config['seed']}",
        "device": device(trainer) + (threads.why if trainer.strategy.root_device.type == "cpu" else ""),
        **({"option": FASTER} if could_be_faster(trainer) else {}),
        "kernels": kernels(facts["kernels"]),
        "folder": path_text(config["folder"]),
    }
    lines = [_wrapped(text, f"{name:<9}") for name, text in rows.items()]
    return "\n".join([*lines, *([_wrapped(note)] if note else []), ""])


def conclusion(folder: Path, facts: Mapping[str, Any], sample: str | None, writes: bool) -> str:
    """Return the results and the next commands; ``writes``: the model has a tokenizer and can generate text."""
    name, seconds = f"{facts['experiment']}/{folder.name}", facts["train_seconds"] or 0.0
    parts = [
        [f"{name}: {_number(facts['tokens'], ',')} tokens in {clock(seconds)}"],
        _table(facts),
        [_resources(facts)],
    ]
    if facts["reason"]:
        parts[1].insert(0, _wrapped(facts["reason"]))
    if facts["overlap"]:
        parts.append(overlap.table(facts["overlap"], paper.tables()["overlap"]["by_length"]))
    parts += [measure.table(facts[key]) for key, measure in MEASURES.items() if facts[key]]
    if sample:
        parts.append(["Sample (prompt | continuation):", sample])
    parts.append(["Next:", *_next(folder, facts, writes)])
    return "\n" + "\n\n".join(map("\n".join, parts))


def _next(folder: Path, facts: Mapping[str, Any], writes: bool) -> list[str]:
    """Return the commands to look at a run, and to use its model."""
    checkpoint = f"checkpoint={path_text(folder)}"
    commands = [typed("tensorboard", "--logdir", path_text(folder.parent))]
    commands.append("# and open this address: main charts on top, a colour for all seeds of an arm")
    pinned = [VALIDATION[key] for key in ("accuracy", "bits_per_byte", "val_loss") if facts[key] is not None]
    commands.append(f"# {board(*pinned, 'train/loss')}")  # a comment, as a shell would take the address apart
    if len(list(folder.parent.glob("*/summary.json"))) > 1:
        commands.append(command("compare", path_text(folder.parent)))
    if writes:
        commands += [command("generate", checkpoint, "prompt=def "), command("evaluate", checkpoint)]
    commands += opens(folder, explored=has_state(facts), writes=writes)[1:]
    return [f"  {line}" for line in commands]


def has_state(facts: Mapping[str, Any]) -> bool:
    """Return whether the model of a finished run has the shared state that the explorer shows."""
    return "shared_state" in (facts.get("memory_bytes") or {})


def opens(folder: Path, explored: bool, writes: bool = False) -> list[str]:
    """Return the lines that open a run's model: in Python, and in the explorer, if it is one that this shows.

    Args:
        folder: of the run.
        explored: whether the explorer shows such a model.
        writes: whether it has a tokenizer; else the explorer takes a sequence of its task.
    """
    lines = [f'model = gsm.load_model("{path_text(folder)}")']
    if explored and has("explorer"):
        text = ["text_file=README.md" if in_clone() else "text=def "] if writes else []
        lines.append(command("explore", f"checkpoint={path_text(folder)}", *text))
    return lines


def about(config: Mapping[str, Any], commit: str | None, explored: bool, writes: bool) -> str:
    """Return a text about a run for the TEXT tab, Markdown: how it was started, and the lines that open its model."""
    folder = Path(config["folder"])
    rows = {
        "command": command("train", *map(str, config["overrides"])),
        "commit": commit or "unknown",
        "checkpoint": path_text(folder / "checkpoints"),
        **dict(zip(("in Python", "explorer"), opens(folder, explored, writes), strict=False)),
    }
    return "\n".join([f"**{folder.name}**", "", "| | |", "|---|---|", *(f"| {k} | `{v}` |" for k, v in rows.items())])


def board(*tags: str) -> str:
    """Return TensorBoard's address with these scalars on top."""
    cards = [{"plugin": "scalars", "tag": tag} for tag in tags]
    return f"{BOARD}&{urlencode({'pinnedCards': json.dumps(cards, separators=(',', ':'))}, safe=':/,')}"


def sample(model: LanguageModel, data: DataModule, given: int = 32, new: int = 64) -> str:
    """Return a few lines that the model writes after the start of a held-out text."""
    prompt_T = next(data.validation())["tokens"][:given]
    assert data.tokenizer is not None  # only text is written
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(0)
    made = model.generate(prompt_T.to(device), new, temperature=0.7, top_p=0.95, generator=generator)
    text = f"{data.tokenizer.decode(prompt_T.tolist())}|{data.tokenizer.decode(made[0].tolist())}"
    wrapper = textwrap.TextWrapper(SCREEN - 2, drop_whitespace=False, break_on_hyphens=False)
    lines = [line for line in re.sub(r"[^\n -~]", "?", text).splitlines() if line.strip()]
    return "\n".join(f"  {part}" for part in [part for line in lines for part in wrapper.wrap(line)][:8])


def device(trainer: Trainer) -> str:
    """Return the name of the device that trains, and its arithmetic: `AMD EPYC 7B13, 1 thread, 32-true`."""
    root = trainer.strategy.root_device
    count = torch.get_num_threads()
    host = f"{processor()}, {count} thread{'s' if count > 1 else ''}"
    name = torch.cuda.get_device_name(root) if root.type == "cuda" else host
    several = f"{trainer.world_size} x " if trainer.world_size > 1 else ""
    return f"{several}{name}, {trainer.precision}"


def could_be_faster(trainer: Trainer) -> bool:
    """Whether a run in float32 is on a CPU that multiplies in bfloat16."""
    return (trainer.strategy.root_device.type, trainer.precision) == ("cpu", "32-true") and multiplies_bfloat16()


def kernels(explained: Mapping[str, str]) -> str:
    """Return the number of operations on each implementation; ``summary.json`` has the reasons."""
    chosen = Counter(choice.partition(":")[0] for choice in explained.values())
    return ", ".join(f"{name} for {count} of {chosen.total()} operations" for name, count in chosen.items())


def _table(facts: Mapping[str, Any]) -> list[str]:
    """Return the model beside n-gram models of the same tokens; for a task, the share of its questions answered."""
    if facts["accuracy"] is not None:
        answers = facts["data"].get("validation_answers")  # None where an answer has several tokens
        of = f"{answers:,} held-out questions answered" if answers else "the tokens of held-out answers right"
        return [f"  {facts['accuracy']:.1%} of {of}, loss {facts['val_loss']:.3f}"]
    model = f"{facts['model']} ({facts['parameters']:,} parameters)"
    rows = [(model, facts["bits_per_byte"], facts["val_perplexity"])]
    for key, name in (("five_gram", "5-gram"), ("bigram", "bigram"), ("unigram", "unigram")):
        if (bits := facts[f"{key}_bits_per_byte"]) is not None:
            rows.append((f"{name} model, same tokens", bits, 2 ** (bits * facts["data"]["bytes_per_token"])))
    cells = [[name, _number(bits, ".3f"), _number(perplexity, ".1f")] for name, bits, perplexity in rows]
    return grid_lines([["on held-out text", "bits per byte", "perplexity"], *cells])


def _resources(facts: Mapping[str, Any]) -> str:
    speed, peak = _number(facts["tokens_per_second"], ",.0f"), facts["peak_memory_bytes"] / 2**30
    what = "shared state" if "shared_state" in facts["memory_bytes"] else "memory"
    state = f", {what} {facts['state_bytes']:,} bytes" if facts["state_bytes"] is not None else ""
    return f"  {speed} tokens/s, peak memory {peak:.2f} GiB{state}"


def _number(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)


def _wrapped(text: str, name: str = "") -> str:
    """Return a text in lines of a screen, beside a name."""
    wrapper = textwrap.TextWrapper(SCREEN, initial_indent=name, subsequent_indent=" " * len(name))
    wrapper.break_on_hyphens = wrapper.break_long_words = False
    return wrapper.fill(text)
