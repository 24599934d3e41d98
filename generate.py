"""Write text with a trained model: `python generate.py checkpoint=logs/default/gsm-seed0 prompt="def "`."""

from gsm.paths import hide_root

hide_root()

from gsm.scripts import generate  # noqa: E402

if __name__ == "__main__":
    generate()
