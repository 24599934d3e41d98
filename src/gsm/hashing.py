"""A hash, for draws that are made again alike: they need no generator, and change no other random number."""

from __future__ import annotations

from torch import Tensor


def mixed(x: Tensor) -> Tensor:
    """A hash of 32 bits, in int64: shifts and odd factors in the manner of MurmurHash3's finaliser.

    The constants come from C. Wellons' search for such hashes (prospector); both factors are below 2^31, so that int64
    holds every product.
    """
    x = (x ^ x >> 16) * 0x21F0AAAD & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x735A2D97 & 0xFFFFFFFF
    return x ^ x >> 15
