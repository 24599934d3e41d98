"""`python -m gsm_kernels`: print the implementation of each operation on this machine, and the reason."""

import torch

from . import OPS, tiles
from .device import describe, triton_version, version
from .dispatch import forced


def main() -> None:
    """Print versions, the device, one line per operation, and the tiles of the kernels with their times."""
    versions = {"torch": torch.__version__, "triton": triton_version(), "numba": version("numba")}
    print(", ".join((*(f"{name} {version or 'not installed'}" for name, version in versions.items()), describe())))
    print(f"GSM_KERNELS={forced()}\n")
    rows = [("op", "implementation", "reason"), *((op.name, *op.explain()) for op in OPS)]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    for op, implementation, reason in rows:
        print(f"{op:{first}}  {implementation:{second}}  {reason}")
    print("", *(f"tiles: {sentence}" for sentence in tiles.describe()), sep="\n")


if __name__ == "__main__":
    main()
