"""The common part of all recurrent mixers, which store the past as one matrix of fixed size per head.

    x -> low-rank query --.                                  .-> query --.
    x -> key, value ------+-> short convolution, activation -+-> key ----+-> S <- write(S, key, value) -> norm -> output
                                                             '-> value --'   out = S^T query

Queries are low-rank as in all models here, so that mixers differ only in their memory. The recurrence is
``gsm.layers.delta_rule``. A subclass defines keys (``feature``), values (``activate``), the strength of a write
(``strength``), the decay of the state (``log_decay``, ``channel_decay``), and the gate of the output (``gated``).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gsm.cache.memory import RecurrentCache
from gsm.cache.store import RecurrentState, Window
from gsm.errors import within
from gsm.layers.block import LayerOutput
from gsm.layers.convolution import ShortConvolution
from gsm.layers.costs import LayerCost, ProductCost, Store, products
from gsm.layers.delta_rule import delta_rule
from gsm.layers.linear import INTO_RESIDUAL, Linear
from gsm.layers.norm import RMSNorm
from gsm.layers.projections import Query, Shape
from gsm.observe import tap
from gsm.shapes import last_rows, promoted
from gsm.span import Span


class Recurrence(nn.Module, ABC):
    """A recurrent mixer with H heads. The state of each head, [C, C] by default, is reset at the start of a document.

    Args:
        shape: shared widths: H heads of width C, queries of rank Q.
        name: prefix of the names of its taps, e.g. ``decoder/5``: ``decoder/5/state`` is the state after the call.
        convolution: width in tokens of the short convolution of queries, keys and values; 1: no convolution.
        steps: number of keys and values per token, written one after the other.

    Raises:
        ValueError: if ``convolution`` is not in [1, 1024], or ``steps`` not in [1, 64].
    """

    # Number of earlier positions of its input that a row needs: all of them.
    reach: int | None = None
    # Whether a write first reads the state's value for its key: the delta rule.
    corrects = False
    # Number of decay factors per head, if more than one.
    decays = 0

    def __init__(self, shape: Shape, *, name: str, convolution: int, steps: int = 1):
        super().__init__()
        within(1, 64, steps=steps)
        self.heads, self.width, self.steps, self.name = shape.heads, shape.entry_dim, steps, name
        inner = shape.heads * shape.entry_dim
        self.query = Query(shape.dim, shape)
        self.key = Linear(shape.dim, steps * inner)
        self.value = Linear(shape.dim, steps * inner)
        self.channels = (inner, steps * inner, steps * inner)
        self.state_shape = (shape.entry_dim, shape.entry_dim)  # one matrix per head
        self.convolution = ShortConvolution(sum(self.channels), convolution) if convolution != 1 else None
        self.norm = RMSNorm(shape.entry_dim)
        self.output = Linear(inner, shape.dim, gain=INTO_RESIDUAL)

    def start(self, batch: int, kind: str) -> RecurrentCache:
        """Return an empty cache; ``kind`` (``decoder``) labels its bytes."""
        like_BC = self.key.weight.new_empty(batch, sum(self.channels))
        stored = 0 if self.convolution is None else self.convolution.width - 1
        window = Window.empty(f"{kind}_convolution", stored, like_BC)
        return RecurrentCache(
            window, RecurrentState.empty(f"{kind}_state", like_BC.new_empty(batch, self.heads, *self.state_shape))
        )

    def forward(self, x_BTD: Tensor, span: Span, cache: RecurrentCache, below: object) -> tuple[Tensor, LayerOutput]:
        """Write all T new positions to the state; compute the output for the last R of them.

        Args:
            x_BTD: normed input.
            span: the new positions, with the number of requested rows.
            cache: the state of the recurrence and the end of the convolution's input.
            below: unused.
        """
        projected_BTC = torch.cat((self.query(x_BTD)[0].flatten(-2), self.key(x_BTD), self.value(x_BTD)), dim=-1)
        seen_BEC, window = cache.convolution.extend(projected_BTC)
        mixed_BTC = seen_BEC if self.convolution is None else self.convolution(seen_BEC, span.position_BT)
        query_BTC, key_BTC, value_BTC = mixed_BTC.split(self.channels, dim=-1)
        empty_BHRC = promoted(x_BTD.new_zeros(len(x_BTD), self.heads, *self.state_shape))
        out_BTHC, state_BHRC = self.recur(
            tap((self, "query"), self.query_feature(self.split(query_BTC))),
            tap((self, "key"), self.feature(self.split(key_BTC))),
            tap((self, "value"), self.split(self.activate(value_BTC))),
            x_BTD,
            span.position_BT,
            cache.state.resume(empty_BHRC),
        )
        state, out_BTHC = cache.state.keep(tap((self, "state"), state_BHRC), out_BTHC)
        out_BRHC = self.gated(self.normed(last_rows(out_BTHC, span.rows)), last_rows(x_BTD, span.rows))
        update_BRD = self.output(tap((self, "heads"), out_BRHC).flatten(-2))
        return update_BRD, LayerOutput(RecurrentCache(window, state))

    def recur(
        self,
        query_BTHC: Tensor,
        key_BTHC: Tensor,
        value_BTHC: Tensor,
        x_BTD: Tensor,
        position_BT: Tensor,
        state_BHRC: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the state's output for every query, [B, T, H, C], and the final state.

        There are ``steps`` keys, values and strengths per query, so the recurrence runs over ``steps`` copies of every
        token. The state is reset and decays before a token's first write, and is read after its last.
        """
        decays = (self.log_decay(x_BTD), self.channel_decay(x_BTD))
        log_decay_BTH, channel_decay_BTHC = (None if decay is None else self.before_first(decay) for decay in decays)
        out_BTHC, state_BHRC = delta_rule(
            query_BTHC.repeat_interleave(self.steps, dim=1),
            key_BTHC,
            value_BTHC,
            self.strength(x_BTD),
            log_decay_BTH,
            self.before_first(position_BT == 0),
            (position_BT >= 0).repeat_interleave(self.steps, dim=1),
            state_BHRC,
            channel_decay_BTHC=channel_decay_BTHC,
        )
        return out_BTHC[:, self.steps - 1 :: self.steps], state_BHRC

    def before_first(self, x_BT: Tensor) -> Tensor:
        """Expand [B, T, ...] to one value per write: that of the token for its first write, zeros for the others."""
        padding = (0, 0) * (x_BT.ndim - 2) + (0, self.steps - 1)
        return F.pad(x_BT.unsqueeze(2), padding).flatten(1, 2)

    def split(self, x_BTC: Tensor) -> Tensor:
        """Split channels into heads, [B, T * steps, H, C]: the keys or values of a token are consecutive."""
        return x_BTC.unflatten(-1, (-1, self.heads, self.width)).flatten(1, 2)

    @abstractmethod
    def feature(self, x_BTHC: Tensor) -> Tensor:
        """Map keys to the features that address the state; also queries, unless ``query_feature`` is overridden."""

    def query_feature(self, x_BTHC: Tensor) -> Tensor:
        """Map queries to the features that read the state."""
        return self.feature(x_BTHC)

    def activate(self, value_BTC: Tensor) -> Tensor:
        """Map values before they are written."""
        return value_BTC

    def strength(self, x_BTD: Tensor) -> Tensor | None:
        """Return beta of every write, [B, T * steps, H]; None: writes are added without the delta rule."""
        return None

    def log_decay(self, x_BTD: Tensor) -> Tensor | None:
        """Return the logarithm of the decay factor of the state, [B, T, H]; None: no decay."""
        return None

    def channel_decay(self, x_BTD: Tensor) -> Tensor | None:
        """Return the logarithm of an additional decay factor of each key channel, [B, T, H, C]; None: no such decay."""
        return None

    def normed(self, out_BRHC: Tensor) -> Tensor:
        """Norm the output of each head."""
        return self.norm(out_BRHC)

    def gated(self, out_BRHC: Tensor, x_BRD: Tensor) -> Tensor:
        """Gate the normed output before the output projection."""
        return out_BRHC

    def for_rows(self) -> tuple[nn.Module, ...]:
        """Return the parts that run for requested rows only, including a gate. All others run for every token."""
        return tuple(part for name, part in self.named_children() if name in ("norm", "output", "gate"))

    def multiplied(self) -> int:
        """Return the multiply-adds per token on the state.

        One pass over the state for the query; for each key, one for the outer product with the value, and another for
        the delta rule. Decay is not counted.
        """
        return (1 + self.steps * (2 if self.corrects else 1)) * self.heads * math.prod(self.state_shape)

    def work(self, kind: str, below: LayerCost | None) -> LayerCost:
        """Return the cost of the token-by-token equations; the chunked form computes more. Every call reads and writes
        the state."""
        rows, inner = self.for_rows(), self.heads * self.width
        tokens = [part for part in self.children() if part not in rows and part is not self.convolution]
        moved = (2 + 2 * self.steps) * inner + self.heads * self.decays
        per_token = {
            "projections": products(*tokens, *self.parameters(recurse=False)),
            "recurrence": ProductCost(self.multiplied(), moved),
        }
        stores = [Store(f"{kind}_state", self.heads * math.prod(self.state_shape), 1, full=True, carried=True)]
        if self.convolution is not None:
            per_token["convolution"] = self.convolution.products()
            stores.append(self.convolution.store(kind))
        return LayerCost({"projections": products(*rows)}, per_token, stores=tuple(stores))
