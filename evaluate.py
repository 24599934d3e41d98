"""Scores trained checkpoints: `python evaluate.py checkpoint=logs/default`, `python evaluate.py --help`."""

import sys

from gsm.paths import hide_root

hide_root()

from gsm.evaluation import commands  # noqa: E402
from gsm.experiments import jobs  # noqa: E402

if __name__ == "__main__":
    jobs.leave_with_parent()
    commands.call(sys.argv[1:])
