"""The RMSNorm kernels: any rows and widths, mixed dtypes, and a weight gradient summed by several programs."""

import pytest
import torch
from calls import gradients
from check import DEVICE, assert_agrees, with_reference, with_triton
from closeness import assert_close, relative_error
from oracles import normal

from gsm_kernels import rms_norm, using
from gsm_kernels.rms_norm import triton


def example(*shape: int, eps: float = 1e-6) -> dict:
    return {"x": normal(*shape), "weight": normal(shape[-1], seed=1), "eps": eps}


@pytest.mark.parametrize("programs", [1, 2, 3])
def test_each_program_sums_the_weight_s_gradient_over_several_tiles(programs, monkeypatch):
    monkeypatch.setattr(triton, "PROGRAMS", programs)
    rows, _ = triton.tile(500)
    assert_agrees(rms_norm, example(6 * rows + 1, 500))


def test_a_float32_weight_scales_half_precision_rows():
    x, weight = normal(5, 96).half(), normal(96, seed=1).float()
    call = {"x": x.to(DEVICE), "weight": weight.to(DEVICE)}
    (out,), grads = gradients(with_triton(rms_norm), call)
    (expected,), expected_grads = gradients(with_reference(rms_norm), {k: v.double() for k, v in call.items()})
    assert (out.dtype, grads["x"].dtype, grads["weight"].dtype) == (torch.float16, torch.float16, torch.float32)
    assert_close(out, expected)
    assert_close(grads["x"], expected_grads["x"], gradient=True)
    assert relative_error(grads["weight"], expected_grads["weight"]) < 1e-3  # it arrives through a rounded output


@pytest.mark.parametrize("width", [1, 64, 100, 512, 2048, 8192])
def test_a_tile_fills_its_threads(width):
    rows, sizes = triton.tile(width)
    columns, warps = sizes["BLOCK"], sizes["num_warps"]
    assert columns >= width and columns // 2 < width
    assert rows * columns == 16 * 32 * warps, "16 numbers a thread"


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31():
    width = 2048
    x = torch.ones((1 << 31) // width + 3, width, dtype=torch.bfloat16, device=DEVICE)
    x[-2:] = normal(2, width).to(x)
    call = {"x": x, "weight": torch.ones(width, device=DEVICE)}
    with using("triton"):
        out = rms_norm(**call)
    assert_close(out[-2:], rms_norm(x[-2:].double(), call["weight"].double()))
