"""The signals at which a run saves a checkpoint and ends, and processes that end with their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

# The last two are a cluster's warnings before the time limit: Lightning's convention with Slurm, and submitit's.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PARENT = "GSM_PARENT"  # variable with the number of the parent's process
PDEATHSIG = 1  # option of Linux' prctl


def answered() -> tuple[signal.Signals, ...]:
    """Return `SIGNALS`, without SIGHUP if this process was started to outlive its terminal (``nohup``, ``disown``)."""
    outlives = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(number for number in SIGNALS if not (outlives and number == signal.SIGHUP))


def leave_with_parent() -> None:
    """In a child on Linux, ask for SIGTERM at the end of the parent, whatever ends it. Elsewhere it trains on."""
    parent = os.environ.pop(PARENT, None)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # the parent was gone before this call
        raise SystemExit(128 + signal.SIGTERM)
