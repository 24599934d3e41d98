"""The widths and depths of a model. All models of one size share them, so that their comparison is fair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gsm.errors import within
from gsm.layers.projections import Shape
from gsm.layers.rope import Rope
from gsm.layers.sparse import Role

MOST_LAYERS = 1000  # layers of an encoder or decoder: each is built in Python


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """A size (``configs/size/*.yaml``). Layers are numbered from 1, as in the paper.

    Attributes:
        vocabulary: rows of the embedding (V), at least the tokenizer's size.
        context: tokens of a training sequence.
        dim, feed_forward_dim: model width (D) and hidden width of the feed-forward; with experts, the sum of the hidden
            widths of the experts that a token uses.
        streams: number of residual streams with ``model/residual=by_size``; 1: plain residual connections.
        experts, experts_per_token: for a feed-forward with experts, the number of routed experts (without the shared
            expert), and the number of routed experts per token.
        encoder_layers, decoder_layers: depth of the two halves.
        heads, entry_dim, rotary_dim: number of query heads (H), width of a window, bank or state entry (C), and how
            many of its channels are rotated by position.
        query_rank, output_groups, output_rank: rank of the low-rank query projection; number of groups and rank of the
            grouped low-rank output projection.
        index_heads, index_dim: heads (J) and width (I) of an indexer.
        window, top_k: tokens in the local window (W), and bank entries that a row selects (K).
        encoder_ratio, decoder_ratio: tokens per bank entry (m) in the encoder, and in the baseline's decoder.
        bank_layers: encoder layers that build a bank (role ``full``).
        stages: encoder layers with an aggregation stage (GSM).
        decoder_full, decoder_reindex: the decoder layer that builds a bank, and the layers with their own indexer over
            it (baseline).
        candidate_blocks: blocks of 8 entries in the candidate pool, if the pool is on (baseline).
        rope_base, bank_rope_base: base of the rotary frequencies in layers without and with a bank.
        yarn_factor: factor by which YaRN extends the context in layers with a bank; 1: no YaRN.
        yarn_original: context in tokens before the extension; None: ``context``.
        yarn_beta_fast, yarn_beta_slow, yarn_mscale: see ``Rope``; with an mscale of 0, YaRN does not scale attention.

    Raises:
        ValueError: if a field has an invalid value; the message begins with its name.
    """

    vocabulary: int
    context: int
    dim: int
    feed_forward_dim: int
    encoder_layers: int
    decoder_layers: int
    heads: int
    entry_dim: int
    rotary_dim: int
    query_rank: int
    output_groups: int
    output_rank: int
    index_heads: int
    index_dim: int
    window: int
    top_k: int
    bank_layers: Sequence[int]
    stages: Sequence[int]
    decoder_full: int
    decoder_reindex: Sequence[int]
    candidate_blocks: int
    streams: int = 4
    experts: int = 8
    experts_per_token: int = 3
    encoder_ratio: int = 2
    decoder_ratio: int = 1
    rope_base: float = 10_000.0
    bank_rope_base: float = 160_000.0
    yarn_factor: float = 1.0
    yarn_original: int | None = None
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_mscale: float = 0.0

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        within(1, MOST_LAYERS, encoder_layers=self.encoder_layers, decoder_layers=self.decoder_layers)
        within(1, rope_base=self.rope_base, bank_rope_base=self.bank_rope_base)
        if self.heads % self.output_groups:
            raise ValueError(f"output_groups must divide heads ({self.heads}), got {self.output_groups}")
        if self.rotary_dim > min(self.entry_dim, self.index_dim):
            limit = min(self.entry_dim, self.index_dim)
            raise ValueError(
                f"rotary_dim must be at most {limit}, to fit into entry_dim and index_dim, got {self.rotary_dim}"
            )
        check_layers("bank_layers", self.bank_layers, 1, self.encoder_layers)
        if not self.bank_layers:
            raise ValueError("bank_layers must have at least one encoder layer, got []")

    @property
    def depth(self) -> int:
        """Number of layers, encoder and decoder together."""
        return self.encoder_layers + self.decoder_layers

    def shape(self) -> Shape:
        """Return the widths that all attention layers share."""
        return Shape(**{name: getattr(self, name) for name in Shape.__dataclass_fields__})

    def window_rope(self) -> Rope:
        """Return the rotary embedding of window-only layers and of GSM's decoder: ``rope_base``, without YaRN."""
        return Rope(self.rotary_dim, base=self.rope_base)

    def bank_rope(self) -> Rope:
        """Return the rotary embedding of layers with a bank, and of the stages: ``bank_rope_base``, with YaRN."""
        return Rope(
            self.rotary_dim,
            base=self.bank_rope_base,
            factor=self.yarn_factor,
            original=self.yarn_original or self.context,
            beta_fast=self.yarn_beta_fast,
            beta_slow=self.yarn_beta_slow,
            mscale=self.yarn_mscale,
        )

    def encoder_roles(self) -> list[Role]:
        """Return the role of each encoder layer: ``window`` below the first bank; then groups of a ``full`` layer,
        which builds a bank, and ``reuse`` layers, which read its bank and selection."""
        first = min(self.bank_layers)
        layers = range(1, self.encoder_layers + 1)
        return ["full" if i in self.bank_layers else "window" if i < first else "reuse" for i in layers]


def check_layers(field: str, layers: Sequence[int], first: int, last: int) -> None:
    """Raise ValueError unless ``layers`` are ascending numbers in [first, last]; ``field`` begins the message."""
    if list(layers) != sorted(set(layers)):
        raise ValueError(f"{field} must be in ascending order without repetition, got {list(layers)}")
    outside = [layer for layer in layers if not first <= layer <= last]
    if outside:
        raise ValueError(f"{field} must be layers in [{first}, {last}], got {list(layers)}")


_POSITIVE = (
    "vocabulary context dim feed_forward_dim streams encoder_layers decoder_layers heads entry_dim rotary_dim "
    "query_rank output_groups output_rank index_heads index_dim window top_k candidate_blocks experts "
    "experts_per_token encoder_ratio decoder_ratio"
).split()
