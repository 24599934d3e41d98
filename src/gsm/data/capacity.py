"""The capacity of a memory: one task whose sequences are loaded in three ways, each alone.

    find 3    K1 V4 . K7 V2 . K5 V9 . | gap | K7 V2 K1 V4 K5 V9     a number of needles, each of them one answer
    wait 4    K1 V4 . K7 V2 . . . . . | gap | K7 . . . ? V2         the answer is due some tokens behind its question
    count 3   K1 V4 . K1 V2 . K1 V4 . | gap | K1 V4                 a key comes several times: its most frequent value

`find` needs an index that distinguishes many keys. `wait` needs a memory of the answer, or a second search when the
question is out of reach. `count` needs many needles for one answer: from a third of them, or fewer, the most frequent
value cannot be told. Ids: keys, values, filler, and the mark (?) at which a delayed answer is due.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import numpy as np

from gsm.data.recall import Drawn, growing
from gsm.errors import within
from gsm.models.checks import IGNORED

KINDS = ("find", "wait", "count")
SHARE = 3  # parts of the needles of a counted key: two have the same value


class Load(NamedTuple):
    """The load of a sequence: a kind, and its amount."""

    kind: str
    amount: int


class Story(NamedTuple):
    """The needles and questions of a sequence: keys and values in random order, and the wait for an answer."""

    needles: list[tuple[int, int]]
    questions: list[tuple[int, int]]
    wait: int


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Draw sequences with a random load: one of the kinds, then one of its amounts. A sequence must hold the smallest.

    Attributes:
        loads: by kind, the amounts to draw from, all equally likely.
        keys, values, fillers: number of ids of each.
        asked: questions of a sequence at most.
        needles: number of needles where the load is to wait.
        counted: number of needles where the load is to count, which decides the number of keys; None: the largest load.
        gap: least number of tokens between needles and questions. While sequences grow, at most half of a sequence, and
            at most what its needles and one question leave.

    Raises:
        ValueError: an unknown kind, or a number out of range.
    """

    measured: ClassVar[str] = "by_load"  # key of its measure in ``gsm.evaluation.questions.MEASURES``

    loads: Mapping[str, Sequence[int]] = field(default_factory=lambda: {"find": (1, 4), "wait": (4,), "count": (3,)})
    keys: int = 64
    values: int = 32
    fillers: int = 16
    asked: int = 8
    needles: int = 8
    counted: int | None = None
    gap: int = 0

    def __post_init__(self) -> None:
        within(1, keys=self.keys, fillers=self.fillers, asked=self.asked, needles=self.needles)
        within(2, values=self.values)
        within(0, gap=self.gap)
        if not self.loads or any(not amounts for amounts in self.loads.values()):
            raise ValueError(f"loads must have amounts of {' or '.join(KINDS)}, got {dict(self.loads)}")
        for kind, amounts in self.loads.items():
            if kind not in KINDS:
                raise ValueError(f"loads must have the keys {', '.join(KINDS)}, got {kind}")
            least = SHARE if kind == "count" else 1
            if min(amounts) < least or any(amount % SHARE for amount in amounts if kind == "count"):
                numbers = f"multiples of {SHARE}" if kind == "count" else "numbers of 1 or more"
                raise ValueError(f"loads.{kind} must be {numbers}, got {list(amounts)}")
        # Plain containers: Hydra's are not.
        plain = {str(kind): [int(amount) for amount in amounts] for kind, amounts in self.loads.items()}
        object.__setattr__(self, "loads", plain)
        if self.counted is None and "count" in plain:
            object.__setattr__(self, "counted", max(plain["count"]))
        most = max([self.needles, *self.loads.get("find", ())])
        if most > self.keys:
            raise ValueError(f"keys must be at least {most}, one for each needle, got {self.keys}")

    @property
    def vocabulary(self) -> int:
        """Number of ids."""
        return self.keys + self.values + self.fillers + 1

    @property
    def least(self) -> int:
        """Tokens that the smallest load of each kind fits into, with one question."""
        return max(min(self._least(kind, amount) for amount in amounts) for kind, amounts in self.loads.items())

    def check(self, length: int) -> None:
        """Raise ValueError if sequences of this length cannot hold every load, with one question and the gap."""
        for load in self.each():
            least = self._least(*load) + self.gap
            if length < least:
                raise ValueError(f"context must be at least {least} for loads.{load.kind}={load.amount}, got {length}")

    def each(self) -> list[Load]:
        """All loads."""
        return [Load(kind, amount) for kind, amounts in self.loads.items() for amount in amounts]

    def only(self, load: Load) -> Capacity:
        """The same task, always loaded in this way."""
        return replace(self, loads={load.kind: [load.amount]})  # with the same number of needles

    def apart(self) -> dict[str, dict[str, Capacity]]:
        """By kind and amount (as a string, since results go into JSON), the task that is always loaded so."""
        return {
            kind: {str(amount): self.only(Load(kind, amount)) for amount in amounts}
            for kind, amounts in self.loads.items()
        }

    def draw(self, random: np.random.Generator, length: int, whole: int | None = None) -> Drawn:
        """One sequence. Raises ValueError where it cannot hold the smallest load."""
        kind = list(self.loads)[int(random.integers(len(self.loads)))]
        fitting = [amount for amount in self.loads[kind] if self._least(kind, amount) <= length]
        if not fitting:
            raise ValueError(f"length must hold loads.{kind}={min(self.loads[kind])}, got {length}")
        story = self._story(random, kind, fitting, length)
        return self._written(random, length, growing(self.gap, length, whole), story)

    def _least(self, kind: str, amount: int) -> int:
        return 2 * self.needles + 2 + amount if kind == "wait" else 2 * amount + 2

    def _story(self, random: np.random.Generator, kind: str, amounts: Sequence[int], length: int) -> Story:
        amount = amounts[int(random.integers(len(amounts)))]
        key_P = random.permutation(self.keys)
        if kind != "count":
            key_P = key_P[: amount if kind == "find" else self.needles]
            pairs = [(int(key), self.keys + int(random.integers(self.values))) for key in key_P]
            return Story(pairs, pairs, amount if kind == "wait" else 0)
        pairs, questions = [], []
        room = min(self.counted or amount, length // 2 - 1)  # in a sequence that is to grow, the room in it
        for key in key_P[: max(1, min(self.asked, room // amount))].tolist():
            often, other = (self.keys + random.permutation(self.values)[:2]).tolist()
            pairs += [(key, other if i % SHARE == 0 else often) for i in range(amount)]
            questions.append((key, often))
        return Story([pairs[i] for i in random.permutation(len(pairs))], questions, 0)

    def _written(self, random: np.random.Generator, length: int, gap: int, story: Story) -> Drawn:
        """Write the needles at random places, the gap, and questions in random order, as far as there is room."""
        needles, each = len(story.needles), 2 + story.wait
        count = min(len(story.questions), self.asked, max(1, (length - 2 * needles - gap) // each))
        questions = [story.questions[i] for i in random.permutation(len(story.questions))[:count]]
        first = self.keys + self.values
        token_T = first + random.integers(self.fillers, size=length)
        target_T = np.full(length, IGNORED)
        room = max(length - each * count - gap, 2 * needles)
        start_P = np.sort(random.integers(room - 2 * needles + 1, size=needles))
        place_P = start_P + 2 * np.arange(needles)
        token_T[place_P], token_T[place_P + 1] = np.array(story.needles).T
        for place, (key, value) in zip(range(length - each * count, length, each), questions, strict=True):
            due = place + story.wait
            token_T[due] = first + self.fillers
            token_T[place], token_T[due + 1], target_T[due] = key, value, value
        return Drawn(token_T, target_T)
