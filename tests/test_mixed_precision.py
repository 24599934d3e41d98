"""Models under bfloat16 autocast, as GPUs train and run them; here on a CPU, against the same model in float32.

Rounding moves the logits of these small models by some percent, more where it makes an indexer choose another slot; a
memory of the wrong dtype, or a value that is rounded where it must not be, shows as an error or as far more.
"""

from __future__ import annotations

import pytest
import torch
from small import MEMORIES, SHALLOW, build, random_tokens

from gsm import record

LENGTH = 40
NEAR = 0.5  # of the norm; unrelated logits are 1.4 apart


def half() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("case", MEMORIES)
def test_streams_are_in_half_precision_and_logits_near_those_of_float32(case):
    model, tokens = build(case, geometry=SHALLOW).float(), random_tokens(2, LENGTH)
    exact = model(tokens).logits
    with half(), record() as seen:
        out = model(tokens, targets=tokens)
        logits = out.logits
    assert seen["embedding"].dtype == seen["hidden"].dtype == torch.bfloat16
    assert out.loss is not None and out.loss.dtype == torch.float32
    assert torch.dist(logits.float(), exact) < NEAR * exact.norm()
    out.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("case", "capacity"), [*((case, LENGTH) for case in MEMORIES), ("gsm", None), ("transformer", None)]
)
@torch.no_grad()
def test_prefill_and_decoding_equal_the_full_forward(case, capacity):
    model, tokens = build(case, geometry=SHALLOW).float(), random_tokens(2, LENGTH)
    with half():
        full = model(tokens).logits.float()
        out = model(tokens[:, :-4], memory=model.start(2, capacity), rows=1)
        rows = [out.logits]
        for t in range(LENGTH - 4, LENGTH - 1):
            out = model(tokens[:, t : t + 1], memory=out.memory)
            rows.append(out.logits)
    got = torch.cat(rows, 1).float()
    assert torch.dist(got, full[:, -5:-1]) < NEAR * full[:, -5:-1].norm()
