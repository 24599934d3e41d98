"""Measures trained models on held-out text: `python evaluate.py checkpoint=logs/default/gsm/seed0`."""

import sys

from gsm.paths import hide_root

hide_root()

from gsm.runs import command_line  # noqa: E402

if __name__ == "__main__":
    if any(word.startswith("tasks=") for word in sys.argv[1:]):
        from gsm.runs.downstream import evaluate
    else:
        from gsm.runs.evaluate import evaluate

    command_line.call(evaluate, "evaluate.py")
