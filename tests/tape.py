"""What a CUDA graph does, on a CPU: the operations of one call, repeated on the same buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from gsm.models import checks

LOOKS = {"_local_scalar_dense", "is_nonzero", "nonzero", "equal"}  # what hands a value to the host


class Made(int):
    """The number of a tensor that the recorded call has made."""


class Tape(TorchDispatchMode):
    """Writes down every operation. Tensors that it has not seen come into being are buffers, which stay where they
    are."""

    def __init__(self):
        super().__init__()
        self.steps: list[tuple[Any, Any, Any, Any]] = []
        self.made: dict[int, Made] = {}
        self.alive: list[Tensor] = []  # so that no two have the same id

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert func.overloadpacket.__name__ not in LOOKS, f"{func} looks at a value while a graph is recorded"
        args_read, kwargs_read = tree_map_only(Tensor, lambda x: self.made.get(id(x), x), (args, kwargs))
        out = func(*args, **kwargs)
        self.steps.append((func, args_read, kwargs_read, tree_map_only(Tensor, self._number, out)))
        return out

    def _number(self, x: Tensor) -> Made:
        if id(x) not in self.made:
            self.made[id(x)] = Made(len(self.alive))
            self.alive.append(x)
        return self.made[id(x)]


def tape(call: Callable[[], Tensor], undo: Callable[[], None]) -> Callable[[], Tensor]:
    """A ``gsm.graphs.Recorder``: what repeats the call runs no line of its Python any more, and returns one buffer.

    The range of token ids, which is looked at on a CPU alone, is not.
    """
    with Tape() as recorded, mock.patch.object(checks, "check_range"):
        result = call()
    undo()
    last = recorded.made[id(result)]

    def replay() -> Tensor:
        values: list[Any] = [None] * len(recorded.alive)

        def given(x: Any) -> Any:
            if isinstance(x, tuple | list):
                return type(x)([given(one) for one in x])
            return values[x] if isinstance(x, Made) else x

        with torch.no_grad():
            for func, args, kwargs, out in recorded.steps:
                got = func(*given(args), **{name: given(x) for name, x in kwargs.items()})
                several = isinstance(out, tuple | list)
                for number, value in zip(out if several else [out], got if several else [got], strict=True):
                    if isinstance(number, Made):
                        values[number] = value
            return result.copy_(values[last])

    return replay
