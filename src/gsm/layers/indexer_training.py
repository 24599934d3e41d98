"""How indexers are trained: the config group ``model/indexer_training``.

An indexer scores bank entries, and the Top-K of the scores are selected. A selection has no gradient, so the
language-model loss alone does not train an indexer. The variants differ in the gradient that its parameters get. Its
inputs are detached in all variants (``gsm.layers.projections.Indexer``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gsm.errors import within
from gsm.hashing import mixed
from gsm.layers.attended import Attended
from gsm.layers.projections import Indexer
from gsm.layers.rope import Angles
from gsm.layers.search import Selection
from gsm_kernels import IndexerLoss, indexer_kl, score_slots

# Number of runs of neighbouring rows in a sample. Neighbours share windows, and a run of 1,024 / 16 rows is one tile.
RUNS = 16
TILE = 64  # rows of a tile in the kernels


class IndexerTraining:
    """Base of all variants: indexers get no gradient."""

    # Whether an indexer is trained by a separate loss.
    by_loss = False
    # Whether an indexer is trained by the language-model loss, through attention.
    by_attention = False

    def freeze_untrained(self, model: nn.Module) -> None:
        """Freeze the indexers of a new model if they never get a gradient, so that no optimiser changes them."""
        for part in model.modules():
            if isinstance(part, Indexer) and not (self.by_loss or self.by_attention):
                part.requires_grad_(False)

    def slots_with_gradient(self, tokens: int) -> Literal["none", "selected", "visible"]:
        """Return which scores have a gradient in training on sequences of ``tokens`` tokens, for the cost model.

        ``selected``: scores of selected slots; ``visible``: scores of all visible slots, in the compared rows only.
        """
        return "none"

    def rows_compared(self, tokens: int) -> list[slice]:
        """Return the rows for which training on sequences of ``tokens`` tokens computes attention over all visible
        slots, for the cost model. This attention is the teacher, or measures recall."""
        return []

    def loss(
        self,
        selection: Selection,
        query_BRHC: Tensor,
        attended: Attended,
        position_BR: Tensor,
        window: int,
        sink_H: Tensor,
        angles: Angles,
        tokens: int | None = None,
    ) -> IndexerLoss | None:
        """Return the loss of an indexer, given its search and the attention of the same rows; None: no loss.

        Args:
            selection: the search, with index, keys and selected slots.
            query_BRHC, position_BR, window, sink_H, angles: the attention, as in ``gsm_kernels.attend``.
            attended: its window, its bank and the pool that was searched.
            tokens: length of the whole sequences, if the rows are equal pieces of them (None: the rows are whole
                sequences).
        """
        return None

    def bias(self, selection: Selection) -> Tensor | None:
        """Return zeros [B, R, K] to add to the logits of the selected slots, for their gradient; None: not used."""
        return None


class KL(IndexerTraining):
    """The default: a KL loss between the distribution of the attention over the bank, the teacher, and that of the
    index scores, as in DeepSeek-V3.2, from the first step. The paper does not specify the training of its indexers.

    The teacher is the attention of the rows that search: that of the layer, or for a separate indexer of the stage.

    Up to ``dense_limit`` new tokens, the distributions are compared over all visible slots, in every row. The cost
    grows with the square of the length. Above the limit, it grows linearly:

    - ``sampled``: over all visible slots, in a sample of the rows, so that unselected slots have a gradient too.
    - ``selected``: over the selected slots, both renormalised, in every row, as in the sparse phase of DeepSeek-V3.2.
      This ranks the selected slots; no other slot has a gradient.

    Recall is measured at every length: in every row up to the limit, and in the sample above it.

    Args:
        dense_limit: largest number of tokens for which all rows and all visible slots are compared.
        beyond: ``sampled`` or ``selected``, the comparison above the limit.
        sampled_rows: number of rows of a sequence in the sample (``sampled_runs``).

    Raises:
        ValueError: if ``beyond`` is neither.
    """

    by_loss = True

    def __init__(
        self, *, dense_limit: int = 4096, beyond: Literal["sampled", "selected"] = "sampled", sampled_rows: int = 1024
    ):
        if beyond not in ("sampled", "selected"):
            raise ValueError(f"model.indexer_training.beyond must be sampled or selected, got {beyond}")
        within(0, dense_limit=dense_limit)
        within(1, sampled_rows=sampled_rows)
        self.dense_limit, self.beyond, self.sampled_rows = dense_limit, beyond, sampled_rows

    def slots_with_gradient(self, tokens: int) -> Literal["selected", "visible"]:
        """Return ``selected`` for lengths beyond the limit with ``beyond="selected"``, else ``visible``."""
        return "selected" if tokens > self.dense_limit and self.beyond == "selected" else "visible"

    def rows_compared(self, tokens: int) -> list[slice]:
        """Return all rows up to the limit; above it, the rows of a typical sample, each run in the middle of its
        share."""
        if tokens <= max(self.dense_limit, self.sampled_rows, RUNS):
            return [slice(0, tokens)]
        share = tokens // RUNS
        length = min(-(-self.sampled_rows // RUNS), share)
        starts = range((share - length) // 2, RUNS * share, share)
        return [slice(start, start + length) for start in starts]

    def loss(
        self,
        selection: Selection,
        query_BRHC: Tensor,
        attended: Attended,
        position_BR: Tensor,
        window: int,
        sink_H: Tensor,
        angles: Angles,
        tokens: int | None = None,
    ) -> IndexerLoss | None:
        """Return the divergence, and the fraction of the teacher's mass over all visible slots that is selected."""
        if attended.bank is None or selection.index is None:
            return None
        call: dict[str, Any] = {
            "query_BRHC": query_BRHC,
            "window_BEC": attended.window_BEC,
            "position_BR": position_BR,
            "width": window,
            "sink_H": sink_H,
            "cos_BRP": angles[0],
            "sin_BRP": angles[1],
            "bank_BFC": attended.bank.entry_BFC,
            "first_BR": attended.bank.first_BR,
            "last_BR": attended.bank.last_BR,
            "index_BRK": selection.chosen_BRK,
            "index_query_BRJI": selection.index.query_BRJI,
            "index_weight_BRJ": selection.index.weight_BRJ,
            "index_key_BFI": selection.key_BFI,
            "pool_BRN": attended.pool_BRN,
        }
        tokens = position_BR.shape[1] if tokens is None else tokens
        if tokens <= self.dense_limit:
            return indexer_kl(**call)
        pieces = -(-tokens // position_BR.shape[1])
        if self.beyond == "sampled":
            return indexer_kl(**sample(call, self.sampled_rows, pieces))
        with torch.no_grad():
            recall = indexer_kl(**sample(call, self.sampled_rows, pieces)).recall
        return indexer_kl(**call, dense=False)._replace(recall=recall)


def sample(call: dict[str, Any], count: int, pieces: int = 1) -> dict[str, Any]:
    """Return the arguments of ``indexer_kl`` for about ``count`` rows of a sequence: ``RUNS`` runs of neighbouring
    rows.

    If the sequence is cut into ``pieces``, they share the runs equally, and each has at least one. Each run is preceded
    by rows of padding, which see no slot; their place in the window holds the entries that the first row of the run
    sees.
    """
    position_BR, width = call["position_BR"], call["width"]
    batch, rows = position_BR.shape
    count, runs = -(-count // pieces), max(1, RUNS // pieces)
    if rows <= max(count, runs):
        return call
    start_BN, length = sampled_runs(call["index_BRK"], count, runs)
    # Kernels skip a tile of padding, but not a part of a tile.
    before = -(-(width - 1) // TILE) * TILE if length >= TILE else width - 1
    row_L = torch.arange(-before, length, device=position_BR.device)
    row_BS, counts_S = (start_BN[..., None] + row_L).flatten(1), (row_L >= 0).repeat(runs)
    stored = call["window_BEC"].shape[1]  # including entries before the first row
    place_BS, row_BS = (stored - rows + row_BS).clamp(min=0), row_BS.clamp(min=0)
    batch_B1 = torch.arange(batch, device=position_BR.device)[:, None]
    rowwise = {name: x[batch_B1, row_BS] for name, x in call.items() if "_BR" in name and x is not None}
    return {
        **call,
        **rowwise,
        "window_BEC": call["window_BEC"][batch_B1, place_BS],
        "position_BR": rowwise["position_BR"].where(counts_S, -1),
        "last_BR": rowwise["last_BR"].where(counts_S, rowwise["first_BR"]),
    }


def sampled_runs(chosen_BRK: Tensor, count: int, runs: int = RUNS) -> tuple[Tensor, int]:
    """Draw runs of neighbouring rows, about ``count`` rows in total.

    The rows are divided into equal shares, with one run at a random place in each. Rows at fixed places would always
    miss the same positions, such as the questions at the end of a synthetic task. The random number is a hash of the
    selections, so it differs between sequences, steps and indexers, and is the same if a step is repeated.

    Args:
        chosen_BRK: int64, the selections of all rows.
        count: number of rows.
        runs: number of runs.

    Returns:
        The first row of each run, int64 [B, runs], and the number of rows in a run.
    """
    share, run_N = chosen_BRK.shape[1] // runs, torch.arange(runs, device=chosen_BRK.device)
    length = min(-(-count // runs), share)
    hash_BN = mixed(mixed(chosen_BRK.sum((1, 2)) & 0xFFFFFFFF)[:, None] ^ mixed(run_N))
    return run_N * share + hash_BN % (share - length + 1), length


class Frozen(IndexerTraining):
    """A control: indexers keep their initial weights, and select by random projections of their inputs."""


class ScoreBias(IndexerTraining):
    """Straight-through: the index score of a selected slot gets the gradient of the slot's attention logit.

        dL/dscore_tk = sum over all readers of slot k for row t, and over heads, of dL/dlogit_thk

    The score of a slot that lowers the language-model loss rises. Unselected slots get no gradient.

    The logit gets a bias of zeros with this gradient, in training only. The score itself is not added, because that
    would change the attention, and with it the outputs of the model.

    Reuse layers, and stages that share the layer's Top-K, read the selection of one indexer, which gets the sum of the
    gradients from all of them.
    """

    by_attention = True

    def slots_with_gradient(self, tokens: int) -> Literal["selected"]:
        """Return ``selected``: unselected slots have no logit."""
        return "selected"

    def bias(self, selection: Selection) -> Tensor | None:
        """Return score - score.detach(): zeros with the gradient of the scores."""
        if selection.index is None or selection.key_BFI is None or selection.chosen_BRK is None:
            return None
        score_BRK = score_slots(*selection.index, selection.key_BFI, selection.chosen_BRK)
        return score_BRK - score_BRK.detach()


def indexer_losses(
    named: Sequence[tuple[str, IndexerLoss]], weight: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the losses and the metrics of the indexers, by name.

    The loss is the mean over indexers times ``weight``. The metrics are the recall, the fraction of the teacher's mass
    on the selected slots, of each indexer and on average.

    Args:
        named: the name, and the loss and recall, of each indexer.
        weight: weight of the loss.
    """
    if not named:
        return {}, {}
    losses = {"indexer_kl": weight * torch.stack([result.loss for _, result in named]).mean()}
    recall = {f"indexer_recall/{name}": result.recall for name, result in named if result.recall is not None}
    if not recall:
        return losses, {}
    return losses, {**recall, "indexer_recall": torch.stack(list(recall.values())).mean()}
