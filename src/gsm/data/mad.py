"""The six tasks of the mechanistic architecture design benchmark (Poli et al., 2024, MAD), as one sequence each.

    InContextRecall          K3 V7 K1 V2 K3 V7 K5 V5 K1 V2         a pair comes again and again: its value, by its key
    InContextRecall, noisy   K3 V7 . . K1 V2 . . K3 V7             the same among filler
    FuzzyRecall              K3 K1 V7 K2 V2 V4 V1 K3 K1 V7         keys and values are one to three tokens
    SelectiveCopy            . X4 . . X1 . X9 > . . .              the symbols among blanks, in order, behind a mark
    Compression              X4 X1 X9 X2 > > > >                   all of it
    Memorization             K3 ? K1 ? K3 ? K5 ?                   a map, the same in all sequences, never written

Targets stand where the benchmark scores; it trains on all tokens of its recall tasks and tests keys of three tokens
only. In its compression another network reads the one token behind the text; here the model itself answers, one token
after another: a model of fixed state has to compress, attention may look back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from gsm.data.recall import Drawn, Task
from gsm.errors import within
from gsm.models.checks import IGNORED


class Checked(Task):
    """Base class of the tasks: it checks the length."""

    def check(self, length: int) -> None:
        """Raise ValueError if sequences of this length cannot hold the task."""
        if length < self.least:
            raise ValueError(f"context must be at least {self.least} for {type(self).__name__}, got {length}")


@dataclass(frozen=True, kw_only=True)
class InContextRecall(Checked):
    """Pairs drawn at random; at every key that has occurred before, its value is the target.

    Attributes:
        keys, values, fillers: how many ids of each kind.
        noise: the share of pairs in whose place filler stands, from 0 to below 1.
    """

    keys: int = 8
    values: int = 8
    fillers: int = 16
    noise: float = 0.0

    def __post_init__(self) -> None:
        within(1, keys=self.keys, values=self.values, fillers=self.fillers)
        if not 0 <= self.noise < 1:
            raise ValueError(f"noise must be in [0, 1), got {self.noise}")

    @property
    def vocabulary(self) -> int:
        """See `Task.vocabulary`."""
        return self.keys + self.values + self.fillers

    @property
    def least(self) -> int:
        """A pair, and the same again."""
        return 4

    def draw(self, random: np.random.Generator, length: int, whole: int | None = None) -> Drawn:
        """See `Task.draw`. The last pair has been seen, so that something is asked; an odd token is filler."""
        pairs = length // 2
        value_K = self.keys + random.integers(self.values, size=self.keys)
        key_P = random.integers(self.keys, size=pairs)
        pair_P = random.random(pairs) >= self.noise
        pair_P[[random.integers(pairs - 1), -1]] = True
        key_P[-1] = random.choice(key_P[:-1][pair_P[:-1]])
        token_T = self.keys + self.values + random.integers(self.fillers, size=length)
        target_T = np.full(length, IGNORED)
        at_P = 2 * np.flatnonzero(pair_P)
        token_T[at_P], token_T[at_P + 1] = key_P[pair_P], value_K[key_P[pair_P]]
        first_P = np.isin(np.arange(len(at_P)), np.unique(key_P[pair_P], return_index=True)[1])
        target_T[at_P[~first_P]] = token_T[at_P[~first_P] + 1]
        return Drawn(token_T, target_T)


@dataclass(frozen=True, kw_only=True)
class FuzzyRecall(Checked):
    """Keys and values of up to ``longest`` tokens. If a key has occurred before, its value is the target.

    Attributes:
        keys, values: number of ids that keys, and values, are made of; a single key or value has no id twice.
        longest: largest number of tokens of a key, and of a value.
    """

    keys: int = 7
    values: int = 7
    longest: int = 3

    def __post_init__(self) -> None:
        within(1, keys=self.keys, values=self.values)
        within(1, min(self.keys, self.values), longest=self.longest)

    @property
    def vocabulary(self) -> int:
        """One more, for padding in front."""
        return self.keys + self.values + 1

    @property
    def least(self) -> int:
        """The longest pair, and the same again."""
        return 4 * self.longest

    def draw(self, random: np.random.Generator, length: int, whole: int | None = None) -> Drawn:
        """See `Task.draw`. Padding stands in front; the last pair has been seen."""
        value_of: dict[tuple[int, ...], np.ndarray] = {}
        token_T, target_T = np.full(length, self.vocabulary - 1), np.full(length, IGNORED)
        pairs: list[tuple[tuple[int, ...], np.ndarray, bool]] = []
        room = length
        while room >= 4 * self.longest:  # the next, and then the last one
            key = tuple(random.permutation(self.keys)[: random.integers(self.longest) + 1].tolist())
            seen = key in value_of
            value = value_of.setdefault(
                key, self.keys + random.permutation(self.values)[: random.integers(self.longest) + 1]
            )
            pairs.append((key, value, seen))
            room -= len(key) + len(value)
        key, value, _ = pairs[random.integers(len(pairs))]
        pairs.append((key, value, True))
        at = room - len(key) - len(value)
        for key, value, seen in pairs:
            token_T[at : at + len(key)] = key
            at += len(key)
            token_T[at : at + len(value)] = value
            if seen:
                target_T[at - 1 : at - 1 + len(value)] = value
            at += len(value)
        return Drawn(token_T, target_T)


@dataclass(frozen=True, kw_only=True)
class SelectiveCopy(Checked):
    """Symbols at random places among blanks, a mark, and room to repeat them in their order.

    Attributes:
        symbols: how many ids they are drawn from.
        copied: how many stand in a sequence.
    """

    symbols: int = 14
    copied: int = 16

    def __post_init__(self) -> None:
        within(1, symbols=self.symbols, copied=self.copied)

    @property
    def vocabulary(self) -> int:
        """Symbols, blank and mark."""
        return self.symbols + 2

    @property
    def least(self) -> int:
        """Symbols without a blank between them, the mark, and blanks to answer in."""
        return 2 * self.copied + 1

    def draw(self, random: np.random.Generator, length: int, whole: int | None = None) -> Drawn:
        """See `Task.draw`."""
        blank, mark, first = self.symbols, self.symbols + 1, length - self.copied
        symbol_P = random.integers(self.symbols, size=self.copied)
        token_T, target_T = np.full(length, blank), np.full(length, IGNORED)
        token_T[np.sort(random.choice(first - 1, self.copied, replace=False))] = symbol_P
        token_T[first - 1], target_T[first:] = mark, symbol_P
        return Drawn(token_T, target_T)


@dataclass(frozen=True, kw_only=True)
class Compression(Checked):
    """A text of random symbols, then a mark for each of them, at which the next symbol of the text is asked for.

    Attributes:
        symbols: how many ids the text is drawn from.
    """

    symbols: int = 15

    def __post_init__(self) -> None:
        within(1, symbols=self.symbols)

    @property
    def vocabulary(self) -> int:
        """Symbols and mark."""
        return self.symbols + 1

    @property
    def least(self) -> int:
        """A symbol and its mark."""
        return 2

    def draw(self, random: np.random.Generator, length: int, whole: int | None = None) -> Drawn:
        """See `Task.draw`. An odd token is a mark in front."""
        count = length // 2
        token_T, target_T = np.full(length, self.symbols), np.full(length, IGNORED)
        target_T[-count:] = token_T[-2 * count : -count] = random.integers(self.symbols, size=count)
        return Drawn(token_T, target_T)


@dataclass(frozen=True, kw_only=True)
class Memorization(Checked):
    """Keys, each followed by a mark at which its value is asked for; no sequence tells a value.

    Attributes:
        keys: number of ids, and of values: each key has one of its own.
        seed: of the map.
    """

    keys: int = 127
    seed: int = 12345

    def __post_init__(self) -> None:
        within(1, keys=self.keys)

    @property
    def vocabulary(self) -> int:
        """Keys, values and mark."""
        return 2 * self.keys + 1

    @property
    def least(self) -> int:
        """A key and its mark."""
        return 2

    def draw(self, random: np.random.Generator, length: int, whole: int | None = None) -> Drawn:
        """See `Task.draw`. An odd token is a mark."""
        key_P = random.integers(self.keys, size=length // 2)
        token_T, target_T = np.full(length, 2 * self.keys), np.full(length, IGNORED)
        token_T[: 2 * len(key_P) : 2], target_T[1::2] = key_P, _map(self.keys, self.seed)[key_P]
        return Drawn(token_T, target_T)


@cache
def _map(keys: int, seed: int) -> np.ndarray:
    """The value of every key, int64 [keys]."""
    return keys + np.random.default_rng(seed).permutation(keys)
