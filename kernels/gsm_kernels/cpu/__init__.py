"""CPU implementations compiled by Numba. Importing a module registers its loops with the operation of the same name.

They are optional: without Numba, operations run with PyTorch.
"""

from . import attend, attend_range, index_top_k, mhc, rms_norm, swiglu

__all__ = ["attend", "attend_range", "index_top_k", "mhc", "rms_norm", "swiglu"]
