"""What the compiler makes of every Triton kernel on Hopper, found out without a GPU.

Every operation is called forward and backward with its Triton kernels forced and tensors on the CPU. Where a kernel
would be launched, it is compiled instead, by Triton's own path from arguments to machine code: what it specialises on,
such as arguments that are multiples of 16, is what it would be at a launch. Nothing is launched.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import gsm_kernels

from .. import launch
from ..dispatch import using
from . import machine
from .build import target
from .kernels import bound
from .report import table
from .results import FOLDER, Results, read
from .samples import samples
from .workloads import Case

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


def run(only: str = "", output: str = "") -> Path:
    """Compile the kernels of every operation; print a table and write it, also as JSON.

    Args:
        only: those operations alone whose name begins so.
        output: the file; left out: benchmarks/results/compiled-sm_90-triton<version>.json.

    Raises:
        ValueError: Triton is not installed, runs in its interpreter, or there is no such operation.
    """
    if launch.INTERPRETED:
        raise ValueError("TRITON_INTERPRET=1 is set, and the interpreter compiles nothing: unset it")
    facts = {**machine.facts(torch.device("cpu")), "capability": CAPABILITY}
    if facts["versions"]["triton"] is None:
        raise ValueError("Triton is not installed")
    path = Path(output) if output else FOLDER / f"compiled-sm_{CAPABILITY}-triton{facts['versions']['triton']}.json"
    found = [case for case in samples() if case.op.startswith(only) and has_kernels(case.op)]
    if not found:
        raise ValueError(f"no operation with Triton kernels begins with '{only}'")
    results = Results(path, facts)
    results.rows = {name: row for name, row in results.rows.items() if only and not row["op"].startswith(only)}
    for case in found:
        for row in rows_of(case):
            results.add(" ".join(filter(None, (case.op, case.name, row["kernel"], row.get("hash", "")[:8]))), row)
            print(f"{case.op} {case.name}: {row['kernel']} {row.get('failed') or _registers(row)}", flush=True)
    text = markdown(path)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(f"\n{text}")
    return path


def rows_of(case: Case) -> Iterator[dict[str, Any]]:
    """A row for every kernel that a call launches forward or backward, once; one that fails says why. Its `seconds` are
    those of compiling it, or of finding it where Triton keeps what it has compiled."""
    launched: dict[Any, dict[str, Any]] = {}

    def instead(kernel: Any, args: tuple, options: dict[str, Any]) -> None:
        row = {"op": case.op, "case": case.name, "kernel": kernel.__name__}
        try:
            began = time.perf_counter()
            compiled = kernel.warmup(*args, grid=(1,), **options)
            row["seconds"] = round(time.perf_counter() - began, 3)
            if compiled.hash not in launched:
                launched[compiled.hash] = row | describe(compiled) | {"constants": _constants(kernel, args, options)}
        except Exception as error:  # the compiler may fail in any way, and the other kernels are still worth a look
            launched[kernel] = {**row, "failed": _sentence(error)}

    call = case.make(torch.device("cpu"), torch.bfloat16)
    try:
        with target(CAPABILITY), using("triton"), launch.launching(instead):
            bound(getattr(gsm_kernels, case.op), call, "both" if len(case.work) > 1 else next(iter(case.work)))()
    except Exception as error:  # what comes before a launch may fail too
        launched[""] = {"op": case.op, "case": case.name, "kernel": "", "failed": _sentence(error)}
    yield from launched.values()


def describe(compiled: Any) -> dict[str, Any]:
    """What Triton's metadata and NVIDIA's disassembler say of a compiled kernel."""
    metadata = compiled.metadata
    row = {"hash": compiled.hash, "warps": metadata.num_warps, "stages": metadata.num_stages, "shared": metadata.shared}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        used, code = (_cuobjdump(flag, cubin.name) for flag in ("--dump-resource-usage", "-sass"))
    if metadata.shared > MOST_SHARED:
        row["failed"] = f"needs {metadata.shared} bytes of shared memory, and there are {MOST_SHARED}"
    row |= {name: int(number) for name, number in re.findall(r"\b(REG|STACK):(\d+)", used)}
    operations = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", code, re.MULTILINE)
    return row | {
        what: sum(bool(re.match(rf"(?:{form})\b", op)) for op in operations) for what, form in INSTRUCTIONS.items()
    }


def markdown(path: Path) -> str:
    """The table of a file that `run` wrote. Raises ValueError if it is no such file."""
    content = read(path)
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    opening = f"Compiled for sm_{content['capability']}, nothing launched: {versions}, commit {content['commit']}."
    rows = content["rows"].values()
    failed, spilling = (sum(bool(row.get(what)) for row in rows) for what in ("failed", "STACK"))
    seconds = sum(row.get("seconds", 0) for row in rows)
    found = f"{len(rows)} kernels in {seconds:.0f} s: {failed} failed, {spilling} spill registers."
    return f"# {path.stem}\n\n{opening} {found}\n\n{table(HEAD, map(_cells, rows))}\n"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    named = f"{row['op']} {row['case']}".strip(), row["kernel"]
    if row.get("failed"):
        return *named, f"failed: {row['failed']}", *("" for _ in HEAD[3:])
    spilled = f"{row['STACK']} B, {row['local_loads']} loads, {row['local_stores']} stores" if row["STACK"] else "none"
    matrix = ", ".join(f"{row[name]} {name}" for name in ("wgmma", "mma") if row[name]) or "none"
    loads = f"{row['wide_loads']} of {row['loads']} of 16 bytes"
    numbers = (row["warps"], row["stages"], row["REG"], spilled, f"{row['shared']} B", matrix, loads)
    return *named, *(str(number) for number in numbers), ", ".join(f"{k}={v}" for k, v in row["constants"].items())


def _registers(row: dict[str, Any]) -> str:
    return f"{row['REG']} registers, {row['STACK']} B of stack, {row['shared']} B shared, {row['wgmma']} wgmma"


def _constants(kernel: Any, args: tuple, options: dict[str, Any]) -> dict[str, Any]:
    """Its compile-time constants by name, as they were given."""
    names = {p.name for p in kernel.params if p.is_constexpr}
    given = {**dict(zip(kernel.arg_names, args, strict=False)), **options}
    return {
        name: given[name]
        for name in kernel.arg_names
        if name in names and isinstance(given.get(name), int | float | str)
    }


def _cuobjdump(flag: str, cubin: str) -> str:
    from triton import knobs

    return subprocess.run([knobs.nvidia.cuobjdump.path, flag, cubin], capture_output=True, text=True, check=True).stdout


def has_kernels(op: str) -> bool:
    """Whether an operation has Triton kernels of its own."""
    return any(impl.name == "triton" for impl in getattr(gsm_kernels, op).fast)


def _sentence(error: Exception) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:300]}"
