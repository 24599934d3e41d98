"""Which places carry an answer: a question is asked twice, about a needle and about the same needle with another value.
Parts of the first call are put into the second (activation patching).

    clean       . . K3 V7 . . . . . . K3 ->      log p(V7) - log p(V2) is large
    corrupted   . . K3 V2 . . . . . . K3 ->      it is as far below zero
    patched     the corrupted call, in which one tensor, or one place of it, comes from the clean call

``restored`` measures how far the patched call is on the way from the corrupted call to the clean call. 0: the part
carries nothing of the answer; 1: all of it. The method finds parts that are enough for the answer;
``needles.needle_test`` finds parts that it needs. Two parts that carry the same each restore all of the answer, and
two parts that work only together restore none of it: shares need not sum to 1.

N questions, T positions, P places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from gsm.analysis.needles import Asked
from gsm.data.recall import Needle
from gsm.models.base import LanguageModel
from gsm.observe import patch, record


@dataclass(frozen=True)
class Pair:
    """Questions in sequences of their own, as they are and with another value of the needle that is asked for.

    Attributes:
        clean_NT, corrupted_NT: int64, equal but for one token, ``told_N`` + 1.
        row_N: int64, position of the answer.
        key_N, told_N: int64, position of the key in the question, and in the needle.
        right_N, wrong_N: int64, the values.
    """

    clean_NT: Tensor
    corrupted_NT: Tensor
    row_N: Tensor
    key_N: Tensor
    told_N: Tensor
    right_N: Tensor
    wrong_N: Tensor

    def to(self, device: torch.device) -> Pair:
        """The same on another device."""
        return Pair(*(getattr(self, field.name).to(device) for field in fields(self)))


def corrupted(asked: Asked, task: Needle, seed: int = 0) -> Pair:
    """The questions, and the same with another value, drawn with a seed; on the CPU, as questions are."""
    apart, every_N = asked.apart(), torch.arange(len(asked.row_N))
    right_N = apart.target_BT[every_N, apart.row_N]
    step_N = torch.randint(1, task.values, right_N.shape, generator=torch.Generator().manual_seed(seed))
    wrong_N = task.keys + (right_N - task.keys + step_N) % task.values
    corrupted_NT = apart.token_BT.clone()
    corrupted_NT[every_N, apart.told_N + 1] = wrong_N
    return Pair(apart.token_BT, corrupted_NT, apart.row_N, apart.key_N, apart.told_N, right_N, wrong_N)


@torch.no_grad()
def margins(model: LanguageModel, pair: Pair) -> tuple[Tensor, Tensor]:
    """log p(right) - log p(wrong) of the clean call and of the corrupted one, means over the questions, in nats,
    on the model's device."""
    pair = pair.to(model.embedding.weight.device)
    with model.evaluating():
        return _margin(model, pair.clean_NT, pair), _margin(model, pair.corrupted_NT, pair)


@torch.no_grad()
def restored(
    model: LanguageModel,
    pair: Pair,
    taps: str | Sequence[str],
    place_NP: Tensor | None = None,
    between: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the share of the answer that comes back when taps of the corrupted call get the clean call's tensors.

    Args:
        model: any that was trained on the task.
        pair: the questions, on any device.
        taps: patterns as of ``gsm.record``; all tensors that match are put in together.
        place_NP: int64, places along dimension 1 of these tensors, for each question; they are put in one at a time. A
            place that a tensor does not have is left as it is. None: the whole tensors at once.
        between: ``margins``, where they are known.

    Returns:
        [P], or a scalar for whole tensors: the share of the way between the two margins; on the model's device.

    Raises:
        ValueError: the two margins are the same, so that there is no way between them.
    """
    patterns = [taps] if isinstance(taps, str) else list(taps)
    clean, base = between or margins(model, pair)
    if clean == base:
        raise ValueError(
            "this pair is not allowed because the model answers both calls equally: log p(right) - log p(wrong) is "
            f"{float(base):.3g} in the clean and the corrupted call. Use a pair with different answers"
        )
    pair = pair.to(model.embedding.weight.device)
    recovered = []
    with model.evaluating():
        with record(*patterns) as seen:
            model.forward(pair.clean_NT)
        for place_N in [None] if place_NP is None else place_NP.to(model.embedding.weight.device).unbind(1):
            with ExitStack() as stack:
                for name, x in seen.items():
                    stack.enter_context(patch(name, partial(_put, x, place_N), model))
                recovered.append((_margin(model, pair.corrupted_NT, pair) - base) / (clean - base))
    return torch.stack(recovered) if place_NP is not None else recovered[0]


def around(centre_N: Tensor, offsets: Sequence[int]) -> Tensor:
    """Places at these offsets from each question's own, int64 [N, P]."""
    return centre_N[:, None] + torch.tensor(offsets)


def by_place(
    model: LanguageModel, pair: Pair, taps: Sequence[str], centre_N: Tensor, offsets: Sequence[int]
) -> dict[str, dict[int, float]]:
    """``restored`` by the offset from a place of each question, for each tap; errors as there."""
    between, place_NP = margins(model, pair), around(centre_N, offsets)
    value = {tap: restored(model, pair, tap, place_NP, between).tolist() for tap in taps}
    return {tap: dict(zip(offsets, values, strict=True)) for tap, values in value.items()}


def by_part(model: LanguageModel, pair: Pair, parts: Mapping[str, str | Sequence[str]]) -> dict[str, float]:
    """``restored`` for whole tensors, by the name of the part; errors as there."""
    between = margins(model, pair)
    return {name: float(restored(model, pair, taps, None, between)) for name, taps in parts.items()}


def _put(clean: Tensor, place_N: Tensor | None, x: Tensor) -> Tensor:
    """The clean tensor in place of another, or one place of each sequence of it."""
    if place_N is None:
        return clean
    here_NP = torch.arange(x.shape[1], device=x.device) == place_N[:, None]
    return clean.where(here_NP.view(*here_NP.shape, *[1] * (x.ndim - 2)), x)


def _margin(model: LanguageModel, token_NT: Tensor, pair: Pair) -> Tensor:
    """log p(right) - log p(wrong) where the answer is due, as a mean."""
    logit_NTV = model.forward(token_NT).logits
    logit_NV = logit_NTV[torch.arange(len(token_NT), device=token_NT.device), pair.row_N]
    right_N, wrong_N = (logit_NV.gather(1, one_N[:, None])[:, 0] for one_N in (pair.right_N, pair.wrong_N))
    return (right_N - wrong_N).mean()
