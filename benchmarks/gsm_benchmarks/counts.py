"""What every kernel is asked for, counted without a GPU, and how long that should take on a Hopper: predicted before
anything is measured, so that a prediction can be wrong.

Each call at the size of its goal is counted in Triton's interpreter (`counting.py`, a process each), and its kernels
are compiled for sm_90 (`build.py`), which says how many programs share a multiprocessor. A kernel then takes

    max(t) + (sum(t) - max(t)) / programs that share a multiprocessor + a launch

of the times t that its products, its bytes through the second-level cache, those of memory, its arithmetic and the
steps of its reductions take at the device's rates. All but the bytes are slower by as much as the last round of
programs leaves free: one program alone waits for everything it asks for, several hide each other's waiting. The rates
are `ASSUMED` until `benchmark=smoke` has measured them on a GPU (`rates=FILE`); its ceilings, a large product of
matrices and a copy, then also make the floor, as they do in `benchmark=kernels`. With `measured=FILE`, a file of
`benchmark=kernels` or of `smoke`, each prediction stands beside what was measured.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from . import counting, kernels_report, machine, results
from .build import requests, target, used
from .results import Asked, Row, read, sentence, table
from .smoke import Piece, pieces

CAPABILITY, PROCESSORS = 90, 132
REGISTERS, SHARED, THREADS, BLOCKS = 65536, 228 << 10, 2048, 32  # of a multiprocessor
RESERVED = 1024  # bytes of shared memory that every program takes besides its own
MINUTES = 20.0
OFF = 1.5  # times too long or too short is a prediction that has to be explained
HEAD = (
    "call", "kernel", "launches", "programs", "executed / useful FLOPs", "through L2, memory", "registers", "shared",
    "programs an SM", "bound by", "predicted ms",
)  # fmt: skip
SUMMARY = ("call", "launches", "FLOPs", "bytes", "predicted ms", "floor ms", "of the floor", "goal", "measured ms")


@dataclass(frozen=True)
class Rates:
    """What a device does: FLOP/s in 16 bits of our own kernels with wgmma and with mma, in TF32 half of that, without
    matrix units `fma`, and of a large `product` in the BLAS; bytes/s of memory and of the second-level cache; results
    of arithmetic a second; seconds of a launch, and of a step of a reduction. `source` says where they are from."""

    wgmma: float
    mma: float
    fma: float
    product: float
    memory: float
    cache: float
    numbers: float
    launch: float
    step: float
    source: str


# An H100 SXM: four fifths of the data sheet's 989 TFLOP/s and 67 TFLOP/s, nine tenths of its 3.35 TB/s. That mma
# reaches 62 % of wgmma, 5.5 TB/s of the cache and 1.3 us a launch in a graph are what others have measured; 128 lanes
# of 132 multiprocessors at 1.7 GHz; a step of a reduction is a shuffle and an addition that waits for it, 24 clocks.
ASSUMED = Rates(790e12, 490e12, 54e12, 790e12, 3.0e12, 5.5e12, 2.9e13, 1.3e-6, 14e-9, "assumed")


def run(output: str = "", results: str = "", only: str = "", rates: str = "", measured: str = "", **asked: Any) -> Path:
    """Count what is missing, predict, print the tables and write them beside the JSON file; return that file.

    Args: as in configs/benchmark/counts.yaml and configs/benchmark.yaml, which say what they mean.

    Raises:
        ValueError: Triton is not installed or runs in its interpreter, or there is no such call.
        Exception: the first that a call raised, once the others were counted.
    """
    show = lambda path: publish(path, rates, measured)  # noqa: E731
    if results:
        return show(Path(results))
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ValueError("TRITON_INTERPRET=1 is set, and kernels are compiled here: unset it")
    facts = {**machine.facts(torch.device("cpu")), "capability": CAPABILITY}
    if facts["versions"]["triton"] is None:
        raise ValueError("Triton is not installed")
    found = {
        f"{piece.gate.name}, {direction}": (piece, direction)
        for piece in pieces()
        for direction in piece.gate.work
        if piece.gate.has_kernels and piece.gate.name.startswith(only)
    }
    if not found:
        raise ValueError(f"no call with Triton kernels begins with '{only}'")
    how = Asked(**{"minutes": MINUTES, **asked}, output=output)
    file = how.open("counts", torch.device("cpu"))
    file.facts |= facts
    own = Path(counting.__file__)
    of_op = {op: machine.fingerprint([own, *machine.sources_of(op)]) for op in {p.gate.op for p, _ in found.values()}}
    file.sources = {name: of_op[piece.gate.op] for name, (piece, _) in found.items()}
    rows = {name: lambda piece=piece, way=way: counted(piece, way) for name, (piece, way) in found.items()}
    return file.fill(rows, {"samples": "32 programs a launch"}, force=how.force, show=show)


def counted(piece: Piece, direction: str) -> dict[str, Any]:
    """The row of one call in one direction: what its kernels were counted to do, and what the compiler made of them."""
    command = [sys.executable, "-m", "gsm_benchmarks.counting", piece.gate.name, direction]
    paths = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    child = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, env=child, check=False)
    if done.returncode:
        raise RuntimeError(f"{piece.gate.name} was not counted: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    found = json.loads(done.stdout)
    _compile(piece)
    for kernel in found["kernels"]:
        kernel |= _nearest(kernel)
    work = piece.gate.work[direction]
    return {"case": piece.gate.name, "direction": direction, **work._asdict(), **found}


def _compile(piece: Piece) -> None:
    """Compile the kernels of all directions for a Hopper, and keep what is known of them with their constants. Triton
    asks once a process for each, so that other pieces find theirs here, too."""
    asked = requests(piece.built.launch, CAPABILITY)
    with target(CAPABILITY):
        for request in asked:
            named = {"module": request.module, "kernel": request.kernel}
            try:
                built = request.compile()
                constants = {built.src.fn.params[place].name: value for (place,), value in built.src.constants.items()}
                _built.append({**named, "constants": constants, **used(built)})
            except Exception as error:  # the compiler may fail in any way, and the other kernels still count
                _built.append({**named, "constants": {}, "failed": sentence(error)})


_built: list[dict[str, Any]] = []


def _nearest(kernel: Row) -> dict[str, Any]:
    """What was compiled for a kernel: of several, the one with most constants alike."""
    named = ("module", "kernel")
    same = [one for one in _built if all(one[key] == kernel[key] for key in named)]
    if not same:
        return {"failed": "not compiled"}

    def likeness(one: Row) -> int:
        own = {**one["constants"], "num_warps": one.get("warps")}
        return sum(own.get(name) == value for name, value in kernel["constants"].items())

    alike = max(same, key=likeness)
    return {key: value for key, value in alike.items() if key not in (*named, "constants")}


def residents(kernel: Row) -> int:
    """How many programs of a kernel share a multiprocessor; 1 where the compiler said nothing."""
    if "registers" not in kernel:
        return 1
    threads = 32 * kernel["warps"]
    registers = -(-kernel["registers"] * 32 // 256) * 256 * kernel["warps"]
    most = (REGISTERS // max(registers, 1), SHARED // (kernel["shared"] + RESERVED), THREADS // threads, BLOCKS)
    return max(1, min(most))


def together(kernel: Row) -> int:
    """How many programs of a launch do share one: no more than there are."""
    return min(residents(kernel), math.ceil(kernel["programs"] / kernel["launches"] / PROCESSORS))


def times(kernel: Row, rates: Rates) -> dict[str, float]:
    """Seconds that all launches of a kernel take at least for each of what they ask for."""
    own = {"wgmma": rates.wgmma, "mma": rates.mma}.get(kernel.get("matrix", "none"), rates.fma)
    speed = {"fp32 ieee": rates.fma, "fp32 tf32": own / 2, "fp32 tf32x3": own / 6}
    products = sum(flops / speed.get(kind, own) for kind, flops in kernel["products"].items())
    each = PROCESSORS * together(kernel)  # programs at a time
    round_ = kernel["programs"] / kernel["launches"] / each
    idle = math.ceil(round_) / round_
    return {
        "products": products * idle,
        "L2": (kernel["loaded"] + kernel["stored"]) / rates.cache,
        "memory": kernel["memory"] / rates.memory,
        "arithmetic": kernel["numbers"] / rates.numbers * idle,
        "reductions": kernel["steps"] * rates.step / each * idle,
    }


def predicted_ms(kernel: Row, rates: Rates) -> float:
    """Of all launches of a kernel together."""
    each = times(kernel, rates).values()
    hidden = max(each) + (sum(each) - max(each)) / together(kernel)
    return 1e3 * (hidden + kernel["launches"] * rates.launch)


def torch_ms(row: Row, rates: Rates) -> float:
    """Of the operations of PyTorch between the kernels."""
    seconds = (
        max(one["bytes"] / rates.memory, one["flops"] / rates.product) + one["launches"] * rates.launch
        for one in row["torch"].values()
    )
    return 1e3 * sum(seconds)


def prediction(row: Row, rates: Rates) -> float:
    """Milliseconds of one call."""
    return sum(predicted_ms(kernel, rates) for kernel in row["kernels"]) + torch_ms(row, rates)


def rates_of(file: str) -> Rates:
    """As `benchmark=smoke` has measured them in this file, and `ASSUMED` where it has not; of no file, those."""
    if not file:
        return ASSUMED
    rows = read(Path(file), "seconds")["rows"]
    found = {name: row.get("found") or {} for name, row in rows.items()}
    own: dict[str, float] = {}
    if "8 MB" in (reads := found.get("L2 reads", {})):
        own |= {"cache": reads["8 MB"]["rate"]}
    if "64 x 64" in (products := found.get("products by M", {})):
        own |= {"wgmma": products["64 x 64"]["rate"], "mma": products["16 x 64"]["rate"]}
    if "graph, plain" in (gaps := found.get("launch gap", {})):
        own |= {"launch": 1e-6 * gaps["graph, plain"]["us"]}
    if ceilings := rows.get("ceilings", {}).get("ceilings"):
        own |= {"product": ceilings["flops"], "memory": ceilings["bytes"]}
    return replace(ASSUMED, **own, source=f"{', '.join(own) or 'none'} as in {Path(file).name}, the others assumed")


def publish(path: Path, rates: str = "", measured: str = "") -> Path:
    """Publish the tables of a file that `run` wrote. Raises ValueError if one of the files is none of that kind."""
    content, speed = read(path, "kernels"), rates_of(rates)
    rows = [row for row in content["rows"].values() if not row.get("failed")]
    there = _measured(measured)
    off = [line for row in rows if (line := _off(row, speed, there))]
    known = {key: value for key, value in asdict(speed).items() if key != "source"}
    opening = (
        f"Counted, compiled for sm_{content['capability']}, predicted for an H100 SXM; nothing was launched: "
        f"{results.measured_on(content)}"
    )
    said = f"Rates ({speed.source}): {', '.join(f'{name} {value:.3g}' for name, value in known.items())}."
    cells = [_cells(row, kernel, speed) for row in rows for kernel in row["kernels"]]
    summary = table(SUMMARY, [_summary(row, speed, there) for row in rows])
    return results.publish(path, opening, said, summary, "\n".join(off), table(HEAD, cells))


def _measured(file: str) -> Mapping[str, float]:
    """Milliseconds by call, of a file of `benchmark=kernels` or `smoke`."""
    rows = read(Path(file))["rows"] if file else {}
    return {name: row["ms"]["median"] for name, row in rows.items() if row.get("ms")}


def _off(row: Row, rates: Rates, measured: Mapping[str, float]) -> str:
    """What to explain, where a prediction is far off."""
    name = f"{row['case']}, {row['direction']}"
    found, expected = measured.get(name), prediction(row, rates)
    if found is None or 1 / OFF <= found / expected <= OFF:
        return ""
    return f"* {name}: measured {found / expected:.2f} times what was predicted: to be explained"


def _summary(row: Row, rates: Rates, measured: Mapping[str, float]) -> tuple[str, ...]:
    name, expected = f"{row['case']}, {row['direction']}", prediction(row, rates)
    launches = sum(kernel["launches"] for kernel in row["kernels"])
    others = sum(one["launches"] for one in row["torch"].values())
    flops = sum(sum(kernel["products"].values()) for kernel in row["kernels"])
    flops += sum(one["flops"] for one in row["torch"].values())
    moved = sum(kernel["memory"] for kernel in row["kernels"]) + sum(one["bytes"] for one in row["torch"].values())
    floor = 1e3 * max(row["flops"] / rates.product, row["bytes"] / rates.memory)
    aims = [goal for goal in kernels_report.GOALS.get(name, ()) if goal.peer == "floor"]
    goal = ", ".join(f"{aim.least:.0%}, {floor / aim.least:.2f} ms" for aim in aims)
    return (
        name,
        f"{launches} + {others:.0f} of PyTorch" if others else str(launches),
        _against(flops, row["flops"]) if row["flops"] else "none",
        _against(moved, row["bytes"]),
        f"{expected:.3g}",
        f"{floor:.3g}",
        f"{floor / expected:.0%}",
        goal or "none",
        f"{measured[name]:.3g}" if name in measured else "not measured",
    )


def _against(found: float, least: float) -> str:
    return f"{found / least:.2f} x {_short(least)}"


def _short(number: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.3g}"


def _cells(row: Row, kernel: Row, rates: Rates) -> tuple[str, ...]:
    each, flops = times(kernel, rates), sum(kernel["products"].values())
    useful = f"{_short(flops)} / {_short(row['flops'])}" if flops else "none"
    built = (str(kernel["registers"]), f"{kernel['shared']} B") if "registers" in kernel else ("not known", "not known")
    return (
        f"{row['case']}, {row['direction']}",
        kernel["kernel"],
        str(kernel["launches"]),
        f"{kernel['programs']:,}",
        useful,
        f"{_short(kernel['loaded'] + kernel['stored'])}B, {_short(kernel['memory'])}B",
        *built,
        str(residents(kernel)),
        max(each, key=lambda name: each[name]),
        f"{predicted_ms(kernel, rates):.3g}",
    )
