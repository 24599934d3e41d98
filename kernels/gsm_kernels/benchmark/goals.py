"""What the operations are to reach, and whether they did.

A ratio is that of times in one run on one device: how many times faster than a peer. A share is that of the floor: the
time that FLOPs and bytes would take at the device's measured ceilings, over the time that was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple


class Goal(NamedTuple):
    """A row is to reach `least` against `peer`: how many times faster; with the peer `floor`, which share of it; with
    `memory`, how many MiB it may hold at most besides inputs and outputs."""

    case: str
    direction: str
    peer: str
    least: float
    level: Literal["must", "aim"]


# Peers that can run wherever PyTorch does, beside Liger's and flash-linear-attention's kernels, which are wheels of
# Python alone. Two that were named at first cannot: TileLang's sparse attention is an example in its repository and no
# function of a package, and Transformer Engine's hyper-connections take their coefficients from another site. Where
# they stood, with the same numbers:
#   attend backward, 2 x TileLang         2 x gathered SDPA, the other attention to single picked entries; fla 0.6
#                                         picks blocks (nsa), or single ones in a reference with dense logits (dsa)
#   attend forward, 1.5 x TileLang        nothing: 3 x gathered SDPA is asked already
#   mhc_boundary, 1.2 and 1.5 x TE        Liger's, the same function; and 1.2 x torch.compile of the reference
GOALS = (
    Goal("attend 4 x 4K", "forward", "best peer", 1.0, "must"),
    Goal("attend 4 x 4K", "backward", "best peer", 1.0, "must"),
    Goal("attend 64K", "forward", "sdpa, gathered", 3.0, "must"),
    Goal("attend 64K", "forward", "eager", 3.0, "must"),
    Goal("attend 64K", "forward", "floor", 0.40, "aim"),
    Goal("attend 64K", "backward", "sdpa, gathered", 2.0, "must"),
    Goal("attend 64K", "backward", "floor", 0.28, "aim"),
    Goal("attend_band 64K", "forward", "flex", 1.2, "must"),
    Goal("attend_band 64K", "forward", "flash-attn 4", 1.0, "aim"),
    Goal("attend_band 64K", "forward", "floor", 0.55, "aim"),
    Goal("attend_band 64K", "backward", "flex", 1.2, "must"),
    Goal("attend_band 64K", "backward", "flash-attn 4", 0.9, "aim"),
    Goal("attend_band 64K", "backward", "floor", 0.40, "aim"),
    Goal("index_top_k 4 x 4K", "forward", "eager", 1.0, "must"),
    Goal("index_top_k 64K", "forward", "eager", 4.0, "must"),
    Goal("index_top_k 64K", "forward", "eager", 8.0, "aim"),
    Goal("index_top_k 64K", "forward", "floor", 0.35, "aim"),
    Goal("index_top_k 256K", "forward", "memory", 64.0, "must"),
    Goal("index_top_k 256K", "forward", "floor", 0.40, "aim"),
    Goal("rms_norm 16K", "forward", "compile", 1.0, "must"),
    Goal("rms_norm 16K", "forward", "liger", 1.2, "aim"),
    Goal("rms_norm 16K", "forward", "floor", 0.90, "aim"),
    Goal("rms_norm 16K", "backward", "compile", 1.0, "must"),
    Goal("rms_norm 16K", "backward", "liger", 1.2, "aim"),
    Goal("rms_norm 16K", "backward", "floor", 0.80, "aim"),
    Goal("swiglu 16K", "forward", "compile", 1.0, "must"),
    Goal("swiglu 16K", "forward", "floor", 0.90, "aim"),
    Goal("swiglu 16K", "backward", "compile", 1.0, "must"),
    Goal("swiglu 16K", "backward", "floor", 0.80, "aim"),
    Goal("mhc_boundary 16K", "forward", "eager", 10.0, "must"),
    Goal("mhc_boundary 16K", "forward", "compile", 1.2, "must"),
    Goal("mhc_boundary 16K", "forward", "liger", 1.2, "must"),
    Goal("mhc_boundary 16K", "forward", "liger", 1.5, "aim"),
    Goal("mhc_boundary 16K", "forward", "floor", 0.85, "aim"),
    Goal("mhc_boundary 16K", "backward", "eager", 10.0, "must"),
    Goal("mhc_boundary 16K", "backward", "compile", 1.2, "must"),
    Goal("mhc_boundary 16K", "backward", "liger", 1.2, "must"),
    Goal("mhc_boundary 16K", "backward", "liger", 1.5, "aim"),
    Goal("mhc_boundary 16K", "backward", "floor", 0.75, "aim"),
    Goal("linear_cross_entropy 16K", "both", "liger", 3.0, "must"),
    Goal("linear_cross_entropy 16K", "both", "liger", 5.0, "aim"),
    Goal("linear_cross_entropy 16K", "both", "quack", 0.9, "aim"),
    Goal("linear_cross_entropy 16K", "both", "floor", 0.80, "aim"),
    Goal("attend 16K", "forward", "dense mask", 5.0, "must"),
    Goal("attend_band 16K", "forward", "dense mask", 5.0, "must"),
)


def goals_of(row: Mapping[str, Any]) -> list[Goal]:
    """The goals set for a row."""
    return [goal for goal in GOALS if (goal.case, goal.direction) == (row["case"], row["direction"])]


def measured(goal: Goal, row: Mapping[str, Any]) -> float | None:
    """What a row shows of a goal; None if it was not measured."""
    if goal.peer == "floor":
        return row["share_of_floor"]
    if goal.peer == "memory":
        return row["extra_mib"]
    ratios = {name: peer["ratio"] for name, peer in row["peers"].items() if "ratio" in peer}
    return min(ratios.values(), default=None) if goal.peer == "best peer" else ratios.get(goal.peer)


def verdict(goal: Goal, row: Mapping[str, Any]) -> str:
    """One line: the goal, what was measured, and whether that is enough."""
    found = measured(goal, row)
    if goal.peer == "floor":
        wanted, shown = f"{goal.least:.0%} of the floor", f"{found:.0%}" if found is not None else ""
    elif goal.peer == "memory":
        wanted, shown = f"at most {goal.least:g} MiB more", f"{found:.0f} MiB" if found is not None else ""
    else:
        wanted, shown = f"{goal.least:g} x {goal.peer}", f"{found:.2f} x" if found is not None else ""
    if found is None:
        return f"{goal.level} {wanted}: not measured"
    met = found <= goal.least if goal.peer == "memory" else found >= goal.least
    return f"{goal.level} {wanted}: {shown}, {'met' if met else 'missed'}"
