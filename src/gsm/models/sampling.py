"""Sampling the next token from logits: greedy, temperature, and nucleus sampling (Holtzman et al., 2020).

Nothing here waits for the device; only reading an id does.
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
    """Draw one token per sequence, int64 [B].

    Args:
        logits_BV: scores of the next token.
        temperature: 0 takes the likeliest token; else logits are divided by it.
        top_p: keep the smallest set of likeliest tokens whose probability reaches this.
        generator: source of randomness on the logits' device.

    Raises:
        ValueError: for a temperature below 0, or top_p outside of (0, 1]; on a CPU also for non-finite scores.
    """
    check_sampling(temperature, top_p)
    token_B, best_B = _choice(logits_BV, temperature, top_p, generator)
    if best_B.is_cpu:
        require_finite(best_B)
    return token_B


def _choice(
    logits_BV: Tensor, temperature: float, top_p: float, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Return tokens [B] and best scores [B]; the latter are finite unless a score is NaN or +inf, or all are -inf."""
    best_B, likeliest_B = promoted(logits_BV).max(dim=-1)
    least = torch.finfo(best_B.dtype).tiny  # smaller numbers would be 0 in the tensors' dtype
    if temperature < least:
        return likeliest_B, best_B
    probability_BV = ((promoted(logits_BV) - best_B[:, None]) / temperature).softmax(dim=-1)
    if top_p < 1:
        sorted_BV, order_BV = probability_BV.sort(dim=-1, descending=True)
        # A token stays while the mass before it is below top_p, so that the likeliest always stays.
        nucleus_BV = sorted_BV.masked_fill(sorted_BV.cumsum(dim=-1) - sorted_BV >= max(top_p, least), 0)
        probability_BV = torch.zeros_like(probability_BV).scatter(1, order_BV, nucleus_BV)
    # The method of torch.multinomial, without its check of the probabilities, which waits for the device: of
    # exponential variables with rates p, variable i is the smallest with probability p_i.
    clock_BV = torch.empty_like(probability_BV).exponential_(generator=generator)
    return (probability_BV / clock_BV).argmax(dim=-1), best_B


def require_finite(best_B: Tensor) -> None:
    """Raise ValueError for non-finite best scores of the next token; waits for the device."""
    if not best_B.is_meta and not best_B.isfinite().all():
        raise ValueError(
            "the model's scores of the next token are not finite, so no token can be drawn. Look for NaN or infinity "
            "in its weights and in its memory"
        )


def check_sampling(
    temperature: float, top_p: float, generator: torch.Generator | None = None, device: torch.device | None = None
) -> None:
    """Raise ValueError for a value that is not a number, a temperature below 0, top_p outside of (0, 1], or a generator
    on another device."""
    for name, value in {"temperature": temperature, "top_p": top_p}.items():
        if not (isinstance(value, Real) or isinstance(value, Tensor) and value.numel() == 1):
            raise ValueError(f"{name} must be a number, got {value!r:.40}")
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"temperature must be 0 (greedy) or a finite number above it, got {temperature}")
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p must be in (0, 1], got {top_p}")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(f"generator must be a torch.Generator, got {type(generator).__name__}")
    if generator is not None and device is not None and generator.device.type != device.type:
        raise ValueError(f"generator must be on {device}, where the model is, got {generator.device}")


def continuation(
    logits_BV: Tensor,
    step: Callable[[Tensor], Tensor],
    count: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Yield ``count`` new ids per sequence, int64 [B], one after the other.

    Args:
        logits_BV: scores of the first new id.
        step: reads a token [B] and returns the scores of the next. It does not get the last id.
        count: number of new ids.
        temperature, top_p, generator: as in ``sample``.

    Raises:
        ValueError: for non-finite scores: on a CPU at once, elsewhere after the last token.
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
