"""Attribute an entry of the state to source positions by three methods, and compare them.

    rollout        attention weights multiplied through the layers               gsm.analysis.rollout
    gradient       || dz / dx || for the embedding x of a position, and || dz / dx x || (input x gradient)
    intervention   how far z moves if the token at a position is replaced

z is the vector from which the entry is made. Gradients miss the effect of a token on the selection, which is not
differentiable. The intervention measures every effect of a token, so the other two methods are compared with it.

T positions, R rows that are examined, D model width, P random directions, N sources, A tokens of the alphabet, U
different values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gsm.analysis.rollout import TAPS, state_routes
from gsm.models.gsm import GSM
from gsm.observe import record
from gsm.shapes import promoted

AT_ONCE = 16384  # tokens of all sequences read at a time
WAYS = ("rollout", "gradient", "input_gradient")  # methods that are compared with replaced tokens


def gradient_attribution(
    model: GSM, token_T: Tensor, rows: Sequence[int], *, directions: int = 4
) -> tuple[Tensor, Tensor]:
    """Return || dz / dx || (Frobenius norm) and || dz / dx x ||, float [R, T] each, for z of some rows and the
    embedding x of each position.

    The norms are estimated with random directions v: the mean of || v dz/dx ||^2 over v is the squared norm.

    Args:
        model: any GSM.
        token_T: int64, one document.
        rows: positions of z (R of them).
        directions: number of random directions (P). The error of a norm falls with its square root.
    """
    row_N = torch.as_tensor(rows).repeat_interleave(directions).to(token_T.device)
    generator = torch.Generator().manual_seed(0)
    squares, products = [], []
    for batch_N in row_N.split(max(1, AT_ONCE // len(token_T))):
        with model.evaluating(), torch.enable_grad(), record("embedding", "state/z", detach=False) as seen:
            model.forward(token_T.expand(len(batch_N), -1))
            x_NTD, z_ND = seen["embedding"], seen["state/z"][torch.arange(len(batch_N)), batch_N]
            direction_ND = torch.randn(z_ND.shape, generator=generator, dtype=z_ND.dtype).to(z_ND.device)
            (slope_NTD,) = torch.autograd.grad((z_ND * direction_ND).sum(), x_NTD)
        squares.append(slope_NTD.square().sum(dim=-1))
        products.append((slope_NTD * x_NTD.detach()).sum(dim=-1).square())
    gradient_RT, input_gradient_RT = (
        torch.cat(batches).unflatten(0, (-1, directions)).mean(dim=1).sqrt() for batches in (squares, products)
    )
    return gradient_RT, input_gradient_RT


@torch.no_grad()
def replacement_attribution(
    model: GSM, token_T: Tensor, rows: Sequence[int], sources: Sequence[int], substitute_SN: Tensor
) -> Tensor:
    """Return how far z of some rows moves if one token is replaced: the mean norm of the difference, float [R, N].

    Args:
        model: any GSM.
        token_T: int64, one document.
        rows: positions of z (R of them).
        sources: positions of the tokens to replace, one at a time (N of them).
        substitute_SN: int64, the S substitutes of each, over which the mean is taken.
    """
    z_RD = z_of(model, token_T[None], rows)[0]
    moved_SNR = []
    for substitute_N in substitute_SN.to(token_T.device):
        token_NT = token_T.repeat(len(sources), 1)
        token_NT[torch.arange(len(sources)), torch.as_tensor(sources)] = substitute_N
        parts = token_NT.split(max(1, AT_ONCE // len(token_T)))
        moved_SNR.append(torch.cat([(z_of(model, part, rows) - z_RD).norm(dim=-1) for part in parts]))
    return torch.stack(moved_SNR).mean(dim=0).T


def z_of(model: GSM, token_BT: Tensor, rows: Sequence[int]) -> Tensor:
    """Return z at some positions, [B, R, D], for sequences of one document each."""
    with model.evaluating(), record("state/z") as seen:
        model.forward(token_BT)
    return promoted(seen["state/z"][:, list(rows)])


def spearman(first_N: Tensor, second_N: Tensor) -> float:
    """Return Spearman's rank correlation, in [-1, 1]; equal values get the mean of their ranks. NaN if a list is
    constant."""
    ranks_2N = torch.stack([_ranks(first_N), _ranks(second_N)])
    return float(torch.corrcoef(ranks_2N)[0, 1])


@dataclass(frozen=True)
class Agreement:
    """How well each method agrees with replaced tokens: rank correlations over the sources up to each row.

    Attributes:
        correlation_R: float64 [R], the correlations, by each of ``WAYS``.
        attributed: float [R, N], the attribution by each of ``WAYS``, and by ``replaced`` the movement of z.
    """

    correlation_R: dict[str, Tensor]
    attributed: dict[str, Tensor]

    def __str__(self) -> str:
        return "\n".join(
            f"{name.replace('_', ' x '):<17}{value_R.nanmean():6.3f}  (from {value_R.min():.3f} to {value_R.max():.3f})"
            for name, value_R in self.correlation_R.items()
        )


def agreement(
    model: GSM,
    token_T: Tensor,
    rows: Sequence[int],
    sources: Sequence[int] | None = None,
    *,
    alphabet: Sequence[int] | None = None,
    substitutes: int = 2,
    directions: int = 4,
) -> Agreement:
    """Compare rollout and gradients with replaced tokens.

    Args:
        model: any GSM.
        token_T: int64, one document.
        rows: positions of z.
        sources: positions to replace; None: all up to the last row. Sources after a row are left out for that row.
        alphabet: tokens from which substitutes are drawn, other than the token itself; None: the whole vocabulary.
        substitutes: number of substitutes for each source.
        directions: as in ``gradient_attribution``.
    """
    sources = range(max(rows) + 1) if sources is None else sources
    alphabet_A = torch.as_tensor(list(range(model.vocabulary) if alphabet is None else alphabet))
    generator = torch.Generator().manual_seed(0)
    substitute_SN = torch.stack(
        [_draw_others(alphabet_A, token_T[list(sources)], generator) for _ in range(substitutes)]
    )
    moved_RN = replacement_attribution(model, token_T, rows, sources, substitute_SN)
    gradient_RT, input_RT = gradient_attribution(model, token_T, rows, directions=directions)
    with torch.no_grad(), model.evaluating(), record(*TAPS) as seen:
        model.forward(token_T[None])
    values = (state_routes(model, seen).total_TT[list(rows)], gradient_RT, input_RT)
    attributed = {name: value_RT[:, list(sources)] for name, value_RT in zip(WAYS, values, strict=True)}
    correlation_R = {name: _row_by_row(value_RN, moved_RN, rows, sources) for name, value_RN in attributed.items()}
    return Agreement(correlation_R, {**attributed, "replaced": moved_RN})


def _row_by_row(first_RN: Tensor, second_RN: Tensor, rows: Sequence[int], sources: Sequence[int]) -> Tensor:
    """Return the rank correlation of each row over the sources up to it, float64 [R]."""
    before = [[place for place, source in enumerate(sources) if source <= row] for row in rows]
    lines = zip(first_RN, second_RN, before, strict=True)
    return torch.tensor(
        [spearman(first_N[places], second_N[places]) for first_N, second_N, places in lines], dtype=torch.float64
    )


def _draw_others(alphabet_A: Tensor, token_N: Tensor, generator: torch.Generator) -> Tensor:
    """Return for every token a random other token of the alphabet."""
    other_NA = (alphabet_A != token_N.cpu()[:, None]).float()
    return alphabet_A[torch.multinomial(other_NA, 1, generator=generator)[:, 0]]


def _ranks(value_N: Tensor) -> Tensor:
    _, index_N, count_U = value_N.unique(return_inverse=True, return_counts=True)
    last_U = count_U.cumsum(dim=0)
    return (last_U - (count_U - 1) / 2)[index_N].double()
