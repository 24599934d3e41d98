"""Pictures of a GSM in training, for TensorBoard: where its stages and its decoder look.

Drawn from taps on a few held-out sequences, before a validation: the clock of the throughput stands still there. Heat
maps are plain tensors, so that a run needs no library for plots.

B sequences, T positions, N values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

import lightning
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from gsm.analysis.attention import decoder_attention, selected_distances
from gsm.analysis.state import state_facts
from gsm.evaluation import overlap
from gsm.models.gsm import GSM
from gsm.observe import Seen, record
from gsm.training.distributed.sharded import Sharded
from gsm.training.module import LanguageModeling
from gsm.training.resume import random_states, restore_random_states

TAPS = (*overlap.TAPS, "state/*", "decoder/*/weights")
PIXELS = 8  # of a cell of a heat map, along each side
# Dark to light through hues that colour-blind readers tell apart: eight points of matplotlib's viridis.
COLOURS = ((68, 1, 84), (70, 50, 127), (54, 92, 141), (39, 127, 142), (31, 161, 135), (74, 194, 109), (159, 218, 58))
COLOURS += ((253, 231, 37),)


class Pictures(lightning.Callback):
    """Writes, where the model has it, and nothing for models other than GSM:

    * ``overlap_sample/stage<s>``: scalars of stages that select for themselves (``gsm.evaluation.overlap``), of these
      few sequences; ``overlap/mean`` of the finished run, which its summary has too, is of more;
    * ``state/norm`` and ``state/effective_rank``: scalars (``gsm.analysis.state``);
    * ``retrieval_distance/stage<s>``: histogram of how many tokens before its row a selected entry begins;
    * ``state/gate``: histogram of a writer's gate;
    * ``decoder/attention``: an image, one line a layer from the first at the top, and a column for each entry of the
      state, from the oldest to the row's own, and then the sink; the mean over rows and heads, on a square-root scale;
    * ``decoder/<l>/attention``: an image of one layer, one line a row of the first sequence, likewise.

    Weights, random numbers and the mode of the model stay as they were.

    Args:
        every: least number of steps from one time to the next; they are drawn at validations only.
        sequences: how many held-out sequences are looked at, the same every time.
        rows: how many of their last positions.

    Raises:
        ValueError: one of them is below 1.
    """

    def __init__(self, every: int = 1, sequences: int = 4, rows: int = 64) -> None:
        for name, value in (("every", every), ("sequences", sequences), ("rows", rows)):
            if value < 1:
                raise ValueError(f"callbacks.pictures.{name} is {value}, but has to be 1 or more")
        self.every, self.sequences, self.rows = every, sequences, rows
        self._batch: dict[str, Tensor] | None = None
        self._drawn: int | None = None

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: LanguageModeling) -> None:
        """Takes the sequences. A rank that has its share of a model cannot look at them on its own."""
        data: Any = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
        if data is None or not isinstance(pl_module.model, GSM) or not trainer.is_global_zero:
            return
        if isinstance(trainer.strategy, Sharded):
            return
        chosen = list(islice(data.validation(), self.sequences))
        self._batch = {
            name: torch.stack([one[name] for one in chosen]) for name in ("tokens", "documents") if name in chosen[0]
        }

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: LanguageModeling) -> None:
        """Draws, if enough steps were taken since."""
        step = trainer.global_step
        if self._drawn is None or step <= self._drawn or step >= self._drawn + self.every:
            self._drawn = step
            self._draw(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """The step of the latest pictures."""
        return {"drawn": self._drawn}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a checkpoint."""
        self._drawn = state_dict["drawn"]

    def _draw(self, trainer: lightning.Trainer, task: LanguageModeling) -> None:
        model, step = task.model, trainer.global_step
        writers = [logger.experiment for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        if self._batch is None or not isinstance(model, GSM):
            return
        seen = self._look(trainer, task)
        told = {name: value for name, value in scalars(model, seen).items() if math.isfinite(value)}  # not of padding
        task.log_dict(told, rank_zero_only=True)
        for writer in writers:
            for name, value_N in histograms(model, seen):
                writer.add_histogram(name, value_N, step)
            for name, value_YX in images(model, seen):
                writer.add_image(name, heat_map(value_YX), step)

    @torch.no_grad()
    def _look(self, trainer: lightning.Trainer, task: LanguageModeling) -> Seen:
        """One forward of the sequences, as validation computes it, with the taps that are drawn."""
        assert self._batch is not None  # on_fit_start has taken it
        batch = {name: value_BT.to(task.device) for name, value_BT in self._batch.items()}
        rows, states = min(self.rows, batch["tokens"].shape[1]), random_states(task.device)
        was_training = task.model.training
        task.model.eval()
        with record(*TAPS) as seen, trainer.precision_plugin.forward_context():
            # Not __call__: a compiled model would be compiled anew to listen.
            task.model.forward(batch["tokens"], documents=batch.get("documents"), rows=rows)
        task.model.train(was_training)
        restore_random_states(states, task.device)
        return seen


def scalars(model: GSM, seen: Seen) -> dict[str, float]:
    """Facts of the state; of stages that select for themselves also the overlap, if a row sees more than K entries."""
    found = overlap.overlaps_seen(model, seen) if overlap.selects_for_itself(model) else {}
    shared = {f"overlap_sample/stage{stage}": float(one_N.mean()) for stage, one_N in found.items() if len(one_N)}
    return {**state_facts(model, seen), **shared}


def histograms(model: GSM, seen: Seen) -> Iterator[tuple[str, Tensor]]:
    """Names and values: of distances by stage, of the gate."""
    for stage, distance_N in selected_distances(model, seen).items():
        if len(distance_N):
            yield f"retrieval_distance/stage{stage}", distance_N
    if "state/gate" in seen:
        yield "state/gate", seen["state/gate"].float().flatten()


def images(model: GSM, seen: Seen) -> Iterator[tuple[str, Tensor]]:
    """Names and values [lines, columns] of the decoder's attention over the state: all layers, then each by itself."""
    yield "decoder/attention", decoder_attention(model, seen)
    for layer in range(model.geometry.encoder_layers + 1, model.geometry.depth + 1):
        yield f"decoder/{layer}/attention", seen[f"decoder/{layer}/weights"][0].float().mean(dim=1)


def heat_map(value_YX: Tensor) -> Tensor:
    """Values from 0 to their highest as a picture, uint8 [3, height, width], on a square-root scale."""
    colour_N3 = torch.tensor(COLOURS, dtype=torch.float32)
    value_YX = value_YX.nan_to_num()  # a mean over no rows, where all are padding
    level_YX = (value_YX.cpu() / value_YX.max().cpu().clamp(min=1e-12)).clamp(0, 1).sqrt() * (len(COLOURS) - 1)
    below_YX = level_YX.long().clamp(max=len(COLOURS) - 2)
    part_YX1 = (level_YX - below_YX)[..., None]
    picture_YX3 = colour_N3[below_YX].lerp(colour_N3[below_YX + 1], part_YX1)
    return picture_YX3.round().byte().permute(2, 0, 1).repeat_interleave(PIXELS, 1).repeat_interleave(PIXELS, 2)
