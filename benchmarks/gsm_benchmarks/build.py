"""Compiling kernels before they are launched: in several processes, for any GPU, without touching one.

`Build` calls what launches kernels with tensors on the CPU. Where a kernel would be launched, Triton says what it would
compile: the kernel, the types of its arguments, which of them are 1 or divide by 16, and its constants. That and
nothing else goes into the key of Triton's cache on disk, beside the compiler itself and the capability; so a process
that makes such a launch later loads what was compiled here. Every kernel is compiled by one of a few processes, which
is ended if it takes too long: a compiler that hangs costs one kernel. They are made by a server that has imported all
that they need (`multiprocessing`'s forkserver) and has no threads.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from gsm_kernels import launch
from gsm_kernels.dispatch import using

from .results import sentence

MOST_SECONDS = 60.0  # that one kernel may take


class Request(NamedTuple):
    """One kernel to be compiled: where it is defined, what it is called, and Triton's words for its arguments."""

    module: str
    kernel: str
    data: str

    def compile(self) -> Any:
        """The compiled kernel, which is now in Triton's cache, or was there. Called inside `target`."""
        return getattr(importlib.import_module(self.module), self.kernel).preload(self.data)


class Build:
    """Compile what calls would launch.

    Args:
        capability: of the GPU, 90 for a Hopper.
        workers: processes.
        seconds: after which no kernel is begun, and the rest is given up.
        each: seconds after which a kernel is given up.
        show: called with the row of each kernel as it is there.

    Attributes:
        rows: one a kernel: `kernel`, `of`, `seconds`, and `registers`, `stack`, `shared` in bytes, `warps` and
            `matrix` instructions, or why it `failed`. `found`: the cache had it. `processor`: seconds of a core.
    """

    def __init__(
        self,
        capability: int,
        workers: int,
        seconds: float,
        each: float = MOST_SECONDS,
        show: Callable[[dict[str, Any]], object] = lambda row: None,
    ) -> None:
        self.capability, self.each, self.show = capability, each, show
        self.end = time.monotonic() + seconds
        self.rows: list[dict[str, Any]] = []
        self._known: set[Request] = set()
        self._waiting: list[Future[None]] = []
        self._one_at_a_time = threading.Lock()
        self._mine = threading.local()  # each thread hands requests to a process of its own
        self._processes: list[_Worker] = []
        self._threads = ThreadPoolExecutor(workers)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__, "triton.compiler.compiler"])

    def __enter__(self) -> Build:
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for what was begun."""
        try:
            for future in self._waiting:
                future.result()
        finally:
            self._threads.shutdown(cancel_futures=True)
            for worker in self._processes:
                worker.end()

    def add(self, name: str, call: Callable[[], object]) -> None:
        """Compile what `call` would launch; kernels that were asked for before are not compiled again."""
        try:
            found = requests(call, self.capability)
        except Exception as error:  # what comes before a launch may fail in any way, and other calls are still to come
            self._done({"kernel": "", "of": name, "seconds": 0.0, "failed": sentence(error)})
            return
        for request in found:
            if request not in self._known:
                self._known.add(request)
                self._waiting.append(self._threads.submit(self._compile, name, request))

    def _compile(self, name: str, request: Request) -> None:
        began = time.monotonic()
        row = {"kernel": request.kernel, "of": name}
        try:
            row |= self._worker().compile(request, min(self.each, self.end - began))
        except Exception as error:  # whatever became of that process: the others go on
            if worker := getattr(self._mine, "worker", None):
                worker.end()
            row["failed"] = sentence(error)
        self._done({"seconds": round(time.monotonic() - began, 2), **row})

    def _done(self, row: dict[str, Any]) -> None:
        with self._one_at_a_time:
            self.rows.append(row)
            self.show(row)

    def _worker(self) -> _Worker:
        """The process of this thread; another one where the last has ended."""
        worker = getattr(self._mine, "worker", None)
        if worker is None or not worker.process.is_alive():
            worker = self._mine.worker = _Worker(self._context, self.capability)
            self._processes.append(worker)
        return worker


class _Worker:
    """A process that compiles one kernel after the other."""

    def __init__(self, context: Any, capability: int) -> None:
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, capability), daemon=True)
        self.process.start()
        theirs.close()

    def compile(self, request: Request, seconds: float) -> dict[str, Any]:
        """What it says of a kernel. Raises TimeoutError, or EOFError where the process has died."""
        if seconds <= 0:
            raise TimeoutError("no time was left for it")
        self.connection.send(request)
        if not self.connection.poll(seconds):
            raise TimeoutError(f"the compiler took more than {seconds:.0f} s")
        return self.connection.recv()

    def end(self) -> None:
        """Ends it, whatever it does."""
        self.process.kill()
        self.process.join()


def requests(call: Callable[[], object], capability: int) -> list[Request]:
    """The kernels that a call would launch, each once; nothing is compiled."""
    from triton import knobs

    found: dict[Request, None] = {}

    def seen(*, fn: Any, compile: Any, **_: Any) -> bool:
        found[Request(fn.module, fn.name, compile["specialization_data"])] = None
        return True  # do not compile it

    def instead(kernel: Any, _: tuple[int, ...], args: tuple, options: dict[str, Any]) -> None:
        kernel.warmup(*args, grid=(1,), **options)

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, seen
    try:
        with target(capability), using("triton"), launch.launching(instead):
            call()
    finally:
        knobs.runtime.jit_cache_hook = before
    return list(found)


@contextlib.contextmanager
def target(capability: int) -> Iterator[None]:
    """Inside, Triton compiles for GPUs of this capability, whatever the machine has."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    class Driver:
        """As much of a driver as compiling asks for."""

        def get_current_device(self) -> str:
            return f"sm_{capability}"  # under which compiled kernels are kept, apart from a real device's

        def get_current_stream(self, device: str) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

    driver.set_active(Driver())  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        driver.set_active(None)  # pyright: ignore[reportArgumentType] # the machine's own, when it is asked for


def _serve(connection: Connection, capability: int) -> None:
    """Compiles what it is asked for until the other end is closed."""
    with target(capability), contextlib.suppress(EOFError):
        while True:
            request = connection.recv()
            try:
                row = _compiled(request)
            except Exception as error:  # the compiler may fail in any way, and the other kernels are still to come
                row = {"failed": sentence(error)}
            connection.send(row)


def _compiled(request: Request) -> dict[str, Any]:
    """Compiles a kernel into the cache, or finds it there."""
    from triton import knobs

    began, spent, hits = time.monotonic(), _processor(), []
    knobs.compilation.listener = lambda **told: hits.append(told["cache_hit"])
    built = request.compile()
    _build_launcher(built)
    seconds, processor = round(time.monotonic() - began, 2), round(_processor() - spent, 2)
    return {"seconds": seconds, "processor": processor, "hash": built.hash, "found": all(hits), **used(built)}


def _processor() -> float:
    """Seconds that this process and those it has waited for, such as the assembler, have computed."""
    return sum(os.times()[:4])


def used(built: Any) -> dict[str, Any]:
    """What a compiled kernel takes of the chip: warps, shared bytes, registers and bytes of stack of a thread; and what
    its matrix products became: `wgmma`, `mma` or none."""
    ptx = built.asm["ptx"]
    matrix = next((name for name, word in (("wgmma", "wgmma.mma"), ("mma", "mma.sync")) if word in ptx), "none")
    row = {"warps": built.metadata.num_warps, "shared": built.metadata.shared, "matrix": matrix}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = dict(re.findall(r"\b(REG|STACK):(\d+)", cuobjdump("--dump-resource-usage", built.asm["cubin"])))
        row |= {word: int(said[key]) for word, key in (("registers", "REG"), ("stack", "STACK")) if key in said}
    return row


def cuobjdump(flag: str, cubin: bytes) -> str:
    """What NVIDIA's tool says of a kernel; registers that find no room are spilled to its stack."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, flag, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def _build_launcher(built: Any) -> None:
    """Up to Triton 3.6 a C compiler makes a launcher for every signature; it is kept beside the kernels. That asks for
    the driver's library, which is there where a GPU is."""
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher"):
        with contextlib.suppress(AssertionError, OSError, subprocess.SubprocessError, RuntimeError):
            driver.CudaLauncher(built.src, built.metadata)
