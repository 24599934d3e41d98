"""State writers: their relation to the paper's writer, their taps and errors, and the few lines of a new one.

That each computes the same in training, prefill and decoding, and its equations, is tested with all the others.
"""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

import pytest
import torch
from small import GEOMETRY, M, assert_same, build, random_tokens, randomise, variant
from torch import Tensor

import gsm
from gsm.cache.memory import forgetful
from gsm.costs.model import cost
from gsm.layers.linear import Linear
from gsm.layers.rope import Rope
from gsm.models.gsm import GSM
from gsm.paths import ROOT, variants
from gsm.slots.writer.base import StateWriter
from gsm.span import Span

WRITERS = variants("model/writer")


def with_writer(writer, **options) -> GSM:
    """A small float64 model with any writer; the weights that the paper's writer has too are the same for all."""
    model = GSM(GEOMETRY, writer=writer, **options).double().eval()
    randomise(model)
    model.load_state_dict(build("gsm").state_dict(), strict=False)
    return model


def additive(**options) -> GSM:
    return with_writer(variant("writer", "additive"), **options)


def writer(name: str, **knobs):
    """A yaml's writer with other knobs."""
    chosen = variant("writer", name)
    return lambda *arguments, **parent: chosen(*arguments, **parent, **knobs)


@torch.no_grad()
def logits(model: GSM) -> Tensor:
    return model(random_tokens(2, 2 * M + 3)).logits


@torch.no_grad()
def test_one_slot_is_the_papers_writer():
    assert_same(logits(with_writer(writer("multi_slot", slots=1))), logits(additive()), "multi_slot with one slot")


@torch.no_grad()
def test_without_its_correction_delta_is_the_papers_writer_with_its_entries_normed_twice():
    delta, plain = with_writer(variant("writer", "delta")), additive()
    delta.writer.correction["entries"].bias.fill_(-1e9)  # beta is exactly 0
    before = logits(delta)
    # Two norms in a row are one, with the second one's weights, if the first has none and neither adds an epsilon.
    delta.writer.entry["entries"].norm.weight.fill_(1.0)
    delta.writer.correction["entries"].norm.weight.copy_(plain.writer.entry["entries"].norm.weight)
    for module, name in ((delta.writer, "entry"), (delta.writer, "correction"), (plain.writer, "entry")):
        getattr(module, name)["entries"].norm.eps = 0.0
    assert_same(logits(delta), logits(plain), "delta with beta = 0")
    assert (before - logits(plain)).abs().max() > 1e-3


@torch.no_grad()
def test_delta_corrects_all_entries_of_a_document_but_its_first():
    model, entries = build("gsm-writer=delta"), []
    for bias in (-1e9, 1e9):  # beta is 0, then 1
        model.writer.correction["entries"].bias.fill_(bias)
        with gsm.record("state/entries") as seen:
            model(random_tokens(1, 14), documents=torch.tensor([[0] * 5 + [1] * 9]))
        entries.append(seen["state/entries"][0])
    same = (entries[0] - entries[1]).abs().amax(-1) < 1e-12
    assert same.nonzero().flatten().tolist() == [0, 5]


@torch.no_grad()
def test_delta_does_not_write_an_entry_that_earlier_entries_fully_predict():
    delta, left = with_writer(variant("writer", "delta")).writer, []
    correction = delta.correction["entries"]
    correction.sink.fill_(-1e9)
    correction.bias.fill_(1e9)  # beta is 1
    delta.rope = Rope(GEOMETRY.rotary_dim, base=math.inf)  # but for the first pair of channels, positions are the same
    delta.entry["entries"].projection.weight[-GEOMETRY.rotary_dim :][:2] = 0.0  # and these hold nothing
    correction.norm.register_forward_pre_hook(lambda norm, inputs: left.append(inputs[0]))
    x_BTD = torch.randn(1, 1, GEOMETRY.dim, dtype=torch.float64).expand(-1, 6, -1)
    delta.write(delta.parts[0], x_BTD, Span(torch.arange(6)[None], 6), forgetful(delta.start_part(1)))
    assert left[0][:, 0].abs().max() > 0.1
    assert_same(left[0][:, 1:], torch.zeros(1, 5, GEOMETRY.entry_dim, dtype=torch.float64), "what repeats", 1e-12)


@torch.no_grad()
def test_open_gates_are_the_papers_writer_and_closed_ones_lose_the_stages():
    gated, without = with_writer(variant("writer", "gated")), with_writer(variant("writer", "encoder_only"))
    for bias, other in ((1e9, additive()), (-1e9, without)):
        gated.writer.bias.fill_(bias)
        assert_same(logits(gated), logits(other), f"gates at {bias}")


def test_gates_start_mostly_open_and_equal_for_all_channels():
    torch.manual_seed(0)
    model = GSM(GEOMETRY, writer=variant("writer", "gated"))
    with gsm.record("state/gate") as seen:
        model(random_tokens(2, 9))
    assert seen["state/gate"].shape == (2, 9, GEOMETRY.dim)
    assert_same(seen["state/gate"], torch.full((2, 9, GEOMETRY.dim), 2.0).sigmoid(), "gates at the start", 1e-6)


@torch.no_grad()
def test_concat_starts_as_the_papers_writer():
    model = GSM(GEOMETRY, writer=variant("writer", "concat")).double().eval()
    started = model.writer.correction.weight.clone()
    randomise(model)
    model.load_state_dict(build("gsm").state_dict(), strict=False)
    assert (logits(model) - logits(additive())).abs().max() > 1e-3
    model.writer.correction.weight.copy_(started)
    assert_same(logits(model), logits(additive()), "concat at its first step")


@torch.no_grad()
def test_a_row_sees_all_slots_of_the_last_positions():
    slots, size = 3, 9
    model = with_writer(writer("multi_slot", slots=slots), state_size=size)
    with gsm.record("state/entries", "decoder/5/weights") as seen:
        model(random_tokens(1, 7))
    assert seen["state/entries"].shape == (1, slots * 7, GEOMETRY.entry_dim)
    weights = seen["decoder/5/weights"][0, :, 0]
    assert_same(weights.sum(dim=-1), torch.ones(7, dtype=torch.float64), "weights and sink", 1e-12)
    assert (weights[:, :-1] > 0).sum(dim=-1).tolist() == [min(slots * (p + 1), size) for p in range(7)]


@pytest.mark.parametrize("name", WRITERS)
def test_a_writer_that_needs_stages_is_refused_in_a_model_without_them(name: str):
    chosen = variant("writer", name)
    options = {"writer": chosen, "stages": [], "state_size": 8}
    if chosen.func.needs_stages:
        with pytest.raises(ValueError, match="^writer"):
            GSM(GEOMETRY, **options)
    else:
        assert GSM(GEOMETRY, **options)(random_tokens(1, 3)).logits.shape == (1, 3, GEOMETRY.vocabulary)


class Mapped(StateWriter):
    """All that it takes: z = e + W r, with a matrix that no other writer has."""

    def __init__(self, shape, **parent):
        super().__init__(shape, **parent)
        self.map = Linear(shape.dim, shape.dim)

    def fuse(self, encoded_BTD, increments):
        return encoded_BTD + self.map(sum(increments))


@torch.no_grad()
def test_a_writer_needs_only_fuse_and_its_cost_is_known():
    model, tokens = with_writer(Mapped), random_tokens(1, 2 * M + 3)
    full, memory = model(tokens).logits, model.start()
    for part in tokens.split([M + 2, 1, M], dim=1):
        out = model(part, memory=memory, rows=1)
        memory = out.memory
        assert memory is not None
    assert_same(out.logits, full[:, -1:], "a writer of one's own, in chunks")
    assert cost(model).cache_bytes(tokens.shape[1], torch.float64) == memory.breakdown()
    plain = cost(additive()).forward_flops(9)
    more = {"state/writer": 2 * 9 * GEOMETRY.dim**2}
    assert cost(model).forward_flops(9) - plain == more


WEIGHTED = re.search(
    r"^(class Weighted.*?)```", (ROOT / "docs/tutorial_writer.md").read_text(), re.DOTALL | re.MULTILINE
)


@pytest.mark.parametrize("stages", [[2], [2, 4]])
@torch.no_grad()
def test_a_writers_constructor_knows_how_many_stages_there_are(stages: list[int]):
    """The example of docs/tutorial_writer.md; with weights of 1 it is the paper's writer."""
    assert WEIGHTED
    names: dict[str, Any] = {"StateWriter": StateWriter, "nn": torch.nn, "torch": torch}
    exec(WEIGHTED[1], names)
    model = GSM(GEOMETRY, stages=stages, writer=partial(names["Weighted"], start=1.0)).double().eval()
    assert model.writer.weight.shape == (len(stages),) and model.writer.stages == len(stages)
    plain = GSM(GEOMETRY, stages=stages).double().eval()
    model.load_state_dict(plain.state_dict(), strict=False)
    torch.testing.assert_close(logits(model), logits(plain))


def test_a_constructor_without_the_number_of_stages_does_not_get_it():
    class Strict(StateWriter):
        def __init__(self, shape, *, state_size, rope, parts):
            super().__init__(shape, state_size=state_size, rope=rope, parts=parts)

        def fuse(self, encoded_BTD: Tensor, increments: tuple[Tensor, ...]) -> Tensor:
            return encoded_BTD

    assert GSM(GEOMETRY, writer=Strict).writer.stages is None
    assert GSM(GEOMETRY, stages=[]).writer.stages == 0
