"""Measures trained models on held-out text: `python evaluate.py checkpoint=logs/default/gsm/seed0`."""

import sys

from gsm.paths import hide_root

hide_root()

from gsm.runs import command_line  # noqa: E402

if __name__ == "__main__":
    given = sys.argv[1:]
    if any(word == "ruler=true" or word.startswith("ruler.") for word in given):
        from gsm.runs.ruler import evaluate as ask

        words = [word.removeprefix("ruler.") for word in given if word != "ruler=true"]
        command_line.call(ask, "evaluate.py ruler=true", words)
    else:
        from gsm.runs.evaluate import evaluate

        command_line.call(evaluate, "evaluate.py")
