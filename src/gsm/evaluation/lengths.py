"""Perplexity by length of context: the same targets at the end of a window, with more and more of the text before them.

    python evaluate.py checkpoint=logs/default lengths=256:4096

    window   |<------------------------ longest ------------------------>|
    targets                                                    |<scored->|
    length n                       |<-------------- n ------------------>|

Only the context changes along the lengths (paper, section 4.2 and appendix A.2). T positions of a window.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from gsm import plots
from gsm.config.check import ConfigError, few, unlike
from gsm.data.module import TextData
from gsm.errors import within
from gsm.evaluation import paper
from gsm.evaluation.checkpoints import Trained
from gsm.evaluation.held_out import HeldOut, open_data, read_documents
from gsm.evaluation.losses import row_losses
from gsm.evaluation.measure import Measure, publish, write
from gsm.evaluation.results import Progress, Results, by_arm, silent
from gsm.intervals import over_questions, over_windows
from gsm.models.base import LanguageModel
from gsm.models.checks import IGNORED
from gsm.tables import Grid
from gsm.training.callbacks.summary import versions

PAPERS_LONGEST = 65536
NOTE = (
    "perplexity of the same targets at the end of every window, brackets: 95 % bootstrap interval over windows; "
    "of several seeds, exp of the mean loss over them; where documents are isolated, their first tokens are no targets"
)
Window = Mapping[str, Tensor]


@dataclass(frozen=True)
class Lengths(Measure):
    """Measure the perplexity of the same text after more and more context, and print, draw and write it.

    Every window of held-out text is cut from its beginning to each length, and its last tokens are scored: so only the
    context changes. All targets of the full windows are scored too. So is the split in sequences of the shortest
    length, with the number of tokens of the windows (or all of its tokens). Given again, the same command goes on where
    it was interrupted. Beside lengths.json lie .md and .png.

    Args:
        lengths: tokens of context and targets: 256,512,4096; 256:4096 (in steps of 256) or 256:4096:768; or paper,
            which is 4096:65536
        scored: targets at the end of a window; 0: the shortest length
        windows: number of windows, spread evenly over the split
        documents: treatments of documents to measure with: isolated, isolated_all_targets, stream, as data.documents
            in training
        data: other text: a variant of configs/data, read with the checkpoint's tokenizer
        path: other text: a folder or a file of your own
        split: validation; or train, which the model has seen
        chunk: tokens read at a time
    """

    file: ClassVar[str] = "lengths.json"

    lengths: Sequence[int] = tuple(range(4096, PAPERS_LONGEST + 1, 4096))
    scored: int = 0
    windows: int = 16
    documents: Sequence[str] = ("isolated_all_targets", "stream")
    data: str = ""
    path: str = ""
    split: str = "validation"
    chunk: int = 4096

    def __post_init__(self) -> None:
        read_documents(self.documents)
        within(1, windows=self.windows)

    def of(self, trained: Trained, file: Path) -> dict[str, Any]:
        """Return the perplexity in every window; ``file`` keeps each window once it is measured."""
        windows, identity = self._windows(trained)
        with trained.computing():
            measured = self.measure(trained.model, windows, file, identity, trained.progress("windows"))
        result = {**trained.facts, **measured}
        shortest = self.lengths[0]
        text = {name: getattr(self, name) for name in ("data", "path", "split")}
        usual = HeldOut(**text, context=shortest, sequences=self.windows * self.lengths[-1] // shortest)
        whole = usual.measured(trained)["text"]
        result["held_out"] = {"context": shortest, **{name: whole[name] for name in ("perplexity", "targets")}}
        write(file, result)
        return result

    @staticmethod
    def metrics(written: Mapping[str, Any]) -> dict[str, float]:
        """Return perplexities as `<documents>/<length>`, for all targets of the full windows `<documents>/full`, and
        `held_out`."""
        values: dict[str, float] = {}
        for documents, by_length in written["by_length"].items():
            values |= {f"{documents}/{length}": cell["perplexity"] for length, cell in by_length.items()}
            values[f"{documents}/full"] = written["whole"][documents]["perplexity"]
        return values | {"held_out": written["held_out"]["perplexity"]}

    def measure(
        self,
        model: LanguageModel,
        windows: Mapping[str, Sequence[Window]],
        path: str | os.PathLike[str] | None = None,
        identity: Mapping[str, Any] | None = None,
        progress: Progress = silent,
    ) -> dict[str, Any]:
        """Score every window at every length.

        Args:
            model: the model.
            windows: by treatment of documents, as in ``score``, each of the longest length.
            path: a JSON file for the result, continued if its settings are the same (``Results``).
            identity: further settings that distinguish this evaluation, such as the checkpoint.
            progress: passes on cells, and may report them.

        Returns:
            `settings`, `cells` by `<documents>/<length>/<window>` (each with summed `loss` and number of `targets`),
            and by treatment of documents: `by_length` and `whole` (all targets of the longest windows), see
            ``concluded``.

        Raises:
            ValueError: a value is out of range.
            OSError: the file cannot be written.
        """
        lengths, scored, count = self.lengths, self.scored or self.lengths[0], max(map(len, windows.values()))
        for cut in windows.values():
            _check(cut, lengths, scored, self.chunk)
        settings = {"scored": scored, "windows": count, "longest": lengths[-1], "chunk": self.chunk}
        results = Results(path, {**settings, **(identity or {})})

        def compute(part: tuple[str, int, int]) -> dict[str, Any]:
            documents, length, number = part
            options = {"whole": length == lengths[-1], "chunk": self.chunk}
            return {_name(*part): score(model, windows[documents][number], length, scored, **options)}

        parts = [*itertools.product(windows, lengths, range(count))]
        results.fill(parts, lambda part: [_name(*part)], compute, progress)
        conclusion = concluded([results.cells], lengths, count, [*windows])
        results.save(**conclusion)
        return results.content()

    def conclude(self, results: Sequence[Mapping[str, Any]], place: Path) -> None:
        """Print, draw and write the paper's curve of all runs. Raises ConfigError for different windows."""
        first = results[0]
        for result in results:
            if result["settings"]["text"] != first["settings"]["text"]:
                changes = few(unlike(first["settings"]["text"], result["settings"]["text"]))
                raise ConfigError(
                    f"checkpoint={result['checkpoint']} is not allowed because its windows differ from those of "
                    f"{first['checkpoint']} by {changes}. Use runs of one tokenizer, with the same data= or path=."
                )
        runs = {arm: list(seeds.values()) for arm, seeds in by_arm(results).items()}
        means = {
            arm: concluded([run["cells"] for run in of_arm], self.lengths, self.windows, self.documents)
            for arm, of_arm in runs.items()
        }
        notes = [f"{self.windows} windows, the last {first['settings']['scored']:,} targets of each; {NOTE}"]
        several = {"arms": means, "runs": [run["checkpoint"] for run in results]}
        content = several if len(results) > 1 else None  # the file of a single run exists already
        print(publish(place, self._grids(runs, means), notes, content, lambda: _drawn(means, self.documents)))

    def _grids(self, arms: Mapping[str, Sequence[Mapping[str, Any]]], means: Mapping[str, Any]) -> list[Grid]:
        """Return the tables: lengths by arms, with all targets of the full windows below; the difference of each arm's
        loss from the first arm's, window by window; the usual perplexity (for several runs exp of the mean loss); and
        the paper's."""
        grids = []
        for documents in self.documents:
            rows = [[f"perplexity, {documents}", *means]]
            for length in self.lengths:
                rows.append(
                    [f"{length:,}", *(_cell(mean["by_length"][documents][str(length)]) for mean in means.values())]
                )
            grids.append([*rows, ["all targets", *(_cell(mean["whole"][documents]) for mean in means.values())]])
        first, *later = arms
        for documents in self.documents if later else ():
            rows = [[f"nats minus {first}, {documents}", *later]]
            for length in self.lengths:
                losses = {
                    arm: {"": window_losses([run["cells"] for run in runs], documents, length, self.windows)}
                    for arm, runs in arms.items()
                }
                apart = [over_questions(losses[first], losses[arm]).text(digits=4, scale=1.0) for arm in later]
                rows.append([f"{length:,}", *apart])
            grids.append(rows)
        usual = {arm: [run["held_out"] for run in runs] for arm, runs in arms.items()}
        for context in sorted({run["context"] for runs in usual.values() for run in runs}):
            cells = [
                f"{statistics.geometric_mean(run['perplexity'] for run in runs):.4f}" if runs else "-"
                for runs in usual.values()
            ]
            grids.append([[f"held out, in sequences of {context:,}", *arms], ["", *cells]])
        if self.lengths[-1] == PAPERS_LONGEST:  # on its own text and with its own tokenizer
            published = paper.tables()["perplexity"]
            rows = [[name, *(f"{number:.4f}" for number in numbers)] for name, numbers in published["rows"].items()]
            grids.append([["the paper, FineWeb", *published["columns"]], *rows])
        return grids

    def _windows(self, trained: Trained) -> tuple[dict[str, list[Any]], dict[str, Any]]:
        """Return windows that do not overlap, spread evenly over the split, with the same ids for each treatment of
        documents, and the further settings of a result. Raises ConfigError where the split is too short."""
        split, count, longest = self.split, self.windows, self.lengths[-1]
        data = open_data(trained.saved, self.data, self.path, split=split, context=longest, batch_size=1)
        if not isinstance(data, TextData):
            raise ConfigError(
                f"checkpoint={trained.file} is not allowed because it was trained on questions, which have no length "
                "to vary. Use data=stdlib or path=."
            )
        windows = {}
        for documents in self.documents:
            data.documents = documents
            windows[documents] = chosen = data.of_length(longest, count, split)
            if len(chosen) < count:
                raise ConfigError(
                    f"windows={count} is not allowed because the {split} split of {trained.file} has only "
                    f"{data.split(split).tokens:,} tokens, room for {len(chosen)} windows of {longest}. Use "
                    f"windows={len(chosen)}, or more text."
                )
        other = {"documents"} | ({"max_tokens"} if split == "validation" else set())
        read = {name: value for name, value in data.fingerprint().items() if name not in other}
        identity = {
            **trained.run,
            **{"checkpoint": trained.digest, "text": read, "split": split},
            **{"precision": trained.precision, "device": trained.device_kind, "versions": versions()},
        }
        return windows, identity


@torch.no_grad()
def score(model: LanguageModel, window: Window, length: int, scored: int, *, whole: bool, chunk: int) -> dict[str, Any]:
    """Return the summed loss of the last ``scored`` targets of a window, given its last ``length`` tokens.

    The window is read in chunks through the model's memory: only that memory grows with ``length``, and rows before the
    scored ones are computed only where a later row needs them.

    Args:
        model: on its device.
        window: ``tokens``, ``targets`` (-100: none) and ``documents``, int64 [T] each, T at least ``length``.
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
            memory = model.prefill(tokens_1T[:, :first], memory, chunk, documents_1T[:, :first]).memory
        for start in range(first, length, chunk):
            part = slice(start, min(start + chunk, length))
            out = model(tokens_1T[:, part], documents_1T[:, part], memory=memory)
            losses.append(row_losses(out, targets_1T[:, part], model.vocabulary))
            memory = out.memory
    loss_T, counted_T = torch.cat(losses, dim=1)[0].double(), (targets_1T[0, first:] != IGNORED)
    sums = _sums(loss_T[-scored:], counted_T[-scored:])
    return {**sums, "whole": _sums(loss_T, counted_T)} if whole else sums


def concluded(
    runs: Sequence[Mapping[str, Any]], lengths: Sequence[int], windows: int, documents: Sequence[str]
) -> dict[str, Any]:
    """Return means over windows; with several runs each window counts with its mean loss over them.

    Args:
        runs: the cells of each.
        lengths, windows, documents: common to all.

    Returns:
        By treatment of documents ``by_length`` (by length, as text) and ``whole``, each with ``loss`` in nats per
        target, ``perplexity``, its ``exp``, the 95 % bootstrap interval over windows (``low`` to ``high``) of the
        perplexity, and the number of ``targets``.
    """
    by_length, whole = {}, {}
    for treated in documents:
        cells = {
            length: [[run[_name(treated, length, number)] for number in range(windows)] for run in runs]
            for length in lengths
        }
        by_length[treated] = {str(length): _mean(sums) for length, sums in cells.items()}
        whole[treated] = _mean([[cell["whole"] for cell in run] for run in cells[lengths[-1]]])
    return {"by_length": by_length, "whole": whole}


def window_losses(runs: Sequence[Mapping[str, Any]], documents: str, length: int, windows: int) -> list[float]:
    """Return the contribution of each window to the loss at a length, the mean over the cells of several runs.

    The mean over windows is the loss in nats per target; a window of few targets counts less. (The bootstrap assumes
    equal numbers of targets.)
    """
    cells = [[run[_name(documents, length, number)] for run in runs] for number in range(windows)]
    targets = math.fsum(window[0]["targets"] for window in cells) / windows
    return [math.fsum(cell["loss"] for cell in window) / len(window) / targets for window in cells]


def _mean(runs: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the mean of the cells of every window of each run, as ``concluded`` has it."""
    sums = [math.fsum(cell["loss"] for cell in window) / len(runs) for window in zip(*runs, strict=True)]
    targets = [cell["targets"] for cell in runs[0]]
    loss = math.fsum(sums) / sum(targets)
    low, high = (math.exp(end) for end in over_windows(sums, targets))
    return {"loss": loss, "perplexity": math.exp(loss), "low": low, "high": high, "targets": sum(targets)}


def _sums(loss_T: Tensor, counted_T: Tensor) -> dict[str, Any]:
    return {"loss": float(loss_T.sum()), "targets": int(counted_T.sum())}


def _name(documents: str, length: int, window: int) -> str:
    return f"{documents}/{length}/{window}"


def _check(windows: Sequence[Window], lengths: Sequence[int], scored: int, chunk: int) -> None:
    if not lengths or list(lengths) != sorted(set(lengths)):
        raise ValueError(f"lengths={list(lengths)} is not allowed because lengths ascend. Use different ones in order.")
    within(1, chunk=chunk)
    within(1, lengths[0], scored=scored)  # lengths hold the targets too
    short = [len(window["tokens"]) for window in windows if len(window["tokens"]) < lengths[-1]]
    if short or not windows:
        raise ValueError(
            f"lengths={list(lengths)} is not allowed because windows have {short or 'no'} tokens. Use longer windows."
        )


def _cell(loss: Mapping[str, Any]) -> str:
    return f"{loss['perplexity']:.4f} [{loss['low']:.4f}, {loss['high']:.4f}]"


def _drawn(means: Mapping[str, Any], documents: Sequence[str]) -> bytes:
    """Return a picture of perplexity against length, a panel for each treatment of documents."""
    figure, panels = plots.figure(columns=len(documents), width=4.4, height=3.2)
    for axes, treated in zip(panels, documents, strict=True):
        points = {
            arm: {
                int(n): (cell["perplexity"], cell["low"], cell["high"])
                for n, cell in mean["by_length"][treated].items()
            }
            for arm, mean in means.items()
        }
        plots.bands(axes, points, "tokens of context and targets", "perplexity of the same targets")
        axes.set_title(treated, fontsize=9)
    return plots.png(figure)
