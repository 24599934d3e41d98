"""The signals at which a run saves a checkpoint and ends."""

from __future__ import annotations

import signal

# The last two are a cluster's warnings before the time limit: Lightning's convention with Slurm, and submitit's.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def answered() -> tuple[signal.Signals, ...]:
    """Return `SIGNALS`, without SIGHUP if this process was started to outlive its terminal (``nohup``, ``disown``)."""
    outlives = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(number for number in SIGNALS if not (outlives and number == signal.SIGHUP))
