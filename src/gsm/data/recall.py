"""Tasks that need memory, made on the fly: needles in filler, and multi-query associative recall.

A sequence has pairs of a key and a value, and later asks for the value by the key. Ids: keys, then values, then filler.
The target is the value, at the position of the key that asks (or `wait` tokens later); nothing else is trained on.

    Needle                   . . K3 V7 . . K1 V2 . | . . . . . . . . . . | K1 V2 K3 V7
                             needles in filler     | gap, filler only    | questions and answers
    Needle, wait = 3         the same, and at the end                      K1 . . . V2 K3 . . . V7
    Needle, asked = 1        the same, and at the end                      K1 V2: the other needles only distract
    Chain                    . . K3 V7 . . K1 K3 . | . . . . . . . . . . | K1 V7
                             a needle's value may be the key of another: it takes two searches, one after the other
    Chain, steps = true      the same, and at the end                      K1 K3 V7: what is found on the way is written
    Paraphrase               . . K3 V7 . . K1 V2 . | . . . . . . . . . . | K6 V2 K8 V7
                             the same, but K6 is another name for K1, and K8 for K3: in all sequences, never written
    MultiQueryRecall         K3 V7 K1 V2 K5 V5 | . . K1 V2 . . . . K5 V5 . . . . . . K3 V7
                             all pairs         | questions and answers at distances that follow a power law

While the lengths of a run still grow, a gap is at most half of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from gsm.errors import within
from gsm.models.checks import IGNORED


class Drawn(NamedTuple):
    """One sequence: int64 [T] ids, and int64 [T] targets, -100 where none is."""

    token_T: np.ndarray
    target_T: np.ndarray


class Task(Protocol):
    """The members of a task that ``gsm.data.synthetic`` uses."""

    @property
    def vocabulary(self) -> int:
        """Number of ids."""
        ...

    @property
    def least(self) -> int:
        """Tokens of the shortest sequence that it can be stretched from."""
        ...

    def check(self, length: int) -> None:
        """Raise ValueError if sequences of this length cannot hold the task."""
        ...

    def draw(self, random: np.random.Generator, length: int, whole: int | None = None) -> Drawn:
        """One sequence of ``length``; ``whole`` is the length at which it is the task in full (None: this one)."""
        ...


@dataclass(frozen=True, kw_only=True)
class Alphabet:
    """The ids that a task is written in.

    Attributes:
        keys, values, fillers: how many ids of each kind.
        pairs: number of pairs in one sequence, and of questions; their keys differ.
        wait: tokens between the key of a question and its answer, 0 in tasks without the field.

    Raises:
        ValueError: a number below 1, or more pairs than keys.
    """

    wait = 0  # no field: only tasks with one can set it
    keys: int = 32
    values: int = 32
    fillers: int = 32
    pairs: int = 10

    def __post_init__(self) -> None:
        within(1, keys=self.keys, values=self.values, fillers=self.fillers, pairs=self.pairs)
        if self.pairs > self.keys:
            raise ValueError(f"pairs must be at most keys={self.keys}, as pairs have different keys, got {self.pairs}")

    @property
    def vocabulary(self) -> int:
        """Number of ids."""
        return self.keys + self.values + self.fillers

    @property
    def least(self) -> int:
        """Tokens of all pairs, and of a question and an answer for each."""
        return 4 * self.pairs

    def meaning(self, token: np.ndarray) -> np.ndarray:
        """Return the meanings of ids, int64 of any shape: equal for keys of one meaning. Here, the ids themselves."""
        return token

    def _pairs(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Different keys and any values, int64 [pairs] each."""
        key_P = random.permutation(self.keys)[: self.pairs]
        return key_P, self.keys + random.integers(self.values, size=self.pairs)

    def _filler(self, random: np.random.Generator, length: int) -> np.ndarray:
        return self.keys + self.values + random.integers(self.fillers, size=length)

    def _ask(
        self, random: np.random.Generator, token_T: np.ndarray, at_Q: np.ndarray, said_PN: np.ndarray, wait: int = 0
    ) -> Drawn:
        """Write questions in random order, one at each place, and their answers; set the targets.

        Args:
            random: draws which are asked.
            token_T: the sequence, changed in place.
            at_Q: places of the questions.
            said_PN: of each pair the key that asks, and the tokens of the answer.
            wait: tokens between the key and the answer.
        """
        said_QN = said_PN[random.permutation(len(said_PN))[: len(at_Q)]]
        target_T = np.full_like(token_T, IGNORED)
        token_T[at_Q] = said_QN[:, 0]
        for due_Q, said_Q in enumerate(said_QN.T[1:], wait):
            token_T[at_Q + due_Q + 1] = target_T[at_Q + due_Q] = said_Q
        return Drawn(token_T, target_T)


@dataclass(frozen=True, kw_only=True)
class Needle(Alphabet):
    """Needles at random places, at any parity, then filler, then all the questions.

    Attributes:
        gap: more positions than this lie between any needle and any question. While sequences grow, at most half of a
            sequence, and at most what needles and questions leave.
        wait: tokens of filler between the key of a question and its answer, which is due at the last of them. So the
            value that is found at the key must be kept: beyond the windows of the encoder, in the state.
        asked: number of questions; None: one for each needle.
    """

    gap: int
    wait: int = 0
    asked: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        within(0, gap=self.gap, wait=self.wait)
        within(1, self.askable, asked=self.asked)

    @property
    def askable(self) -> int:
        """Number of needles that a question can be about."""
        return self.pairs

    @property
    def answer_tokens(self) -> int:
        """Tokens of an answer: targets in a row."""
        return 1

    @property
    def questions(self) -> int:
        """Number of questions of a sequence."""
        return self.asked or self.askable

    @property
    def least(self) -> int:
        """Tokens of all needles, and of the questions with their wait and answers."""
        return 2 * self.pairs + self._each * self.questions

    @property
    def _each(self) -> int:
        """Tokens of a question, its wait and its answer."""
        return 1 + self.wait + self.answer_tokens

    def check(self, length: int) -> None:
        """Raise ValueError if a sequence cannot hold needles, questions and the whole gap."""
        least = self.least + self.gap
        if length < least:
            raise ValueError(f"context must be at least {least} with pairs={self.pairs} gap={self.gap}, got {length}")

    def draw(self, random: np.random.Generator, length: int, whole: int | None = None) -> Drawn:
        """One sequence. Raises ValueError where not even the needles and questions fit."""
        gap, asking = growing(self.gap, length, whole), self._each * self.questions
        room = max(length - asking - gap, 2 * self.pairs)  # for the needles
        if length < self.least:
            raise ValueError(f"length must be at least {self.least} for pairs={self.pairs}, got {length}")
        token_T = self._filler(random, length)
        needle_P2, said_QN = self._story(random)
        spare_P = np.sort(random.integers(room - 2 * self.pairs + 1, size=self.pairs))
        at_P = spare_P + 2 * np.arange(self.pairs)
        token_T[at_P], token_T[at_P + 1] = needle_P2.T
        at_Q = length - asking + self._each * np.arange(self.questions)
        return self._ask(random, token_T, at_Q, said_QN, self.wait)

    def _story(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draw the needles of a sequence, and every question that may be asked about them.

        Returns:
            Key and value of each needle, int64 [pairs, 2].
            Key and answer of each question, int64 [askable, 1 + answer_tokens].
        """
        needle_P2 = np.stack(self._pairs(random), axis=1)
        return needle_P2, needle_P2


@dataclass(frozen=True, kw_only=True)
class Chain(Needle):
    """Needles whose value is the key of the next needle, but for the last of a chain: a question has the first key, and
    its answer is the value at the end. One search after another is needed.

    Attributes:
        hops: needles of a chain; must divide ``pairs``.
        steps: whether the answer begins with the keys on the way: a short chain of thought.
    """

    hops: int = 2
    steps: bool = False

    def __post_init__(self) -> None:
        within(1, hops=self.hops)
        super().__post_init__()
        if self.pairs % self.hops:
            raise ValueError(f"hops must be a divisor of pairs={self.pairs}, got {self.hops}")

    @property
    def askable(self) -> int:
        """See `Needle.askable`."""
        return self.pairs // self.hops

    @property
    def answer_tokens(self) -> int:
        """See `Needle.answer_tokens`."""
        return self.hops if self.steps else 1

    def _story(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        key_P, value_P = self._pairs(random)
        key_QH = key_P.reshape(-1, self.hops)
        said_QN = np.concatenate([key_QH, value_P.reshape(key_QH.shape)[:, -1:]], axis=1)
        needle_P2 = np.stack([said_QN[:, :-1], said_QN[:, 1:]], axis=-1).reshape(-1, 2)
        return random.permutation(needle_P2), said_QN if self.steps else said_QN[:, [0, -1]]


@dataclass(frozen=True, kw_only=True)
class Paraphrase(Needle):
    """Needles with one name of a key, and questions with another name of it (Modarressi et al., 2025, NoLiMa).

    Which names mean the same key is told in no sequence: the weights have to hold it.

    With three names or more, training keeps the first names and the second names of all keys in separate sequences. A
    model that answers a question by a second name about a needle by a first name (``left_out``) has combined two facts:
    the first name means the same as the third, and the third the same as the second.

    Attributes:
        keys: the names of all keys together.
        names: number of them that mean the same key.
        literal: the share of sequences whose questions use the name of the needle. Their needles may have several names
            of one key, with values of their own, so that nothing in them says which names mean the same.
        left_out: needles by first names and questions by second ones, or the other way round.
        table: the seed of which names mean the same.
    """

    measured: ClassVar[str] = "by_question"  # key of its measure in ``gsm.evaluation.questions.MEASURES``

    names: int = 4
    literal: float = 0.0
    left_out: bool = False
    table: int = 12345

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.names < 2 or self.keys % self.names:
            raise ValueError(f"names must be a divisor of keys={self.keys} from 2 on, got {self.names}")
        if self.pairs > self.keys // self.names:
            raise ValueError(f"pairs must be at most {self.keys // self.names}, keys by names, got {self.pairs}")
        within(0, 1, literal=self.literal)
        if self.left_out and self.names < 3:
            raise ValueError(f"names must be at least 3 with left_out=true, got {self.names}")

    def meaning(self, token: np.ndarray) -> np.ndarray:
        """See `Alphabet.meaning`: of a name, the number of its key."""
        key_of_N = np.empty(self.keys, dtype=np.int64)
        key_of_N[_names(self.keys, self.names, self.table)] = np.arange(self.keys // self.names)[:, None]
        return np.where(token < self.keys, key_of_N[np.minimum(token, self.keys - 1)], token)

    def apart(self) -> dict[str, Paraphrase]:
        """What is measured apart: pairs of names that training has, those that it leaves out, and one name for both."""
        parts = {"paraphrased": replace(self, literal=0.0, left_out=False)}
        parts |= {"left_out": replace(self, literal=0.0, left_out=True)} if self.names > 2 else {}
        return {**parts, "literal": replace(self, literal=1.0, left_out=False)}

    def _pairs(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of different keys, and any values, int64 [pairs] each."""
        key_P = random.permutation(self.keys // self.names)[: self.pairs]
        return key_P, self.keys + random.integers(self.values, size=self.pairs)

    def _story(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        key_P, value_P = self._pairs(random)
        needle_P, question_P = self._named(random, key_P)
        return np.stack([needle_P, value_P], axis=1), np.stack([question_P, value_P], axis=1)

    def _named(self, random: np.random.Generator, key_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of keys in needles, and in questions, int64 [pairs] each."""
        names_KN = _names(self.keys, self.names, self.table)
        swapped = int(random.integers(2))  # whether first or second names stand in this sequence
        if self.left_out:
            return names_KN[key_P, swapped], names_KN[key_P, 1 - swapped]
        usual_KN = names_KN if self.names == 2 else np.delete(names_KN, swapped, axis=1)
        if random.random() < self.literal:
            name_P = random.permutation(usual_KN.flatten())[: self.pairs]
            return name_P, name_P
        two_P2 = random.permuted(np.tile(np.arange(usual_KN.shape[1]), (self.pairs, 1)), axis=1)[:, :2]
        return usual_KN[key_P, two_P2[:, 0]], usual_KN[key_P, two_P2[:, 1]]


@dataclass(frozen=True, kw_only=True)
class MultiQueryRecall(Alphabet):
    """All pairs first, then questions among filler: near ones are more frequent (Arora et al., 2023, Zoology).

    Attributes:
        power: exponent of the law, p(distance) ~ distance ** (power - 1); 1 is uniform.
        gap: least number of positions of filler between the last pair and the first question. While sequences grow, at
            most half of a sequence, and at most what the questions leave.
        shifted: put pairs and questions at odd positions in half of the sequences (of those with a spare token). By
            default all stand at even positions. A bank that pools two tokens then always pools a key with its value, so
            the model need not learn to connect them.
    """

    power: float = 0.1
    gap: int = 0
    shifted: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        within(0, power=self.power, gap=self.gap)

    def check(self, length: int) -> None:
        """Raise ValueError if a sequence cannot hold pairs, questions and the whole gap."""
        least = 4 * self.pairs + self.gap + self.gap % 2 + self.shifted  # questions stand at even places, as pairs do
        if length < least:
            raise ValueError(f"context must be at least {least} with pairs={self.pairs} gap={self.gap}, got {length}")

    def draw(self, random: np.random.Generator, length: int, whole: int | None = None) -> Drawn:
        """One sequence. Raises ValueError where it cannot hold pairs and questions."""
        if length < 4 * self.pairs:
            raise ValueError(f"length must be at least {4 * self.pairs} for pairs={self.pairs}, got {length}")
        token_T = self._filler(random, length)
        key_P, value_P = self._pairs(random)
        shift = int(random.integers(2)) if self.shifted and length > 4 * self.pairs else 0
        at_P = shift + 2 * np.arange(self.pairs)
        token_T[at_P], token_T[at_P + 1] = key_P, value_P
        places = (length - shift) // 2 - self.pairs  # of two tokens, behind the pairs
        first = min(-(-growing(self.gap, length, whole) // 2), places - self.pairs)
        weight = np.arange(first + 1, places + 1) ** (self.power - 1.0)
        chosen_P = first + random.choice(places - first, self.pairs, replace=False, p=weight / weight.sum())
        at_P = shift + 2 * self.pairs + 2 * np.sort(chosen_P)
        return self._ask(random, token_T, at_P, np.stack([key_P, value_P], axis=1))


@cache
def _names(keys: int, names: int, seed: int) -> np.ndarray:
    """The ids that each key is called by, int64 [keys / names, names]."""
    return np.random.default_rng(seed).permutation(keys).reshape(-1, names)


def growing(gap: int, length: int, whole: int | None) -> int:
    """Return the gap of a sequence of ``length``: at most half of it while sequences still grow to ``whole``."""
    return gap if whole is None or length >= whole else min(gap, length // 2)
