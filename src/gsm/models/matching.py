"""Comparators with the baseline's number of parameters. Width, depth and feed-forward are equal; only the mixers
differ, and the rank of their queries compensates for the difference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from gsm.cache.memory import Memory
from gsm.errors import within
from gsm.layers.key_value import UnfitHeads
from gsm.layers.projections import Shape
from gsm.layers.residual import Plain
from gsm.models.base import LanguageModel
from gsm.models.baseline import Baseline
from gsm.models.geometry import Geometry

NEGLIGIBLE = 0.02  # largest difference in parameters, as a fraction of the baseline's, that is not reported
# Parts that baseline and comparators share are left out when parameters are compared.
BARE: dict[str, Any] = {"residual": Plain, "feed_forward": nn.Identity}


class ParameterMatched(LanguageModel):
    """A comparator. Heads and query rank follow from the baseline's number of parameters.

    Args:
        geometry: widths and depths.
        make: the comparator; called with ``geometry, heads=..., query_rank=...``, residual and feed-forward.
        heads: query heads; None: the geometry's, or fewer if matching requires it.
        query_rank: rank of the queries; None: matched.
    """

    def __init__(
        self, geometry: Geometry, make: Callable[..., LanguageModel], heads: int | None, query_rank: int | None
    ):
        super().__init__(geometry.vocabulary, geometry.dim)
        within(1, query_rank=query_rank)
        self.geometry = geometry
        self._build_bare = partial(make, geometry, **BARE)
        if query_rank is None:
            choices = head_counts(geometry.heads) if heads is None else [heads]
            matched = match(geometry, choices, self._build_bare, partial(Baseline, geometry, **BARE))
            heads, query_rank = matched.heads, matched.rank
        self.shape = resized(geometry, heads or geometry.heads, query_rank)

    @property
    def parameter_note(self) -> str:
        """Heads and rank of the queries, and the difference from the baseline's parameters if it is not negligible."""
        heads, rank = self.shape.heads, self.shape.query_rank
        with torch.device("meta"):
            actual, goal = self._build_bare(heads=heads, query_rank=rank), Baseline(self.geometry, **BARE)
        return f"{heads} heads, query rank {rank}{difference_note(_parameters(actual) - _parameters(goal), self)}"

    def state_bytes(self, memory: Memory) -> int:
        """Return the bytes of the whole cache, because a comparator is a decoder only."""
        return memory.cache_bytes()


class Match(NamedTuple):
    """Heads and query rank of a comparator, and its number of parameters minus the baseline's."""

    heads: int
    rank: int
    difference: int


def match(
    geometry: Geometry,
    choices: Sequence[int],
    make: Callable[..., LanguageModel],
    target: Callable[[], LanguageModel],
) -> Match:
    """Return the first number of heads for which some query rank matches the target's number of parameters.

    Parameters are linear in the rank, so two models on the meta device determine it. The rank must be at least half of
    the geometry's, so that queries are not poorer than the baseline's, and at most heads x entry_dim, because a higher
    rank adds nothing. Mixers without a query of this rank have the same parameters at every rank: only heads match
    them. If no number of heads allows an exact match, the closest one is returned. A number is skipped if a smaller
    one had too many parameters or a larger one too few, or if the caller's key and value heads do not divide it.

    Args:
        geometry: widths and depths.
        choices: numbers of heads, in order of preference.
        make: builds the comparator; called with ``heads=..., query_rank=...``.
        target: builds the model to match.

    Raises:
        UnfitHeads: a ValueError, if key and value heads divide none of the numbers.
    """
    matches, unfit, few, many = [], None, 0, max(choices) + 1
    with torch.device("meta"):
        goal = _parameters(target())
        for heads in choices:
            if not few < heads < many:
                continue
            try:
                first, second = (_parameters(make(heads=heads, query_rank=rank)) for rank in (1, 2))
            except UnfitHeads as error:
                unfit = unfit or error
                continue
            if first == second:  # no mixer has a query of this rank
                matches.append(Match(heads, geometry.query_rank, first - goal))
                continue
            exact = 1 + round((goal - first) / (second - first))
            lowest, highest = -(-geometry.query_rank // 2), heads * geometry.entry_dim
            rank = min(max(exact, lowest), highest)
            matches.append(Match(heads, rank, first + (rank - 1) * (second - first) - goal))
            if rank == exact:
                return matches[-1]
            few, many = (heads, many) if exact > highest else (few, heads)
    if unfit and not matches:
        raise unfit
    return min(matches, key=lambda match: abs(match.difference))


def resized(geometry: Geometry, heads: int, rank: int) -> Shape:
    """Return the geometry's widths with other heads and rank; fewer heads form fewer output groups."""
    groups = geometry.output_groups
    while heads % groups:
        groups -= 1
    return replace(geometry.shape(), heads=heads, query_rank=rank, output_groups=groups)


def difference_note(difference: int, model: LanguageModel) -> str:
    """Describe a difference in parameters; empty if it is at most ``NEGLIGIBLE``."""
    share = difference / (_parameters(model) - difference)
    if abs(share) <= NEGLIGIBLE:
        return ""
    more = "more" if difference > 0 else "fewer"
    return f"; {abs(difference):,} parameters ({abs(share):.1%}) {more} than the baseline"


def head_counts(number: int) -> list[int]:
    """Return ``number``, then all smaller ones: by the largest power of two that divides them, then the largest
    first."""
    return [number, *sorted(range(1, number), key=lambda count: (-(count & -count), -count))]


def _parameters(model: LanguageModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
