"""From logits to the next token: greedy, temperature, and nucleus sampling (Holtzman et al., 2020); and from each token
to the next. Nothing here waits for the device: only who reads an id does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gsm.shapes import promoted


def sample(
    logits_BV: Tensor, temperature: float = 0.0, top_p: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """Draws one token per sequence, int64 [B].

    Args:
        logits_BV: scores of the next token.
        temperature: 0 takes the likeliest; else logits are divided by it.
        top_p: keep the smallest set of likeliest tokens whose probability reaches this.
        generator: source of randomness on the logits' device.

    Raises:
        ValueError: for a temperature below 0, or top_p outside of (0, 1]; on a CPU also for scores that are not finite.
    """
    check_sampling(temperature, top_p)
    if temperature == 0:
        return logits_BV.argmax(dim=-1)
    probability_BV = (promoted(logits_BV) / temperature).softmax(dim=-1)
    if top_p < 1:
        sorted_BV, order_BV = probability_BV.sort(dim=-1, descending=True)
        # A token stays while the mass before it is below top_p, so that the likeliest always stays.
        kept_BV = sorted_BV.masked_fill(sorted_BV.cumsum(dim=-1) - sorted_BV >= top_p, 0)
        probability_BV = torch.zeros_like(probability_BV).scatter(1, order_BV, kept_BV)
    if probability_BV.device.type == "cpu" and not probability_BV.isfinite().all():  # a GPU would have to be waited for
        raise ValueError("the model's scores of the next token are not finite: its weights or its memory are broken")
    # As torch.multinomial draws, which would wait for the device to see whether these are probabilities: exponential
    # variables with rates p race, and i is first with probability p_i.
    clock_BV = torch.empty_like(probability_BV).exponential_(generator=generator)
    return (probability_BV / clock_BV).argmax(dim=-1)


def check_sampling(
    temperature: float, top_p: float, generator: torch.Generator | None = None, device: torch.device | None = None
) -> None:
    """Raises ValueError for a temperature below 0, top_p outside of (0, 1], and a generator of another device."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be 0 (greedy) or more, got {temperature}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], got {top_p}")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(f"generator must be a torch.Generator, got {type(generator).__name__}")
    if generator is not None and device is not None and generator.device.type != device.type:
        raise ValueError(f"generator is of {generator.device}, but draws on {device}; make it there")


def continuation(
    logits_BV: Tensor,
    step: Callable[[Tensor], Tensor],
    count: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Yields ``count`` new ids per sequence, int64 [B], one after the other.

    Args:
        logits_BV: scores of the first of them.
        step: reads a token [B] and returns the scores of the next. The last id is not read.
        count, temperature, top_p, generator: how many, and as in ``sample``.

    Raises:
        ValueError: as ``sample``.
    """
    for number in range(1, count + 1):
        token_B = sample(logits_BV, temperature, top_p, generator)
        yield token_B
        if number < count:
            logits_BV = step(token_B)
