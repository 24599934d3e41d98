"""Pictures of a GSM in training: the selections of its stages, the parts of its state, the reads of its decoder.

They are drawn from taps on a few held-out sequences, before a validation, where they do not count in the throughput.
``gsm.analysis.views`` draws them with matplotlib; without it a run logs scalars and histograms only.

B sequences, T positions, N values.
"""

from __future__ import annotations

import importlib.util
import io
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from torch import Tensor

from gsm import plots
from gsm.analysis import interventions, overlap
from gsm.analysis.attention import decoder_attention, decoder_layers, entries_back, selected_distances, sinks
from gsm.analysis.state import state_facts
from gsm.analysis.views import TAPS as VIEWED
from gsm.analysis.views import shares, views
from gsm.errors import within
from gsm.files import write_whole
from gsm.models.checks import IGNORED
from gsm.models.gsm import GSM
from gsm.observe import Recording, record
from gsm.training.distributed.sharded import Sharded
from gsm.training.module import LanguageModeling
from gsm.training.resume import random_states, restore_random_states

FILE = "views.npz"
TAPS = (*overlap.TAPS, *VIEWED, "state/*")


class Pictures(lightning.Callback):
    """Log scalars, histograms and pictures of a GSM; a run of another model logs none of them.

    * ``val/overlap_sample/stage<s>``: scalars of stages that select for themselves (``gsm.analysis.overlap``), from
      these few sequences; ``val/overlap/mean`` of the finished run, also in its summary, is measured on more;
    * ``val/state/norm``, ``val/state/effective_rank`` (``gsm.analysis.state``) and ``val/state/share/<way>``, the share
      of the state that comes by each way: scalars;
    * ``val/sink/decoder<l>``: the weight of the attention sink in each decoder layer, the mean over heads: scalars;
    * ``val/without_state``, ``val/without_stage<s>``: the loss that is added, in nats per token of these sequences, if
      all entries of the state, or what a stage has retrieved, are zeros (``gsm.analysis.interventions``): scalars;
    * ``view/retrieval_distance/stage<s>``: histogram of the distance from a row to its selected entries, in tokens;
    * ``view/state_gate``: histogram of a writer's gate;
    * ``view/<name>``: the images of ``gsm.analysis.views``;
    * ``views.npz`` in the run's folder: what the decoder reads now, for pictures of several arms side by side:
      ``decoder_reads`` float32 [L, E] as of ``gsm.analysis.attention.decoder_attention``, with ``layers`` [L] and
      ``back`` [E - 1], the distance in tokens of each entry.

    Weights, random numbers and the mode of the model stay as they were.

    Args:
        every: least number of steps from one time to the next; they are drawn at validations only.
        sequences: number of held-out sequences, the same every time.
        rows: number of their last positions.

    Raises:
        ValueError: a value below 1.
    """

    def __init__(self, every: int = 1, sequences: int = 4, rows: int = 64) -> None:
        within(1, every=every, sequences=sequences, rows=rows)
        self.every, self.sequences, self.rows = every, sequences, rows
        self._batch: dict[str, Tensor] | None = None
        self._drawn: int | None = None

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: LanguageModeling) -> None:
        """Take the sequences. A rank with a shard of the model cannot run it alone, so FSDP runs have no pictures."""
        data: Any = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        if data is None or not isinstance(pl_module.model, GSM) or not trainer.is_global_zero:
            return
        if isinstance(trainer.strategy, Sharded):
            return
        if _boards(trainer) and not _can_draw():
            print(f"there will be no pictures: {plots.REMEDY}", file=sys.stderr, flush=True)
        chosen = list(islice(data.validation(), self.sequences))
        self._batch = {
            name: torch.stack([item[name] for item in chosen]) for name in ("tokens", "documents", "targets")
        }

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: LanguageModeling) -> None:
        """Draw, if enough steps were taken since."""
        step = trainer.global_step
        if self._drawn is None or step <= self._drawn or step >= self._drawn + self.every:
            self._drawn = step
            self._draw(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Return the step of the latest pictures."""
        return {"drawn": self._drawn}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._drawn = state_dict["drawn"]

    def _draw(self, trainer: lightning.Trainer, task: LanguageModeling) -> None:
        model, step = task.model, trainer.global_step
        if self._batch is None or not isinstance(model, GSM):
            return
        seen = self._look(trainer, task)
        found = {**scalars(model, seen), **self._lost(trainer, task, model)}
        metrics = {f"val/{name}": value for name, value in found.items() if math.isfinite(value)}
        task.log_dict(metrics, rank_zero_only=True)
        if folder := task.hparams["config"].get("folder"):
            write_whole(Path(folder) / FILE, _numbers(model, seen))
        boards = _boards(trainer)
        for name, value_N in histograms(model, seen):
            for board in boards:
                if log_histogram := getattr(board, "log_histogram", None):
                    log_histogram(f"view/{name}", value_N, step)
        for name, picture in views(model, seen) if boards and _can_draw() else ():
            pixels_YXC = plots.pixels(picture)
            for board in boards:
                board.log_image(f"view/{name}", [pixels_YXC], step)

    def _look(self, trainer: lightning.Trainer, task: LanguageModeling) -> Recording:
        """One forward of the sequences, as validation computes it, with the taps that are drawn."""
        assert self._batch is not None  # on_fit_start has taken it
        batch = {name: value_BT.to(task.device) for name, value_BT in self._batch.items()}
        rows = min(self.rows, batch["tokens"].shape[1])
        with _undisturbed(trainer, task), record(*TAPS) as seen:
            # forward, since __call__ would compile a compiled model once more to record it.
            task.model.forward(batch["tokens"], documents=batch["documents"], rows=rows)
        return seen

    def _lost(self, trainer: lightning.Trainer, task: LanguageModeling, model: GSM) -> dict[str, float]:
        """Return the loss that is added without the state, and without each stage: the mean over the targets of all
        sequences, which are computed one by one, in the memory that training has."""
        assert self._batch is not None
        sequences = [
            {name: value_BT[number : number + 1].to(task.device) for name, value_BT in self._batch.items()}
            for number in range(len(self._batch["tokens"]))
        ]
        with _undisturbed(trainer, task):
            whole = _loss(model, sequences)
            lost = {}
            for name, removed in interventions.ablations(model).items():
                if name != "all stages":
                    with removed():
                        lost[f"without_{name.replace(' ', '')}"] = _loss(model, sequences) - whole
        return lost


@contextmanager
def _undisturbed(trainer: lightning.Trainer, task: LanguageModeling) -> Iterator[None]:
    """Compute as validation does, and leave the mode of the model and all random numbers as they were."""
    states, was_training = random_states(task.device), task.model.training
    task.model.eval()
    with torch.no_grad(), trainer.precision_plugin.forward_context():
        yield
    task.model.train(was_training)
    restore_random_states(states, task.device)


def _loss(model: GSM, sequences: Sequence[Mapping[str, Tensor]]) -> float:
    """Return the mean cross-entropy over the targets of all sequences; not a number without a target."""
    total, targets = 0.0, 0
    for batch in sequences:
        target_BT = batch["targets"]
        if count := int((target_BT != IGNORED).sum()):
            loss = model.forward(batch["tokens"], documents=batch["documents"], targets=target_BT).loss
            assert loss is not None  # there are targets
            total += count * float(loss)
            targets += count
    return total / targets if targets else math.nan


def scalars(model: GSM, seen: Recording) -> dict[str, float]:
    """Return numbers of the state by name, NaN where all is padding; for stages with an indexer of their own also the
    overlap, if a row sees more than K entries."""
    overlaps = overlap.overlaps_seen(model, seen) if overlap.selects_for_itself(model) else {}
    shared = {f"overlap_sample/stage{stage}": float(one_N.mean()) for stage, one_N in overlaps.items() if len(one_N)}
    weights = sinks(model, seen, [f"decoder/{layer}" for layer in decoder_layers(model)])
    sunk = {f"sink/{name.replace('/', '')}": float(weight_H.mean()) for name, weight_H in weights.items()}
    return {**state_facts(model, seen), **shares(model, seen), **sunk, **shared}


def histograms(model: GSM, seen: Recording) -> Iterator[tuple[str, Tensor]]:
    """Yield names and values [N]: the distances by stage, and the gate."""
    for stage, distance_N in selected_distances(model, seen).items():
        if len(distance_N):
            yield f"retrieval_distance/stage{stage}", distance_N
    if "state/gate" in seen:
        yield "state_gate", seen["state/gate"].float().flatten()


def _numbers(model: GSM, seen: Recording) -> bytes:
    """Return what the decoder reads, as a file's content."""
    weight_LE, layers = decoder_attention(model, seen), decoder_layers(model)
    longest = layers[int(weight_LE.isnan().sum(1).argmin())]
    back_W = entries_back(model, f"decoder/{longest}", weight_LE.shape[1] - 1)
    content = io.BytesIO()
    np.savez(content, decoder_reads=weight_LE.float().cpu().numpy(), layers=np.array(layers), back=back_W.cpu().numpy())
    return content.getvalue()


def _boards(trainer: lightning.Trainer) -> list[Any]:
    """Return the loggers that take pictures."""
    return [logger for logger in trainer.loggers if hasattr(logger, "log_image")]


def _can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None
