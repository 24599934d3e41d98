"""Sequences that are divided among ranks: all ranks together compute the same as one."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import ranks
import torch
import torch.distributed as dist
from small import GEOMETRY, MEMORIES, SHALLOW, assert_same, build, choices, mostly_nightly, training_cases
from torch import Tensor

from gsm.context import Context
from gsm.data.base import next_tokens
from gsm.exchange import tallied
from gsm.layers import indexer_training
from gsm.layers.indexer_training import KL, RUNS
from gsm.layers.raven import Raven
from gsm.models.base import LanguageModel
from gsm.models.checks import IGNORED
from gsm_benchmarks import traffic
from gsm_kernels import indexer_kl

Batch = dict[str, Any]
DOCUMENTS = ("one", "packed", "padded")
MOE = "gsm-feed_forward=moe"
TWO_OR_THREE = [2, pytest.param(3, marks=pytest.mark.nightly)]


def batch_of(length: int, documents: str) -> Batch:
    """Two sequences, each of them one document, or several that end anywhere, or such with padding at either end."""
    generator = torch.Generator().manual_seed(length)
    tokens_BT = torch.randint(GEOMETRY.vocabulary, (2, length), generator=generator)
    document_BT = None
    if documents != "one":
        document_BT = (torch.rand(2, length, generator=generator) < 0.1).cumsum(1)
    if document_BT is not None and documents == "padded":
        document_BT[0, length - length // 3 :] = -1
        document_BT[1, : length // 5] = -1
    targets_BT = next_tokens(tokens_BT, document_BT)
    if document_BT is not None:
        targets_BT = targets_BT.where(document_BT >= 0, IGNORED)
    targets_BT[0, : length // 4] = IGNORED  # so that ranks have different numbers of them
    return {"tokens": tokens_BT, "documents": document_BT, "targets": targets_BT}


def compare(case: str, batch: Batch, group: dist.ProcessGroup, **options: Any) -> None:
    """On a rank: outputs, losses, expert loads and gradients of all ranks together equal those of one process."""
    model = build(case, geometry=SHALLOW, **options).train()
    for part in model.modules():
        if isinstance(part, Raven):
            part.noise = False  # of which every rank would draw its own
    want = model(**batch)
    (want.loss + sum(want.losses.values())).backward()
    expected = gradients(model)
    context = Context(group)
    given, pieces = context.divided(model, **batch)
    counts = (given["targets"] != IGNORED).sum()
    got, _ = context.call(model, **batch)
    outputs = pieces.cut(want.hidden_BRD, 0.0)  # where something counts: padding has none
    counted = pieces.cut(torch.ones_like(batch["tokens"]), 0) > 0
    if given["documents"] is not None:
        counted &= given["documents"] >= 0
    assert_same(got.hidden_BRD[counted], outputs[counted], "outputs", 1e-9)
    share = counts.double() * group.size() / over_ranks(counts, group)
    (got.loss * share + sum(got.losses.values())).backward()
    found = gradients(model)
    assert got.losses.keys() == want.losses.keys() and found.keys() == expected.keys()
    assert_same(over_ranks(got.loss * share, group) / group.size(), want.loss, "loss", 1e-9)
    for name, loss in want.losses.items():
        assert_same(over_ranks(got.losses[name], group) / group.size(), loss, name, 1e-9)
    assert (want.load_LE is None) == (got.load_LE is None)
    if want.load_LE is not None and got.load_LE is not None:
        assert torch.equal(over_ranks(got.load_LE, group), want.load_LE)
    for name, gradient in expected.items():
        assert_same(over_ranks(found[name], group) / group.size(), gradient, name, 1e-9)


def gradients(model: LanguageModel) -> dict[str, Tensor]:
    """Return all gradients, and delete them from the model."""
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def over_ranks(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over the ranks."""
    x = x.detach().clone()
    dist.all_reduce(x, group=group)
    return x


def compare_all(
    cases: Sequence[str], lengths: Sequence[int], documents: Sequence[str] = DOCUMENTS, options: Any = None
) -> None:
    """On a rank: all of these."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    assert dist.group.WORLD is not None
    for case in cases:
        for length in lengths:
            for kind in documents:
                try:
                    compare(case, batch_of(length, kind), dist.group.WORLD, **(options or {}))
                except Exception as error:
                    raise AssertionError(f"{case}, {length} tokens, documents {kind}: {error}") from error
    dist.destroy_process_group()


# 40 tokens are pieces of 10 for two ranks; 41 are pieces of 11 and 6, with padding; of 13 among four some are padding.
@pytest.mark.parametrize("world", TWO_OR_THREE)
def test_ranks_compute_together_the_same_as_one(processes: Any, world: int):
    cases = ["gsm", "baseline-pool", MOE, "gated_delta_net"]
    assert ranks.together(processes, world, compare_all, cases, [41], ["padded"]) == [0] * world


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ranks_compute_the_same_as_one_with_every_variant_that_they_exchange_something_of(processes: Any):
    """The other variants compute each token alone."""
    cases = [*MEMORIES, *choices("gsm", "indexer_training"), *choices("baseline", "indexer_training")]
    assert ranks.together(processes, 2, compare_all, cases, [41], ["padded"]) == [0] * 2


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("world", "length", "documents"), [(2, 41, "padded"), (3, 40, "packed"), (4, 13, "one")])
def test_ranks_compute_the_same_as_one_with_every_variant_of_every_part(
    processes: Any, world: int, length: int, documents: str
):
    arguments = (training_cases(), [length], [documents])
    assert ranks.together(processes, world, compare_all, *arguments) == [0] * world


@pytest.mark.slow
@pytest.mark.parametrize("recompute", mostly_nightly([True, "selective"], True))
def test_blocks_can_be_recomputed(processes: Any, recompute: bool | str):
    cases, options = ["gsm", "baseline", MOE, "hybrid", "kda"], {"recompute": recompute}
    assert ranks.together(processes, 2, compare_all, cases, [41], ["packed"], options) == [0] * 2


@pytest.mark.nightly  # test_shared_experts trains in pieces by day, with shared experts
@pytest.mark.parametrize("case", ["gsm", MOE, "baseline-feed_forward=moe", "gated_delta_net"])
@pytest.mark.parametrize("world", [2, 4])  # 4: two groups of two, each with sequences of its own
def test_ranks_train_as_one_does(processes: Any, tmp_path: Path, case: str, world: int):
    assert ranks.together(processes, 1, ranks.trained, case, "auto", tmp_path, 5) == [0]
    given = {"context": 2}
    arguments = (case, "fsdp", tmp_path, 5, torch.float64, False, given)
    assert ranks.together(processes, world, ranks.trained, *arguments) == [0] * world
    alone, together = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("auto", "fsdp"))
    assert together["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    for name, weight in alone["weights"].items():
        assert_same(together["weights"][name], weight, name, 1e-9)


def read_together(case: str, length: int, documents: str, capacity: int | None, before: int) -> None:
    """On a rank: after several ranks read a prompt, memory, logits and later tokens equal those of one process."""
    assert dist.group.WORLD is not None
    model, given = build(case, geometry=SHALLOW), batch_of(length, documents)
    tokens, document_BT = given["tokens"], given["documents"]
    assert tokens is not None
    memories = [model.start(2, capacity) for _ in range(2)]
    outs = []
    for memory, context in zip(memories, (None, Context(dist.group.WORLD)), strict=True):
        with torch.no_grad():
            if before:
                memory = model(
                    tokens[:, :before],
                    documents=None if document_BT is None else document_BT[:, :before],
                    memory=memory,
                    rows=1,
                ).memory
        rest = None if document_BT is None else document_BT[:, before:]
        read = model.prefill if context is None else partial(context.prefill, model)
        out = read(tokens[:, before:], memory, chunk=5, documents=rest)
        with torch.no_grad():
            outs.append((out, model(tokens[:, :3], memory=out.memory)))
    (alone, then), (together, thereafter) = outs
    assert_same(together.hidden_BRD, alone.hidden_BRD, "output", 1e-9)
    assert_same(thereafter.hidden_BRD, then.hidden_BRD, "what follows", 1e-9)
    assert together.memory.breakdown() == alone.memory.breakdown()
    assert together.memory.used == alone.memory.used


def read_all(cases: Sequence[str], *settings: tuple[int, str, int | None, int]) -> None:
    """On a rank: all of these, with tokens, documents, capacity and tokens before of each setting."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for case, setting in itertools.product(cases, settings):
        try:
            read_together(case, *setting)
        except Exception as error:
            raise AssertionError(f"{case}, {setting}: {error}") from error
    dist.destroy_process_group()


@pytest.mark.parametrize("world", TWO_OR_THREE)
def test_several_ranks_can_read_a_prompt(processes: Any, world: int):
    cases = ["gsm", "baseline-pool", "gated_delta_net"]
    settings = [(60, "packed", 70, 7), (41, "one", None, 0)]
    assert ranks.together(processes, world, read_all, cases, *settings) == [0] * world


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (2, [(60, "packed", 70, 7), (41, "one", None, 0)]),
        pytest.param(3, [(90, "one", 100, 0), (41, "packed", None, 7)], marks=pytest.mark.nightly),
    ],
)
def test_several_ranks_read_a_prompt_into_every_kind_of_memory(
    processes: Any, world: int, settings: list[tuple[int, str, int | None, int]]
):
    assert ranks.together(processes, world, read_all, MEMORIES, *settings) == [0] * world


def counted(cases: Sequence[str], length: int) -> None:
    """On a rank: the bytes that ranks send in forward and backward equal the cost model's exactly."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    group = dist.group.WORLD
    assert group is not None
    for case in cases:
        model, batch = build(case, geometry=SHALLOW).train(), batch_of(length, "one")
        with tallied() as there:
            out, _ = Context(group).call(model, **batch)
            assert out.loss is not None
            loss = out.loss + sum(out.losses.values())
        with tallied() as back:
            loss.backward()
        expected = Counter()
        for one in traffic.sent(model, batch=2, tokens=length, ranks=group.size(), number_bytes=8):
            expected[one.how] += one.bytes
        names = ("routed", "gathered", "passed_on")
        forward = over_ranks(torch.tensor([there[name] for name in names]), group)
        backward = over_ranks(torch.tensor([back[name] for name in ("routed", "scattered", "received")]), group)
        assert forward.tolist() == [expected[name] for name in names], case
        # Nobody waits for the gradient of what nothing was computed from: a bank that no later layer reads.
        assert all(backward <= forward) and backward.sum() > 0.7 * forward.sum(), (case, forward, backward)
    dist.destroy_process_group()


@pytest.mark.parametrize("world", TWO_OR_THREE)
def test_ranks_send_the_bytes_of_the_cost_model(processes: Any, world: int):
    cases = ["gsm", "gsm-retriever=separate_indexer", "baseline", "transformer", "gated_delta_net", "nsa"]
    assert ranks.together(processes, world, counted, cases, 41) == [0] * world


def sampled(case: str) -> None:
    """On a rank: rows of a sample see entries before their piece, as all rows do."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    group = dist.group.WORLD
    assert group is not None
    model, batch = build(case, geometry=GEOMETRY).train(), batch_of(64, "one")
    calls: list[dict[str, Any]] = []
    training: Any = model.indexer_training
    training.dense_limit, training.sampled_rows = 8, 8

    def first_rows(chosen_BRK: Tensor, count: int, runs: int) -> tuple[Tensor, int]:
        return torch.zeros(len(chosen_BRK), runs, dtype=torch.int64), count

    def watched(call: dict[str, Any], count: int, pieces: int) -> dict[str, Any]:
        made = sample(call, count, pieces)
        rows = made["position_BR"].shape[1] // max(1, RUNS // pieces)
        whole = {**call, "position_BR": call["position_BR"].clone()}
        whole["position_BR"][:, 2:] = -1
        calls.append({"sampled": indexer_kl(**made), "masked": indexer_kl(**whole), "rows": rows})
        return made

    sample = indexer_training.sample
    with patch.multiple(indexer_training, sample=watched, sampled_runs=first_rows, RUNS=1):
        Context(group).call(model, **batch)
    assert calls
    for call in calls:  # two rows of each piece, from its first on
        assert_same(call["sampled"].loss, call["masked"].loss, "loss", 1e-9)
    dist.destroy_process_group()


@pytest.mark.parametrize("case", ["gsm", pytest.param("baseline", marks=pytest.mark.nightly)])
def test_a_sample_of_rows_sees_entries_before_its_piece(processes: Any, case: str):
    assert ranks.together(processes, 2, sampled, case) == [0, 0]


def test_the_limit_of_the_dense_loss_applies_to_the_whole_length(processes: Any):
    """Three ranks split 40 tokens into six pieces of 7 rows: 42 rows exceed a limit of 40, but the tokens do not."""
    options = {"indexer_training": KL(dense_limit=40, sampled_rows=8)}
    assert ranks.together(processes, 3, compare_all, ["gsm"], [40], ["one", "packed"], options) == [0] * 3


def measured_first(case: str) -> None:
    """On a rank: a length that is met in a validation first, which Lightning has in inference mode on GPUs."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    assert dist.group.WORLD is not None
    model, batch, context = build(case, geometry=SHALLOW), batch_of(41, "one"), Context(dist.group.WORLD)
    with torch.inference_mode():
        context.call(model.eval(), **batch)
    out, _ = context.call(model.train(), **batch)
    assert out.loss is not None
    out.loss.backward()
    dist.destroy_process_group()


@pytest.mark.parametrize("case", ["gsm", pytest.param("gated_delta_net", marks=pytest.mark.nightly)])
def test_a_length_first_seen_in_validation_can_be_trained(processes: Any, case: str):
    assert ranks.together(processes, 2, measured_first, case) == [0, 0]


def refused() -> None:
    """On a rank: a prompt that is wrong on one is refused by all; one that fails leaves the memory as it was."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    assert dist.group.WORLD is not None
    model, context = build("gsm", geometry=GEOMETRY), Context(dist.group.WORLD)
    tokens = batch_of(90, "one")["tokens"]
    assert tokens is not None
    wrong, memory = tokens.clone(), model.start(2, 100)
    wrong[0, 70] = 99
    with pytest.raises(ValueError, match="^tokens .*99"):
        context.prefill(model, wrong, memory)
    with patch.object(model, "_read", side_effect=MemoryError), pytest.raises(MemoryError):
        context.prefill(model, tokens, memory)
    assert memory.used == 0 and memory.ledger.first_row == 0
    assert_same(context.prefill(model, tokens, memory).hidden_BRD, model(tokens, rows=1).hidden_BRD, "again", 1e-9)
    dist.destroy_process_group()


def test_all_ranks_refuse_an_invalid_prompt_and_read_nothing(processes: Any):
    assert ranks.together(processes, 2, refused) == [0, 0]
