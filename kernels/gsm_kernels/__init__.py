"""The operations that take most of GSM's time, each with a plain PyTorch reference and often faster implementations.

    from gsm_kernels import attend, explain, listening, using

Every operation computes in float32, or in float64 for float64 inputs, and returns the dtype of its inputs. Each call
chooses its implementation: see `gsm_kernels.dispatch`, or run `python -m gsm_kernels`.
"""

from collections.abc import Sequence

from . import cpu  # noqa: F401  registers the compiled CPU loops with the operations
from .attend import attend
from .attend_band import attend_band
from .attend_range import attend_range
from .dispatch import Impl, Op, listening, using
from .index_top_k import candidate_pool, index_top_k
from .indexer_kl import IndexerLoss, indexer_kl
from .linear_cross_entropy import linear_cross_entropy
from .mhc import mhc_boundary
from .rms_norm import rms_norm
from .rotate import rotate
from .score_slots import score_slots
from .swiglu import swiglu

OPS: tuple[Op, ...] = (
    attend,
    attend_band,
    attend_range,
    index_top_k,
    candidate_pool,
    score_slots,
    indexer_kl,
    mhc_boundary,
    rms_norm,
    rotate,
    swiglu,
    linear_cross_entropy,
)


def explain(ops: Sequence[Op] = OPS) -> dict[str, str]:
    """Return "implementation: reason" by operation, for this machine and the current GSM_KERNELS."""
    return {op.name: ": ".join(op.explain()) for op in ops}


__all__ = [
    "OPS",
    "Impl",
    "IndexerLoss",
    "Op",
    "attend",
    "attend_band",
    "attend_range",
    "candidate_pool",
    "explain",
    "index_top_k",
    "indexer_kl",
    "linear_cross_entropy",
    "listening",
    "mhc_boundary",
    "rms_norm",
    "rotate",
    "score_slots",
    "swiglu",
    "using",
]
