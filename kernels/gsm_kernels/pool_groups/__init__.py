"""Compression: `ratio` consecutive tokens of one document become one bank entry.

    pooled_fc = sum_i softmax_i(gate_ic) value_ic,   i over the stream's tokens end_f - ratio + 1 .. end_f, per channel

Args:
    value_BSC: values in stream order (S tokens, stored and new).
    gate_BSC: logits of the same shape, or None if ratio is 1, when pooling is a gather.
    end_BF: int64, the last token of each group; -1 gives a row of zeros. No two groups share a token: ends of a
        sequence lie at least `ratio` apart. Groups that would start before the stream are an error of the caller and
        read its first token.
    ratio: tokens per group.

Returns:
    pooled_BFC in the values' dtype; softmax and sum in float32 or wider. Differentiable in value and gate.

Raises:
    ValueError: if the shapes do not fit, ratio < 1, or ratio > 1 has no gate.

Source: the compressor of DeepSeek-V4's compressed sparse attention, in V4.1's form without overlap or positional bias.
"""

from torch import Tensor

from ..dispatch import Impl, Op
from ..launch import missing
from ..shapes import agree, require
from . import reference, triton


def check(value_BSC: Tensor, gate_BSC: Tensor | None, end_BF: Tensor, ratio: int) -> None:
    """Raise ValueError, in one sentence, if a letter has two sizes, ratio is below 1, or above it without a gate."""
    agree("pool_groups", value_BSC=value_BSC, gate_BSC=gate_BSC, end_BF=end_BF)
    require("pool_groups", ratio >= 1, f"ratio = {ratio} must be at least 1")
    require("pool_groups", ratio == 1 or gate_BSC is not None, f"ratio = {ratio} needs gate_BSC; None is for ratio 1")


pool_groups = Op(
    "pool_groups",
    reference.pool_groups,
    (Impl("triton", triton.pool_groups, triton.refuses, missing),),
    check=check,
    doc=__doc__,
)
