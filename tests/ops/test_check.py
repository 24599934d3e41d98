"""What the checks of Triton kernels let pass: float32 to its last bits, but of a GPU as much as its units err."""

import check
import closeness
import pytest
import torch
from calls import every_call
from check import assert_agrees
from closeness import APPROXIMATE, TOLERANCE, assert_close

from gsm_kernels import rms_norm

CALL = every_call()["rms_norm"]


def tf32(x: torch.Tensor) -> torch.Tensor:
    """Rounded to the 10 bits behind the leading one that TF32 has."""
    return (x.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Float32 counts as a GPU's."""
    monkeypatch.setattr(closeness, "approximate", lambda x: x.dtype == torch.float32)


@pytest.fixture
def kernels_err(monkeypatch):
    """Kernels that compute what eager PyTorch does, times 1 + the error."""

    run_by = check.run_by

    def by(error: float) -> None:
        def erring(name, op):
            exact = run_by("reference", op)
            return exact if name == "reference" else lambda **call: (1 + error) * exact(**call)

        monkeypatch.setattr(check, "run_by", erring)

    return by


def test_an_error_of_3e_6_passes_on_a_gpu(kernels_err, on_a_gpu):
    kernels_err(3e-6)
    assert_agrees(rms_norm, CALL)


def test_an_error_of_3e_6_fails_in_the_interpreter(kernels_err):
    kernels_err(3e-6)
    with pytest.raises(AssertionError, match=r"output 0: relative error 3\.\d+e-06 above 2\.0e-06"):
        assert_agrees(rms_norm, CALL)


@pytest.mark.parametrize("where", ["a GPU", "the interpreter"])
def test_an_error_of_1e_3_fails_everywhere(where, kernels_err, request):
    if where == "a GPU":
        request.getfixturevalue("on_a_gpu")
    kernels_err(1e-3)
    with pytest.raises(AssertionError, match=r"output 0: relative error 1\.00e-03 above"):
        assert_agrees(rms_norm, CALL)


def test_a_single_tf32_product_is_more_than_a_gpu_may_err(on_a_gpu):
    a, b = torch.randn(2, 64, 64)
    with pytest.raises(AssertionError, match="relative error .*e-04 above"):
        assert_close(tf32(a) @ tf32(b), a.double() @ b.double(), gradient=True)


def test_three_tf32_products_are_not(on_a_gpu):
    a, b = torch.randn(2, 64, 64)
    (a_high, a_low), (b_high, b_low) = ((tf32(x), tf32(x - tf32(x))) for x in (a, b))
    assert_close(a_low @ b_high + a_high @ b_low + a_high @ b_high, a.double() @ b.double())


def test_where_eager_errs_more_a_gpu_may_err_half_as_much_again(on_a_gpu):
    expected = torch.ones(8, dtype=torch.float64)
    eager = expected.float() * (1 + 1e-4)
    assert_close(expected.float() * (1 + 1.4e-4), expected, eager=eager)
    with pytest.raises(AssertionError, match="above 1.5e-04"):
        assert_close(expected.float() * (1 + 1.6e-4), expected, eager=eager)


def test_eager_excuses_nothing_in_the_interpreter():
    expected = torch.ones(8, dtype=torch.float64)
    wrong = expected.float() * (1 + 1e-4)
    with pytest.raises(AssertionError, match="above 2.0e-06"):
        assert_close(wrong, expected, eager=wrong)


def test_on_a_gpu_eager_is_asked_in_the_same_dtype(on_a_gpu, monkeypatch):
    dtypes = []

    run_by = check.run_by

    def noting(name, op):
        exact = run_by("reference", op)
        return (lambda **call: dtypes.append(call["x"].dtype) or exact(**call)) if name == "reference" else exact

    monkeypatch.setattr(check, "run_by", noting)
    assert_agrees(rms_norm, CALL)
    assert dtypes == [torch.float64, torch.float32]


def test_half_precision_is_judged_the_same_everywhere(on_a_gpu):
    expected = torch.ones(8, dtype=torch.float64)
    assert_close((expected * (1 + 3e-3)).bfloat16(), expected)
    with pytest.raises(AssertionError, match="above 4.0e-03"):
        assert_close((expected * (1 + 1e-2)).bfloat16(), expected)


def test_only_float32_of_a_gpu_is_approximate():
    assert not closeness.approximate(torch.ones(3))
    assert TOLERANCE[torch.float32].forward < APPROXIMATE.forward < TOLERANCE[torch.float16].forward
