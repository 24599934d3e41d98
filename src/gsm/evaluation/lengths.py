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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from gsm import plots
from gsm.config.check import ConfigError
from gsm.data.module import TextData
from gsm.errors import within
from gsm.evaluation import paper
from gsm.evaluation.checkpoints import Trained
from gsm.evaluation.held_out import WHOLE, HeldOut, open_data, read_documents
from gsm.evaluation.losses import row_losses
from gsm.evaluation.measure import Measure
from gsm.evaluation.records import Arms, Measured, Progress, Record, difference, mean, minus, over_units, pivot, silent
from gsm.intervals import over_seeds
from gsm.models.base import LanguageModel
from gsm.models.checks import IGNORED
from gsm.tables import Grid, length_text

PAPERS_LONGEST = 65536
Window = Mapping[str, Tensor]


@dataclass(frozen=True)
class Lengths(Measure):
    """Measure the perplexity of the same text after more and more context, and print, draw and write it.

    Every window of held-out text is cut from its beginning to each length, and its last tokens are scored: so only the
    context changes. All targets of the full windows are scored too, and for comparison the split in sequences of the
    shortest length, as many tokens as the windows have. The same command resumes an interrupted measurement.
    lengths.jsonl has a line for every window; beside it lie lengths.md and .png.

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

    name: ClassVar[str] = "lengths"

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

    def of(self, trained: Trained, file: Path | None) -> Measured:
        """Return the losses of every window, and the loss of the split in sequences of the shortest length."""
        windows, text = self._windows(trained)
        questions = {"text": text, "split": self.split, "scored": self.scored or self.lengths[0], "chunk": self.chunk}
        measured = trained.measured(file, {**questions, "windows": self.windows, "longest": self.lengths[-1]})
        with trained.computing():
            self.measure(trained.model, windows, measured, trained.progress("windows"))
        usual = {name: getattr(self, name) for name in ("data", "path", "split")}
        usual |= {"context": self.lengths[0], "sequences": self.windows * self.lengths[-1] // self.lengths[0]}

        def held_out(part: Record) -> list[Record]:
            whole = HeldOut(**usual).of(trained, None).where(**WHOLE)
            return [{name: record[name] for name in ("sequence", "quantity", "value", "weight")} for record in whole]

        measured.fill([{"scope": "held out", "length": self.lengths[0]}], held_out, together=True)
        return measured

    def measure(
        self,
        model: LanguageModel,
        windows: Mapping[str, Sequence[Window]],
        measured: Measured,
        progress: Progress = silent,
    ) -> None:
        """Score every window at every length.

        Args:
            model: the model.
            windows: by treatment of documents, as in ``score``, each of the longest length.
            measured: gets the records: of each window at each length the ``loss`` in nats.
            progress: passes on parts, and may report them.

        Raises:
            ConfigError: a value is out of range.
            OSError: the file cannot be written.
        """
        lengths, scored, count = self.lengths, self.scored or self.lengths[0], max(map(len, windows.values()))
        for cut in windows.values():
            _check(cut, lengths, scored, self.chunk)

        def compute(part: Record) -> list[Record]:
            window, length = windows[part["documents"]][part["window"]], part["length"]
            return score(model, window, length, scored, whole=length == lengths[-1], chunk=self.chunk)

        parts = [
            {"documents": documents, "length": length, "window": window}
            for documents, length, window in itertools.product(windows, lengths, range(count))
        ]
        measured.fill(parts, compute, progress)

    def tables(self, arms: Arms) -> list[Grid]:
        """Return each arm's perplexity by length, its loss minus the first arm's, and its perplexity on held-out text.

        Perplexity over several seeds is exp of the mean loss. At the paper's longest length the paper's table follows.
        """
        grids = []
        for documents in self.documents:
            rows = {f"{n:,}": self._scored(documents, n) for n in self.lengths}
            whole = {"documents": documents, "length": self.lengths[-1], "scope": "whole"}
            grids.append(pivot(f"perplexity, {documents}", arms, {**rows, "all targets": whole}, _perplexity))
        for documents in self.documents:
            rows = {f"{n:,}": self._scored(documents, n) for n in self.lengths}
            title = f"{documents}, nats minus "
            grids += minus(title, arms, rows, ["window"], digits=4, scale=1.0)
        usual = {"": {"scope": "held out"}}
        title = f"held out, in sequences of {self.lengths[0]:,}"
        grids.append(pivot(title, arms, usual, lambda seeds: f"{math.exp(over_seeds(map(mean, seeds)).mean or 0):.4f}"))
        if self.lengths[-1] == PAPERS_LONGEST:  # on its own text and with its own tokenizer
            published = paper.tables()["perplexity"]
            rows = [[name, *(f"{number:.4f}" for number in numbers)] for name, numbers in published["rows"].items()]
            grids.append([["the paper, FineWeb", *published["columns"]], *rows])
        return grids

    def notes(self, arms: Arms) -> list[str]:
        """Return a line that says which targets are scored, and what brackets and seeds mean."""
        return [
            f"{self.windows} windows, the last {self.scored or self.lengths[0]:,} targets of each; perplexity of the "
            "same targets at the end of every window, brackets: 95 % bootstrap interval over windows; of several "
            "seeds, exp of the mean loss over them; where documents are isolated, their first tokens are no targets"
        ]

    def picture(self, arms: Arms) -> bytes:
        """Draw what context changes: the loss minus that of the same targets at the shortest length, a panel for each
        treatment of documents. Windows differ far more than lengths do, so the bands are of paired differences."""
        figure, panels = plots.figure(columns=len(self.documents), width=4.4, height=3.2)
        for axes, documents in zip(panels, self.documents, strict=True):
            lines: dict[str, dict[int, tuple[float, float, float]]] = {}
            for arm, seeds in arms.items():
                losses = {n: [one.where(**self._scored(documents, n)) for one in seeds.values()] for n in self.lengths}
                changes = {n: difference(losses[self.lengths[0]], losses[n], ["window"]) for n in self.lengths}
                lines[arm] = {n: (change.difference, change.low, change.high) for n, change in changes.items()}
            y = f"loss minus that at {length_text(self.lengths[0])} tokens\n(nats a target; 95 % over windows)"
            plots.bands(axes, lines, "tokens of context and targets", y if axes is panels[0] else "")
            axes.set_title(documents.replace("_", " "), fontsize=9)
        plots.legend_below(panels)
        return plots.png(figure)

    def metrics(self, measured: Measured) -> dict[str, Any]:
        """Return perplexities as `<documents>/<length>`, for all targets of the full windows `<documents>/full`, and
        `held_out`."""
        losses: dict[str, Any] = {}
        for documents in self.documents:
            losses |= {f"{documents}/{n}": mean(measured.where(**self._scored(documents, n))) for n in self.lengths}
            losses[f"{documents}/full"] = mean(measured.where(documents=documents, scope="whole"))
        losses["held_out"] = mean(measured.where(scope="held out"))
        return {name: None if loss is None else math.exp(loss) for name, loss in losses.items()}

    @staticmethod
    def _scored(documents: str, length: int) -> dict[str, Any]:
        return {"documents": documents, "length": length, "scope": "scored"}

    def _windows(self, trained: Trained) -> tuple[dict[str, list[Any]], dict[str, Any]]:
        """Return windows that do not overlap, spread evenly over the split, with the same ids for each treatment of
        documents, and the fingerprint of their text. Raises ConfigError where the split is too short."""
        split, count, longest = self.split, self.windows, self.lengths[-1]
        data = open_data(trained.saved, self.data, self.path, split=split, context=longest, batch_size=1)
        if not isinstance(data, TextData):
            raise ConfigError(
                f"lengths= must be of text, got {trained.file}, trained on questions: use data=stdlib or path="
            )
        windows = {}
        for documents in self.documents:
            data.documents = documents
            windows[documents] = chosen = data.of_length(longest, count, split)
            if len(chosen) < count:
                raise ConfigError(
                    f"windows must be at most {len(chosen)} of {longest:,} tokens in the {split} split of "
                    f"{trained.file}, which has {data.split(split).tokens:,}, got {count}"
                )
        other = {"documents"} | ({"max_tokens"} if split == "validation" else set())
        return windows, {name: value for name, value in data.fingerprint().items() if name not in other}


@torch.no_grad()
def score(model: LanguageModel, window: Window, length: int, scored: int, *, whole: bool, chunk: int) -> list[Record]:
    """Return the summed loss of the last ``scored`` targets of a window, given its last ``length`` tokens.

    The window is read in chunks through the model's memory: only that memory grows with ``length``, and rows before the
    scored ones are computed only where a later row needs them.

    Args:
        model: on its device.
        window: ``tokens``, ``targets`` (-100: none) and ``documents``, int64 [T] each, T at least ``length``.
        whole: score all ``length`` targets too.
        chunk: tokens read at a time.

    Returns:
        The ``loss`` in nats, summed in float64, its weight the number of targets: of the ``scored`` targets, and of the
        ``whole`` length.
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
    scopes = {"scored": slice(-scored, None)} | ({"whole": slice(None)} if whole else {})
    return [
        {"scope": scope, "quantity": "loss", "value": float(loss_T[part].sum()), "weight": int(counted_T[part].sum())}
        for scope, part in scopes.items()
    ]


def _perplexity(seeds: Sequence[Sequence[Record]]) -> str:
    """Return a perplexity with its interval over windows."""
    middle, low, high = map(math.exp, over_units(seeds))
    return f"{middle:.4f} [{low:.4f}, {high:.4f}]"


def _check(windows: Sequence[Window], lengths: Sequence[int], scored: int, chunk: int) -> None:
    if not lengths or list(lengths) != sorted(set(lengths)):
        raise ConfigError(f"lengths must ascend, got {list(lengths)}")
    within(1, chunk=chunk)
    within(1, lengths[0], scored=scored)  # lengths hold the targets too
    short = [len(window["tokens"]) for window in windows if len(window["tokens"]) < lengths[-1]]
    if short or not windows:
        raise ConfigError(f"lengths must fit into the windows of {short or 'no'} tokens, got {list(lengths)}")
    if not all((window["targets"][-scored:] != IGNORED).any() for window in windows):
        raise ConfigError(f"scored must be large enough for a target in every window, got {scored}")
