"""The hyper-connections' loops against the reference in float64."""

import pytest
import torch
from calls import cast, gradients, hyper_connection

from gsm_kernels import mhc_boundary, using
from gsm_kernels.testing import assert_close

pytest.importorskip("numba")


def test_the_number_of_threads_changes_no_bit():
    """Of the loops: on some processors (AMD's) PyTorch's own product is another with more threads."""
    before, given, found = torch.get_num_threads(), cast(hyper_connection(batch=2, rows=500), torch.float32), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(gradients(mhc_boundary, given))
    finally:
        torch.set_num_threads(before)
    (out, grads), (expected, expected_grads) = found
    if not products_are_alike():
        for one, other in zip(out, expected, strict=True):
            assert_close(one, other)
        return
    assert all(map(torch.equal, out, expected))
    assert all(torch.equal(grad, expected_grads[name]) for name, grad in grads.items())


def products_are_alike() -> bool:
    """Whether PyTorch's product of such sizes is the same with one thread and with three."""
    before, found = torch.get_num_threads(), []
    x, weight = torch.randn(1000, 64), torch.randn(24, 64)
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(torch.nn.functional.linear(x, weight))
    finally:
        torch.set_num_threads(before)
    return torch.equal(*found)


def test_large_logits_do_not_overflow():
    given = cast(hyper_connection(), torch.float32)
    given["bias"] = torch.linspace(-300, 300, 24)
    out, grads = gradients(mhc_boundary, given)
    expected, _ = gradients(mhc_boundary, cast(given, torch.float64))
    assert_close(out[0], expected[0])
    assert all(grad.isfinite().all() for grad in grads.values())


def test_what_is_not_finite_is_not_hidden():
    given = cast(hyper_connection(), torch.float32)
    given["streams_BRXD"][0, 1, 2, 3] = torch.nan
    with torch.no_grad():
        left = mhc_boundary(**given)[0]
    assert left[0, 1].isnan().any() and left[0, 0].isfinite().all() and left[1].isfinite().all()


def test_the_same_call_gives_the_same_bits():
    given = cast(hyper_connection(rows=70), torch.float32)
    first, second = (gradients(mhc_boundary, given) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first[0], second[0], strict=True))
    assert all(torch.equal(grad, second[1][name]) for name, grad in first[1].items())


def test_one_output_alone_gives_gradients():
    for output in (0, 1):
        found = []
        for name in ("numba", "reference"):
            given = cast(hyper_connection(), torch.float32)
            phi = given["phi"].clone().requires_grad_()
            with using(name):
                mhc_boundary(**{**given, "phi": phi})[output].square().sum().backward()
            found.append(phi.grad)
        assert_close(found[0], found[1], name=f"through output {output}", gradient=True)
