"""Measure how fast things are: `python benchmark.py benchmark=kernels`, `python benchmark.py --help`."""

import sys
from pathlib import Path

from gsm.paths import hide_root

hide_root()
sys.path.append(str(Path(__file__).resolve().parent / "benchmarks"))  # where `gsm_benchmarks` lies

import hydra  # noqa: E402
from omegaconf import DictConfig  # noqa: E402

from gsm.config import command_line  # noqa: E402


@hydra.main(version_base="1.3", config_path="configs", config_name="benchmark")
def main(config: DictConfig) -> None:
    """The benchmark that was chosen; its imports wait until the arguments were found to be sound."""
    from gsm.config.load import instantiate

    command_line.run(lambda plain: instantiate(plain["benchmark"], "benchmark"), config)


if __name__ == "__main__":
    command_line.prepare()
    main()
