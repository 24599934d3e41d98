"""YOCO++ against its equation, and what its two halves keep and read. That it answers to one path, to documents and to
memory is tested with all other models (`small.cases`)."""

from __future__ import annotations

import torch
from small import GEOMETRY, assert_same, build, random_tokens, randomise

from gsm.cache.memory import forgetful
from gsm.layers.attention import Attention
from gsm.layers.residual_attention import LayerKeyValues, ResidualAttention
from gsm.models.yoco_plus import YOCOPlus
from gsm.observe import patch, record
from gsm.span import Span
from gsm_kernels import rotate

SPAN = Span(torch.arange(9).expand(2, -1), rows=9)
SCALE = 35.0


def layer(first: bool, **options) -> ResidualAttention:
    options = {"key_value_heads": 2, "scale": SCALE, **options}
    return ResidualAttention(GEOMETRY.shape(), geometry=GEOMETRY, name="encoder/2", first=first, **options).double()


def run(mixer: ResidualAttention, x_BTD: torch.Tensor, below: LayerKeyValues | None):
    update_BRD, out = mixer(x_BTD, SPAN, forgetful(mixer.start(2, "encoder")), below)
    return update_BRD, out.attended


@torch.no_grad()
def test_a_layer_stores_a_mixture_of_its_own_and_the_first_layer_s_keys_and_values():
    one, two = layer(first=True), layer(first=False)
    randomise(one)
    randomise(two)
    x_BTD, y_BTD = torch.randn(2, 2, 9, GEOMETRY.dim, dtype=torch.float64)
    _, below = run(one, x_BTD, None)
    _, above = run(two, y_BTD, below)
    angles, made = two.rope.at(SPAN, torch.float64), []
    for mixer, z_BTD in ((one, x_BTD), (two, y_BTD)):
        key_BTGC, value_BTGC = mixer.key_value.projection(z_BTD).view(2, 9, 2, 2, GEOMETRY.entry_dim).unbind(2)
        made.append((rotate(key_BTGC, *angles), value_BTGC))
    for place, mix in enumerate((two.key_mix, two.value_mix)):
        assert mix is not None
        want = (mix[0] * made[0][place] + mix[1] * made[1][place]) * SCALE
        assert_same((above.history.key_BFGC, above.history.value_BFGC)[place], want, "keys or values")
    assert torch.equal(above.first_BTU, below.first_BTU), "what the third layer mixes is the first's, too"
    assert one.key_mix is None and one.value_mix is None


@torch.no_grad()
def test_a_fresh_layer_is_plain_attention():
    fresh, plain = layer(first=False), Attention(GEOMETRY.shape(), geometry=GEOMETRY, name="", key_value_heads=2)
    plain.double().load_state_dict({k: v for k, v in fresh.state_dict().items() if "mix" not in k})
    x_BTD, other_BTU = torch.randn(2, 9, GEOMETRY.dim).double(), torch.randn(2, 9, 4 * GEOMETRY.entry_dim).double()
    _, below = run(layer(first=True), x_BTD, None)
    got, _ = run(fresh, x_BTD, LayerKeyValues(other_BTU, below.history))
    want, _ = plain(x_BTD, SPAN, forgetful(plain.start(2, "encoder")), None)
    assert_same(got, want, "a layer whose weights are 0 and 1", 1e-7)  # weights are made in float32


@torch.no_grad()
def test_half_of_the_layers_store_every_token_and_the_other_half_nothing():
    model = build("yoco_plus")
    memory = model(random_tokens(1, 20), memory=model.start()).memory
    sizes = {kind: size for kind, size in memory.breakdown().items() if kind != "bookkeeping"}
    assert sizes == {"encoder_cache": GEOMETRY.encoder_layers * 20 * 2 * GEOMETRY.entry_dim * 8}
    assert model.state_bytes(memory) == sizes["encoder_cache"]


@torch.no_grad()
def test_the_second_half_reads_the_last_cache_of_the_first():
    """Later logits depend on the last cache of the first half even if the rows of that half do not read it."""
    model = build("yoco_plus")
    assert isinstance(model, YOCOPlus)
    tokens = random_tokens(1, 12)
    with record("*/weights") as seen:
        model(tokens, rows=1)
    assert [seen[f"decoder/{layer}/weights"].shape[-2:] for layer in (5, 8)] == [(4, 12)] * 2
    memory = model(tokens, memory=model.start()).memory
    before = model(tokens[:, :1], memory=memory).logits
    *others, last = memory.encoder
    with patch(f"encoder/{GEOMETRY.encoder_layers}/weights", torch.zeros_like):
        without = model(tokens[:, :1], memory=memory).logits
        last.entry.value_BFC[:, 3].neg_()
        changed = model(tokens[:, :1], memory=memory).logits
    assert not torch.allclose(without, before) and not torch.allclose(changed, without)


def test_gradients_reach_the_weights_of_the_mixture():
    model = build("yoco_plus").train()
    tokens = random_tokens(2, 12)
    model(tokens, targets=tokens).loss.backward()
    mixes = [p.grad for name, p in model.named_parameters() if "_mix" in name]
    assert len(mixes) == 2 * (GEOMETRY.encoder_layers - 1)
    assert all(grad is not None and grad.abs().min() > 0 for grad in mixes)
