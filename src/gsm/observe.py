"""Named taps: points in a model whose tensors can be recorded and replaced. They cost nothing while unused.

    x_BRD = tap("stage/2/increment", x_BRD)               # in the model: returns its argument ...

    with record("stage/*", "state/entries") as seen:      # ... and records it inside this block
        model(tokens)
    seen["stage/2/weights"]                               # the tensor of the last call
    seen.all("stage/2/weights")                           # of every call, in order: chunks, decoded tokens

    with patch("state/entries", lambda entry_BEC: 0 * entry_BEC):       # ... or returns a replacement
        model(tokens)

`gsm.taps(model)` lists the taps of a model, with shapes and dtypes. Layers and stages are numbered from 1; the numbers
of decoder layers follow those of the encoder. Letters: T positions that enter a layer, R rows that leave it (in
prefill, upper layers compute only the last R), D width, X residual streams, H heads, C channels, E window entries and F
slots, both stored and new.

    position             position in the document, -1 for padding
    embedding, hidden    input of the first layer; output of the last layer, before the final norm
    state/e, state/z     output of the encoder; the writer's combination of it with the stages' increments
    state/entries        [B, E, C] the entries that all decoder layers read
    state/key, state/value    with `state_reader=separate_kv`, in place of `state/entries`
    state/group<n>       with `state_reader=per_group`, the entries of each group of layers, in place of `state/entries`
    state/gate           [B, T, D] with `writer=gated`: the factor of the increments in z
    state/weights        [B, R, 1, E + 1] with `writer=delta`: attention weights of the earlier entries that predict one

In each layer, `encoder/<l>/...` and `decoder/<l>/...`:

    stream               [B, T, D] input of the attention before its norm: the residual stream, or what is read from
                         several streams. With several streams, a replacement changes only this input
    stream/between       [B, R, D] the same before the feed-forward
    stream/after         [B, R, D] the same after the layer, as input of the next layer or the head
    streams, streams/between    [B, T, X, D] the residual streams, if there are several
    attention, feed_forward     [B, R, D] the outputs that are added to the stream
    query                [B, R, H, C] queries before rotation; in a recurrence, the vectors that read the state
    heads                [B, R, H, C] output of each head, before the output projection
    weights              [B, R, H, ...] attention weights of the window from old to new, the selected slots, and the
                         sink; or of the last M entries and the sink; or of F tokens. Rows sum to 1
    window               [B, E, C] entries, each both key and value
    latent, bank         in a layer with its own bank: [B, G, C] new latents of this call before rotation, from which
                         entries and index keys are computed; and [B, F, C] its entries
    top_k                int64 [B, R, K] slots that the layer reads, also if another layer selected them; -1 for none
    key, value           [B, F, G, C] of G separate key heads, with rotated keys; in a recurrence, [B, T, H, C] the
                         vectors that are written to the state
    state                [B, H, C, C] state of a recurrence after the call; with M slots [B, H, M, 2 C], keys and values
                         concatenated; in Mamba-3 [B, H, C + 2, C], with the last token's key and value in the last two
                         rows

In each stage, `stage/<s>/...`: `query`, `weights`, `heads`, and except with `retriever=window_only` `top_k`, as in a
layer; and

    increment            [B, R, D] what is added to r

NSA has keys, values and weights of three branches, `compressed/key`, ... Your own parts can have more taps.

The design follows the named probes of facebookresearch/lingua. In addition, recordings nest, patterns select taps, taps
can be replaced, and unused taps do not appear in graphs of `torch.compile`.
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

# Ids of all recordings and patches of the process. Compiled code can read this list, but not a context variable.
_listening: list[int] = []
# The recordings and patches of this thread or asyncio task, which alone affect its calls.
_listeners: ContextVar[tuple[Recording | Patch, ...]] = ContextVar("_listeners", default=())
_called: ContextVar[Any] = ContextVar("_called", default=None)  # the model of the current call, while anything listens


class Named(Protocol):
    """A part of a model with a name, such as ``decoder/6``."""

    name: str


Name = str | tuple[Named, str]
"""The name of a tap, or a pair of a part and a word, which means ``<name of the part>/<word>``. The pair is joined only
while the tap is in use: if compiled blocks read their names, they could not share a graph."""


def full_name(name: Name) -> str:
    """Return the name of a tap as a string."""
    return name if isinstance(name, str) else f"{name[0].name}/{name[1]}"


@overload
def tap(name: Name, value: Tensor, fixed: str = "") -> Tensor: ...
@overload
def tap(name: Name, value: Callable[[], Tensor]) -> Tensor | None: ...
def tap(name: Name, value: Tensor | Callable[[], Tensor], fixed: str = "") -> Tensor | None:
    """Record a tensor under a name; return it, or the replacement of a patch.

    Pass an expensive tensor, such as attention weights that a kernel does not materialise, as a function. It is called
    at most once, and only while the tap is in use. The result is then None, or the replacement of a patch, from which
    the caller must compute its output.

    Args:
        name: name of the tap.
        value: the tensor, or a function that computes it.
        fixed: for a tensor that cannot be replaced, the reason and the remedy; otherwise empty.
    """
    if _listening:
        return _record_and_patch(name, value, fixed)
    return None if callable(value) else value


class Observable:
    """Base class of language models, which call `called` at the start of each call."""


def called(model: Observable) -> None:
    """Declare that the following taps belong to a call of ``model``."""
    if _listening:
        _set_model(model)


def observed() -> bool:
    """Return whether a recording or a patch is active in this thread."""
    return bool(_listening) and bool(_listeners.get())


def patching() -> bool:
    """Return whether a patch is active in this thread."""
    return bool(_listening) and any(isinstance(listener, Patch) for listener in _listeners.get())


@contextmanager
def record(*patterns: str, detach: bool = True) -> Iterator[Recording]:
    """Record the taps whose names match any of the patterns inside the block; without patterns, all taps.

    Recordings nest, each with its own patterns. With a patch, the replacement is recorded. Calls of other threads are
    not recorded.

    A compiled model is compiled again for a recording, with a graph break at every tap. A model compiled with
    `fullgraph=True` raises an error: record from the model before `torch.compile`.

    Args:
        patterns: shell patterns, in which `*` also matches slashes: `"stage/*"` matches `"stage/2/weights"`.
        detach: record detached copies, which later writes to a static memory do not change; False: record the tensors
            themselves with their autograd graph.

    Raises:
        KeyError: at exit, if models were called and no tap matched; the message names the closest taps of these calls.
    """
    with _listener(Recording(patterns, detach)) as seen:
        yield seen
    _require_match(seen)


@contextmanager
def patch(
    pattern: str | Sequence[str], function: Callable[[Tensor], Tensor], model: Observable | None = None
) -> Iterator[None]:
    """Replace the tensors of taps with matching names, in every call of this thread inside the block.

        with gsm.patch("stage/1/increment", torch.zeros_like):
            model(tokens)                                 # as if stage 1 had retrieved nothing

    The computation continues with the replacement, in training, prefill and decoding, and gradients flow through the
    function. Patches nest: the inner function gets the result of the outer one. After the block the model computes as
    before; entries that were stored in a memory inside the block stay there.

    - Taps of stored tensors (windows, banks, entries of the state) contain stored and new entries in each call. The
      memory stores the original entries, so that the function is applied once per call, and not to its own result. The
      exceptions, for which the memory stores the replacement, are `encoder/<l>/latent` and `decoder/<l>/state`. The
      latter is the state after the call, so its patch affects only later calls.
    - Rows are the last R of the call's T new positions, and the last entry is the newest. To get the same result token
      by token and in one call, let the function depend on the positions, for example those in `seen["position"]` of a
      recording around the patch.
    - Replaced attention weights determine the output of the attention. Weights of invisible entries and of the sink
      have no effect. Kernels do not compute weights, so a patch changes the order of summation. An indexer still learns
      from the original weights.
    - A replaced `top_k` sets the slots that this layer reads, and those of all layers that reuse its selection.
    - `position` cannot be replaced.

    Inside a patch or a recording, an `Engine` calls the model instead of replaying recorded code, and a model with
    recomputation of activations does not recompute inside a patch. For `torch.compile` see `record`.

    Args:
        pattern: a pattern as in `record`, or several.
        function: maps a copy of the tensor, which it may modify, to a tensor of the same shape, dtype and device.
        model: patch only calls of this model (before `torch.compile`); None: calls of any model.

    Raises:
        TypeError: at entry, if `model` is not a language model, for example the result of `torch.compile`.
        ValueError: in the call, if the function returns anything else, or slots that a row may not see; at exit, if
            models were called, but never `model`.
        KeyError: at exit, if models were called and no tap matched; the message names the closest taps of these calls.
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
            "model must be called inside the patch, got calls of other models only; omit model= to patch all models"
        )
    _require_match(active)


def taps(model: LanguageModel) -> Taps:
    """Return shape and dtype of all taps of a model, by name.

    They are recorded from a call with one sequence of 16 tokens, without a memory. A notebook shows them as a table.
    """
    tokens = torch.zeros(1, 16, dtype=torch.int64, device=next(model.parameters()).device)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), model.evaluating(), record() as seen:
        model(tokens)
    return Taps.of(seen)


class Taps(dict[str, tuple[tuple[int, ...], torch.dtype]]):
    """Shapes and dtypes of taps, by name; printed as a table."""

    @classmethod
    def of(cls, seen: Mapping[str, Tensor]) -> Taps:
        """Return shapes and dtypes of recorded tensors."""
        return cls({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in seen.items()})

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        lines = [f"{name:<{width}}  {list(shape)!s:<20}  {_plain(dtype)}" for name, (shape, dtype) in self.items()]
        return "\n".join(lines) or "no taps"


class Recording(dict[str, Tensor]):
    """The recorded tensors: `seen[name]` is the last tensor of a tap, and `seen.all(name)` are all of them, in order.

    Attributes:
        taps: names of all taps in the calls, recorded or not.
    """

    def __init__(self, patterns: tuple[str, ...] = (), detach: bool = True) -> None:
        super().__init__()
        self.patterns = patterns
        self.detach = detach
        self.taps: set[str] = set()
        self._history: dict[str, list[Tensor]] = {}

    def all(self, name: str) -> list[Tensor]:
        """Return every tensor recorded under this name, in order.

        Raises:
            KeyError: no tap of this name was recorded; the message names the closest recorded taps.
        """
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
        recorded = f"closest: {_closest(name, self)}" if self else "the recording is empty"
        raise KeyError(f"no tap named {name!r} was recorded; {recorded}")

    def __repr__(self) -> str:
        return f"Recording of {len(self)} taps: {textwrap.shorten(', '.join(self), 100, placeholder=' ...')}"


class Patch:
    """An active patch.

    Attributes:
        taps: names of all taps in the patched calls.
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
            raise ValueError(f"a patch of {name} must return {_describe(tensor)}, got {actual}")
        if fixed and not torch.equal(new, tensor):
            raise ValueError(f"{name} cannot be replaced: {fixed}")
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
    """Raise KeyError if there were calls, and no tap matched."""
    if listener.taps and not any(map(listener.matches, listener.taps)):
        names = " or ".join(map(repr, listener.patterns))
        close = _closest(listener.patterns[0], listener.taps)
        raise KeyError(f"no tap named {names} in these calls; closest: {close}. gsm.taps(model) lists all taps")


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
