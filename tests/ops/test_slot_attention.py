"""slot_attention: what it leaves alone, and the naive form of flash-linear-attention."""

import pytest
import torch
from calls import cast, slots
from closeness import relative_error

from gsm.layers.slot_attention import slot_attention
from gsm_kernels import listening, using


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
