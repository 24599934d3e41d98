"""Choosing an implementation, forcing one, and hearing which one ran."""

import importlib.util
import runpy

import pytest
import torch

import gsm_kernels
from gsm_kernels import Impl, KernelBuildError, Op, listening, using
from gsm_kernels.device import describe


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
    with using("triton"), pytest.raises(RuntimeError, match="toy: cannot run as 'triton': needs bfloat16"):
        toy(needs_bfloat16)(torch.ones(2))


def test_an_operation_without_a_kernel_says_so():
    op = Op("toy", double)
    assert op.explain() == ("reference", "no Triton kernel yet")
    with using("triton"):
        assert op.explain() == ("none", "toy: cannot run as 'triton': no Triton kernel yet; set GSM_KERNELS=auto")
        with pytest.raises(RuntimeError, match="toy: cannot run as 'triton': no Triton kernel yet"):
            op(torch.ones(2))


def test_explain_gives_the_machine_s_reason():
    assert toy(missing=lambda: "needs a GPU").explain() == ("reference", "triton: needs a GPU")
    assert toy().explain() == ("triton", "first choice on this machine")


def test_an_unknown_choice_is_named():
    with (
        pytest.raises(ValueError, match="'fast' is no implementation; choose one of auto, reference, triton, "),
        using("fast"),
    ):
        pass


def test_a_kernel_that_cannot_be_built_is_given_up_once_and_loudly():
    tries = []

    def unbuildable(x):
        tries.append(x)
        raise KernelBuildError("no such register")

    op = toy(fn=unbuildable)
    with pytest.warns(RuntimeWarning, match="toy: the triton kernel could not be built .* no such register"):
        assert torch.equal(op(torch.ones(2)), 2 * torch.ones(2))
    op(torch.ones(2))
    assert len(tries) == 1 and op.explain()[0] == "reference" and "no such register" in op.explain()[1]
    with using("triton"), pytest.raises(RuntimeError, match="no such register"):
        op(torch.ones(2))


def test_a_forced_kernel_that_cannot_be_built_does_not_fall_back():
    def unbuildable(x):
        raise KernelBuildError("no such register")

    with using("triton"), pytest.raises(RuntimeError, match="toy: cannot run as 'triton': .*no such register"):
        toy(fn=unbuildable)(torch.ones(2))


@pytest.mark.parametrize("choice", ["auto", "reference"])
def test_either_branch_compiles_into_one_graph(choice):
    op, x = toy(), torch.ones(2)
    torch.compiler.reset()
    with using(choice), listening() as heard:
        out = torch.compile(lambda x: op(x) + 1, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(out, 2 * x + 1)
    assert heard == [("toy", "triton" if choice == "auto" else "reference")]


def test_help_shows_the_formula():
    assert "sum_j weight_tj relu(query_tj . key_f)" in gsm_kernels.index_top_k.__doc__


def test_the_table_names_every_operation_and_the_machine(capsys):
    runpy.run_module("gsm_kernels", run_name="__main__")
    printed = capsys.readouterr().out
    assert torch.__version__ in printed and describe().split(",")[0] in printed
    for op in gsm_kernels.OPS:
        assert op.name in printed


def test_an_unknown_environment_value_is_refused_at_import(monkeypatch):
    monkeypatch.setenv("GSM_KERNELS", "cuda")
    spec = importlib.util.find_spec("gsm_kernels.dispatch")
    with pytest.raises(ValueError, match="GSM_KERNELS: 'cuda' is no implementation"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
