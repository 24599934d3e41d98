"""The short convolution: against the sum written out token by token, and what it sees and keeps."""

import pytest
import torch
from calls import cast, packed_positions
from check import assert_same
from oracles import normal
from torch import Tensor

from gsm.layers.convolution import short_convolution


def convolved(batch=2, tokens=13, stored=2, channels=5, width=4, padding=2, before=0, seed=0) -> dict:
    """Arguments of `short_convolution`: documents of random lengths, padding in row 0 in two places, and in front of
    what is stored so many tokens more that are not."""
    position = packed_positions(max(batch, 1), before + stored + tokens, seed, padding)[:batch, before + stored :]
    position[:1, tokens // 2 : tokens // 2 + padding] = -1
    return {
        "seen_BEC": normal(batch, stored + tokens, channels, seed=seed),
        "weight": normal(channels, width, seed=seed + 1),
        "position_BT": position,
    }


CONVOLVED = {
    "documents that began before": {"stored": 3, "tokens": 29},
    "documents and padding": {"stored": 0, "tokens": 29},
    "fewer stored than it sees": {"stored": 1, "tokens": 7, "width": 5, "before": 4},
    "none stored of what came before": {"stored": 0, "tokens": 17, "before": 9},
    "more stored than it sees": {"stored": 9, "tokens": 6, "width": 3},
    "wider than all there is": {"stored": 1, "tokens": 3, "width": 9, "padding": 1, "before": 5},
    "width 1": {"stored": 2, "tokens": 11, "width": 1},
    "width 2": {"stored": 1, "tokens": 11, "width": 2},
    "width 6, in several blocks": {"tokens": 61, "width": 6},
    "one token": {"stored": 3, "tokens": 1, "batch": 1, "padding": 0},
    "one channel": {"channels": 1},
    "odd channels": {"channels": 131, "tokens": 41, "batch": 3},
    "no token": {"stored": 3, "tokens": 0, "padding": 0},
    "nothing": {"stored": 0, "tokens": 0, "padding": 0},
    "no sequence": {"batch": 0},
    "no channel": {"channels": 0},
}


def naive_convolution(seen_BEC: Tensor, weight: Tensor, position_BT: Tensor) -> Tensor:
    stored = seen_BEC.shape[1] - position_BT.shape[1]
    total_BTC = seen_BEC.new_zeros(*position_BT.shape, len(weight))
    for b, position_T in enumerate(position_BT.tolist()):
        for t, position in enumerate(position_T):
            for back in range(min(position, weight.shape[1] - 1, stored + t) + 1):
                total_BTC[b, t] += weight[:, back] * seen_BEC[b, stored + t - back]
    return total_BTC


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CONVOLVED)
def test_it_equals_the_sum_written_out(case, dtype):
    assert_same(
        lambda **call: short_convolution(*call.values()),
        lambda **call: naive_convolution(*call.values()),
        cast(convolved(**CONVOLVED[case]), dtype),
    )


def test_chunk_by_chunk_it_gives_what_it_gives_at_once_bit_for_bit():
    seen, weight, position = cast(convolved(tokens=23, stored=0, channels=33), torch.float32).values()
    whole = short_convolution(seen, weight, position)
    kept = weight.shape[1] - 1
    for step in (1, 2, 5):
        chunks = [
            short_convolution(seen[:, max(at - kept, 0) : at + step], weight, position[:, at : at + step])
            for at in range(0, 23, step)
        ]
        assert torch.equal(torch.cat(chunks, dim=1), whole)


def test_neither_other_documents_nor_later_tokens_nor_padding_are_seen():
    position = torch.tensor([[5, 6, 0, 1, 2, -1, -1, 0, 1]])
    document = torch.tensor([0, 0, 0, 1, 1, 1, 2, 3, 4, 4])  # of the entries, of which one was stored
    seen, weight = normal(1, 10, 6, dtype=torch.float32), normal(6, 4, seed=1, dtype=torch.float32)
    out = short_convolution(seen, weight, position)
    for at in range(10):
        other = seen.index_fill(1, torch.tensor([at]), 7.0)
        changed = (short_convolution(other, weight, position) != out).any(-1)[0].nonzero().flatten().tolist()
        reached = [t for t in range(9) if 0 <= t + 1 - at < 4 and document[t + 1] == document[at]]
        assert changed == [t for t in reached if position[0, t] >= 0]
    assert (out[0, 5:7] == 0).all()


def test_it_keeps_its_inputs_and_nothing_else_for_backward():
    seen, weight, position = cast(convolved(), torch.bfloat16).values()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x):
        short_convolution(seen.requires_grad_(), weight.requires_grad_(), position)
    assert kept == [x.data_ptr() for x in (seen, weight, position)]
