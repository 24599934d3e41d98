"""slot_attention: the reference against slots written out, the chunked form against the reference, and what the library
flash-linear-attention is given."""

import inspect
import itertools

import pytest
import torch
from calls import cast, slots
from closeness import assert_close, relative_error

from gsm_kernels import listening, slot_attention, using
from gsm_kernels.slot_attention import fla, reference
from gsm_kernels.slot_attention.inputs import Inputs


def test_a_slot_that_is_not_written_to_stays_as_it_is():
    call = slots(tokens=40)
    never = torch.zeros_like(call["start_BT"])
    call |= {"start_BT": never, "write_BTHM": call["write_BTHM"] * torch.tensor([1.0, 0.0, 1.0])}
    call["log_decay_BTHM"] = call["log_decay_BTHM"] * torch.tensor([1.0, 0.0, 1.0])
    _, state = slot_attention(**call)
    assert torch.equal(state[:, :, 1], call["state_BHMU"][:, :, 1])
    assert not torch.allclose(state[:, :, 0], call["state_BHMU"][:, :, 0])


@pytest.mark.parametrize("name", ["reference", "chunked"])
def test_padding_alone_leaves_everything_as_it_is(name):
    call = slots(tokens=40)
    call |= {"live_BT": torch.zeros_like(call["live_BT"])}
    with using(name):
        out, state = slot_attention(**call)
    assert not out.any() and torch.equal(state, call["state_BHMU"])


def test_a_single_token_is_left_to_the_reference():
    with listening() as heard:
        slot_attention(**slots(tokens=1))
    assert heard == [("slot_attention", "reference")]


# What flash-linear-attention is given. Its kernels need a GPU: here the reference stands in for them.


def stand_in(form):
    """A kernel of the library's signature: sequences end to end, each from keys and values of its own."""

    def run(q, k, v, s, g, *, scale, initial_state, output_final_state, cu_seqlens=None):
        bounds = list(range(q.shape[0] + 1)) if cu_seqlens is None else cu_seqlens.tolist()
        outs, states = [], []
        for number, (first, end) in enumerate(itertools.pairwise(bounds)):
            cut = (lambda x, f=first, e=end: x[f:e]) if cu_seqlens is None else (lambda x, f=first, e=end: x[:, f:e])
            q_, k_, v_, s_, g_ = (cut(x) for x in (q, k, v, s, g))
            never = torch.zeros(q_.shape[:2], dtype=torch.bool)
            keys, values = (x[number][None] for x in initial_state)
            state = torch.cat((keys.mT, values), dim=-1)
            out, state = reference.slot_attention(Inputs(q_, k_, v_, s_, g_, never, ~never, state, scale))
            outs.append(out)
            states.append(state)
        keys, values = torch.cat(states).chunk(2, dim=-1)
        return torch.cat(outs, dim=0 if cu_seqlens is None else 1), (keys.mT, values)

    assert form in ("chunk", "fused_recurrent")
    return run


@pytest.mark.parametrize("tokens", [1, 37])
@torch.no_grad()
def test_documents_become_sequences_end_to_end(tokens, monkeypatch):
    monkeypatch.setattr(fla, "_kernel", stand_in)
    for seed in range(3):
        inputs = Inputs(**slots(batch=3, tokens=tokens, seed=seed))
        out, state = fla.slot_attention(inputs)
        expected_out, expected_state = reference.slot_attention(inputs)
        assert_close(out, expected_out)
        assert_close(state, expected_state, name="state")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_library_s_functions_take_what_they_are_given():
    pytest.importorskip("fla.ops")
    for form in ("chunk", "fused_recurrent"):
        call = dict.fromkeys(("q", "k", "v", "s", "g", "scale", "initial_state", "output_final_state", "cu_seqlens"), 0)
        signature = inspect.signature(inspect.unwrap(fla._kernel(form)))
        assert set(call) <= set(signature.parameters)
        signature.bind(**call)


@pytest.mark.parametrize("name", ["reference", "chunked"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_library_s_own_naive_form_agrees(name):
    pytest.importorskip("fla.ops")
    from fla.ops.gsa.naive import naive_recurrent_gsa

    call = cast(slots(tokens=70), torch.float32)
    never = torch.zeros_like(call["start_BT"])
    q, k, v, s, g, _, _, state, scale = call.values()
    keys, values = state.chunk(2, dim=-1)
    expected, after_all = naive_recurrent_gsa(q, k, v, s, g, scale, (keys.mT, values), True)
    assert after_all is not None
    keys, values = after_all
    with using(name):
        out, after = slot_attention(q, k, v, s, g, never, ~never, state, scale)
    assert relative_error(out, expected) < 2e-6
    assert relative_error(after, torch.cat((keys.mT, values), dim=-1)) < 2e-6
