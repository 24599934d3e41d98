"""What a call asks of a GPU, counted in Triton's interpreter: programs, products, bytes, numbers computed.

The call has its real sizes and dtypes. Of every launch a few programs run, drawn evenly from its grid, and stand for
all; the kernel's own code says what it loads and multiplies, so that padding, masked rows and tiles that are loaded
twice are counted as they are. Operations of PyTorch between the kernels count with their arguments and results; large
products among them are not computed. Nothing that is computed means anything: bfloat16 is wrong in the interpreter.

    TRITON_INTERPRET=1 python -m gsm_benchmarks.counting "attend 64K" backward        # prints JSON
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.flop_counter import flop_registry

import gsm_kernels
from gsm_kernels.dispatch import using
from gsm_kernels.launch import INTERPRETED, launching
from gsm_kernels.sanitizer import replaced

from .smoke import Piece, pieces
from .workloads import bound

FUNCTIONS, SLOW = ("exp", "exp2", "log", "log2", "sin", "cos", "sqrt"), 8  # of whose results a clock brings one in 8
SAMPLES = 32  # programs of a launch that run
FREE = ("detach", "_unsafe_view", "lift_fresh", "_local_scalar_dense")  # move nothing
PASSES = {"sort": 6}  # of what it is given and returns: four digits of 32 bits, with 64-bit places


@dataclass
class Kernel:
    """All launches of one kernel with the same constants. Bytes and numbers are those of all programs together.

    Attributes:
        products: FLOPs of `tl.dot`, as they are executed, by the dtype of their operands and their precision.
        loaded, stored: bytes by way of the second-level cache, each as often as it is asked for.
        memory: the same bytes, of each tensor no more than it has: what the cache does not have already.
        numbers: results of arithmetic on blocks, those of exponentials and their like 8 times, and what reductions take
            in. Whole numbers count only where they are compared or reduced: most of the others are addresses, of which
            a thread computes one for many.
        steps: of reductions, each of which waits for the one before: halvings of up to 32 numbers, and five more where
            a whole block becomes one number, for which all warps have to meet.
    """

    module: str
    kernel: str
    constants: dict[str, Any]
    launches: int = 0
    programs: int = 0
    products: dict[str, float] = field(default_factory=dict)
    loaded: float = 0.0
    stored: float = 0.0
    memory: float = 0.0
    numbers: float = 0.0
    steps: float = 0.0


@dataclass
class Counts:
    """What one call launches. `torch`: by operation of PyTorch, launches, bytes and FLOPs."""

    kernels: dict[str, Kernel] = field(default_factory=dict)
    torch: dict[str, dict[str, float]] = field(default_factory=dict)


def count(piece: Piece, direction: str) -> Counts:
    """The counts of one operation at the size of its gate.

    Raises:
        RuntimeError: TRITON_INTERPRET=1 was not set when the process began.
    """
    if not INTERPRETED:
        raise RuntimeError("counting needs Triton's interpreter: set TRITON_INTERPRET=1 before the process starts")
    torch.manual_seed(0)
    found, case = Counts(), piece.gate
    counter, torches = Counter(found), _Torch(found)
    with using("triton"):
        with launching(lambda *_: None):
            run = bound(getattr(gsm_kernels, case.op), case.make(torch.device("cpu"), torch.bfloat16), direction)
        with launching(torches.unseen(counter.launch)), torches, _zeros(torches):
            run()
    return found


@contextlib.contextmanager
def _zeros(torches: _Torch) -> Iterator[None]:
    """Memory that nobody has written is 0: a list of slots that no program has filled then lists slots."""
    plain = [(torch, "empty", torch.zeros), (torch, "empty_like", torch.zeros_like)]
    with contextlib.ExitStack() as stack:
        for owner, name, zeros in (*plain, (Tensor, "new_empty", Tensor.new_zeros)):
            stack.enter_context(mock.patch.object(owner, name, torches.unseen(zeros)))
        yield


class Counter:
    """Takes launches, runs some of their programs, and counts."""

    def __init__(self, counts: Counts) -> None:
        from triton.runtime import interpreter

        self.counts, self.interpreter = counts, interpreter
        self.draw = random.Random(0)
        self.tensors: list[tuple[int, int]] = []
        self.touched: dict[tuple[str, int], float] = {}
        self.row: Kernel
        self.share = 1.0

    def launch(self, kernel: Any, grid: tuple[int, ...], args: tuple, options: dict[str, Any]) -> None:
        """Count one launch."""
        whole = int(np.prod(grid))
        if not whole:
            return
        constants = {name: value for name, value in options.items() if name != "enable_fp_fusion"}
        named = kernel.fn.__module__, kernel.fn.__name__
        key = f"{named} {json.dumps(constants, sort_keys=True)}"
        self.row = self.counts.kernels.setdefault(key, Kernel(*named, constants))
        self.row.launches += 1
        self.row.programs += whole
        runs = min(whole, SAMPLES)
        self.share = whole / runs
        numbers = [self.draw.randrange(whole * i // runs, whole * (i + 1) // runs) for i in range(runs)]
        self.tensors = sorted({(x.data_ptr(), x.numel() * x.element_size()) for x in args if isinstance(x, Tensor)})
        self.touched = defaultdict(float)
        indices = iter([tuple(int(i) for i in np.unravel_index(n, (*grid, 1, 1)[:3])) for n in numbers])
        with self._counting(indices, (*grid, 1, 1)[:3]), np.errstate(all="ignore"):
            kernel[(runs,)](*args, **options)
        room = dict(self.tensors)
        self.row.memory += sum(min(moved, room[base]) for (_, base), moved in self.touched.items())

    @contextlib.contextmanager
    def _counting(self, indices: Iterator[tuple[int, ...]], grid: tuple[int, ...]) -> Iterator[None]:
        interpreter, builder = self.interpreter, self.interpreter.InterpreterBuilder

        def begin(plain: Callable[..., Any], own: Any, *_: int) -> None:
            own.grid_dim = grid
            plain(own, *next(indices))

        with contextlib.ExitStack() as stack:
            for name in ("masked_load", "masked_store", "atomic_rmw", "dot"):
                stack.enter_context(_before(builder, f"create_{name}", getattr(self, f"_{name}")))
            for name in ("binary_op", "unary_op", "ternary_op"):
                stack.enter_context(replaced(builder, name, self._arithmetic))
            stack.enter_context(replaced(interpreter.ReduceScanOpInterface, "apply", self._reduction))
            stack.enter_context(replaced(builder, "set_grid_idx", begin))
            stack.enter_context(mock.patch.object(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None))
            yield

    def _masked_load(self, ptrs: Any, mask: Any, *_: Any) -> None:
        self.row.loaded += self._moved("load", ptrs, mask)

    def _masked_store(self, ptrs: Any, _value: Any, mask: Any, *_: Any) -> None:
        self.row.stored += self._moved("store", ptrs, mask)

    def _atomic_rmw(self, _kind: Any, ptrs: Any, _value: Any, mask: Any, *_: Any) -> None:
        self.row.stored += self._moved("store", ptrs, mask)

    def _moved(self, doing: str, ptrs: Any, mask: Any) -> float:
        """Bytes of all programs, for which this one's stand."""
        lanes = np.broadcast_to(True if mask is None else mask.data, ptrs.data.shape)
        if not lanes.any():
            return 0.0
        moved = int(lanes.sum()) * max(ptrs.get_element_ty().primitive_bitwidth // 8, 1) * self.share
        first = int(ptrs.data[lanes].flat[0])
        base = max((low for low, _ in self.tensors if low <= first), default=None)
        if base is not None:
            self.touched[doing, base] += moved
        return moved

    def _dot(self, a: Any, b: Any, _sum: Any, precision: Any, *_: Any) -> None:
        # Operands are blocks; the precision is told by its number, or by its name.
        kind = a.dtype.scalar.name if a.dtype.scalar.name != "fp32" else f"fp32 {str(precision).split('.')[-1].lower()}"
        done = 2.0 * a.data.size * b.data.shape[-1] * self.share
        self.row.products[kind] = self.row.products.get(kind, 0.0) + done

    def _arithmetic(self, plain: Callable[..., Any], own: Any, *given: Any) -> Any:
        result = plain(own, *given)
        if result.data.dtype.kind in "fb":
            slow = SLOW if getattr(given[-1], "__name__", "") in FUNCTIONS else 1
            self.row.numbers += result.data.size * slow * self.share
        return result

    def _reduction(self, plain: Callable[..., Any], own: Any, given: Any) -> Any:
        if isinstance(given, tuple):  # anything else comes once more, as one
            shape, axis = given[0].handle.data.shape, own.axis
            size = int(np.prod(shape))
            length = size if axis is None else shape[axis]
            self.row.numbers += size * len(given) * self.share
            self.row.steps += (np.log2(max(min(length, 32), 1)) + (5 if 32 < length == size else 0)) * self.share
        return plain(own, given)


def _before(owner: type, name: str, look: Callable[..., None]) -> contextlib.AbstractContextManager[Any]:
    """A look at a method's arguments."""

    def looked(plain: Callable[..., Any], own: Any, *args: Any, **options: Any) -> Any:
        look(*args, *options.values())
        return plain(own, *args, **options)

    return replaced(owner, name, looked)


class _Torch(TorchDispatchMode):
    """Counts PyTorch's own operations, also inside of ours."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts, self.looking = counts, True

    def unseen(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The function, and nothing that it calls is counted."""

        def called(*args: Any, **options: Any) -> Any:
            before, self.looking = self.looking, False
            try:
                return call(*args, **options)
            finally:
                self.looking = before

        return called

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        from torch._library.custom_ops import OPDEFS

        kwargs = kwargs or {}
        name = func._schema.name
        if name in OPDEFS and name.startswith("gsm_kernels::"):
            with self:
                return OPDEFS[name]._init_fn(*args, **kwargs)
        short = name.split("::")[1]
        work = _work_of(short) if self.looking else None
        result = _shaped(func, args, kwargs) if work else func(*args, **kwargs)
        if self.looking and not func.is_view and short not in FREE:
            row = self.counts.torch.setdefault(short, {"launches": 0, "bytes": 0.0, "flops": 0.0})
            given = {id(x): x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)}
            made = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor)]
            row["launches"] += 1
            row["bytes"] += sum(map(_bytes, (*given.values(), *made))) * PASSES.get(short, 1)
            row["flops"] += work(*args, **kwargs, out_val=result) if work else 0.0
        return result


def _bytes(x: Tensor) -> int:
    """Of a tensor; what is repeated without being copied counts once."""
    return min(x.untyped_storage().nbytes(), x.numel() * x.element_size())


def _work_of(name: str) -> Callable[..., int] | None:
    """What says how many FLOPs a product of this name has, or None if it is no product."""
    packet = getattr(torch.ops.aten, name.rstrip("_"), None)
    return flop_registry.get(packet)


def _shaped(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What a product returns, without its numbers."""
    if func._schema.is_mutable:
        return kwargs.get("out", args[0])
    shape = func(*tree_map_only(Tensor, lambda x: x.to("meta"), args), **kwargs)
    return torch.zeros(shape.shape, dtype=shape.dtype)


def main(words: Sequence[str]) -> None:
    """Print the counts of the piece and direction that are named."""
    name, direction = words
    piece = next(piece for piece in pieces() if piece.gate.name == name)
    found = count(piece, direction)
    json.dump({"kernels": [asdict(one) for one in found.kernels.values()], "torch": found.torch}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
