"""Scores trained checkpoints: `python evaluate.py checkpoint=logs/default`, `python evaluate.py --help`."""

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
    elif any(word.startswith("tasks=") for word in given):
        from gsm.runs.downstream import evaluate as score

        command_line.call(score, "evaluate.py")
    else:
        from gsm.runs.evaluate import evaluate

        command_line.call(evaluate, "evaluate.py")
