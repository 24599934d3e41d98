"""Show what a trained model does at every token of a text: `python explore.py checkpoint=logs/default text="def "`."""

from gsm.paths import hide_root

hide_root()

from gsm.scripts import explore  # noqa: E402

if __name__ == "__main__":
    explore()
