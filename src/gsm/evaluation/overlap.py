"""How much of what the aggregation stages select the encoder selects too (paper, section 4.4.1 and the appendix on the
retrieval ablation).

Overlap is the number of bank entries that a stage and its encoder layer have both selected, divided by K: a mean over
the queries that see more than K entries, since the others have nothing to choose.

B sequences, T positions, R rows, K slots that a layer selects, J those that a stage selects, N queries of all
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gsm.evaluation import paper
from gsm.models.base import LanguageModel
from gsm.models.gsm import GSM
from gsm.observe import Seen, record
from gsm.shapes import last

CHUNK = 4096  # tokens of a sequence read at a time
AT_ONCE = 16384  # tokens of all sequences read at a time
SEQUENCES = 16  # of each length, unless told
TAPS = ("position", "encoder/*/top_k", "stage/*/top_k")


def selects_for_itself(model: LanguageModel) -> bool:
    """Whether there are stages that do not follow the encoder, and an encoder that selects too."""
    if not isinstance(model, GSM) or all(stage.retriever.follows_encoder for stage in model.aggregation):
        return False
    return any(getattr(block.attention, "indexer", None) is not None for block in model.encoder)


def measure(
    model: LanguageModel,
    sequences: Callable[[int], Sequence[Mapping[str, Tensor]]],
    context: int,
    lengths: Sequence[int] = (),
) -> dict[str, Any] | None:
    """Overlap by stage at each of the lengths; without any, at a quarter of the context, half of it, all and twice it.

    Args:
        model: the model; other models than GSM, and stages or encoders that select nothing, have no overlap.
        sequences: makes those of a length: ``tokens`` and ``documents``, int64 [T] each; raises ValueError where there
            are none so long or so short.
        context: the length that the model was trained with, in tokens.
        lengths: in tokens; that there are sequences of all of them is then insisted on.

    Returns:
        ``mean`` over the stages at ``context`` (None where that is not among the lengths), and ``by_length``:
        ``length``, ``queries`` that were counted and ``stages``, the means in order, None where no query sees more
        than K entries; where all stages take the selection over, also ``by_construction``: true. None if there is no
        overlap.
    """
    rows = []
    for length in sorted(set(lengths) or {max(1, context // 4), max(1, context // 2), context, 2 * context}):
        try:
            found = sequences(length)
        except ValueError:  # too long for the text that there is, or too short for the task
            if lengths:
                raise
            continue
        stages = overlaps(model, found)
        if not stages:
            return None
        means = [float(one_N.mean()) if len(one_N) else None for one_N in stages.values()]
        rows.append({"length": length, "queries": max(map(len, stages.values())), "stages": means})
    whole = [value for row in rows if row["length"] == context for value in row["stages"] if value is not None]
    taken_over = {} if selects_for_itself(model) else {"by_construction": True}
    return {"mean": sum(whole) / len(whole) if whole else None, "context": context, "by_length": rows, **taken_over}


@torch.no_grad()
def overlaps(model: LanguageModel, sequences: Sequence[Mapping[str, Tensor]]) -> dict[int, Tensor]:
    """Overlap of every query that counts, by stage: float32 [N], on the CPU. Empty if there is nothing to compare.

    Sequences are read in chunks, as a long prompt is; the model is left in the mode that it was in.

    Args:
        model: the model.
        sequences: ``tokens`` and ``documents``, int64 [T] each, of one length.
    """
    if not isinstance(model, GSM):
        return {}
    found: dict[int, list[Tensor]] = {}
    with model.evaluating():
        for seen in _recordings(model, sequences):
            for stage, one_N in overlaps_seen(model, seen).items():
                found.setdefault(stage, []).append(one_N.cpu())
    return {stage: torch.cat(parts) for stage, parts in sorted(found.items())}


def overlaps_seen(model: GSM, seen: Seen) -> dict[int, Tensor]:
    """The same of one recorded call: stage s against the encoder layer that it stands on."""
    geometry, found = model.geometry, {}
    for stage, layer in enumerate(model.aggregation.layers, 1):
        own_BRJ, theirs_BTK = seen.get(f"stage/{stage}/top_k"), seen.get(f"encoder/{layer}/top_k")
        if own_BRJ is None or theirs_BTK is None:
            continue
        rows = own_BRJ.shape[1]
        visible_BR = (last(seen["position"], rows) + 1) // geometry.encoder_ratio
        count_BR = shared_slots(own_BRJ, last(theirs_BTK, rows))
        found[stage] = count_BR[visible_BR > geometry.top_k].float() / geometry.top_k
    return found


def shared_slots(own_BRJ: Tensor, theirs_BRK: Tensor) -> Tensor:
    """How many slots two selections have in common, int64 [B, R]; -1 is no slot. Needs no [J, K] for a row."""
    if not theirs_BRK.shape[-1]:
        return own_BRJ.new_zeros(own_BRJ.shape[:-1])
    sorted_BRK = theirs_BRK.sort(dim=-1).values
    place_BRJ = torch.searchsorted(sorted_BRK, own_BRJ.contiguous()).clamp(max=sorted_BRK.shape[-1] - 1)
    return ((sorted_BRK.gather(-1, place_BRJ) == own_BRJ) & (own_BRJ >= 0)).sum(dim=-1)


def _recordings(model: GSM, sequences: Sequence[Mapping[str, Tensor]]) -> Iterator[Seen]:
    """What was selected in every chunk of all sequences."""
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
            with record(*TAPS) as seen:  # not __call__: a compiled model would be compiled anew to listen
                memory = model.forward(tokens, documents=documents, memory=memory).memory
            yield seen


def table(facts: Mapping[str, Any] | None) -> list[str]:
    """Lengths by stages, in percent of K, as lines; below each length that the paper has too, its own row."""
    if facts is None:
        return ["  overlap with the encoder: none, for the stages or the encoder select nothing"]
    rows, published = facts["by_length"], paper.tables()["overlap"]["by_length"]
    stages = range(1, max((len(row["stages"]) for row in rows), default=0) + 1)
    lines = [f"  {'overlap with the encoder, %':<30}" + "".join(f"{f'stage {stage}':>9}" for stage in stages)]
    for row in rows:
        cells = ["-" if value is None else f"{100 * value:.1f}" for value in row["stages"]]
        lines.append(f"  {row['length']:>10,} tokens" + " " * 13 + "".join(f"{cell:>9}" for cell in cells))
        if theirs := published.get(row["length"]):
            lines.append(f"  {'the paper, 0.5B GSM':>30}" + "".join(f"{cell:>9.1f}" for cell in theirs))
    if facts.get("by_construction"):
        lines.append("  100 % by construction: these stages read what the encoder has selected, and select nothing")
    return lines
