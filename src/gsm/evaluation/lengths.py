"""Perplexity by length of context: the same targets at the end of a window, with more and more of the text before them.

    window   |<------------------------ longest ------------------------>|
    targets                                                    |<scored->|
    length n                       |<-------------- n ------------------>|

So what changes along the lengths is the context alone (paper, section 4.2 and appendix A.2). T positions of a window.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gsm.evaluation.bootstrap import interval
from gsm.evaluation.losses import row_losses
from gsm.evaluation.ruler import opened
from gsm.files import write_json
from gsm.models.base import IGNORED, LanguageModel

MASKS = {"on": True, "off": False}  # whether nothing crosses the border of a document, or the window is one document
Window = Mapping[str, Tensor]
Watch = Callable[[Iterable[Any], int], Iterable[Any]]


@torch.no_grad()
def score(
    model: LanguageModel, window: Window, length: int, scored: int, *, masks: bool, whole: bool, chunk: int
) -> dict[str, Any]:
    """The summed loss of the last ``scored`` targets of a window, given the last ``length`` tokens of it.

    Read in chunks through the model's memory: nothing grows with ``length`` but what the model itself keeps, and no row
    before the scored ones is computed that nothing needs.

    Args:
        model: on the device that it is to run on.
        window: ``tokens``, ``targets`` (-100: none) and ``documents``, int64 [T] each, T at least ``length``.
        masks: whether documents are apart; else all that is read is one.
        whole: score all ``length`` targets too.
        chunk: tokens read at a time.

    Returns:
        ``loss`` in nats, summed in float64, and the number of ``targets``; of the whole length under ``whole``.
    """
    device = model.embedding.weight.device
    tokens_1T, targets_1T, documents_1T = (
        window[name][-length:][None].to(device) for name in ("tokens", "targets", "documents")
    )
    first, memory = 0 if whole else length - scored, model.start(1)
    losses = []
    with model.evaluating():
        if first:
            before_1T = documents_1T[:, :first] if masks else None
            memory = model.prefill(tokens_1T[:, :first], memory, chunk, before_1T).memory
        for start in range(first, length, chunk):
            part = slice(start, min(start + chunk, length))
            out = model(tokens_1T[:, part], documents_1T[:, part] if masks else None, memory=memory)
            losses.append(row_losses(out, targets_1T[:, part], model.vocabulary))
            memory = out.memory
    loss_T, counted_T = torch.cat(losses, dim=1)[0].double(), (targets_1T[0, first:] != IGNORED)
    found = _sums(loss_T[-scored:], counted_T[-scored:])
    return {**found, "whole": _sums(loss_T, counted_T)} if whole else found


def evaluate(
    model: LanguageModel,
    windows: Sequence[Window],
    lengths: Sequence[int],
    scored: int,
    *,
    masks: Sequence[str] = tuple(MASKS),
    chunk: int = 4096,
    path: str | os.PathLike[str] | None = None,
    identity: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Scores every window at every length.

    Args:
        model: what is measured.
        windows: as in ``score``, each of the longest length.
        lengths: of context, all targets included, ascending.
        scored: targets at the end of each window that are scored, at most the shortest length.
        masks: "on", "off", or both.
        chunk: tokens read at a time.
        path: a JSON file for the result, written after every cell. What it holds is not computed again if its settings
            are the same; else it is moved to `<name>.previous`.
        identity: what else tells this evaluation from others, such as the checkpoint; a part of the settings.
        watch: passes on an iterable of so many cells, and may say how far it is.

    Returns:
        `settings`, `cells` by `<masks>/<length>/<window>` (each with summed `loss` and number of `targets`), and by
        masks: `by_length` and `whole` (all targets of the longest windows), see ``concluded``.

    Raises:
        ValueError: a value is out of range.
        OSError: the file cannot be written.
    """
    _check(windows, lengths, scored, masks, chunk)
    settings = {"scored": scored, "windows": len(windows), "longest": lengths[-1], "chunk": chunk, **(identity or {})}
    result = opened(path, settings)
    asked = [(mask, length, number) for mask in masks for length in lengths for number in range(len(windows))]
    waiting = [cell for cell in asked if _name(*cell) not in result["cells"]]
    for mask, length, number in watch(waiting, len(waiting)) if watch else waiting:
        options = {"masks": MASKS[mask], "whole": length == lengths[-1], "chunk": chunk}
        result["cells"][_name(mask, length, number)] = score(model, windows[number], length, scored, **options)
        if path:
            write_json(path, result)
    found = {**result, **concluded([result["cells"]], lengths, len(windows), masks)}
    if path:
        write_json(path, found)
    return found


def concluded(
    runs: Sequence[Mapping[str, Any]], lengths: Sequence[int], windows: int, masks: Sequence[str]
) -> dict[str, Any]:
    """Means over windows, of one run or of several: then each window counts with its mean loss over the runs.

    Args:
        runs: the cells of each.
        lengths, windows, masks: that all have.

    Returns:
        By masks ``by_length`` (by length, as text) and ``whole``, each with ``loss`` in nats per target,
        ``perplexity``, its ``exp``, the middle 95 % (``low`` to ``high``) of the perplexities if windows are drawn
        anew, and the number of ``targets``.
    """
    by_length, whole = {}, {}
    for mask in masks:
        cells = {
            length: [[run[_name(mask, length, number)] for number in range(windows)] for run in runs]
            for length in lengths
        }
        by_length[mask] = {str(length): _mean(found) for length, found in cells.items()}
        whole[mask] = _mean([[cell["whole"] for cell in run] for run in cells[lengths[-1]]])
    return {"by_length": by_length, "whole": whole}


def window_losses(runs: Sequence[Mapping[str, Any]], mask: str, length: int, windows: int) -> list[float]:
    """What each window adds to the loss at a length, mean over the cells of several runs: the mean over windows is the
    loss in nats per target, a window of few targets counting less. (Windows drawn anew are taken to have as many.)"""
    found = [[run[_name(mask, length, number)] for run in runs] for number in range(windows)]
    targets = math.fsum(one[0]["targets"] for one in found) / windows
    return [math.fsum(cell["loss"] for cell in one) / len(one) / targets for one in found]


def _mean(runs: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Of the cells of every window, in each run."""
    sums = [math.fsum(cell["loss"] for cell in window) / len(runs) for window in zip(*runs, strict=True)]
    targets = [cell["targets"] for cell in runs[0]]
    loss = math.fsum(sums) / sum(targets)
    low, high = (math.exp(end) for end in interval(sums, targets))
    return {"loss": loss, "perplexity": math.exp(loss), "low": low, "high": high, "targets": sum(targets)}


def _sums(loss_T: Tensor, counted_T: Tensor) -> dict[str, Any]:
    return {"loss": float(loss_T.sum()), "targets": int(counted_T.sum())}


def _name(mask: str, length: int, window: int) -> str:
    return f"{mask}/{length}/{window}"


def _check(windows: Sequence[Window], lengths: Sequence[int], scored: int, masks: Sequence[str], chunk: int) -> None:
    if not lengths or list(lengths) != sorted(set(lengths)) or scored < 1 or chunk < 1:
        raise ValueError(f"lengths {list(lengths)} must ascend, and scored {scored} and chunk {chunk} be at least 1")
    if lengths[0] < scored:
        raise ValueError(f"scored {scored} goes beyond the shortest length {lengths[0]}: lengths hold the targets too")
    if not masks or set(masks) - set(MASKS):
        raise ValueError(f"masks {list(masks)} must be some of {', '.join(MASKS)}")
    short = [len(window["tokens"]) for window in windows if len(window["tokens"]) < lengths[-1]]
    if short or not windows:
        raise ValueError(
            f"windows have {short or 'no'} tokens and the longest length is {lengths[-1]}: give longer ones"
        )
