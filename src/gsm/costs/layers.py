"""The plain numbers that a built model's cost is computed from: the ``LayerCost`` of each layer, and its schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import nn

from gsm.costs.primitives import LayerCost, ProductCost, Store, products
from gsm.layers.block import Block
from gsm.models.base import LanguageModel
from gsm.models.baseline import Baseline
from gsm.models.decoder_only import DecoderOnly
from gsm.models.gsm import GSM
from gsm.models.stack import Stack
from gsm.models.yoco import YOCO
from gsm.slots.retriever.base import Retriever

Answer = TypeVar("Answer", ProductCost, LayerCost)


@dataclass(frozen=True)
class Layer:
    """One layer of the encoder or decoder, a stage, or what YOCO caches.

    Attributes:
        place: ``encoder``, ``stages``, ``cache`` or ``decoder``.
        work: what it costs.
    """

    place: str
    work: LayerCost


def layers_of(model: LanguageModel) -> tuple[Layer, ...]:
    """All layers in the order in which they run. Raises ValueError for a part whose cost is not known."""
    if type(model) is GSM:
        encoder = list(_stack(model.encoder, "encoder"))
        numbered = zip(model.aggregation, model.aggregation.layers, strict=True)
        stages = [Layer("stages", _stage(stage, encoder[number - 1].work)) for stage, number in numbered]
        return *encoder, *stages, *_stack(model.decoder, "decoder")
    if type(model) is Baseline:
        return *_stack(model.encoder, "encoder"), *_stack(model.decoder, "decoder")
    if type(model) is YOCO:
        cache = model.key_value.work("decoder_cache")
        normed = cache + LayerCost(per_token={"keys and values": products(model.cache_norm)})
        decoder = [Layer("decoder", _block(block, "decoder", cache)) for block in model.decoder]
        return *_stack(model.encoder, "encoder"), Layer("cache", normed), *decoder
    if type(model) is DecoderOnly:
        return tuple(_stack(model.decoder, "decoder"))
    raise _unknown(model, "gsm.costs.layers knows GSM, Baseline, DecoderOnly and YOCO; extend it")


def rows_of(model: LanguageModel, tokens: int, rows: int) -> list[tuple[int, int]]:
    """For each of these layers the positions that enter it, and the rows that it is asked for, when so many are asked
    of the model."""
    plan = model.schedule(tokens, rows)
    encoder = list(zip([tokens, *plan.encoder], plan.encoder, strict=False))
    decoder = list(zip([plan.entering, *plan.decoder], plan.decoder, strict=False))
    if isinstance(model, GSM):
        return [*encoder, *[(plan.state, plan.state)] * len(model.aggregation.layers), *decoder]
    return [*encoder, (tokens, plan.entering), *decoder] if isinstance(model, YOCO) else [*encoder, *decoder]


def _stack(stack: Stack, place: str) -> Iterator[Layer]:
    below = None
    for block in stack:
        below = _block(block, place, below)
        yield Layer(place, below)


def _block(block: Block, place: str, below: LayerCost | None) -> LayerCost:
    """A block: its mixer, its feed-forward, and both sites."""
    mixer: LayerCost = _says(block.attention, "work", place, below)
    sites: list[nn.Module] = [block.attention_residual, block.feed_forward_residual]  # pyright: ignore
    feed_forward = _says(block.feed_forward, "products") + products(block.attention_norm, block.feed_forward_norm)
    mixing = sum((_says(site, "products") for site in sites), ProductCost())
    return mixer + LayerCost({"feed-forward": feed_forward, "hyper-connections": mixing})


def _stage(stage: Any, layer: LayerCost) -> LayerCost:
    """A stage on what its encoder layer looks at."""
    retriever: Retriever = stage.retriever
    bank, near = layer.bank, layer.looks[0]
    assert bank is not None
    bank = bank if retriever.reads is None else replace(bank, limit=retriever.reads)
    total = LayerCost({**stage.reading(), "norms": products(stage.norm)}, looks=(near, bank), bank=bank)
    indexer = getattr(retriever, "indexer", None)
    if indexer is None:
        return total
    keys = Store("index_keys", indexer.width, ratio=bank.ratio)
    return total + indexer.work(bank.ratio) + LayerCost(stores=(keys,))


def _says(part: object, method: str, *arguments: object) -> Any:
    """What a part says of its cost. Raises ValueError for one that says nothing."""
    answer: Callable[..., Any] | None = getattr(part, method, None)
    if answer is None:
        signature = "work(kind, below)" if method == "work" else "products()"
        raise _unknown(part, f"give it a method {signature}, as gsm.costs.primitives tells")
    return answer(*arguments)


def _unknown(part: object, remedy: str) -> ValueError:
    return ValueError(f"the cost of {type(part).__name__} is not known; {remedy}")
