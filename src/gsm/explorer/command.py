"""``python explore.py``: a page of a checkpoint and a text."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor

from gsm.config.check import ConfigError
from gsm.config.load import instantiate, refusals, usable, vetted_node
from gsm.data.recall import Task
from gsm.data.synthetic import HELD_OUT, Generated
from gsm.data.tokenizer import Tokenizer
from gsm.evaluation.checkpoints import Trained, checkpoints, home, writing
from gsm.explorer.facts import LONGEST, check
from gsm.explorer.page import explore

NAME = "explorer.html"
USUAL = 2048  # tokens of a text


def write(
    checkpoint: str = "nano",
    text: str = "",
    text_file: str | None = None,
    tokens: int = 0,
    sequence: int = 0,
    output: str | None = None,
    device: str = "auto",
) -> None:
    """Writes an HTML file that shows what a trained GSM does at every token of a text: which bank slots each stage
    selects, what an entry of the state is made of and who reads it, and the loss without the state or a stage.

    Args:
        checkpoint: a .ckpt file, the folder of a run, or a model that comes along: nano has read text, and of
            needles needle_handed_on needs its state most; also needle_gsm, needle_separate_indexer
        text: the text. A model of a synthetic task, such as needles, reads a held-out sequence of its task instead
        text_file: a text file, instead of text
        tokens: at most so many of the text, up to 4096 (0: 2048); of a task, the length (0: that of its training)
        sequence: which of the task's held-out sequences
        output: the file to write; left out: explorer.html in the folder of the run, which replaces an older one
        device: cpu, cuda, ...; auto: a GPU if there is one

    Raises:
        ConfigError, FileNotFoundError: a value out of range, a model without a shared state, or a file that cannot be
            used; the message says which.
    """
    start = time.perf_counter()
    if not 0 <= tokens <= LONGEST:
        raise ConfigError(f"tokens is {tokens}, but has to lie between 1 and {LONGEST}, or be 0 for the usual number")
    if sequence < 0:
        raise ConfigError(f"sequence is {sequence}, but they are counted from 0")
    source = _text(text, text_file)
    run = Trained(_one(checkpoint), usable(device))
    with refusals(str(run.file)):
        check(run.model, name=str(run.config.get("choices", {}).get("model") or ""))
    task, target_T = _task(run), None
    if task is None:
        if not source:
            raise ConfigError(f"explore.py needs text= or text_file= for {run.file}, which was trained on text")
        named: Tokenizer | Task = run.tokenizer
        ids = run.tokenizer.encode(source)
        token_T = torch.tensor(ids[: tokens or USUAL], dtype=torch.long)
        read = f"{len(token_T):,} of {len(ids):,} tokens" if len(ids) > len(token_T) else f"{len(ids):,} tokens"
    else:
        if source:
            raise ConfigError(f"{run.file} was trained on {type(task).__name__}, which has no text: leave text out")
        named, (token_T, target_T) = task, _drawn(run, task, tokens, sequence)
        read = f"{len(token_T):,} tokens"
    with refusals(str(run.file)):
        page = explore(run.model, token_T, named, targets=target_T, about=_about(run))
    place = Path(output) if output else home(run.file) / NAME
    with writing(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        page.save(place)
    size, seconds = place.stat().st_size / 1e6, time.perf_counter() - start
    print(f"{place}: {read}, {size:.1f} MB, made in {seconds:.0f} s")
    print(f"open it in a browser, it needs no network: {place.resolve().as_uri()}")


def _one(path: str) -> Path:
    """The checkpoint at a path, or of the only run below it."""
    found = checkpoints(path)
    if len(found) > 1:
        raise ConfigError(f"{path} holds {len(found)} runs: give one of them, such as checkpoint={home(found[0])}")
    return found[0]


def _task(run: Trained) -> Task | None:
    """The task of a model that was trained on what is made on the fly, else None. Raises ConfigError."""
    node = vetted_node(run.saved, "data", run.file)
    return instantiate(node, "data").task if "task" in node else None


def _drawn(run: Trained, task: Task, tokens: int, sequence: int) -> tuple[Tensor, Tensor]:
    """A held-out sequence of a task and its targets, int64 [T] each."""
    length = tokens or int(run.config["data"]["context"])
    with refusals("tokens"):
        drawn = Generated(task, HELD_OUT, lambda _: length)[sequence]
    return drawn["tokens"], drawn["targets"]


def _text(text: str, file: str | None) -> str:
    if text and file:
        raise ConfigError("explore.py takes text= or text_file=, not both")
    try:
        return Path(file).read_text(encoding="utf-8") if file else text
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"text_file {file} cannot be read: {error}") from error


def _about(run: Trained) -> dict[str, str]:
    """What the top of the page says of a checkpoint."""
    size = run.config.get("choices", {}).get("size")
    return {"checkpoint": str(home(run.file)), "steps": f"{run.step:,}", **({"size": size} if size else {})}
