"""Compile the Triton kernels of a model for a Hopper GPU, on a machine without one.

    python tests/ops/compiling.py 1p5b baseline       # a line of JSON for each kernel; TRITON_INTERPRET must not be set
    python tests/ops/compiling.py 1p5b gsm attend     # of these operations alone
    python tests/ops/compiling.py steps 1p5b gsm      # what steps of training of several shapes would compile
    python tests/ops/compiling.py control             # the kernel of control.py

A few layers of the model take a step of training, read a prompt and decode a token on the CPU. Where a kernel would be
launched, Triton notes what it would compile: the kernel, the types of its arguments, which of them divide by 16, and
its constants. Nothing is launched, so results are uninitialised memory.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import hazards
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gsm.config.load import build_model
from gsm.models.base import LanguageModel
from gsm_kernels import launch

HOPPER = 90
FEW_LAYERS = (
    *("size.encoder_layers=4", "size.bank_layers=[1,2,3]", "size.stages=[2,3,4]"),
    *("size.decoder_layers=3", "size.decoder_full=5", "size.decoder_reindex=[6]"),
)
TOKENS = 256
SHAPES = ((1, 80), (2, 80), (3, 112), (7, 96))  # of steps of training: batch, tokens


class Variant(NamedTuple):
    """A kernel with the types and the constants of a call: its module, its name, and Triton's text for the rest."""

    module: str
    kernel: str
    data: str

    def compile(self) -> Any:
        """Return Triton's compiled kernel: `asm["ptx"]`, `asm["cubin"]`, `metadata`. Called inside `target`."""
        return getattr(importlib.import_module(self.module), self.kernel).preload(self.data)


class NoProducts(TorchDispatchMode):
    """Inside the block, matrix products are uninitialised memory: a wide model takes minutes for them on a CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        match func.overloadpacket:
            case torch.ops.aten.mm:
                return args[0].new_empty(args[0].shape[0], args[1].shape[1])
            case torch.ops.aten.bmm:
                return args[0].new_empty(*args[0].shape[:2], args[1].shape[2])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def target(capability: int = HOPPER) -> Iterator[None]:
    """Inside the block, Triton compiles for GPUs of this capability, whatever the machine has."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    class Driver:
        """The part of a driver that compiling needs."""

        def get_current_device(self) -> str:
            return f"sm_{capability}"

        def get_current_stream(self, device: str) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

    active: Any = Driver()
    driver.set_active(active)
    try:
        yield
    finally:
        active = None
        driver.set_active(active)


def variants(call: Callable[[], object]) -> list[Variant]:
    """Return the variants that a Hopper GPU would launch for a call, each once. Called inside `target`.

    Nothing is compiled.
    """
    from triton import knobs

    seen: dict[Variant, None] = {}

    def note(*, fn: Any, compile: Any, **_: Any) -> bool:
        seen[Variant(fn.module, fn.name, compile["specialization_data"])] = None
        return True  # do not compile it now

    def instead(kernel: Any, _: tuple[int, ...], args: tuple, options: dict[str, Any]) -> None:
        kernel.warmup(*args, grid=(1,), **options)

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, note
    try:
        with launch.launching(instead), NoProducts():
            call()
    finally:
        knobs.runtime.jit_cache_hook = before
    return list(seen)


def resources(built: Any) -> dict[str, int]:
    """Return registers of a thread, bytes of its stack (spilled registers), and bytes of shared memory."""
    text = cuobjdump("--dump-resource-usage", built.asm["cubin"])
    used = dict(re.findall(r"\b(REG|STACK):(\d+)", text))
    return {"registers": int(used["REG"]), "stack": int(used["STACK"]), "shared": built.metadata.shared}


def cuobjdump(flag: str, cubin: bytes) -> str:
    """Return the output of NVIDIA's disassembler, which comes with Triton; `-sass` gives the instructions."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, flag, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def of_model(size: str, name: str) -> list[Variant]:
    """Return the variants of a model of a size in mixed precision and in float32, in training, prefill and decoding.
    Every size has hyper-connections here."""
    model = build_model(name, size, [*FEW_LAYERS, "model/residual=mhc", "model.recompute=false"])
    seen: dict[Variant, None] = {}
    for half in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            seen |= dict.fromkeys(variants(lambda: _train(model)))
    for dtype in (torch.float32, torch.bfloat16):
        seen |= dict.fromkeys(variants(lambda dtype=dtype: _decode(model.to(dtype))))
    return list(seen)


def of_steps(size: str, name: str) -> list[list[Variant]]:
    """Return the variants that a step of training of each of SHAPES adds to those before it, in mixed precision."""
    model, seen, added = build_model(name, size, [*FEW_LAYERS, "model.recompute=false"]), set[Variant](), []
    for shape in SHAPES:
        with torch.autocast("cpu", torch.bfloat16):
            added.append([one for one in variants(partial(_train, model, shape)) if one not in seen])
        seen.update(added[-1])
    return added


def _train(model: LanguageModel, shape: tuple[int, int] = (1, TOKENS)) -> None:
    ids_BT = torch.zeros(shape, dtype=torch.int64)
    out = model.train()(ids_BT, documents=ids_BT, targets=ids_BT)
    torch.stack([out.loss, *out.losses.values()]).sum().backward()


@torch.no_grad()
def _decode(model: LanguageModel) -> None:
    memory = model.eval().start(1, 16 * TOKENS)
    for tokens in (TOKENS, 1):
        _ = model(torch.zeros(1, tokens, dtype=torch.int64), memory=memory, rows=1).logits


def of_control() -> list[Variant]:
    """Return the one variant of the kernel that ptxas 12.8 gets wrong."""
    import control

    square = torch.empty(64, 128, dtype=torch.bfloat16)
    options = {"grid": (1,), "C": 64, "D": 128, "WIDTH": 32, "num_warps": 4, "num_stages": 3}
    return variants(lambda: control.gradients.warmup(*[square] * 8, **options))


def hazards_of(built: Any) -> dict[str, Any]:
    """Return the races that `hazards` finds in a compiled kernel."""
    sass = cuobjdump("-sass", built.asm["cubin"])
    products, unfenced = hazards.unfenced(built.asm["ptx"])
    from_registers, overwritten = hazards.overwritten(sass)
    counts = {"wgmma": products, "from_registers": from_registers, "unfenced": unfenced}
    return counts | {"unwritten": hazards.unwritten(sass), "overwritten": overwritten}


def processor_seconds() -> float:
    """Return the processor time of this process and of those that it has started, such as the assembler."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main(size: str, name: str = "gsm", *operations: str) -> None:
    """Print a line of JSON for each variant: its kernel, seconds of compiling, resources, hazards, or why it failed."""
    if size == "steps":
        with target():
            for step, added in enumerate(of_steps(*(name, *operations))):
                for one in added:
                    print(json.dumps({"module": one.module, "kernel": one.kernel, "step": step, "data": one.data}))
        return
    with target():
        chosen = of_control() if size == "control" else of_model(size, name)
        for variant in chosen:
            if operations and variant.module.split(".")[1] not in operations:
                continue
            row: dict[str, Any] = {"module": variant.module, "kernel": variant.kernel}
            before = processor_seconds()
            try:
                built = variant.compile()
                row["seconds"] = round(processor_seconds() - before, 3)
                row |= resources(built) | hazards_of(built)
            except Exception as error:  # the compiler may raise anything, and the other kernels are of interest too
                row["failed"] = f"{type(error).__name__}: {error}"
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
