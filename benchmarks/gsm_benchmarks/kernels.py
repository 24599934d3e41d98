"""One row for every operation and direction: its time, its share of the floor, and other implementations in turns.

On a GPU at the sizes of real models; on a CPU the attention of small models, forward.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gsm_kernels
from gsm_kernels.dispatch import listening

from . import machine, peers, results, timing
from .peers import NO_SINK, Absent
from .results import Asked, Row, quartiles, rate, read, sentence, table
from .workloads import Call, Case, bound, difference, gates, on_a_cpu

OURS = "ours"
# Relative error in bfloat16 beyond which a peer computes something else; gradients pass through a rounded result.
TOLERANCE = {"forward": 2e-2, "backward": 5e-2, "both": 5e-2}
# Seconds before a row is timed, by estimate, since no GPU has been measured: our kernels compile, and all others do.
COMPILING, OTHERS = 10, 60
HEAD = ("operation", "direction", "ran", "ms (quartiles)", "of the floor", "rate", "more memory, MiB", "faster than")


def run(
    only: str = "",
    peers: bool = True,
    seconds: float = 10.0,
    rounds: int = 30,
    cases: Sequence[Case] | None = None,
    **asked: Any,
) -> Path:
    """Measure, writing each row as it is known, then print the table and draw the picture; return the JSON file.

    Args: as in configs/benchmark/kernels.yaml and configs/benchmark.yaml, and `cases` (None: those of the device).

    Raises:
        ValueError: there is no such device or case, or the file does not hold results.
        Exception: the first that a row raised, once the other rows were measured.
    """
    how = Asked(**asked)
    if how.results:
        return show(Path(how.results))
    where = machine.chosen(how.device)
    cases = cases if cases is not None else gates() if where.type == "cuda" else on_a_cpu()
    wanted = [case for case in cases if case.name.startswith(only)]
    if not wanted:
        raise ValueError(f"only must begin a case, one of {', '.join(c.name for c in cases)}, got {only}")
    roof = functools.cache(lambda: timing.ceilings(where))
    rows = {}
    for case in wanted:
        for direction in case.work:
            about = {"case": case.name, "direction": direction}
            measured = partial(measure, case, direction, where, roof, peers, rounds, seconds)
            rows[f"{case.name}, {direction}"] = about, measured
    minutes = len(rows) * (seconds + COMPILING + OTHERS * peers) / 60
    print(f"{len(rows)} rows of {len(wanted)} cases on {machine.name(where)}: about {minutes:.0f} minutes", flush=True)
    protocol = {"peers": peers, "rounds": rounds, "seconds": seconds}
    return how.open("kernels", where).fill(rows, protocol, show=show)


def measure(
    case: Case,
    direction: str,
    device: torch.device,
    roof: Callable[[], timing.Ceilings],
    with_peers: bool = True,
    rounds: int = 30,
    seconds: float = 10.0,
) -> dict[str, Any]:
    """Return the row of one case in one direction, as plain containers."""
    gc.collect()  # the memory of the row before
    torch.manual_seed(0)
    torch.compiler.reset()  # it compiles a function a few times only
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    call, (flops, moved) = case.make(device, dtype), case.work[direction].at(dtype)
    with listening() as heard:
        ours = bound(getattr(gsm_kernels, case.op), call, direction)
        expected = _compared(ours(), direction)
    chosen = heard[0][1]
    runs: dict[str, Callable[[], Call]] = {OURS: ours}
    absent: dict[str, str] = {}
    makers = peers.peers_of(case.op, call) if with_peers else {}
    for name, maker in makers.items():
        if name == "eager" and chosen == "reference":
            continue
        try:
            runs[name] = _peer(name, maker, call, direction, expected)
        except Exception as error:  # any error of another implementation or of a compiler is a result
            absent[name] = str(error) if isinstance(error, Absent) else sentence(error)
            if device.type == "cuda":
                torch.cuda.synchronize()
    times = timing.measured(runs, device, rounds, seconds)
    mine = times.pop(OURS)
    median = mine["ms"]["median"]
    compared = {name: {**row, "ratio": row["ms"]["median"] / median} for name, row in times.items()}
    floor = roof().floor(flops, moved)
    return {
        "flops": flops,
        "bytes": moved,
        "floor_ms": floor,
        "ceilings": roof()._asdict(),
        "implementation": chosen,
        **mine,
        "share_of_floor": floor / median,
        "peers": compared | {name: {"absent": reason} for name, reason in absent.items()},
    }


def _peer(name: str, maker: peers.Maker, call: Call, direction: str, expected: list[Tensor]) -> Callable[[], Call]:
    """Return the run of a peer, once its results were compared with ours. Raises Absent where they differ."""
    run = bound(maker(call), call, direction)
    error = difference(_compared(run(), direction), expected)
    if error > TOLERANCE[direction] and NO_SINK not in name:
        raise Absent(f"its result differs by {error:.1e}")
    return run


def _compared(results: Call, direction: str) -> list[Tensor]:
    """Return the outputs of a forward pass alone, else the gradients."""
    return [x for name, x in results.items() if direction == "forward" or name.startswith("d ")]


def show(path: Path) -> Path:
    """Publish a file of results: its table and a picture. Raises ValueError for a file of another benchmark."""
    content = read(path, "case")
    rows = [row for row in content["rows"].values() if "case" in row]
    measured = [row for row in rows if not row.get("failed")]
    absent = {f"* {name}: {peer['absent']}" for r in measured for name, peer in r["peers"].items() if "absent" in peer}
    left_out = "Took no part somewhere:\n\n" + "\n".join(sorted(absent)) if absent else ""
    return results.publish(
        path,
        _measured_on(content, measured),
        table(HEAD, map(_cells, rows)),
        left_out,
        pictures={"": lambda: shares(measured)},
    )


def _measured_on(content: Mapping[str, Any], rows: Sequence[Row]) -> str:
    sentences = [results.measured_on(content)]
    if content.get("driver"):
        sentences.append(f"Driver {content['driver']}, CUDA {content['cuda']}.")
    if rows:
        roof = rows[-1]["ceilings"]
        products, copies = rate(roof["flops"], "FLOP/s"), rate(roof["bytes"], "B/s")
        sentences.append(f"Ceilings: {products} in {roof['dtype']}, {copies} copied.")
    return " ".join(sentences)


def _cells(row: Row) -> tuple[str, ...]:
    if row.get("failed"):
        return row["case"], row["direction"], "none", f"failed: {row['failed']}"
    seconds = row["ms"]["median"] / 1e3
    rates = f"{rate(row['flops'] / seconds, 'FLOP/s')}, {rate(row['bytes'] / seconds, 'B/s')}"
    extra = "" if row.get("extra_mib") is None else f"{row['extra_mib']:.0f}"
    share = f"{row['share_of_floor']:.0%} of {row['floor_ms']:.3g} ms"
    ratios = ", ".join(f"{name} {peer['ratio']:.2f} x" for name, peer in row["peers"].items() if "ratio" in peer)
    ran = row["case"], row["direction"], row["implementation"]
    return *ran, quartiles(row["ms"]), share, rates, extra, ratios


def shares(rows: Sequence[Row]) -> bytes:
    """Return a PNG with the share of its floor that every row reaches.

    Raises ValueError where nothing was measured, ImportError if matplotlib is missing.
    """
    from gsm import plots

    if not rows:
        raise ValueError("no row was measured, and so there is no picture")
    figure, (axes,) = plots.figure(columns=1, width=5.2, height=max(2.8, 0.22 * len(rows) + 1))
    names = [f"{row['case']}, {row['direction']}" for row in rows]
    axes.barh(names, [100 * row["share_of_floor"] for row in rows], color=plots.COLOURS[0], height=0.6)
    axes.invert_yaxis()
    axes.set(xlim=(0, 100), xlabel="share of the floor (%)")
    axes.tick_params(axis="y", labelsize=7)
    return plots.png(figure)
