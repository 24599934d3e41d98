"""Trains a model, or all those of an experiment: `python train.py`, `python train.py model=baseline size=tiny`,
`python train.py experiment=ablate_residual`, `python train.py --help`.
"""

from gsm.paths import hide_root

hide_root()

import hydra  # noqa: E402
from omegaconf import DictConfig  # noqa: E402

from gsm.config import command_line  # noqa: E402
from gsm.experiments import jobs  # noqa: E402


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(config: DictConfig) -> None:
    """One run or several; the imports that take seconds wait until the arguments were found to be sound."""
    from gsm.experiments import experiment

    command_line.run(experiment.run, config)


if __name__ == "__main__":
    jobs.leave_with_parent()
    command_line.prepare()
    main()
