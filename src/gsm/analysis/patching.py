"""The places that carry an answer. A question is asked twice: about a needle, and about the same needle with another
value. Parts of the first call are put into the second (activation patching).

    clean       . . K3 V7 . . . . . . K3 ->      log p(V7) - log p(V2) is large
    corrupted   . . K3 V2 . . . . . . K3 ->      it is as far below zero
    patched     the corrupted call, in which one tensor, or one place of it, comes from the clean call

``restored_share`` measures how far the patched call is on the way from the corrupted call to the clean call. 0: the
part carries nothing of the answer; 1: the part carries all of it. The method finds parts that are enough for the
answer; ``needles.needle_test`` finds parts that the answer needs. Two parts that carry the same information each
restore all of the answer. Two parts that work only together restore none of it. So shares need not sum to 1. A share
divides by the difference of the two calls: where ``margins`` are near each other, it means little.

N questions, T positions, P places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from gsm.analysis.needles import Questions
from gsm.data.recall import Alphabet
from gsm.layers.block import Block
from gsm.models.base import LanguageModel
from gsm.observe import patch, record

AT_ONCE = 16384  # tokens of all sequences read at a time


@dataclass(frozen=True)
class Pair:
    """Separate questions (``Questions.separate``), as they are and with another value of the needle.

    Attributes:
        clean_NT, corrupted_NT: int64, equal but for one token, at ``needle_N`` + 1.
        row_N: int64, position of the answer.
        key_N, needle_N: int64, position of the key in the question, and in the needle.
        right_N, wrong_N: int64, the values.
    """

    clean_NT: Tensor
    corrupted_NT: Tensor
    row_N: Tensor
    key_N: Tensor
    needle_N: Tensor
    right_N: Tensor
    wrong_N: Tensor

    def to(self, device: torch.device) -> Pair:
        """Return the pair on another device."""
        return Pair(*(getattr(self, field.name).to(device) for field in fields(self)))


def question_pair(questions: Questions, task: Alphabet) -> Pair:
    """Return the questions, and the same with another value, always the same one; on the CPU, as questions are."""
    separate, every_N = questions.separate(), torch.arange(len(questions.row_N))
    right_N = separate.target_BT[every_N, separate.row_N]
    step_N = torch.randint(1, task.values, right_N.shape, generator=torch.Generator().manual_seed(0))
    wrong_N = task.keys + (right_N - task.keys + step_N) % task.values
    corrupted_NT = separate.token_BT.clone()
    corrupted_NT[every_N, separate.needle_N + 1] = wrong_N
    places = (separate.row_N, separate.key_N, separate.needle_N)
    return Pair(separate.token_BT, corrupted_NT, *places, right_N, wrong_N)


@torch.no_grad()
def margins(model: LanguageModel, pair: Pair) -> tuple[Tensor, Tensor]:
    """Return log p(right) - log p(wrong) of the clean and of the corrupted call: means over the questions, in nats, on
    the model's device."""
    pair = pair.to(model.embedding.weight.device)
    with model.evaluating():
        return _margin(model, pair.clean_NT, pair), _margin(model, pair.corrupted_NT, pair)


@torch.no_grad()
def restored_share(
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
        between: ``margins`` of the pair, to compute them once; None: they are computed.

    Returns:
        [P], or a scalar for whole tensors: the share of the way between the two margins; on the model's device.

    Raises:
        ValueError: the two margins are the same, so that there is no way between them.
    """
    patterns = [taps] if isinstance(taps, str) else list(taps)
    clean, base = between or margins(model, pair)
    _check_apart(clean, base)
    pair = pair.to(model.embedding.weight.device)
    shares = []
    with model.evaluating():
        with record(*patterns) as seen:
            model.forward(pair.clean_NT)
        for place_N in [None] if place_NP is None else place_NP.to(model.embedding.weight.device).unbind(1):
            with ExitStack() as stack:
                for name, x in seen.items():
                    stack.enter_context(patch(name, partial(_put, x, place_N), model))
                shares.append((_margin(model, pair.corrupted_NT, pair) - base) / (clean - base))
    return torch.stack(shares) if place_NP is not None else shares[0]


def places_around(centre_N: Tensor, offsets: Sequence[int]) -> Tensor:
    """Return the places at these offsets from the centre of each question, int64 [N, P]."""
    return centre_N[:, None] + torch.tensor(offsets)


def by_place(
    model: LanguageModel, pair: Pair, taps: Sequence[str], centre_N: Tensor, offsets: Sequence[int]
) -> dict[str, dict[int, float]]:
    """Return ``restored_share`` for each tap, by the offset from the centre of each question. Errors as there."""
    between, place_NP = margins(model, pair), places_around(centre_N, offsets)
    by_tap = {tap: restored_share(model, pair, tap, place_NP, between).tolist() for tap in taps}
    return {tap: dict(zip(offsets, shares, strict=True)) for tap, shares in by_tap.items()}


def by_part(model: LanguageModel, pair: Pair, parts: Mapping[str, str | Sequence[str]]) -> dict[str, float]:
    """Return ``restored_share`` of whole tensors, by the name of the part. Errors as there."""
    between = margins(model, pair)
    return {name: float(restored_share(model, pair, taps, None, between)) for name, taps in parts.items()}


def prompt_pair(clean_T: Tensor, corrupted_T: Tensor, right: int, wrong: int) -> Pair:
    """Return two prompts of one's own as a pair; the answer is due behind the last token.

    Args:
        clean_T, corrupted_T: int64, of the same length, with at least one different token.
        right, wrong: the next tokens that the clean and the corrupted prompt ask for.

    Raises:
        ValueError: the prompts have different lengths, or are equal.
    """
    if clean_T.shape != corrupted_T.shape:
        raise ValueError(f"corrupted_T must have {len(clean_T)} tokens, as clean_T, got {len(corrupted_T)}")
    different_N = (clean_T != corrupted_T).nonzero()[:, 0]
    if not len(different_N):
        raise ValueError("corrupted_T must differ from clean_T, got the same tokens")
    row_1, needle_1 = torch.tensor([len(clean_T) - 1]), different_N[:1].cpu() - 1
    return Pair(clean_T[None], corrupted_T[None], row_1, row_1, needle_1, torch.tensor([right]), torch.tensor([wrong]))


def layers(model: LanguageModel) -> dict[str, list[str]]:
    """Return the taps of the residual stream that enters each layer, by layer: one stream, or all with their read-out.
    They carry everything that the layer and those above it get from a position, but for the state."""
    names = [block.name for block in model.modules() if isinstance(block, Block)]
    return {name: [f"{name}/stream", f"{name}/streams"] for name in names}


@torch.no_grad()
def sweep(
    model: LanguageModel, pair: Pair, taps: Mapping[str, str | Sequence[str]], positions: Sequence[int]
) -> Tensor:
    """Return the share of the answer that each tap brings back at each position alone, [S, P]: a mean over questions.

    Args:
        model: any that answers the clean and the corrupted call differently.
        pair: of ``prompt_pair`` or ``question_pair``.
        taps: by name, patterns whose tensors are put in together, such as ``layers(model)``; they have a row for each
            token, or as many rows for each.
        positions: tokens of the sequence; the same in all questions.

    Raises:
        ValueError: a tap has no row for each token, or the two calls give the same answer.
    """
    clean, base = margins(model, pair)
    _check_apart(clean, base)
    pair, (count, length) = pair.to(model.embedding.weight.device), pair.clean_NT.shape
    parts = torch.tensor(positions).to(pair.row_N.device).split(max(1, AT_ONCE // (count * length)))
    rows = []
    with model.evaluating():
        for patterns in taps.values():
            with record(*([patterns] if isinstance(patterns, str) else patterns)) as seen:
                model.forward(pair.clean_NT)
            for name, x in seen.items():
                if x.shape[1] % length:
                    raise ValueError(f"taps must have a row for each of {length} tokens, got {name} {list(x.shape)}")
            shares = [_shares(model, pair, seen, place_P) for place_P in parts]
            rows.append((torch.cat(shares) - base) / (clean - base))
    return torch.stack(rows)


def _shares(model: LanguageModel, pair: Pair, seen: Mapping[str, Tensor], place_P: Tensor) -> Tensor:
    """Return the margin with each place of the recorded tensors put in, [P]: a copy of the questions for each place."""
    count, copies = len(pair.row_N), len(place_P)
    many = Pair(*(getattr(pair, field.name).repeat_interleave(copies, dim=0) for field in fields(pair)))
    place_N, length = place_P.repeat(count), pair.clean_NT.shape[1]
    with ExitStack() as stack:
        for name, x in seen.items():
            wide = x.repeat_interleave(copies, dim=0)
            stack.enter_context(patch(name, partial(_put, wide, place_N, each=x.shape[1] // length), model))
        return _margins(model, many.corrupted_NT, many).view(count, copies).mean(dim=0)


def _check_apart(clean: Tensor, base: Tensor) -> None:
    """Raise ValueError for equal margins, which have no way between them."""
    if clean == base:
        raise ValueError(
            f"pair must have different answers, got log p(right) - log p(wrong) = {float(base):.3g} in the clean and "
            "the corrupted call"
        )


def _put(clean: Tensor, place_N: Tensor | None, x: Tensor, each: int = 1) -> Tensor:
    """Return the clean tensor, or ``x`` with one place of each sequence, of ``each`` rows, taken from it."""
    if place_N is None:
        return clean
    match_NP = torch.arange(x.shape[1], device=x.device) // each == place_N[:, None]
    return clean.where(match_NP.view(*match_NP.shape, *[1] * (x.ndim - 2)), x)


def _margin(model: LanguageModel, token_NT: Tensor, pair: Pair) -> Tensor:
    """Return the mean of ``_margins``."""
    return _margins(model, token_NT, pair).mean()


def _margins(model: LanguageModel, token_NT: Tensor, pair: Pair) -> Tensor:
    """Return log p(right) - log p(wrong) at the rows of the answers, [N]."""
    logit_NTV = model.forward(token_NT).logits
    logit_NV = logit_NTV[torch.arange(len(token_NT), device=token_NT.device), pair.row_N]
    right_N, wrong_N = (logit_NV.gather(1, token_N[:, None])[:, 0] for token_N in (pair.right_N, pair.wrong_N))
    return right_N - wrong_N
