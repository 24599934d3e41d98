"""A model without something is without exactly that, and is itself again behind the block."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from small import RATIO, M, assert_same, build, random_tokens

import gsm
from gsm.analysis.interventions import ablations, answers, without_entries, without_slots, without_stage, without_stages
from gsm.analysis.needles import ask, needle_map, needle_test, stage_test
from gsm.analysis.rollout import encoder_rollout, state_routes
from gsm.data.recall import Needle
from gsm.models.base import LanguageModel, Output
from gsm.notebook import compare_states, show_state
from gsm.observe import Recording

T = 24
TASK = Needle(keys=8, values=7, fillers=6, pairs=2, gap=4)


def only(*positions: int, batch: int = 1, length: int = T) -> torch.Tensor:
    removed_BT = torch.zeros(batch, length, dtype=torch.bool)
    removed_BT[:, list(positions)] = True
    return removed_BT


@torch.no_grad()
@pytest.mark.parametrize("writer", ["additive", "multi_slot", "delta"])
def test_after_the_block_the_model_is_unchanged(writer: str):
    model, token_BT = build(f"gsm-writer={writer}"), random_tokens(1, T)
    before = model(token_BT).logits
    hooks = [module for module in model.modules() if module._forward_hooks]
    for without in (
        lambda: without_entries(model, only(3)),
        lambda: without_stages(model),
        lambda: without_slots(model, only(1)),
    ):
        with pytest.raises(ZeroDivisionError), without():
            assert not torch.equal(model(token_BT).logits, before)
            raise ZeroDivisionError
        assert torch.equal(model(token_BT).logits, before)
    assert [module for module in model.modules() if module._forward_hooks] == hooks


@torch.no_grad()
@pytest.mark.parametrize("start", [True, False])
@pytest.mark.parametrize("writer", ["additive", "multi_slot"])
def test_a_missing_entry_changes_the_rows_that_see_it_and_no_others(writer: str, start: bool):
    model, token_BT, gone = build(f"gsm-writer={writer}"), random_tokens(1, T), 6
    whole = model(token_BT).logits
    with without_entries(model, only(gone), start=start), gsm.record("state/entries", "decoder/5/weights") as seen:
        less = model(token_BT).logits
    changed_T = ((whole - less).abs() > 1e-9).any(dim=-1)[0]
    assert changed_T.nonzero()[:, 0].tolist() == list(range(gone, gone + model.writer.positions))
    logit_H = seen["decoder/5/weights"][0, gone + 1, :, -1 - 2 * model.writer.slots].log()
    assert torch.isfinite(logit_H).all(), "zeros still have a place in the softmax"


@torch.no_grad()
@pytest.mark.parametrize("case", ["gsm", "gsm-decoder_start=streams", "gsm-residual=mhc_two_pass"])
def test_a_position_without_its_start_begins_from_zeros_whatever_the_decoder_starts_from(case: str):
    """With the encoder's streams, to take z away took nothing away."""
    model, token_BT, entered = build(case), random_tokens(1, T), []
    first = model.get_submodule("decoder.blocks.0.attention_norm")
    handle = first.register_forward_pre_hook(lambda _, given: entered.append(given[0]))
    for start in (True, False):
        with without_entries(model, only(T - 1), start=start):
            model(token_BT)
    handle.remove()
    assert not entered[0][:, -1].any() and entered[1][:, -1].any() and entered[0][:, :-1].all()
    assert not [module for module in model.modules() if module._forward_pre_hooks]


@torch.no_grad()
@pytest.mark.parametrize("writer", ["additive", "multi_slot", "delta"])
def test_without_its_state_a_model_computes_as_without_every_entry(writer: str):
    model, tokens = build(f"gsm-writer={writer}"), random_tokens(2, 20)
    with without_entries(model, torch.ones(2, 20, dtype=torch.bool), start=False):
        want = model(tokens).logits
    with ablations(model)["state"]():
        assert_same(model(tokens).logits, want, writer)
    assert not torch.allclose(model(tokens).logits, want)


@torch.no_grad()
def test_without_its_stages_a_model_writes_the_encoder_s_output():
    model, token_BT = build("gsm-residual=plain"), random_tokens(2, T)
    with without_stages(model), gsm.record("state/*") as seen:
        model(token_BT)
    assert torch.equal(seen["state/z"], seen["state/e"])
    with gsm.record("state/z", "stage/*") as whole:
        model(token_BT)
    with without_stage(model, 2, only(5, batch=2)), gsm.record("state/z") as seen:
        model(token_BT)
    missing = whole["stage/2/increment"].where(only(5, batch=2)[..., None], 0)
    assert_same(whole["state/z"] - seen["state/z"], missing, "what is missing of z")


@torch.no_grad()
def test_an_emptied_slot_is_empty_in_every_bank_and_the_others_are_not():
    model, token_BT = build("gsm-residual=plain"), random_tokens(1, T)
    with gsm.record("encoder/2/bank", "encoder/3/bank") as whole:
        model(token_BT)
    with without_slots(model, only(4, length=T // RATIO)), gsm.record("encoder/2/bank", "encoder/3/bank") as seen:
        model(token_BT)
    for name in whole:
        assert not seen[name][0, 4].any()
    others = torch.arange(T // RATIO) != 4
    assert torch.equal(whole["encoder/2/bank"][:, others], seen["encoder/2/bank"][:, others])


def test_interventions_nest():
    model, token_BT = build("gsm-residual=plain"), random_tokens(1, T)
    with torch.no_grad(), without_stages(model):
        want = model(token_BT).logits
    with torch.no_grad(), ExitStack() as stack:
        for stage in (1, 2):
            stack.enter_context(without_stage(model, stage))
        assert torch.equal(model(token_BT).logits, want)


@pytest.mark.parametrize("wait", [0, 3])
def test_a_question_has_the_place_of_its_needle(wait: int):
    task = Needle(keys=8, values=7, fillers=6, pairs=3, gap=4, wait=wait)
    questions = ask(task, 40, 5)
    assert questions.row_N.shape == (15,)
    line = torch.arange(15)
    token_NT, separate = questions.token_BT[questions.sequence_N], questions.separate()
    assert torch.equal(questions.row_N - questions.key_N, torch.full((15,), wait))
    assert torch.equal(token_NT[line, questions.needle_N], token_NT[line, questions.key_N]), "the key"
    assert torch.equal(token_NT[line, questions.needle_N + 1], separate.target_BT[line, questions.row_N]), "the value"
    assert (questions.needle_N + 1 < questions.key_N - task.gap).all()
    assert (separate.target_BT >= 0).sum(1).tolist() == [1] * 15


class Oracle(torch.nn.Module):
    """Answers with a value from the last ``memory`` tokens; otherwise with token 0, which is a key and never right."""

    def __init__(self, memory: int):
        super().__init__()
        self.memory, self.evaluating = memory, ExitStack

    def forward(self, token_BT: torch.Tensor) -> Output:
        score_BTV = torch.zeros(*token_BT.shape, TASK.vocabulary)
        for line, token_T in zip(score_BTV, token_BT.tolist(), strict=True):
            for row, token in enumerate(token_T):
                first = token_T.index(token)
                line[row, token_T[first + 1] if first < row <= first + self.memory else 0] = 1
        return Output(score_BTV, torch.nn.Identity())


@pytest.mark.parametrize("memory", [1000, 20])
def test_a_needle_map_shows_how_far_a_model_remembers(memory: int):
    result = needle_map(Oracle(memory), TASK, [20, 40], depths=4, sequences=40)
    assert result.count_LD.sum(1).tolist() == [80, 80]
    accuracy_N = result.accuracy_LD[result.count_LD > 0]
    if memory == 1000:
        assert (accuracy_N == 1).all()
    else:
        assert result.accuracy_LD[0].nan_to_num(1).tolist() == [1] * 4, "in 20 tokens nothing is too far"
        assert result.accuracy_LD[1, 0] == 0 and result.accuracy_LD[1, -1] > 0.5


@pytest.mark.parametrize("removal", ["entries", "retrieved", "slots"])
def test_a_needle_test_removes_the_same_number_of_attributed_and_other_places(removal: str):
    model, questions = build("gsm-retriever=dense"), ask(TASK, T, 3)
    result = needle_test(model, questions, removal, count=2)
    attributed_NK, other_NK = result.places.attributed_NK, result.places.other_NK
    assert attributed_NK.shape == other_NK.shape == (6, 2)
    lines = zip(attributed_NK.tolist(), other_NK.tolist(), questions.row_N.tolist(), strict=True)
    for attributed, others, row in lines:
        assert not set(attributed) & set(others) and len(set(others)) == 2
        visible = range((row + 1) // RATIO) if removal == "slots" else range(row - M + 1, row + 1)
        assert set(attributed) | set(others) <= set(visible), "the row sees all places"
    kinds = (result.whole, result.without_attributed, result.without_others)
    scores = [kind.log_probability_N for kind in kinds]
    whole_N = answers(model, questions.token_BT, questions.target_BT).log_probability_N
    assert_same(scores[0], whole_N, "the answers without a removal")
    assert ((scores[1] - scores[0]).abs() > 1e-9).all()
    with pytest.raises(ValueError, match="^count"):
        needle_test(model, questions, removal, count=50)


def test_a_stage_test_removes_each_stage_and_then_all():
    model, questions = build("gsm-residual=plain"), ask(TASK, T, 3)
    result = stage_test(model, questions)
    assert list(result) == ["nothing removed", "stage 1", "stage 2", "all stages"]
    blocks = {"stage 2": without_stage(model, 2), "all stages": without_stages(model), "nothing removed": ExitStack()}
    for name, block in blocks.items():
        with block:
            want = answers(model, questions.token_BT, questions.target_BT)
        assert torch.equal(result[name].log_probability_N, want.log_probability_N), name


def test_an_error_lists_the_parts():
    parts = ablations(build("gsm", stages=[2]))
    assert list(parts) == ["state", "stage 1"]
    with pytest.raises(KeyError, match=r"part .*state, stage 1.*'typo'"):
        parts["typo"]


def test_a_removal_that_does_not_exist_is_named_before_anything_is_computed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gsm.analysis.needles.attributed_places", lambda *_, **__: pytest.fail("computed"))
    with pytest.raises(ValueError, match=r"^removal .*entries, retrieved, slots.*'typo'"):
        needle_test(build("gsm"), ask(TASK, T, 1), "typo")


@pytest.mark.parametrize(
    "look",
    [
        ablations,
        without_stages,
        lambda model: without_stage(model, 1),
        lambda model: without_entries(model, only(1)),
        lambda model: needle_test(model, ask(TASK, T, 1)),
        lambda model: stage_test(model, ask(TASK, T, 1)),
        lambda model: state_routes(model, Recording()),
        lambda model: encoder_rollout(model, Recording()),
        lambda model: compare_states({"": model}, random_tokens(1, T)),
        lambda model: show_state(model, Recording()),
    ],
)
def test_a_model_without_a_state_is_named(look: Callable[[LanguageModel], Any]):
    """It was an AttributeError of torch.nn.Module."""
    with pytest.raises(ValueError, match=r"^model .*GSM.*DecoderOnly"), ExitStack() as stack:
        if hasattr(found := look(build("delta_net")), "__enter__"):
            stack.enter_context(found)
