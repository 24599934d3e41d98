"""The number of compute threads of a command: the number of cores that no other process uses."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

CHOICES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")  # environment variables that take precedence
why = ""  # reason for the chosen number, for reports


def cores() -> int:
    """Return the number of cores that this process may use, by its affinity and by the quota of its container."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # no such file, or no quota ("max")
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        allowed = min(allowed, max(1, quota // period))
    return allowed


def _clocks() -> tuple[float, float, float]:
    """Return wall-clock seconds, busy seconds of all cores (NaN: unknown), and busy seconds of this process."""
    worked = float("nan")
    with contextlib.suppress(OSError, ValueError):
        user, nice, system, _, _, irq, soft = map(int, Path("/proc/stat").read_text().split()[1:8])
        worked = (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")
    return time.monotonic(), worked, sum(os.times()[:4])


_begin = _clocks()  # measured at import, so that other processes are observed during the imports of a command


def others() -> float:
    """Return the number of cores that other processes keep busy, since the import of this module.

    If the system does not report it, the load average of the last minute is returned.
    """
    elapsed, worked, used = (now - before for now, before in zip(_clocks(), _begin, strict=True))
    return max(0.0, worked - used) / elapsed if worked >= 0 and elapsed > 0.2 else os.getloadavg()[0]


def settle() -> None:
    """Make PyTorch, and compiled loops, use one thread for each core that is free, unless the user has set a number.

    Threads wait for each other by spinning: two threads on two busy cores train at a fifth of the speed of one.
    """
    import torch

    global why
    chosen = next((f"{name}={os.environ[name]}" for name in CHOICES if name in os.environ), "")
    if not chosen:
        busy, total = others(), os.cpu_count() or 1
        torch.set_num_threads(max(1, min(torch.get_num_threads(), cores(), round(total - busy))))
        chosen = f"others use {busy:.1f} of {total} cores"
    why = f" ({chosen})"
