"""A short causal convolution, channel by channel, over the tokens of one document.

    y_t = sum_j weight_j * x_(t-j)      for j below the width W, and at most the position of t

The tokens x of a sequence are the E entries of `seen_BEC`; the last T are new. Tokens before the first entry count as
0.

Args:
    seen_BEC: stored tokens (the last W - 1 are read), then the new tokens.
    weight: [C, W], W >= 1 numbers for each channel; the first is the token's own.
    position_BT: int64, document-local positions of the new tokens; -1 is padding, and gives 0.

Returns:
    y_BTC in the dtype of seen; computed in float32 or wider. Differentiable in seen and weight.

Raises:
    ValueError: if the shapes do not fit, or the width is 0.

Source: the shift of H3, Fu et al. 2023, "Hungry Hungry Hippos", which recurrent mixers have kept since.
"""

from torch import Tensor

from ..dispatch import Op
from . import reference


def check(seen_BEC: Tensor, weight: Tensor, position_BT: Tensor) -> None:
    """Raise ValueError, in one sentence, if shapes do not fit or no token is seen."""
    seen, filters, rows = seen_BEC.shape, weight.shape, position_BT.shape
    dimensions = len(seen) == 3 and len(filters) == len(rows) == 2
    if not dimensions or seen[0] != rows[0] or seen[1] < rows[1] or seen[2] != filters[0] or not filters[1]:
        shapes = f"seen {tuple(seen)}, weight {tuple(filters)} and position {tuple(rows)}"
        raise ValueError(f"short_convolution: {shapes} must be [B, E, C], [C, W] and [B, T] with T <= E and W >= 1")


short_convolution = Op("short_convolution", reference.short_convolution, check=check, doc=__doc__)
