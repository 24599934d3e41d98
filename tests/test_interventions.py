"""A model without something is without exactly that, and is itself again behind the block."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from small import RATIO, M, assert_same, build, random_tokens

import gsm
from gsm.analysis.interventions import ablations, answers, without_entries, without_slots, without_stage, without_stages
from gsm.analysis.needles import ask, needle_map, needle_test, stage_test
from gsm.data.recall import Needle
from gsm.models.base import Output

T = 24
TASK = Needle(keys=8, values=7, fillers=6, pairs=2, gap=4)


def only(*positions: int, batch: int = 1, length: int = T) -> torch.Tensor:
    gone_BT = torch.zeros(batch, length, dtype=torch.bool)
    gone_BT[:, list(positions)] = True
    return gone_BT


@torch.no_grad()
@pytest.mark.parametrize("writer", ["additive", "multi_slot", "delta"])
def test_after_the_block_the_model_is_unchanged(writer: str):
    model, token_BT = build(f"gsm-writer={writer}"), random_tokens(1, T)
    before = model(token_BT).logits
    hooks = [module for module in model.modules() if module._forward_hooks]
    for gone in (
        lambda: without_entries(model, only(3)),
        lambda: without_stages(model),
        lambda: without_slots(model, only(1)),
    ):
        with pytest.raises(ZeroDivisionError), gone():
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


def test_interventions_nest_and_an_unknown_stage_is_named():
    model, token_BT = build("gsm-residual=plain"), random_tokens(1, T)
    with torch.no_grad(), without_stages(model):
        want = model(token_BT).logits
    with torch.no_grad(), ExitStack() as stack:
        for stage in (1, 2):
            stack.enter_context(without_stage(model, stage))
        assert torch.equal(model(token_BT).logits, want)
    with pytest.raises(ValueError, match="stage=3 is not allowed. Use a number from 1 to 2"), without_stage(model, 3):
        pass


@pytest.mark.parametrize("wait", [0, 3])
def test_a_question_has_the_place_of_its_needle(wait: int):
    task = Needle(keys=8, values=7, fillers=6, pairs=3, gap=4, wait=wait)
    asked = ask(task, 40, 5)
    assert asked.row_N.shape == (15,)
    line = torch.arange(15)
    token_NT, apart = asked.token_BT[asked.sequence_N], asked.apart()
    assert torch.equal(asked.row_N - asked.key_N, torch.full((15,), wait))
    assert torch.equal(token_NT[line, asked.told_N], token_NT[line, asked.key_N]), "the key"
    assert torch.equal(token_NT[line, asked.told_N + 1], apart.target_BT[line, asked.row_N]), "the value"
    assert (asked.told_N + 1 < asked.key_N - task.gap).all()
    assert (apart.target_BT >= 0).sum(1).tolist() == [1] * 15


class Oracle(torch.nn.Module):
    """Answers with a value from the last ``memory`` tokens; otherwise with token 0, which is a key and never right."""

    def __init__(self, memory: int):
        super().__init__()
        self.memory, self.evaluating = memory, ExitStack

    def forward(self, token_BT: torch.Tensor) -> Output:
        score_BTV = torch.zeros(*token_BT.shape, TASK.vocabulary)
        for line, token_T in zip(score_BTV, token_BT.tolist(), strict=True):
            for row, token in enumerate(token_T):
                told = token_T.index(token)
                line[row, token_T[told + 1] if told < row <= told + self.memory else 0] = 1
        return Output(score_BTV, torch.nn.Identity())


@pytest.mark.parametrize("memory", [1000, 20])
def test_a_needle_map_shows_how_far_a_model_remembers(memory: int):
    found = needle_map(Oracle(memory), TASK, [20, 40], depths=4, sequences=40)
    assert found.count_LD.sum(1).tolist() == [80, 80]
    known_LD = found.accuracy_LD[found.count_LD > 0]
    if memory == 1000:
        assert (known_LD == 1).all()
    else:
        assert found.accuracy_LD[0].nan_to_num(1).tolist() == [1] * 4, "in 20 tokens nothing is too far"
        assert found.accuracy_LD[1, 0] == 0 and found.accuracy_LD[1, -1] > 0.5


@pytest.mark.parametrize("what", ["entries", "retrieved", "slots"])
def test_a_needle_test_removes_equally_many_named_and_other_places(what: str):
    model, asked = build("gsm-retriever=dense"), ask(TASK, T, 3)
    found = needle_test(model, asked, what, count=2)
    place_NK, other_NK = found.named.place_NK, found.named.other_NK
    assert place_NK.shape == other_NK.shape == (6, 2)
    for named, others, row in zip(place_NK.tolist(), other_NK.tolist(), asked.row_N.tolist(), strict=True):
        assert not set(named) & set(others) and len(set(others)) == 2
        seen = range((row + 1) // RATIO) if what == "slots" else range(row - M + 1, row + 1)
        assert set(named) | set(others) <= set(seen), "what the row sees"
    scores = [one.log_probability_N for one in (found.whole, found.without_named, found.without_others)]
    assert_same(scores[0], answers(model, asked.token_BT, asked.target_BT).log_probability_N, "the answers as they are")
    assert ((scores[1] - scores[0]).abs() > 1e-9).all()
    with pytest.raises(ValueError, match="count=50 is not allowed because an answer sees [0-9]+ places"):
        needle_test(model, asked, what, count=50)


def test_a_stage_test_removes_each_stage_and_then_all():
    model, asked = build("gsm-residual=plain"), ask(TASK, T, 3)
    found = stage_test(model, asked)
    assert list(found) == ["nothing removed", "stage 1", "stage 2", "all stages"]
    taken = {"stage 2": without_stage(model, 2), "all stages": without_stages(model), "nothing removed": ExitStack()}
    for name, without in taken.items():
        with without:
            want = answers(model, asked.token_BT, asked.target_BT)
        assert torch.equal(found[name].log_probability_N, want.log_probability_N), name
