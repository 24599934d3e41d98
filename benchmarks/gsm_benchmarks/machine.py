"""The machine: its device, versions, memory, and the commit and sources of the code that runs."""

from __future__ import annotations

import gc
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from gsm.costs import room
from gsm.provenance import commit, processor, sources
from gsm_kernels.device import triton_version, version

T = TypeVar("T")
CGROUP = Path("/sys/fs/cgroup")


def chosen(device: str) -> torch.device:
    """The device by name; `auto`: a GPU if there is one. Raises ValueError if there is no such device here."""
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be cpu, cuda or auto, got {device}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be cpu or auto where PyTorch sees no GPU, got cuda")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def facts(device: torch.device) -> dict[str, Any]:
    """Return the facts with which a file of results opens."""
    return {
        "device": name(device),
        **(_gpu() if device.type == "cuda" else {"threads": torch.get_num_threads()}),
        "versions": {
            **{"python": platform.python_version(), "torch": torch.__version__},
            **{"triton": triton_version(), "numba": version("numba")},
        },
        "command": shlex.join(sys.orig_argv),
        "commit": commit(),
        "sources": sources(),
    }


def name(device: torch.device) -> str:
    """`NVIDIA H100 80GB HBM3`, or the processor's own name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()


@dataclass
class Peak:
    """Bytes that were taken inside `watching`; None where the system does not report it."""

    extra: int | None = None


@contextmanager
def watching(device: torch.device) -> Iterator[Peak]:
    """Measure the peak of memory inside the block: of PyTorch's allocator on a GPU, else of this process."""
    gc.collect()  # garbage that went inside the block would be subtracted from the peak
    peak, before = Peak(), _restart_peak(device)
    try:
        yield peak
    finally:
        reached = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident("VmHWM")
        peak.extra = None if before is None or reached is None else max(0, reached - before)


def saved_bytes(call: Callable[[], object], parameters: Iterable[Tensor]) -> int:
    """Bytes of all tensors but these parameters that autograd has saved when a call returns, each storage once."""
    storages, sizes = {p.untyped_storage()._cdata for p in parameters}, {}
    alive: list[object] = []  # or a storage's address could come back as another's

    def weigh(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(weigh, lambda tensor: tensor):
        alive.append(call())  # the result holds the graph
    return sum(sizes.values())


def available_bytes(device: torch.device) -> int:
    """Return the free bytes of a GPU, or of this machine or its container: a process that takes more is killed."""
    free = room.available_bytes(device)
    if device.type != "cuda":
        with suppress(OSError, ValueError):  # no container, or no limit (`max`)
            limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
            lines = (CGROUP / "memory.stat").read_text().splitlines()
            # Used memory includes pages of files; the kernel frees inactive ones on demand.
            cached = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
            free = min(free, limit - used + cached)
    return free


def in_memory(call: Callable[[], T]) -> T | None:
    """Return the result of a call; None where memory ran out. No error then holds on to the memory of the call."""
    try:
        return call()
    except Exception as error:
        if not room.out_of_memory(error):
            raise
    free()  # only here: until its handler ends, an error holds on to the memory
    return None


def free() -> None:
    """Give back memory that nobody uses any more."""
    gc.collect()
    torch.cuda.empty_cache()


def _restart_peak(device: torch.device) -> int | None:
    """Forget the peak so far; return the bytes that are held now."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak becomes the resident memory of now
    except OSError:
        return None
    return _resident("VmRSS")


def _resident(field: str) -> int | None:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field):
                return 1024 * int(line.split()[1])
    return None


def _gpu() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties()
    return {
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "l2_mib": properties.L2_cache_size / 2**20,
        "cuda": torch.version.cuda,
        "driver": _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]),
    }


def _output(command: list[str]) -> str | None:
    """Return the output of a program; None if it is missing or failed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
