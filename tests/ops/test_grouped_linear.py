"""Grouped products: both forms against one product at a time, empty groups included."""

import pytest
import torch
from calls import gradients
from closeness import assert_close
from oracles import naive_grouped, normal
from torch.utils.flop_counter import FlopCounterMode

from gsm.layers.grouped_linear import _grouped_mm, grouped_linear
from gsm_kernels import using
from gsm_kernels.device import ahead_of_a_graph

SIZES = [(3, 0, 5, 1), (0, 0, 9, 0), (9, 0, 0, 0), (0, 0, 0, 9), (2, 2, 2, 3)]


def call(sizes=SIZES[0], dtype=torch.float64, device="cpu") -> dict:
    tensors = {"x_MD": normal(sum(sizes), 16, dtype=dtype), "weight_END": normal(4, 8, 16, seed=1, dtype=dtype)}
    ends = torch.tensor(sizes).cumsum(0).int()
    return {name: x.to(device) for name, x in {**tensors, "end_E": ends}.items()}


def compare(function, given: dict) -> None:
    """Output and gradients against the naive form in float64."""
    wide = {name: x.cpu() if x.dtype == torch.int32 else x.cpu().double() for name, x in given.items()}
    (out,), grads = gradients(function, given)
    (want,), want_grads = gradients(naive_grouped, wide)
    assert_close(out.cpu(), want)
    for name, grad in want_grads.items():
        assert_close(grads[name].cpu(), grad, name=f"gradient of {name}", gradient=True)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_in_a_graph_nobody_asks_for_the_sizes(sizes, monkeypatch):
    given = call(sizes)
    want = naive_grouped(**given)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: pytest.fail("a capture cannot wait for the device"))
    with ahead_of_a_graph(), using("reference"):
        assert_close(grouped_linear(**given), want)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pytorch_s_grouped_product_agrees(dtype, sizes):
    compare(_grouped_mm, call(sizes, dtype))  # which has a form for a CPU, though it is not chosen there


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [*SIZES, (100, 0, 37, 300)], ids=str)
def test_it_agrees_on_a_gpu(sizes):
    with using("grouped_mm"):
        compare(grouped_linear, call(sizes, torch.bfloat16, "cuda"))


def test_products_are_counted_where_pytorch_counts():
    with FlopCounterMode(display=False) as counter:
        out = grouped_linear(**{k: v.requires_grad_(v.is_floating_point()) for k, v in call().items()})
        out.sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 9 * 8 * 16
