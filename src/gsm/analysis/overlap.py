"""The overlap of the bank entries that the aggregation stages and the encoder select (paper, section 4.4.1 and the
appendix on the retrieval ablation).

Overlap is the number of bank entries that both a stage and its encoder layer select, divided by K: the mean over the
queries that see more than K entries. (The others select all that they see.) Two independent selections of K out of v
visible entries overlap by K / v on average. `chance` is the mean of K / v over the same queries; it falls with the
length. (overlap - chance) / (1 - chance) is the agreement beyond chance.

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
    """Return whether the model has stages that make their own selection, and an encoder that selects entries too."""
    if not isinstance(model, GSM) or all(stage.retriever.follows_encoder for stage in model.aggregation):
        return False
    return any(getattr(block.attention, "indexer", None) is not None for block in model.encoder)


def measure(
    model: LanguageModel,
    sequences: Callable[[int], Sequence[Mapping[str, Tensor]]],
    context: int,
    lengths: Sequence[int] = (),
) -> dict[str, Any] | None:
    """Measure the overlap of each stage at several lengths.

    Args:
        model: any model. The overlap is defined only for a GSM whose stages and encoder both select entries.
        sequences: returns sequences of a length in tokens, each with ``tokens`` and ``documents``, int64 [T]; raises
            ValueError if there are none of this length.
        context: length of the training sequences in tokens.
        lengths: lengths in tokens, all of which need sequences; empty: 1/4, 1/2, 1 and 2 times the context, if there
            are sequences of these lengths.

    Returns:
        A dict, or None if there is no overlap to measure:
        ``mean``, the mean over stages, and ``chance``, both at ``context`` (None if this is not among the lengths);
        ``by_length``, a list of dicts with ``length``, the number of ``queries``, ``chance``, and ``stages``, the
        overlap of each stage (None if no query sees more than K entries);
        ``context``; ``by_construction``, true if all stages share the encoder's selection.
    """
    rows = []
    for length in sorted(set(lengths) or around(context)):
        try:
            batches = sequences(length)
        except ValueError:  # longer than the text, or too short for the task
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
    """Return 1/4, 1/2, 1 and 2 times the context."""
    return {max(1, context // 4), max(1, context // 2), context, 2 * context}


def records(model: LanguageModel, sequences: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Any]]:
    """Return the overlap on sequences of one length as records, one for each stage and one for chance.

    ``value`` is a sum over queries and ``weight`` their number. If all stages share the encoder's selection, the
    records of stages have ``by_construction``: true. There are no records if no query sees more than K entries.
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
    """Return the mean of K / v over the queries that see v > K bank entries; None if there are none."""
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
    """Return, by stage, the overlap of every query that sees more than K entries, float32 [N] on the CPU. The dict is
    empty if there is no overlap to measure.

    Sequences are read in chunks, as a prompt is. The training mode of the model is not changed.

    Args:
        model: any model.
        sequences: sequences of one length, each with ``tokens`` and ``documents``, int64 [T].
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
    """Return ``overlaps`` for one recorded call: each stage compared with its encoder layer."""
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
    """Return the number of slots that two selections have in common, int64 [B, R]; -1 is no slot. Does not compare all
    J x K pairs."""
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
            with record(*TAPS) as seen:  # forward: __call__ of a compiled model would be compiled again for recording
                memory = model.forward(tokens, documents=documents, memory=memory).memory
            yield seen


def table(
    facts: Mapping[str, Any] | None, published: Mapping[int, Sequence[float]] = MappingProxyType({})
) -> list[str]:
    """Return the table ``grid`` as lines of text."""
    return grid_lines(grid(facts, published))


def grid(facts: Mapping[str, Any] | None, published: Mapping[int, Sequence[float]] = MappingProxyType({})) -> Grid:
    """Return a table with a row for each length and a column for each stage: the overlap in percent of K, with chance
    and the agreement beyond it.

    Args:
        facts: the result of ``measure``.
        published: by length, the paper's percentages of each stage, for a row below that of the same length.
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
