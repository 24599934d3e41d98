"""What the Triton kernels of every operation must bear, on its ordinary call; each has more in a test file of its own.

They run on a GPU where there is one, else in Triton's interpreter.
"""

import threading

import pytest
import torch

from gsm_kernels import launch


def test_a_kernel_that_cannot_be_built_is_an_error_that_names_it():
    triton = pytest.importorskip("triton")

    class Broken:
        __name__ = "forward"

        def __getitem__(self, grid):
            raise triton.TritonError("no such instruction")

    with pytest.raises(triton.TritonError, match="no such instruction") as raised:
        launch.launch(Broken(), (1,), torch.ones(1))
    assert "forward" in raised.value.__notes__[0] and "GSM_KERNELS=reference" in raised.value.__notes__[0]


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
