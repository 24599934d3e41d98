"""DeltaProduct (Siems et al., 2025, "DeltaProduct: Improving State-Tracking in Linear RNNs via Householder Products"):
several steps of the delta rule for every token."""

from __future__ import annotations

from gsm.layers.delta_net import DeltaNet


class DeltaProduct(DeltaNet):
    """DeltaNet with ``steps`` keys, values and betas per token, written one after the other.

    A token then multiplies the state by a product of ``steps`` matrices ``1 - beta k k^T``. With ``largest_beta`` 2 and
    enough steps, this product can be any orthogonal matrix. Arguments and errors are DeltaNet's.
    """
