"""Sampling the next token from logits: greedy, temperature, and nucleus sampling (Holtzman et al., 2020).

On a GPU, drawing a token does not synchronise with the device. Reading the returned id does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from numbers import Real

import torch
from torch import Tensor

from gsm.errors import ConfigError
from gsm.shapes import promoted


def sample(
    logits_BV: Tensor, temperature: float = 0.0, top_p: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """Draw the next token of each sequence and return the ids, int64 [B].

    Args:
        logits_BV: scores of the next token.
        temperature: divisor of the logits; 0 takes the likeliest token.
        top_p: draw from the smallest set of likeliest tokens whose probabilities sum to at least this.
        generator: random number generator on the device of the logits.

    Raises:
        ValueError: if the temperature is negative or infinite, or top_p is not in (0, 1]; on a CPU also if a score is
            NaN or +inf, or all are -inf.
    """
    check_sampling(temperature, top_p)
    token_B, best_B = _choice(logits_BV, temperature, top_p, generator)
    if best_B.is_cpu:
        require_finite(best_B)
    return token_B


def _choice(
    logits_BV: Tensor, temperature: float, top_p: float, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Return the drawn tokens [B], and the best scores [B], which are finite unless a score is NaN or +inf, or all are
    -inf."""
    best_B, likeliest_B = promoted(logits_BV).max(dim=-1)
    least = torch.finfo(best_B.dtype).tiny  # a smaller number would underflow to 0 in the dtype of the scores
    if temperature < least:
        return likeliest_B, best_B
    probability_BV = ((promoted(logits_BV) - best_B[:, None]) / temperature).softmax(dim=-1)
    if top_p < 1:
        sorted_BV, order_BV = probability_BV.sort(dim=-1, descending=True)
        # A token stays if the likelier tokens sum to less than top_p. So the likeliest token always stays.
        nucleus_BV = sorted_BV.masked_fill(sorted_BV.cumsum(dim=-1) - sorted_BV >= max(top_p, least), 0)
        probability_BV = torch.zeros_like(probability_BV).scatter(1, order_BV, nucleus_BV)
    # As torch.multinomial, but without its check of the probabilities, which synchronises with the device: among
    # exponential variables with rates p, variable i is the smallest with probability p_i.
    clock_BV = torch.empty_like(probability_BV).exponential_(generator=generator)
    return (probability_BV / clock_BV).argmax(dim=-1), best_B


def require_finite(best_B: Tensor) -> None:
    """Raise ValueError unless all best scores [B] are finite. Synchronises with the device."""
    if not best_B.is_meta and not best_B.isfinite().all():
        raise ValueError(
            "scores of the next token must be finite, got NaN or infinity; look for these in the model's weights and "
            "in its memory"
        )


def check_sampling(
    temperature: float, top_p: float, generator: torch.Generator | None = None, device: torch.device | None = None
) -> None:
    """Check the arguments of ``sample``.

    Raises:
        ValueError: if the temperature is not a finite number of at least 0, top_p is not in (0, 1], or the generator is
            no ``torch.Generator`` on ``device``.
    """
    for name, value in {"temperature": temperature, "top_p": top_p}.items():
        if not (isinstance(value, Real) or isinstance(value, Tensor) and value.numel() == 1):
            raise ValueError(f"{name} must be a number, got {value!r:.40}")
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"temperature must be 0 (greedy) or a positive finite number, got {temperature}")
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p must be in (0, 1], got {top_p}")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(f"generator must be a torch.Generator, got {type(generator).__name__}")
    if generator is not None and device is not None and generator.device.type != device.type:
        raise ValueError(f"generator must be on {device}, the device of the model, got {generator.device}")


def continuation(
    logits_BV: Tensor,
    step: Callable[[Tensor], Tensor],
    count: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Yield ``count`` new tokens of each sequence, one int64 [B] at a time.

    Args:
        logits_BV: scores of the first new token.
        step: maps the ids [B] of a new token to the scores [B, V] of the next one; not called for the last token.
        count: number of new tokens.
        temperature, top_p, generator: as in ``sample``.

    Raises:
        ValueError: if scores are not finite: on a CPU at once, on a GPU after the last token.
    """
    health_B = torch.zeros((), device=logits_BV.device)
    for number in range(1, count + 1):
        token_B, best_B = _choice(logits_BV, temperature, top_p, generator)
        health_B = health_B + 0 * best_B  # NaN from the first non-finite score on
        if best_B.is_cpu:
            require_finite(health_B)
        yield token_B
        if number < count:
            logits_BV = step(token_B)
    require_finite(health_B)
