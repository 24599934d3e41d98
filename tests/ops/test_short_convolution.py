"""short_convolution: the reference against the sum written out token by token, and the loops against the reference."""

import pytest
import torch
from calls import cast, convolved
from oracles import normal
from torch.profiler import ProfilerActivity, profile

from gsm_kernels import short_convolution, using


@pytest.fixture(params=["reference", "numba"])
def form(request):
    """Every implementation in turn, forced."""
    if request.param == "numba":
        pytest.importorskip("numba")
    with using(request.param):
        yield request.param


def test_chunk_by_chunk_it_gives_what_it_gives_at_once_bit_for_bit(form):
    seen, weight, position = cast(convolved(tokens=23, stored=0, channels=33), torch.float32).values()
    whole = short_convolution(seen, weight, position)
    kept = weight.shape[1] - 1
    for step in (1, 2, 5):
        chunks = [
            short_convolution(seen[:, max(at - kept, 0) : at + step], weight, position[:, at : at + step])
            for at in range(0, 23, step)
        ]
        assert torch.equal(torch.cat(chunks, dim=1), whole)


def test_neither_other_documents_nor_later_tokens_nor_padding_are_seen(form):
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


def test_it_keeps_its_inputs_and_nothing_else_for_backward(form):
    seen, weight, position = cast(convolved(), torch.bfloat16).values()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x):
        short_convolution(seen.requires_grad_(), weight.requires_grad_(), position)
    assert kept == [x.data_ptr() for x in (seen, weight, position)]


def test_the_loops_are_called_directly_where_nothing_learns():
    pytest.importorskip("numba")
    seen, weight, position = cast(convolved(), torch.float32).values()
    for learns in (False, True):
        with profile(activities=[ProfilerActivity.CPU]) as ran:
            out = short_convolution(seen, weight.requires_grad_(learns), position)
        assert out.requires_grad == learns
        assert any(event.name == "gsm_kernels::short_convolution_cpu" for event in ran.events()) == learns
