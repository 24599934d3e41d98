"""A counter-based hash for reproducible random numbers without generator state; it changes no other random numbers."""

from __future__ import annotations

from torch import Tensor


def mixed(x: Tensor) -> Tensor:
    """Return a hash of 32 bits, in int64: shifts and odd factors, similar to MurmurHash3's finaliser.

    The constants are from C. Wellons' search for such hashes (prospector). Both factors are below 2^31, so that every
    product fits into int64.
    """
    x = (x ^ x >> 16) * 0x21F0AAAD & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x735A2D97 & 0xFFFFFFFF
    return x ^ x >> 15
