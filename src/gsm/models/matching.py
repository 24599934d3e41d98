"""Comparators with as many parameters as the baseline: width, depth and feed-forward are equal, so that what differs is
the mixers, and the rank of their queries makes up for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from gsm.models.base import LanguageModel
from gsm.models.baseline import Baseline
from gsm.models.geometry import Geometry
from gsm.nn.attention import Shape
from gsm.nn.residual import Plain

CLOSE = 0.02  # of the baseline's parameters: a difference that a comparator need not mention


def nothing(dim: int, hidden_dim: int) -> nn.Module:
    """No feed-forward."""
    return nn.Identity()


# What baseline and comparators have alike need not be built to be compared.
BARE: dict[str, Any] = {"residual": Plain, "feed_forward": nothing}


class Match(NamedTuple):
    """The heads and the query rank of a comparator, and its parameters less the baseline's."""

    heads: int
    rank: int
    difference: int


def widths(
    geometry: Geometry,
    heads: int | None,
    rank: int | None,
    make: Callable[..., LanguageModel],
) -> tuple[Shape, int]:
    """The widths of a comparator, and by how many parameters it will differ from the baseline (0 where nobody asked).

    Args:
        geometry: widths and depths.
        heads: query heads; None: the geometry's, or fewer if matching asks for it.
        rank: of the queries; None: matched.
        make: the comparator; called with ``geometry, heads=..., query_rank=...``, residual and feed-forward.
    """
    if rank is not None:
        return resized(geometry, heads or geometry.heads, rank), 0
    choices = head_counts(geometry.heads) if heads is None else [heads]
    found = match(
        geometry,
        choices,
        lambda heads, rank: make(geometry, heads=heads, query_rank=rank, **BARE),
        lambda: Baseline(geometry, **BARE),
    )
    return resized(geometry, found.heads, found.rank), found.difference


def match(
    geometry: Geometry,
    choices: Sequence[int],
    make: Callable[[int, int], LanguageModel],
    target: Callable[[], LanguageModel],
) -> Match:
    """The first number of heads, of those to choose from, for which some rank of the queries makes parameters equal.

    They are linear in the rank, so two models tell it; models are built on the meta device. The rank should be at least
    half of the geometry's, or queries would be poorer than the baseline's, and not above heads x entry_dim, where it
    would add nothing. Where no number of heads allows that, the nearest comes closest.

    Args:
        geometry: widths and depths.
        choices: numbers of heads, the preferred one first.
        make: the comparator with so many heads and such a rank.
        target: the model to match.
    """
    found = []
    with torch.device("meta"):
        goal = _parameters(target())
        for heads in choices:
            first, second = (_parameters(make(heads, rank)) for rank in (1, 2))
            exact = 1 + round((goal - first) / (second - first))
            rank = min(max(exact, -(-geometry.query_rank // 2)), heads * geometry.entry_dim)
            found.append(Match(heads, rank, first + (rank - 1) * (second - first) - goal))
            if rank == exact:
                return found[-1]
    return min(found, key=lambda one: abs(one.difference))


def resized(geometry: Geometry, heads: int, rank: int) -> Shape:
    """The geometry's widths with other heads and rank; fewer heads form fewer output groups."""
    groups = geometry.output_groups
    while heads % groups:
        groups -= 1
    return replace(geometry.shape(), heads=heads, query_rank=rank, output_groups=groups)


def note(difference: int, model: LanguageModel) -> str:
    """What is to be said about a difference in parameters: nothing where it is small."""
    share = difference / (_parameters(model) - difference)
    if abs(share) <= CLOSE:
        return ""
    return (
        f"{abs(difference):,} parameters ({abs(share):.1%}) {'more' if difference > 0 else 'fewer'} than the baseline"
    )


def head_counts(number: int) -> list[int]:
    """A number, its half, and so on, as long as these are whole; then all others below it, the largest first."""
    found = [number]
    while found[-1] % 2 == 0:
        found.append(found[-1] // 2)
    return found + [count for count in range(number - 1, 0, -1) if count not in found]


def _parameters(model: LanguageModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
