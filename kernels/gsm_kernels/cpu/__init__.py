"""Compiled loops for a CPU, by Numba: each module adds its loops to the operation of the same name.

Without them, operations run with PyTorch. To remove them, delete this folder and its import in `gsm_kernels`.
"""

from . import attend, attend_range, index_top_k, mhc, rms_norm, swiglu

__all__ = ["attend", "attend_range", "index_top_k", "mhc", "rms_norm", "swiglu"]
