"""Which inputs may change which outputs (oracle 2).

Training, prefill and decoding share one path and so its mistakes. A changed input shows them.
"""

from __future__ import annotations

import pytest
import torch
from small import SHALLOW, M, W, assert_same, build, cases, comparators, random_tokens

LOCAL = SHALLOW.encoder_layers * (W - 1) + max(M, SHALLOW.decoder_layers * (W - 1) + W)  # reach of everything but banks


def each_changed(tokens: torch.Tensor, positions: range) -> torch.Tensor:
    """One copy of the sequence [1, T] for every position, with another token there."""
    copies = tokens.repeat(len(positions), 1)
    for row, position in enumerate(positions):
        copies[row, position] = (copies[row, position] + 1) % SHALLOW.vocabulary
    return copies


# Models that no token reaches from far away.
SHORT = [name for name in comparators() if build(name, geometry=SHALLOW).reach is not None]


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", cases())
@torch.no_grad()
def test_a_later_token_changes_nothing_earlier(case, half):
    """To the bit, in the precisions that models train in: Mamba-3 once added a share of the next token and took it off
    again, which float64 did not show."""
    model, tokens = build(case, geometry=SHALLOW).float(), random_tokens(1, 26)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        full, others = (model(copies).logits for copies in (tokens.repeat(26, 1), each_changed(tokens, range(26))))
    for t, (same, other) in enumerate(zip(full, others, strict=True)):
        if "moe" in case:  # whose rounding depends on how many tokens an expert gets
            assert_same(other[:t], same[:t], f"{case}: logits before token {t}", tolerance=0.1 if half else 1e-5)
        else:
            assert torch.equal(other[:t], same[:t]), f"{case}: logits before token {t}"
        assert not torch.equal(other[t], same[t]), f"{case}: token {t} does not reach its own logits"


@pytest.mark.parametrize("case", [case for case in cases() if case not in SHORT])
@torch.no_grad()
def test_a_token_beyond_all_windows_reaches_the_last_logits(case):
    model = build(case, geometry=SHALLOW)
    assert model.reach is None
    tokens = random_tokens(1, LOCAL + 21)
    moved = (
        (model(each_changed(tokens, range(20)), rows=1).logits - model(tokens, rows=1).logits).abs().amax(dim=(1, 2))
    )
    assert moved.max() > 1e-6, f"{case}: none of the first 20 of {tokens.shape[1]} tokens changes the last logits"


@pytest.mark.parametrize("case", SHORT)
@torch.no_grad()
def test_a_token_changes_outputs_within_the_reach_of_a_model_and_none_beyond(case):
    model = build(case, geometry=SHALLOW)
    tokens = random_tokens(1, model.reach + 5)
    copies = each_changed(tokens, range(8))  # of which the last token but `reach` is number 4
    moved = (model(copies, rows=1).logits - model(tokens, rows=1).logits).abs().amax(dim=(1, 2))
    assert moved[:4].max() < 1e-12, f"{case}: {moved}"
    assert moved[4] > 1e-9, f"{case} reaches less than {model.reach} positions back"


@pytest.mark.parametrize("case", cases())
@torch.no_grad()
def test_packed_documents_equal_each_document_alone(case):
    model = build(case, geometry=SHALLOW)
    for lengths in ([1, 1, 9, 5, 1, 12], [W, M, 2 * M + 1]):
        tokens = random_tokens(1, sum(lengths))
        ids = torch.repeat_interleave(torch.arange(len(lengths)) * 7 + 3, torch.tensor(lengths))[None]
        packed = model(tokens, documents=ids).logits.split(lengths, dim=1)
        for number, (alone, inside) in enumerate(zip(tokens.split(lengths, dim=1), packed, strict=True)):
            assert_same(inside, model(alone).logits, f"{case}: document {number} of {lengths}")


@pytest.mark.parametrize("case", ["gsm-writer=additive", "baseline-residual=mhc"])
@torch.no_grad()
def test_a_repeated_document_id_is_another_document(case):
    model, tokens = build(case, geometry=SHALLOW), random_tokens(1, 24)
    again = torch.tensor([[0] * 8 + [1] * 8 + [0] * 8])
    apart = torch.tensor([[0] * 8 + [1] * 8 + [2] * 8])
    assert_same(model(tokens, documents=again).logits, model(tokens, documents=apart).logits, f"{case}: runs of ids")


@pytest.mark.parametrize("case", cases())
@torch.no_grad()
def test_shifting_all_positions_changes_nothing(case, monkeypatch):
    from gsm.layers.rope import Rope

    model, tokens = build(case, geometry=SHALLOW), random_tokens(1, 30)
    want, angles = model(tokens).logits, Rope.__call__
    monkeypatch.setattr(Rope, "__call__", lambda self, position, dtype: angles(self, position + 1000, dtype))
    assert_same(model(tokens).logits, want, f"{case}: all positions moved by 1000")
