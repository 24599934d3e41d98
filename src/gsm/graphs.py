"""Recording of a call, to be replayed without Python: as a CUDA graph or, on a CPU, as a tape of operations
(`gsm.tape`).

A recorded call has no arguments. It reads buffers at fixed addresses, and the caller of a replay writes them first.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gsm_kernels.device import ahead_of_a_graph
from gsm_kernels.dispatch import forced

WARM_UPS = 3  # calls before the capture, in which kernels are compiled and libraries allocate workspaces

# Attributes of every ``nn.Module``: they do not change its computation, or ``Snapshot`` compares them separately.
ORDINARY = frozenset(vars(nn.Module()))


class Call(Protocol):
    """A replay of a recording; it returns the same tensor each time.

    Attributes:
        written: whether it has written the static memory since this attribute was last set to False.
    """

    written: bool

    def __call__(self) -> Tensor: ...


class Recorder(Protocol):
    """A recorder of calls.

    Attributes:
        prompts: tokens of the longest prompt that is worth a recording.
        chunks: tokens of the longest chunk of a long prompt that is worth a recording.
        room: tokens for which the first recorded decoding step has room, doubled when they are read; None: the memory's
            capacity.
    """

    prompts: int
    chunks: int
    room: int | None

    def __call__(self, call: Callable[[], Tensor], undo: Callable[[], None]) -> Call:
        """Record a call.

        Args:
            call: computes a result from buffers, and may write to others.
            undo: undoes the writes of a call. Recording may run ``call`` any number of times, each followed by
                ``undo``.

        Returns:
            A replay of the call on the same buffers with their current contents.
        """
        ...


class CudaGraphs:
    """Records calls as CUDA graphs.

    All graphs of a recorder share one memory pool, because they never run at the same time. One decoding step serves
    all lengths, because kernels skip slots that no row sees.

    Args:
        device: device of the calls.
    """

    prompts = 4096  # one whole chunk
    chunks = 4096
    room: int | None = None

    def __init__(self, device: torch.device):
        self.device = device
        with torch.cuda.device(device):
            self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def __call__(self, call: Callable[[], Tensor], undo: Callable[[], None]) -> Call:
        """See ``Recorder``.

        Warm-up and capture run on a separate stream: the default stream cannot be captured, and libraries keep a
        workspace for every stream.
        """
        with torch.cuda.device(self.device), without_autocast_cache(), ahead_of_a_graph():
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                for _ in range(WARM_UPS):
                    call()
                    undo()
            torch.cuda.current_stream().wait_stream(self.stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                result = call()
            undo()  # a capture runs nothing on the device; this resets the counts on the host

        return GraphReplay(graph, result)


class GraphReplay:
    """A replay of a CUDA graph.

    Attributes:
        written: as in ``Call``.
    """

    written = False

    def __init__(self, graph: torch.cuda.CUDAGraph, result: Tensor):
        self.result = result
        # The C function itself, because Python could handle a signal inside a method around it.
        self._replay = partial(torch._C._CUDAGraph.replay, graph)

    def __call__(self) -> Tensor:
        self.written = True
        self._replay()
        return self.result


class Snapshot:
    """The parts of a model that must not change while its recordings are used.

    These are its modules, their attributes and hooks, its tensors and their addresses, autocast, and the choice of
    kernels. Values of tensors may change, and so may training or evaluation mode.

    Attributes:
        hooked: whether a call runs foreign Python: forward hooks, or a ``forward`` attribute of an instance. A replay
            would skip it.
    """

    def __init__(self, model: nn.Module):
        parts, self._tensors = list(model.modules()), [*model.parameters(), *model.buffers()]
        self._attributes = [vars(part) for part in parts]
        names = [sorted(attributes.keys() - ORDINARY) for attributes in self._attributes]
        self._getters = [itemgetter("_parameters", "_modules", *of_part) for of_part in names]
        tables = [table for part in parts for table in (part._parameters, part._buffers, part._modules)]
        self._tables = [table for table in tables if table]
        hooks = [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        hooks += [nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks]
        self.hooked = any(hooks) or any("forward" in attributes for attributes in self._attributes)
        self._empty = [*hooks, *(table for table in tables if not table)]
        kinds = [tensor.device.type for tensor in self._tensors if not tensor.is_meta]
        self._kind = kinds[0] if kinds else "cpu"
        self._objects, self._numbers = list(self._identities()), self._values()

    def holds(self) -> bool:
        """Return whether the model is unchanged and has no hooks."""
        try:
            same = all(map(operator.is_, self._identities(), self._objects))
        except KeyError:  # an attribute was deleted
            return False
        return same and not any(self._empty) and self._values() == self._numbers

    # These run for every decoded token, so their loops are C functions.

    def _identities(self) -> Iterator[Any]:
        chain = itertools.chain.from_iterable
        attributes = map(itemgetter.__call__, self._getters, self._attributes)
        return itertools.chain(chain(map(dict.values, self._tables)), chain(attributes), (ORDINARY,))

    def _values(self) -> tuple[Any, ...]:
        return (
            list(map(len, self._attributes)),
            list(map(Tensor.data_ptr, self._tensors)),
            list(map(Tensor.is_contiguous, self._tensors)),
            (torch.is_autocast_enabled(self._kind), torch.get_autocast_dtype(self._kind), forced()),
        )


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Disable autocast's cache of weights inside the block.

    A graph would continue to read a cached copy after its memory is freed, and would miss changes of the weight.
    """
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
