"""Comparators with as many parameters as the baseline: width, depth and feed-forward are equal, so that what differs is
the mixers, and the rank of their queries makes up for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from gsm.cache.memory import Memory
from gsm.layers.key_value import UnfitHeads
from gsm.layers.projections import Shape
from gsm.layers.residual import Plain
from gsm.models.base import LanguageModel
from gsm.models.baseline import Baseline
from gsm.models.geometry import Geometry

UNMENTIONED = 0.02  # of the baseline's parameters: a difference that a comparator need not mention


def no_feed_forward(dim: int, hidden_dim: int) -> nn.Module:
    """No feed-forward."""
    return nn.Identity()


# What baseline and comparators have alike need not be built to be compared.
BARE: dict[str, Any] = {"residual": Plain, "feed_forward": no_feed_forward}


class ParameterMatched(LanguageModel):
    """A comparator: heads and query rank follow from the baseline's parameters, and a decoder is all there is.

    Args:
        geometry: widths and depths.
        make: the comparator; called with ``geometry, heads=..., query_rank=...``, residual and feed-forward.
        heads: query heads; None: the geometry's, or fewer if matching asks for it.
        query_rank: of the queries; None: matched.
    """

    def __init__(
        self, geometry: Geometry, make: Callable[..., LanguageModel], heads: int | None, query_rank: int | None
    ):
        super().__init__(geometry.vocabulary, geometry.dim)
        self.geometry = geometry
        self._build_bare = partial(make, geometry, **BARE)
        if query_rank is None:
            choices = head_counts(geometry.heads) if heads is None else [heads]
            found = match(
                geometry,
                choices,
                lambda heads, rank: self._build_bare(heads=heads, query_rank=rank),
                partial(Baseline, geometry, **BARE),
            )
            heads, query_rank = found.heads, found.rank
        self.shape = resized(geometry, heads or geometry.heads, query_rank)

    @property
    def parameter_note(self) -> str:
        """Heads and rank of the queries, and the difference from the baseline's parameters unless it is small."""
        heads, rank = self.shape.heads, self.shape.query_rank
        with torch.device("meta"):
            mine, goal = self._build_bare(heads=heads, query_rank=rank), Baseline(self.geometry, **BARE)
        return f"{heads} heads, query rank {rank}{difference_note(_parameters(mine) - _parameters(goal), self)}"

    def state_bytes(self, memory: Memory) -> int:
        """Everything that is kept: a decoder is all there is."""
        return memory.cache_bytes()


class Match(NamedTuple):
    """The heads and the query rank of a comparator, and its parameters less the baseline's."""

    heads: int
    rank: int
    difference: int


def match(
    geometry: Geometry,
    choices: Sequence[int],
    make: Callable[[int, int], LanguageModel],
    target: Callable[[], LanguageModel],
) -> Match:
    """The first number of heads, of those to choose from, for which some rank of the queries makes parameters equal.

    They are linear in the rank, so two models tell it; models are built on the meta device. The rank should be at least
    half of the geometry's, or queries would be poorer than the baseline's, and not above heads x entry_dim, where it
    would add nothing. Where no number of heads allows that, the nearest comes closest. More heads than too many, and
    fewer than too few, are not tried; nor are those that key and value heads of the caller's do not divide.

    Args:
        geometry: widths and depths.
        choices: numbers of heads, the preferred one first.
        make: the comparator with so many heads and such a rank.
        target: the model to match.

    Raises:
        UnfitHeads: a ValueError, if key and value heads divide none of the numbers.
    """
    found, unfit, few, many = [], None, 0, max(choices) + 1
    with torch.device("meta"):
        goal = _parameters(target())
        for heads in choices:
            if not few < heads < many:
                continue
            try:
                first, second = (_parameters(make(heads, rank)) for rank in (1, 2))
            except UnfitHeads as error:
                unfit = unfit or error
                continue
            exact = 1 + round((goal - first) / (second - first))
            lowest, highest = -(-geometry.query_rank // 2), heads * geometry.entry_dim
            rank = min(max(exact, lowest), highest)
            found.append(Match(heads, rank, first + (rank - 1) * (second - first) - goal))
            if rank == exact:
                return found[-1]
            few, many = (heads, many) if exact > highest else (few, heads)
    if unfit and not found:
        raise unfit
    return min(found, key=lambda one: abs(one.difference))


def resized(geometry: Geometry, heads: int, rank: int) -> Shape:
    """The geometry's widths with other heads and rank; fewer heads form fewer output groups."""
    groups = geometry.output_groups
    while heads % groups:
        groups -= 1
    return replace(geometry.shape(), heads=heads, query_rank=rank, output_groups=groups)


def difference_note(difference: int, model: LanguageModel) -> str:
    """What is to be said about a difference in parameters: nothing where it is small."""
    share = difference / (_parameters(model) - difference)
    if abs(share) <= UNMENTIONED:
        return ""
    more = "more" if difference > 0 else "fewer"
    return f"; {abs(difference):,} parameters ({abs(share):.1%}) {more} than the baseline"


def head_counts(number: int) -> list[int]:
    """A number, then all below it: those that the highest power of two divides first, and of these the largest."""
    return [number, *sorted(range(1, number), key=lambda count: (-(count & -count), -count))]


def _parameters(model: LanguageModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
