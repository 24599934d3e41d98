"""What a user would take instead of an operation: plain PyTorch, compiled, and other people's kernels where installed.

A peer is a function of the operation's arguments by name that returns what the operation returns. Whoever cannot take
part raises `Absent` with the reason, when it is made or when it first runs; results are compared before times are.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import gsm_kernels

from ..device import absent
from ..dispatch import Op, using
from . import attention_peers
from .peer import Absent, compiled
from .workloads import Call

Peer = Callable[..., Any]
Maker = Callable[[Call], Peer]

IN_CHUNKS, FEW_ROWS = ("attend", "attend_band", "index_top_k", "indexer_kl"), 16384
LIGER = "liger_kernel.transformers.functional"


def peers_of(op: str, call: Call) -> dict[str, Maker]:
    """Those of an operation on the device of a call; what they need made beforehand, such as masks, is made there."""
    on_gpu = next(x for x in call.values() if isinstance(x, Tensor)).is_cuda
    if not on_gpu:
        return dict(attention_peers.ON_A_CPU) if op in ("attend", "attend_band") else {}
    return {"eager": lambda call: eager(op), "compile": lambda call: compile_op(op, call), **_OTHERS.get(op, {})}


def eager(op: str) -> Peer:
    """The reference of an operation."""
    operation = _op(op)

    def run(**call: Any) -> Any:
        with using("reference"):
            return operation(**call)

    return run


def compile_op(op: str, call: Call) -> Peer:
    """`torch.compile` of the plainest form that there is, else of the reference."""
    rows = next(x for x in call.values() if isinstance(x, Tensor)).shape[:2].numel()
    if op in IN_CHUNKS and rows > FEW_ROWS:
        raise Absent("its reference is a loop over chunks, and takes minutes to compile as one graph")
    return compiled(_PLAIN.get(op, _op(op).reference))


def _op(name: str) -> Op:
    return getattr(gsm_kernels, name)


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """As one writes it."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def plain_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """As one writes it."""
    return (F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)).to(gate.dtype)


def plain_cross_entropy(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor) -> Tensor:
    """With all logits in memory."""
    return F.cross_entropy(F.linear(hidden_ND, weight_VD).float(), target_N)


def liger_rms_norm(call: Call) -> Peer:
    """Liger's, with the weight in the dtype that it wants."""
    norm = _function("liger_kernel", LIGER, "liger_rms_norm")
    return lambda x, weight: norm(x, weight.to(x.dtype), 1e-6)


def liger_swiglu(call: Call) -> Peer:
    """Liger's, which clamps nothing; random numbers of this size do not reach the limit. Its backward writes the
    gradients over its inputs, so it gets copies of its own where there will be one; they are made before it."""
    swiglu = _function("liger_kernel", LIGER, "liger_swiglu")

    def run(gate: Tensor, up: Tensor, limit: float) -> Tensor:
        return swiglu(gate.clone(), up.clone()) if torch.is_grad_enabled() else swiglu(gate, up)

    return run


def liger_mhc_boundary(call: Call) -> Peer:
    """Liger's three functions: coefficients, streams past a site, and the mixture that the next site reads. Its matrix
    of a projection is the transpose of ours; as we do, it is rounded to the streams' dtype."""
    names = ("liger_mhc_coeffs", "liger_mhc_post_res", "liger_mhc_pre")
    coefficients, past, read = (_function("liger_kernel", LIGER, name) for name in names)

    def run(
        streams_BRXD: Tensor, update_BRD: Tensor, phi: Tensor, bias: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        dtype = streams_BRXD.dtype
        turned, alphas = phi.T.to(dtype, memory_format=torch.contiguous_format), scale.unbind()
        options = {"allow_fp32": dtype == torch.float32, "rms_eps": 1e-6, "pre_eps": 1e-6, "sinkhorn_eps": 1e-6}
        reading, writing, mixing = coefficients(streams_BRXD, turned, bias, *alphas, tmax=20, post_mult=2.0, **options)
        left = past(streams_BRXD, update_BRD, writing, mixing.mT.contiguous())
        return left, read(left, reading)

    return run


def liger_cross_entropy(call: Call) -> Peer:
    """Liger's fused head and loss."""
    loss = _function("liger_kernel", LIGER, "liger_fused_linear_cross_entropy")

    def run(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor) -> Tensor:
        result = loss(hidden_ND, weight_VD, target_N)
        return result if isinstance(result, Tensor) else result[0]

    return run


def fla_rms_norm(call: Call) -> Peer:
    """flash-linear-attention's, with the weight in its own dtype."""
    norm = _function("fla", "fla.modules.norm.layernorm", "rms_norm")
    return lambda x, weight: norm(x, weight, None, eps=1e-6)


def fla_swiglu(call: Call) -> Peer:
    """flash-linear-attention's, which clamps nothing."""
    swiglu = _function("fla", "fla.modules.activations", "swiglu")
    return lambda gate, up, limit: swiglu(gate, up)


def fla_cross_entropy(call: Call) -> Peer:
    """flash-linear-attention's head and loss, in eight chunks."""
    loss = _function("fla", "fla.modules.fused_linear_cross_entropy.ops", "fused_linear_cross_entropy_loss")
    return lambda hidden_ND, weight_VD, target_N: loss(hidden_ND, target_N, weight_VD)


def quack_rms_norm(call: Call) -> Peer:
    """QuACK's."""
    norm = _function("quack", "quack.rmsnorm", "rmsnorm")
    return lambda x, weight: norm(x, weight, eps=1e-6)


def quack_cross_entropy(call: Call) -> Peer:
    """QuACK's head and loss, chunk by chunk."""
    loss = _function("quack", "quack.linear_cross_entropy", "chunked_linear_cross_entropy")
    return lambda hidden_ND, weight_VD, target_N: loss(hidden_ND, weight_VD, target_N)


def _function(package: str, module: str, name: str) -> Callable[..., Any]:
    reason = absent(package, module)
    if reason is not None:
        raise Absent(reason)
    function = getattr(importlib.import_module(module), name, None)
    if function is None:
        raise Absent(f"this version of {package} has no {module}.{name}")
    return function


_PLAIN: Mapping[str, Callable[..., Any]] = {
    "rms_norm": plain_rms_norm,
    "swiglu": plain_swiglu,
    "linear_cross_entropy": plain_cross_entropy,
}
_OTHERS: Mapping[str, Mapping[str, Maker]] = {
    "attend": attention_peers.ON_A_GPU,
    "attend_band": {**attention_peers.ON_A_GPU, **attention_peers.BAND},
    "mhc_boundary": {"liger": liger_mhc_boundary},
    "rms_norm": {"liger": liger_rms_norm, "fla": fla_rms_norm, "quack": quack_rms_norm},
    "swiglu": {"liger": liger_swiglu, "fla": fla_swiglu},
    "linear_cross_entropy": {"liger": liger_cross_entropy, "fla": fla_cross_entropy, "quack": quack_cross_entropy},
}
