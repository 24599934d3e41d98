"""NSA against its equations, written out row by row, and the blocks that it chooses. That it answers to one path, to
documents and to memory is tested with all other models (`small.cases`)."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from small import GEOMETRY, assert_same, build, random_tokens, randomise, variant
from torch import Tensor

from gsm.cache.memory import forgetful
from gsm.layers.key_value import History
from gsm.layers.nsa import NSA, choose_blocks
from gsm.observe import record
from gsm.span import Span
from gsm_kernels import attend_range

LENGTH = 41
EIGHT = replace(GEOMETRY, heads=8, output_groups=2)  # two groups of four heads


def nsa(geometry=GEOMETRY, **knobs) -> NSA:
    mixer = variant("mixer", "nsa")(geometry.shape(), geometry=geometry, name="decoder/1", **knobs).double()
    randomise(mixer)
    return mixer.eval()


def turned(x_C: Tensor, position: int, mixer: NSA, inverse: bool = False) -> Tensor:
    """A vector rotated as at a position, pair by pair as complex numbers."""
    rotary = mixer.rope.channels
    angle_P = position * mixer.rope.base ** (-2 * torch.arange(rotary // 2, dtype=torch.float64) / rotary)
    pairs = torch.view_as_complex(x_C[len(x_C) - rotary :].reshape(-1, 2).contiguous())
    turn = torch.polar(torch.ones_like(angle_P), -angle_P if inverse else angle_P)
    return torch.cat([x_C[: len(x_C) - rotary], torch.view_as_real(pairs * turn).flatten()])


def compressed(mixer: NSA, raw_MC: Tensor, enter, leave, place_MC: Tensor) -> Tensor:
    """Return the compressed vector of a block, from its tokens' vectors before rotation."""
    hidden_C = sum(F.silu(enter.weight @ x_C + p_C) for x_C, p_C in zip(raw_MC, place_MC, strict=True))
    return leave.weight @ hidden_C / mixer.block**0.5


def attended(query_C: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Return softmax attention of one query; 0 without keys."""
    if not keys:
        return torch.zeros_like(query_C)
    return F.softmax(torch.stack(keys) @ query_C / len(query_C) ** 0.5, dim=0) @ torch.stack(values)


def written_out(mixer: NSA, x_TD: Tensor) -> tuple[Tensor, list[list[set[int]]]]:
    """Return NSA's output for one document, and the blocks that each row selects for each group of heads."""
    query_THC = mixer.query(x_TD[None])[0][0]
    heads, width = query_THC.shape[1:]
    groups, m = mixer.key_value.heads, mixer.block
    raw_T2GC = mixer.key_value.projection(x_TD).view(len(x_TD), 2, groups, width)
    place, shared, compressor = mixer.compressor.place, heads // groups, mixer.compressor
    key_of, value_of = (compressor.key_in, compressor.key_out), (compressor.value_in, compressor.value_out)
    rows, chosen = [], []
    for t in range(len(x_TD)):
        gate_3H = torch.sigmoid(mixer.gate(x_TD[t])).view(3, heads)
        out_HC, finished, own = torch.zeros(heads, width, dtype=x_TD.dtype), (t + 1) // m, t // m
        picked = []
        for g in range(groups):
            keys = [turned(raw_T2GC[i, 0, g], i, mixer) for i in range(t + 1)]
            values = [raw_T2GC[i, 1, g] for i in range(t + 1)]
            blocks = [raw_T2GC[c * m : (c + 1) * m, :, g] for c in range(finished)]
            block_keys = [turned(compressed(mixer, b[:, 0], *key_of, place[:, 0]), c * m, mixer)
                          for c, b in enumerate(blocks)]  # fmt: skip
            block_values = [compressed(mixer, b[:, 1], *value_of, place[:, 1]) for b in blocks]
            queries = [turned(query_THC[t, h], t, mixer) for h in range(g * shared, (g + 1) * shared)]
            score = [0.0] * finished
            for query_C, _ in itertools.product(queries, range(min(1, finished))):
                weight = F.softmax(torch.stack(block_keys) @ query_C / width**0.5, dim=0)
                score = [a + float(b) for a, b in zip(score, weight, strict=True)]
            always = {c for c in (0, own - 1, own) if c >= 0}
            rest = sorted(set(range(finished)) - always, key=lambda c: -score[c])
            picked.append(always | set(rest[: mixer.blocks - len(always)]))
            tokens = [i for i in range(t + 1) if i // m in picked[-1]]
            near = range(max(0, t + 1 - mixer.window), t + 1)
            for h, query_C in enumerate(queries, g * shared):
                out_HC[h] = gate_3H[0, h] * attended(query_C, block_keys, block_values)
                for branch, seen in ((1, tokens), (2, near)):
                    out_HC[h] += gate_3H[branch, h] * attended(
                        query_C, [keys[i] for i in seen], [values[i] for i in seen]
                    )
        rows.append(mixer.output(out_HC[None, None])[0, 0])
        chosen.append(picked)
    return torch.stack(rows), chosen


def of_one_document(mixer: NSA, x_BTD: Tensor, rows: int) -> Tensor:
    """Return the output of a mixer without a memory."""
    span = Span(torch.arange(x_BTD.shape[1]).expand(len(x_BTD), -1), rows=rows)
    return mixer(x_BTD, span, forgetful(mixer.start(len(x_BTD), "decoder")), None)[0]


@pytest.mark.parametrize(
    ("geometry", "knobs"),
    [
        (GEOMETRY, {}),
        (EIGHT, {"block": 4, "blocks": 4, "window": 6}),
        (EIGHT, {"block": 2, "blocks": 5, "key_value_heads": 8}),
        (GEOMETRY, {"block": 3, "blocks": 3, "window": 1, "key_value_heads": 2}),
    ],
)
@torch.no_grad()
def test_a_layer_equals_its_equations(geometry, knobs):
    mixer, x_BTD = nsa(geometry, **knobs), torch.randn(2, LENGTH, GEOMETRY.dim, dtype=torch.float64)
    want = torch.stack([written_out(mixer, x_TD)[0] for x_TD in x_BTD])[:, -17:]
    assert_same(of_one_document(mixer, x_BTD, 17), want, f"nsa {knobs}")


@torch.no_grad()
def test_heads_of_a_group_choose_the_blocks_with_most_weight_and_those_that_are_always_seen():
    mixer = nsa(EIGHT, block=4, blocks=4, key_value_heads=2)
    x_TD = torch.randn(LENGTH, GEOMETRY.dim, dtype=torch.float64)
    _, chosen = written_out(mixer, x_TD)
    with record("decoder/1/selected/weights") as seen:
        of_one_document(mixer, x_TD[None], LENGTH)
    weights_RHF = seen["decoder/1/selected/weights"][0]
    assert any(groups[0] != groups[1] for groups in chosen), "two groups that always agree show nothing"
    for t, groups in enumerate(chosen):
        assert {0, max(t // 4 - 1, 0), t // 4} <= groups[0] and len(groups[0]) == min(4, t // 4 + 1)
        for head in range(8):
            tokens = weights_RHF[t, head].nonzero()[:, 0].tolist()
            assert {token // 4 for token in tokens} == groups[head // 4] and max(tokens) == t


@torch.no_grad()
def test_a_distant_token_affects_a_row_only_through_its_block():
    """With every gate but that of the selected branch closed, a token of a block that is not chosen changes nothing."""
    mixer = nsa(block=4, blocks=4)
    x_TD = torch.randn(LENGTH, GEOMETRY.dim, dtype=torch.float64)
    (picked,) = written_out(mixer, x_TD)[1][-1]
    left_out = next(c for c in range(LENGTH // 4) if c not in picked)
    with record("*/weights") as seen:
        of_one_document(mixer, x_TD[None], 1)
    assert not seen["decoder/1/selected/weights"][..., 4 * left_out : 4 * left_out + 4].any()
    assert (seen["decoder/1/compressed/weights"] > 0).all() and seen["decoder/1/compressed/weights"].shape[-1] == 10
    assert (seen["decoder/1/window/weights"] > 0).sum(-1).eq(GEOMETRY.window).all()


def test_the_default_blocks_hold_the_size_s_top_k_tokens():
    assert nsa().blocks == 4 and nsa(replace(GEOMETRY, top_k=17)).blocks == 6


@torch.no_grad()
def test_every_token_and_every_block_is_stored_once():
    model = build("nsa").to(torch.bfloat16)
    entry, layers = 2 * GEOMETRY.entry_dim * 2, GEOMETRY.depth  # one key and one value head in bfloat16
    memory = model(random_tokens(1, 20), memory=model.start()).memory
    sizes = {"decoder_cache": 20 * entry, "decoder_blocks": 2 * entry, "decoder_window": 7 * entry}
    assert {kind: memory.breakdown()[kind] for kind in sizes} == {kind: layers * size for kind, size in sizes.items()}


# The pieces of flash-linear-attention's naive form, in float32.


def random_call(batch=2, length=70, heads=8, groups=2, channels=16, block=8):
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(batch, length, heads, channels, generator=generator)
    key, value = torch.randn(2, batch, length // block, groups, channels, generator=generator)
    last = ((torch.arange(length) + 1) // block).expand(batch, -1)
    return query, History(key, value, torch.zeros_like(last), last), torch.arange(length).expand(batch, -1), block


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::ImportWarning")
def test_the_library_chooses_the_same_blocks():
    pytest.importorskip("fla.ops")
    from fla.ops.nsa.naive import naive_nsa_topk

    query, blocks, position, block = random_call()
    # It has a mean of the last block before that is finished, whose number alone counts.
    unfinished = torch.cat((blocks.key_BFGC, blocks.key_BFGC[:, :1]), dim=1)
    expected = naive_nsa_topk(query, unfinished, 5, block, query.shape[-1] ** -0.5)
    got = choose_blocks(query, blocks, position, block, 5)
    for row_N, wanted_N in zip(got.flatten(0, 2).tolist(), expected.flatten(0, 2).tolist(), strict=True):
        assert set(row_N) - {-1} == set(wanted_N) - {-1}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::ImportWarning")
def test_the_library_computes_the_same_attention_to_compressed_blocks():
    pytest.importorskip("fla.ops")
    from fla.ops.nsa.naive import naive_nsa_compression

    query, blocks, _, block = random_call()
    entries = (blocks.key_BFGC, blocks.value_BFGC)
    expected, _ = naive_nsa_compression(query, *entries, block, query.shape[-1] ** -0.5)
    got = attend_range(query, *entries, blocks.first_BR, blocks.last_BR)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)
