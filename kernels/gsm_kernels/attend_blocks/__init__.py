"""Causal attention on chosen blocks of slots: for every row and each group of heads, a few blocks of its document.

As `gsm_kernels.attend_range`, but row r sees a slot of its range [first, last) only if it lies in a block that the row
has chosen. Block n of a row is the slots first + n block to first + (n + 1) block - 1. The last block may reach beyond
the range; slots there are not seen. A row that sees nothing returns 0.

Args:
    query_BRHC: rotated already, if it is at all.
    key_BFGC, value_BFGC: the slots; F may be 0. H is a multiple of G, and head h belongs to group h // (H / G).
    first_BR, last_BR: int64, the slots [first, last) of a row's document up to its own.
    chosen_BRGN: int64, numbers of blocks in any order, none twice; -1 for none.
    block: slots of a block.

Returns:
    out_BRHC in the query's dtype. Computed in float32, or in float64 if that is what comes in; on a GPU, fast
    implementations multiply half types as they are and sum in float32. No gradient reaches the choice.

Raises:
    ValueError: if the shapes do not fit, block < 1, or H is no multiple of G.

Source: the selected branch of Yuan et al. 2025, "Native Sparse Attention: Hardware-Aligned and Natively Trainable
Sparse Attention".
"""

from ..dispatch import Impl, Op
from . import reference, sdpa
from .inputs import Inputs, check

attend_blocks = Op(
    "attend_blocks",
    reference.attend_blocks,
    (Impl("sdpa", sdpa.attend_blocks, sdpa.refuses),),
    inputs=Inputs,
    check=check,
    doc=__doc__,
)
