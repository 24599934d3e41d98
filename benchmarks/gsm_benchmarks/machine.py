"""What is measured on: the device, its versions, clocks, memory and sources, and the commit."""

from __future__ import annotations

import gc
import hashlib
import os
import platform
import re
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

import gsm_kernels
from gsm_kernels.device import triton_version
from gsm_kernels.native import numba_version

KERNELS = Path(gsm_kernels.__file__).parent
CLOCKS = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
}

T = TypeVar("T")


class Lost(ValueError):
    """Raised where a GPU takes no more work from this process, after a kernel that ran astray."""


def still_alive(after: str) -> None:
    """Wait for the GPU, if one is in use. Raises Lost, with what it reports and what it reports that `after`."""
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise Lost(f"after {after} the GPU reports '{said}': the same command goes on with what is left") from error


def chosen(device: str) -> torch.device:
    """The device by name; `auto`: a GPU if there is one. Raises ValueError if there is no such device here."""
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device is '{device}'; say cpu, cuda or auto")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but PyTorch sees no GPU here; say cpu or auto")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def facts(device: torch.device, models: bool = False) -> dict[str, Any]:
    """What a file of results opens with. Its `sources` are a fingerprint of the kernels, and where `models` are
    measured of `gsm` and the yamls as well; how they are measured does not count."""
    folders = [KERNELS]
    if models:
        from gsm import paths

        folders += [paths.PACKAGE, paths.configs()]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".yaml")]
    return {
        "device": name(device),
        **(_gpu() if device.type == "cuda" else {"threads": torch.get_num_threads()}),
        "versions": {
            **{"python": platform.python_version(), "torch": torch.__version__},
            **{"triton": triton_version(), "numba": numba_version()},
        },
        "command": shlex.join(sys.orig_argv),
        "commit": commit(),
        "sources": fingerprint(path for path in files if "benchmark" not in (path.parent.name, path.stem)),
    }


def fingerprint(files: Iterable[Path]) -> str:
    """Twelve hexadecimal digits that change when the name or the content of one of the files does."""
    digest = hashlib.sha256()
    for path in sorted(set(files)):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def sources_of(op: str) -> list[Path]:
    """The files that the results of an operation, by its name, depend on: those of its folder in `gsm_kernels`, and
    those of the package that these import."""
    waiting, found = [getattr(gsm_kernels, op).reference.__module__.split(".")[1]], {"__init__"}
    files: list[Path] = []
    while waiting:
        part = waiting.pop()
        if part in found:
            continue
        found.add(part)
        folder = KERNELS / part
        own, above = (sorted(folder.glob("*.py")), r"\.\.") if folder.is_dir() else ([KERNELS / f"{part}.py"], r"\.")
        files += own
        for path in own:
            waiting += re.findall(rf"^\s*from {above}(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return files


def name(device: torch.device) -> str:
    """`NVIDIA H100 80GB HBM3`, or the processor's own name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def in_file_names(words: str) -> str:
    """Lower case, digits and dashes."""
    return re.sub(r"[^a-z0-9.]+", "-", words.lower()).strip("-")


def clocks(device: torch.device) -> dict[str, float] | None:
    """Clocks, power and temperature at this moment; None without a GPU or its tool."""
    if device.type != "cuda":
        return None
    asked = ["nvidia-smi", f"--query-gpu={','.join(CLOCKS.values())}", "--format=csv,noheader,nounits"]
    words = _output([*asked, f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"]) or _output(
        [*asked, "--id=0"]
    )
    numbers = [_number(word) for word in (words or "").split(",")]
    return dict(zip(CLOCKS, numbers, strict=True)) if len(numbers) == len(CLOCKS) else None


def commit() -> str | None:
    """The commit of the repository that this file lies in, with `+` if it was changed since; outside of one, what
    GSM_COMMIT says, or None."""
    here = ["git", "-C", str(Path(__file__).parent)]
    found = _output([*here, "rev-parse", "HEAD"])
    if not found:
        return os.environ.get("GSM_COMMIT")
    return found + ("+" if _output([*here, "status", "--porcelain", "--untracked-files=no"]) else "")


@dataclass
class Peak:
    """Bytes that something took on top of what was held before; None where the system does not say."""

    extra: int | None = None


@contextmanager
def watching(device: torch.device) -> Iterator[Peak]:
    """Measure the peak of memory inside: what PyTorch allocates on a GPU, else the resident memory of this process."""
    gc.collect()  # what is garbage already, and went inside, would be taken off what is measured
    peak, before = Peak(), _restart_peak(device)
    try:
        yield peak
    finally:
        reached = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident("VmHWM")
        peak.extra = None if before is None or reached is None else max(0, reached - before)


def saved_bytes(call: Callable[[], object], parameters: Iterable[Tensor]) -> int:
    """Bytes of all tensors but these parameters that autograd has saved when a call returns, each storage once."""
    own, sizes = {p.untyped_storage()._cdata for p in parameters}, {}
    alive: list[object] = []  # or a storage's address could come back as another's

    def weigh(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(weigh, lambda tensor: tensor):
        alive.append(call())  # which holds the graph
    return sum(sizes.values())


def in_memory(call: Callable[[], T]) -> T | None:
    """What a call returns; None where memory ran out. Afterwards no error holds on to what the call had taken."""
    from gsm.costs.room import out_of_memory

    try:
        return call()
    except Exception as error:
        if not out_of_memory(error):
            raise
    free()  # only here: until its handler ends, an error holds on to what was taken
    return None


def free() -> None:
    """Give back memory that nobody uses any more."""
    gc.collect()
    torch.cuda.empty_cache()


def _restart_peak(device: torch.device) -> int | None:
    """Forget the peak so far; return what is held now."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak becomes what is resident now
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
    """What a program printed; None if it is not there or failed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:  # [N/A]: this device does not say
        return float("nan")
