"""Choosing an implementation, forcing one, and hearing which one ran."""

import contextlib
import importlib.util
import os
import runpy
from typing import NamedTuple

import pytest
import torch
from calls import cast, every_call

import gsm_kernels
from gsm.layers.grouped_linear import grouped_linear
from gsm_kernels import Impl, Op, device, launch, listening, using
from gsm_kernels.attend_range import xformers
from gsm_kernels.device import describe
from gsm_kernels.dispatch import REMEMBERED


def double(x):
    return x * 2


def toy(refuses=lambda x: None, missing=lambda: None, fn=lambda x: x + x) -> Op:
    return Op("toy", double, (Impl("triton", fn, refuses, missing),))


def needs_bfloat16(x):
    return None if x.dtype == torch.bfloat16 else "needs bfloat16"


def test_the_first_that_does_not_refuse_runs():
    op = toy(needs_bfloat16)
    with listening() as heard:
        op(torch.ones(2))
        op(torch.ones(2, dtype=torch.bfloat16))
    assert heard == [("toy", "reference"), ("toy", "triton")]


def test_using_forces_an_implementation_and_gives_it_back():
    op = toy()
    with listening() as heard:
        with using("reference"):
            op(torch.ones(2))
        op(torch.ones(2))
    assert heard == [("toy", "reference"), ("toy", "triton")]


def test_a_forced_implementation_that_refuses_is_an_error_with_its_reason():
    with using("triton"), pytest.raises(RuntimeError, match="^toy: .*needs bfloat16"):
        toy(needs_bfloat16)(torch.ones(2))


def test_an_operation_without_a_kernel_says_so():
    op = Op("toy", double)
    assert op.explain() == ("reference", "no Triton kernel yet")
    with using("triton"):
        assert op.explain() == ("none", "toy: cannot run as 'triton': no Triton kernel yet; set GSM_KERNELS=auto")
        with pytest.raises(RuntimeError, match="^toy: "):
            op(torch.ones(2))


def test_explain_gives_the_machine_s_reason():
    assert toy(missing=lambda: "needs a GPU").explain() == ("reference", "triton: needs a GPU")
    assert toy().explain() == ("triton", "first choice on this machine")


def test_an_implementation_for_few_calls_takes_these_and_is_not_forced_on_others():
    narrow = Impl("numba", lambda x: x + x, needs_bfloat16, narrow="for toys alone")
    op = Op("toy", double, (narrow, Impl("sdpa", double)))
    assert op.explain() == ("sdpa", "numba: for toys alone")
    for choice, taken in (("auto", "numba"), ("numba", "numba"), ("sdpa", "sdpa"), ("reference", "reference")):
        with using(choice), listening() as heard:
            op(torch.ones(2))
            op(torch.ones(2, dtype=torch.bfloat16))
        other = "reference" if choice == "reference" else "sdpa"
        assert heard == [("toy", other), ("toy", taken)]


def test_an_unknown_choice_is_named():
    with (
        pytest.raises(ValueError, match="'fast'"),
        using("fast"),
    ):
        pass


def test_a_kernel_that_cannot_be_built_is_an_error_and_nothing_slower_runs_instead():
    def unbuildable(x):
        raise RuntimeError("no such register")

    with pytest.raises(RuntimeError, match="no such register"):
        toy(fn=unbuildable)(torch.ones(2))


@pytest.mark.parametrize("choice", ["auto", "reference"])
def test_either_branch_compiles_into_one_graph(choice):
    op, x = toy(), torch.ones(2)
    torch.compiler.reset()
    with using(choice), listening() as heard:
        out = torch.compile(lambda x: op(x) + 1, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(out, 2 * x + 1)
    assert heard == [("toy", "triton" if choice == "auto" else "reference")]


def test_the_same_shapes_and_numbers_are_checked_once_and_others_again():
    class Inputs(NamedTuple):
        x: torch.Tensor
        times: int = 2

    checked = []

    def check(inputs):
        checked.append((tuple(inputs.x.shape), inputs.times))
        if inputs.times < 1:
            raise ValueError(f"toy: times = {inputs.times}")

    op = Op("toy", lambda inputs: inputs.x * inputs.times, inputs=Inputs, check=check)
    for times in (2, 2, 3):
        op(torch.ones(2), times)
    op(torch.ones(3))
    assert checked == [((2,), 2), ((2,), 3), ((3,), 2)]
    for _ in range(2):
        with pytest.raises(ValueError, match="times = 0"):
            op(torch.ones(2), 0)
    for size in range(2 * REMEMBERED):
        op(torch.ones(size))
    assert len(op._checked) <= REMEMBERED


def test_help_shows_the_formula():
    assert "sum_j weight_tj relu(query_tj . key_f)" in str(gsm_kernels.index_top_k.__doc__)


def test_the_table_names_every_operation_and_the_machine(capsys):
    runpy.run_module("gsm_kernels", run_name="__main__")
    printed = capsys.readouterr().out
    assert torch.__version__ in printed and describe().split(",")[0] in printed and "\ntiles: " in printed
    for op in gsm_kernels.OPS:
        assert op.name in printed


@pytest.fixture
def gpu(monkeypatch):
    """PyTorch says that it sees a GPU of this compute capability; nothing may run on it."""

    def of(capability):
        monkeypatch.setattr(launch, "INTERPRETED", False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
        launch._machine.cache_clear()

    yield of
    launch._machine.cache_clear(), xformers._missing.cache_clear()


@pytest.mark.parametrize(
    ("capability", "runs", "tried", "advice"),
    [
        ((9, 0), "triton", "triton", None),
        ((8, 0), "reference", "triton", "this device has 8.0; GSM_KERNELS=triton tries it"),
        ((8, 9), "reference", "triton", "this device has 8.9; GSM_KERNELS=triton tries it"),
        ((10, 0), "reference", "triton", "this device has 10.0; GSM_KERNELS=triton tries it"),
        ((7, 5), "reference", "none", None),
    ],
)
def test_every_gpu_is_told_what_runs_why_and_how_to_try_triton(gpu, capsys, capability, runs, tried, advice):
    pytest.importorskip("triton")
    gpu(capability)
    runpy.run_module("gsm_kernels", run_name="__main__")
    printed, has = capsys.readouterr().out, ".".join(map(str, capability))
    assert f"a GPU, compute capability {has}" in printed
    assert gsm_kernels.rms_norm.explain()[0] == runs
    assert (f"made for compute capability 9.0, this device has {has}" in printed) == (runs == "reference")
    assert advice in printed if advice else "tries it" not in printed
    with using("triton"):
        assert gsm_kernels.rms_norm.explain()[0] == tried
    with using("sdpa"):
        assert gsm_kernels.rms_norm.explain()[0] == runs, "a name of another operation's forces nothing here"


def test_a_gpu_of_amds_is_not_taken_for_a_hopper_one(gpu, capsys, monkeypatch):
    """MI300 says that its compute capability is 9.4, and others of theirs 9.0."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    gpu((9, 0))
    runpy.run_module("gsm_kernels", run_name="__main__")
    printed = capsys.readouterr().out
    assert "runs on NVIDIA GPUs only, and this is an AMD GPU" in printed and "tries it" not in printed
    assert "torch._grouped_mm runs on NVIDIA GPUs only" in grouped_linear.explain()[1]
    for name in ("", "triton"):
        with using(name) if name else contextlib.nullcontext():
            assert gsm_kernels.rms_norm.explain()[0] != "triton"


@pytest.fixture
def triton(monkeypatch):
    """Let the installed Triton have this version."""

    def release(version):
        monkeypatch.setattr(device, "triton_version", lambda: version)
        monkeypatch.setattr(launch, "triton_version", lambda: version)
        device._absent.cache_clear()

    yield release
    device._absent.cache_clear()


@pytest.mark.parametrize(
    ("version", "right"), [("3.5.1", False), ("3.6.0+git1", False), ("3.7.1", True), ("3.10.0", True)]
)
def test_triton_without_the_fence_runs_on_no_hopper_gpu(gpu, triton, version, right):
    """The wgmma kernels of Triton before 3.7.1 may read shared memory before it is written."""
    gpu((9, 0)), triton(version)
    assert (gsm_kernels.attend.explain()[0] == "triton") == right
    for reason in (launch.missing(), launch.unready(), device.absent("fla")):
        assert right or "triton==3.7.1" in str(reason)
    with (
        using("triton"),
        contextlib.nullcontext() if right else pytest.warns(RuntimeWarning, match="Forced"),
    ):
        assert gsm_kernels.attend.explain()[0] == "triton", "forced, it may be timed"
        assert right or "triton==3.7.1" in str(launch.unready()), "and trains nothing"
    gpu((8, 0))
    with using("triton"):
        assert launch.missing() is None, "other GPUs have no wgmma"


@pytest.mark.parametrize(("cuda", "newer"), [("13.0", True), ("12.8", False), (None, False)])
def test_the_assembler_of_cuda_13_is_taken_where_pytorch_shows_that_the_driver_runs_it(
    gpu, triton, monkeypatch, cuda, newer
):
    monkeypatch.setenv("TRITON_PTXAS_PATH", "")
    monkeypatch.delenv("TRITON_PTXAS_PATH")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    gpu((9, 0)), triton("3.7.1")
    assert launch.missing() is None
    assert os.environ.get("TRITON_PTXAS_PATH", "").endswith(device.ASSEMBLER) == newer
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/mine")
    gpu((9, 0))
    assert launch.missing() is None and os.environ["TRITON_PTXAS_PATH"] == "/mine"


@pytest.mark.parametrize("op", ["attend", "attend_band", "index_top_k", "candidate_pool", "indexer_kl"])
def test_on_a_gpu_float32_is_multiplied_by_pytorch(gpu, triton, op):
    gpu((9, 0)), triton("3.7.1")
    chosen = {}
    for dtype in (torch.float32, torch.bfloat16):
        call = {k: x.to("meta") if isinstance(x, torch.Tensor) else x for k, x in cast(every_call()[op], dtype).items()}
        chosen[dtype] = getattr(gsm_kernels, op).choose(**call).name
        with using("triton"):
            assert getattr(gsm_kernels, op).choose(**call).name == "triton", "a forced choice stays one"
    assert chosen == {torch.float32: "reference", torch.bfloat16: "triton"}


def test_training_on_hopper_needs_a_c_compiler(gpu, triton, monkeypatch):
    """Triton cannot be loaded without one, and PyTorch's operations would train in its place, several times slower."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(launch.shutil, "which", lambda name: None)
    gpu((9, 0)), triton("3.7.1")
    assert "finds no C compiler" in str(launch.unready())
    with using("reference"):
        assert launch.unready() is None
    monkeypatch.setenv("CC", "gcc-12")
    assert launch.unready() is None
    monkeypatch.delenv("CC")
    gpu((8, 0))
    assert launch.unready() is None


def test_an_unknown_environment_value_is_refused_at_import(monkeypatch):
    monkeypatch.setenv("GSM_KERNELS", "cuda")
    spec = importlib.util.find_spec("gsm_kernels.dispatch")
    assert spec is not None and spec.loader is not None
    with pytest.raises(ValueError, match="^GSM_KERNELS .*'cuda'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
