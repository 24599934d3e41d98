"""What all recurrent mixers have in common: they know the past as one matrix of fixed size for every head.

    x -> low-rank query --.                                  .-> query --.
    x -> key, value ------+-> short convolution, activation -+-> key ----+-> S <- write(S, key, value) -> norm -> output
                                                             '-> value --'   out = S^T query

Queries are low-rank as in all models here, so that mixers differ in what they remember. The recurrence itself is
``gsm_kernels.delta_rule``; a variant says how keys are made (``feature``), how values are (``activate``), how strongly
a token writes (``strength``), what is left of the state (``log_decay``, ``channel_decay``), and what the output passes
(``gated``).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gsm.cache.memory import RecurrentCache
from gsm.cache.store import State, Window
from gsm.costs.primitives import LayerCost, ProductCost, Store, products
from gsm.layers.block import LayerOutput
from gsm.layers.convolution import ShortConvolution
from gsm.layers.linear import INTO_RESIDUAL, Linear
from gsm.layers.norm import RMSNorm
from gsm.layers.projections import Query, Shape
from gsm.observe import tap
from gsm.shapes import last, promoted
from gsm.span import Span
from gsm_kernels import delta_rule


class Recurrence(nn.Module, ABC):
    """A recurrent mixer: H heads, each with a state, [C, C] unless a variant says otherwise, that is emptied where a
    document starts.

    Args:
        shape: shared widths: H heads of width C, queries of rank Q.
        name: what its taps are called, e.g. ``decoder/5``: ``decoder/5/state`` is the state after the call.
        convolution: tokens that the short convolution of query, key and value sees; 1: there is none.
        steps: keys and values of a token, which are written one after the other.

    Raises:
        ValueError: for a convolution or steps below 1.
    """

    # How many positions back of its input a row needs: every earlier one counts.
    reach: int | None = None
    # Whether a write first reads what the state answers to its key: the delta rule.
    corrects = False
    # Numbers by which the state of a head decays, where it takes more than one.
    decays = 0

    def __init__(self, shape: Shape, *, name: str, convolution: int, steps: int = 1):
        super().__init__()
        if steps < 1:
            raise ValueError(f"steps must be at least 1 write for a token, got {steps}")
        self.heads, self.width, self.steps, self.name = shape.heads, shape.entry_dim, steps, name
        inner = shape.heads * shape.entry_dim
        self.query = Query(shape.dim, shape)
        self.key = Linear(shape.dim, steps * inner)
        self.value = Linear(shape.dim, steps * inner)
        self.channels = (inner, steps * inner, steps * inner)
        self.kept = (shape.entry_dim, shape.entry_dim)  # the state of a head
        self.convolution = ShortConvolution(sum(self.channels), convolution) if convolution != 1 else None
        self.norm = RMSNorm(shape.entry_dim)
        self.output = Linear(inner, shape.dim, gain=INTO_RESIDUAL)

    def start(self, batch: int, kind: str) -> RecurrentCache:
        """An empty memory; ``kind`` (``decoder``) labels its bytes."""
        like_BC = self.key.weight.new_empty(batch, sum(self.channels))
        stored = 0 if self.convolution is None else self.convolution.width - 1
        window = Window.empty(f"{kind}_convolution", stored, like_BC)
        return RecurrentCache(window, State.empty(f"{kind}_state", like_BC.new_empty(batch, self.heads, *self.kept)))

    def forward(self, x_BTD: Tensor, span: Span, cache: RecurrentCache, below: object) -> tuple[Tensor, LayerOutput]:
        """Takes all T new positions into the state and reads it for the last R of them.

        Args:
            x_BTD: normed input.
            span: the new positions, and how many rows are asked for.
            cache: the state of the recurrence and the end of the convolution's input.
            below: not looked at.
        """
        projected_BTC = torch.cat((self.query(x_BTD)[0].flatten(-2), self.key(x_BTD), self.value(x_BTD)), dim=-1)
        seen_BEC, window = cache.convolution.extend(projected_BTC)
        mixed_BTC = seen_BEC if self.convolution is None else self.convolution(seen_BEC, span.position_BT)
        query_BTC, key_BTC, value_BTC = mixed_BTC.split(self.channels, dim=-1)
        empty_BHRC = promoted(x_BTD.new_zeros(len(x_BTD), self.heads, *self.kept))
        out_BTHC, state_BHRC = self.recur(
            self.query_feature(self.split(query_BTC)),
            self.feature(self.split(key_BTC)),
            self.split(self.activate(value_BTC)),
            x_BTD,
            span.position_BT,
            cache.state.resume(empty_BHRC),
        )
        state, out_BTHC = cache.state.keep(tap((self, "state"), state_BHRC), out_BTHC)
        out_BRHC = self.gated(self.norm(last(out_BTHC, span.rows)), last(x_BTD, span.rows))
        update_BRD = self.output(out_BRHC.flatten(-2))
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
        """What the state answers to every query, [B, T, H, C], and the state after the call.

        Keys, values and strengths are ``steps`` times as many as queries. The recurrence then runs on a stream in which
        every token stands so many times: the state is emptied and decays before its first write, and is read behind its
        last.
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
        """[B, T, ...] for the first write of every token, zeros for the others."""
        padding = (0, 0) * (x_BT.ndim - 2) + (0, self.steps - 1)
        return F.pad(x_BT.unsqueeze(2), padding).flatten(1, 2)

    def split(self, x_BTC: Tensor) -> Tensor:
        """Channels as heads; where a token has several keys or values, they become as many tokens in a row."""
        return x_BTC.unflatten(-1, (-1, self.heads, self.width)).flatten(1, 2)

    @abstractmethod
    def feature(self, x_BTHC: Tensor) -> Tensor:
        """Keys as the state is addressed with them, and queries unless ``query_feature`` says otherwise."""

    def query_feature(self, x_BTHC: Tensor) -> Tensor:
        """Queries as the state is read with them."""
        return self.feature(x_BTHC)

    def activate(self, value_BTC: Tensor) -> Tensor:
        """Values as they are written."""
        return value_BTC

    def strength(self, x_BTD: Tensor) -> Tensor | None:
        """beta of every write, [B, T, H]; None: writes are added without the delta rule."""
        return None

    def log_decay(self, x_BTD: Tensor) -> Tensor | None:
        """Logarithm of what is left of the state, [B, T, H]; None: all of it."""
        return None

    def channel_decay(self, x_BTD: Tensor) -> Tensor | None:
        """The same for each key channel besides, [B, T, H, C]; None: no such decay."""
        return None

    def gated(self, out_BRHC: Tensor, x_BRD: Tensor) -> Tensor:
        """The normed output as it goes into the output projection."""
        return out_BRHC

    def for_rows(self) -> tuple[nn.Module, ...]:
        """The parts that only rows asked for meet; all others meet every token."""
        return self.norm, self.output

    def multiplied(self) -> int:
        """Numbers of the state that a token multiplies or adds to: all for its query, for each of its keys where writes
        correct, and for the outer product of each key and value. That the state decays is no product."""
        return (1 + self.steps * (2 if self.corrects else 1)) * self.heads * math.prod(self.kept)

    def work(self, kind: str, below: LayerCost | None) -> LayerCost:
        """What it costs, token by token as the equations stand; in chunks, more is computed. Every call reads and
        writes the state."""
        rows, inner = self.for_rows(), self.heads * self.width
        tokens = [part for part in self.children() if part not in rows and part is not self.convolution]
        moved = (2 + 2 * self.steps) * inner + self.heads * self.decays
        per_token = {
            "projections": products(*tokens, *self.parameters(recurse=False)),
            "recurrence": ProductCost(self.multiplied(), moved),
        }
        stores = [Store(f"{kind}_state", self.heads * math.prod(self.kept), 1, full=True, carried=True)]
        if self.convolution is not None:
            per_token["convolution"] = self.convolution.products()
            channels, seen = sum(self.channels), self.convolution.width - 1
            stores.append(Store(f"{kind}_convolution", channels, seen, carried=True))
        return LayerCost({"projections": products(*rows)}, per_token, stores=tuple(stores))
