"""Needles and multi-query recall: what a sequence holds, and that sequence number i is always the same."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gsm.analysis.needles import ask
from gsm.config.compose import compose
from gsm.data.recall import MultiQueryRecall, Needle, Paraphrase, Task
from gsm.data.synthetic import HELD_OUT, Generated, SyntheticData
from gsm.evaluation import questions
from gsm.training.run import train

NEEDLE = Needle(keys=12, values=9, fillers=5, pairs=4, gap=20)
RECALL = MultiQueryRecall(keys=12, values=9, fillers=5, pairs=4)
SHIFTED = replace(RECALL, shifted=True)
PARAPHRASE = Paraphrase(keys=12, names=3, values=9, fillers=5, pairs=4, gap=20)
TASKS = pytest.mark.parametrize("task", [NEEDLE, RECALL, SHIFTED], ids=["needle", "recall", "recall, shifted"])


def sequences(task: Task, length: int, count: int = 50, whole: int | None = None):
    return (task.draw(np.random.default_rng([3, i]), length, whole) for i in range(count))


def places(token_T: np.ndarray, task) -> dict[int, list[int]]:
    """Where each key stands."""
    found: dict[int, list[int]] = {}
    for place, token in enumerate(token_T):
        if token < task.keys:
            found.setdefault(int(token), []).append(place)
    return found


@TASKS
def test_every_key_is_told_once_and_asked_once_and_the_target_is_its_value(task):
    for token_T, target_T in sequences(task, 64):
        asked = np.flatnonzero(target_T != -100)
        assert len(asked) == task.pairs
        for key, (told, question) in places(token_T, task).items():
            assert question in asked, f"key {key}"
            assert token_T[told + 1] == token_T[question + 1] == target_T[question]
            assert task.keys <= target_T[question] < task.keys + task.values


@TASKS
def test_only_pairs_and_filler_stand_in_a_sequence(task):
    for token_T, _ in sequences(task, 64):
        assert np.sum(token_T < task.keys) == np.sum((token_T >= task.keys) & (token_T < task.keys + task.values))
        assert token_T.min() >= 0 and token_T.max() < task.vocabulary and len(token_T) == 64


@pytest.mark.parametrize("task", [NEEDLE, PARAPHRASE], ids=["needle", "paraphrase"])
def test_the_gap_lies_between_every_needle_and_every_question(task):
    for token_T, target_T in sequences(task, 64):
        first_question = np.flatnonzero(target_T != -100)[0]
        last_value = max(told + 1 for told, _ in places(task.meaning(token_T), task).values())
        assert first_question - last_value > task.gap


def named(task: Paraphrase, count: int = 200) -> list[list[tuple[int, int]]]:
    """Of each sequence, the names that keys are told by and asked for by."""
    found = []
    for token_T, target_T in sequences(task, 64, count):
        asked = np.flatnonzero(target_T != -100)
        assert len(asked) == task.pairs
        meant_T = token_T if task.literal == 1 else task.meaning(token_T)
        pairs = places(meant_T, task).values()
        for told, question in pairs:
            assert question in asked and token_T[told + 1] == token_T[question + 1] == target_T[question]
        found.append([(int(token_T[told]), int(token_T[question])) for told, question in pairs])
    return found


def once(task: Paraphrase) -> set[tuple[int, int]]:
    return {pair for pairs in named(task) for pair in pairs}


def test_a_paraphrased_question_has_another_name_of_the_key_whose_value_is_wanted():
    pairs = once(PARAPHRASE)
    assert all(told != asked for told, asked in pairs)
    assert {told for told, _ in pairs} == {asked for _, asked in pairs} == set(range(12)), "all are told, and asked for"
    key_N = PARAPHRASE.meaning(np.arange(12))
    assert all(key_N[told] == key_N[asked] for told, asked in pairs) and np.bincount(key_N).tolist() == [3] * 4


def test_which_names_mean_the_same_hangs_on_the_table_alone_and_values_and_filler_mean_themselves():
    meant_T = PARAPHRASE.meaning(np.arange(26))
    assert sorted(meant_T[:12]) == sorted([*range(4)] * 3) and (meant_T[12:] == np.arange(12, 26)).all()
    assert (replace(PARAPHRASE, gap=3, literal=0.5, left_out=True).meaning(np.arange(26)) == meant_T).all()
    other_T = replace(PARAPHRASE, table=1).meaning(np.arange(26))
    same, others = (one[:12, None] == one[None, :12] for one in (meant_T, other_T))
    assert (same != others).any()


def test_one_pair_of_names_of_every_key_is_left_out_of_training_either_way_round_and_measured_apart():
    trained, apart = once(PARAPHRASE), once(replace(PARAPHRASE, left_out=True))
    assert len(apart) == 4 * 2 and len(trained) == 4 * (3 * 2 - 2) and not trained & apart
    assert {pair[::-1] for pair in apart} == apart
    names = {name for pair in apart for name in pair}
    assert names <= {told for told, _ in trained} and names <= {asked for _, asked in trained}, "each was trained"
    assert once(PARAPHRASE.apart()["left_out"]) == apart and once(PARAPHRASE.apart()["paraphrased"]) == trained


@pytest.mark.parametrize("literal", [0.0, 0.5, 1.0])
def test_a_name_meets_none_in_training_of_those_that_it_is_asked_beside_when_its_pair_was_left_out(literal: float):
    """Once it met all but the one that it goes with, and a model that was trained on literal questions went by that."""
    met: set[frozenset[int]] = set()
    for token_T, _ in sequences(replace(PARAPHRASE, literal=literal), 64, 300):
        names = set(token_T[token_T < 12].tolist())
        met |= {frozenset((one, other)) for one in names for other in names}
    for pairs in named(replace(PARAPHRASE, left_out=True)):
        told, asked = zip(*pairs, strict=True)
        assert not any(frozenset((one, other)) in met for one in told for other in asked)


def test_of_literal_questions_nothing_tells_which_names_mean_the_same():
    """Several names of a key stand in one sequence as often as those of several keys do."""
    literal, key_N = replace(PARAPHRASE, literal=1.0), PARAPHRASE.meaning(np.arange(12))
    met = [frozenset((one, other)) for pairs in named(literal, 600) for one, _ in pairs for other, _ in pairs]
    count = {pair: met.count(pair) for pair in {*met} if len(pair) == 2}
    same = [seen for pair, seen in count.items() if len({key_N[name] for name in pair}) == 1]
    assert all(told == asked for pairs in named(literal) for told, asked in pairs)
    assert len(same) == 4 * 2 and 0.8 < np.mean(same) / np.mean([*count.values()]) < 1.25


def test_a_share_of_sequences_is_literal_and_of_two_names_nothing_is_left_out():
    mixed = list(sequences(replace(PARAPHRASE, literal=0.25), 64, 400))
    literal = [len({*token_T[token_T < 12].tolist()}) == 4 for token_T, _ in mixed]
    assert 0.18 < np.mean(literal) < 0.32, "as many names as needles"
    two = replace(PARAPHRASE, names=2)
    assert list(two.apart()) == ["paraphrased", "literal"] and len(once(two)) == 12


@pytest.mark.parametrize("literal", [0.0, 0.5, 1.0])
def test_a_question_has_the_place_of_its_paraphrased_needle(literal: float):
    """Once the search used the token of the question, which occurs nowhere else."""
    questions = ask(replace(PARAPHRASE, literal=literal), 64, 20)
    value_N = questions.token_BT[questions.sequence_N, questions.needle_N + 1]
    assert (value_N == questions.target_BT[questions.sequence_N, questions.row_N]).all()
    assert (questions.needle_N < questions.key_N).all()


def test_needles_stand_at_even_and_odd_places_and_questions_come_in_another_order():
    parities, orders = set(), set()
    for token_T, _ in sequences(NEEDLE, 64):
        told = {key: at for key, (at, _) in places(token_T, NEEDLE).items()}
        asked = {key: at for key, (_, at) in places(token_T, NEEDLE).items()}
        parities |= {at % 2 for at in told.values()}
        orders.add(sorted(told, key=told.__getitem__) == sorted(asked, key=asked.__getitem__))
    assert parities == {0, 1} and False in orders


@pytest.mark.parametrize(("task", "parities"), [(RECALL, {0}), (SHIFTED, {0, 1})], ids=["even", "shifted"])
def test_pairs_of_a_sequence_share_their_parity_and_shifted_ones_have_either(task, parities):
    seen = set()
    for token_T, _ in sequences(task, 64):
        told = {at % 2 for at, _ in places(token_T, task).values()}
        assert len(told) == 1
        seen |= told
    assert seen == parities


def test_a_sequence_without_room_is_not_shifted():
    for token_T, _ in sequences(SHIFTED, 16, whole=64):
        assert token_T[0] < SHIFTED.keys
    with pytest.raises(ValueError, match="context=.* Use 17 or more"):
        SHIFTED.check(16)


def test_a_short_sequence_keeps_half_of_itself_as_gap_as_long_as_that_leaves_room():
    for length in (16, 24, 32, 39, 48, 64):
        for token_T, target_T in sequences(NEEDLE, length, whole=64):
            told = [at for at, _ in places(token_T, NEEDLE).values()]
            assert len(token_T) == length and np.sum(target_T != -100) == 4
            gap = min(NEEDLE.gap, length // 2)
            packed = max(told) == 2 * NEEDLE.pairs - 2  # one behind the other, from the beginning
            assert packed or min(length - 2 * NEEDLE.pairs - at - 2 for at in told) >= gap, (length, sorted(told))
            assert not packed or length <= 32, "with so much room they spread"
    with pytest.raises(ValueError, match="cannot hold 4 needles"):
        NEEDLE.draw(np.random.default_rng(0), 15)


@TASKS
def test_the_whole_gap_is_kept_at_the_length_that_just_holds_it(task):
    task = replace(task, gap=41)
    least = 4 * task.pairs + task.gap
    if isinstance(task, MultiQueryRecall):  # whose questions stand at even places, or all at odd ones
        least += 1 + task.shifted
    task.check(least)
    for token_T, _ in sequences(task, least, whole=least):
        told, asked = zip(*places(token_T, task).values(), strict=True)
        assert min(asked) - max(told) - 2 >= task.gap
    with pytest.raises(ValueError, match=f"context={least - 1} is not allowed .* a gap of 41 .* Use {least} or more"):
        task.check(least - 1)


def test_near_questions_are_more_frequent_in_multi_query_recall():
    distances = [q - 2 * RECALL.pairs for _, target_T in sequences(RECALL, 128) for q in np.flatnonzero(target_T >= 0)]
    assert np.median(distances) < 30  # of 120


def data(**options) -> SyntheticData:
    return SyntheticData(task=NEEDLE, vocabulary=26, context=64, batch_size=3, **options)


def trained(made: SyntheticData, done: int = 0, steps: int = 10, accumulated: int = 1, rank: int = 0, world: int = 1):
    """The data as a trainer sees it that has finished so many batches."""
    made.trainer = SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]
        max_steps=steps,
        accumulate_grad_batches=accumulated,
        distributed_sampler_kwargs={"num_replicas": world, "rank": rank},
        global_step=done // accumulated,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )
    return list(made.train_dataloader())


def test_training_goes_on_with_the_very_next_sequence():
    whole = trained(data(shortest=24))
    for done in (1, 4, 9):
        rest = trained(data(shortest=24), done=done)
        assert len(rest) == 10 - done
        assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(rest, whole[done:], strict=True))


def test_ranks_share_the_sequences_of_a_step_and_seeds_do_not():
    ranks = [trained(data(), rank=rank, world=2, steps=2) for rank in (0, 1)]
    alone = SyntheticData(task=NEEDLE, vocabulary=26, context=64, batch_size=6)
    for step, batch in enumerate(trained(alone, steps=2)):
        assert torch.equal(torch.cat([ranks[0][step]["tokens"], ranks[1][step]["tokens"]]), batch["tokens"])
    other = trained(data(seed=1), steps=2)
    assert not torch.equal(other[0]["tokens"], ranks[0][0]["tokens"])


def test_lengths_grow_from_the_shortest_to_the_context_and_stay():
    made = data(shortest=24, grow_from=0.2, grow_until=0.6)
    lengths = [batch["tokens"].shape[1] for batch in trained(made, steps=20, accumulated=2)]
    assert len(lengths) == 40 and lengths[:10] == [24] * 10 and lengths[24:] == [64] * 16
    assert lengths == sorted(lengths) and len(set(lengths)) > 3
    assert made.length(0.4) == 24 * (64 / 24) ** 0.5 // 8 * 8, "half-way in time it has grown by half of the factor"


def test_validation_is_the_same_for_every_seed_and_not_among_the_training_sequences():
    first, second = list(data(seed=0).validation()), list(data(seed=1).validation())
    assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(first, second, strict=True))
    assert len(first) == 64
    batches = list(data(validation_sequences=7).val_dataloader())
    assert torch.equal(torch.cat([batch["tokens"] for batch in batches])[6], first[6]["tokens"])


def test_a_blank_sequence_asks_nothing():
    batch = Generated(NEEDLE, 0, lambda _: 64).batch([2, -1])
    assert (batch["targets"][0] >= 0).sum() == 4 and (batch["targets"][1] == -100).all()


def test_the_fingerprint_tells_whatever_changes_the_sequences():
    made = [data(), data(shortest=24), data(shortest=24, grow_until=0.4)]
    made += [SyntheticData(task=task, vocabulary=26, context=72, batch_size=3) for task in (NEEDLE, RECALL)]
    found = [one.fingerprint() for one in made]
    assert data().fingerprint() == found[0] and len({tuple(one.items()) for one in found}) == len(made)
    assert all(type(value) in (str, int) for one in found for value in one.values())


class Answers(torch.nn.Module):
    """In place of a model: answers questions by some pairs of names, as it is told, and no others."""

    def __init__(self, task: Paraphrase, known: set[tuple[int, int]]) -> None:
        super().__init__()
        self.task, self.known, self.embedding = task, known, torch.nn.Embedding(1, 1)
        self.evaluating = torch.no_grad

    def forward(self, token_BT: torch.Tensor) -> SimpleNamespace:
        logits_BTV = torch.zeros(*token_BT.shape, self.task.vocabulary)
        for token_T, logits_TV in zip(token_BT.numpy(), logits_BTV, strict=True):
            for question in np.flatnonzero(token_T < self.task.keys):
                for told in np.flatnonzero(token_T[:question] < self.task.keys):
                    if (int(token_T[told]), int(token_T[question])) in self.known:
                        logits_TV[question, token_T[told + 1]] = 1
        return SimpleNamespace(logits=logits_BTV)


def test_each_kind_of_question_is_measured_by_itself():
    literal = {(name, name) for name in range(12)}
    kinds = PARAPHRASE.apart()
    half = {pair for pair in once(kinds["left_out"]) if pair[0] < pair[1]}
    found = questions.measure(Answers(PARAPHRASE, literal | half), kinds, 64, 40, HELD_OUT)  # pyright: ignore
    assert found["paraphrased"] == 0 and found["literal"] == 1 and 0.3 < found["left_out"] < 0.7
    assert questions.table(found)[-1].split() == ["literal", "100.0"]


@pytest.mark.parametrize("task", ["needle", "recall", "paraphrase"])
def test_a_run_trains_on_a_task_and_measures_how_often_it_answers(task, tmp_path):
    """Once every such run ended before its first step, and each part was tested alone."""
    small = "size=pico size.vocabulary=128 model/residual=plain data.batch_size=2 data.validation_sequences=2"
    facts = train(compose([f"data={task}", *small.split(), "trainer=cpu", "trainer.max_steps=2", f"logs={tmp_path}"]))
    assert facts["status"] == "finished" and 0 <= facts["accuracy"] <= 1
    kinds = ["paraphrased", "left_out", "literal"] if task == "paraphrase" else []
    assert list(facts["by_question"] or {}) == kinds
