"""Train a model, or all those of an experiment: `python train.py`, `python train.py model=baseline size=tiny`,
`python train.py experiment=ablate_residual`, `python train.py --help`.
"""

from gsm.paths import hide_root

hide_root()

from gsm.scripts import train  # noqa: E402

if __name__ == "__main__":
    train()
