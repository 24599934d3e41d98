"""The signals that a run answers by ending in a state that it can go on from."""

from __future__ import annotations

import signal

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # the last one is Slurm's warning before the time is up
