"""Activation patching: which parts of a model carry an answer. A question is asked twice, about a needle and about the
same needle with another value. Tensors of the first call then replace those of the second.

    clean       . . K3 V7 . . . . . . K3 ->      log p(V7) - log p(V2) is large
    corrupted   . . K3 V2 . . . . . . K3 ->      it is as far below zero
    patched     the corrupted call, in which one tensor, or one position or slot of it, is that of the clean call

``restored_share`` is (patched - corrupted) / (clean - corrupted) of these differences (``margins``). It is 0 if the
part carries no information about the answer, and 1 if the part alone suffices for it. (Whether the answer needs a part
is tested by ``needles.needle_test``.) Shares need not sum to 1: two parts with the same information each restore all
of the answer, and two parts that work only together restore none of it. A share means little if the margins of the
clean and the corrupted call are nearly equal.

N questions, T positions, P places, H heads, S lines of a sweep, A axes of its places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from itertools import product

import torch
from torch import Tensor

from gsm.analysis.needles import Questions
from gsm.data.recall import Alphabet
from gsm.layers.block import Block
from gsm.models.aggregation import Stage
from gsm.models.base import LanguageModel
from gsm.observe import patch, record

AT_ONCE = 16384  # tokens of all sequences read at a time


@dataclass(frozen=True)
class Pair:
    """Separate questions (``Questions.separate``), and the same with another value in the needle.

    Attributes:
        clean_NT, corrupted_NT: int64, the sequences, which differ in one token, at ``needle_N`` + 1.
        row_N: int64, position at which the model answers.
        key_N, needle_N: int64, positions of the key in the question and in the needle.
        right_N, wrong_N: int64, the values in the clean and in the corrupted sequence.
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
    """Return the questions paired with copies that have another value, which is the same in every call. The tensors are
    on the CPU."""
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
    """Return the mean over questions of log p(right) - log p(wrong) in the clean and in the corrupted call, in nats, on
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
    """Return the share of the answer that is restored if tensors of the clean call are patched into the corrupted call.

    Args:
        model: a model that was trained on the task.
        pair: the questions, on any device.
        taps: patterns of tap names, as in ``gsm.record``; all tensors that match are patched together.
        place_NP: int64, P indices along dimension 1 of these tensors for each question, patched one at a time. Indices
            that a tensor does not have are ignored. None: whole tensors are patched.
        between: ``margins`` of the pair, if known.

    Returns:
        The restored shares [P], or a scalar for whole tensors, on the model's device.

    Raises:
        ValueError: if the two margins are equal.
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
                only = {} if place_N is None else {1: place_N}
                for name, x in seen.items():
                    stack.enter_context(patch(name, partial(_put, x, only), model))
                shares.append((_margin(model, pair.corrupted_NT, pair) - base) / (clean - base))
    return torch.stack(shares) if place_NP is not None else shares[0]


def places_around(centre_N: Tensor, offsets: Sequence[int]) -> Tensor:
    """Return ``centre_N`` plus each offset, int64 [N, P]."""
    return centre_N[:, None] + torch.tensor(offsets)


def by_place(
    model: LanguageModel, pair: Pair, taps: Sequence[str], centre_N: Tensor, offsets: Sequence[int]
) -> dict[str, dict[int, float]]:
    """Return ``restored_share`` by tap, and by offset from the index ``centre_N`` of each question. Errors as there."""
    between, place_NP = margins(model, pair), places_around(centre_N, offsets)
    by_tap = {tap: restored_share(model, pair, tap, place_NP, between).tolist() for tap in taps}
    return {tap: dict(zip(offsets, shares, strict=True)) for tap, shares in by_tap.items()}


def by_part(model: LanguageModel, pair: Pair, parts: Mapping[str, str | Sequence[str]]) -> dict[str, float]:
    """Return ``restored_share`` of whole tensors, by the name of the part. Errors as there."""
    between = margins(model, pair)
    return {name: float(restored_share(model, pair, taps, None, between)) for name, taps in parts.items()}


def prompt_pair(clean_T: Tensor, corrupted_T: Tensor, right: int, wrong: int) -> Pair:
    """Return two prompts as a pair; the answer is the next token.

    Args:
        clean_T, corrupted_T: int64, prompts of equal length with at least one different token.
        right, wrong: the answers to the clean and to the corrupted prompt.

    Raises:
        ValueError: if the prompts have different lengths, or are equal.
    """
    if clean_T.shape != corrupted_T.shape:
        raise ValueError(f"corrupted_T must have {len(clean_T)} tokens, as clean_T has, got {len(corrupted_T)}")
    different_N = (clean_T != corrupted_T).nonzero()[:, 0]
    if not len(different_N):
        raise ValueError("corrupted_T must differ from clean_T, got the same tokens")
    row_1, needle_1 = torch.tensor([len(clean_T) - 1]), different_N[:1].cpu() - 1
    return Pair(clean_T[None], corrupted_T[None], row_1, row_1, needle_1, torch.tensor([right]), torch.tensor([wrong]))


def layers(model: LanguageModel) -> dict[str, list[str]]:
    """Return, by layer, the names of the taps of the residual streams that enter it and of their read-out. These carry
    all that the layer and those above it get from a position, except the state."""
    names = [block.name for block in model.modules() if isinstance(block, Block)]
    return {name: [f"{name}/stream", f"{name}/streams"] for name in names}


def attentions(model: LanguageModel) -> dict[str, str]:
    """Return, by layer and stage in the order of computation, the name of the tap of its heads' outputs."""
    return {part.name: f"{part.name}/heads" for part in model.modules() if isinstance(part, (Block, Stage))}


@torch.no_grad()
def sweep(
    model: LanguageModel,
    pair: Pair,
    taps: Mapping[str, str | Sequence[str]],
    positions: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Tensor:
    """Return the share of the answer that each tap restores at each single position, or by each single head, as a mean
    over questions: [S, P] with ``positions``, [S, H] with ``heads``, [S, P, H] with both.

        sweep(model, pair, layers(model), range(10))                # [S, P]: the stream that enters a layer
        sweep(model, pair, attentions(model), heads=range(4))       # [S, H]: a head's output at all positions

    Args:
        model: a model whose answers to the clean and the corrupted prompt differ.
        pair: a pair from ``prompt_pair`` or ``question_pair``.
        taps: S lists of tap patterns by name, such as ``layers(model)``; the tensors of a list are patched together.
            They must have one row per token, or the same number of rows for each token.
        positions: P positions, the same in all questions; None: all positions are patched together.
        heads: H indices of dimension 2 of the tensors, such as those of ``attentions(model)``; None: all heads are
            patched together.

    Raises:
        ValueError: if positions or heads are empty or not in the tensors, a tap does not have rows for each token, or
            the two margins are equal.
    """
    clean, base = margins(model, pair)
    _check_apart(clean, base)
    pair, (count, length) = pair.to(model.embedding.weight.device), pair.clean_NT.shape
    swept = {dim: list(places) for dim, places in {1: positions, 2: heads}.items() if places is not None}
    if not all(swept.values()) or not swept:
        raise ValueError(f"positions or heads must have at least one index, got {positions} and {heads}")
    if not {*swept.get(1, [])} <= {*range(length)}:
        raise ValueError(f"positions must be in [0, {length}), got {swept[1]}")
    place_PA = torch.tensor([*product(*swept.values())], device=pair.row_N.device)
    parts = place_PA.split(max(1, AT_ONCE // (count * length)))
    rows = []
    with model.evaluating():
        for patterns in taps.values():
            with record(*([patterns] if isinstance(patterns, str) else patterns)) as seen:
                model.forward(pair.clean_NT)
            for name, x in seen.items():
                if x.shape[1] % length:
                    raise ValueError(f"taps must have a row for each of {length} tokens, got {name} {list(x.shape)}")
                if 2 in swept and not (x.ndim > 3 and {*swept[2]} <= {*range(x.shape[2])}):
                    raise ValueError(f"taps must have the heads {swept[2]}, got {name} {list(x.shape)}")
            shares = [_shares(model, pair, seen, [*swept], part_PA) for part_PA in parts]
            rows.append((torch.cat(shares) - base) / (clean - base))
    return torch.stack(rows).view(len(rows), *map(len, swept.values()))


def _shares(
    model: LanguageModel, pair: Pair, seen: Mapping[str, Tensor], dims: Sequence[int], place_PA: Tensor
) -> Tensor:
    """Return the margin with each place of the recorded tensors patched, [P]. All places are computed in one batch.
    ``dims`` are the dimensions of the A indices of a place."""
    (count, length), copies = pair.clean_NT.shape, len(place_PA)
    many = Pair(*(getattr(pair, field.name).repeat_interleave(copies, dim=0) for field in fields(pair)))
    only = dict(zip(dims, place_PA.repeat(count, 1).unbind(1), strict=True))
    with ExitStack() as stack:
        for name, x in seen.items():
            wide = x.repeat_interleave(copies, dim=0)
            stack.enter_context(patch(name, partial(_put, wide, only, each=x.shape[1] // length), model))
        return _margins(model, many.corrupted_NT, many).view(count, copies).mean(dim=0)


def _check_apart(clean: Tensor, base: Tensor) -> None:
    """Raise ValueError if the margins are equal, because shares divide by their difference."""
    if clean == base:
        raise ValueError(
            f"pair must have different answers, got log p(right) - log p(wrong) = {float(base):.3g} in the clean and "
            "the corrupted call"
        )


def _put(clean: Tensor, only: Mapping[int, Tensor], x: Tensor, each: int = 1) -> Tensor:
    """Return ``clean`` at the index of each sequence in the dimensions ``only``, and ``x`` elsewhere; a place of
    dimension 1 has ``each`` rows."""
    for dim, place_N in only.items():
        match_NP = torch.arange(x.shape[dim], device=x.device) // (each if dim == 1 else 1) == place_N[:, None]
        clean = clean.where(match_NP.view(-1, *[1] * (dim - 1), x.shape[dim], *[1] * (x.ndim - dim - 1)), x)
    return clean


def _margin(model: LanguageModel, token_NT: Tensor, pair: Pair) -> Tensor:
    """Return the mean of ``_margins``."""
    return _margins(model, token_NT, pair).mean()


def _margins(model: LanguageModel, token_NT: Tensor, pair: Pair) -> Tensor:
    """Return log p(right) - log p(wrong) at ``row_N``, [N]."""
    logit_NTV = model.forward(token_NT).logits
    logit_NV = logit_NTV[torch.arange(len(token_NT), device=token_NT.device), pair.row_N]
    right_N, wrong_N = (logit_NV.gather(1, token_N[:, None])[:, 0] for token_N in (pair.right_N, pair.wrong_N))
    return right_N - wrong_N
