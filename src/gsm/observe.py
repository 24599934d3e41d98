"""Named taps: points at which tensors inside a model can be recorded and replaced. They cost nothing while unused.

    x_BRD = tap("stage/2/increment", x_BRD)               # in the model: returns its argument ...

    with record("stage/*", "state/entries") as seen:      # ... and records it inside this block
        model(tokens)
    seen["stage/2/weights"]                               # the tensor of the last call
    seen.all("stage/2/weights")                           # of every call, in order: chunks, decoded tokens

    with patch("state/entries", lambda entry_BEC: 0 * entry_BEC):       # ... or returns a replacement
        model(tokens)

`gsm.taps(model)` lists the names of a model, with shapes and dtypes. Layers and stages are numbered from 1, the
decoder's layers after the encoder's. T positions enter a layer and R rows leave it: in prefill upper layers compute the
last R alone. X residual streams, E window entries and F slots, stored and new:

    position             place in the document, -1 for padding
    embedding, hidden    input of the first layer, output of the last, before the final norm
    state/e, state/z     the encoder's output, and the writer's combination of it with the stages' increments
    state/entries        [B, E, C] the entries that all decoder layers read

In each layer, `encoder/<l>/...` and `decoder/<l>/...`:

    stream               [B, T, D] what the attention reads, before its norm: the residual stream. With several streams
                         their read-out, and a replacement changes only what is read here
    stream/between       [B, R, D] the same before the feed-forward
    stream/after         [B, R, D] the same behind the layer, where the next layer or the head reads
    streams, streams/between    [B, T, X, D] the residual streams themselves, where there are several
    attention, feed_forward     [B, R, D] what both add to the stream
    query                [B, R, H, C] queries before rotation; in a recurrence what reads the state
    heads                [B, R, H, C] output of each head, before the output projection
    weights              [B, R, H, ...] attention: window from old to new, selected slots, sink; or the last M entries,
                         sink; or F tokens. Rows sum to 1
    window               [B, E, C] entries, key and value at once
    latent, bank         [B, G, C], [B, F, C] of a layer with its own bank: new latents of this call, before rotation,
                         from which entries and index keys are made; and its entries, stored and new
    top_k                int64 [B, R, K] slots that the layer reads, from its own selection or not, -1 for none
    key, value           [B, F, G, C] of G separate key heads, keys rotated; what a recurrence writes, [B, T, H, C]
    state                [B, H, C, C] of a recurrence, after the call; [B, H, M, 2 C] for M slots, key and value side by
                         side; [B, H, C + 2, C] in Mamba-3, with the last token's key and value in the last two rows

In each stage, `stage/<s>/...`: `query`, `top_k`, `weights` and `heads` as in a layer, and `increment`, [B, R, D], its
addition to r. NSA has keys, values and weights of three branches, `compressed/key`, ... A part of one's own may have
more taps.

The design follows the named probes of facebookresearch/lingua. In addition, recordings nest, patterns select taps, taps
can be replaced, and taps vanish under `torch.compile`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol, overload

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gsm.models.base import LanguageModel

# Ids of the recordings and patches of the whole process: a compiled graph can read this list, but no context variable.
_listening: list[int] = []
# Recordings and patches of this thread, or asyncio task. Only these affect a call.
_listeners: ContextVar[tuple[Recording | Patch, ...]] = ContextVar("_listeners", default=())
_called: ContextVar[Any] = ContextVar("_called", default=None)  # the model of the current call, while anything listens


class Named(Protocol):
    """A part of a model with a name, such as ``decoder/6``."""

    name: str


Name = str | tuple[Named, str]
"""The name of a tap. A pair of a part and a word means ``<name of the part>/<word>``, joined only when the tap is in
use: a compiled block that reads its name would not share one graph with all blocks of its kind."""


def full_name(name: Name) -> str:
    """Return the full name of a tap."""
    return name if isinstance(name, str) else f"{name[0].name}/{name[1]}"


@overload
def tap(name: Name, value: Tensor, fixed: str = "") -> Tensor: ...
@overload
def tap(name: Name, value: Callable[[], Tensor]) -> Tensor | None: ...
def tap(name: Name, value: Tensor | Callable[[], Tensor], fixed: str = "") -> Tensor | None:
    """Record a tensor under a name; return it, or the replacement of a patch.

    An expensive tensor, such as attention weights that a kernel never materialises, is passed as a function. It is
    called only when the tap is in use, and then once. The result is then None, or the replacement of a patch, with
    which the caller must compute its output.

    Args:
        name: name of the tap.
        value: the tensor, or a function that computes it.
        fixed: the reason why the tensor cannot be replaced, and the remedy; empty: it can be.
    """
    if _listening:
        return _record_and_patch(name, value, fixed)
    return None if callable(value) else value


class Observable:
    """Base of language models, which announce each of their calls with `called`."""


def called(model: Observable) -> None:
    """Announce a call: the following taps belong to ``model``."""
    if _listening:
        _set_model(model)


def observed() -> bool:
    """Return whether there is a recording or a patch in this thread."""
    return bool(_listening) and bool(_listeners.get())


def patching() -> bool:
    """Return whether there is a patch in this thread."""
    return bool(_listening) and any(isinstance(listener, Patch) for listener in _listeners.get())


@contextmanager
def record(*patterns: str, detach: bool = True) -> Iterator[Recording]:
    """Record every tap with a name that matches any of the patterns; without patterns, every tap.

    Patterns are shell patterns, and `*` also matches slashes: `"stage/*"` matches `"stage/2/weights"`. Recordings nest,
    each with its own patterns. Tensors are detached copies, so that later writes to a static memory do not change them;
    `detach=False` stores the tensors themselves with their autograd graph. With a patch, the replacement is recorded.
    Calls of other threads are neither recorded nor patched.

    A compiled model is compiled again for a recording, with a graph break at every tap. A model compiled with
    `fullgraph=True` raises an error: record from the model before `torch.compile`.

    Raises:
        KeyError: at exit, if models were called and no tap matched; the error names the closest taps of these calls.
    """
    with _listener(Recording(patterns, detach)) as seen:
        yield seen
    _require_match(seen)


@contextmanager
def patch(
    pattern: str | Sequence[str], function: Callable[[Tensor], Tensor], model: Observable | None = None
) -> Iterator[None]:
    """Replace the tensors of taps with matching names, in every call inside the block.

        with gsm.patch("stage/1/increment", torch.zeros_like):
            model(tokens)                                 # as if stage 1 had retrieved nothing

    Training, chunks and decoding continue with the replacement, and gradients flow through the function. Patches nest:
    the inner function gets the result of the outer one. After the block the model computes as before, but the entries
    that it has stored in a memory inside the block remain.

    - Taps of stored tensors (windows, banks, the state's entries) have stored and new entries in each call, and the
      memory stores the original ones. So the function is applied once per call, never to its own result. Two taps are
      exceptions, because the memory stores the replacement: `encoder/<l>/latent`, and `decoder/<l>/state`, the state
      after the call. A patch of `decoder/<l>/state` affects later calls only.
    - Rows are the last R of the call's T new positions, and entries end with the newest. For the same result token by
      token and in one call, the function must treat each position the same, e.g. by its number in `seen["position"]` of
      a recording around the patch.
    - Replaced attention weights determine the output of the attention. Weights of invisible places and of the sink have
      no effect. Kernels do not compute weights, so a patch changes the order of summation. An indexer still learns from
      the original weights.
    - A replaced `top_k` determines the slots that this layer reads, and all layers that reuse its selection.
    - `position` cannot be replaced.

    Replayed code runs no Python, so patches would not apply: an `Engine` makes plain calls inside a patch or a
    recording. For `torch.compile` see `record`. A model with recomputation of activations does not recompute inside a
    patch.

    Args:
        pattern: a pattern as in `record`, or several.
        function: maps a copy of the tensor, which it may modify, to a tensor of the same shape, dtype and device.
        model: patch only calls of this model, which must be the model before `torch.compile`; None: calls of any model.

    Raises:
        TypeError: at entry, if `model` is no language model, such as the result of `torch.compile`.
        ValueError: in the call, if the function returns anything else, or slots that a row may not see; at exit, if
            models were called, but never `model`.
        KeyError: at exit, if models were called and no tap matched; the error names the closest taps of these calls.
    """
    if model is not None and not isinstance(model, Observable):
        raise TypeError(
            f"model must be a language model, without torch.compile or another wrapper, got {type(model).__name__}"
        )
    patterns = (pattern,) if isinstance(pattern, str) else tuple(pattern)
    with _listener(Patch(patterns, function, model)) as active:
        yield
    if active.other_models and not active.taps:
        raise ValueError(
            "model must be one that was called, got calls of others alone; without model= every model is patched"
        )
    _require_match(active)


def taps(model: LanguageModel) -> Taps:
    """Return shape and dtype of all taps of a model, by name, from a call of 16 tokens without a memory.

    Shapes follow the call: 16 new positions, one sequence. A notebook shows them as a table.
    """
    tokens = torch.zeros(1, 16, dtype=torch.int64, device=next(model.parameters()).device)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), model.evaluating(), record() as seen:
        model(tokens)
    return Taps.of(seen)


class Taps(dict[str, tuple[tuple[int, ...], torch.dtype]]):
    """Shapes and dtypes of taps, by name; printed as a table."""

    @classmethod
    def of(cls, seen: Mapping[str, Tensor]) -> Taps:
        """Return those of recorded tensors."""
        return cls({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in seen.items()})

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        lines = [f"{name:<{width}}  {list(shape)!s:<20}  {_plain(dtype)}" for name, (shape, dtype) in self.items()]
        return "\n".join(lines) or "no taps"


class Recording(dict[str, Tensor]):
    """The result of a recording: name -> last tensor of that name; `all(name)` -> all of them, in order.

    Attributes:
        taps: names of all taps of the recorded calls, whether they were recorded or not.
    """

    def __init__(self, patterns: tuple[str, ...] = (), detach: bool = True) -> None:
        super().__init__()
        self.patterns = patterns
        self.detach = detach
        self.taps: set[str] = set()
        self._history: dict[str, list[Tensor]] = {}

    def all(self, name: str) -> list[Tensor]:
        """Return every tensor recorded under this name, in order. Raises KeyError, listing the recorded names."""
        return self._history[name] if name in self._history else self.__missing__(name)

    def matches(self, name: str) -> bool:
        return not self.patterns or _matches(name, self.patterns)

    def wants(self, name: str) -> bool:
        self.taps.add(name)
        return self.matches(name)

    def add(self, name: str, tensor: Tensor) -> None:
        self[name] = tensor.detach().clone() if self.detach else tensor
        self._history.setdefault(name, []).append(self[name])

    def __missing__(self, name: str):
        recorded = f"closest: {_closest(name, self)}" if self else "nothing was"
        raise KeyError(f"no tap named {name!r} was recorded; {recorded}")

    def __repr__(self) -> str:
        return f"Recording of {len(self)} taps: {textwrap.shorten(', '.join(self), 100, placeholder=' ...')}"


class Patch:
    """An open patch.

    Attributes:
        taps: names of all taps of the patched calls.
        other_models: whether models other than ``model`` were called.
    """

    def __init__(
        self, patterns: tuple[str, ...], function: Callable[[Tensor], Tensor], model: Observable | None = None
    ) -> None:
        self.patterns, self.function, self.model = patterns, function, model
        self.taps: set[str] = set()
        self.other_models = False

    def matches(self, name: str) -> bool:
        return _matches(name, self.patterns)

    def wants(self, name: str) -> bool:
        if self.model is not None and self.model is not _called.get():
            self.other_models = True
            return False
        self.taps.add(name)
        return self.matches(name)

    def replace(self, name: str, tensor: Tensor, fixed: str) -> Tensor:
        new = self.function(tensor.clone())
        if not isinstance(new, Tensor) or _describe(new) != _describe(tensor):
            actual = _describe(new) if isinstance(new, Tensor) else f"a {type(new).__name__}"
            raise ValueError(f"a patch of {name} must return {_describe(tensor)}, as the tap has, got {actual}")
        if fixed and not torch.equal(new, tensor):
            raise ValueError(f"{name} must be left as it is by patches: {fixed}")
        return new


@contextmanager
def _listener(listener: Any) -> Iterator[Any]:
    _listening.append(id(listener))
    _listeners.set((*_listeners.get(), listener))
    try:
        yield listener
    finally:
        _listeners.set(tuple(other for other in _listeners.get() if other is not listener))
        _listening.remove(id(listener))
        if not _listeners.get():
            _called.set(None)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _require_match(listener: Recording | Patch) -> None:
    """Raise KeyError if there were calls, and none of their taps matched."""
    if listener.taps and not any(map(listener.matches, listener.taps)):
        names = " or ".join(map(repr, listener.patterns))
        close = _closest(listener.patterns[0], listener.taps)
        raise KeyError(f"no tap named {names} in these calls; closest: {close}. gsm.taps(model) lists all")


def _closest(name: str, names: Iterable[str]) -> str:
    return ", ".join(get_close_matches(name, sorted(names), n=5, cutoff=0))


def _describe(tensor: Tensor) -> str:
    return f"{_plain(tensor.dtype)} {list(tensor.shape)} on {tensor.device}"


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@torch.compiler.disable(reason="a tap is recorded outside of the compiled graph")
def _set_model(model: Any) -> None:
    _called.set(model)


@torch.compiler.disable(reason="a tap is recorded outside of the compiled graph")
def _record_and_patch(name: Name, value: Tensor | Callable[[], Tensor], fixed: str) -> Tensor | None:
    name = full_name(name)
    listeners = [listener for listener in _listeners.get() if listener.wants(name)]
    patches = [listener for listener in listeners if isinstance(listener, Patch)]
    if not listeners:
        return None if callable(value) else value
    tensor = value() if callable(value) else value
    for active in patches:
        tensor = active.replace(name, tensor, fixed)
    for listener in listeners:
        if isinstance(listener, Recording):
            listener.add(name, tensor)
    return tensor if patches or not callable(value) else None
