"""State tracking: a word of group elements is read, and the target is their product (Liu et al., 2023; Merrill et
al., 2024).

    direct, ask every     g1 g2 g3 g4               targets s1 s2 s3 s4, and no state is ever seen
    direct, ask end       g1 g2 g3 g4               target s4 alone
    steps                 g1 s1 g2 s2 g3 s3 g4 s4   the same targets, each written down before the next letter

Here s1 = g1 and s(t+1) = s(t) g(t+1). Every group has ids of its own, its letters (which spell words) first,
then its states, so that one model can learn several. Attention of a fixed depth cannot follow S5 through words of any
length in one pass (Merrill et al., 2024, if TC0 is not NC1, as is commonly believed), though it has short cuts for
addition and S3. A recurrence can that turns its state as the letters ask (Siems et al., 2025); and with steps, each
state is one look-up in the table of the group. N letters, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from gsm.data.groups import Group, group
from gsm.data.recall import Drawn
from gsm.models.checks import IGNORED

ANSWERS = ("direct", "steps")
LETTERS = ("all", "few")
ASK = ("every", "end")


class Word(NamedTuple):
    """A word as ids: int64 [N] letters, and int64 [N] the states that they lead to."""

    letter_N: np.ndarray
    state_N: np.ndarray


@dataclass(frozen=True, kw_only=True)
class StateTracking:
    """The task, for sequences of any length; a word belongs to one of the groups, each as often as the others.

    Attributes:
        groups: parity, Z<m>, S<n>; see ``gsm.data.groups``.
        letters: "all", every element may come; or "few", the group's generators and the identity.
        answers: "direct", the model sees letters alone; or "steps", also the state behind each letter but the last,
            which training gives it, and which it has to write itself where it is tested.
        ask: "every", each state is a target; or "end", the last one alone, for direct answers.
        tested: letters of the words that a trained model is tested with; None: half of the number in training, the
            same, twice and four times that number.

    Raises:
        ValueError: an unknown name, a group that comes twice, steps of which only the end is asked, a length below 1.
    """

    measured: ClassVar[str] = "by_length"  # key of its measure in ``gsm.evaluation.questions.MEASURES``

    groups: Sequence[str] = ("S5",)
    letters: str = "all"
    answers: str = "direct"
    ask: str = "every"
    tested: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name, choices in (("letters", LETTERS), ("answers", ANSWERS), ("ask", ASK)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be {' or '.join(choices)}, got {getattr(self, name)}")
        if self.answers == "steps" and self.ask == "end":
            raise ValueError("ask must be every with answers=steps, which write every state, got end")
        if not self.groups or len(set(self.groups)) < len(self.groups):
            raise ValueError(f"groups must be one or more, each once, got {list(self.groups)}")
        if self.tested is not None and (not self.tested or min(self.tested) < 1):
            raise ValueError(f"tested must be lengths from 1 on, or null, got {list(self.tested)}")
        _ = self._groups

    @property
    def vocabulary(self) -> int:
        """Number of ids."""
        return self._first(len(self._groups))

    @property
    def least(self) -> int:
        """Positions that a single letter takes."""
        return 2 if self.answers == "steps" else 1

    @property
    def chance(self) -> dict[str, float]:
        """By group, how often a guess is right; with few letters, and words that are short, the best one is better."""
        return {each.name: 1 / len(each) for each in self._groups}

    def word_length(self, length: int) -> int:
        """Return the letters in a sequence of this number of positions."""
        return length // self.least

    def test_lengths(self, length: int) -> list[int]:
        """Letters of the words to test a model with that was trained on sequences of ``length``."""
        trained = self.word_length(length)
        return sorted(self.tested or {max(1, trained // 2), trained, 2 * trained, 4 * trained})

    def check(self, length: int) -> None:
        """Raise ValueError if sequences of this length cannot hold whole words."""
        if length < self.least or length % self.least:
            raise ValueError(f"context must be a multiple of {self.least}, the positions of a letter, got {length}")

    def draw(self, random: np.random.Generator, length: int, whole: int | None = None) -> Drawn:
        """One sequence; its word fills it."""
        word = self.word(int(random.integers(len(self._groups))), random, self.word_length(length))
        token_T = np.stack([word.letter_N, word.state_N])[: self.least].T.flatten()
        target_T = np.full_like(token_T, IGNORED)
        rows = slice(None) if self.ask == "every" else slice(-1, None)
        target_T[:: self.least][rows] = word.state_N[rows]
        return Drawn(token_T, target_T)

    def word(self, number: int, random: np.random.Generator, count: int) -> Word:
        """A word of the group with this number, uniform over its letters."""
        chosen, first = self._groups[number], self._first(number)
        letters = np.array(self._letters(chosen))
        letter_N = random.integers(len(letters), size=count)
        return Word(first + letter_N, first + len(letters) + chosen.states(letters[letter_N]))

    @property
    def _groups(self) -> list[Group]:
        return [group(name) for name in self.groups]

    def _letters(self, one: Group) -> Sequence[int]:
        return range(len(one)) if self.letters == "all" else one.few

    def _first(self, number: int) -> int:
        """Return the number of ids of the groups before a number, which is the first id of the group there."""
        return sum(len(self._letters(each)) + len(each) for each in self._groups[:number])
