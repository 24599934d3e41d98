"""What every operation must bear: compilation, autocast, checkpointing, low precision, any strides, meta tensors."""

import pytest
import torch
from calls import cast, every_call, gradients, outputs, with_leaves
from small import mostly_slow
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import gsm_kernels
from gsm_kernels.testing import assert_close

CALLS = every_call()
NAMES = tuple(CALLS)
CHOOSES = ("index_top_k", "candidate_pool")


def op_of(name: str):
    return getattr(gsm_kernels, name)


def assert_same(first, second, exact=False):
    (out, grads), (expected, expected_grads) = first, second
    for got, wanted in zip(out, expected, strict=True):
        if exact or not wanted.is_floating_point():
            assert torch.equal(got, wanted)
        else:
            assert_close(got, wanted)
    for name, wanted in expected_grads.items():
        assert (grads[name] is None) == (wanted is None), f"gradient of {name}"
        if wanted is not None:
            assert_close(grads[name], wanted, name=f"gradient of {name}", gradient=True)


def test_every_operation_is_covered():
    assert set(NAMES) == {op.name for op in gsm_kernels.OPS}


# torch's own tracer instantiates autograd.Function, and torch warns about that.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", mostly_slow(NAMES, "attend", "index_top_k", "mhc_boundary"))
def test_it_compiles_into_one_graph(name):
    op, call = op_of(name), CALLS[name]
    torch.compiler.reset()
    compiled = torch.compile(lambda **call: op(**call), fullgraph=True, backend="aot_eager")
    assert_same(gradients(compiled, call), gradients(op, call))


@pytest.mark.parametrize("name", NAMES)
def test_positional_and_keyword_arguments_are_the_same(name):
    op, call = op_of(name), CALLS[name]
    assert_same(gradients(lambda **call: op(*call.values()), call), gradients(op, call))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in CHOOSES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_within_its_tolerance(name, dtype):
    op, low = op_of(name), cast(CALLS[name], dtype)
    out, grads = gradients(op, low)
    expected, expected_grads = gradients(op, cast(low, torch.float64))
    for got, wanted in zip(out, expected, strict=True):
        assert_close(got, wanted)
    for argument, wanted in expected_grads.items():
        if wanted is not None:
            assert grads[argument].dtype == dtype
            assert_close(grads[argument], wanted, name=f"gradient of {argument}", gradient=True)


@pytest.mark.parametrize("name", NAMES)
def test_autocast_does_not_lower_the_precision_inside(name):
    op, call = op_of(name), cast(CALLS[name], torch.float32)
    expected = gradients(op, call)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(gradients(op, call), expected)


@pytest.mark.parametrize("name", NAMES)
def test_strides_do_not_matter(name):
    def strided(x):
        return x.mT.contiguous().mT if isinstance(x, Tensor) and x.ndim > 1 else x

    op, call = op_of(name), CALLS[name]
    assert_same(gradients(lambda **call: op(**{k: strided(v) for k, v in call.items()}), call), gradients(op, call))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in CHOOSES])
def test_checkpointing_changes_no_bit(name):
    op, call = op_of(name), CALLS[name]
    again = lambda **call: checkpoint(op, *call.values(), use_reentrant=False)  # noqa: E731
    assert_same(gradients(again, call), gradients(op, call), exact=True)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in CHOOSES])
def test_used_twice_it_gives_twice_the_gradient(name):
    op, call = op_of(name), CALLS[name]
    out, grads = gradients(lambda **call: outputs(op(**call))[0] + outputs(op(**call))[0], call)
    once, once_grads = gradients(lambda **call: outputs(op(**call))[0], call)
    for argument, grad in once_grads.items():
        if grad is not None:
            assert_close(grads[argument], 2 * grad, name=argument, gradient=True)


@pytest.mark.parametrize("name", NAMES)
def test_what_it_returns_may_be_changed_in_place(name):
    """Autograd forbids that for a view which a forward of its own returns."""
    op, call = op_of(name), with_leaves(CALLS[name])
    for out in outputs(op(**call)):
        if out.requires_grad:
            twice = 2 * out.detach()
            assert torch.equal(out.mul_(2), twice)


@pytest.mark.parametrize("name", NAMES)
def test_without_gradients_it_returns_the_same(name):
    op, call = op_of(name), with_leaves(CALLS[name])
    with torch.no_grad():
        quiet = outputs(op(**call))
    for got, wanted in zip(quiet, outputs(op(**call)), strict=True):
        assert not got.requires_grad and torch.equal(got, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_it_runs_on_the_meta_device(name):
    op, call = op_of(name), CALLS[name]
    meta = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in call.items()}
    for got, wanted in zip(outputs(op(**meta)), outputs(op(**call)), strict=True):
        assert got.is_meta and got.shape == wanted.shape and got.dtype == wanted.dtype
