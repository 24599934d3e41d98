"""Named taps: a model says what may be looked at and replaced, and pays nothing until somebody does.

    x_BRD = tap("stage/2/increment", x_BRD)               # in the model: gives back what it is given ...

    with record("stage/*", "state/entries") as seen:      # ... until somebody listens
        model(tokens)
    seen["stage/2/weights"]                               # the tensor of the last call
    seen.all("stage/2/weights")                           # of every call, in order: chunks, decoded tokens

    with patch("state/entries", lambda entry_BEC: 0 * entry_BEC):       # ... or says what the model is to go on with
        model(tokens)

What there is to see in GSM, layers and stages numbered from 1, the decoder's after the encoder's. T new positions, E
window entries and F bank slots, stored and new; a layer that produces fewer rows than T (prefill) shows its last R:

    position             int64 [B, T]         place in the document, -1 for padding
    embedding            [B, T, D]            what enters the first layer
    encoder/<l>/window   [B, E, C]            entries, key and value at once
    encoder/<l>/latent   [B, G, C]            where the layer owns a bank, what the call adds to it, before rotation:
                                              entries and index keys are made of it
    encoder/<l>/bank     [B, F, C]            its entries, stored and new
    encoder/<l>/top_k    int64 [B, R, K]      slots that the layer reads, its own choice or not, -1 for none
    encoder/<l>/weights  [B, R, H, W + K + 1] attention: window from old to new, selected slots, sink; rows sum to 1
    stage/<s>/top_k      int64 [B, R, K]      slots that the stage reads: those of its layer, or its own
    stage/<s>/weights    [B, R, H, W + K + 1] as in the encoder
    stage/<s>/increment  [B, R, D]            what the stage adds to r
    state/e, state/z     [B, R, D]            what the encoder says, and what the writer makes of it and of r
    state/entries        [B, E, C]            what all decoder layers read
    decoder/streams      [B, R, X, D]         the residual streams that enter the decoder
    decoder/start        [B, R, D]            what its first site reads of them, unless it reads for itself
    decoder/<l>/weights  [B, R, H, M + 1]     attention: the last M entries from old to new, sink
    hidden               [B, R, D]            what leaves the last layer, before the final norm

The baseline's decoder layers show what its encoder layers do. A writer, a state reader or a retriever may have taps of
its own. The layers of comparators, called the decoder's except for the first half of YOCO, show:

    decoder/<l>/weights  [B, R, H, F]         where a layer attends, to F tokens, stored and new; what a row does not
                                              see is 0
    decoder/<l>/state    [B, H, C, C]         the state of a recurrent layer after the call; [B, H, M, 2 C] where it is
                                              M slots, key and value side by side, [B, H, C + 2, C] in Mamba-3, whose
                                              last two rows are the last token's key and value
    decoder/<l>/compressed/weights            [B, R, H, F], NSA: where a row attends among F compressed blocks;
    decoder/<l>/selected/weights              of all tokens, in the blocks that it has selected;
    decoder/<l>/window/weights                and among window entries
    encoder/<l>/...                           YOCO: likewise

After the named probes of facebookresearch/lingua; here they nest, choose by pattern, replace, and vanish under
`torch.compile`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, Protocol, overload

import torch
from torch import Tensor

_listening: list[Seen | Patch] = []
_called: list[Any] = [None]  # the model whose call this is, while somebody listens


class Named(Protocol):
    """A part of a model that has a name, such as ``decoder/6``."""

    name: str


Name = str | tuple[Named, str]
"""Of a tap. A part and a word stand for ``<name of the part>/<word>``: it is put together when somebody listens. A
compiled block that looked at its name would not be compiled once for all blocks of its kind."""


def spelt(name: Name) -> str:
    """The name in full."""
    return name if isinstance(name, str) else f"{name[0].name}/{name[1]}"


@overload
def tap(name: Name, value: Tensor, fixed: str = "") -> Tensor: ...
@overload
def tap(name: Name, value: Callable[[], Tensor]) -> Tensor | None: ...
def tap(name: Name, value: Tensor | Callable[[], Tensor], fixed: str = "") -> Tensor | None:
    """Show a tensor to whoever records under this name, and give back what to go on with: the tensor itself, unless
    somebody patches it.

    What is costly to make, such as attention weights that a kernel never writes down, is given as a function: it is
    called only when somebody listens, and then once. What comes back is None, or what was put in its place: whoever
    taps so then computes with that.

    Args:
        name: of the tap.
        value: the tensor, or what makes it.
        fixed: why a model cannot go on with another value; empty: it can.
    """
    if _listening:
        return _show(name, value, fixed)
    return None if callable(value) else value


class Calls:
    """What says of each of its calls whose taps follow (`called`): language models."""


def called(model: Calls) -> None:
    """Says whose the taps that follow are."""
    if _listening:
        _note(model)


def observed() -> bool:
    """Whether somebody records or replaces anything."""
    return bool(_listening)


def patching() -> bool:
    """Whether somebody replaces anything."""
    return any(isinstance(one, Patch) for one in _listening)


@contextmanager
def record(*patterns: str, detach: bool = True) -> Iterator[Seen]:
    """Record every tap whose name matches one of the patterns, all of them if there is none.

    Patterns are those of the shell, and `*` also crosses slashes: `"stage/*"` matches `"stage/2/weights"`. Recordings
    nest; each gets what it asks for. Tensors are detached copies, so that a memory that is overwritten in place later
    does not change what was seen; `detach=False` keeps the tensors themselves, with their graph, to ask autograd about.
    Where somebody patches, what is seen is what the model goes on with.

    A compiled model is compiled once more when somebody starts to listen, and breaks its graph at every tap; one that
    was compiled with `fullgraph=True` refuses to: record from the model as it was before `torch.compile`.
    """
    with _listener(Seen(patterns, detach)) as seen:
        yield seen


@contextmanager
def patch(
    pattern: str | Sequence[str], function: Callable[[Tensor], Tensor], model: Calls | None = None
) -> Iterator[None]:
    """Replace what passes the taps whose names match, in every call inside of the block.

        with gsm.patch("stage/1/increment", torch.zeros_like):
            model(tokens)                                 # as if stage 1 had retrieved nothing

    Training, chunks and decoding go on with the replaced tensor, and gradients flow through the function. Patches nest:
    the inner one gets what the outer one gave. Behind the block the model computes what it computed before; what it has
    read in the meantime stays in its memory as it was read.

    - Of what a memory stores (windows, banks, the state's entries) each call shows stored and new entries, and the
      memory keeps them as they were: the function is applied once in each call, never to its own result. Not so two
      taps that later calls find changed: `encoder/<l>/latent` is stored as it was patched, and `decoder/<l>/state`,
      which the call itself has read by then, changes nothing else.
    - Rows are the last R of the call's T new positions, and entries end with the newest. Token by token, as in one
      call: give each position the same, e.g. by its number in `seen["position"]` of a recording around it.
    - Replaced attention weights are what the rows take their mixture with: the weight of a place that a row does not
      see, and that of the sink, bring nothing. Kernels do not form weights, so with them the sums are made in another
      order, and an indexer goes on learning from the weights as they were.
    - Replaced `top_k` are the slots that are read, by this layer and by all that take the selection over.
    - `position` cannot be replaced.

    What is repeated runs no Python: an `Engine` makes plain calls inside of the block, and of a recording. For
    `torch.compile` see `record`. A model that recomputes activations keeps them.

    Args:
        pattern: as of `record`; or several.
        function: from a copy of the tensor, which it may write to, to one of the same shape, dtype and device.
        model: only in calls of this model, given as it was before `torch.compile`; None: of any.

    Raises:
        TypeError: at the block's entry, if `model` is no language model, such as one that `torch.compile` gave.
        ValueError: in the call, if the function gives anything else, or slots that a row may not see; behind the block,
            if models were called, but never `model`.
        KeyError: behind the block, if models were called and met no tap of such a name; it lists those they met.
    """
    if model is not None and not isinstance(model, Calls):
        raise TypeError(
            f"a patch of one model knows it by its own calls, but a {type(model).__name__} is no language model: give "
            "the model as it was before torch.compile, or before whatever else was put around it"
        )
    patterns = (pattern,) if isinstance(pattern, str) else tuple(pattern)
    with _listener(Patch(patterns, function, model)) as one:
        yield
    if one.others and not one.met:
        raise ValueError("models were called, but never the one to be patched: leave out model= to patch any")
    if one.met and not any(map(one.names, one.met)):
        raise KeyError(f"no tap named {' or '.join(map(repr, patterns))} was met; met: {', '.join(sorted(one.met))}")


class Seen(dict[str, Tensor]):
    """What a recording saw: name -> the last tensor of that name; `all(name)` -> each of them, in order."""

    def __init__(self, patterns: tuple[str, ...] = (), detach: bool = True) -> None:
        super().__init__()
        self.patterns = patterns
        self.detach = detach
        self._history: dict[str, list[Tensor]] = {}

    def all(self, name: str) -> list[Tensor]:
        """Every tensor seen under this name, in order. Raises KeyError, which lists the names seen, for any other."""
        return self._history[name] if name in self._history else self.__missing__(name)

    def wants(self, name: str) -> bool:
        return not self.patterns or _matches(name, self.patterns)

    def add(self, name: str, tensor: Tensor) -> None:
        self[name] = tensor.detach().clone() if self.detach else tensor
        self._history.setdefault(name, []).append(self[name])

    def __missing__(self, name: str):
        raise KeyError(f"no tap named {name!r} was seen; seen: {', '.join(sorted(self)) or 'nothing'}")


class Patch:
    """What replaces the tensors of some taps; `met` holds the names of all that passed, and `others` says whether other
    models than the one to be patched were called."""

    def __init__(
        self, patterns: tuple[str, ...], function: Callable[[Tensor], Tensor], model: Calls | None = None
    ) -> None:
        self.patterns, self.function, self.model = patterns, function, model
        self.met: set[str] = set()
        self.others = False

    def names(self, name: str) -> bool:
        return _matches(name, self.patterns)

    def wants(self, name: str) -> bool:
        if self.model is not None and self.model is not _called[0]:
            self.others = True
            return False
        self.met.add(name)
        return self.names(name)

    def replace(self, name: str, tensor: Tensor, fixed: str) -> Tensor:
        new = self.function(tensor.clone())
        if not isinstance(new, Tensor) or _kind(new) != _kind(tensor):
            given = _kind(new) if isinstance(new, Tensor) else f"a {type(new).__name__}"
            raise ValueError(f"a patch of {name} has to give a tensor like its own, {_kind(tensor)}, but gives {given}")
        if fixed and not torch.equal(new, tensor):
            raise ValueError(f"{name} cannot be patched: {fixed}")
        return new


@contextmanager
def _listener(one: Any) -> Iterator[Any]:
    _listening.append(one)
    try:
        yield one
    finally:
        _listening[:] = [other for other in _listening if other is not one]
        if not _listening:
            _called[0] = None


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"


@torch.compiler.disable(reason="a tap is looked at outside of the compiled graph")
def _note(model: Any) -> None:
    _called[0] = model


@torch.compiler.disable(reason="a tap is looked at outside of the compiled graph")
def _show(name: Name, value: Tensor | Callable[[], Tensor], fixed: str) -> Tensor | None:
    name = spelt(name)
    wanting = [one for one in _listening if one.wants(name)]
    patches = [one for one in wanting if isinstance(one, Patch)]
    if not wanting:
        return None if callable(value) else value
    tensor = value() if callable(value) else value
    for one in patches:
        tensor = one.replace(name, tensor, fixed)
    for one in wanting:
        if isinstance(one, Seen):
            one.add(name, tensor)
    return tensor if patches or not callable(value) else None
