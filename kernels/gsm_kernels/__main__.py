"""`python -m gsm_kernels`: which implementation each operation runs on this machine, and why."""

import torch

from . import OPS
from .device import describe, triton_version
from .dispatch import forced


def main() -> None:
    """Prints versions, the device, and a line for every operation."""
    print(f"torch {torch.__version__}, triton {triton_version() or 'not installed'}, {describe()}")
    print(f"GSM_KERNELS={forced()}\n")
    rows = [("op", "implementation", "reason"), *((op.name, *op.explain()) for op in OPS)]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    for op, implementation, reason in rows:
        print(f"{op:{first}}  {implementation:{second}}  {reason}")


if __name__ == "__main__":
    main()
