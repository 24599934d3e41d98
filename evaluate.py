"""Measures trained models on held-out text: `python evaluate.py checkpoint=logs/default/gsm/seed0`."""

from gsm.paths import hide_root

hide_root()

from gsm.runs import command_line  # noqa: E402

if __name__ == "__main__":
    from gsm.runs.evaluate import evaluate

    command_line.call(evaluate, "evaluate.py")
