"""State tracking: groups are groups, targets are what a word comes to, and a model is believed its last state alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from short_runs import NO_PICTURES, TINY
from small import SHALLOW, build

from gsm.config.compose import compose
from gsm.data.groups import group
from gsm.data.state_tracking import StateTracking
from gsm.evaluation import tracking
from gsm.training.run import train

GROUPS = pytest.mark.parametrize(("name", "size"), [("parity", 2), ("Z7", 7), ("S3", 6), ("S4", 24), ("S5", 120)])
MANY = StateTracking(groups=["parity", "Z5", "S3"], letters="few", tested=[1, 6])
WORDS = 40


@GROUPS
def test_a_table_is_that_of_a_group_of_this_size(name: str, size: int):
    product_EE = group(name).product_EE
    everything = np.arange(size)
    assert product_EE.shape == (size, size) == (len(group(name)),) * 2
    for lines in (product_EE, product_EE.T):
        assert (np.sort(lines) == everything).all(), "closed, and every element has an inverse on either side"
    assert (product_EE[0] == everything).all() and (product_EE[:, 0] == everything).all(), "0 is the identity"
    assert (product_EE[product_EE] == product_EE[:, product_EE]).all(), "(ab)c = a(bc)"


def test_s5_has_the_permutations_of_five_things_and_their_composition():
    order, product_EE = list(permutations(range(5))), group("S5").product_EE
    for a, b in np.random.default_rng(0).integers(120, size=(200, 2)):
        assert order[product_EE[a, b]] == tuple(order[b][order[a][i]] for i in range(5))


def commutators(elements: set[int], product_EE: np.ndarray) -> set[int]:
    inverse_E = np.argmin(product_EE, axis=1)  # where the identity stands
    subgroup = {
        int(product_EE[product_EE[inverse_E[a], inverse_E[b]], product_EE[a, b]]) for a in elements for b in elements
    }
    while True:
        closure = subgroup | {int(product_EE[a, b]) for a in subgroup for b in subgroup}
        if closure == subgroup:
            return subgroup
        subgroup = closure


@pytest.mark.parametrize(("name", "sizes"), [("Z7", [7, 1]), ("S3", [6, 3, 1]), ("S5", [120, 60, 60])])
def test_commutators_end_in_the_identity_alone_unless_the_group_is_s5(name: str, sizes: list[int]):
    """A group with this property is solvable; S5, which lacks it, is the hard case."""
    series = [set(range(sizes[0]))]
    while len(series) < len(sizes):
        series.append(commutators(series[-1], group(name).product_EE))
    assert [len(subgroup) for subgroup in series] == sizes


@GROUPS
def test_few_letters_reach_every_element_and_leave_one_in_place(name: str, size: int):
    elements, reached = group(name), {0}
    for _ in range(size):
        reached |= {int(elements.product_EE[a, b]) for a in reached for b in elements.few}
    assert len(reached) == size and 0 in elements.few and len(set(elements.few)) == len(elements.few)


def naive(name: str, letters: str, ids: list[int]) -> list[int]:
    """Return the states of a word of one group, by the group's definition."""
    if name.startswith("Z"):
        return [sum(ids[: n + 1]) % int(name[1:]) for n in range(len(ids))]
    things = int(name[1:])
    order = list(permutations(range(things)))
    swapped = [[*range(i), i + 1, i, *range(i + 2, things)] for i in range(things - 1)]
    spelt = order if letters == "all" else [tuple(range(things)), *map(tuple, swapped)]
    arranged, states = list(range(things)), []
    for letter in ids:
        arranged = [spelt[letter][place] for place in arranged]
        states.append(order.index(tuple(arranged)))
    return states


@pytest.mark.parametrize("name", ["Z2", "Z7", "S3", "S5"])
@pytest.mark.parametrize("letters", ["all", "few"])
def test_targets_are_the_products_of_the_letters_so_far(name: str, letters: str):
    task = StateTracking(groups=[name], letters=letters)
    first = task.vocabulary - len(group(name))
    for i in range(10):
        token_T, target_T = task.draw(np.random.default_rng([1, i]), 24)
        assert token_T.max() < first and len(token_T) == 24
        assert (target_T - first).tolist() == naive(name, letters, token_T.tolist())


def test_all_groups_come_and_each_has_ids_of_its_own():
    assert MANY.vocabulary == (2 + 2) + (2 + 5) + (3 + 6)
    words = [MANY.draw(np.random.default_rng([2, i]), 200) for i in range(60)]
    ranges = {(int(word.token_T.min()), int(word.target_T.min()), int(word.target_T.max())) for word in words}
    assert ranges == {(0, 2, 3), (4, 6, 10), (11, 14, 19)}


def test_steps_stand_between_the_letters_and_leave_the_questions_as_they_were():
    steps = replace(MANY, answers="steps")
    for i in range(20):
        direct, written = (task.draw(np.random.default_rng([3, i]), n) for task, n in ((MANY, 12), (steps, 24)))
        assert (written.token_T[::2] == direct.token_T).all() and (written.token_T[1::2] == direct.target_T).all()
        assert (written.target_T[::2] == direct.target_T).all() and (written.target_T[1::2] == -100).all()


def test_asked_at_the_end_there_is_one_target():
    end = replace(MANY, ask="end")
    every, last = (task.draw(np.random.default_rng(4), 12).target_T for task in (MANY, end))
    assert (last[:-1] == -100).all() and last[-1] == every[-1]
    assert (every >= 0).all() and sum(last >= 0) == 1


def test_words_have_the_configured_lengths_in_the_test_or_lengths_around_that_of_training():
    assert MANY.test_lengths(32) == [1, 6]
    free = replace(MANY, tested=None)
    assert free.test_lengths(32) == [16, 32, 64, 128] == replace(free, answers="steps").test_lengths(64)


class Follows(torch.nn.Module):
    """A model that answers with the product of its input state (the identity at first) and the letter.

    Call number ``errs_at`` has a wrong answer.
    """

    def __init__(self, task: StateTracking, errs_at: int | None = None) -> None:
        super().__init__()
        self.task, self.group, self.errs_at = task, group(task.groups[0]), errs_at
        self.first = task.vocabulary - len(self.group)
        self.model = build("transformer", geometry=replace(SHALLOW, vocabulary=task.vocabulary))
        self.embedding, self.start, self.evaluating = self.model.embedding, self.model.start, self.model.evaluating
        self.calls = 0

    def forward(self, token_BT: torch.Tensor, **options: Any):
        out = self.model(token_BT, **options)
        state_B = token_BT[:, 0] - self.first if token_BT.shape[1] == 2 else torch.zeros(len(token_BT)).long()
        answer_B = torch.from_numpy(self.group.product_EE[state_B, token_BT[:, -1]])
        answer_B = (answer_B + (self.calls == self.errs_at)) % len(self.group)
        self.calls += 1
        return Answer(torch.nn.functional.one_hot(self.first + answer_B, self.task.vocabulary)[:, None], out.memory)


class Answer:
    def __init__(self, logits: torch.Tensor, memory: Any) -> None:
        self.logits, self.memory = logits, memory


@pytest.mark.parametrize(("errs_at", "share"), [(None, 1), (5, 0), (2, 0)])
def test_with_steps_a_model_goes_on_from_what_it_wrote_and_an_error_stays(errs_at: int | None, share: float):
    """Modulo 7 no later letter repairs an error. With true states as input, the error at letter 2 would not show."""
    task = StateTracking(groups=["Z7"], answers="steps", tested=[6])
    model: Any = Follows(task, errs_at)
    assert tracking.measure(model, task, 8, WORDS) == {"Z7": {"6": share}}
    assert model.calls == 6


@pytest.mark.parametrize("answers", ["direct", "steps"])
def test_an_untrained_model_knows_no_more_than_chance(answers: str):
    task = StateTracking(groups=["S5"], answers=answers, tested=[4, 7])
    model = build("gsm", geometry=replace(SHALLOW, vocabulary=task.vocabulary))
    shares = tracking.measure(model, task, 8, WORDS)
    assert set(shares["S5"]) == {"4", "7"} and max(shares["S5"].values()) < 0.2 and task.chance == {"S5": 1 / 120}
    assert "last state known, %  4 letters  7 letters" in "\n".join(tracking.table(shares))


def test_a_direct_answer_is_the_models_own_of_the_whole_word():
    task = replace(MANY, groups=["parity"], tested=[9])
    model = build("gsm", geometry=replace(SHALLOW, vocabulary=task.vocabulary))
    words = [task.word(0, np.random.default_rng([5, i]), 9) for i in range(WORDS)]
    answer_B = model(torch.tensor(np.stack([word.letter_N for word in words]))).logits[:, -1].argmax(-1)
    want_B = answer_B == torch.tensor([word.state_N[-1] for word in words])
    assert (tracking.last_states(model, words, steps=False) == want_B).all()


def test_a_run_learns_parity_and_says_how_well_it_knows_it_at_each_length(tmp_path):
    small = [
        *TINY[: TINY.index("data=folder")],
        NO_PICTURES,
        "data=state_tracking",
        "trainer=cpu",
        "model=sliding_window",
        "optimizer=adamw",
    ]
    task = ["data.task.groups=[parity]", "data.task.answers=steps", "data.task.tested=[8,40]", "data.context=16"]
    length = ["trainer.max_steps=30", "optimizer.warmup_steps=5", "data.validation_sequences=20", f"logs={tmp_path}"]
    facts = train(compose([*small, *task, *length]))
    assert facts["data"]["validation_answers"] == 20 * 8
    assert facts["by_length"] == {"parity": {"8": 1.0, "40": 1.0}}, "written down, parity is a look-up of two tokens"
