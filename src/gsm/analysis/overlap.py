"""The share of the aggregation stages' selection that the encoder selects too (paper, section 4.4.1 and the appendix on
the retrieval ablation).

Overlap is the number of bank entries that a stage and its encoder layer have both selected, divided by K: a mean over
the queries that see more than K entries, since the others have nothing to choose. Two independent selections of K out
of v visible entries overlap by K / v: `chance` is the mean of that over the same queries, and (overlap - chance) /
(1 - chance) is the agreement beyond it. Chance falls with the length.

B sequences, T positions, R rows, K slots that a layer selects, J slots that a stage selects, N queries of all
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from gsm.models.base import LanguageModel
from gsm.models.gsm import GSM
from gsm.observe import Recording, record
from gsm.shapes import last_rows
from gsm.span import document_positions
from gsm.tables import Grid, grid_lines

CHUNK = 4096  # tokens of a sequence read at a time
AT_ONCE = 16384  # tokens of all sequences read at a time
SEQUENCES = 16  # default number of sequences for each length
TAPS = ("position", "encoder/*/top_k", "stage/*/top_k")


def selects_for_itself(model: LanguageModel) -> bool:
    """Return whether there are stages that do not follow the encoder, and an encoder that selects too."""
    if not isinstance(model, GSM) or all(stage.retriever.follows_encoder for stage in model.aggregation):
        return False
    return any(getattr(block.attention, "indexer", None) is not None for block in model.encoder)


def measure(
    model: LanguageModel,
    sequences: Callable[[int], Sequence[Mapping[str, Tensor]]],
    context: int,
    lengths: Sequence[int] = (),
) -> dict[str, Any] | None:
    """Return the overlap by stage at each length; by default at a quarter of the context, half of it, all, twice it.

    Args:
        model: the model; other models than GSM, and stages or encoders that select nothing, have no overlap.
        sequences: makes the sequences of a length: ``tokens`` and ``documents``, int64 [T] each; raises ValueError
            where there are none of this length.
        context: the length that the model was trained with, in tokens.
        lengths: in tokens; each then needs sequences.

    Returns:
        ``mean`` over the stages and ``chance``, both at ``context`` (None where that is not among the lengths), and
        ``by_length``: ``length``, counted ``queries``, ``chance`` and ``stages``, the means in order, None where no
        query sees more than K entries; where all stages take the selection over, also ``by_construction``: true. None
        without any overlap.
    """
    rows = []
    for length in sorted(set(lengths) or around(context)):
        try:
            batches = sequences(length)
        except ValueError:  # too long for the text that there is, or too short for the task
            if lengths:
                raise
            continue
        stages = overlaps(model, batches)
        if not stages:
            return None
        means = [float(overlap_N.mean()) if len(overlap_N) else None for overlap_N in stages.values()]
        queries = max(map(len, stages.values()))
        rows.append({"length": length, "queries": queries, "chance": chance(model, batches), "stages": means})
    whole = [value for row in rows if row["length"] == context for value in row["stages"] if value is not None]
    taken_over = {} if selects_for_itself(model) else {"by_construction": True}
    return {
        "mean": sum(whole) / len(whole) if whole else None,
        "chance": next((row["chance"] for row in rows if row["length"] == context), None),
        "context": context,
        "by_length": rows,
        **taken_over,
    }


def around(context: int) -> set[int]:
    """Return a quarter of the context, half of it, all, twice it."""
    return {max(1, context // 4), max(1, context // 2), context, 2 * context}


def records(model: LanguageModel, sequences: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Any]]:
    """Return the overlap of each ``stage`` on sequences of one length, and ``chance``, as records: sums over queries.

    Where all stages take the selection over, they also have ``by_construction``: true. Empty without any query that
    counts.
    """
    stages = {stage: overlap_N for stage, overlap_N in overlaps(model, sequences).items() if len(overlap_N)}
    if not stages:
        return []
    taken_over = {} if selects_for_itself(model) else {"by_construction": True}
    found = {"quantity": "overlap", **taken_over}
    parts = [{"stage": n, **found, "value": float(one_N.sum()), "weight": len(one_N)} for n, one_N in stages.items()]
    queries, by_chance = max(map(len, stages.values())), chance(model, sequences) or 0.0
    return [*parts, {"quantity": "chance", "value": by_chance * queries, "weight": queries}]


def chance(model: LanguageModel, sequences: Sequence[Mapping[str, Tensor]]) -> float | None:
    """Return the mean of K / v over the queries of these sequences that see v > K bank entries; None without any."""
    if not isinstance(model, GSM):
        return None
    shares = []
    for row in sequences:
        position_T = document_positions(row["documents"].cpu()[None])[0]
        visible_T = (position_T + 1) // model.geometry.encoder_ratio
        shares.append(model.geometry.top_k / visible_T[visible_T > model.geometry.top_k].double())
    shares_N = torch.cat(shares) if shares else torch.zeros(0)
    return float(shares_N.mean()) if len(shares_N) else None


@torch.no_grad()
def overlaps(model: LanguageModel, sequences: Sequence[Mapping[str, Tensor]]) -> dict[int, Tensor]:
    """Return the overlap of every query that counts, by stage: float32 [N], on the CPU. Empty without a comparison.

    Sequences are read in chunks, as a long prompt is; the model stays in its mode.

    Args:
        model: the model.
        sequences: ``tokens`` and ``documents``, int64 [T] each, of one length.
    """
    if not isinstance(model, GSM):
        return {}
    by_stage: dict[int, list[Tensor]] = {}
    with model.evaluating():
        for seen in _recordings(model, sequences):
            for stage, overlap_N in overlaps_seen(model, seen).items():
                by_stage.setdefault(stage, []).append(overlap_N.cpu())
    return {stage: torch.cat(parts) for stage, parts in sorted(by_stage.items())}


def overlaps_seen(model: GSM, seen: Recording) -> dict[int, Tensor]:
    """Return the same for one recorded call: stage s against the encoder layer that it stands on."""
    geometry, by_stage = model.geometry, {}
    for stage, layer in enumerate(model.aggregation.layers, 1):
        stage_BRJ, encoder_BTK = seen.get(f"stage/{stage}/top_k"), seen.get(f"encoder/{layer}/top_k")
        if stage_BRJ is None or encoder_BTK is None:
            continue
        rows = stage_BRJ.shape[1]
        visible_BR = (last_rows(seen["position"], rows) + 1) // geometry.encoder_ratio
        count_BR = shared_slots(stage_BRJ, last_rows(encoder_BTK, rows))
        by_stage[stage] = count_BR[visible_BR > geometry.top_k].float() / geometry.top_k
    return by_stage


def shared_slots(stage_BRJ: Tensor, encoder_BRK: Tensor) -> Tensor:
    """Return the number of slots that two selections have in common, int64 [B, R]; -1 is no slot. Needs no [J, K] for a
    row."""
    if not encoder_BRK.shape[-1]:
        return stage_BRJ.new_zeros(stage_BRJ.shape[:-1])
    sorted_BRK = encoder_BRK.sort(dim=-1).values
    place_BRJ = torch.searchsorted(sorted_BRK, stage_BRJ.contiguous()).clamp(max=sorted_BRK.shape[-1] - 1)
    return ((sorted_BRK.gather(-1, place_BRJ) == stage_BRJ) & (stage_BRJ >= 0)).sum(dim=-1)


def _recordings(model: GSM, sequences: Sequence[Mapping[str, Tensor]]) -> Iterator[Recording]:
    """Yield the recorded selections of every chunk of all sequences."""
    if not sequences:
        return
    length, device = len(sequences[0]["tokens"]), model.embedding.weight.device
    at_once = max(1, AT_ONCE // length)
    for first in range(0, len(sequences), at_once):
        rows = sequences[first : first + at_once]
        batch = {name: torch.stack([row[name] for row in rows]).to(device) for name in ("tokens", "documents")}
        memory = model.start(len(rows))
        for start in range(0, length, CHUNK):
            tokens, documents = (batch[name][:, start : start + CHUNK] for name in ("tokens", "documents"))
            with record(*TAPS) as seen:  # forward, since __call__ would compile a compiled model again to record it
                memory = model.forward(tokens, documents=documents, memory=memory).memory
            yield seen


def table(
    facts: Mapping[str, Any] | None, published: Mapping[int, Sequence[float]] = MappingProxyType({})
) -> list[str]:
    """Return ``grid`` as lines."""
    return grid_lines(grid(facts, published))


def grid(facts: Mapping[str, Any] | None, published: Mapping[int, Sequence[float]] = MappingProxyType({})) -> Grid:
    """Return lengths by stages in percent of K, with chance and the agreement beyond it.

    Args:
        facts: the result of ``measure``.
        published: the paper's percentages of each stage, by length; each stands below the row of its length.
    """
    if facts is None:
        return [["overlap with the encoder: none, for the stages or the encoder select nothing"]]
    rows = []
    for row in facts["by_length"]:
        rows.append(
            [f"{row['length']:,} tokens", *("-" if value is None else f"{100 * value:.1f}" for value in row["stages"])]
        )
        if (by_chance := row.get("chance")) is not None and not facts.get("by_construction"):
            beyond = [
                "-" if value is None else f"{(value - by_chance) / (1 - by_chance):.3f}" for value in row["stages"]
            ]
            rows.append([f"chance {100 * by_chance:.1f}, beyond it", *beyond])
        if percentages := published.get(row["length"]):
            rows.append(["the paper, 0.5B GSM", *(f"{value:.1f}" for value in percentages)])
    if facts.get("by_construction"):
        rows.append(["by construction: the stages read the encoder's selection"])
    width = max(map(len, rows), default=1)
    head = ["overlap with the encoder, %", *(f"stage {stage}" for stage in range(1, width))]
    return [head, *(row + [""] * (width - len(row)) for row in rows)]
