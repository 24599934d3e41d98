"""What the Triton kernels of every operation must bear, on its ordinary call; each has more in a test file of its own.

They run on a GPU where there is one, else in Triton's interpreter.
"""

import threading

import pytest
import torch
from calls import cast, every_call, gradients
from torch.utils.checkpoint import checkpoint
from triton_check import assert_agrees, assert_as_good_as_eager, to_device, with_triton

import gsm_kernels
from gsm_kernels import OPS, Impl, KernelBuildError, Op, launch, using
from gsm_kernels.testing import assert_close

KERNELS = [op for op in OPS if any(impl.name == "triton" for impl in op.fast)]
CALLS = every_call()
each = pytest.mark.parametrize("op", KERNELS, ids=lambda op: op.name)


@each
def test_outputs_and_gradients_are_the_reference_s(op):
    assert_agrees(op, CALLS[op.name])


@each
def test_their_gradients_are_the_same_where_activations_are_recomputed(op):
    """A backward that looked at what it had saved twice was an error there alone."""
    call, run = to_device(cast(CALLS[op.name], torch.float32)), with_triton(op)
    _, expected = gradients(run, call)
    _, grads = gradients(lambda **call: checkpoint(lambda: run(**call), use_reentrant=False), call)
    for name, wanted in expected.items():
        assert wanted is None or torch.equal(grads[name], wanted), f"gradient of {name}"


@each
def test_float64_is_refused_with_a_reason(op):
    with using("triton"), pytest.raises(RuntimeError, match=f"{op.name}: cannot run as 'triton': .*float64"):
        op(**to_device(CALLS[op.name]))


@each
def test_nothing_chooses_the_interpreter_by_itself(op):
    if not torch.cuda.is_available():
        assert op.choose(**cast(CALLS[op.name], torch.float32)).name != "triton"
        assert "asked for by name" in gsm_kernels.explain()[op.name]


# torch's own tracer instantiates autograd.Function, and torch warns about that.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.slow
@each
def test_they_compile_into_one_graph(op):
    call = to_device(cast(CALLS[op.name], torch.float32))
    torch.compiler.reset()
    compiled = torch.compile(lambda **call: op(**call), fullgraph=True, backend="aot_eager")
    with using("triton"):
        out, grads = gradients(compiled, call)
    expected, expected_grads = gradients(with_triton(op), call)
    for got, wanted in zip(out, expected, strict=True):
        if wanted.is_floating_point():
            assert_close(got, wanted)
        else:
            assert torch.equal(got, wanted)
    for name, wanted in expected_grads.items():
        if wanted is not None:
            assert_close(grads[name], wanted, name=f"gradient of {name}", gradient=True)


@pytest.mark.gpu
@each
def test_they_are_deterministic(op):
    call = to_device(cast(CALLS[op.name], torch.float32))
    first, second = (gradients(with_triton(op), call) for _ in range(2))
    for one, other in zip(first[0], second[0], strict=True):
        assert torch.equal(one, other)
    for name, one in first[1].items():
        assert one is None or torch.equal(one, second[1][name]), f"gradient of {name}"


@pytest.mark.gpu
@each
def test_in_bfloat16_they_err_no_more_than_eager(op):
    assert_as_good_as_eager(op, CALLS[op.name])


def test_a_kernel_that_cannot_be_built_is_an_error_that_names_it():
    triton = pytest.importorskip("triton")

    class Broken:
        __name__ = "forward"

        def __getitem__(self, grid):
            raise triton.TritonError("no such instruction")

    with pytest.raises(KernelBuildError, match="^forward: TritonError: no such instruction; GSM_KERNELS=reference"):
        launch.launch(Broken(), (1,), torch.ones(1))


def test_the_kernels_of_backward_are_built_before_forward_runs(monkeypatch):
    """A failure in backward comes too late to fall back; so does one in the middle of a step."""
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "_built", set())
    asked = []

    def build(kernel, grid, args, options):
        asked.append(kernel)
        raise KernelBuildError("too little shared memory")

    monkeypatch.setattr(launch, "_build", build)

    def fast(x):
        launch.build_once("toy", lambda: launch.launch("backward", (1,), x))
        return x

    op = Op("toy", lambda x: -x, (Impl("triton", fast),))
    with pytest.warns(RuntimeWarning, match="toy: the triton kernel could not be built .* too little shared memory"):
        assert op(torch.ones(1)) == -1
    assert op(torch.ones(1)) == -1 and asked == ["backward"], "it is not tried again"


@pytest.mark.parametrize("message", ["PassManager::run failed", "Failed to find C compiler"])
def test_a_compiler_that_fails_is_fallen_back_from_and_a_crash_of_the_device_is_not(message):
    def kernel(error):
        return type("Kernel", (), {"__name__": "forward", "__getitem__": lambda self, grid: raises(error)})()

    def raises(error):
        raise error

    with pytest.raises(KernelBuildError, match=f"^forward: RuntimeError: {message}; GSM_KERNELS=reference"):
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
