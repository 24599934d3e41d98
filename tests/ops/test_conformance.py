"""Every implementation of every operation, on every case of `calls.CASES`.

The reference equals a loop written from the formula, in float64. Every other implementation equals the reference in
float64 on the same numbers, in each dtype that it computes in. All of them are ordinary operations of PyTorch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator

import calls
import pytest
import torch
from calls import CASES, cast, every_call, gradients, outputs, with_leaves
from check import (
    READ,
    assert_agrees,
    assert_as_good_as_eager,
    assert_near,
    assert_one,
    assert_same,
    in_case,
    run_by,
    to_device,
)
from closeness import assert_close
from oracles import ORACLES
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import gsm_kernels
from gsm.layers.operations import OPS
from gsm_kernels import Op, using
from gsm_kernels.attend_range import sdpa
from gsm_kernels.cpu import native

CALLS = every_call()
CHOOSES = ("index_top_k", "candidate_pool")  # integers, which have no gradient
PLAIN = ("grouped_linear",)  # PyTorch differentiates its reference itself, any number of times
HALF = (torch.bfloat16, torch.float16)
DTYPES = {  # by implementation: what it computes in, or rounds what it reads from and writes to
    "numba": (torch.float32, *HALF),
    "sdpa": (torch.float64,),
    "chunked": (torch.float64,),
    "triton": (torch.float32,),  # the interpreter has no bfloat16
}
IMPLEMENTATIONS = [(op, impl.name) for op in OPS for impl in op.fast if impl.name in DTYPES and not impl.narrow]
LEFT = {  # the cases that an implementation leaves to others, with a reason
    ("attend", "triton"): {"two channels", "three heads of 6", "twelve heads of 20", "a bias for twelve heads"},
    ("attend_band", "triton"): {"two channels", "three heads of 6", "twelve heads of 20"},
    ("attend_blocks", "sdpa"): {"one row"},
    ("mhc_boundary", "numba"): {"one stream", "two streams", "eight streams"},
}
LONG = {  # the cases that take seconds in Triton's interpreter: the night runs them
    *("as many rows as entries", "a window wider than the stream", "only padding in one row", "more rows than a block"),
    *("narrow blocks", "a window longer than a part of a product", "six heads", "sixteen heads of 64", "64 heads"),
    *("more heads than lanes", "128 channels, 32 heads", "nothing rotated", "everything rotated", "sixteen heads"),
    *("a bias of more rows than a block", "a bank that is gathered", "one slot per token", "more rows than a tile"),
    *("many slots", "many rows", "more rows than slots", "selected slots of many rows", "more tokens than a piece"),
}
CANCELLED = {  # in half precision: a gradient of terms that cancel is little more than the rounding of the output
    *("a window of one", "a window longer than a part of a product", "one token"),
}
without_numba = pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
marks = {"numba": without_numba}

each_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
each_learning = pytest.mark.parametrize("op", [op for op in OPS if op.name not in CHOOSES], ids=lambda op: op.name)


def each_of(pairs: Iterable[tuple[Op, str]]) -> pytest.MarkDecorator:
    """Parametrise a test by operations and the names of their implementations."""
    given = [pytest.param(op, name, id=f"{op.name}-{name}", marks=marks.get(name, ())) for op, name in pairs]
    return pytest.mark.parametrize(("op", "name"), given)


EVERY = [*((op, "reference") for op in OPS), *IMPLEMENTATIONS]
each_implementation = each_of(IMPLEMENTATIONS)
without_interpreter = each_of((op, name) for op, name in EVERY if name != "triton")
kernels = pytest.mark.parametrize(
    "op", [op for op, name in IMPLEMENTATIONS if name == "triton"], ids=lambda op: op.name
)
# torch's own tracer instantiates autograd.Function, and torch warns about that.
traced = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def taken(op: Op, name: str, dtype: torch.dtype) -> Iterator[tuple[str, dict]]:
    """The cases that an implementation takes, and no other than those."""
    impl, left = next(impl for impl in op.fast if impl.name == name), set()
    for case, make in CASES[op.name].items():
        call = make()
        given = cast(call, dtype)
        with using(name):
            refused = impl.refuses(op.inputs(**given)) if op.inputs else impl.refuses(**given)
        if refused:
            left.add(case)
        else:
            yield case, call
    assert left == LEFT.get((op.name, name), set())


def test_every_operation_has_cases_and_a_loop():
    assert set(CASES) == set(ORACLES) == {op.name for op in OPS}


@each_op
def test_the_reference_equals_the_loop_written_from_the_formula(op):
    reference, read = run_by("reference", op), READ.get(op.name, lambda result: result)
    for case, make in CASES[op.name].items():
        with in_case(case):
            assert_same(reference, lambda **call: read(ORACLES[op.name](*call.values())), make())


@each_of((op, name) for op, name in IMPLEMENTATIONS if name != "triton")
def test_an_implementation_equals_the_reference_in_float64(op, name):
    for dtype in DTYPES[name]:
        for case, call in taken(op, name, dtype):
            if dtype not in HALF or case not in CANCELLED:
                with in_case(f"{case}, {dtype}"):
                    assert_agrees(op, call, dtype, name)


@kernels
def test_the_kernels_equal_the_reference_in_float64(op):
    for case, call in taken(op, "triton", torch.float32):
        if case not in LONG:
            with in_case(case):
                assert_agrees(op, call)


@kernels
@pytest.mark.nightly
def test_the_kernels_equal_the_reference_in_float64_in_longer_calls(op):
    for case, call in taken(op, "triton", torch.float32):
        if case in LONG:
            with in_case(case):
                assert_agrees(op, call)


def ordinary(op: Op, name: str) -> dict:
    """The ordinary call in a dtype that the implementation computes in."""
    return to_device(cast(CALLS[op.name], DTYPES.get(name, (torch.float64,))[0]))


def strided(x):
    return x.mT.contiguous().mT if isinstance(x, Tensor) and x.ndim > 1 else x


def assert_same_bits(first: tuple, second: tuple) -> None:
    (out, grads), (expected, expected_grads) = first, second
    assert all(map(torch.equal, out, expected))
    for name, wanted in expected_grads.items():
        assert grads[name] is wanted is None or torch.equal(grads[name], wanted), f"gradient of {name}"


@each_implementation
def test_strides_do_not_matter(op, name):
    """To the bit, but for products and sums of PyTorch's own."""
    run, call = run_by(name, op), ordinary(op, name)
    same, expected = assert_same_bits if name in ("numba", "triton") else assert_near, gradients(run, call)
    same(gradients(lambda **call: run(**{k: strided(v) for k, v in call.items()}), call), expected)
    same(gradients(run, {k: strided(v) for k, v in call.items()}), expected)


@each_implementation
def test_recomputation_changes_no_bit(op, name):
    """A backward that looked at what it had saved twice was an error there alone."""
    run, call = run_by(name, op), ordinary(op, name)
    again = lambda **call: checkpoint(lambda: run(**call), use_reentrant=False)  # noqa: E731
    assert_same_bits(gradients(again, call), gradients(run, call))


@without_interpreter
def test_without_gradients_it_returns_the_same_and_what_it_returns_may_be_changed(op, name):
    """Autograd forbids the change of a view that a forward of its own returns."""
    run, call = run_by(name, op), with_leaves(ordinary(op, name))
    with torch.no_grad():
        quiet = outputs(run(**call))
    for got, wanted in zip(quiet, outputs(run(**call)), strict=True):
        assert not got.requires_grad and torch.equal(got, wanted)
        if wanted.requires_grad:
            assert torch.equal(wanted.mul_(2), 2 * got)


@without_interpreter
def test_a_tensor_without_memory_passes_through(op, name):
    call = ordinary(op, name)
    with using(name):
        expected = outputs(op(**call))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad(), using(name):
        fake = {k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in call.items()}
        found = outputs(op(**fake))
    for got, wanted in zip(found, expected, strict=True):
        assert got.shape == wanted.shape and got.dtype == wanted.dtype


@each_op
def test_it_runs_on_the_meta_device(op):
    call = CALLS[op.name]
    meta = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in call.items()}
    for got, wanted in zip(outputs(op(**meta)), outputs(op(**call)), strict=True):
        assert got.is_meta and got.shape == wanted.shape and got.dtype == wanted.dtype


def compiling() -> Iterator[object]:
    """By day two operations as they choose for themselves, slowly all of them and the loops, at night the kernels."""
    for op in OPS:
        quick = op.name in ("attend", "index_top_k")
        yield pytest.param(op, "auto", id=op.name, marks=[] if quick else pytest.mark.slow)
    for op, name in IMPLEMENTATIONS:
        if name in ("numba", "triton"):
            mark = [without_numba, pytest.mark.slow] if name == "numba" else pytest.mark.nightly
            yield pytest.param(op, name, id=f"{op.name}-{name}", marks=mark)


@traced
@pytest.mark.parametrize(("op", "name"), list(compiling()))
def test_it_compiles_into_one_graph(op, name):
    call = ordinary(op, name)
    torch.compiler.reset()
    compiled = torch.compile(lambda **call: op(**call), fullgraph=True, backend="aot_eager")
    with using(name):
        assert_near(gradients(compiled, call), gradients(op, call))


@each_op
def test_positional_and_keyword_arguments_are_the_same(op):
    call = CALLS[op.name]
    assert_same_bits(gradients(lambda **call: op(*call.values()), call), gradients(op, call))


@each_op
def test_autocast_does_not_lower_the_precision_inside(op):
    call = cast(CALLS[op.name], torch.float32)
    expected = gradients(op, call)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_near(gradients(op, call), expected)


@each_learning
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_low_precision_is_within_its_tolerance_and_kept(op, dtype):
    """The implementation that the dispatch chooses, and the reference, which accumulates in float32 as well."""
    low = cast(CALLS[op.name], dtype)
    read = READ.get(op.name, lambda result: result)
    for run in (lambda **call: read(op(**call)), run_by("reference", op)):
        grads = assert_same(run, lambda **call: read(op(**call)), low)
        assert {grad.dtype for grad in grads.values() if grad is not None} == {dtype}


@each_learning
def test_used_twice_it_gives_twice_the_gradient(op):
    call = CALLS[op.name]
    _, twice = gradients(lambda **call: outputs(op(**call))[0] + outputs(op(**call))[0], call)
    _, once = gradients(lambda **call: outputs(op(**call))[0], call)
    for argument, grad in once.items():
        if grad is not None:
            assert_close(twice[argument], 2 * grad, name=argument, gradient=True)


@each_learning
def test_gradients_are_those_of_finite_differences(op):
    """Along random directions: no oracle, and no derivative of ours, takes part."""
    call = with_leaves(CALLS[op.name])
    learned = [k for k, grad in gradients(op, call)[1].items() if grad is not None]

    def function(*leaves):
        result = outputs(op(**{**call, **dict(zip(learned, leaves, strict=True))}))
        return tuple(out for out in result if out.requires_grad)

    assert torch.autograd.gradcheck(function, [call[name] for name in learned], fast_mode=True, atol=1e-6)


LOUD = {  # by operation: an argument, and a factor that takes it out of the range of exp
    **dict.fromkeys(("attend", "attend_band", "attend_range", "attend_blocks"), ("query_BRHC", 1e4)),
    "mhc_boundary": ("bias", 300.0),
    "swiglu": ("gate", 100.0),
    "delta_rule": ("channel_decay_BTHC", 60.0),
    "slot_attention": ("log_decay_BTHM", 60.0),
}


MASKED = ("attend", "attend_band", "swiglu")  # Triton's interpreter warns of an overflow in lanes that a mask drops


@each_of((op, name) for op, name in EVERY if op.name in LOUD and (name != "triton" or op.name not in MASKED))
def test_large_numbers_overflow_neither_forward_nor_backward(op, name):
    argument, factor = LOUD[op.name]
    call = ordinary(op, name)
    call[argument] = factor * call[argument]
    outs, grads = gradients(run_by(name, op), call)
    assert all(x.isfinite().all() for x in (*outs, *grads.values()) if x is not None)
    if op.name.startswith("attend"):
        return  # the rounding of such scores decides the weights
    expected = gradients(run_by("reference", op), cast(call, torch.float64))
    if op.name == "swiglu":
        assert_near((outs, grads), expected)
    for out, wanted in zip(outs, expected[0], strict=True):
        assert_one("output", out, wanted, False)


@each_of((op, name) for op, name in EVERY if op.name not in CHOOSES)
def test_a_number_that_is_not_finite_is_not_hidden(op, name):
    """It stays in its sequence, where the argument has sequences."""
    run, call = run_by(name, op), ordinary(op, name)
    for argument, x in call.items():
        if isinstance(x, Tensor) and x.is_floating_point() and argument not in ("state_BHCC", "state_BHMU"):
            alone = "_B" in argument or argument in ("x", "gate", "up")
            wrong = x.clone()
            wrong[: 1 if alone else None] = torch.nan
            with in_case(argument), torch.no_grad():
                out = outputs(run(**{**call, argument: wrong}))[0]
                assert out.isnan().any() and (out.ndim == 0 or not alone or out[1:].isfinite().all())
    if op.name in ("rms_norm", "swiglu"):
        x = next(iter(call.values())).clone()
        x[0, 1, 2] = torch.nan
        changed = {**call, next(iter(call)): x}
        assert torch.equal(run(**changed).isnan(), run_by("reference", op)(**changed).isnan())


@each_of((op, name) for op, name in EVERY if op.name.startswith("attend"))
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # of lanes that are masked afterwards
def test_a_row_that_sees_nothing_returns_zero_and_gives_no_gradient(op, name):
    """With and without a sink, which is -inf where there is none."""
    call = {k: v.clone() if isinstance(v, Tensor) else v for k, v in ordinary(op, name).items()}
    for argument in {"position_BR", "index_BRK", "chosen_BRGN"} & set(call):
        call[argument][0] = -1
    if "last_BR" in call:
        call["last_BR"][0] = call["first_BR"][0]
    for sink in (None, -torch.inf) if "sink_H" in call else (None,):
        given = call if sink is None else {**call, "sink_H": torch.full_like(call["sink_H"], sink)}
        (out,), grads = got = gradients(run_by(name, op), given)
        assert not out[0].any() and out[1].any() and out.isfinite().all()
        assert_near(got, gradients(run_by("reference", op), cast(given, torch.float64)))
        assert not any(grad[0].any() for argument, grad in grads.items() if "_B" in argument and grad is not None)


@pytest.mark.parametrize("op", [op for op, name in IMPLEMENTATIONS if name == "numba"], ids=lambda op: op.name)
@without_numba
def test_the_default_dtype_does_not_matter_to_the_loops(op):
    """The loops write float32: into memory for anything else they would write too much."""
    expected = gradients(run_by("numba", op), ordinary(op, "numba"))
    torch.set_default_dtype(torch.float16)
    try:
        assert_same_bits(gradients(run_by("numba", op), ordinary(op, "numba")), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("op", [op for op in OPS if op.name not in (*CHOOSES, *PLAIN)], ids=lambda op: op.name)
def test_second_derivatives_are_refused(op):
    """Those of rms_norm and linear_cross_entropy were wrong, without an error."""
    call = with_leaves(CALLS[op.name])
    out = [x for x in outputs(op(**call)) if x.requires_grad]
    leaves = [x for x in call.values() if isinstance(x, Tensor) and x.requires_grad]
    with pytest.raises(RuntimeError, match="create_graph|derivative"):
        first = torch.autograd.grad(
            torch.stack([x.sum() for x in out]).sum(), leaves, create_graph=True, allow_unused=True
        )
        torch.autograd.grad(torch.stack([x.square().sum() for x in first if x is not None]).sum(), leaves)


class Operators(TorchDispatchMode):
    """The calls of operators of ours, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "gsm_kernels":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@each_implementation
@pytest.mark.slow
def test_the_operators_pass_pytorch_s_own_check(op, name):
    """Of schemas (nothing given is changed, or returned as it is), of shapes without data, of autograd."""
    with Operators() as seen:
        gradients(run_by(name, op), ordinary(op, name))
    assert seen.calls or name not in ("numba", "triton")
    for function, args, options in seen.calls:
        with in_case(function):
            given = tree_map_only(Tensor, lambda x: x.detach().clone(), args)
            torch.library.opcheck(function, given, options, test_utils=CHECKS)


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
LARGE: dict[str, Callable[[], dict]] = {  # enough rows for several parts and threads
    "attend": lambda: calls.attending(bias=True, **MANY_ROWS),
    "attend_band": lambda: calls.band(batch=1, **MANY_ROWS),
    "index_top_k": lambda: calls.selection(k=3, ratio=1, entries=400, rows=300),
    "candidate_pool": lambda: calls.pool(ratio=1, entries=400, rows=300),
    "rms_norm": lambda: calls.norm(1001, 71),
    "swiglu": lambda: calls.product(1001, 71),
    "mhc_boundary": lambda: calls.hyper_connection(rows=500),
}
MANY_ROWS = {"rows": 1100, "entries": 1150, "width": 150, "heads": 3, "channels": 16, "pairs": 4, "k": 6, "ratio": 3}


@without_numba
@pytest.mark.parametrize("name", LARGE)
def test_the_number_of_threads_changes_no_bit_of_the_loops(name, monkeypatch):
    """But for PyTorch's own products of the hyper-connections, which on some processors depend on it."""
    op, before, found = getattr(gsm_kernels, name), torch.get_num_threads(), []
    module = importlib.import_module(next(impl.fn.__module__ for impl in op.fast if impl.name == "numba"))
    for constant in {"LEAST", "THREAD"} & set(vars(module)):
        monkeypatch.setattr(module, constant, 1 << 10 if constant == "LEAST" else 1)
    call = cast(LARGE[name](), torch.float32)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(gradients(run_by("numba", op), call))
    finally:
        torch.set_num_threads(before)
    same = assert_same_bits if name != "mhc_boundary" or products_are_alike(call) else assert_near
    for other in found[1:]:
        same(other, found[0])
    assert_agrees(op, call, implementation="numba")


def products_are_alike(call: dict) -> bool:
    """Whether PyTorch's products of this call, forward and backward, are the same with one, two and three threads."""
    before, products = torch.get_num_threads(), []
    x, phi = call["streams_BRXD"].detach().flatten(2).flatten(0, 1), call["phi"].detach()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            number = torch.nn.functional.linear(x, phi)
            products.append(torch.cat([part.flatten() for part in (number, number.T @ x, number @ phi)]))
    finally:
        torch.set_num_threads(before)
    return all(torch.equal(products[0], other) for other in products[1:])


ROWS = {"rows": 33, "entries": 36, "heads": 2}
IN_CHUNKS = {  # by implementation: what makes its chunks short, and calls of several chunks
    "reference": (
        {"scratch_elements": lambda device: 1, "FEWEST_ROWS": 1},
        {
            "attend": lambda: calls.attending(width=4, bias=True, **ROWS),
            "attend_blocks": lambda: calls.blocks(rows=33, slots=40),
            "index_top_k": lambda: calls.selection(k=3, ratio=1, entries=40, rows=30),
            "candidate_pool": lambda: calls.pool(ratio=1, entries=40, rows=30),
            "score_slots": lambda: calls.scoring(rows=33, entries=36),
            "indexer_kl": lambda: calls.indexer(rows=33, entries=36),
            "linear_cross_entropy": calls.logits,
        },
    ),
    "sdpa": (
        {"scratch_elements": lambda device: 1},
        {
            "attend_range": lambda: calls.ranges(rows=33, slots=40),
            "attend_blocks": lambda: calls.blocks(rows=33, slots=40),
        },
    ),
    "triton": (
        {"PAIR_BYTES": 1, "chunk_rows": lambda vocabulary: 4, "SCRATCH": 1},
        {
            "attend": lambda: calls.attending(rows=5, heads=16, k=3),
            "index_top_k": lambda: calls.selection(rows=3),
            "candidate_pool": lambda: calls.pool(rows=3),
            "score_slots": lambda: calls.scoring(rows=3),
            "indexer_kl": lambda: calls.indexer(rows=4),
            "linear_cross_entropy": calls.logits,
        },
    ),
}


@pytest.mark.parametrize(
    ("name", "op"), [(name, op) for name, (_, made) in IN_CHUNKS.items() for op in made], ids=lambda x: x
)
def test_chunks_of_rows_change_nothing(name, op, monkeypatch):
    short, made = IN_CHUNKS[name]
    function = next(operation for operation in OPS if operation.name == op)
    call = to_device(cast(made[op](), DTYPES.get(name, (torch.float64,))[0]))
    whole = gradients(run_by(name, function), call)
    implementation = next(impl for impl in function.impls if impl.name == name)
    # Both operations take the parts of `attend_range`.
    module = sdpa if name == "sdpa" else importlib.import_module(implementation.fn.__module__)
    changed = [attribute for attribute in short if hasattr(module, attribute)]
    for attribute in changed:
        monkeypatch.setattr(module, attribute, short[attribute])
    if "SCRATCH" in short:
        monkeypatch.setattr("gsm_kernels.rows.SCRATCH", 1)
    assert changed or name == "triton"
    assert_near(gradients(run_by(name, function), call), whole)


@pytest.mark.gpu
@kernels
@pytest.mark.parametrize("dtype", HALF)
def test_in_half_precision_the_kernels_err_no_more_than_eager(op, dtype):
    for case, call in taken(op, "triton", dtype):
        with in_case(case):
            assert_as_good_as_eager(op, call, dtype)
    for make in calls.MODELS.get(op.name, []):
        with in_case(make):
            assert_as_good_as_eager(op, make(), dtype)
