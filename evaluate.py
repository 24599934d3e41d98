"""Score trained checkpoints: `python evaluate.py checkpoint=logs/default`, `python evaluate.py --help`."""

from gsm.paths import hide_root

hide_root()

from gsm.scripts import evaluate  # noqa: E402

if __name__ == "__main__":
    evaluate()
