"""The sanitizer finds each kind of error: in small kernels that make it, and in our own with something taken out."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import sanitizer
import torch
from calls import attention, cast, every_call, gradients, hyper_connection, indexer, norm, outputs, selection, turned
from check import with_reference, with_triton
from closeness import TOLERANCE, relative_error
from oracles import normal
from torch import Tensor

from gsm_kernels import OPS, Op, inverse, launch
from gsm_kernels.index_top_k import triton as search

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="kernels run on the GPU here")
N, BLOCK = 40, 16


@pytest.fixture(autouse=True)
def sane() -> None:
    """Nobody watches but the tests themselves."""


@triton.jit
def doubled(x_ptr, out_ptr, N: tl.constexpr, BLOCK: tl.constexpr, LOAD: tl.constexpr, STORE: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=(at < N) | LOAD, other=0.0)
    tl.store(out_ptr + at, 2 * x, mask=(at < N) | STORE)


@triton.jit
def summed(x_ptr, out_ptr, N: tl.constexpr, BLOCK: tl.constexpr, ATOMIC: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(x_ptr + at, mask=at < N, other=0.0))
    if ATOMIC:
        tl.atomic_add(out_ptr, total)
    else:
        tl.store(out_ptr, total)


@triton.jit
def shifted(x_ptr, N: tl.constexpr, BLOCK: tl.constexpr, BY: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at + BY, mask=at + BY < N, other=0.0)
    tl.store(x_ptr + at, x, mask=at < N)


@triton.jit
def reversed_through_memory(x_ptr, out_ptr, BLOCK: tl.constexpr, BARRIER: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at))
    if BARRIER:
        tl.debug_barrier()
    x = tl.load(out_ptr + BLOCK - 1 - at)
    if BARRIER:
        tl.debug_barrier()
    tl.store(out_ptr + at, x)


@triton.jit
def all_in_one_place(x_ptr, out_ptr, BLOCK: tl.constexpr, SAME: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.zeros((BLOCK,), tl.int32), tl.max(x, 0) + tl.zeros_like(x) if SAME else x)


@triton.jit
def whole_sum(x_ptr, out_ptr, N: tl.constexpr, BLOCK: tl.constexpr, ZERO: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < N, other=0.0) if ZERO else tl.load(x_ptr + at, mask=at < N)
    tl.store(out_ptr, tl.sum(x))


@triton.jit
def gathered(index_ptr, x_ptr, out_ptr, N: tl.constexpr, BLOCK: tl.constexpr, ZERO: tl.constexpr):
    at = tl.arange(0, BLOCK)
    index = tl.load(index_ptr + at, mask=at < N, other=0) if ZERO else tl.load(index_ptr + at, mask=at < N)
    tl.store(out_ptr + at, tl.load(x_ptr + index), mask=at < N)


@triton.jit
def product(x_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x = tl.load(x_ptr + at[:, None] * SIZE + at)
    tl.store(out_ptr + at[:, None] * SIZE + at, tl.dot(x, x))


def kinds(run: Callable[[], object]) -> set[str]:
    """The kinds of error that the sanitizer finds, in both orders of programs."""
    found = []
    for backwards in (False, True):
        with sanitizer.watching(backwards) as report:
            run()
        assert report.launches.total() > 0
        found.append({finding.kind for finding in report.findings})
    assert found[0] == found[1], "the order of programs changes nothing of that"
    return found[0]


@pytest.mark.parametrize(("load", "store"), [(True, False), (False, True)])
def test_a_missing_mask_is_found(load: bool, store: bool):
    memory, out = torch.zeros(64), torch.zeros(64)  # goes on behind what is given of it
    assert kinds(lambda: doubled[(3,)](memory[:N], out[:N], N, BLOCK, LOAD=load, STORE=store)) == {"bounds"}
    assert kinds(lambda: doubled[(3,)](torch.ones(N), out[:N], N, BLOCK, LOAD=False, STORE=False)) == set()
    assert (out[:N] == 2).all() and (out[N:] == 0).all(), "a lane out of bounds does no harm"


def test_lanes_that_stray_into_the_next_tensor_are_found():
    memory = torch.zeros(2 * N)
    found = kinds(lambda: doubled[(3,)](memory[:N], memory[N:], N, BLOCK, LOAD=True, STORE=False))
    assert found == {"bounds", "read race"}


def test_programs_that_write_one_address_are_found_unless_by_atomics():
    x, out = torch.ones(N), torch.zeros(1)
    assert kinds(lambda: summed[(3,)](x, out, N, BLOCK, ATOMIC=False)) == {"write race"}
    assert kinds(lambda: summed[(3,)](x, out, N, BLOCK, ATOMIC=True)) == set()


def test_programs_that_read_what_others_write_are_found():
    assert kinds(lambda: shifted[(3,)](torch.ones(N), N, BLOCK, BY=BLOCK)) == {"read race"}
    assert kinds(lambda: shifted[(3,)](torch.ones(N), N, BLOCK, BY=0)) == set(), "in place, lane by lane"
    assert kinds(lambda: shifted[(1,)](torch.ones(N), N, BLOCK, BY=1)) == {"order"}, "lanes that others overwrite"


def test_a_missing_barrier_is_found():
    x = torch.arange(16.0)
    for barrier, wanted in ((False, {"order"}), (True, set())):
        assert kinds(lambda: reversed_through_memory[(1,)](x, torch.empty(16), 16, BARRIER=barrier)) == wanted  # noqa: B023


@triton.jit
def twice(x_ptr, out_ptr, BLOCK: tl.constexpr, BACK: tl.constexpr, ATOMIC: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, x)
    to = BLOCK - 1 - at if BACK else at
    if ATOMIC:
        tl.atomic_add(out_ptr + to, x)
    else:
        tl.store(out_ptr + to, x)


@pytest.mark.parametrize("atomic", [False, True])
def test_lanes_that_write_where_others_have_are_found(atomic: bool):
    x = torch.arange(16.0)
    for back in (False, True):
        found = kinds(lambda: twice[(1,)](x, torch.empty(16), 16, BACK=back, ATOMIC=atomic))  # noqa: B023
        assert found == ({"order"} if back else set())


@triton.jit
def laid_out_otherwise(x_ptr, out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at, to = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, ROWS * COLUMNS)
    tl.store(out_ptr + at, tl.load(x_ptr + at))
    tl.store(x_ptr + to, tl.load(out_ptr + to))


def test_blocks_of_different_shapes_do_not_share_lanes():
    assert kinds(lambda: laid_out_otherwise[(1,)](torch.ones(16), torch.empty(16), 4, 4)) == {"order"}


def test_an_address_before_all_tensors_does_no_harm():
    assert kinds(lambda: shifted[(1,)](torch.ones(N), N, BLOCK, BY=-(2**28))) == {"bounds"}


def test_inside_one_another_they_would_run_programs_forwards_again():
    with sanitizer.watching(), pytest.raises(RuntimeError, match="already"), sanitizer.watching():
        pass


def test_lanes_that_disagree_about_one_address_are_found():
    x = torch.arange(16.0)
    assert kinds(lambda: all_in_one_place[(1,)](x, torch.zeros(1), 16, SAME=False)) == {"lanes"}
    assert kinds(lambda: all_in_one_place[(1,)](x, torch.zeros(1), 16, SAME=True)) == set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_a_load_masks_off_is_useless_unless_it_says_otherwise(dtype: torch.dtype):
    x, results = torch.ones(12, dtype=dtype), []
    with sanitizer.watching():
        for zero in (True, False):
            out = torch.zeros(1)
            whole_sum[(1,)](x, out, 12, 16, ZERO=zero)
            results.append(out.item())
    assert results[0] == 12 and results[1] != 12


def test_an_index_that_a_load_masks_off_leads_nowhere():
    index, x, out = torch.zeros(12, dtype=torch.int32), torch.ones(1), torch.empty(12)
    assert kinds(lambda: gathered[(1,)](index, x, out, 12, 16, ZERO=False)) == {"bounds"}
    assert kinds(lambda: gathered[(1,)](index, x, out, 12, 16, ZERO=True)) == set()


def test_an_output_that_nobody_writes_is_useless():
    with sanitizer.watching():
        assert torch.empty(3).isnan().all() and torch.empty_like(torch.ones(3)).isnan().all()
        assert (torch.ones(1, dtype=torch.int32).new_empty(3) == torch.iinfo(torch.int32).max).all()
    assert not torch.are_deterministic_algorithms_enabled(), "afterwards all is as before"


def test_a_product_too_short_for_the_matrix_units_is_refused():
    with sanitizer.watching():
        product[(1,)](torch.ones(16, 16), torch.empty(16, 16), 16)
        with pytest.raises(Exception, match="K >= 16"):
            product[(1,)](torch.ones(8, 8), torch.empty(8, 8), 8)


# The kernels of the package, with one thing taken out of them.


def in_spans() -> dict:
    """A search of so many slots that spans of them are chosen first, and by some rows fewer than there could be."""
    call = selection(k=3, entries=90, ratio=1, rows=6)
    last_BR = torch.tensor([0, 1, 2, 30, 89, 90]).expand_as(call["last_BR"])
    return {**call, "first_BR": torch.zeros_like(call["first_BR"]), "last_BR": last_BR}


CALLS = every_call()
MORE: dict[str, list[dict]] = {  # for what an ordinary call leaves out
    "attend": [
        attention(rows=1, batch=1, width=40, k=33)[0],
        {**(biased := attention()[0]), "bias_BRK": normal(*biased["index_BRK"].shape, seed=7)},
    ],
    "index_top_k": [in_spans()],
    "indexer_kl": [{**indexer(), "dense": False}],
    "mhc_boundary": [{**hyper_connection(batch=1, width=60), "rounds": 3}],
    "rms_norm": [norm(2, 5, 6), norm(2, 5, 6, pairs=2)],
    "rotate": [turned(2, 5, 6, pairs=2)],
}
# Masks of loads that nobody misses at these sizes, by function: the lanes stay within their tensor, and what they read
# is masked once more.
HARMLESS = {
    "attend": ["forward", "split"],
    "index_top_k": ["best_of_groups", "choose_blocks", "choose_listed", "choose_listed", "choose_listed"],
    "indexer_kl": ["_seen"],
    "mhc_boundary": ["coefficient_gradients", "coefficient_gradients"],
}
LONG = {"attend", "index_top_k", "indexer_kl", "mhc_boundary", "score_slots"}  # up to a minute each


def with_kernels() -> list[object]:
    """The operations that have kernels of their own, each module of kernels once."""
    found = {kernels_of(op): op for op in reversed(OPS) if any(impl.name == "triton" for impl in op.fast)}
    return [pytest.param(op, id=op.name, marks=[pytest.mark.nightly] * (op.name in LONG)) for op in found.values()]


def kernels_of(op: Op) -> str:
    """The module that holds the kernels of an operation."""
    return next(impl.fn.__module__ for impl in op.fast if impl.name == "triton").rpartition(".")[0] + ".kernels"


@pytest.mark.parametrize("op", with_kernels())
def test_whatever_is_taken_out_of_our_kernels_is_found(op: Op, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Barriers, stores, their masks and those of loads: the sanitizer finds it, or has made the results useless."""
    monkeypatch.setattr(search, "ALONE", 0)  # as where there are many rows
    calls = [CALLS[op.name], *MORE.get(op.name, [])]
    expected = [results(with_reference(op), cast(call, torch.float64)) for call in calls]
    found = overlooked(kernels_of(op), lambda: any(map(partial(wrong, op), calls, expected)), tmp_path, monkeypatch)
    assert all(what.endswith(": mask of a load") for what in found), found
    assert not Counter(what.partition(",")[0] for what in found) - Counter(HARMLESS.get(op.name, [])), found


def test_whatever_is_taken_out_of_the_sums_over_slots_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """They are no operation's own. In parts of 2 places each slot has several, in parts of 16 all but one have one."""
    index = torch.arange(72).view(2, 12, 3) % 5 - 1
    index[:, :, 0] = 2
    values, into = normal(72, 6).float(), normal(8, 6, seed=1).float()
    slot = torch.where(index < 0, 8, index + torch.tensor([0, 4])[:, None, None]).flatten()
    expected = torch.cat([into, torch.zeros(1, 6)]).double().index_add_(0, slot, values.double())[:8]

    def strays(most: int) -> bool:
        monkeypatch.setattr(inverse, "MOST", most)
        got = into.clone()
        try:
            with sanitizer.watching() as report:
                inverse.add_segments(got, values, inverse.inverse_index(index, 4))
        except Exception:
            return True
        return bool(report.findings) or differ(got, expected)

    module = "gsm_kernels.inverse_kernels"
    assert not overlooked(module, lambda: strays(2) or strays(16), tmp_path, monkeypatch)


def overlooked(module: str, wrong: Callable[[], bool], place: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What can be taken out of a module of kernels without anything going wrong."""
    whole = taken_out(module, None, place)
    monkeypatch.setitem(sys.modules, module, whole.changed)
    assert whole.seen and not wrong(), "nothing is wrong with the whole"
    harmless = []
    for number, what in enumerate(whole.seen):
        seeded = taken_out(module, number, place)
        assert seeded.seen == whole.seen, "one thing at a time"
        monkeypatch.setitem(sys.modules, module, seeded.changed)
        if not wrong():
            harmless.append(what)
    return harmless


def results(run: Callable, call: dict) -> list[Tensor | None]:
    """Outputs, with gradients and without, and all gradients."""
    outs, grads = gradients(run, call)
    with torch.no_grad():
        return [*outs, *grads.values(), *outputs(run(**call))]


def wrong(op: Op, call: dict, expected: list[Tensor | None]) -> bool:
    """Whether the sanitizer finds something in the kernels that a call launches, or they compute something else."""
    try:
        with sanitizer.watching() as report:
            got = results(with_triton(op), cast(call, torch.float32))
    except Exception:
        return True
    return bool(report.findings) or any(map(differ, got, expected))


def differ(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is not other
    if not other.is_floating_point():
        return not torch.equal(one, other)
    if not torch.equal(one.isnan(), other.isnan()):
        return True
    return not relative_error(one.nan_to_num(), other.nan_to_num()) <= TOLERANCE[torch.float32].backward


class Seeded(NamedTuple):
    """A module of kernels without one thing, and all that could be taken out, in words."""

    changed: ModuleType
    seen: list[str]


def taken_out(module: str, number: int | None, place: Path) -> Seeded:
    """The module without the thing of this number; None: whole."""
    without = Without(number)
    original = Path(launch.__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    tree = ast.fix_missing_locations(without.visit(ast.parse(original.read_text())))
    file = place / f"without_{number}.py"  # where Triton looks its source up
    file.write_text(ast.unparse(tree))
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(changed := importlib.util.module_from_spec(spec))
    return Seeded(changed, without.seen)


class Without(ast.NodeTransformer):
    """Takes one thing out of a file of kernels. `seen` lists all that it could have taken."""

    def __init__(self, number: int | None) -> None:
        self.number, self.seen, self.place = number, list[str](), ""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.place = node.name
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        call = node.value
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            return self.generic_visit(node)
        if call.func.attr == "store":
            if any(keyword.arg == "mask" for keyword in call.keywords) and self._chosen("mask of a store", call):
                call.keywords = [keyword for keyword in call.keywords if keyword.arg != "mask"]
            gone = self._chosen("store", call)
            self.generic_visit(node)  # what it stores may be loaded in the same line
            return ast.copy_location(ast.Pass(), node) if gone else node
        if call.func.attr == "debug_barrier" and self._chosen("barrier", call):
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        masked = any(keyword.arg == "mask" for keyword in node.keywords)
        if ast.unparse(node.func) == "tl.load" and masked and self._chosen("mask of a load", node):
            node.keywords = []
        return self.generic_visit(node)

    def _chosen(self, what: str, call: ast.Call) -> bool:
        self.seen.append(f"{self.place}, line {call.lineno}: {what}")
        return len(self.seen) - 1 == self.number
