"""Small groups as tables, for state tracking: addition modulo m, and all permutations of n things. E elements."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, permutations

import numpy as np

NAME = re.compile(r"([ZS])(\d+)")
LARGEST = {"Z": 1000, "S": 6}  # S6 has 720 elements already


@dataclass(frozen=True)
class Group:
    """A group; element 0 is the identity.

    Attributes:
        name: Z7, S5, ...
        product_EE: int64, at [a, b] the element that a followed by b makes.
        few: a small set of elements from which all others come, and the identity, so that the length of a word gives
            nothing away: one step of an addition; swaps of neighbours in a permutation.
    """

    name: str
    product_EE: np.ndarray
    few: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.product_EE)

    def states(self, word_N: np.ndarray) -> np.ndarray:
        """Return the states of a word from the identity on, element by element: int64 [N]."""
        states = accumulate(word_N, lambda state, element: self.product_EE[state, element])
        return np.fromiter(states, np.int64, len(word_N))


@cache
def group(name: str) -> Group:
    """Return a group by its name: ``Z<m>``, addition modulo m, of which Z2 is also called ``parity``; ``S<n>``, the
    permutations of n things, solvable up to S4.

    Raises ValueError for another name, or a group that is trivial or too large for a table.
    """
    match = NAME.fullmatch("Z2" if name == "parity" else name)
    kind, number = (match[1], int(match[2])) if match else ("", 0)
    if not 2 <= number <= LARGEST.get(kind, 0):
        raise ValueError(
            f"groups must be parity, Z<m> (addition modulo m, 2 to {LARGEST['Z']}) or S<n> (permutations of n things, "
            f"2 to {LARGEST['S']}), such as Z7 or S5, got {name}"
        )
    return _cyclic(name, number) if kind == "Z" else _symmetric(name, number)


def _cyclic(name: str, modulus: int) -> Group:
    element_E = np.arange(modulus)
    return Group(name, (element_E[:, None] + element_E) % modulus, (0, 1))


def _symmetric(name: str, things: int) -> Group:
    """Permutations in lexicographic order; p after which q follows takes i to q[p[i]]."""
    order_EN = np.array(list(permutations(range(things))))
    weight_N = things ** np.arange(things)[::-1]  # as digits, permutations are numbers in the same order
    composed_EEN = order_EN[np.arange(len(order_EN))[None, :, None], order_EN[:, None, :]]
    product_EE = np.searchsorted(order_EN @ weight_N, composed_EEN @ weight_N)
    swaps = [[*range(i), i + 1, i, *range(i + 2, things)] for i in range(things - 1)]
    few = np.searchsorted(order_EN @ weight_N, np.array([list(range(things)), *swaps]) @ weight_N)
    return Group(name, product_EE, tuple(few.tolist()))
