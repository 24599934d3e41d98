"""A tape repeats the operations of a call, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from small import MEMORIES, SHALLOW, assert_same, build, mostly_nightly, random_tokens

from gsm.engine import Engine
from gsm.tape import Tapes
from gsm_kernels import rms_norm, using

QUICK = ("gsm", "gsm-writer=delta", "baseline-pool", "transformer", "gated_delta_net")
tapes = Tapes()


def recorded(call):
    return tapes(call, lambda: None)


def test_a_replay_reads_the_current_buffers_and_writes_to_them():
    buffer, state = torch.zeros(3), torch.zeros(3)
    repeat = tapes(lambda: state.add_(buffer).cumsum(0), state.zero_)
    buffer.fill_(1)
    assert repeat().tolist() == [1, 2, 3] and repeat().tolist() == [2, 4, 6]
    assert repeat() is repeat()


CALLS = {
    "a product of a view": lambda x: (x.t() @ x).view(-1)[2:],
    "two results": lambda x: torch.stack(x.max(dim=0)[:1]) + x.sort().indices[0],
    "a copy in another dtype": lambda x: x.to(torch.bfloat16).repeat(2, 1).float() * 3,
    "no variant that writes to what is there": lambda x: F.pad(x, (1, 2)).masked_fill(F.pad(x, (1, 2)) > 0, 2.0),
    "a scatter into zeros": lambda x: torch.zeros_like(x).scatter_(1, torch.arange(4).expand(3, 4) % 2, x),
    "a list": lambda x: torch.cat([torch.ones(1, 4), x]).unbind(0)[2] * 2,
    "what is filled later": lambda x: torch.empty_like(x).copy_(x).mul_(torch.full((4,), 2.0).add_(x[0])),
    "a norm": lambda x: rms_norm(x, torch.ones(4)) * torch.arange(4).float().exp(),
}


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("name", CALLS)
def test_a_replay_equals_the_call_bit_for_bit(name, kernels):
    x, call = torch.randn(3, 4), CALLS[name]
    with using(kernels), torch.no_grad():
        repeat = recorded(lambda: call(x))
        for _ in range(3):
            x.normal_()
            assert torch.equal(repeat(), call(x))


def test_constants_are_not_replayed():
    x, weight = torch.ones(4), torch.ones(4)
    repeat = recorded(lambda: x + torch.arange(4).float().exp().view(4) + weight.view(2, 2).flatten())
    assert len(repeat.steps) == 2, "two sums"
    weight.fill_(2)
    assert torch.equal(repeat(), x + torch.arange(4).float().exp() + 2)


def test_random_numbers_are_drawn_again():
    repeat = recorded(lambda: torch.rand(4) + 0)
    torch.manual_seed(0)
    first, second = repeat().clone(), repeat().clone()
    torch.manual_seed(0)
    assert torch.equal(first, torch.rand(4)) and not torch.equal(first, second)


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: bool(x.any()),
        torch.unique,
        lambda x: x * sum(x.tolist()),
        lambda x: x * x.numpy().sum(),
    ],
)
def test_a_call_that_reads_a_value_on_the_host_is_refused(look):
    with pytest.raises(RuntimeError, match="recorded"):
        recorded(lambda: look(torch.ones(3)) * torch.ones(3))


@torch.no_grad()
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", mostly_nightly(MEMORIES, *QUICK))
def test_an_engine_on_a_cpu_decodes_as_the_model_does_bit_for_bit(case, threads):
    """In float32, so with compiled loops where they are installed."""
    model, token_BT = build(case, geometry=SHALLOW).float(), random_tokens(2, 24)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        engine, memory = Engine(model, batch=2, capacity=24, graphs=Tapes(room=None)), model.start(2, 24)
        for token_B in token_BT.unbind(1):
            want = model(token_B[:, None], memory=memory, rows=1).logits[:, -1]
            assert torch.equal(engine.decode(token_B), want)
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
@pytest.mark.parametrize("case", mostly_nightly(MEMORIES, *QUICK))
def test_a_step_has_room_for_twice_the_tokens_when_it_is_full(case):
    model, token_BT = build(case, geometry=SHALLOW), random_tokens(2, 24)
    engine, rooms = Engine(model, batch=2, capacity=24, graphs=Tapes(room=8)), []
    read = []
    for token_B in token_BT.unbind(1):
        read.append(engine.decode(token_B).clone())
        rooms.append(max(engine._steps))
    assert rooms == [8] * 8 + [16] * 8 + [24] * 8
    assert_same(torch.stack(read, dim=1), model(token_BT).logits, case)


@torch.no_grad()
def test_a_step_recorded_in_an_empty_memory_reads_all_slots_later():
    geometry = replace(SHALLOW, entry_dim=16, output_groups=1)
    for case in ("transformer", "gsm"):
        model, token_BT = build(case, geometry=geometry).float(), random_tokens(1, 200)
        engine = Engine(model, capacity=200)
        read = torch.stack([engine.decode(token_B).clone() for token_B in token_BT.unbind(1)], dim=1)
        torch.testing.assert_close(read, model(token_BT).logits, rtol=1e-4, atol=1e-4)
        assert engine._steps, "recorded"


@torch.no_grad()
def test_a_step_that_cannot_be_recorded_is_a_plain_call(monkeypatch):
    model, token_BT = build("gsm", geometry=SHALLOW), random_tokens(1, 5)
    right = model.run
    monkeypatch.setattr(model, "run", lambda x, *more: right(x * (sum(x.flatten().tolist()) < torch.inf), *more))
    engine = Engine(model, capacity=5)
    read = torch.stack([engine.decode(token_B).clone() for token_B in token_BT.unbind(1)], dim=1)
    assert_same(read, model(token_BT).logits, "plain calls")


@torch.no_grad()
def test_under_autocast_a_step_sees_new_weights():
    model, token_BT = build("gsm", geometry=SHALLOW).float(), random_tokens(1, 6)
    engine = Engine(model, capacity=6)
    with torch.autocast("cpu", torch.bfloat16):
        engine.prefill(token_BT[:, :5])
        before = engine.decode(token_BT[:, 5]).clone()
        engine.reset()
        for parameter in model.parameters():
            parameter.mul_(1.5)
        torch.clear_autocast_cache()
        engine.prefill(token_BT[:, :5])
        after, memory = engine.decode(token_BT[:, 5]), model.start(1, 6)
        model.prefill(token_BT[:, :5], memory)
        want = model(token_BT[:, 5:], memory=memory, rows=1).logits[:, -1]
    assert torch.equal(after, want) and not torch.equal(after, before)
