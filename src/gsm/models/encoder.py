"""The causal encoder of GSM and the baseline: window-only layers, then groups of layers that share a bank
(DeepSeek-V4.1)."""

from __future__ import annotations

from collections.abc import Callable

from gsm.layers.block import Block
from gsm.layers.indexer_training import IndexerTraining
from gsm.models.geometry import Geometry
from gsm.models.stack import Recompute, Stack
from gsm.slots.encoder_layer import ATTENTION, EncoderLayer


def build_encoder(
    geometry: Geometry,
    block: Callable[..., Block],
    *,
    indexer_training: IndexerTraining,
    encoder_layer: EncoderLayer = ATTENTION,
    reads_bank: bool = True,
    recompute: Recompute = False,
) -> Stack:
    """Build the encoder of a geometry.

    Args:
        geometry: widths, depths and the layers that build a bank.
        block: builds a block around a mixer, as ``block_of`` returns it.
        indexer_training: trains the encoder's indexers.
        encoder_layer: builds the mixer of each layer.
        reads_bank: whether the encoder layers attend to their banks; if not, only the stages do.
        recompute: recompute all or some activations in the backward pass, see ``Stack``.
    """
    shape = geometry.shape()
    window_rope, bank_rope = geometry.window_rope(), geometry.bank_rope()
    blocks = []
    for layer, role in enumerate(geometry.encoder_roles(), 1):
        name = f"encoder/{layer}"
        mixer = encoder_layer.layer(
            shape,
            role,
            geometry=geometry,
            window=geometry.window,
            top_k=geometry.top_k,
            ratio=geometry.encoder_ratio,
            rope=window_rope if role == "window" else bank_rope,
            name=name,
            reads_bank=reads_bank,
            indexer_training=indexer_training,
        )
        blocks.append(block(mixer, name=name, convolution=encoder_layer.feed_forward_convolution))
    return Stack(blocks, recompute=recompute)
