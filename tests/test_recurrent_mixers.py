"""Recurrent mixers: each against its equations, its knobs, and the size of what it remembers. That they answer to one
path, to documents and to memory is tested with all other models (`small.cases`)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf
from small import GEOMETRY, assert_same, random_tokens, randomise, variant
from torch import Tensor

from gsm.cache.memory import forgetful
from gsm.layers.convolution import ShortConvolution
from gsm.layers.kda import KDA
from gsm.layers.mamba3 import Mamba3
from gsm.layers.raven import Raven
from gsm.layers.recurrence import Recurrence
from gsm.layers.residual import Plain
from gsm.layers.slot_memory import SlotMemory
from gsm.models.decoder_only import DecoderOnly
from gsm.observe import record
from gsm.paths import ROOT, variants
from gsm.span import Span


def yaml_of(name: str):
    return OmegaConf.load(ROOT / "configs/model/mixer" / f"{name}.yaml")


NAMES = [name for name in variants("model/mixer") if issubclass(get_class(yaml_of(name)._target_), Recurrence)]
SLOTS = ("gsa", "raven")  # whose state is keys and values
PLAIN = ("raven", "mamba3")  # without a convolution
LENGTH = 41


def mixer_of(name: str, **knobs) -> Recurrence:
    mixer = instantiate(yaml_of(name), **knobs)(GEOMETRY.shape(), geometry=GEOMETRY, name="decoder/1").double()
    randomise(mixer)
    return mixer.eval()


def build(name: str) -> DecoderOnly:
    """Build a comparator with one kind of layer."""
    mixers = {name: variant("mixer", name)}
    model = DecoderOnly(GEOMETRY, mixers=mixers, layers=[name], query_rank=GEOMETRY.query_rank, residual=Plain).double()
    randomise(model)
    return model.eval()


# The equations, token by token and head by head.


def written_out(mixer: Recurrence, x_TD: Tensor) -> Tensor:
    """Return a mixer's output for one document, computed from its parameters."""
    if isinstance(mixer, SlotMemory):
        return slots_written_out(mixer, x_TD)
    if isinstance(mixer, Mamba3):
        return turning_written_out(mixer, x_TD)
    heads, width, steps, delta = mixer.heads, mixer.width, mixer.steps, hasattr(mixer, "beta")
    state_HCC, rows = x_TD.new_zeros(heads, width, width), []
    for t, mixed_C in enumerate(convolved(mixer, x_TD)):
        q_HC, k_SHC, v_SHC = (
            part.view(-1, heads, width)
            for part in mixed_C.split([heads * width, steps * heads * width, steps * heads * width])
        )
        if delta:
            q_HC, k_SHC = (a / a.norm(dim=-1, keepdim=True) for a in (F.silu(q_HC), F.silu(k_SHC)))
            v_SHC, beta_SH = F.silu(v_SHC), mixer.largest_beta * torch.sigmoid(mixer.beta(x_TD[t])).view(steps, heads)
        else:
            q_HC, k_SHC = (torch.where(a > 0, a + 1, a.exp()) for a in (q_HC, k_SHC))
        if hasattr(mixer, "decay"):  # a number for each head, or for each of its channels
            step_HN = torch.log1p(torch.exp(mixer.decay(x_TD[t]) + mixer.decay_bias)).view(heads, -1)
            state_HCC = torch.exp(-mixer.decay_rate.exp()[:, None] * step_HN)[..., None] * state_HCC
        for i in range(steps):
            answer_HC = torch.einsum("hkv,hk->hv", state_HCC, k_SHC[i])
            write_HC = beta_SH[i][:, None] * (v_SHC[i] - answer_HC) if delta else v_SHC[i]
            state_HCC = state_HCC + torch.einsum("hk,hv->hkv", k_SHC[i], write_HC)
        out_HC = mixer.norm(torch.einsum("hkv,hk->hv", state_HCC, q_HC.view(heads, width)))
        if hasattr(mixer, "gate"):
            squash = torch.sigmoid if isinstance(mixer, KDA) else F.silu
            out_HC = out_HC * squash(mixer.gate(x_TD[t])).view(heads, width)
        rows.append(mixer.output(out_HC.flatten()))
    return torch.stack(rows)


def convolved(mixer: Recurrence, x_TD: Tensor) -> list[Tensor]:
    """Query, key and value of every token, behind the short convolution."""
    raw_TC = torch.cat([mixer.query(x_TD[None])[0][0].flatten(-2), mixer.key(x_TD), mixer.value(x_TD)], dim=-1)
    taps_CW = torch.ones_like(raw_TC[0])[:, None] if mixer.convolution is None else mixer.convolution.weight
    count = taps_CW.shape[1]
    return [sum(taps_CW[:, j] * raw_TC[t - j] for j in range(min(t + 1, count))) for t in range(len(x_TD))]


def slots_written_out(mixer: SlotMemory, x_TD: Tensor) -> Tensor:
    """The same of a mixer with slots."""
    heads, width, slots = mixer.heads, mixer.width, mixer.slots
    key_HMC, value_HMC, rows = x_TD.new_zeros(heads, slots, width), x_TD.new_zeros(heads, slots, width), []
    for t, mixed_C in enumerate(convolved(mixer, x_TD)):
        q_HC, k_HC, v_HC = F.silu(mixed_C).view(3, heads, width)
        if isinstance(mixer, Raven):
            q_HC, k_HC, left_HM1 = mixer.query_norm(q_HC), mixer.key_norm(k_HC), routed(mixer, x_TD[t])[..., None]
        else:
            left_HM1 = torch.sigmoid(mixer.decay(x_TD[t])).view(heads, slots, 1) ** (1 / mixer.damping)
        key_HMC = left_HM1 * key_HMC + (1 - left_HM1) * k_HC[:, None]
        value_HMC = left_HM1 * value_HMC + (1 - left_HM1) * v_HC[:, None]
        weight_HM = torch.einsum("hmc,hc->hm", key_HMC, q_HC).softmax(-1)
        out_C = mixer.norm(F.silu(torch.einsum("hm,hmc->hc", weight_HM, value_HMC)).flatten())  # over all heads
        rows.append(mixer.output(out_C))
    return torch.stack(rows)


def routed(mixer: Raven, x_D: Tensor) -> Tensor:
    """Return the decay factor of each of Raven's slots, computed one by one."""
    score_HM = torch.sigmoid(mixer.router(x_D)).view(mixer.heads, mixer.slots)
    step_H = torch.log1p(torch.exp(mixer.decay(x_D) + mixer.decay_bias))
    left_HM = torch.ones_like(score_HM)
    for head, score_M in enumerate(score_HM):
        best = sorted(range(mixer.slots), key=lambda slot: -score_M[slot])[: mixer.written]
        for slot in best:
            share = score_M[slot] / sum(score_M[other] for other in best)
            left_HM[head, slot] = torch.exp(-mixer.decay_rate[head].exp() * step_H[head] * share)
    return left_HM


def turning_written_out(mixer: Mamba3, x_TD: Tensor) -> Tensor:
    """The same of Mamba-3, with the pairs that turn as complex numbers, and angles from the first token on."""
    heads, width, still = mixer.heads, mixer.width, mixer.width - mixer.rotated
    angle_HP, rows = x_TD.new_zeros(heads, mixer.rotated // 2), []
    state_HCC = x_TD.new_zeros(heads, width, width)
    before_HC = last_HC = x_TD.new_zeros(heads, width)

    def turned(x_HC: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x_HC[:, still:].reshape(heads, -1, 2).contiguous())
        turn = torch.view_as_real(pairs * torch.exp(1j * angle_HP)).flatten(1)
        return torch.cat([x_HC[:, :still], turn], dim=1)

    for x_D, mixed_C in zip(x_TD, convolved(mixer, x_TD), strict=True):
        q_HC, k_HC, v_HC = mixed_C.view(3, heads, width)
        step_H1 = torch.log1p(torch.exp(mixer.step(x_D) + mixer.step_bias))[:, None]
        rate_H1 = torch.log1p(torch.exp(mixer.decay(x_D)))[:, None].clamp(min=1e-4)
        left_H1, blend_H1 = torch.exp(-rate_H1 * step_H1), torch.sigmoid(mixer.blend(x_D))[:, None]
        angle_HP = angle_HP + torch.pi * torch.tanh(mixer.angle(x_D)) * step_H1
        q_HC = turned(mixer.query_norm(q_HC) + mixer.query_bias.view(heads, width))
        k_HC = turned(mixer.key_norm(k_HC) + mixer.key_bias.view(heads, width))
        old_HCC = torch.einsum("hk,hv->hkv", before_HC, (1 - blend_H1) * step_H1 * left_H1 * last_HC)
        new_HCC = torch.einsum("hk,hv->hkv", k_HC, blend_H1 * step_H1 * v_HC)
        state_HCC = left_H1[..., None] * state_HCC + old_HCC + new_HCC
        before_HC, last_HC = k_HC, v_HC
        out_HC = mixer.norm(torch.einsum("hkv,hk->hv", state_HCC, q_HC) + mixer.skip[:, None] * v_HC)
        rows.append(mixer.output((out_HC * F.silu(mixer.gate(x_D)).view(heads, width)).flatten()))
    return torch.stack(rows)


KNOBS = [(name, {}) for name in NAMES] + [
    ("linear_attention", {"convolution": 1}),
    ("delta_net", {"convolution": 1, "largest_beta": 2.0}),
    ("delta_product", {"convolution": 2, "steps": 3, "largest_beta": 1.0}),
    ("gsa", {"convolution": 1, "slots": 5, "damping": 2.0}),
    ("raven", {"convolution": 4, "slots": 5, "top_k": 1}),
    ("mamba3", {"rotated": 2}),
    ("mamba3", {"rotated": 8}),
]


def alone(mixer, x_BTD, span):
    """Return the output of a mixer without a memory."""
    update_BRD, _ = mixer(x_BTD, span, forgetful(mixer.start(len(x_BTD), "decoder")), None)
    return update_BRD


@pytest.mark.parametrize(("name", "knobs"), KNOBS, ids=[f"{name}{knobs or ''}" for name, knobs in KNOBS])
@torch.no_grad()
def test_a_mixer_equals_its_equations(name, knobs):
    mixer, x_BTD = mixer_of(name, **knobs), torch.randn(2, LENGTH, GEOMETRY.dim, dtype=torch.float64)
    span = Span(torch.arange(LENGTH).expand(2, -1), rows=7)
    got = alone(mixer, x_BTD, span)
    want = torch.stack([written_out(mixer, x_TD) for x_TD in x_BTD])[:, -7:]
    assert_same(got, want, name)


@torch.no_grad()
def test_a_token_of_raven_changes_only_its_chosen_slots_and_noise_chooses_others():
    mixer, x_BTD = mixer_of("raven", top_k=2), torch.randn(3, 20, GEOMETRY.dim, dtype=torch.float64)
    share_BTHM = mixer.route(x_BTD)
    assert ((share_BTHM > 0).sum(-1) == 2).all()
    assert_same(share_BTHM.sum(-1), torch.ones_like(share_BTHM[..., 0]), "shares")
    assert ((mixer.slot_decay(x_BTD) < 0) == (share_BTHM > 0)).all()
    assert torch.equal(mixer.route(x_BTD), share_BTHM)
    assert not torch.equal(mixer.train().route(x_BTD) > 0, share_BTHM > 0)
    mixer.noise = False
    assert torch.equal(mixer.route(x_BTD), share_BTHM)


@torch.no_grad()
def test_mamba_3_continues_from_any_token_and_resets_at_each_document():
    """One call, calls of any length, and separate documents agree, although the stored state has no angle."""
    mixer, x_BTD = mixer_of("mamba3"), torch.randn(1, LENGTH, GEOMETRY.dim, dtype=torch.float64)
    position_BT = torch.cat([torch.arange(17), torch.arange(LENGTH - 17)])[None]
    whole = alone(mixer, x_BTD, Span(position_BT, rows=LENGTH))
    assert_same(whole[0, :17], written_out(mixer, x_BTD[0, :17]), "the first document")
    assert_same(whole[0, 17:], written_out(mixer, x_BTD[0, 17:]), "the second document")
    cache, parts = mixer.start(1, "decoder"), []
    for first, end in ((0, 1), (1, 2), (2, 16), (16, 30), (30, 31), (31, LENGTH)):
        span = Span(position_BT[:, first:end], rows=end - first)
        update_BRD, out = mixer(x_BTD[:, first:end], span, cache, None)
        parts.append(update_BRD)
        cache = out.cache
    assert_same(torch.cat(parts, dim=1), whole, "calls of any length")


@torch.no_grad()
def test_delta_product_of_one_step_is_delta_net():
    one, net = mixer_of("delta_product", steps=1, largest_beta=1.0), mixer_of("delta_net")
    one.load_state_dict(net.state_dict())
    x_BTD = torch.randn(2, 9, GEOMETRY.dim, dtype=torch.float64)
    span = Span(torch.arange(9).expand(2, -1), rows=9)
    assert torch.equal(alone(one, x_BTD, span), alone(net, x_BTD, span))


def test_the_convolution_equals_pytorch_s_on_one_document():
    convolution, x_BTC = ShortConvolution(6, 4).double(), torch.randn(2, 11, 6, dtype=torch.float64)
    want = F.conv1d(F.pad(x_BTC.mT, (3, 0)), convolution.weight.flip(-1)[:, None], groups=6).mT
    assert_same(convolution(x_BTC, torch.arange(11).expand(2, -1)), want, "the short convolution")


@pytest.mark.parametrize("name", ["gated_delta_net", "kda"])
def test_a_fresh_gated_head_forgets_at_the_rates_of_mamba_2(name):
    torch.manual_seed(0)
    mixer = instantiate(yaml_of(name))(replace(GEOMETRY.shape(), heads=64), geometry=GEOMETRY, name="decoder/1")
    step_H, rate_H = F.softplus(mixer.decay_bias), mixer.decay_rate.exp()
    assert 0.001 <= step_H.min() < 0.003 and 0.03 < step_H.max() <= 0.1001
    assert 1 <= rate_H.min() < 3 and 14 < rate_H.max() <= 16


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_memory_has_its_full_size_from_the_start(name):
    model = build(name).to(torch.bfloat16)
    inner, layers = GEOMETRY.heads * GEOMETRY.entry_dim, GEOMETRY.depth
    steps = model.decoder.blocks[0].attention.steps
    state = inner * GEOMETRY.entry_dim  # a matrix
    if name in SLOTS:  # keys and values of as many slots as there are channels
        state *= 2
    elif name == "mamba3":  # and the last token's key and value
        state += 2 * inner
    sizes = {"decoder_state": layers * 3 * state * 4}  # layers, sequences, float32
    if name not in PLAIN:
        sizes["decoder_convolution"] = layers * 3 * (1 + 2 * steps) * inner * 3 * 2  # three tokens, bfloat16
    for capacity in (None, 20, 40):
        memory = model.start(3, capacity)
        memory = model(random_tokens(3, 7), memory=memory).memory
        assert {kind: size for kind, size in memory.breakdown().items() if kind in sizes} == sizes
        memory = model(random_tokens(3, 9), memory=memory, rows=1).memory
        assert {kind: size for kind, size in memory.breakdown().items() if kind in sizes} == sizes


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_state_has_a_tap_and_its_parameters_are_reported(name):
    model = build(name)
    with record("decoder/*/state") as seen:
        model(random_tokens(2, 5))
    assert set(seen) == {f"decoder/{layer}/state" for layer in range(1, GEOMETRY.depth + 1)}
    width = GEOMETRY.entry_dim
    kept = (width, 2 * width) if name in SLOTS else (width + 2 if name == "mamba3" else width, width)
    assert seen["decoder/2/state"].shape == (2, GEOMETRY.heads, *kept)
    parts = model.parameter_report().parts
    assert parts["recurrence"] > 0 and parts["query, output, sink"] > 0
    assert not {"other", "attention, other"} & set(parts), "a parameter without a name of its own"
