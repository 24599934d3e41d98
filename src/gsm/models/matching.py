"""Models for comparison that have as many parameters as the baseline. Width, depth and feed-forward are equal. Only the
mixers differ; the number of heads and the rank of their query projection are chosen to match the parameters."""

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

NEGLIGIBLE = 0.02  # differences in parameters up to this fraction of the baseline's are not reported
# Stand-ins for the parts that all models share: only the other parameters are compared.
BARE: dict[str, Any] = {"residual": Plain, "feed_forward": nn.Identity}


class ParameterMatched(LanguageModel):
    """Base of the models that are matched to the baseline's number of parameters. Sets ``shape``.

    Args:
        geometry: widths and depths.
        make: builds this model; called with ``geometry, heads=..., query_rank=..., residual=..., feed_forward=...``.
        heads: query heads; None: the geometry's, or fewer if matching requires it.
        query_rank: rank of the low-rank query projection; None: matched.
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
        """The number of heads and the query rank, and how many parameters more or fewer than the baseline, if the
        difference exceeds ``NEGLIGIBLE``."""
        heads, rank = self.shape.heads, self.shape.query_rank
        with torch.device("meta"):
            actual, goal = self._build_bare(heads=heads, query_rank=rank), Baseline(self.geometry, **BARE)
        return f"{heads} heads, query rank {rank}{difference_note(_parameters(actual) - _parameters(goal), self)}"

    def state_bytes(self, memory: Memory) -> int:
        """Return the bytes of the whole cache: all layers of such a model count as its decoder."""
        return memory.cache_bytes()


class Match(NamedTuple):
    """A number of heads, a query rank, and the model's parameters with these minus the baseline's."""

    heads: int
    rank: int
    difference: int


def match(
    geometry: Geometry,
    choices: Sequence[int],
    make: Callable[..., LanguageModel],
    target: Callable[[], LanguageModel],
) -> Match:
    """Return the first number of heads at which a query rank matches the target's number of parameters.

    If no number of heads allows an exact match, return the closest one. The number of parameters is linear in the rank,
    so two models on the meta device determine the rank. It is at least half of the geometry's, because a lower rank
    would make queries weaker than the baseline's, and at most heads x entry_dim, the full rank. If the mixers have no
    low-rank query projection, only the number of heads is matched. A number of heads is skipped if a smaller one had
    too many parameters, if a larger one had too few, or if it is no multiple of the model's key and value heads.

    Args:
        geometry: widths and depths.
        choices: numbers of heads, in order of preference.
        make: builds the comparator; called with ``heads=..., query_rank=...``.
        target: builds the model to match.

    Raises:
        UnfitHeads: a ValueError, if no number in ``choices`` is a multiple of the key and value heads.
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
    """Return the geometry's widths with this number of heads and query rank, and as many output groups as divide the
    heads, up to the geometry's."""
    groups = geometry.output_groups
    while heads % groups:
        groups -= 1
    return replace(geometry.shape(), heads=heads, query_rank=rank, output_groups=groups)


def difference_note(difference: int, model: LanguageModel) -> str:
    """Describe a difference in parameters from the baseline; return "" if it is at most ``NEGLIGIBLE``."""
    share = difference / (_parameters(model) - difference)
    if abs(share) <= NEGLIGIBLE:
        return ""
    more = "more" if difference > 0 else "fewer"
    return f"; {abs(difference):,} parameters ({abs(share):.1%}) {more} than the baseline"


def head_counts(number: int) -> list[int]:
    """Return the numbers of heads to try: ``number``, then all smaller ones, those with the largest power of two as a
    divisor first, and among these the largest first."""
    return [number, *sorted(range(1, number), key=lambda count: (-(count & -count), -count))]


def _parameters(model: LanguageModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
