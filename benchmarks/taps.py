"""What named taps cost while nobody listens: `python benchmarks/taps.py [repetitions]`.

The package is imported twice, once as it is, and once with every statement `tap(...)` taken out of its source; both
models have the same weights and take turns, so that a machine that slows down slows both. What is measured is the time
that the processor worked for this process: set OMP_NUM_THREADS=1, or threads that wait count too. Other work only ever
adds to it, so the fastest repetition says most; the spread is that of the ratios of neighbours.

A second number counts the calls and multiplies them by what one call takes in a loop: it has no noise.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BATCH, LENGTH, DECODED = 1, 256, 8


class Untapped(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Finds and loads the modules of `gsm` without their taps."""

    def __init__(self, name: str = "", path: str = "") -> None:
        super().__init__(name, path)

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The usual module, with this loader."""
        found = importlib.machinery.PathFinder.find_spec(name, path) if name.partition(".")[0] == "gsm" else None
        if found is None or found.origin is None:
            return None
        found.loader = Untapped(name, found.origin)
        return found

    def get_code(self, fullname: str) -> Any:
        """Compiled from the source that is left; bytecode that was cached has taps."""
        path = self.get_filename(fullname)
        return compile(without_taps(ast.parse(self.get_data(path))), path, "exec", dont_inherit=True)


def without_taps(tree: ast.Module) -> ast.Module:
    """Every statement that is a call of `tap` becomes `pass`."""

    class Remove(ast.NodeTransformer):
        def visit_Expr(self, node: ast.Expr) -> ast.stmt:
            called = node.value.func if isinstance(node.value, ast.Call) else None
            return ast.Pass() if isinstance(called, ast.Name) and called.id == "tap" else node

    return ast.fix_missing_locations(Remove().visit(tree))


def fresh_model(taps: bool) -> Any:
    """A nano GSM of an import of its own, so that both can be in one process."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "gsm"]:
        del sys.modules[name]
    if not taps:
        sys.meta_path.insert(0, Untapped())
    try:
        import gsm

        return gsm.build_model("gsm", size="nano", seed=0)
    finally:
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Untapped)]


def training_step(model: Any) -> None:
    """Forward and backward of one batch."""
    import torch

    tokens = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % model.vocabulary
    out = model(tokens, targets=tokens)
    (out.loss + sum(out.losses.values())).backward()
    model.zero_grad()


def decoding(model: Any) -> None:
    """A few tokens, one by one: calls so small that Python itself counts."""
    import torch

    model.generate(torch.arange(LENGTH)[None], max_new_tokens=DECODED)


def compare(work: Callable[[Any], None], tapped: Any, bare: Any, repetitions: int) -> tuple[list[float], list[float]]:
    """Seconds with and without taps, in turn; who begins alternates."""
    times: dict[int, list[float]] = {id(tapped): [], id(bare): []}
    for number in range(-1, repetitions):  # the first round warms up
        for model in (tapped, bare) if number % 2 else (bare, tapped):
            start = time.process_time()
            work(model)
            if number >= 0:
                times[id(model)].append(time.process_time() - start)
    return times[id(tapped)], times[id(bare)]


def calls_of(work: Callable[[Any], None], model: Any) -> int:
    """How often `tap` is called."""
    observe = sys.modules["gsm.observe"]
    with observe.record() as seen:
        work(model)
    return sum(len(seen.all(name)) for name in seen)


def seconds_of_a_call(repetitions: int = 200_000) -> float:
    """Of a tap with a name and a function that is never called, as the costliest ones are."""
    tap, name, value = sys.modules["gsm.observe"].tap, "stage/1", None
    start = time.process_time()
    for _ in range(repetitions):
        tap(f"{name}/weights", lambda: value)
    return (time.process_time() - start) / repetitions


def main(repetitions: int) -> None:
    """Prints a line for a training step, and one for decoding."""
    if repetitions < 2:
        raise SystemExit(f"error: repetitions is {repetitions}, but a spread takes 2 or more")
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "kernels")]
    bare, tapped = fresh_model(taps=False), fresh_model(taps=True)
    one = seconds_of_a_call()
    print(
        f"nano, fastest and ratio of {repetitions} repetitions in turn; a call while nobody listens: {1e9 * one:.0f} ns"
    )
    for name, work in ((f"training step, {BATCH} x {LENGTH}", training_step), (f"{DECODED} tokens decoded", decoding)):
        calls = calls_of(work, tapped)
        with_taps, without = compare(work, tapped, bare, repetitions)
        ratios = [a / b for a, b in zip(with_taps, without, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"{name:<24} {1000 * min(with_taps):9.2f} ms, without taps {1000 * min(without):9.2f} ms: "
            f"{min(with_taps) / min(without) - 1:+.2%} (median {middle - 1:+.2%}, quartiles {low - 1:+.2%} and "
            f"{high - 1:+.2%}); {calls} calls take {calls * one / min(without):.4%}"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
