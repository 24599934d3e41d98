"""How many calls into PyTorch a decoded token takes, with every operation's plain form.

Counted are ``aten`` operators and those that they call themselves, as the profiler shows them: a conversion that
converts nothing is one, and a number that is added to a tensor is four, since PyTorch makes a tensor of it first.
"""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import gsm
from gsm_kernels import using

PYTORCH = "2.13"  # operators call others in other versions
CALLS = {"gsm": 8437, "baseline": 8860, "transformer": 6753}


def calls_per_token(name: str) -> int:
    """Of a model of size nano, for the token after 1,025 others: one that ends a group."""
    model = gsm.build_model(name, "nano").eval()
    tokens = torch.arange(1026)[None] % 256
    with torch.inference_mode(), using("reference"):
        memory = model.prefill(tokens[:, :1024], model.start()).memory
        memory = model(tokens[:, 1024:1025], memory=memory).memory
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            model(tokens[:, 1025:], memory=memory)
    return sum(event.name.startswith("aten::") for event in seen.events())


@pytest.mark.skipif(not torch.__version__.startswith(PYTORCH), reason=f"counted with PyTorch {PYTORCH}")
@pytest.mark.parametrize("name", CALLS)
def test_a_decoded_token_takes_no_more_calls_than_are_written_here(name: str) -> None:
    calls = calls_per_token(name)
    assert calls <= CALLS[name], f"{name}: {calls} calls a token, {CALLS[name]} before; where they are needed, write so"
