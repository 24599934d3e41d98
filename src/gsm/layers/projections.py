"""The projections of latent attention: query, entry, compressor, indexer, output.

Attention has H query heads, and one vector of width C per position that is key and value of all heads, an *entry*. The
equations of query, compressor and indexer are those of DeepSeek-V4.1 (CSA2). The baseline, GSM's stages and GSM's
decoder use them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from gsm.layers.costs import POOL_BLOCK, AttentionCost, LayerCost, ProductCost, products
from gsm.layers.linear import INTO_RESIDUAL, GroupedLinear, Linear, concatenated
from gsm.layers.norm import RMSNorm
from gsm.layers.rope import Angles
from gsm_kernels import rotate
from gsm_kernels.device import at_least_float32, in_dtype


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The widths that all attention layers of a model share.

    Attributes:
        dim: model width (D).
        heads, entry_dim: query heads (H) and width of an entry (C).
        rotary_dim: rotated channels at the end of an entry, an index query and an index key.
        query_rank: rank of the query projection (Q).
        output_groups, output_rank: groups of heads with separate output projections, and their rank.
        index_heads, index_dim: heads (J) and width (I) of an indexer.
    """

    dim: int
    heads: int
    entry_dim: int
    rotary_dim: int
    query_rank: int
    output_groups: int
    output_rank: int
    index_heads: int
    index_dim: int


class Query(nn.Module):
    """Low-rank query projection: ``up(norm(down(x)))``, split into heads. The indexer reads the latent
    ``norm(down(x))``.

    Args:
        dim_in: width of the input (D, or 2D for the later stages of the aggregation).
        shape: widths that all attention layers share.
        scale: factor of the queries (``Rope.query_scale``); latents are not scaled.
    """

    def __init__(self, dim_in: int, shape: Shape, scale: float = 1.0):
        super().__init__()
        self.scale = scale
        self.heads, self.width = shape.heads, shape.heads * shape.entry_dim
        self.down = Linear(dim_in, shape.query_rank)
        self.norm = RMSNorm(shape.query_rank)
        self.up = Linear(shape.query_rank, self.width)

    def forward(self, x_BRD: Tensor, down_BRQ: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the queries before rotation, [B, R, H, C], and their latents, [B, R, Q]; ``down_BRQ`` is
        ``down(x_BRD)`` if the caller has computed it."""
        latent_BRQ = self.norm(self.down(x_BRD) if down_BRQ is None else down_BRQ)
        query_BRHC = self.up(latent_BRQ).unflatten(-1, (self.heads, -1))
        return query_BRHC if self.scale == 1 else query_BRHC * self.scale, latent_BRQ


class Entry(nn.Module):
    """Make one entry per position, both key and value: projection, norm, rotation.

    Args:
        shape: widths that all attention layers share.
    """

    def __init__(self, shape: Shape):
        super().__init__()
        self.projection = Linear(shape.dim, shape.entry_dim)
        self.norm = RMSNorm(shape.entry_dim)

    def latent(self, x_BTD: Tensor, projected_BTC: Tensor | None = None) -> Tensor:
        """Return the entries before rotation, [B, T, C]; arguments as in ``forward``."""
        return self.norm(self.projection(x_BTD) if projected_BTC is None else projected_BTC)

    def forward(self, x_BTD: Tensor, angles: Angles, projected_BTC: Tensor | None = None) -> Tensor:
        """Return ``entry_BTC``; ``projected_BTC`` is ``projection(x_BTD)`` if the caller has computed it."""
        return self.norm(self.projection(x_BTD) if projected_BTC is None else projected_BTC, angles)


class Compressor(nn.Module):
    """Pool every m consecutive tokens of a document into one bank entry: a weighted mean, with a softmax over the
    tokens for each channel.

    Args:
        shape: widths that all attention layers share.
        ratio: tokens per entry (m); for 1 there is no gate.
    """

    def __init__(self, shape: Shape, ratio: int):
        super().__init__()
        self.ratio, self.entry_dim = ratio, shape.entry_dim
        self.value = Linear(shape.dim, shape.entry_dim)
        self.gate = Linear(shape.dim, shape.entry_dim) if ratio > 1 else None
        self.norm = RMSNorm(shape.entry_dim)

    def project(self, x_BTD: Tensor) -> Tensor:
        """Return the value and the gate of each token, concatenated. The cache stores them while a group is
        unfinished."""
        return self.value(x_BTD) if self.gate is None else concatenated(x_BTD, *self.one_input)

    @property
    def one_input(self) -> tuple[Linear, ...]:
        """The maps of the same input, for ``gsm.layers.linear.side_by_side``."""
        return (self.value,) if self.gate is None else (self.value, self.gate)

    def pool(self, seen_BEC: Tensor, end_BG: Tensor) -> Tensor:
        """Return the latents of the groups that finish in this call.

        Args:
            seen_BEC: outputs of ``project`` of the tokens of unfinished groups and of the new tokens, in their order.
            end_BG: int64, index in ``seen_BEC`` of the last token of each group; -1 for none.

        Returns:
            latent_BGC, normed, before rotation.
        """
        return self.norm(pool_groups(seen_BEC, end_BG, self.ratio))


def pool_groups(seen_BEU: Tensor, end_BG: Tensor, ratio: int) -> Tensor:
    """Return the weighted mean of each group's tokens, [B, G, C] in their dtype:

        pooled_gc = sum_i softmax_i(gate_ic) value_ic    over the `ratio` tokens i up to the group's last, in float32

    Source: the compressor of DeepSeek-V4's compressed sparse attention, in V4.1's form without overlap or positional
    bias. It uses few kernel launches, because they dominate the time of a decoded token.

    Args:
        seen_BEU: values and gates of the tokens, U = 2 C; for a ``ratio`` of 1 only values.
        end_BG: int64, index of the last token of each group; -1 gives zeros.
        ratio: tokens per group (m).
    """
    parts = min(ratio, 2)  # values, and gates
    entry_BEPC = seen_BEU.unflatten(-1, (parts, -1))
    if seen_BEU.shape[1] < ratio:
        return entry_BEPC.new_zeros(*end_BG.shape, entry_BEPC.shape[-1])
    run_BFPMC = entry_BEPC.unfold(1, ratio, 1).mT  # a view: for each token, it and the ratio - 1 tokens after it
    first_BG111 = (end_BG - (ratio - 1)).clamp(min=0)[..., None, None, None]
    group_BGPMC = run_BFPMC.gather(1, first_BG111.expand(-1, -1, *run_BFPMC.shape[2:]))
    if ratio == 1:
        pooled_BGC = group_BGPMC[:, :, 0, 0]
    else:
        value_BGMC, gate_BGMC = at_least_float32(group_BGPMC).unbind(2)
        pooled_BGC = in_dtype((gate_BGMC.softmax(2) * value_BGMC).sum(2), seen_BEU.dtype)
    return pooled_BGC.masked_fill_((end_BG < 0)[..., None], 0)


class IndexQuery(NamedTuple):
    """The query of a search: the rotated queries of the index heads, and their signed weights."""

    query_BRJI: Tensor
    weight_BRJ: Tensor


class Indexer(nn.Module):
    """Score bank entries for a row: ``sum_j weight_j * relu(query_j . key)``.

    Its inputs are detached, so that the training of an indexer changes only its own parameters.

    Args:
        query_dim: width of the input of the index queries (the latent of the attention's query, or the normed input of
            a stage).
        weight_dim: width of the input of the weights.
        shape: widths that all attention layers share.
        owns_keys: whether this indexer makes index keys; a Reindex layer uses those of another indexer.
    """

    def __init__(self, query_dim: int, weight_dim: int, shape: Shape, *, owns_keys: bool):
        super().__init__()
        self.heads, self.width = shape.index_heads, shape.index_dim
        self.query = Linear(query_dim, self.heads * self.width)
        self.weight = Linear(weight_dim, self.heads)
        self.key = Linear(shape.entry_dim, self.width) if owns_keys else None
        self.key_norm = RMSNorm(self.width) if owns_keys else None

    def forward(self, query_BRQ: Tensor, weight_BRD: Tensor, angles: Angles) -> IndexQuery:
        """Return index queries and weights of the rows."""
        query_BRJI = self.query(query_BRQ.detach()).unflatten(-1, (self.heads, self.width))
        weight_BRJ = self.weight(weight_BRD.detach()) * (self.heads * self.width) ** -0.5
        return IndexQuery(rotate(query_BRJI, angles.cos_BTP, angles.sin_BTP), weight_BRJ)

    def keys(self, latent_BGC: Tensor, angles: Angles) -> Tensor:
        """Return the index keys of new bank entries, computed from the entries before rotation.

        Raises:
            RuntimeError: if ``owns_keys`` is False.
        """
        if self.key is None or self.key_norm is None:
            raise RuntimeError("owns_keys must be True for keys(), got False; use the index keys of the bank")
        return self.key_norm(self.key(latent_BGC.detach()), angles)

    def work(self, ratio: int, pool: int | None = None) -> LayerCost:
        """Return the cost of a search: for each row and slot, J products of width I, and their weighted sum.

        Args:
            ratio: tokens per slot (m).
            pool: largest number of slots to search; None: all slots that a row sees.
        """
        each = self.heads * (self.width + 1)
        per_row = {"indexers": products(self.query, self.weight), "index scores": ProductCost(moved=each)}
        look = AttentionCost("index scores", each, self.width, pool, ratio, block=POOL_BLOCK)
        return LayerCost(per_row, per_slot={"indexers": products(self.key, self.key_norm)}, looks=(look,))


class OutputProjection(nn.Module):
    """Grouped low-rank output projection: each group of heads has a map ``down``, and all groups share the map ``up``.

    Args:
        shape: widths that all attention layers share.
    """

    def __init__(self, shape: Shape):
        super().__init__()
        self.down = GroupedLinear(shape.output_groups, shape.heads * shape.entry_dim, shape.output_rank)
        self.up = Linear(shape.output_groups * shape.output_rank, shape.dim, gain=INTO_RESIDUAL)

    def forward(self, out_BRHC: Tensor) -> Tensor:
        """Map the output of all heads to [B, R, D]."""
        return self.up(self.down(out_BRHC.flatten(-2)))
