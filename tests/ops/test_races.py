"""Kernels return the same bits every time, as no kernel with a race would.

On a GPU the calls have a model's sizes and bfloat16, whose products are asynchronous and read copies that are
asynchronous too. Without one, small calls run twice in Triton's interpreter.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import calls
import pytest
import torch
from calls import cast
from check import ASSEMBLERS, DEVICE, assembled_by, run_by, to_device
from small import mostly_nightly

import gsm_kernels
from gsm_benchmarks import workloads
from gsm_benchmarks.workloads import Case
from gsm_kernels import device

REPEATS = 20
BY_ROW = ("query_BRHC", "position_BR", "cos_BRP", "sin_BRP", "index_BRK")


def attend(real: bool, heads: int) -> Case:
    if real:
        return workloads.attend("", 4, 4096, heads=heads)
    return workloads.attend("", 1, 6, heads=heads, channels=32, width=4, picks=4, angles=4)


def attend_band(real: bool, heads: int) -> Case:
    if real:
        return workloads.attend_band("", 4, 4096, heads=heads)
    return workloads.attend_band("", 1, 6, heads=heads, channels=32, width=4, angles=4)


def indexer_kl(real: bool, heads: int) -> Case:
    return workloads.indexer_kl("", 4, 4096, heads) if real else workloads.indexer_kl("", 1, 6, heads, 32)


def scoring(real: bool) -> dict:
    return calls.scoring(rows=4096, entries=4096, heads=8, width=64, k=128) if real else calls.scoring()


def pool(real: bool) -> dict:
    return calls.pool(rows=4096, entries=4096, heads=8, width=64, blocks=512, block=2) if real else calls.pool()


MADE: dict[str, Callable[[bool], Case | dict]] = {
    **{f"attend, {heads} heads": lambda real, heads=heads: attend(real, heads) for heads in (32, 64)},
    **{f"attend_band, {heads} heads": lambda real, heads=heads: attend_band(real, heads) for heads in (32, 64)},
    **{f"indexer_kl, {heads} heads": lambda real, heads=heads: indexer_kl(real, heads) for heads in (32, 64)},
    "index_top_k": lambda real: workloads.index_top_k("", 4, 4096) if real else calls.selection(),
    "index_top_k, 64K": lambda real: workloads.index_top_k("", 1, 65536) if real else calls.selection(rows=1),
    "candidate_pool": pool,
    "score_slots": scoring,
    "mhc_boundary": lambda real: workloads.mhc_boundary("", *((16384,) if real else (17, 16))),
    "rms_norm": lambda real: workloads.rms_norm("", *((16384,) if real else (4, 16))),
    "swiglu": lambda real: workloads.swiglu("", *((16384,) if real else (4, 16))),
    "linear_cross_entropy": lambda real: workloads.linear_cross_entropy("", *((16384,) if real else (4, 16, 40))),
}
each = pytest.mark.parametrize("name", MADE)


def made(name: str, real: bool) -> dict:
    """Return the arguments of a call on the device that runs kernels."""
    dtype, case = torch.bfloat16 if real else torch.float32, MADE[name](real)
    return case.make(torch.device(DEVICE), dtype) if isinstance(case, Case) else to_device(cast(case, dtype))


def assert_repeats(op: str, call: dict, repeats: int, direction: str = "both") -> None:
    """All outputs and gradients are equal to the bit; every second time, while another stream multiplies matrices."""
    direction = "forward" if op in ("index_top_k", "candidate_pool") else direction
    run = workloads.bound(run_by("triton", getattr(gsm_kernels, op)), call, direction)
    first, other = run(), torch.cuda.Stream() if DEVICE == "cuda" else None
    load = torch.ones(4096, 4096, device=DEVICE, dtype=torch.bfloat16) if other else None
    for repeat in range(1, repeats):
        if load is not None and repeat % 2:
            with torch.cuda.stream(other):
                for _ in range(10):
                    torch.mm(load, load)
        again = run()
        different = [key for key, x in first.items() if not torch.equal(x, again[key])]
        assert not different, f"repeat {repeat}: other bits of {', '.join(different)}"


@pytest.mark.gpu
@each
def test_twenty_repeats_at_a_model_s_size_are_equal(name):
    assert_repeats(name.partition(",")[0], made(name, real=True), REPEATS)


@pytest.mark.parametrize("name", mostly_nightly(MADE, *(name for name in MADE if "64" not in name)))
def test_two_repeats_are_equal(name):
    assert_repeats(name.partition(",")[0], made(name, real=False), 2)


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("real", [pytest.param(True, marks=pytest.mark.gpu), False])
def test_repeats_of_a_decoded_token_are_equal(real, heads):
    call = attend(real, heads).make(torch.device(DEVICE), torch.bfloat16 if real else torch.float32)
    last = {key: x[:, -1:] if key in BY_ROW else x for key, x in call.items()}
    assert_repeats("attend", last, REPEATS if real else 2, "forward")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("assembler", ASSEMBLERS)
@pytest.mark.parametrize(
    "real", [pytest.param(True, marks=pytest.mark.gpu), pytest.param(False, marks=pytest.mark.slow)]
)
def test_repeats_are_equal_by_each_assembler(real, assembler, tmp_path):
    """In a process of its own, since Triton keeps what it has assembled. Without a GPU the process alone is tested."""
    cuda = int((torch.version.cuda or "0").partition(".")[0])
    if real and assembler == device.ASSEMBLER and cuda < 13:
        pytest.skip(f"the driver may not run what {assembler} makes, since PyTorch has CUDA {torch.version.cuda}")
    chosen = ("-m", "gpu", "-k", "twenty or decoded") if real else ("-m", "not gpu", "-k", "two and swiglu")
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-q", __file__, *chosen]
    done = subprocess.run(command, env=assembled_by(assembler, tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert not real or any(tmp_path.rglob("*.cubin"))


def test_a_result_that_changes_is_seen(monkeypatch):
    results = iter((torch.zeros(2), torch.tensor([0.0, 1e-7])))
    monkeypatch.setattr(workloads, "bound", lambda *_: lambda: {"out": next(results)})
    with pytest.raises(AssertionError, match="repeat 1: other bits of out"):
        assert_repeats("swiglu", {}, 2)
