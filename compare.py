"""Put the runs of one experiment or several side by side: `python compare.py logs/ablate_residual`."""

from gsm.paths import hide_root

hide_root()

from gsm.scripts import compare  # noqa: E402

if __name__ == "__main__":
    compare()
