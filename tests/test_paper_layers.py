"""One layer of each kind at the paper's widths, in bfloat16 on a CPU: forward and backward, with few tokens."""

from __future__ import annotations

import pytest
import torch

import gsm
from gsm.models.gsm import GSM
from gsm.nn.experts import MixtureOfExperts

TOKENS = 12


def one_layer_each(size: str) -> GSM:
    """GSM of the size with one encoder layer, its stage, one decoder layer and a small vocabulary; on the meta device,
    in bfloat16."""
    changes = "encoder_layers=1 decoder_layers=1 bank_layers=[1] stages=[1] decoder_full=2 decoder_reindex=[]"
    overrides = [f"size.{change}" for change in (*changes.split(), "vocabulary=64")]
    with torch.device("meta"):
        return gsm.build_model("gsm", size=size, overrides=overrides).bfloat16()


@torch.no_grad()
def filled(model: GSM) -> GSM:
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
@pytest.mark.parametrize("size", ["0p5b", "1p5b", "8b_a1p5b"])
def test_a_layer_of_the_paper_s_widths_learns_in_bfloat16(size: str):
    model = filled(one_layer_each(size)).train()
    tokens = torch.randint(model.vocabulary, (1, TOKENS))
    out = model(tokens, targets=tokens)
    (out.loss + sum(out.losses.values())).backward()
    assert out.hidden_BRD.dtype == torch.bfloat16 and out.loss.isfinite()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.norm().isfinite(), name
    assert isinstance(model.decoder.blocks[0].feed_forward, MixtureOfExperts) == (size == "8b_a1p5b")
