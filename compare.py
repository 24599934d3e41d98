"""Puts the runs of one experiment or several side by side: `python compare.py logs/ablate_residual`."""

from gsm.paths import hide_root

hide_root()

from gsm.config import command_line  # noqa: E402

if __name__ == "__main__":
    from gsm.experiments.compare import compare

    command_line.call(compare, "compare.py")
