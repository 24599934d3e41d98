"""Named taps: a model says what may be looked at, and pays nothing until somebody looks.

    tap("stage/2/weights", weights_BRHK)                  # in the model: does nothing ...

    with record("stage/*", "state/entries") as seen:      # ... until somebody listens
        model(tokens)
    seen["stage/2/weights"]                               # the tensor of the last call
    seen.all("stage/2/weights")                           # of every call, in order: chunks, decoded tokens

What there is to see in GSM, layers and stages numbered from 1, the decoder's after the encoder's. T new positions, E
window entries and F bank slots, stored and new; a layer that produces fewer rows than T (prefill) shows its last R:

    position             int64 [B, T]         place in the document, -1 for padding
    embedding            [B, T, D]            what enters the first layer
    encoder/<l>/window   [B, E, C]            entries, key and value at once
    encoder/<l>/bank     [B, F, C]            likewise, where the layer owns a bank
    encoder/<l>/top_k    int64 [B, R, K]      slots that the layer reads, its own choice or not, -1 for none
    encoder/<l>/weights  [B, R, H, W + K + 1] attention: window from old to new, selected slots, sink; rows sum to 1
    stage/<s>/top_k      int64 [B, R, K]      slots that the stage reads: those of its layer, or its own
    stage/<s>/weights    [B, R, H, W + K + 1] as in the encoder
    stage/<s>/increment  [B, R, D]            what the stage adds to r
    state/e, state/z     [B, R, D]            what the encoder says, and what the writer makes of it and of r
    state/entries        [B, E, C]            what all decoder layers read
    decoder/<l>/weights  [B, R, H, M + 1]     attention: the last M entries from old to new, sink
    hidden               [B, R, D]            what leaves the last layer, before the final norm

The baseline's decoder layers show what its encoder layers do. A writer, a state reader or a retriever may have taps of
its own. The layers of comparators, called the decoder's except for the first half of YOCO, show:

    encoder/<l>/weights  [B, R, H, F]         YOCO: attention on F tokens, stored and new; what a row does not see is 0
    decoder/<l>/weights  [B, R, H, F]         likewise, where a layer attends
    decoder/<l>/state    [B, H, C, C]         the state of a recurrent layer after the call

After the named probes of facebookresearch/lingua; here they nest, choose by pattern, and vanish under `torch.compile`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
from torch import Tensor

_listening: list[Seen] = []


def tap(name: str, value: Tensor | Callable[[], Tensor]) -> None:
    """Show a tensor to whoever records under this name.

    What is costly to make, such as attention weights that a kernel never writes down, is given as a function: it is
    called only when somebody listens, and then once.
    """
    if _listening:
        _show(name, value)


@contextmanager
def record(*patterns: str, detach: bool = True) -> Iterator[Seen]:
    """Record every tap whose name matches one of the patterns, all of them if there is none.

    Patterns are those of the shell, and `*` also crosses slashes: `"stage/*"` matches `"stage/2/weights"`. Recordings
    nest; each gets what it asks for. Tensors are detached copies, so that a memory that is overwritten in place later
    does not change what was seen; `detach=False` keeps the tensors themselves, with their graph, to ask autograd about.

    A compiled model is compiled once more when somebody starts to listen, and breaks its graph at every tap; one that
    was compiled with `fullgraph=True` refuses to: record from the model as it was before `torch.compile`.
    """
    seen = Seen(patterns, detach)
    _listening.append(seen)
    try:
        yield seen
    finally:
        _listening[:] = [other for other in _listening if other is not seen]


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
        return not self.patterns or any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def add(self, name: str, tensor: Tensor) -> None:
        self[name] = tensor.detach().clone() if self.detach else tensor
        self._history.setdefault(name, []).append(self[name])

    def __missing__(self, name: str):
        raise KeyError(f"no tap named {name!r} was seen; seen: {', '.join(sorted(self)) or 'nothing'}")


@torch.compiler.disable(reason="a tap is recorded outside of the compiled graph")
def _show(name: str, value: Tensor | Callable[[], Tensor]) -> None:
    wanting = [seen for seen in _listening if seen.wants(name)]
    if not wanting:
        return
    tensor = value() if callable(value) else value
    for seen in wanting:
        seen.add(name, tensor)
