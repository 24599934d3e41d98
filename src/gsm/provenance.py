"""The origin of a measured number: the commit, a digest of the sources, and the processor."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

import torch

import gsm_kernels
from gsm import paths


def commit() -> str | None:
    """Return the commit of the repository, followed by `+` if a tracked file has changed since.

    None outside of a repository, or if git is not installed.
    """
    head = _git("rev-parse", "HEAD")
    if not head:
        return None
    return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")


def sources() -> str:
    """Return the fingerprint of every Python and yaml file of `gsm`, `gsm_kernels` and the configs."""
    folders = [Path(gsm_kernels.__file__).parent, paths.PACKAGE, paths.configs()]
    return fingerprint(path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".yaml"))


def processor() -> str:
    """Return the name of the processor, as Linux has it: `AMD EPYC 7B13`. Elsewhere its architecture."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def multiplies_bfloat16() -> bool:
    """Whether the processor is known to have instructions for products in bfloat16: AVX512-BF16 or AMX."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # PyTorch 2.9 has no such function
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def fingerprint(files: Iterable[Path]) -> str:
    """Return twelve hexadecimal digits that change with the name or the content of any of the files."""
    digest = hashlib.sha256()
    for path in sorted(set(files)):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _git(*words: str) -> str | None:
    """Return the output of git; None if it fails."""
    command = ["git", "-C", str(paths.ROOT), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
