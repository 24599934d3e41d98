"""DeltaProduct (Siems et al., 2025, "DeltaProduct: Improving State-Tracking in Linear RNNs via Householder Products"):
several steps of the delta rule for every token."""

from __future__ import annotations

from gsm.layers.delta_net import DeltaNet


class DeltaProduct(DeltaNet):
    """DeltaNet with ``steps`` keys, values and betas for every token, whose writes follow one another.

    A token then multiplies the state by a product of so many matrices ``1 - beta k k^T``, which can be any orthogonal
    one if ``largest_beta`` is 2 and there are enough of them. Arguments and errors are DeltaNet's.
    """
