"""The signals that a run answers by ending in a state that it can go on from."""

from __future__ import annotations

import signal

# The last two are a cluster's warning before the time is up: Lightning's custom with Slurm, and submitit's.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
