"""Needles and multi-query recall: what a sequence holds, and that sequence number i is always the same."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gsm.analysis.needles import ask
from gsm.config.compose import compose
from gsm.data.recall import Chain, MultiQueryRecall, Needle, Paraphrase, Task
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
    """Return the places of each key."""
    by_key: dict[int, list[int]] = {}
    for place, token in enumerate(token_T):
        if token < task.keys:
            by_key.setdefault(int(token), []).append(place)
    return by_key


@TASKS
def test_every_key_has_one_needle_and_one_question_and_the_target_is_its_value(task):
    for token_T, target_T in sequences(task, 64):
        rows = np.flatnonzero(target_T != -100)
        assert len(rows) == task.pairs
        for key, (needle, question) in places(token_T, task).items():
            assert question in rows, f"key {key}"
            assert token_T[needle + 1] == token_T[question + 1] == target_T[question]
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
        last_value = max(needle + 1 for needle, _ in places(task.meaning(token_T), task).values())
        assert first_question - last_value > task.gap


def test_needles_that_nobody_asks_for_distract_and_the_rest_is_as_before():
    task = replace(NEEDLE, asked=1)
    for token_T, target_T in sequences(task, 64):
        (row,) = np.flatnonzero(target_T != -100)
        found = places(token_T, task)
        asked = int(token_T[row])
        assert row == 62 and len(found) == 4 and sorted(map(len, found.values())) == [1, 1, 1, 2]
        assert token_T[found[asked][0] + 1] == token_T[63] == target_T[row]
    assert replace(NEEDLE, asked=4).least == NEEDLE.least == 16 and task.least == 10


@pytest.mark.parametrize("steps", [False, True])
def test_a_chain_leads_from_its_question_to_its_answer_and_steps_are_written(steps: bool):
    task = Chain(keys=12, values=9, fillers=5, pairs=6, hops=3, gap=20, steps=steps)
    for token_T, target_T in sequences(task, 64):
        asked = np.flatnonzero(target_T != -100).reshape(2, task.answer_tokens)[:, 0]
        rest, value_of = token_T[: asked[0]].tolist(), dict[int, int]()
        while rest:
            if (token := rest.pop(0)) < task.keys:
                value_of[token] = rest.pop(0)
        for row in asked:
            way = [int(token_T[row])]
            while way[-1] < task.keys:
                way.append(value_of[way[-1]])
            answer = target_T[row : row + task.answer_tokens].tolist()
            assert len(way) == 4 and answer == (way[1:] if steps else way[-1:])
            assert token_T[row + 1 : row + 1 + len(answer)].tolist() == answer


def name_pairs(task: Paraphrase, count: int = 200) -> list[list[tuple[int, int]]]:
    """Return for each sequence the names of each key in its needle and in its question."""
    by_sequence = []
    for token_T, target_T in sequences(task, 64, count):
        rows = np.flatnonzero(target_T != -100)
        assert len(rows) == task.pairs
        meaning_T = token_T if task.literal == 1 else task.meaning(token_T)
        pairs = places(meaning_T, task).values()
        for needle, question in pairs:
            assert question in rows and token_T[needle + 1] == token_T[question + 1] == target_T[question]
        by_sequence.append([(int(token_T[needle]), int(token_T[question])) for needle, question in pairs])
    return by_sequence


def different_pairs(task: Paraphrase) -> set[tuple[int, int]]:
    """Return the name pairs of all sequences, each once."""
    return {pair for pairs in name_pairs(task) for pair in pairs}


def test_a_paraphrased_question_has_another_name_of_the_key_whose_value_is_wanted():
    pairs = different_pairs(PARAPHRASE)
    assert all(needle != question for needle, question in pairs)
    needle_names, question_names = ({pair[side] for pair in pairs} for side in (0, 1))
    assert needle_names == question_names == set(range(12)), "every name is in needles and in questions"
    key_N = PARAPHRASE.meaning(np.arange(12))
    assert all(key_N[needle] == key_N[question] for needle, question in pairs)
    assert np.bincount(key_N).tolist() == [3] * 4


def test_the_table_alone_decides_which_names_mean_the_same_and_values_and_filler_mean_themselves():
    meaning_T = PARAPHRASE.meaning(np.arange(26))
    assert sorted(meaning_T[:12]) == sorted([*range(4)] * 3) and (meaning_T[12:] == np.arange(12, 26)).all()
    assert (replace(PARAPHRASE, gap=3, literal=0.5, left_out=True).meaning(np.arange(26)) == meaning_T).all()
    other_T = replace(PARAPHRASE, table=1).meaning(np.arange(26))
    same, same_in_other = (key_T[:12, None] == key_T[None, :12] for key_T in (meaning_T, other_T))
    assert (same != same_in_other).any()


def test_training_leaves_out_one_pair_of_names_of_every_key_in_both_orders_and_it_is_measured_apart():
    trained, left_out = different_pairs(PARAPHRASE), different_pairs(replace(PARAPHRASE, left_out=True))
    assert len(left_out) == 4 * 2 and len(trained) == 4 * (3 * 2 - 2) and not trained & left_out
    assert {pair[::-1] for pair in left_out} == left_out
    names = {name for pair in left_out for name in pair}
    needle_names, question_names = ({pair[side] for pair in trained} for side in (0, 1))
    assert names <= needle_names and names <= question_names, "each was trained"
    kinds = PARAPHRASE.apart()
    assert different_pairs(kinds["left_out"]) == left_out and different_pairs(kinds["paraphrased"]) == trained


@pytest.mark.parametrize("literal", [0.0, 0.5, 1.0])
def test_no_training_sequence_has_two_names_that_a_left_out_sequence_asks_for_together(literal: float):
    """Once a name met all names but its partner, and a model that was trained on literal questions used that."""
    met: set[frozenset[int]] = set()
    for token_T, _ in sequences(replace(PARAPHRASE, literal=literal), 64, 300):
        names = set(token_T[token_T < 12].tolist())
        met |= {frozenset((first, second)) for first in names for second in names}
    for pairs in name_pairs(replace(PARAPHRASE, left_out=True)):
        needle_names, question_names = zip(*pairs, strict=True)
        assert not any(frozenset((first, second)) in met for first in needle_names for second in question_names)


def test_literal_questions_do_not_show_which_names_mean_the_same():
    """Several names of one key are in one sequence as often as names of several keys."""
    literal, key_N = replace(PARAPHRASE, literal=1.0), PARAPHRASE.meaning(np.arange(12))
    sequences_of_pairs = name_pairs(literal, 600)
    met = [frozenset((first, second)) for pairs in sequences_of_pairs for first, _ in pairs for second, _ in pairs]
    counts = {pair: met.count(pair) for pair in {*met} if len(pair) == 2}
    same = [count for pair, count in counts.items() if len({key_N[name] for name in pair}) == 1]
    assert all(needle == question for pairs in name_pairs(literal) for needle, question in pairs)
    assert len(same) == 4 * 2 and 0.8 < np.mean(same) / np.mean([*counts.values()]) < 1.25


def test_a_share_of_sequences_is_literal_and_with_two_names_no_pair_is_left_out():
    mixed = list(sequences(replace(PARAPHRASE, literal=0.25), 64, 400))
    literal = [len({*token_T[token_T < 12].tolist()}) == 4 for token_T, _ in mixed]
    assert 0.18 < np.mean(literal) < 0.32, "four needles have four names"
    two = replace(PARAPHRASE, names=2)
    assert list(two.apart()) == ["paraphrased", "literal"] and len(different_pairs(two)) == 12


@pytest.mark.parametrize("literal", [0.0, 0.5, 1.0])
def test_a_question_has_the_place_of_its_paraphrased_needle(literal: float):
    """Once the search used the token of the question, which occurs nowhere else."""
    held_out = ask(replace(PARAPHRASE, literal=literal), 64, 20)
    value_N = held_out.token_BT[held_out.sequence_N, held_out.needle_N + 1]
    assert (value_N == held_out.target_BT[held_out.sequence_N, held_out.row_N]).all()
    assert (held_out.needle_N < held_out.key_N).all()


def test_needles_stand_at_even_and_odd_places_and_questions_come_in_another_order():
    parities, orders = set(), set()
    for token_T, _ in sequences(NEEDLE, 64):
        needles = {key: place for key, (place, _) in places(token_T, NEEDLE).items()}
        rows = {key: place for key, (_, place) in places(token_T, NEEDLE).items()}
        parities |= {place % 2 for place in needles.values()}
        orders.add(sorted(needles, key=needles.__getitem__) == sorted(rows, key=rows.__getitem__))
    assert parities == {0, 1} and False in orders


@pytest.mark.parametrize(("task", "parities"), [(RECALL, {0}), (SHIFTED, {0, 1})], ids=["even", "shifted"])
def test_pairs_of_a_sequence_share_their_parity_and_shifted_ones_have_either(task, parities):
    seen = set()
    for token_T, _ in sequences(task, 64):
        in_sequence = {place % 2 for place, _ in places(token_T, task).values()}
        assert len(in_sequence) == 1
        seen |= in_sequence
    assert seen == parities


def test_a_sequence_without_room_is_not_shifted():
    for token_T, _ in sequences(SHIFTED, 16, whole=64):
        assert token_T[0] < SHIFTED.keys
    with pytest.raises(ValueError, match="^context .*17"):
        SHIFTED.check(16)


def test_a_short_sequence_keeps_half_of_itself_as_gap_as_long_as_that_leaves_room():
    for length in (16, 24, 32, 39, 48, 64):
        for token_T, target_T in sequences(NEEDLE, length, whole=64):
            needles = [place for place, _ in places(token_T, NEEDLE).values()]
            assert len(token_T) == length and np.sum(target_T != -100) == 4
            gap = min(NEEDLE.gap, length // 2)
            packed = max(needles) == 2 * NEEDLE.pairs - 2  # adjacent, from the beginning
            rooms = [length - 2 * NEEDLE.pairs - place - 2 for place in needles]
            assert packed or min(rooms) >= gap, (length, sorted(needles))
            assert not packed or length <= 32, "needles spread in a longer sequence"
    with pytest.raises(ValueError, match="^length .*15"):
        NEEDLE.draw(np.random.default_rng(0), 15)


@TASKS
def test_the_whole_gap_is_kept_at_the_length_that_just_holds_it(task):
    task = replace(task, gap=41)
    least = 4 * task.pairs + task.gap
    if isinstance(task, MultiQueryRecall):  # whose questions stand at even places, or all at odd ones
        least += 1 + task.shifted
    task.check(least)
    for token_T, _ in sequences(task, least, whole=least):
        needles, rows = zip(*places(token_T, task).values(), strict=True)
        assert min(rows) - max(needles) - 2 >= task.gap
    with pytest.raises(ValueError, match=f"^context .*{least} .*gap=41, got {least - 1}"):
        task.check(least - 1)


def test_near_questions_are_more_frequent_in_multi_query_recall():
    distances = [q - 2 * RECALL.pairs for _, target_T in sequences(RECALL, 128) for q in np.flatnonzero(target_T >= 0)]
    assert np.median(distances) < 30  # of 120


def data(**options) -> SyntheticData:
    return SyntheticData(task=NEEDLE, vocabulary=26, context=64, batch_size=3, **options)


def trained(made: SyntheticData, done: int = 0, steps: int = 10, accumulated: int = 1, rank: int = 0, world: int = 1):
    """Return the batches of a trainer that has finished ``done`` batches."""
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
    prints = [module.fingerprint() for module in made]
    assert data().fingerprint() == prints[0] and len({tuple(facts.items()) for facts in prints}) == len(made)
    assert all(type(value) in (str, int) for facts in prints for value in facts.values())


class Answers(torch.nn.Module):
    """A model that answers questions with the given pairs of names, and no others."""

    def __init__(self, task: Paraphrase, pairs: set[tuple[int, int]]) -> None:
        super().__init__()
        self.task, self.pairs, self.embedding = task, pairs, torch.nn.Embedding(1, 1)
        self.evaluating = torch.no_grad

    def forward(self, token_BT: torch.Tensor) -> SimpleNamespace:
        logits_BTV = torch.zeros(*token_BT.shape, self.task.vocabulary)
        for token_T, logits_TV in zip(token_BT.numpy(), logits_BTV, strict=True):
            for question in np.flatnonzero(token_T < self.task.keys):
                for needle in np.flatnonzero(token_T[:question] < self.task.keys):
                    if (int(token_T[needle]), int(token_T[question])) in self.pairs:
                        logits_TV[question, token_T[needle + 1]] = 1
        return SimpleNamespace(logits=logits_BTV)


def test_each_kind_of_question_is_measured_by_itself():
    literal = {(name, name) for name in range(12)}
    kinds = PARAPHRASE.apart()
    half = {pair for pair in different_pairs(kinds["left_out"]) if pair[0] < pair[1]}
    shares = questions.measure(Answers(PARAPHRASE, literal | half), kinds, 64, 40, HELD_OUT)  # pyright: ignore
    assert shares["paraphrased"] == 0 and shares["literal"] == 1 and 0.3 < shares["left_out"] < 0.7
    assert questions.table(shares)[-1].split() == ["literal", "100.0"]


@pytest.mark.parametrize("task", ["needle", "recall", "paraphrase"])
def test_a_run_trains_on_a_task_and_measures_how_often_it_answers(task, tmp_path):
    """Once every such run ended before its first step, and each part was tested alone."""
    small = "size=pico size.vocabulary=128 model/residual=plain data.batch_size=2 data.validation_sequences=2"
    facts = train(compose([f"data={task}", *small.split(), "trainer=cpu", "trainer.max_steps=2", f"logs={tmp_path}"]))
    assert facts["status"] == "finished" and 0 <= facts["accuracy"] <= 1
    kinds = ["paraphrased", "left_out", "literal"] if task == "paraphrase" else []
    assert list(facts["by_question"] or {}) == kinds
