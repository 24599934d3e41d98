"""Questions about needles and about key-value pairs (``gsm.data.recall``): accuracy by depth and length, and a test
whether an answer depends on the positions or slots to which it is attributed.

B sequences, T positions, N questions, K places (positions or slots) per question, F slots of a bank, L lengths, D
depths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from gsm.analysis.interventions import Answers, ablations, answers, without_entries, without_slots, without_stages
from gsm.analysis.rollout import TAPS, decoder_rollout, state_routes
from gsm.data.recall import Alphabet, Task
from gsm.data.synthetic import HELD_OUT, Generated
from gsm.models.base import LanguageModel
from gsm.models.checks import IGNORED
from gsm.models.gsm import GSM, check_gsm
from gsm.observe import Recording, record

AT_ONCE = 16384  # tokens of all sequences read at a time
Removal = Literal["entries", "retrieved", "slots"]


@dataclass(frozen=True)
class Asked:
    """Sequences, and the tokens that a model should predict in them: the answers of a task, or any text.

    Attributes:
        token_BT, target_BT: int64, the sequences, and the answers at the positions that predict them; -100 elsewhere.
    """

    token_BT: Tensor
    target_BT: Tensor

    @property
    def commonest(self) -> float:
        """The fraction of answers that are the commonest one: the accuracy of a model that always gives it."""
        answer_N = self.target_BT[self.target_BT != IGNORED]
        return float((answer_N == answer_N.mode().values).float().mean())


@dataclass(frozen=True)
class Questions(Asked):
    """Questions about needles, ordered by sequence and then by position.

    Attributes:
        sequence_N: int64, the sequence of each question.
        key_N: int64, the position of the key in the question.
        row_N: int64, the position at which the model answers, ``task.wait`` tokens later.
        needle_N: int64, the position of the key in the needle; the value is the next token.
    """

    sequence_N: Tensor
    key_N: Tensor
    row_N: Tensor
    needle_N: Tensor

    @property
    def depth_N(self) -> Tensor:
        """The position of each needle as a fraction of the sequence's length, float32."""
        return self.needle_N / self.token_BT.shape[1]

    def separate(self) -> Questions:
        """Return the same questions, each with a separate copy of its sequence that has only its target."""
        token_NT, every_N = self.token_BT[self.sequence_N], torch.arange(len(self.row_N))
        target_NT = torch.full_like(token_NT, IGNORED)
        target_NT[every_N, self.row_N] = self.target_BT[self.sequence_N, self.row_N]
        return replace(self, token_BT=token_NT, target_BT=target_NT, sequence_N=every_N)


def ask(task: Task, length: int, sequences: int, seed: int = HELD_OUT) -> Questions:
    """Return held-out questions of a task.

    Args:
        task: a task with keys and values, as ``data=needle`` or ``data=recall``. For the latter, the needle of a
            question is the pair with its key.
        length: tokens per sequence (T).
        sequences: number of sequences (B).
        seed: random seed.

    Raises:
        TypeError: if the task has no keys and values.
        ValueError: as ``task.draw``.
    """
    if not isinstance(task, Alphabet):
        raise TypeError(f"task must have keys and values, as data=needle or recall has, got {type(task).__name__}")
    batch = Generated(task, seed, lambda _: length).batch(range(sequences))
    token_BT, target_BT = batch["tokens"], batch["targets"]
    sequence_N, row_N = (target_BT != IGNORED).nonzero(as_tuple=True)
    key_N = row_N - task.wait
    same_token_N, same_meaning_N = (  # the first occurrence, as the question comes later
        (names_BT[sequence_N] == names_BT[sequence_N, key_N][:, None]).long().argmax(dim=1)
        for names_BT in (token_BT, torch.from_numpy(task.meaning(token_BT.numpy())))
    )
    # Another name of the key is looked up only if no needle has the name in the question.
    needle_N = torch.where(same_token_N == key_N, same_meaning_N, same_token_N)
    return Questions(token_BT, target_BT, sequence_N, key_N, row_N, needle_N)


@dataclass(frozen=True)
class NeedleMap:
    """The accuracy on needle questions by length and depth.

    Attributes:
        lengths: tokens per sequence, L lengths.
        edges: D + 1 bounds of the depths, as fractions of the sequence.
        accuracy_LD: float32, the fraction answered; NaN without any needle.
        count_LD: int64, number of needles.
    """

    lengths: tuple[int, ...]
    edges: tuple[float, ...]
    accuracy_LD: Tensor
    count_LD: Tensor


def needle_map(
    model: LanguageModel, task: Task, lengths: Sequence[int], *, depths: int = 5, sequences: int = 32
) -> NeedleMap:
    """Return the accuracy of a model on needle questions by length and depth.

    There are no needles in the last part of a sequence, with the gap and the questions. So the depths reach only from 0
    to that of the deepest needle, in equal steps.

    Args:
        model: a model that was trained on the task.
        task: as in ``ask``.
        lengths: tokens per sequence.
        depths: number of depths (D).
        sequences: number of sequences per length.
    """
    by_length = [ask(task, length, sequences) for length in lengths]
    edges = torch.linspace(0, max(float(questions.depth_N.max()) for questions in by_length) + 1e-6, depths + 1)
    rows = []
    for questions in by_length:
        right_N = _answers_by_batch(model, questions).right_N.cpu().float()
        column_N = torch.bucketize(questions.depth_N, edges[1:-1], right=True)
        count_D = torch.bincount(column_N, minlength=depths)
        rows.append((torch.bincount(column_N, weights=right_N, minlength=depths) / count_D, count_D))
    accuracy_LD, count_LD = (torch.stack(values) for values in zip(*rows, strict=True))
    return NeedleMap(tuple(lengths), tuple(edges.tolist()), accuracy_LD.float(), count_LD)


@dataclass(frozen=True)
class Places:
    """The places (positions or slots) to remove for every question.

    Attributes:
        attributed_NK: int64, the places to which the answer is attributed most strongly, the strongest first.
        other_NK: int64, as many random other places that the answer sees.
    """

    attributed_NK: Tensor
    other_NK: Tensor


@dataclass(frozen=True)
class NeedleTest:
    """The answers of the whole model, without the attributed places, and without as many other places, and the places
    themselves."""

    whole: Answers
    without_attributed: Answers
    without_others: Answers
    places: Places

    def __str__(self) -> str:
        return (
            f"whole: {self.whole}\nwithout the attributed places: {self.without_attributed}\n"
            f"without other places: {self.without_others}"
        )


def needle_test(
    model: GSM, questions: Questions, removal: Removal = "entries", *, count: int = 1, start: bool = True
) -> NeedleTest:
    """Answer each question without the places to which the answer is attributed, and without as many other places.

    Args:
        model: a GSM that was trained on the task.
        questions: questions, in sequences of one document each.
        removal: what is removed. ``entries``: state entries. ``retrieved``: only what the stages have retrieved for
            these entries, not the encoder's part. ``slots``: bank slots that stages select at the key of the question.
        count: number of places to remove per question (K).
        start: for ``entries``, as in ``without_entries``.

    Raises:
        ValueError: if the model is no GSM, there is no such removal, or an answer sees fewer than 2 ``count`` places.
    """
    check_gsm(model)
    if removal not in get_args(Removal):
        raise ValueError(f"removal must be one of {', '.join(get_args(Removal))}, got {removal!r}")
    kind: Literal["entries", "slots"] = "slots" if removal == "slots" else "entries"
    places = attributed_places(model, questions, kind, count=count, start=start)
    separate = questions.separate()
    without_attributed, without_others = (
        answers_without(model, separate, removal, place_NK, start)
        for place_NK in (places.attributed_NK, places.other_NK)
    )
    return NeedleTest(_answers_by_batch(model, separate), without_attributed, without_others, places)


def stage_test(model: GSM, asked: Asked) -> dict[str, Answers]:
    """Return the answers of the whole model, without each stage, and without all stages, by name.

    Raises:
        ValueError: if the model is no GSM.
    """
    removals, by_removal = ablations(model), {"nothing removed": _answers_by_batch(model, asked)}
    for part, without in removals.items():
        if part != "state":
            with without():
                by_removal[part] = _answers_by_batch(model, asked)
    return by_removal


@torch.no_grad()
def attributed_places(
    model: GSM, questions: Questions, kind: Literal["entries", "slots"], *, count: int, start: bool
) -> Places:
    """Return the places to which each answer is attributed most strongly by rollout; arguments as in ``needle_test``.

    The score of an entry is the decoder's share of the entry times the entry's share of the needle. The score of a slot
    is the stages' attention weight on it at the key of the question.
    """
    generator, pairs = torch.Generator().manual_seed(0), []
    for sequence, token_T in enumerate(questions.token_BT):
        with model.evaluating(), record(*TAPS) as seen:
            model.forward(token_T[None])
        numbers = (questions.sequence_N == sequence).nonzero()[:, 0].tolist()
        if kind == "slots":
            score_NT = _slot_scores(model, seen, questions, numbers)
        else:
            score_NT = _entry_scores(model, seen, questions, numbers, start)
        pairs += [_draw_places(score_T, count, generator) for score_T in score_NT]
    attributed, others = zip(*pairs, strict=True)
    return Places(torch.stack(attributed), torch.stack(others))


def answers_without(model: GSM, separate: Questions, removal: Removal, place_NK: Tensor, start: bool) -> Answers:
    """Return the answers to separate questions (``Questions.separate``), each without its K places."""
    length = separate.token_BT.shape[1] // (model.geometry.encoder_ratio if removal == "slots" else 1)
    removed_NT = torch.zeros(len(place_NK), length, dtype=torch.bool).scatter(1, place_NK, True)
    without: dict[str, Callable[[GSM, Tensor], AbstractContextManager[None]]] = {
        "entries": partial(without_entries, start=start),
        "retrieved": without_stages,
        "slots": without_slots,
    }
    return _answers_by_batch(model, separate, lambda batch: without[removal](model, removed_NT[batch]))


def _entry_scores(model: GSM, seen: Recording, questions: Questions, numbers: list[int], start: bool) -> Tensor:
    """Return the score of each position's entry for the questions ``numbers``; -1 if the row does not see it."""
    from_needle_TT, decoder_TT = state_routes(model, seen).total_TT, decoder_rollout(model, seen)
    scores = []
    for row, place in zip(questions.row_N[numbers].tolist(), questions.needle_N[numbers].tolist(), strict=True):
        score_T = decoder_TT[row] * from_needle_TT[:, place : place + 2].sum(dim=1)
        sees_T = torch.zeros_like(score_T, dtype=torch.bool)
        sees_T[max(0, row - model.writer.positions + 1) : row + 1] = True
        scores.append(score_T.masked_fill(~sees_T, -1))
    return torch.stack(scores)


def _slot_scores(model: GSM, seen: Recording, questions: Questions, numbers: list[int]) -> Tensor:
    """Return the score of each slot for the questions ``numbers``; -1 if no stage selects it at the key."""
    way_ST, slots = state_routes(model, seen).way_ST, len(questions.token_BT[0]) // model.geometry.encoder_ratio
    key_N = questions.key_N[numbers]
    score_NF = torch.full((len(numbers), slots + 1), -1.0, dtype=way_ST.dtype)
    for stage, _ in enumerate(model.aggregation, 1):
        slot_NK = seen[f"stage/{stage}/top_k"][0, key_N]
        weight_NE = seen[f"stage/{stage}/weights"][0, key_N].mean(dim=1)
        weight_NK = weight_NE[:, -1 - slot_NK.shape[1] : -1] * way_ST[stage, key_N, None]
        place_NK = slot_NK.where(slot_NK >= 0, slots)  # one more column, for slots of -1
        score_NF.scatter_(1, place_NK, score_NF.gather(1, place_NK).clamp(min=0)).scatter_add_(1, place_NK, weight_NK)
    return score_NF[:, :-1]


def _draw_places(score_T: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the ``count`` places with the highest scores, and as many random others with a score of at least 0."""
    candidates = score_T >= 0
    if int(candidates.sum()) < 2 * count:
        number = int(candidates.sum())
        raise ValueError(f"count must be at most {number // 2}, half the places that an answer sees, got {count}")
    highest_K = score_T.topk(count).indices
    candidates[highest_K] = False
    other_N = candidates.nonzero()[:, 0]
    return highest_K, other_N[torch.randperm(len(other_N), generator=generator)[:count]]


def _answers_by_batch(
    model: LanguageModel,
    asked: Asked,
    intervention: Callable[[slice], AbstractContextManager[None]] | None = None,
) -> Answers:
    """Return the answers, batch by batch; ``intervention`` maps the slice of a batch to the context for its call."""
    step, batches = max(1, AT_ONCE // asked.token_BT.shape[1]), []
    for first in range(0, len(asked.token_BT), step):
        batch = slice(first, first + step)
        with intervention(batch) if intervention else nullcontext():
            batches.append(answers(model, asked.token_BT[batch], asked.target_BT[batch]))
    return Answers(
        torch.cat([batch.log_probability_N for batch in batches]), torch.cat([batch.right_N for batch in batches])
    )
