"""What the Triton kernels of every operation must bear, on its ordinary call; each has more in a test file of its own.

They run on a GPU where there is one, else in Triton's interpreter.
"""

import threading

import pytest
import torch
from check import DEVICE

from gsm_kernels import Impl, KernelBuildError, Op, launch, register, rms_norm, using


def test_a_kernel_that_cannot_be_built_is_an_error_that_names_it():
    triton = pytest.importorskip("triton")

    class Broken:
        __name__ = "forward"

        def __getitem__(self, grid):
            raise triton.TritonError("no such instruction")

    with pytest.raises(KernelBuildError, match="^forward: TritonError: no such instruction"):
        launch.launch(Broken(), (1,), torch.ones(1))


def test_the_kernels_of_backward_are_built_before_forward_runs(monkeypatch):
    """A failure in backward comes too late to fall back; so does one in the middle of a step."""
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "_built", set())
    asked = []

    def build(kernel, args, options):
        asked.append(kernel)
        raise KernelBuildError("too little shared memory")

    monkeypatch.setattr(launch, "compiled", build)

    def fast(x):
        launch.build_once("toy", lambda: launch.launch("backward", (1,), x))
        return x

    op = Op("toy", lambda x: -x, (Impl("triton", fast),))
    with pytest.warns(RuntimeWarning, match="^toy: .*too little shared memory"):
        assert op(torch.ones(1)) == -1
    assert op(torch.ones(1)) == -1 and asked == ["backward"], "it is not tried again"


def test_a_backward_is_built_once_for_rows_that_16_divides_and_once_for_others(monkeypatch):
    """Triton compiles a kernel for each of the two."""
    built = []
    monkeypatch.setattr(register, "build_once", lambda key, run: built.append(key))
    with using("triton"):
        for rows in (16, 5, 32, 7):
            rms_norm(torch.ones(1, rows, 8, device=DEVICE, requires_grad=True), torch.ones(8, device=DEVICE))
    assert built[0] == built[2] != built[1] == built[3]


@pytest.mark.parametrize("message", ["PassManager::run failed", "Failed to find C compiler"])
def test_a_compiler_that_fails_is_fallen_back_from_and_a_crash_of_the_device_is_not(message):
    def kernel(error):
        return type("Kernel", (), {"__name__": "forward", "__getitem__": lambda self, grid: raises(error)})()

    def raises(error):
        raise error

    with pytest.raises(KernelBuildError, match=f"^forward: RuntimeError: {message}"):
        launch.launch(kernel(RuntimeError(message)), (1,), torch.ones(1))
    with pytest.raises(RuntimeError, match="^Triton Error .CUDA.: an illegal memory access"):
        launch.launch(kernel(RuntimeError("Triton Error [CUDA]: an illegal memory access")), (1,), torch.ones(1))


def test_while_one_thread_builds_the_others_launch():
    class Kernel:
        __name__ = "forward"

        def __getitem__(self, grid):
            return lambda *args, **options: ran.append(threading.get_ident())

    ran, built = [], []
    with launch.launching(lambda *call: built.append(threading.get_ident())):
        other = threading.Thread(target=launch.launch, args=(Kernel(), (1,), torch.ones(1)))
        other.start()
        other.join()
        launch.launch(Kernel(), (1,), torch.ones(1))
    assert ran == [other.ident] and built == [threading.get_ident()]


def test_an_empty_call_launches_nothing():
    launch.launch(None, (0, 3), torch.ones(0))
