"""`python -m gsm_kernels`: which implementation each operation runs on this machine, and why."""

import torch

from . import OPS
from .device import describe, triton_version
from .dispatch import forced
from .launch import how_to_try


def main() -> None:
    """Prints versions, the device, a line for every operation, and on other GPUs than Hopper how to try Triton."""
    print(f"torch {torch.__version__}, triton {triton_version() or 'not installed'}, {describe()}")
    print(f"GSM_KERNELS={forced()}\n")
    rows = [("op", "implementation", "reason"), *((op.name, *op.explain()) for op in OPS)]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    for op, implementation, reason in rows:
        print(f"{op:{first}}  {implementation:{second}}  {reason}")
    if advice := how_to_try():
        print(f"\n{advice}")


if __name__ == "__main__":
    main()
