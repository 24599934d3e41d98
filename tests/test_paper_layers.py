"""One layer of each kind at the paper's widths, in bfloat16 on a CPU: forward and backward, with few tokens."""

from __future__ import annotations

import pytest
import torch
from small import mostly_nightly

import gsm
from gsm.layers.experts import MixtureOfExperts
from gsm.models.baseline import Baseline
from gsm.models.gsm import GSM

TOKENS = 160  # beyond the window of 128
# By day the narrowest: a processor without bfloat16 instructions takes minutes for the others.
WIDTHS = [("0p5b", 1024, 32), ("1p5b", 2048, 64), ("8b_a1p5b", 2048, 64)]


def one_layer_each(name: str, size: str) -> GSM | Baseline:
    """The model with one encoder layer, in GSM with a stage on it, one decoder layer and a small vocabulary; on the
    meta device, in bfloat16."""
    changes = "encoder_layers=1 decoder_layers=1 bank_layers=[1] stages=[1] decoder_full=2 decoder_reindex=[]"
    overrides = [f"size.{change}" for change in (*changes.split(), "vocabulary=64")]
    with torch.device("meta"):
        return gsm.build_model(name, size=size, overrides=overrides).bfloat16()


@torch.no_grad()
def filled(model: GSM | Baseline) -> GSM | Baseline:
    """On the CPU, with weights of about their usual size; experts share theirs, since random numbers take time."""
    model.to_empty(device="cpu")
    model.head.weight = model.embedding.weight
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(0.5 if name.endswith("norm.weight") else 0.0)
        else:
            block = parameter[0] if parameter.ndim == 3 else parameter
            block.normal_(std=block.shape[-1] ** -0.5)
            parameter.copy_(block.expand_as(parameter))
    for buffer in model.buffers():
        buffer.zero_()
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gsm", "baseline"])
@pytest.mark.parametrize(("size", "dim", "heads"), mostly_nightly(WIDTHS, WIDTHS[0]))
def test_a_layer_of_the_paper_s_widths_learns_in_bfloat16(name: str, size: str, dim: int, heads: int):
    model = filled(one_layer_each(name, size)).train()
    tokens = torch.randint(model.vocabulary, (1, TOKENS))
    with gsm.record("encoder/1/*", "state/entries", "stage/1/increment", "decoder/2/window") as seen:
        out = model(tokens, targets=tokens)
    (out.loss + sum(out.losses.values())).backward()
    assert out.loss.isfinite() and all(value.isfinite() for value in out.losses.values()) and out.losses
    assert (out.hidden_BRD.shape, out.hidden_BRD.dtype) == ((1, TOKENS, dim), torch.bfloat16)
    assert out.logits.shape == (1, TOKENS, model.vocabulary)
    assert seen["encoder/1/top_k"].shape == (1, TOKENS, 128) and seen["encoder/1/bank"].shape == (1, TOKENS // 2, 128)
    assert seen["encoder/1/weights"].shape == (1, TOKENS, heads, 128 + 128 + 1)
    entries = seen["state/entries" if name == "gsm" else "decoder/2/window"]
    assert (entries.shape, entries.dtype) == ((1, TOKENS, 128), torch.bfloat16)
    if name == "gsm":
        assert seen["stage/1/increment"].shape == (1, TOKENS, dim) and seen["stage/1/increment"].any()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.norm().isfinite(), name
    blocks = [*model.encoder.blocks, *model.decoder.blocks]
    assert {isinstance(block.feed_forward, MixtureOfExperts) for block in blocks} == {size == "8b_a1p5b"}
