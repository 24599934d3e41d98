"""``python explore.py``: the explorer's page for a checkpoint and a text."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor

from gsm.config.check import ConfigError
from gsm.config.load import instantiate, refusals, usable, vetted_node
from gsm.data.reading import utf8
from gsm.data.recall import Task
from gsm.data.synthetic import HELD_OUT, Generated
from gsm.data.tokenizer import Tokenizer
from gsm.evaluation.checkpoints import Trained, checkpoints, home, writing
from gsm.explorer.facts import LONGEST, check
from gsm.explorer.page import explore
from gsm.files import read_text

NAME = "explorer.html"
DEFAULT = 2048  # default number of tokens of a text


def write(
    checkpoint: str = "nano",
    text: str = "",
    text_file: str | None = None,
    tokens: int = 0,
    sequence: int = 0,
    output: str | None = None,
    device: str = "auto",
) -> None:
    """Write an HTML file that shows the computation of a trained GSM at every token of a text: the bank slots that each
    stage selects, the sources and the readers of each state entry, and the loss without the state or without a stage.

    Args:
        checkpoint: the folder of a run or of one of its steps, or a packaged model: nano (text), needle_handed_on (the
            needle model that depends most on its state), needle_gsm, needle_separate_indexer
        text: the text. A model of a synthetic task, such as needles, reads a held-out sequence of its task instead
        text_file: a text file, instead of text
        tokens: largest number of tokens of a text, up to 4096 (0: 2048); for a task, the length (0: as in training)
        sequence: number of the task's held-out sequence
        output: the file to write; default: explorer.html in the folder of the run, which replaces an older one
        device: cpu, cuda, ...; auto: a GPU if there is one

    Raises:
        ConfigError: a value is out of range, the model has no shared state, or a file cannot be used.
        FileNotFoundError: there is no such checkpoint.
    """
    start = time.perf_counter()
    if not 0 <= tokens <= LONGEST:
        raise ConfigError(f"tokens must be in [1, {LONGEST}], or 0 for the default, got {tokens}")
    if sequence < 0:
        raise ConfigError(f"sequence must be at least 0, got {sequence}")
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
        token_T = torch.tensor(ids[: tokens or DEFAULT], dtype=torch.long)
        read = f"{len(token_T):,} of {len(ids):,} tokens" if len(ids) > len(token_T) else f"{len(ids):,} tokens"
    else:
        if source:
            raise ConfigError(
                f"text must be empty for {run.file}, which was trained on {type(task).__name__}, a synthetic task"
            )
        named, (token_T, target_T) = task, _held_out(run, task, tokens, sequence)
        read = f"{len(token_T):,} tokens"
    with refusals(str(run.file)):
        page = explore(run.model, token_T, named, targets=target_T, about=_about(run))
    place = Path(output) if output else home(run.file) / NAME
    with writing(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        page.save(place)
    size, seconds = place.stat().st_size / 1e6, time.perf_counter() - start
    print(f"{place}: {read}, {size:.1f} MB, made in {seconds:.0f} s")
    print(f"open it in a browser; it needs no network: {place.resolve().as_uri()}")


def _one(path: str) -> Path:
    """Return the checkpoint at a path, or of the only run below it."""
    files = checkpoints(path)
    if len(files) > 1:
        raise ConfigError(f"checkpoint must be one run, such as {home(files[0])}, got {path} with {len(files)} runs")
    return files[0]


def _task(run: Trained) -> Task | None:
    """Return the synthetic task that the model was trained on; None if it was trained on text."""
    node = vetted_node(run.saved, "data", run.file)
    return instantiate(node, "data").task if "task" in node else None


def _held_out(run: Trained, task: Task, tokens: int, sequence: int) -> tuple[Tensor, Tensor]:
    """Return a held-out sequence of a task and its targets, both int64 [T]."""
    length = tokens or int(run.config["data"]["context"])
    with refusals("tokens"):
        sample = Generated(task, HELD_OUT, lambda _: length)[sequence]
    return sample["tokens"], sample["targets"]


def _text(text: str, file: str | None) -> str:
    if text and file:
        raise ConfigError(f"text_file must be empty if text is given, got {file}")
    try:
        return read_text(file) if file else utf8(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"text_file={file} cannot be read: {error}") from error


def _about(run: Trained) -> dict[str, str]:
    """Return facts about a checkpoint by name, for the top of the page."""
    size = run.config.get("choices", {}).get("size")
    return {"checkpoint": str(home(run.file)), "steps": f"{run.step:,}", **({"size": size} if size else {})}
