"""Log-likelihoods of continuations, for any model with ``start`` and a forward that takes ``memory``.

A context is read once for all of its continuations: ``memory.expand`` gives each of them a copy of the memory. A
context that does not fit is cut on the left, as in lm-evaluation-harness, and its cut tokens are counted. A
continuation is scored as a whole, behind one token of context if it is longer than the model may read.

B contexts in a batch, N continuations of all of them, M tokens of the longest, T tokens of the longest context, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gsm.evaluation.results import Progress, Results, silent
from gsm.models.prompts import as_batch
from gsm.shapes import promoted

Pair = tuple[Sequence[int], Sequence[int]]  # token ids of a context and of its continuation, at least one each
AT_ONCE = 16384  # tokens read at a time
SCRATCH = 1 << 26  # logits at a time: 256 MB of float32


@dataclass(frozen=True)
class Score:
    """The score of a continuation.

    Attributes:
        loglikelihood: of all its tokens together, in nats.
        greedy: whether each token was the likeliest at its place.
        cut: tokens of the context that the model did not read.
    """

    loglikelihood: float
    greedy: bool
    cut: int = 0


@dataclass
class Question:
    """A context and the continuations that share it.

    Attributes:
        context: token ids that the model reads.
        continuations: token ids.
        places: the number of the pair of each continuation.
        cut: tokens that are missing on the left.
    """

    context: tuple[int, ...]
    continuations: list[tuple[int, ...]] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    cut: int = 0

    @property
    def size(self) -> tuple[int, int, int]:
        """The numbers of continuations, of tokens of the context, and of tokens of the longest continuation."""
        return len(self.continuations), len(self.context), max(map(len, self.continuations))


def loglikelihoods(
    model: Any,
    pairs: Sequence[Pair],
    *,
    max_length: int,
    rows: int = 32,
    progress: Progress = silent,
    results: Results | None = None,
) -> list[Score]:
    """Return the scores of continuations, in their order.

    Args:
        model: anything with ``start(batch)``, whose memory has ``expand``, and a forward that takes ``memory``,
            ``documents`` (-1 for padding on the left) and ``rows``, and returns ``logits`` and ``memory``.
        pairs: token ids.
        max_length: largest number of tokens that the model reads.
        rows: continuations at a time.
        progress: passes batches on, and may report them.
        results: keeps the scores by the number of the pair, and has those of an interrupted call.

    Raises:
        ValueError: an empty context or continuation, or a model that scores NaN.
    """
    results = results or Results(None, {})

    def places(batch: Sequence[Question]) -> list[str]:
        return [str(place) for question in batch for place in question.places]

    def compute(batch: Sequence[Question]) -> dict[str, Any]:
        return {str(place): astuple(scored) for place, scored in score(model, batch).items()}

    results.fill(plan(pairs, max_length=max_length, rows=rows), places, compute, progress)
    return [Score(*results.cells[str(place)]) for place in range(len(pairs))]


def plan(pairs: Sequence[Pair], *, max_length: int, rows: int) -> list[list[Question]]:
    """Return batches of questions with equal numbers of continuations, long ones first.

    They depend only on the arguments, so that a continued evaluation has the batches of an uninterrupted one. Raises
    ValueError as ``loglikelihoods`` does.
    """
    batches: list[list[Question]] = []
    for question in sorted(_questions(pairs, max_length, rows), key=lambda q: q.size, reverse=True):
        batch = batches[-1] if batches else []
        if batch and question.size[0] == batch[0].size[0] and _fits([*batch, question], rows):
            batch.append(question)
        else:
            batches.append([question])
    return batches


@torch.no_grad()
def score(model: Any, batch: Sequence[Question]) -> dict[int, Score]:
    """Read the contexts of a batch once, then all continuations; return scores by the number of the pair."""
    device = next(model.parameters()).device
    each = len(batch[0].continuations)
    tokens_BT, documents_BT = as_batch([question.context for question in batch], device)
    out = model(tokens_BT, documents=documents_BT, memory=model.start(len(batch)), rows=1)
    answers = [torch.tensor(ids, dtype=torch.int64) for question in batch for ids in question.continuations]
    target_NM = pad_sequence(answers, batch_first=True).to(device)  # on the right, where no earlier position looks
    first_N1V = promoted(out.logits).log_softmax(-1).repeat_interleave(each, dim=0)
    parts = [_at(first_N1V, target_NM[:, :1])]
    memory = out.memory.expand(each) if each > 1 and target_NM.shape[1] > 1 else out.memory
    step = max(1, SCRATCH // first_N1V[:, 0].numel())
    for start in range(0, target_NM.shape[1] - 1, step):
        end = min(start + step, target_NM.shape[1] - 1)
        out = model(target_NM[:, start:end], memory=memory)
        memory = out.memory
        parts.append(_at(promoted(out.logits).log_softmax(-1), target_NM[:, start + 1 : end + 1]))
    logprob_NM, best_NM = (torch.cat(part, dim=1).cpu() for part in zip(*parts, strict=True))
    if logprob_NM.isnan().any():
        raise ValueError("the model's log-probabilities are not finite. Look for NaN or infinity in its weights")
    places = [(place, question.cut) for question in batch for place in question.places]
    return {
        place: Score(float(logprob_NM[n, :length].double().sum()), bool(best_NM[n, :length].all()), cut)
        for n, ((place, cut), length) in enumerate(zip(places, map(len, answers), strict=True))
    }


def _questions(pairs: Sequence[Pair], max_length: int, rows: int) -> list[Question]:
    """Return questions: neighbours with the same context become one. A context of one token is not shared, because its
    continuations are better sorted by their lengths."""
    questions: list[Question] = []
    for place, (context, continuation) in enumerate(pairs):
        if not (context and continuation):
            raise ValueError(
                f"pair {place} has {len(context)} tokens of context and {len(continuation)} to be scored, "
                "but needs at least 1 of each"
            )
        read = tuple(context[cut(context, continuation, max_length) :])
        last = questions[-1] if questions else None
        if last is None or len(read) == 1 or last.context != read or len(last.places) >= rows:
            last = Question(read, cut=len(context) - len(read))
            questions.append(last)
        last.continuations.append(tuple(continuation))
        last.places.append(place)
    return questions


def cut(context: Sequence[int], continuation: Sequence[int], max_length: int) -> int:
    """Return the number of tokens to cut from a context, so that at most ``max_length`` tokens are read. The last token
    of a continuation is never read."""
    return max(0, len(context) - max(1, max_length + 1 - len(continuation)))


def _fits(batch: Sequence[Question], rows: int) -> bool:
    """Return whether a batch has few enough continuations and tokens, padding counted."""
    each, context, continuation = (max(numbers) for numbers in zip(*(question.size for question in batch), strict=True))
    read = len(batch) * max(context, each * continuation)
    return len(batch) * each <= rows and read <= AT_ONCE


def _at(logprob_NTV: Tensor, target_NT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of the targets, and whether each is the likeliest."""
    return logprob_NTV.gather(-1, target_NT[..., None])[..., 0], logprob_NTV.argmax(-1) == target_NT
