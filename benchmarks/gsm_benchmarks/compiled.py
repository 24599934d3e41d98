"""What the compiler makes of every Triton kernel on Hopper, found out without a GPU.

Every operation is called forward and backward with its Triton kernels forced and tensors on the CPU. Where a kernel
would be launched, it is compiled instead, by Triton's own path from arguments to machine code: what it specialises on,
such as arguments that are multiples of 16, is what it would be at a launch. Nothing is launched.

The calls (`samples`) are in bfloat16 and with the widths of the 0.5B and 1.5B models unless a name says otherwise, and
with a few rows: the grid alone knows how many. What chooses among slots, or sums over them, is also compiled for as
many as a long text has.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gsm_kernels import launch

from . import machine, results, workloads
from .build import cuobjdump, requests, target, used
from .results import FOLDER, Results, read, sentence, table
from .workloads import Call, Case, changed, last_rows

CAPABILITY, MOST_SHARED = 90, 227 << 10  # bytes of shared memory that a program can have
HEAD = ("operation", "kernel", "warps", "stages", "registers", "spilled", "shared", "matrix", "loads", "constants")
# Instructions by what they tell; a suffix narrows them.
INSTRUCTIONS = {
    "wgmma": r"HGMMA|QGMMA|IGMMA",
    "mma": r"HMMA|IMMA|QMMA",
    "fma": r"FFMA",
    "local_loads": r"LDL",
    "local_stores": r"STL",
    "wide_loads": r"LDG\.E\.(?:\w+\.)*128|LDGSTS\.E\.(?:\w+\.)*128|UTMALDG",
    "loads": r"LDG|LDGSTS|UTMALDG",
}

USUAL, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
ALL, NARROW, SMALL = (USUAL, HALF, FULL), (USUAL, HALF), (USUAL, FULL)
# Heads and channels of attention, and the dtypes that its kernels take them in.
ATTENTION = (
    ("32 heads", {}, ALL),
    ("64 heads", {"heads": 64}, ALL),
    ("32 heads, 64 channels", {"channels": 64}, ALL),
    ("32 heads, 256 channels", {"channels": 256}, NARROW),
    ("64 heads, 256 channels", {"heads": 64, "channels": 256}, NARROW),
    ("nano", {"heads": 4, "channels": 32, "angles": 8}, SMALL),
    ("tiny", {"heads": 8, "channels": 64}, SMALL),
)
# Heads and width of an indexer.
INDEXERS = (("", {}, ALL), ("nano", {"heads": 2, "width": 32}, SMALL), ("tiny", {"heads": 4, "width": 32}, SMALL))


def run(output: str = "", results: str = "", only: str = "") -> Path:
    """Compile the kernels of every operation; print a table and write it, also as JSON; return that file.

    Args: as in configs/benchmark/compiled.yaml and configs/benchmark.yaml, which say what they mean.

    Raises:
        ValueError: Triton is not installed, runs in its interpreter, or there is no such operation.
    """
    if results:
        return show(Path(results))
    if launch.INTERPRETED:
        raise ValueError("TRITON_INTERPRET=1 is set, and the interpreter compiles nothing: unset it")
    facts = {**machine.facts(torch.device("cpu")), "capability": CAPABILITY}
    if facts["versions"]["triton"] is None:
        raise ValueError("Triton is not installed")
    path = Path(output) if output else FOLDER / f"compiled-sm_{CAPABILITY}-triton{facts['versions']['triton']}.json"
    found = [case for case in samples() if case.op.startswith(only) and case.has_kernels]
    if not found:
        raise ValueError(f"no operation with Triton kernels begins with '{only}'")
    file = Results(path, facts)
    file.rows = {name: row for name, row in file.rows.items() if only and not row["op"].startswith(only)}
    for case in found:
        for row in rows_of(case):
            file.add(" ".join(filter(None, (case.op, case.name, row["kernel"], row.get("hash", "")[:8]))), row)
            print(f"{case.op} {case.name}: {row['kernel']} {row.get('failed') or _registers(row)}", flush=True)
    return show(path)


def rows_of(case: Case) -> Iterator[dict[str, Any]]:
    """A row for every kernel that a call launches forward or backward, once; one that fails says why. Its `seconds` are
    those of compiling it, or of finding it where Triton keeps what it has compiled."""
    row = {"op": case.op, "case": case.name}
    try:
        found = requests(case.launch, CAPABILITY)
    except Exception as error:  # what comes before a launch may fail in any way
        yield {**row, "kernel": "", "failed": sentence(error)}
        return
    with target(CAPABILITY):
        for request in found:
            try:
                began = time.perf_counter()
                built = request.compile()
                seconds = round(time.perf_counter() - began, 3)
                yield {**row, "kernel": request.kernel, "seconds": seconds, **describe(built)}
            except Exception as error:  # the compiler may too, and the other kernels are still worth a look
                yield {**row, "kernel": request.kernel, "failed": sentence(error)}


def describe(built: Any) -> dict[str, Any]:
    """What Triton's metadata and NVIDIA's disassembler say of a compiled kernel, and its compile-time constants."""
    row = {"hash": built.hash, "stages": built.metadata.num_stages, **used(built)}
    if row["shared"] > MOST_SHARED:
        row["failed"] = f"needs {row['shared']} bytes of shared memory, and there are {MOST_SHARED}"
    code = cuobjdump("-sass", built.asm["cubin"])
    operations = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", code, re.MULTILINE)
    for what, form in INSTRUCTIONS.items():
        row[what] = sum(bool(re.match(rf"(?:{form})\b", operation)) for operation in operations)
    constants = {built.src.fn.params[place]: value for (place,), value in built.src.constants.items()}
    row["constants"] = {p.name: x for p, x in constants.items() if p.is_constexpr and isinstance(x, int | float | str)}
    return row


def show(path: Path) -> Path:
    """Publish the table of a file that `run` wrote. Raises ValueError if it is no such file."""
    content = read(path, "kernel")
    rows = content["rows"].values()
    failed, spilling = (sum(bool(row.get(what)) for row in rows) for what in ("failed", "stack"))
    seconds = sum(row.get("seconds", 0) for row in rows)
    opening = f"Compiled for sm_{content['capability']}, nothing launched: {results.measured_on(content)}"
    found = f"{len(rows)} kernels in {seconds:.0f} s: {failed} failed, {spilling} spill registers."
    return results.publish(path, f"{opening} {found}", table(HEAD, map(_cells, rows)))


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    named = f"{row['op']} {row['case']}".strip(), row["kernel"]
    if row.get("failed"):
        return *named, f"failed: {row['failed']}"
    spilled = f"{row['stack']} B, {row['local_loads']} loads, {row['local_stores']} stores" if row["stack"] else "none"
    matrix = ", ".join(f"{row[name]} {name}" for name in ("wgmma", "mma") if row[name]) or "none"
    loads = f"{row['wide_loads']} of {row['loads']} of 16 bytes"
    numbers = (row["warps"], row["stages"], row["registers"], spilled, f"{row['shared']} B", matrix, loads)
    return *named, *(str(number) for number in numbers), ", ".join(f"{k}={v}" for k, v in row["constants"].items())


def _registers(row: dict[str, Any]) -> str:
    return f"{row['registers']} registers, {row['stack']} B of stack, {row['shared']} B shared, {row['wgmma']} wgmma"


def samples() -> tuple[Case, ...]:
    """All of them. A case makes its call in the dtype that it is for, whatever dtype it is asked for."""
    return *_attention(), *_searches(), *_losses(), *_pooling(), *_streams(), *_rows_alone()


def _attention() -> list[Case]:
    each = [(name, sizes, dtype) for name, sizes, dtypes in ATTENTION for dtype in dtypes]
    far = [_in(workloads.attend(name, 1, 512, **sizes), dtype) for name, sizes, dtype in each]
    band = [_in(workloads.attend_band(name, 1, 512, **sizes), dtype) for name, sizes, dtype in each]
    learning = [_biased(case) for case in far if "256" not in case.name and "float16" not in case.name]
    return [*far, *learning, *band, *(_last_rows(case, 1) for case in (*far, *band))]


def _searches() -> list[Case]:
    """Of few slots, and of so many that groups of them are chosen first."""
    found = []
    for name, sizes, dtypes in INDEXERS:
        for dtype in dtypes:
            whole = _in(workloads.index_top_k(name, 1, 512, **sizes), dtype)
            found += [whole, _pooled(whole), _in(workloads.score_slots(name, 1, 512, **sizes), dtype)]
    for dtype in ALL:
        long = _in(workloads.index_top_k("of 64K", 1, 65536), dtype)
        found += [_last_rows(long, 192), _last_rows(long, 1), _last_rows(_pooled(long), 192)]
        blocks = _in(workloads.candidate_pool("of 64K", 1, 65536), dtype)
        found += [_in(workloads.candidate_pool("", 1, 512), dtype), _last_rows(blocks, 64)]
    return found


def _losses() -> list[Case]:
    found = []
    for dtype in ALL:
        dense, long = workloads.indexer_kl("dense", 1, 512), workloads.indexer_kl("dense, of 4K", 1, 4096)
        selected = workloads.indexer_kl("selected", 1, 512, dense=False)
        found += [_in(case, dtype) for case in (dense, _pooled(dense), _last_rows(long, 64), selected)]
    small = {
        "nano": {"heads": 4, "channels": 32, "index_heads": 2},
        "tiny": {"heads": 8, "channels": 64, "index_heads": 4},
    }
    for name, sizes in small.items():
        dense, selected = (
            workloads.indexer_kl(f"{how}, {name}", 1, 256, **sizes, index_width=32, dense=how == "dense")
            for how in ("dense", "selected")
        )
        found += [_in(case, dtype) for case in (dense, selected) for dtype in SMALL]
    wide = workloads.indexer_kl("dense, 64 heads", 1, 512, heads=64)
    return [*found, wide, workloads.indexer_kl("selected, 64 heads", 1, 512, heads=64, dense=False)]


def _pooling() -> list[Case]:
    wide, single = workloads.pool_groups("", 512), workloads.pool_groups("ratio 1", 512, ratio=1)
    nano = _in(workloads.pool_groups("nano", 512, channels=32), FULL)
    return [*(_in(case, dtype) for case in (wide, single) for dtype in ALL), nano]


def _streams() -> list[Case]:
    """As many streams as the kernels take, and the mixed precision of training."""
    cases = [
        workloads.mhc_boundary(f"{count} streams" if count > 1 else "1 stream", 128, streams=count)
        for count in (1, 2, 4, 8)
    ]
    few = [
        workloads.mhc_boundary(f"{count} streams, {tokens} tokens", tokens, streams=count)
        for count, tokens in ((4, 1), (4, 2), (4, 64), (1, 4), (8, 4))
    ]
    mixed = workloads.mhc_boundary("4 streams, mixed precision", 128, mixed=True)
    nano = _in(workloads.mhc_boundary("4 streams, nano", 128, width=128), FULL)
    return [*(_in(case, dtype) for case in [*cases, *few] for dtype in ALL), mixed, nano]


def _rows_alone() -> list[Case]:
    """What goes row by row: norms as wide as models, queries and entries are, the gate, and the loss."""
    norms = [workloads.rms_norm(f"of {width}", 64, width=width) for width in (64, 128, 512, 1024, 2048)]
    narrow = workloads.linear_cross_entropy("nano", 16, width=128, vocabulary=4096)
    cases = [*norms, workloads.swiglu("", 64), workloads.linear_cross_entropy("", 16), narrow]
    return [_in(case, dtype) for case in cases for dtype in ALL]


def _in(case: Case, dtype: torch.dtype) -> Case:
    """The case in a dtype, and with a name that says so if it is not the usual one."""
    name = ", ".join(filter(None, (case.name, "" if dtype == USUAL else str(dtype).removeprefix("torch."))))
    return replace(case, name=name, make=lambda device, _: case.make(device, dtype))


def _biased(case: Case) -> Case:
    """With a bias on the logits of what is picked, through which an indexer learns."""

    def biased(call: Call) -> Call:
        index, query = call["index_BRK"], call["query_BRHC"]
        return {**call, "bias_BRK": torch.zeros(index.shape, device=index.device, dtype=query.dtype)}

    return changed(case, f"{case.name}, biased", biased)


def _pooled(case: Case) -> Case:
    """Among the slots of 16 blocks a row alone."""

    def pooled(call: Call) -> Call:
        first_BR = call["first_BR"]
        return {**call, "pool_BRN": torch.arange(16, device=first_BR.device).expand(*first_BR.shape, -1).contiguous()}

    return changed(case, ", ".join(filter(None, (case.name, "pooled"))), pooled)


def _last_rows(case: Case, rows: int) -> Case:
    """The last rows of a case, without a backward of its own. Of one row, as when a token is decoded, other kernels
    take care."""
    return last_rows(case, rows, {direction: work for direction, work in case.work.items() if direction != "backward"})
