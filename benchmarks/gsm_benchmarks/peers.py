"""Plain PyTorch, compiled, beside an operation, and PyTorch's own attention.

A peer is a function with the arguments and the results of the operation. A peer that cannot take part raises `Absent`
with the reason, when it is made or when it first runs. Results are compared before times are.

The peers of `attend` and `attend_band` (a dense mask, fused attention under a mask, FlexAttention) get the rotations
and the sink as well. On a GPU their own arithmetic around the kernel is compiled. G columns: the window's stream, then
the bank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as flex_attention_module

import gsm_kernels
from gsm_kernels.dispatch import Op, using
from gsm_kernels.rotate.reference import rotate

from .workloads import Call

Peer = Callable[..., Any]
Maker = Callable[[Call], Peer]

IN_CHUNKS, FEW_ROWS = ("attend", "attend_band", "index_top_k", "indexer_kl"), 16384
MOST_PAIRS = 1 << 29  # pairs of rows and columns in a mask that is a tensor
ROWS = 512  # rows of a chunk under a dense mask
BLOCK = 128  # FlexAttention's
NO_SINK = "no sink"  # part of the name of a peer with a result that may differ


class Absent(Exception):
    """Raised by a peer that cannot take part here; the message gives the reason."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` for the shapes that come, with a backward that may run more than once."""
    import torch._functorch.config as settings

    settings.donated_buffer = False
    return torch.compile(function, dynamic=False)


def peers_of(op: str, call: Call) -> dict[str, Maker]:
    """Return the peers of an operation on the device of a call. Masks and tables are made beforehand."""
    attention = op in ("attend", "attend_band")
    if not next(x for x in call.values() if isinstance(x, Tensor)).is_cuda:
        return dict(ON_A_CPU) if attention else {}
    plain = {"eager": lambda call: using("reference")(_op(op)), "compile": lambda call: compile_op(op, call)}
    return plain | ON_A_GPU if attention else plain


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


def rotated(attend: Peer, turn: Callable[..., Tensor]) -> Peer:
    """A peer of `attend` and `attend_band` made of a function of rotated queries, all columns and the sink, [B,R,H,C]:
    `turn` rotates the queries, and the result back."""

    def run(query_BRHC: Tensor, sink_H: Tensor, cos_BRP: Tensor, sin_BRP: Tensor, **rest: Any) -> Tensor:
        out_BRHC = attend(turn(query_BRHC, cos_BRP, sin_BRP), columns(rest), sink_H)
        return turn(out_BRHC, cos_BRP, sin_BRP, True)

    return run


def dense_mask(call: Call) -> Peer:
    """All logits of a chunk of rows under a mask: the plainest form of attention."""
    visible_BRG = visible(call)

    def attend(query_BRHC: Tensor, keys_BGC: Tensor, sink_H: Tensor) -> Tensor:
        keys_B1GC, query_BHRC = keys_BGC[:, None], (query_BRHC * query_BRHC.shape[-1] ** -0.5).transpose(1, 2)
        parts = []
        for start in range(0, query_BHRC.shape[2], ROWS):
            logits = query_BHRC[:, :, start : start + ROWS] @ keys_B1GC.mT
            logits.masked_fill_(~visible_BRG[:, None, start : start + ROWS], -torch.inf)
            sink = sink_H.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
            parts.append(torch.softmax(torch.cat((logits, sink), -1), -1)[..., :-1] @ keys_B1GC)
        return torch.cat(parts, 2).transpose(1, 2)

    return rotated(attend, rotate)


def sdpa_dense(call: Call) -> Peer:
    """PyTorch's fused attention under a mask that is a tensor; the sink is one more column."""
    seen_B1RG = F.pad(visible(call), (0, 1), value=True)[:, None]

    def attend(query_BRHC: Tensor, keys_BGC: Tensor, sink_H: Tensor) -> Tensor:
        heads, channels = query_BRHC.shape[2:]
        query, key, value = with_sink(query_BRHC, keys_BGC, sink_H)
        key, value = (x[:, None].expand(-1, heads, -1, -1) for x in (key, value))
        options = {"attn_mask": seen_B1RG, "scale": channels**-0.5}
        out = F.scaled_dot_product_attention(query.transpose(1, 2), key, value, **options)
        return out.transpose(1, 2)[..., :channels]

    return compiled(rotated(attend, rotate))


def flex(call: Call) -> Peer:
    """FlexAttention under a block mask, heads expanded; its sum of exponentials brings in the sink. On a CPU it does
    not give that away, so there it is spared the sink, and its result differs by as much; and there PyTorch 2.11 wants
    values that are another tensor than the keys."""
    mask, gpu = block_mask(call), call["query_BRHC"].is_cuda

    def attend_blocks(query_BRHC: Tensor, keys_BGC: Tensor, values_BGC: Tensor, sink_H: Tensor) -> Tensor:
        heads = query_BRHC.shape[2]
        key, value = (x[:, None].expand(-1, heads, -1, -1) for x in (keys_BGC, values_BGC))
        query = query_BRHC.transpose(1, 2)
        if not gpu:
            return flex_attention_module.flex_attention(query, key, value, block_mask=mask).transpose(1, 2)
        wanted = flex_attention_module.AuxRequest(lse=True)
        out, aux = flex_attention_module.flex_attention(query, key, value, block_mask=mask, return_aux=wanted)
        assert aux.lse is not None
        return sunk(out.transpose(1, 2), aux.lse.transpose(1, 2), sink_H)

    blocks = compiled(attend_blocks)

    def attend(query_BRHC: Tensor, keys_BGC: Tensor, sink_H: Tensor) -> Tensor:
        return blocks(query_BRHC, keys_BGC, keys_BGC if gpu else keys_BGC.clone(), sink_H)

    # Rotation is compiled apart: FlexAttention's own compiler does not take it in.
    return rotated(attend, compiled(rotate) if gpu else rotate)


def columns(call: Call) -> Tensor:
    """All entries, [B,G,C]: the stream's, then the bank's."""
    if "bank_BFC" in call:
        return torch.cat((call["window_BEC"], call["bank_BFC"]), 1)
    return call["window_BEC"]


def places(call: Call) -> tuple[Tensor, Tensor]:
    """The columns that a row sees, [B,R,S], and which of these are there."""
    rows, device = call["query_BRHC"].shape[1], call["query_BRHC"].device
    back_S = torch.arange(call["width"] - 1, -1, -1, device=device)
    place_BRS = torch.arange(rows, device=device)[:, None] - back_S + torch.zeros_like(call["position_BR"])[..., None]
    seen_BRS = back_S <= call["position_BR"][..., None]
    if "index_BRK" in call:
        index = call["index_BRK"]
        place_BRS = torch.cat((place_BRS, index + rows), -1)
        seen_BRS = torch.cat((seen_BRS, index >= 0), -1)
    return place_BRS.masked_fill(~seen_BRS, 0), seen_BRS


def visible(call: Call) -> Tensor:
    """Return the columns that each row sees, bool [B,R,G]. Raises Absent where the mask is too large to hold."""
    batch, rows = call["query_BRHC"].shape[:2]
    stored = columns(call).shape[1]
    if batch * rows * stored > MOST_PAIRS:
        raise Absent(f"a mask of {batch} x {rows} rows and {stored} columns is too large")
    place_BRS, seen_BRS = places(call)
    times_BRG = torch.zeros(batch, rows, stored, dtype=torch.int8, device=place_BRS.device)
    return times_BRG.scatter_add_(2, place_BRS, seen_BRS.to(torch.int8)).bool()


def with_sink(query_BRHC: Tensor, keys_BGC: Tensor, sink_H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value with one more column: its logit is the sink, its value is 0. A further channel holds
    the sink in the query, and 1 in that column's key. Channels stay a multiple of 8, as fused kernels want them."""
    channels = query_BRHC.shape[-1]
    logit = (sink_H * channels**0.5).to(query_BRHC.dtype)
    query = F.pad(torch.cat((query_BRHC, logit[:, None].expand(*query_BRHC.shape[:-1], 1)), -1), (0, 7))
    unit = F.one_hot(torch.tensor(channels, device=keys_BGC.device), channels + 8).to(keys_BGC.dtype)
    value = F.pad(keys_BGC, (0, 8, 0, 1))
    key = torch.cat((value[:, :-1], unit.expand(keys_BGC.shape[0], 1, -1)), 1)
    return query, key, value


def sunk(out_BRHC: Tensor, lse_BRH: Tensor, sink_H: Tensor) -> Tensor:
    """Return attention with a sink from attention without: exp(lse) / (exp(lse) + exp(sink)) of it."""
    return (out_BRHC * torch.sigmoid(lse_BRH - sink_H)[..., None]).to(out_BRHC.dtype)


def block_mask(call: Call) -> Any:
    """Return FlexAttention's mask: of a band, by arithmetic; of a selection, by a table."""
    batch, rows = call["query_BRHC"].shape[:2]
    if "bank_BFC" not in call:
        width = call["width"]

        def in_band(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return (column <= row) & (column > row - width)

        return flex_attention_module.create_block_mask(in_band, None, None, rows, rows, call["query_BRHC"].device)
    table_BRG = visible(call)

    def in_table(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return table_BRG[batch, row, column]

    blocks_BQK = table_BRG.unflatten(1, (-1, BLOCK)).unflatten(3, (-1, BLOCK)).any(2).any(3)[:, None]
    counts = blocks_BQK.sum(-1, dtype=torch.int32)
    order = blocks_BQK.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return flex_attention_module.BlockMask.from_kv_blocks(counts, order, BLOCK_SIZE=BLOCK, mask_mod=in_table)


ON_A_CPU = {"dense mask": dense_mask, f"flex, {NO_SINK}": flex}
ON_A_GPU = {"sdpa, dense mask": sdpa_dense, "flex": flex}
_PLAIN: Mapping[str, Callable[..., Any]] = {
    "rms_norm": plain_rms_norm,
    "swiglu": plain_swiglu,
    "linear_cross_entropy": plain_cross_entropy,
}
