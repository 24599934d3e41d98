"""What compiled loops are written with: arrays at addresses, and functions of float32 numbers that vectorise."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic


def _pointer(element: types.Type) -> Any:
    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        def generated(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), generated

    return pointer


_float32, _int64 = _pointer(types.float32), _pointer(types.int64)


@njit(inline="always")
def floats(address, shape):
    """The array of float32 numbers at an address."""
    return carray(_float32(address), shape)


@njit(inline="always")
def integers(address, shape):
    """The array of int64 numbers at an address."""
    return carray(_int64(address), shape)


@njit(inline="always")
def exp(x):
    """e to the power of a float32 number, within two units in its last place; 0 below -87.

    Written out since a call of the C library's keeps a loop from being vectorised. x = k ln 2 + r, with ln 2 in two
    parts; a polynomial for e^r (Cephes' `expf`), and k as an exponent.
    """
    x = min(x, np.float32(88.3))
    k = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - k * np.float32(0.693359375) - k * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    power = np.int32((np.int32(max(k, np.float32(-126))) + 127) << 23).view(np.float32)
    return (p * r * r + r + np.float32(1)) * power if x > np.float32(-87) else np.float32(0)
