"""Needles (``gsm.data.recall.Needle``): their places and questions, the share answered by depth and length, and a test
whether an answer needs the places that attribution names for it.

B sequences, T positions, N questions, F slots of a bank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from gsm.analysis.interventions import Answers, ablations, answers, without_entries, without_slots, without_stages
from gsm.analysis.rollout import TAPS, decoder_rollout, state_routes
from gsm.data.recall import Needle
from gsm.data.synthetic import HELD_OUT, Generated
from gsm.models.base import LanguageModel
from gsm.models.checks import IGNORED
from gsm.models.gsm import GSM
from gsm.observe import Recording, record

AT_ONCE = 16384  # tokens of all sequences read at a time
What = Literal["entries", "retrieved", "slots"]


@dataclass(frozen=True)
class Asked:
    """Questions about needles, in the order of sequences, and of positions in each.

    Attributes:
        token_BT, target_BT: int64, the sequences; -100 where nothing is asked.
        sequence_N: int64, the sequence of each question.
        key_N: int64, the position of its key in the question.
        row_N: int64, the position of its answer, ``task.wait`` tokens later.
        told_N: int64, the position of the key in the needle; the value stands behind it.
    """

    token_BT: Tensor
    target_BT: Tensor
    sequence_N: Tensor
    key_N: Tensor
    row_N: Tensor
    told_N: Tensor

    @property
    def depth_N(self) -> Tensor:
        """The places of the needles, as fractions of the sequence from its beginning, float32."""
        return self.told_N / self.token_BT.shape[1]

    def apart(self) -> Asked:
        """Return the same questions, each in a sequence of its own, in which no other question is asked."""
        token_NT, every_N = self.token_BT[self.sequence_N], torch.arange(len(self.row_N))
        target_NT = torch.full_like(token_NT, IGNORED)
        target_NT[every_N, self.row_N] = self.target_BT[self.sequence_N, self.row_N]
        return replace(self, token_BT=token_NT, target_BT=target_NT, sequence_N=every_N)


def ask(task: Needle, length: int, sequences: int, seed: int = HELD_OUT) -> Asked:
    """Return held-out sequences of a task and a length, other ones with another seed. Raises ValueError as
    ``task.draw``."""
    batch = Generated(task, seed, lambda _: length).batch(range(sequences))
    token_BT, target_BT = batch["tokens"], batch["targets"]
    sequence_N, row_N = (target_BT != IGNORED).nonzero(as_tuple=True)
    key_N = row_N - task.wait
    told_N, meant_N = (  # the first place; the question comes later
        (one_BT[sequence_N] == one_BT[sequence_N, key_N][:, None]).long().argmax(dim=1)
        for one_BT in (token_BT, torch.from_numpy(task.meaning(token_BT.numpy())))
    )
    told_N = torch.where(told_N == key_N, meant_N, told_N)  # another name counts only where its own is in no needle
    return Asked(token_BT, target_BT, sequence_N, key_N, row_N, told_N)


@dataclass(frozen=True)
class NeedleMap:
    """The fraction of needles answered, by length and depth.

    Attributes:
        lengths: tokens of a sequence.
        edges: of the depths, fractions of the sequence, one more than columns.
        accuracy_LD: float32, NaN where no needle lies.
        count_LD: int64, needles.
    """

    lengths: tuple[int, ...]
    edges: tuple[float, ...]
    accuracy_LD: Tensor
    count_LD: Tensor


def needle_map(
    model: LanguageModel, task: Needle, lengths: Sequence[int], *, depths: int = 5, sequences: int = 32
) -> NeedleMap:
    """Return the accuracy by length and depth of a model that was trained on the task.

    No needle stands in the last part of a sequence, with the gap and the questions. Depths therefore reach from 0 to
    the deepest place of any needle at that length, in ``depths`` equal steps of the sequence.
    """
    questions = [ask(task, length, sequences) for length in lengths]
    edges = torch.linspace(0, max(float(question.depth_N.max()) for question in questions) + 1e-6, depths + 1)
    rows = []
    for question in questions:
        right_N = torch.cat([part.right_N for part in _in_parts(model, question)]).cpu().float()
        place_N = torch.bucketize(question.depth_N, edges[1:-1], right=True)
        count_D = torch.bincount(place_N, minlength=depths)
        rows.append((torch.bincount(place_N, weights=right_N, minlength=depths) / count_D, count_D))
    accuracy_LD, count_LD = (torch.stack(parts) for parts in zip(*rows, strict=True))
    return NeedleMap(tuple(lengths), tuple(edges.tolist()), accuracy_LD.float(), count_LD)


@dataclass(frozen=True)
class Named:
    """The attributed places of every question, ``place_NK``: positions or slots, the strongest first; and the same
    number of other places within reach, ``other_NK``; int64."""

    place_NK: Tensor
    other_NK: Tensor


@dataclass(frozen=True)
class NeedleTest:
    """Answers with everything, without the attributed places, and without the same number of others; ``named`` has
    both kinds of places."""

    whole: Answers
    without_named: Answers
    without_others: Answers
    named: Named

    def __str__(self) -> str:
        return (
            f"whole: {self.whole}\nwithout what is named: {self.without_named}\nwithout others: {self.without_others}"
        )


def needle_test(
    model: GSM, asked: Asked, what: What = "entries", *, count: int = 1, start: bool = True, seed: int = 0
) -> NeedleTest:
    """Remove the attributed places of each answer, then the same number of others, and ask again.

    Args:
        model: a GSM that was trained on the task.
        asked: questions; sequences of one document each.
        what: ``entries``, entries of the state; ``retrieved``, the stages' retrieval for them, so that they keep the
            encoder's part; ``slots``, slots of the banks that stages select at the key of the question.
        count: number of places.
        start: for ``entries``, as in ``without_entries``.
        seed: seed of the draw of the other places, among the visible places that attribution does not name.

    Raises:
        ValueError: an answer sees less than twice ``count`` places.
    """
    named = name(model, asked, "slots" if what == "slots" else "entries", count=count, start=start, seed=seed)
    apart = asked.apart()
    without, without_others = (
        answers_without(model, apart, what, gone, start) for gone in (named.place_NK, named.other_NK)
    )
    return NeedleTest(_joined(_in_parts(model, apart)), without, without_others, named)


def stage_test(model: GSM, asked: Asked) -> dict[str, Answers]:
    """Return the answers with everything, without the retrieval of each stage, and without that of all stages."""
    by_removal = {"nothing removed": _joined(_in_parts(model, asked))}
    for what, without in ablations(model).items():
        if what != "state":
            with without():
                by_removal[what] = _joined(_in_parts(model, asked))
    return by_removal


@torch.no_grad()
def name(model: GSM, asked: Asked, what: Literal["entries", "slots"], *, count: int, start: bool, seed: int) -> Named:
    """Return the strongest places for each answer, by rollout. Arguments as of ``needle_test``.

    An entry scores the decoder's share of it times its share of the needle. A slot scores the stages' share of it at
    the key of the question.
    """
    generator, chosen = torch.Generator().manual_seed(seed), []
    for sequence, token_T in enumerate(asked.token_BT):
        with model.evaluating(), record(*TAPS) as seen:
            model.forward(token_T[None])
        row_N = (asked.sequence_N == sequence).nonzero()[:, 0].tolist()
        score_NT = _slots(model, seen, asked, row_N) if what == "slots" else _entries(model, seen, asked, row_N, start)
        chosen += [_chosen(score_T, count, generator) for score_T in score_NT]
    place, other = zip(*chosen, strict=True)
    return Named(torch.stack(place), torch.stack(other))


def answers_without(model: GSM, apart: Asked, what: What, place_NK: Tensor, start: bool = True) -> Answers:
    """Return the answers to questions in sequences of their own, each without its own places."""
    length = apart.token_BT.shape[1] // (model.geometry.encoder_ratio if what == "slots" else 1)
    gone_NT = torch.zeros(len(place_NK), length, dtype=torch.bool).scatter(1, place_NK, True)
    taken: dict[str, Callable[[Tensor], AbstractContextManager[None]]] = {
        "entries": lambda gone_NT: without_entries(model, gone_NT, start=start),
        "retrieved": lambda gone_NT: without_stages(model, gone_NT),
        "slots": lambda gone_NF: without_slots(model, gone_NF),
    }
    return _joined(_in_parts(model, apart, lambda part: taken[what](gone_NT[part])))


def _entries(model: GSM, seen: Recording, asked: Asked, here: list[int], start: bool) -> Tensor:
    """Return the score of each position's entry for some questions, -1 where the row does not see it."""
    from_needle_TT, decoder_TT = state_routes(model, seen).total_TT, decoder_rollout(model, seen)
    scores = []
    for row, place in zip(asked.row_N[here].tolist(), asked.told_N[here].tolist(), strict=True):
        score_T = decoder_TT[row] * from_needle_TT[:, place : place + 2].sum(dim=1)
        sees_T = torch.zeros_like(score_T, dtype=torch.bool)
        sees_T[max(0, row - model.writer.positions + 1) : row + 1] = True
        scores.append(score_T.masked_fill(~sees_T, -1))
    return torch.stack(scores)


def _slots(model: GSM, seen: Recording, asked: Asked, here: list[int]) -> Tensor:
    """Return the score of each slot for some questions, -1 where no stage selects it for the row of the key."""
    way_ST, slots = state_routes(model, seen).way_ST, len(asked.token_BT[0]) // model.geometry.encoder_ratio
    score_NF = torch.full((len(here), slots + 1), -1.0, dtype=way_ST.dtype)
    for stage, _ in enumerate(model.aggregation, 1):
        chosen_NK = seen[f"stage/{stage}/top_k"][0, asked.key_N[here]]
        weight_NE = seen[f"stage/{stage}/weights"][0, asked.key_N[here]].mean(dim=1)
        weight_NK = weight_NE[:, -1 - chosen_NK.shape[1] : -1] * way_ST[stage, asked.key_N[here], None]
        place_NK = chosen_NK.where(chosen_NK >= 0, slots)  # a further place stands for no slot
        score_NF.scatter_(1, place_NK, score_NF.gather(1, place_NK).clamp(min=0)).scatter_add_(1, place_NK, weight_NK)
    return score_NF[:, :-1]


def _chosen(score_T: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the places of the highest scores, and the same number of others at random among scores of at least 0."""
    candidates = score_T >= 0
    if int(candidates.sum()) < 2 * count:
        number = int(candidates.sum())
        raise ValueError(
            f"count={count} is not allowed because an answer sees {number} places. Use at most half of them"
        )
    named_K = score_T.topk(count).indices
    candidates[named_K] = False
    left_N = candidates.nonzero()[:, 0]
    return named_K, left_N[torch.randperm(len(left_N), generator=generator)[:count]]


def _in_parts(
    model: LanguageModel, asked: Asked, inside: Callable[[slice], AbstractContextManager[None]] | None = None
) -> list[Answers]:
    """Return answers part by part; ``inside`` returns the intervention of a part."""
    step, parts = max(1, AT_ONCE // asked.token_BT.shape[1]), []
    for first in range(0, len(asked.token_BT), step):
        part = slice(first, first + step)
        with inside(part) if inside else nullcontext():
            parts.append(answers(model, asked.token_BT[part], asked.target_BT[part]))
    return parts


def _joined(parts: list[Answers]) -> Answers:
    return Answers(torch.cat([part.log_probability_N for part in parts]), torch.cat([part.right_N for part in parts]))
