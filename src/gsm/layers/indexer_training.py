"""How indexers learn what to look for: the slot ``model/indexer_training``.

A selection has no gradient, so the language-model loss alone teaches an indexer nothing. The variants differ in what
reaches its parameters; what it reads is detached in all of them (``gsm.layers.projections.Indexer``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gsm.hashing import mixed
from gsm.layers.attended import Attended
from gsm.layers.projections import Indexer
from gsm.layers.rope import Angles
from gsm.layers.search import Selection
from gsm_kernels import IndexerLoss, indexer_kl, score_slots

RUNS = 16  # of neighbouring rows in a sample: neighbours share windows, and 1,024 rows are whole tiles
TILE = 64  # rows of one in the kernels


class IndexerTraining:
    """Base of all variants: nothing reaches an indexer."""

    # What teaches an indexer: a loss of its own, and the language-model loss through attention.
    by_loss = False
    by_attention = False

    def freeze_untrained(self, model: nn.Module) -> None:
        """Freezes the indexers of a new model if nothing ever reaches them: no optimiser then moves or decays them."""
        for part in model.modules():
            if isinstance(part, Indexer) and not (self.by_loss or self.by_attention):
                part.requires_grad_(False)

    def slots_with_gradient(self, tokens: int) -> Literal["none", "selected", "visible"]:
        """Whose scores get a gradient in training on so many tokens, for the cost; of ``visible`` ones, in the rows
        that are compared."""
        return "none"

    def rows_compared(self, tokens: int) -> list[slice]:
        """The rows for which training on so many tokens computes the attention over all visible slots, as a teacher or
        to measure recall, for the cost."""
        return []

    def loss(
        self,
        found: Selection,
        query_BRHC: Tensor,
        attended: Attended,
        position_BR: Tensor,
        window: int,
        sink_H: Tensor,
        angles: Angles,
        pieces: int = 1,
        tokens: int | None = None,
    ) -> IndexerLoss | None:
        """The loss of the indexer that has searched, given what the attention of its rows looks at; None: it has none.

        Args:
            found: the search; its index, key and selection are there.
            query_BRHC, position_BR, window, sink_H, angles: that attention, as in ``gsm_kernels.attend``.
            attended: its window, its bank and the pool that was searched.
            pieces: into how many pieces of this length the sequences were cut (``gsm.cache.pieces``).
            tokens: of a whole sequence, where they were cut (None: its rows are here).
        """
        return None

    def bias(self, found: Selection) -> Tensor | None:
        """Zeros [B, R, K] on the logits of the selected slots, for their gradient; None: no gradient is wanted."""
        return None


class KL(IndexerTraining):
    """The default: KL divergence of the indexer's distribution from the mass that attention puts on the bank, as in
    the training of DeepSeek-V3.2's indexer, from the first step. The paper does not say how its indexers learn.

    Teacher is the attention of the rows that searched: the layer's, or for a separate indexer the stage's.

    Up to ``dense_limit`` new tokens, the two are compared over all visible slots, in every row. That grows with the
    square of the length. Above, the work grows with the length alone:

    - ``sampled``: over all visible slots, in a sample of the rows, so that slots which are not selected yet have a
      gradient, too.
    - ``selected``: over the selected slots, both renormalised, in every row, as in the sparse phase of DeepSeek-V3.2:
      what is selected is ranked, and no other slot has a gradient.

    Recall is measured at every length: in every row up to the limit, above in the sample.

    Args:
        dense_limit: tokens up to which nothing is left out.
        beyond: what is compared above.
        sampled_rows: rows of a sequence in the sample (``sampled_runs``).
    """

    by_loss = True

    def __init__(
        self, *, dense_limit: int = 4096, beyond: Literal["sampled", "selected"] = "sampled", sampled_rows: int = 1024
    ):
        if beyond not in ("sampled", "selected"):
            raise ValueError(f"model.indexer_training.beyond is {beyond!r}, but takes 'sampled' or 'selected'")
        self.dense_limit, self.beyond, self.sampled_rows = dense_limit, beyond, sampled_rows

    def slots_with_gradient(self, tokens: int) -> Literal["selected", "visible"]:
        """All visible slots, unless the length is beyond the limit and the selected ones are asked for."""
        return "selected" if tokens > self.dense_limit and self.beyond == "selected" else "visible"

    def rows_compared(self, tokens: int) -> list[slice]:
        """All rows up to the limit; above, those of a sample, as if each run stood in the middle of its share."""
        if tokens <= max(self.dense_limit, self.sampled_rows, RUNS):
            return [slice(0, tokens)]
        share = tokens // RUNS
        length = min(-(-self.sampled_rows // RUNS), share)
        starts = range((share - length) // 2, RUNS * share, share)
        return [slice(start, start + length) for start in starts]

    def loss(
        self,
        found: Selection,
        query_BRHC: Tensor,
        attended: Attended,
        position_BR: Tensor,
        window: int,
        sink_H: Tensor,
        angles: Angles,
        pieces: int = 1,
        tokens: int | None = None,
    ) -> IndexerLoss | None:
        """The divergence, and how much of the teacher's mass over all visible slots the selection recalls."""
        if attended.bank is None or found.index is None:
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
            "index_BRK": found.chosen_BRK,
            "index_query_BRJI": found.index.query_BRJI,
            "index_weight_BRJ": found.index.weight_BRJ,
            "index_key_BFI": found.key_BFI,
            "pool_BRN": attended.pool_BRN,
        }
        # Pieces of equal lengths may come to more than the sequence: ranks have to choose as one rank does.
        if (position_BR.shape[1] if tokens is None else tokens) <= self.dense_limit:
            return indexer_kl(**call)
        if self.beyond == "sampled":
            return indexer_kl(**sample(call, self.sampled_rows, pieces))
        with torch.no_grad():
            recall = indexer_kl(**sample(call, self.sampled_rows, pieces)).recall
        return indexer_kl(**call, dense=False)._replace(recall=recall)


def sample(call: dict[str, Any], count: int, pieces: int = 1) -> dict[str, Any]:
    """The arguments of ``indexer_kl`` for about so many of the rows of a sequence: ``RUNS`` runs of neighbours, of
    which each of its pieces has its share, and at least one.

    In front of a run stand the entries of its first window, in rows that are padding and see no slot.
    """
    position_BR, width = call["position_BR"], call["width"]
    batch, rows = position_BR.shape
    count, runs = -(-count // pieces), max(1, RUNS // pieces)
    if rows <= max(count, runs):
        return call
    start_BN, length = sampled_runs(call["index_BRK"], count, runs)
    # Kernels leave out a tile that is padding, but not a part of it.
    before = -(-(width - 1) // TILE) * TILE if length >= TILE else width - 1
    row_L = torch.arange(-before, length, device=position_BR.device)
    row_BS, counts_S = (start_BN[..., None] + row_L).flatten(1), (row_L >= 0).repeat(runs)
    stored = call["window_BEC"].shape[1]  # also of what stands before the first row
    place_BS, row_BS = (stored - rows + row_BS).clamp(min=0), row_BS.clamp(min=0)
    batch_B1 = torch.arange(batch, device=position_BR.device)[:, None]
    picked = {name: x[batch_B1, row_BS] for name, x in call.items() if "_BR" in name and x is not None}
    return {
        **call,
        **picked,
        "window_BEC": call["window_BEC"][batch_B1, place_BS],
        "position_BR": picked["position_BR"].where(counts_S, -1),
        "last_BR": picked["last_BR"].where(counts_S, picked["first_BR"]),
    }


def sampled_runs(chosen_BRK: Tensor, count: int, runs: int = RUNS) -> tuple[Tensor, int]:
    """Where the ``runs`` of about ``count`` rows in all begin, int64 [B, runs], and how long each of them is: one
    anywhere in each equal share of the rows.

    The draw is a hash of what the rows have selected, so that sequences, steps and indexers differ, and a step that is
    repeated draws alike. Rows at fixed places would miss what always stands between them, such as the questions at the
    end of a synthetic task.
    """
    share, run_N = chosen_BRK.shape[1] // runs, torch.arange(runs, device=chosen_BRK.device)
    length = min(-(-count // runs), share)
    hash_BN = mixed(mixed(chosen_BRK.sum((1, 2)) & 0xFFFFFFFF)[:, None] ^ mixed(run_N))
    return run_N * share + hash_BN % (share - length + 1), length


class Frozen(IndexerTraining):
    """A control: indexers keep their initial weights, and select by random projections of what they see."""


class ScoreBias(IndexerTraining):
    """Straight-through: a selected slot's index score is added to its attention logit, the gradient alone.

        dL/dscore_tk = sum over everyone who reads slot k for row t, and over heads, of dL/dlogit_thk

    A slot whose reading lowers the language-model loss gets a higher score; slots that are not selected get nothing.

    The value is not added. A score is made for ranking and has a scale of its own; added, it would change what is
    attended to, so that arms of a comparison would differ in more than in how indexers learn, and every mode and kernel
    would have to carry it. So the model computes what it always computes, with a bias in training alone.

    Reuse layers, and stages that share the layer's Top-K, read what one indexer has selected. They all teach it: its
    selection acts on the loss through each of them, and gradients add up.
    """

    by_attention = True

    def slots_with_gradient(self, tokens: int) -> Literal["selected"]:
        """The selected ones: no others have a logit."""
        return "selected"

    def bias(self, found: Selection) -> Tensor | None:
        """score - score, of which the second is a constant."""
        if found.index is None or found.key_BFI is None or found.chosen_BRK is None:
            return None
        score_BRK = score_slots(*found.index, found.key_BFI, found.chosen_BRK)
        return score_BRK - score_BRK.detach()


def indexer_losses(
    named: Sequence[tuple[str, IndexerLoss]], weight: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a forward in training adds to its output for its indexers, by name.

    Returns the loss, their mean times ``weight``; and the metrics, how much of the teacher's mass their Top-K recalls,
    each and on average."""
    if not named:
        return {}, {}
    losses = {"indexer_kl": weight * torch.stack([result.loss for _, result in named]).mean()}
    recall = {f"indexer_recall/{name}": result.recall for name, result in named if result.recall is not None}
    if not recall:
        return losses, {}
    return losses, {**recall, "indexer_recall": torch.stack(list(recall.values())).mean()}
