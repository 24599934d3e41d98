"""Arguments that operations and their implementations refuse, and the words of each reason that matter."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import calls
import pytest
import torch
from calls import cast, every_call
from check import to_device

import gsm_kernels
from gsm.layers.grouped_linear import _unfit_for_grouped_mm
from gsm.layers.operations import OPS
from gsm_kernels import using
from gsm_kernels.attend_range import xformers
from gsm_kernels.attend_range.reference import Inputs as Ranges
from gsm_kernels.cpu import native
from gsm_kernels.device import unfit_for_package
from gsm_kernels.rms_norm.triton import WIDEST

ZERO = torch.zeros
KEYS = ("key_BFGC", "value_BFGC")
BAD = [  # operation, what is changed in its ordinary call, words
    ("attend", {"width": 0}, "width", "at least 1", "got 0"),
    ("attend", {"window_BEC": ZERO(2, 3, 32)}, "window_BEC", "E = 3", "R = 11"),
    ("attend", {"sink_H": ZERO(3)}, "sink_H", "H = 4 as in query_BRHC", "got H = 3"),
    ("attend", {"bank_BFC": ZERO(2, 6)}, "bank_BFC", "3 dimensions"),
    ("attend", {"cos_BRP": ZERO(2, 11, 17), "sin_BRP": ZERO(2, 11, 17)}, "C = 32", "P = 17"),
    ("attend_range", {"width": 0}, "width", "at least 1", "got 0"),
    ("attend_range", dict.fromkeys(KEYS, ZERO(2, 17, 3, 8)), "key and value heads", "divide", "got 3 and 4"),
    ("attend_range", {"value_BFGC": ZERO(2, 16, 2, 8)}, "got F = 16", "F = 17 as in key_BFGC"),
    ("attend_range", {**dict.fromkeys(KEYS, ZERO(2, 6, 2, 8)), "width": 4}, "F = 6"),
    ("index_top_k", {"k": 0}, "k and block", "at least 1", "got 0 and 8"),
    ("mhc_boundary", {"phi": ZERO(5, 24)}, "4 streams", "(24, 24)"),
    ("rms_norm", {"weight": torch.ones(3)}, "(3,)", "(2, 5, 8)"),
    ("rms_norm", {"cos_BRP": ZERO(2, 5, 3)}, "cos and sin"),
    ("rms_norm", {"cos_BRP": ZERO(2, 4, 3), "sin_BRP": ZERO(2, 4, 3)}, "(2, 5, 8)", "(2, 4, 3)"),
    ("rotate", {"cos_BRP": ZERO(2, 5, 5), "sin_BRP": ZERO(2, 5, 5)}, "C = 8", "P = 5"),
    ("rotate", {"x": ZERO(2, 5)}, "(2, 5)", "[B,R,(H,)C]"),
]


@pytest.mark.parametrize(("op", "change", "words"), [(op, change, words) for op, change, *words in BAD])
def test_shapes_and_numbers_that_do_not_fit_are_named(op, change, words):
    with pytest.raises(ValueError) as error:
        getattr(gsm_kernels, op)(**every_call()[op] | change)
    assert all(word in str(error.value) for word in words), error.value


def two_halves() -> dict:
    call = calls.logits()
    return call | {"hidden_ND": call["hidden_ND"].half(), "weight_VD": call["weight_VD"].bfloat16()}


NOT_FOR = [  # operation, forced implementation, call in float32, words
    ("attend_band", "triton", lambda: calls.band(channels=8, pairs=2), "16, 32, 64 or 128 channels", "got 8"),
    ("attend_band", "triton", lambda: calls.band(channels=256), "16, 32, 64 or 128 channels", "got 256"),
    ("attend_band", "triton", lambda: calls.band(heads=65), "1 to 64 heads", "got 65"),
    ("indexer_kl", "triton", lambda: calls.indexer(channels=160), "even width up to 128", "width 160"),
    ("mhc_boundary", "triton", lambda: calls.hyper_connection(streams=3), "1, 2, 4, 8 streams", "got 3"),
    ("mhc_boundary", "triton", lambda: calls.hyper_connection(rounds=33), "at most 32 rounds"),
    ("mhc_boundary", "numba", lambda: calls.hyper_connection(streams=2), "made for 4 streams", "got 2"),
    ("rms_norm", "triton", lambda: calls.norm(2, WIDEST + 1), f"at most {WIDEST} numbers", f"got {WIDEST + 1}"),
    ("rotate", "triton", lambda: calls.turned(1, 2, WIDEST + 2, pairs=1), f"at most {WIDEST} numbers"),
    ("linear_cross_entropy", "triton", two_halves, "one half-precision type", "bfloat16 and float16"),
    ("index_top_k", "triton", lambda: calls.selection(ratio=1, k=20_000), "got k = 20000"),
]


@pytest.mark.parametrize(
    ("op", "name", "make", "words"), [(op, name, make, words) for op, name, make, *words in NOT_FOR]
)
def test_a_forced_implementation_refuses_the_calls_that_it_is_not_made_for(op, name, make, words):
    if name == "numba" and native.missing():
        pytest.skip(str(native.missing()))
    call = make() if op == "linear_cross_entropy" else cast(make(), torch.float32)
    with using(name), pytest.raises(RuntimeError) as error:
        getattr(gsm_kernels, op)(**to_device(call))
    assert all(word in str(error.value) for word in (f"{op}: cannot run as '{name}'", *words)), error.value


@pytest.mark.parametrize(("op", "options"), [("score_slots", {}), ("indexer_kl", {"dense": False})])
def test_the_kernels_have_no_gradients_for_more_index_heads_than_they_are_right_for(op, options):
    """Compilers have got the product wrong that 64 heads would take (fla-org/flash-linear-attention#640)."""
    make = calls.scoring if op == "score_slots" else calls.indexer
    for heads, learning, words in ((33, True, "at most 32 index heads, got 33"), (32, True, None), (33, False, None)):
        call = to_device(cast(make(heads=heads, rows=2, entries=4, batch=1), torch.float32)) | options
        for name in (name for name in call if name.endswith(calls.SEARCH)):
            call[name].requires_grad_(learning)
        with using("triton"), pytest.raises(RuntimeError, match=words) if words else contextlib.nullcontext():
            assert getattr(gsm_kernels, op).choose(**call).name == "triton"


FAST = [(op, impl.name) for op in OPS for impl in op.fast if impl.name in ("triton", "numba") and not impl.narrow]


@pytest.mark.parametrize(("op", "name"), FAST, ids=lambda x: getattr(x, "name", x))
def test_float64_is_for_the_reference(op, name):
    if name == "numba" and native.missing():
        pytest.skip(str(native.missing()))
    call = to_device(every_call()[op.name])
    assert op.choose(**call).name not in ("triton", "numba")
    with using(name), pytest.raises(RuntimeError, match=f"^{op.name}: .*{name}.*float64"):
        op(**call)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("op", [op for op, name in FAST if name == "triton"], ids=lambda op: op.name)
def test_nothing_chooses_the_interpreter_by_itself(op):
    assert op.choose(**cast(every_call()[op.name], torch.float32)).name != "triton"
    assert "only with GSM_KERNELS=triton" in gsm_kernels.explain()[op.name]


PACKAGES = [(op, impl.name) for op in OPS for impl in op.fast if impl.name in ("fla", "xformers")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what is missing without a GPU")
@pytest.mark.parametrize(("op", "name"), PACKAGES, ids=lambda x: getattr(x, "name", x))
def test_a_package_of_gpu_kernels_is_refused_with_its_reason(op, name):
    with using(name), pytest.raises(RuntimeError, match=f"^{op.name}: .*{name} runs on NVIDIA"):
        op(**every_call()[op.name])
    assert f"{name} runs on NVIDIA GPUs" in op.explain()[1]
    impl = next(impl for impl in op.fast if impl.name == name)
    assert impl.refuses(op.inputs(**every_call()[op.name])) == "needs tensors on a GPU, got cpu"


def test_packages_take_one_half_type():
    half, full = (
        SimpleNamespace(device=torch.device("cuda"), dtype=dtype) for dtype in (torch.bfloat16, torch.float32)
    )
    refusals: list[Any] = [unfit_for_package(*x) for x in ((half, half, half), (half, full, full), (full, full, full))]
    assert refusals[0] is None
    assert "all in float16, got bfloat16, float32" in refusals[1] and "got float32" in refusals[2]
    call = calls.ranges(rows=17, channels=12, padding=0)
    meta: dict[str, Any] = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    assert "got meta" in str(xformers.refuses(Ranges(**meta)))


@pytest.mark.parametrize(
    ("width", "dtype", "words"),
    [
        (16, torch.float32, "needs bfloat16"),
        (12, torch.bfloat16, "multiples of 8, got 12 and 8"),
        (16, torch.bfloat16, None),
    ],
)
def test_pytorch_s_grouped_product_refuses_what_it_cannot_load(width, dtype, words, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    reason = _unfit_for_grouped_mm(ZERO(3, width, dtype=dtype), ZERO(4, 8, width, dtype=dtype), ZERO(4).int())
    assert reason is None if words is None else words in reason
