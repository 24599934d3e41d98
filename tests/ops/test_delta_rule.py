"""delta_rule: the reference against matrices written out, the chunked form against the reference, and what the library
flash-linear-attention is given."""

import inspect
import itertools
from typing import Any

import pytest
import torch
from calls import cast, recurrence
from closeness import assert_close, relative_error

from gsm.layers import delta_rule as module
from gsm.layers.delta_rule import Inputs, delta_rule
from gsm_kernels import listening, using

KINDS = [
    {"rule": rule, "decay": decay, "by_channel": by_channel}
    for rule, decay, by_channel in itertools.product((True, False), repeat=3)
]
NAMES = [" and ".join(name for name, on in kind.items() if on) or "sum" for kind in KINDS]
kinds = pytest.mark.parametrize("kind", KINDS, ids=NAMES)


@pytest.mark.parametrize("name", ["reference", "chunked"])
def test_padding_alone_leaves_everything_as_it_is(name):
    call = recurrence(tokens=40, by_channel=True)
    call |= {"live_BT": torch.zeros_like(call["live_BT"])}
    with using(name):
        out, state = delta_rule(**call)
    assert not out.any() and torch.equal(state, call["state_BHCC"])


def test_a_single_token_is_left_to_the_reference():
    with listening() as heard:
        delta_rule(**recurrence(tokens=1))
    assert heard == [("delta_rule", "reference")]


# What flash-linear-attention is given. Its kernels need a GPU: here the reference stands in for them.


def stand_in(family, form):
    """A kernel of the library's signature: sequences end to end, each from a state of its own."""
    takes = {"simple_gla": (False, None), "delta_rule": (True, False), "gated_delta_rule": (True, 3), "kda": (True, 4)}
    rule, ndim = takes[family]

    def run(q, k, v, beta: Any = None, g: Any = None, *, scale, initial_state, output_final_state, cu_seqlens=None):
        assert (beta is not None) == rule and output_final_state
        assert ndim is None or (g.ndim if g is not None else False) == ndim
        bounds = list(range(q.shape[0] + 1)) if cu_seqlens is None else cu_seqlens.tolist()
        outs, states = [], []
        for number, (first, end) in enumerate(itertools.pairwise(bounds)):
            cut = (lambda x, f=first, e=end: x[f:e]) if cu_seqlens is None else (lambda x, f=first, e=end: x[:, f:e])
            q_, k_, v_ = (cut(x) for x in (q, k, v))
            beta_, g_ = (None if x is None else cut(x) for x in (beta, g))
            never = torch.zeros(q_.shape[:2], dtype=torch.bool)
            decays = (None, g_) if family == "kda" else (g_, None)
            inputs = Inputs(q_, k_, v_, beta_, decays[0], never, ~never, initial_state[number][None], scale, decays[1])
            out, state = delta_rule.reference(inputs)
            outs.append(out)
            states.append(state)
        return torch.cat(outs, dim=0 if cu_seqlens is None else 1), torch.cat(states)

    assert form in ("chunk", "fused_recurrent")
    return run


BORROWED = [kind for kind in KINDS if kind["rule"] or not kind["by_channel"]]
borrowed = pytest.mark.parametrize("kind", BORROWED, ids=[NAMES[KINDS.index(kind)] for kind in BORROWED])


@borrowed
@pytest.mark.parametrize("tokens", [1, 37])
@torch.no_grad()
def test_documents_become_sequences_end_to_end(kind, tokens, monkeypatch):
    monkeypatch.setattr(module, "_kernel", stand_in)
    for seed in range(3):
        inputs = Inputs(**recurrence(batch=3, tokens=tokens, seed=seed, **kind))
        out, state = module._by_fla(inputs)
        expected_out, expected_state = delta_rule.reference(inputs)
        assert_close(out, expected_out)
        assert_close(state, expected_state, name="state")


@pytest.mark.parametrize("family", module.FAMILIES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_library_s_functions_take_what_they_are_given(family):
    pytest.importorskip("fla.ops")
    for form in ("chunk", "fused_recurrent"):
        function = module._kernel(family, form)
        call = {"q": 0, "k": 0, "v": 0, "scale": 0, "initial_state": 0, "output_final_state": True, "cu_seqlens": 0}
        call |= {"beta": 0} if family != "simple_gla" else {}
        call |= {"g": 0} if family != "delta_rule" else {}
        signature = inspect.signature(inspect.unwrap(function))
        assert set(call) <= set(signature.parameters)
        signature.bind(**call)


@pytest.mark.parametrize("name", ["reference", "chunked"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_library_s_own_naive_forms_agree(name):
    pytest.importorskip("fla.ops")
    from fla.ops.delta_rule.naive import delta_rule_recurrence
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
    from fla.ops.kda.naive import naive_recurrent_kda
    from fla.ops.linear_attn.naive import naive_recurrent_linear_attn

    call = cast(recurrence(tokens=70, by_channel=True), torch.float32)
    never = torch.zeros_like(call["start_BT"])
    q, k, v, beta, g, _, _, state, scale, gk = (call | {"scale": call["query_BTHC"].shape[-1] ** -0.5}).values()
    heads_first = [x.transpose(1, 2) for x in (q, k, v, beta)]
    out, after = delta_rule_recurrence(*heads_first, initial_state=state)
    wanted = {
        (beta, None, None): (out.transpose(1, 2), after),
        (beta, g, None): naive_recurrent_gated_delta_rule(q, k, v, beta, g, scale, state, True),
        (beta, None, gk): naive_recurrent_kda(q, k, v, gk, beta, scale, state, True),
        (None, None, None): naive_recurrent_linear_attn(q, k, v, scale, state, True),
    }
    for (rule, head, by_channel), expected in wanted.items():
        with using(name):
            got = delta_rule(q, k, v, rule, head, never, ~never, state, scale, by_channel)
        for mine, theirs in zip(got, expected, strict=True):
            assert relative_error(mine, theirs) < 2e-6
