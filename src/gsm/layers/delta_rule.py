"""A recurrence on one matrix per head: the delta rule with or without decay, and linear attention without the rule.

For every token t, from the state S [C, C] that the tokens before it have left,

    S  <-  0                                where a document starts (start_t)
    S  <-  exp(log_decay_t) diag(exp(channel_decay_t)) S
    S  <-  S + k_t w_t^T                    w_t = beta_t (v_t - S^T k_t), the delta rule; w_t = v_t if beta is None
    out_t = scale S^T q_t

A token that is not live (padding) leaves S unchanged, and its output is 0.

Args:
    query_BTHC, key_BTHC, value_BTHC: with unit keys, the delta rule moves the state's answer S^T k_t towards v_t.
    beta_BTH: strength of a write, in (0, 1), or up to 2 so that a write can reverse S along its key; None: no delta
        rule.
    log_decay_BTH: logarithm of the decay, at most 0; None: no decay.
    start_BT: bool, the token is the first of its document.
    live_BT: bool, False for padding.
    state_BHCC: S before the first token, rows by key channel, columns by value channel.
    scale: factor of the outputs.
    channel_decay_BTHC: logarithm of an additional decay of each key channel, at most 0; None: none.

Returns:
    out_BTHC in the query's dtype, and the state after the last token in at least float32. All is computed in at least
    float32. Differentiable in all floating-point tensors.

Raises:
    ValueError: if the shapes do not fit.

Source: the recurrences of Katharopoulos et al. 2020 (linear attention), Schlag et al. 2021 (delta rule), Yang et al.
2024b, "Gated Delta Networks", equation 10 (with decay; they write the transpose of S) and Kimi Team 2025, "Kimi Linear"
(with a decay for each channel).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gsm.layers.chunks import CHUNK, chunks, decayed_products, halved, product, scan, too_short
from gsm_kernels import Impl, Op
from gsm_kernels.device import absent, at_least_float32, full_precision, once, unfit_for_package
from gsm_kernels.shapes import agree

Kernel = Callable[..., tuple[Tensor, Tensor]]

# Kernels of flash-linear-attention: no delta rule; delta rule; delta rule with decay; with a decay of each channel.
FAMILIES = ("simple_gla", "delta_rule", "gated_delta_rule", "kda")
WIDEST = 256  # largest number of channels of a head


class Inputs(NamedTuple):
    """The parameters of `delta_rule`, documented above."""

    query_BTHC: Tensor
    key_BTHC: Tensor
    value_BTHC: Tensor
    beta_BTH: Tensor | None
    log_decay_BTH: Tensor | None
    start_BT: Tensor
    live_BT: Tensor
    state_BHCC: Tensor
    scale: float = 1.0
    channel_decay_BTHC: Tensor | None = None


def _token_by_token(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Compute the equations above token by token."""
    query, key, value = (at_least_float32(x) for x in inputs[:3])
    state, outs = at_least_float32(inputs.state_BHCC), []
    for t in range(query.shape[1]):
        before, live_B111 = state, inputs.live_BT[:, t, None, None, None]
        state = state.masked_fill(inputs.start_BT[:, t, None, None, None], 0)
        if inputs.log_decay_BTH is not None:
            state = state * at_least_float32(inputs.log_decay_BTH[:, t, :, None, None]).exp()
        if inputs.channel_decay_BTHC is not None:
            state = state * at_least_float32(inputs.channel_decay_BTHC[:, t, :, :, None]).exp()
        write_BHC = value[:, t]
        if inputs.beta_BTH is not None:
            write_BHC = at_least_float32(inputs.beta_BTH[:, t, :, None]) * (write_BHC - _read(state, key[:, t]))
        state = torch.where(live_B111, state + key[:, t, :, :, None] * write_BHC[:, :, None], before)
        outs.append(torch.where(live_B111[..., 0], inputs.scale * _read(state, query[:, t]), 0))
    return torch.stack(outs, dim=1).to(inputs.query_BTHC.dtype), state


def _read(state_BHCC: Tensor, x_BHC: Tensor) -> Tensor:
    """Return S^T x as a sum, because autocast would round the gradients of a matrix product."""
    return (x_BHC[..., None] * state_BHCC).sum(dim=-2)


def _chunked(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Compute a chunk of tokens at a time, in plain PyTorch.

    Letters: N chunks, L tokens of a chunk (i, j).

    With S the state that enters a chunk and d_i the sum of the log decays of its first i tokens,

        G_ij = exp(d_i - d_j)     if j <= i and both are in one document, else 0: decay of a write at j until i
        e_i  = exp(d_i)           if no document starts in the chunk up to i, else 0: decay of S until i
        w_i  = beta_i (v_i - e_i S^T k_i - sum_{j<i} G_ij (k_i . k_j) w_j)                     the write of token i

    The equations of the writes are triangular, and linear in S: one solve for all chunks at once gives w = U - R S
    (R = 0 and U = v without the delta rule). Then a chunk is one linear map of the state, and its outputs are another,

        S'    = (e_L - K'^T R) S + K'^T U,       K'_j = G_Lj k_j
        out   = (e q - P R) S + P U,             P_ij = G_ij (q_i . k_j)

    so only S' is computed chunk after chunk. This is the WY form of Yang et al. 2024, "Parallelizing Linear
    Transformers with the Delta Rule over Sequence Length", with zeros in G and e at document boundaries.

    If every key channel c has its own decay, d_i, e_i and G_ij are vectors, e multiplies keys and queries channel by
    channel, and G_ij (k_i . k_j) becomes sum_c k_ic G_ijc k_jc, which `gsm.layers.chunks` computes.
    """
    tokens = inputs.query_BTHC.shape[1]
    size = min(tokens, CHUNK) if inputs.channel_decay_BTHC is None else halved(tokens)
    # A token that is not live neither reads nor writes. The last chunk is padded with such tokens.
    idle_BT11 = ~inputs.live_BT[..., None, None]
    query, key, value = (chunks(at_least_float32(x).masked_fill(idle_BT11, 0), size) for x in inputs[:3])
    log_decay = total = None
    if inputs.log_decay_BTH is not None:
        log_decay = chunks(at_least_float32(inputs.log_decay_BTH).masked_fill(idle_BT11[..., 0], 0), size)
    if inputs.channel_decay_BTHC is not None:
        total = chunks(at_least_float32(inputs.channel_decay_BTHC).masked_fill(idle_BT11, 0), size).cumsum(-2)
    left, entering = _decays(chunks((inputs.start_BT & inputs.live_BT).long()[..., None], size), log_decay, value.dtype)
    overlap = None if total is None else decayed_products(torch.stack((query, key)), key, total)
    read = left * (product(query, key.mT) if overlap is None else overlap[0])
    # Queries and keys on the entering state, and keys in the final state.
    query_on_state, key_on_state, leaving = query, key, key
    decay = entering[..., -1, None, None]
    if total is not None:
        query_on_state, key_on_state = query * total.exp(), key * total.exp()
        leaving = key * (total[..., -1:, :] - total).exp()
        decay = decay * total[..., -1, :, None].exp()
    leaving = (left[..., -1, :, None] * leaving).mT
    seen = entering[..., None] * query_on_state
    if inputs.beta_BTH is not None:
        beta = chunks(at_least_float32(inputs.beta_BTH), size)[..., None]
        # The solver ignores the diagonal and everything above it.
        below = beta * left * (product(key, key.mT) if overlap is None else overlap[1])
        right = torch.cat((beta * value, beta * entering[..., None] * key_on_state), dim=-1)
        value, undone = _Solution.apply(below, right).chunk(2, dim=-1)  # U and R: the writes are U - R S
        seen = seen - product(read, undone)
        decay = decay * torch.eye(key.shape[-1], dtype=key.dtype, device=key.device) - product(leaving, undone)
    before, state_BHCC = scan(decay, product(leaving, value), at_least_float32(inputs.state_BHCC))
    out_BHNLC = inputs.scale * (product(seen, before) + product(read, value))
    out_BTHC = out_BHNLC.movedim(1, 3).flatten(1, 2)[:, :tokens]
    return out_BTHC.to(inputs.query_BTHC.dtype), state_BHCC


def _decays(start_B1NL: Tensor, log_decay_BHNL: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return G [B, H, N, L, L] and e [B, H, N, L]; without decay they are equal for all heads, H = 1."""
    begun = start_B1NL.cumsum(-1)
    first, together = begun == 0, (begun[..., :, None] == begun[..., None, :]).tril()
    if log_decay_BHNL is None:
        return together.to(dtype), first.to(dtype)
    total = log_decay_BHNL.cumsum(-1)
    # Masked before exp, so that values above the diagonal can neither overflow nor get a gradient.
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~together, 0)
    return between.exp() * together, total.exp() * first


class _Solution(torch.autograd.Function):
    """The solution X of (1 + A) X = B, where A is the strictly lower triangle of `below`."""

    @staticmethod
    def forward(ctx, below, right):
        solution = torch.linalg.solve_triangular(below, right, upper=False, unitriangular=True)
        ctx.save_for_backward(below, solution)
        return solution

    @staticmethod
    @once
    def backward(ctx, grad):
        below, solution = ctx.saved_tensors
        with full_precision(grad):
            right_grad = torch.linalg.solve_triangular(below.mT, grad, upper=True, unitriangular=True)
            return -(right_grad @ solution.mT).tril(-1), right_grad


_no_fla = partial(absent, "fla", *(f"fla.ops.{family}" for family in FAMILIES))


def _unfit_for_fla(inputs: Inputs) -> str | None:
    """Return why the kernels of flash-linear-attention cannot run this call, or None."""
    if (refusal := unfit_for_package(*inputs[:3], waits=inputs.query_BTHC.shape[1] > 1)) is not None:
        return refusal
    if inputs.query_BTHC.shape[-1] > WIDEST:
        return f"takes heads of at most {WIDEST} channels, got {inputs.query_BTHC.shape[-1]}"
    if inputs.channel_decay_BTHC is not None and inputs.beta_BTH is None:
        return "has decays of channels only with the delta rule"
    return None


def _by_fla(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Run the Triton kernels of flash-linear-attention (extra `fla`), on a GPU.

    These take offsets of concatenated sequences, and an initial state for each, instead of document starts. So every
    document, or part of one, in a row of the batch becomes a sequence. A call of several tokens synchronises with the
    device to count them.
    """
    idle_BT1 = ~inputs.live_BT[..., None]
    key_BTHC = inputs.key_BTHC.masked_fill(idle_BT1[..., None], 0)
    call = {"q": inputs.query_BTHC, "k": key_BTHC, "v": inputs.value_BTHC}
    if inputs.beta_BTH is not None:
        call["beta"] = inputs.beta_BTH.to(inputs.query_BTHC.dtype)
    decay = _decay(inputs)
    if decay is not None:
        call["g"] = decay.masked_fill(idle_BT1 if decay.ndim == 3 else idle_BT1[..., None], 0)
    family = FAMILIES[0 if inputs.beta_BTH is None else 1 if decay is None else decay.ndim - 1]
    start_BT, state_BHCC = inputs.start_BT & inputs.live_BT, at_least_float32(inputs.state_BHCC)
    if start_BT.shape[1] == 1 and not torch.is_grad_enabled():  # the kernels for single tokens have no backward
        entering_BHCC = state_BHCC.masked_fill(start_BT[..., None, None], 0)
        run = _kernel(family, "fused_recurrent")
        out_BTHC, after = run(**call, scale=inputs.scale, initial_state=entering_BHCC, output_final_state=True)
    else:
        run = partial(_kernel(family, "chunk"), scale=inputs.scale, output_final_state=True)
        out_BTHC, after = _concatenated(run, call, start_BT, state_BHCC)
    return out_BTHC.masked_fill(idle_BT1[..., None], 0), after


def _decay(inputs: Inputs) -> Tensor | None:
    """Return the total decay: a number per head, [B, T, H], or per channel, [B, T, H, C]."""
    head_BTH, channel_BTHC = inputs.log_decay_BTH, inputs.channel_decay_BTHC
    if head_BTH is None or channel_BTHC is None:
        decay = channel_BTHC if head_BTH is None else head_BTH
        return None if decay is None else at_least_float32(decay)
    return at_least_float32(head_BTH)[..., None] + at_least_float32(channel_BTHC)


def _kernel(family: str, form: str) -> Kernel:
    """Return the library's function of a family, in its ``chunk`` or its ``fused_recurrent`` form."""
    return getattr(importlib.import_module(f"fla.ops.{family}"), f"{form}_{family}")


def _concatenated(run: Kernel, call: dict[str, Tensor], start_BT: Tensor, state_BHCC: Tensor) -> tuple[Tensor, Tensor]:
    """Run a kernel on all rows of a batch, cut at the start of each row and document."""
    batch, length = start_BT.shape
    cut_BT = start_BT.clone()
    cut_BT[:, 0] = True
    first_N = cut_BT.flatten().nonzero()[:, 0]
    continued_N = (first_N % length == 0) & ~start_BT.flatten()[first_N]
    entering_NHCC = state_BHCC[first_N // length].masked_fill(~continued_N[:, None, None, None], 0)
    out_1THC, after_NHCC = run(
        **{name: x.flatten(0, 1)[None] for name, x in call.items()},
        initial_state=entering_NHCC,
        cu_seqlens=torch.cat((first_N, first_N.new_tensor([batch * length]))),
    )
    last = torch.searchsorted(first_N, length * torch.arange(1, batch + 1, device=first_N.device)) - 1
    return out_1THC[0].unflatten(0, (batch, length)), after_NHCC[last]


delta_rule = Op(
    "delta_rule",
    _token_by_token,
    (Impl("fla", _by_fla, _unfit_for_fla, _no_fla), Impl("chunked", _chunked, too_short)),
    inputs=Inputs,
    check=partial(agree, "delta_rule"),
    doc=__doc__,
)
