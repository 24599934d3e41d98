"""Trains one model: `python train.py`, `python train.py model=baseline size=tiny`, `python train.py --help`."""

from gsm.paths import hide_root

hide_root()

import hydra  # noqa: E402
from omegaconf import DictConfig  # noqa: E402

from gsm.runs import command_line  # noqa: E402


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(config: DictConfig) -> None:
    """One run; the imports that take seconds wait until the arguments were found to be sound."""
    from gsm.runs.fit import train

    command_line.run(train, config)


if __name__ == "__main__":
    command_line.prepare()
    main()
