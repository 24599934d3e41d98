"""What a model costs, in closed form: bytes that it keeps, FLOPs of training, prefill and decoding.

A multiply-add is 2 FLOPs. Matrix products count; norms, softmaxes, rotations, activations, the pooling of a bank's
groups, Sinkhorn's rounds and the choice of the highest scores do not. With weights of a x b numbers,

    a product with weights    2 a b           for each row that meets them
    attention                 4 H C           for each row and entry that it sees (logit and mixture, of all heads)
    index scores              2 J (I + 1)     for each row and slot that it searches (J heads, and their weighted sum)
    hyper-connection          2 X (X + 2) D   for each row (write and mix: X x (X + 1), read: X), besides its weights

Entries and slots are those that the equations need, counted exactly, position by position: an early row sees fewer. An
implementation may well compute more, on whole blocks, and hide the rest. A state writer says itself what it computes
besides products with its weights, and what it keeps. The numbers are for one sequence that is one document; no tensors
are made, and a model on the meta device will do.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gsm.models.base import LanguageModel
from gsm.models.baseline import Baseline
from gsm.models.cost_layers import POOL_BLOCK, Layer, known, limited, stack_layers, stage_layer, weights
from gsm.models.gsm import GSM
from gsm.models.schedule import baseline_rows, gsm_rows


class Parts(Counter[str]):
    """Numbers by part: of FLOPs ``place/what`` (``decoder/attention``), of bytes the kinds of ``Memory.breakdown``."""

    def of(self, place: str) -> int:
        """The sum over one place: ``encoder``, ``stages``, ``state``, ``decoder`` or ``head``."""
        return sum(number for part, number in self.items() if part.partition("/")[0] == place)


@dataclass(frozen=True)
class Cost:
    """What a model costs; made by ``cost(model)``."""

    model: GSM | Baseline
    layers: tuple[Layer, ...]

    def forward_flops(self, tokens: int, rows: int | None = None, before: int = 0) -> Parts:
        """FLOPs of one forward, by part.

        Args:
            tokens: new positions (N).
            rows: trailing positions for which an output is wanted; None: all, as in training; 1: prefill.
            before: positions that a memory holds already.

        Raises:
            ValueError: a number is out of range.
        """
        rows = tokens if rows is None else rows
        if tokens < 1 or before < 0 or not 1 <= rows <= tokens:
            raise ValueError(f"{tokens} tokens, {rows} rows, {before} before: give 1 <= rows <= tokens and before >= 0")
        parts, end = Parts(), before + tokens
        for layer, entering, asked in self._schedule(tokens, rows):
            slots = end // layer.ratio - before // layer.ratio
            for times, each in ((asked, layer.per_row), (entering, layer.per_token), (slots, layer.per_slot)):
                parts.update({f"{layer.place}/{part}": 2 * times * number for part, number in each.items()})
            parts[f"{layer.place}/attention"] += self._attention * layer.entries(end - asked, end)
            parts[f"{layer.place}/index scores"] += self._scoring * layer.searched(end - asked, end)
        if isinstance(self.model, GSM):
            writer, written = self.model.writer, min(tokens, self.model.writer.positions + rows - 1)
            parts["state/writer"] = 2 * weights(writer) * self._state_rows(tokens, rows)
            own = writer.multiply_adds(end - written, end)
            parts.update({f"state/{part}": 2 * number for part, number in own.items()})
        parts["head"] = 2 * weights(self.model.head) * rows
        return Parts({part: flops for part, flops in parts.items() if flops})

    def decode_flops(self, position: int) -> Parts:
        """FLOPs of decoding the one token at a position (from 0): it runs every layer."""
        return self.forward_flops(1, before=position)

    def training_flops(self, tokens: int) -> Parts:
        """FLOPs of forward and backward on a sequence, by part: each product is made again for the gradient of either
        factor, 3 in all.

        What indexers project is detached: 2, or 1 where they are frozen. A loss over every slot that they search needs,
        as a teacher, the main attention's logits with these; where selected slots alone teach, they are known already.
        Where activations are recomputed, all layers run forward once more. Stages count in full even where the writer
        ignores them.
        """
        forward = self.forward_flops(tokens)
        learned = self.model.indexer_training.learned_slots(tokens)
        projected = 1 if learned == "none" else 2
        parts = Parts(
            {part: (projected if part.endswith("indexers") else 3) * flops for part, flops in forward.items()}
        )
        for layer, _, asked in self._schedule(tokens, tokens):
            searched = layer.searched(tokens - asked, tokens)
            if layer.searches and learned == "visible":
                parts[f"{layer.place}/teacher"] += self._attention // 2 * searched
            elif layer.searches:  # gradients of no other scores
                chosen = min(layer.chosen, layer.pool or layer.chosen) if learned == "selected" else 0
                scored = limited(tokens, chosen, layer.ratio)
                parts[f"{layer.place}/index scores"] -= 2 * self._scoring * (searched - scored)
        if self.model.encoder.recompute:
            parts.update({part: flops for part, flops in forward.items() if part.startswith(("encoder/", "decoder/"))})
        return parts

    def cache_bytes(
        self, tokens: int, dtype: torch.dtype = torch.bfloat16, batch: int = 1, capacity: int | None = None
    ) -> Parts:
        """Bytes of a memory that has read so many tokens, as ``Memory.breakdown`` names them.

        Windows hold min(N, W) entries, the state what its writer says (the paper's min(N, M) entries), banks and index
        keys N // m slots; a static memory (``capacity``) has all of a window and of the state, and capacity // m + 1
        slots, from the start. Bookkeeping: two whole numbers for every sequence,
        and one more for each bank.
        """
        parts = Parts(
            bookkeeping=batch * torch.int64.itemsize * (2 + sum("bank" in layer.owns for layer in self.layers))
        )
        for kind, entries, width in self._stores(tokens, capacity):
            parts[kind] += batch * dtype.itemsize * entries * width
        return Parts({kind: size for kind, size in parts.items() if size})

    def _stores(self, tokens: int, capacity: int | None) -> Iterator[tuple[str, int, int]]:
        """Kind, entries and width of everything that a memory stores for one sequence."""
        shape, seen = self.model.geometry, tokens if capacity is None else sys.maxsize
        if isinstance(self.model, GSM):
            yield from ((kind, numbers, 1) for kind, numbers in self.model.writer.stored(seen).items())
        for layer in self.layers:
            slots = tokens // layer.ratio if capacity is None else capacity // layer.ratio + 1
            if "window" in layer.owns:
                yield f"{layer.place}_window", min(seen, layer.window), shape.entry_dim
            if "bank" in layer.owns:
                values = 1 if layer.ratio == 1 else 2  # of a token: its value, and in groups its gate
                yield f"{layer.place}_bank_pending", min(seen, layer.ratio - 1), values * shape.entry_dim
                yield f"{layer.place}_bank", slots, shape.entry_dim
            if "keys" in layer.owns:
                yield "index_keys", slots, shape.index_dim

    @property
    def _attention(self) -> int:
        return 4 * self.model.geometry.heads * self.model.geometry.entry_dim

    @property
    def _scoring(self) -> int:
        return 2 * self.model.geometry.index_heads * (self.model.geometry.index_dim + 1)

    def _state_rows(self, tokens: int, rows: int) -> int:
        """Positions that enter the stages and the writer."""
        if not isinstance(self.model, GSM):
            return 0
        return min(tokens, self.model.writer.positions + rows - 1 + self.model.writer.reach)

    def _schedule(self, tokens: int, rows: int) -> Iterator[tuple[Layer, int, int]]:
        """Each layer with the positions that enter it and the rows that it is asked for."""
        shape, state = self.model.geometry, self._state_rows(tokens, rows)
        depths = {"encoder_layers": shape.encoder_layers, "decoder_layers": shape.decoder_layers}
        if isinstance(self.model, GSM):
            last_bank, writer = max(shape.bank_layers), self.model.writer
            plan = gsm_rows(
                tokens, rows, **depths, last_bank=last_bank, window=shape.window, state_size=writer.positions,
                reach=writer.reach,
            )  # fmt: skip
        else:
            plan = baseline_rows(tokens, rows, **depths, window=shape.window)
        stages = [state] * sum(layer.place == "stages" for layer in self.layers)
        asked = [*plan.encoder, *stages, *plan.decoder]
        # Only layers with a window of their own write for every position that enters; these stand next to each other.
        yield from zip(self.layers, [tokens, *asked[:-1]], asked, strict=True)


def cost(model: LanguageModel) -> Cost:
    """The cost of a model. Raises ValueError for a part whose cost is not known here."""
    known(model, GSM, Baseline)
    assert isinstance(model, GSM | Baseline)
    layers = list(stack_layers(model.encoder, "encoder"))
    if isinstance(model, GSM):
        layers += [
            stage_layer(stage, layers[number - 1])
            for stage, number in zip(model.aggregation, model.aggregation.layers, strict=True)
        ]
    return Cost(model, (*layers, *stack_layers(model.decoder, "decoder")))


def paper_decode(model: LanguageModel, tokens: int) -> int:
    """Attention in the decoder for one token after N others, as the paper estimates it (section 2.1).

    baseline: N d_I + J P d_I + L_D (K + W) d, GSM: L_D M d; J Reindex layers, P slots in the pool, d_I = index heads x
    width, d = heads x width.
    """
    shape = cost(model).model.geometry
    scoring, width = shape.index_heads * shape.index_dim, shape.heads * shape.entry_dim
    if isinstance(model, GSM):
        return shape.decoder_layers * model.state_size * width
    searched = tokens + len(shape.decoder_reindex) * min(tokens, POOL_BLOCK * shape.candidate_blocks)
    return searched * scoring + shape.decoder_layers * (shape.top_k + shape.window) * width


def paper_cache(model: LanguageModel, tokens: int) -> int:
    """Numbers that the decoder keeps after N tokens, as the paper estimates them (section 2.1).

    baseline: N d_KV + L_D W d_KV, GSM: M d_KV.
    """
    shape = cost(model).model.geometry
    entries = model.state_size if isinstance(model, GSM) else tokens + shape.decoder_layers * shape.window
    return entries * shape.entry_dim
