"""What a file of `benchmark=kernels` says: a line as a row is measured, the table with goals, the roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from . import results
from .results import Row, quartiles, rate, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEAD = ("operation", "direction", "ran", "ms (quartiles)", "timed by", "of the floor", "rate", "faster than", "goals")


class Goal(NamedTuple):
    """A row must, or is to, reach `least` against `peer`: how many times faster; with the peer `floor`, which share of
    it; with `memory`, how many MiB it may hold at most besides inputs and outputs."""

    level: Literal["must", "aim"]
    least: float
    peer: str

    def __str__(self) -> str:
        wanted = {"floor": f"{self.least:.0%} of the floor", "memory": f"at most {self.least:g} MiB more"}
        return f"{self.level} {wanted.get(self.peer, f'{self.least:g} x {self.peer}')}"


must, aim = partial(Goal, "must"), partial(Goal, "aim")
# Peers that can run wherever PyTorch does, beside Liger's and flash-linear-attention's kernels, which are wheels of
# Python alone. Two that were named at first cannot: TileLang's sparse attention is an example in its repository and no
# function of a package, and Transformer Engine's hyper-connections take their coefficients from another site. Where
# they stood, with the same numbers:
#   attend backward, 2 x TileLang         2 x gathered SDPA, the other attention to single picked entries; fla 0.6
#                                         picks blocks (nsa), or single ones in a reference with dense logits (dsa)
#   attend forward, 1.5 x TileLang        nothing: 3 x gathered SDPA is asked already
#   mhc_boundary, 1.2 and 1.5 x TE        Liger's, the same function; and 1.2 x torch.compile of the reference
GOALS: Mapping[str, Sequence[Goal]] = {
    "attend 4 x 4K, forward": [must(1.0, "best peer")],
    "attend 4 x 4K, backward": [must(1.0, "best peer")],
    "attend 64K, forward": [must(3.0, "sdpa, gathered"), must(3.0, "eager"), aim(0.40, "floor")],
    "attend 64K, backward": [must(2.0, "sdpa, gathered"), aim(0.28, "floor")],
    "attend_band 64K, forward": [must(1.2, "flex"), aim(1.0, "flash-attn 4"), aim(0.55, "floor")],
    "attend_band 64K, backward": [must(1.2, "flex"), aim(0.9, "flash-attn 4"), aim(0.40, "floor")],
    "index_top_k 4 x 4K, forward": [must(1.0, "eager")],
    "index_top_k 64K, forward": [must(4.0, "eager"), aim(8.0, "eager"), aim(0.35, "floor")],
    "index_top_k 256K, forward": [must(64.0, "memory"), aim(0.40, "floor")],
    "rms_norm 16K, forward": [must(1.0, "compile"), aim(1.2, "liger"), aim(0.90, "floor")],
    "rms_norm 16K, backward": [must(1.0, "compile"), aim(1.2, "liger"), aim(0.80, "floor")],
    "swiglu 16K, forward": [must(1.0, "compile"), aim(0.90, "floor")],
    "swiglu 16K, backward": [must(1.0, "compile"), aim(0.80, "floor")],
    **{
        f"mhc_boundary 16K, {direction}": [
            must(10.0, "eager"), must(1.2, "compile"), must(1.2, "liger"), aim(1.5, "liger"), aim(share, "floor"),
        ]
        for direction, share in (("forward", 0.85), ("backward", 0.75))
    },
    "linear_cross_entropy 16K, both": [must(3.0, "liger"), aim(5.0, "liger"), aim(0.9, "quack"), aim(0.80, "floor")],
    "attend 16K, forward": [must(5.0, "dense mask")],
    "attend_band 16K, forward": [must(5.0, "dense mask")],
}  # fmt: skip


def verdicts(row: Row) -> list[str]:
    """A line for each goal of a row: what was measured, and whether that is enough."""
    lines = []
    for goal in GOALS.get(f"{row['case']}, {row['direction']}", ()):
        found, unit = _measured(goal, row), {"floor": ".0%", "memory": ".0f"}.get(goal.peer, ".2f")
        shown = None if found is None else f"{found:{unit}}" + {"floor": "", "memory": " MiB"}.get(goal.peer, " x")
        met = found is not None and (found <= goal.least if goal.peer == "memory" else found >= goal.least)
        lines.append(results.verdict(str(goal), shown, met))
    return lines


def _measured(goal: Goal, row: Row) -> float | None:
    if goal.peer in ("floor", "memory"):
        return row["share_of_floor" if goal.peer == "floor" else "extra_mib"]
    ratios = {name: peer["ratio"] for name, peer in row["peers"].items() if "ratio" in peer}
    return min(ratios.values(), default=None) if goal.peer == "best peer" else ratios.get(goal.peer)


def line(row: Row) -> str:
    """One row in one line."""
    if row.get("failed"):
        return f"{row['case']}, {row['direction']}: failed: {row['failed']}"
    against = f"; {_ratios(row)}" if row["peers"] or row.get("unfinished") else ""
    ran = f"{row['case']}, {row['direction']} ({row['implementation']})"
    return f"{ran}: {quartiles(row['ms'])} ms, {_share(row)}{against}"


def show(path: Path) -> Path:
    """Publish a file of results: its table, with what it was measured on, and the roofline. Raises ValueError for a
    file of another benchmark."""
    content = results.read(path)
    rows = [row for row in content["rows"].values() if "case" in row]
    if content["rows"] and not rows:
        raise ValueError(f"{path} is a file of another benchmark: no row of it has a case")
    absent = {f"* {name}: {peer['absent']}" for r in rows for name, peer in r["peers"].items() if "absent" in peer}
    left_out = "\n\nTook no part somewhere:\n\n" + "\n".join(sorted(absent)) if absent else ""
    text = table(HEAD, map(_cells, rows)) + left_out
    return results.publish(path, _measured_on(content, rows), text, picture=lambda: roofline(rows))


def _measured_on(content: Mapping[str, Any], rows: Sequence[Row]) -> str:
    sentences = [results.measured_on(content)]
    if content.get("driver"):
        sentences.append(f"Driver {content['driver']}, CUDA {content['cuda']}.")
    if rows:
        roof = rows[-1]["ceilings"]
        products, copies = rate(roof["flops"], "FLOP/s"), rate(roof["bytes"], "B/s")
        sentences.append(f"Ceilings: {products} in {roof['dtype']}, {copies} copied.")
    drawn = [row["clocks"] for row in rows if row.get("clocks")]
    if drawn:
        clocks, power = [d["sm_mhz"] for d in drawn], [d["power_w"] for d in drawn]
        sentences.append(f"SM clocks {min(clocks):g} to {max(clocks):g} MHz, {min(power):g} to {max(power):g} W.")
    return " ".join(sentences)


def _cells(row: Row) -> tuple[str, ...]:
    ran, goals = (row["case"], row["direction"], row["implementation"]), "; ".join(verdicts(row))
    if row.get("failed"):
        return *ran, f"failed: {row['failed']}", "", "", "", "", goals
    seconds = row["ms"]["median"] / 1e3
    rates = f"{rate(row['flops'] / seconds, 'FLOP/s')}, {rate(row['bytes'] / seconds, 'B/s')}"
    return *ran, quartiles(row["ms"]), _how(row), _share(row), rates, _ratios(row), goals


def _how(row: Row) -> str:
    """How a row or a peer was timed, and how long the host takes to launch it."""
    host = row.get("host_ms")
    return row.get("timed", "") + (f", launched in {host:.2g} ms" if host is not None else "")


def _share(row: Row) -> str:
    return f"{row['share_of_floor']:.0%} of {row['floor_ms']:.3g} ms"


def _ratios(row: Row) -> str:
    """How many times as long the peers take; of those that are not timed as most are, how they were."""
    if row.get("unfinished"):
        return f"measured alone, since with its peers: {row['unfinished']}"
    if row.get("alone"):
        return "measured alone so far"
    ratios = [(f"{name} {peer['ratio']:.2f} x", peer) for name, peer in row["peers"].items() if "ratio" in peer]
    return ", ".join(
        f"{words} ({_how(peer)})" if peer.get("timed") in ("replay", "long pause") else words for words, peer in ratios
    )


def roofline(rows: Sequence[Row]) -> bytes:
    """A PNG of two panels: FLOP/s over FLOPs per byte, and every row's share of its floor with the goal for it.

    Raises ValueError where nothing was measured, ImportError if matplotlib is missing.
    """
    from gsm.evaluation import plots

    rows = [row for row in rows if row.get("ms")]
    if not rows:
        raise ValueError("no row was measured, and so there is no picture")
    figure, (under, shares) = plots.figure(columns=2, width=5.2, height=max(2.8, 0.22 * len(rows) + 1))
    _roof(under, [row for row in rows if row["flops"]], rows[-1]["ceilings"])
    shares.barh(
        [f"{row['case']}, {row['direction']}" for row in rows],
        [100 * row["share_of_floor"] for row in rows],
        color=plots.COLOURS[0],
        height=0.6,
    )
    for place, row in enumerate(rows):
        for goal in GOALS.get(f"{row['case']}, {row['direction']}", ()):
            if goal.peer == "floor":
                shares.plot([100 * goal.least] * 2, [place - 0.4, place + 0.4], color=plots.COLOURS[1], linewidth=2)
    shares.invert_yaxis()
    shares.set(xlim=(0, 100), xlabel="share of the floor (%), and the goal")
    shares.tick_params(axis="y", labelsize=7)
    return plots.png(figure)


def _roof(axes: Axes, rows: Sequence[Row], ceilings: Mapping[str, float]) -> None:
    from gsm.evaluation import plots

    styles = plots.styles(row["case"].partition(" ")[0] for row in rows)
    ridge = ceilings["flops"] / ceilings["bytes"]
    reach = [row["flops"] / row["bytes"] for row in rows] + [ridge]
    low, high = min(reach) / 2, max(reach) * 2
    axes.plot([low, ridge, high], [low * ceilings["bytes"] / 1e12, *[ceilings["flops"] / 1e12] * 2], "-k", linewidth=1)
    for row, intensity in zip(rows, reach, strict=False):
        style = styles[row["case"].partition(" ")[0]]
        face = "none" if row["direction"] == "backward" else style.colour
        speed = row["flops"] / row["ms"]["median"] / 1e9
        axes.plot(intensity, speed, style.marker, color=style.colour, markerfacecolor=face)
    for name, style in styles.items():
        axes.plot([], [], style.marker, color=style.colour, label=name)
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte", ylabel="TFLOP/s (open: backward)")
    axes.legend(fontsize=7, frameon=False)
