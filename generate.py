"""Writes text with a trained model: `python generate.py checkpoint=logs/default/gsm/seed0 prompt="def "`."""

from gsm.paths import hide_root

hide_root()

from gsm.config import command_line  # noqa: E402

if __name__ == "__main__":
    from gsm.evaluation.generate import generate

    command_line.call(generate, "generate.py")
