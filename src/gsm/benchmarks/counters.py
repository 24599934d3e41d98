"""What one call asks of the device: operations, bytes that they read, kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# These read the rows that they return, not the table that they are given.
PICKING = ("aten::embedding", "aten::gather", "aten::index", "aten::index_select", "aten::take_along_dim")


class Operations(TorchDispatchMode):
    """Counts operations and the bytes of the tensors that they are given; views move nothing and do not count.

    Attributes:
        count: operations.
        bytes: of their arguments; of those that pick rows from a table, of what they return.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operation and counts it."""
        result = func(*args, **(kwargs or {}))
        if not _is_view(func):
            read = result if func._schema.name in PICKING else (args, kwargs)
            self.count += 1
            self.bytes += sum(x.numel() * x.element_size() for x in tree_leaves(read) if isinstance(x, Tensor))
        return result

    def found(self) -> dict[str, int]:
        """Both numbers, as plain containers."""
        return {"operations": self.count, "bytes": self.bytes}


@contextmanager
def counting(module: nn.Module) -> Iterator[Operations]:
    """Counts what happens inside the calls of one module."""
    operations = Operations()
    hooks = (
        module.register_forward_pre_hook(lambda *_: operations.__enter__() and None),
        module.register_forward_hook(lambda *_: operations.__exit__(None, None, None), always_call=True),
    )
    try:
        yield operations
    finally:
        for hook in hooks:
            hook.remove()


def kernels(call: Callable[[], object], device: torch.device) -> int | None:
    """Runs a call; the kernels and copies that it launches on a GPU, None on a CPU."""
    if device.type != "cuda":
        call()
        return None
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize(device)
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events() or [])


def _is_view(func: Any) -> bool:
    """Whether an operation returns another look at what it was given."""
    found = func._schema.returns
    return bool(found) and all(one.alias_info is not None and not one.alias_info.is_write for one in found)
