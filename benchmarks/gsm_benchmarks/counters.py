"""What one call asks of the device: operations, bytes that they read, kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gsm_kernels.attend.inputs import Inputs

# These read the rows that they return, not the table that they are given.
PICKING = ("aten::embedding", "aten::gather", "aten::index", "aten::index_select", "aten::take_along_dim")
# These write what comes after their first argument into some of its places, and read no others.
WRITING = (
    "aten::_foreach_copy_", "aten::_index_put_impl_", "aten::copy_", "aten::index_copy_", "aten::index_put_",
    "aten::scatter_",
)  # fmt: skip
ATTENDING = ("gsm_kernels::attend", "gsm_kernels::attend_few_rows")  # read chosen slots of their bank: ``Inputs``


class Operations(TorchDispatchMode):
    """Counts operations and the bytes of the tensors that they are given; views move nothing and do not count.

    Attributes:
        count: operations.
        bytes: of their arguments; of those that pick rows from a table, of what they return; of those that write into
            one, of what they write; of attention's bank, of the slots that were chosen.
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
            self.count += 1
            self.bytes += _read(func._schema.name, args, kwargs, result)
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


def _read(name: str, args: tuple[Any, ...], kwargs: Any, result: Any) -> int:
    """Bytes that an operation reads."""
    if name in PICKING:
        return _bytes(result)
    if name in WRITING:
        return _bytes((args[1:], kwargs))
    if name in ATTENDING:
        inputs = Inputs(*args[: len(Inputs._fields)])
        bank_BFC, index_BRK = inputs.bank_BFC, inputs.index_BRK
        if bank_BFC is None or index_BRK is None or not inputs.slots:
            return _bytes(inputs)
        chosen = index_BRK.numel() * bank_BFC.shape[2] * bank_BFC.element_size()
        return _bytes(inputs._replace(bank_BFC=None)) + chosen
    return _bytes((args, kwargs))


def _bytes(tree: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tree_leaves(tree) if isinstance(x, Tensor))


def _is_view(func: Any) -> bool:
    """Whether an operation returns another look at what it was given."""
    found = func._schema.returns
    return bool(found) and all(one.alias_info is not None and not one.alias_info.is_write for one in found)
