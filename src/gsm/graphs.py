"""Recording a call, so that it can be repeated without its Python: by a CUDA graph, or by a tape of its operations on a
CPU (`gsm.tape`).

What is recorded takes no arguments: it reads buffers that keep their place, and whoever repeats it writes these first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from gsm_kernels.device import ahead_of_a_graph

WARM_UPS = 3  # calls before the capture: kernels are compiled, libraries take their workspaces

Call = Callable[[], Tensor]


class Recorder(Protocol):
    """Makes a call repeatable.

    Attributes:
        prompts: tokens of the longest prompt that is worth a recording.
        chunks: tokens of the longest chunk of a long prompt that is.
        room: tokens for which the first recorded step of decoding has room, doubled when they are read; None: as many
            as the memory holds.
    """

    prompts: int
    chunks: int
    room: int | None

    def __call__(self, call: Call, undo: Callable[[], None]) -> Call:
        """Records a call.

        Args:
            call: computes a result from buffers, and may write to others.
            undo: takes back what a call has written. Recording may run ``call`` any number of times, each followed by
                this.

        Returns:
            what repeats the call on the same buffers, whatever they hold by then, and returns the same tensor each
            time.
        """
        ...


class CudaGraphs:
    """Records calls as CUDA graphs. All graphs of one recorder take their memory from one pool, because they never run
    at the same time. One step serves all lengths: kernels do not compute what no row sees.

    Args:
        device: where the calls run.
    """

    prompts = 4096  # a whole chunk: what is longer has several
    chunks = 4096
    room: int | None = None

    def __init__(self, device: torch.device):
        self.device = device
        with torch.cuda.device(device):
            self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def __call__(self, call: Call, undo: Callable[[], None]) -> Call:
        """See ``Recorder``. Warm-up and capture run on a stream of their own: work of the default one cannot be
        captured, and libraries keep a workspace for every stream."""
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
            undo()  # a capture runs nothing on the device: this takes back what the host has counted

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Inside the block, autocast keeps no copy of a weight: a graph would go on reading it after its memory is
    free, and would miss a new weight."""
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
