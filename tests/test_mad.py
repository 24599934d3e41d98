"""MAD's six tasks: what a sequence tells is what is asked for, and what it does not tell, no sequence does."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from gsm.config.compose import compose
from gsm.data.mad import Compression, FuzzyRecall, InContextRecall, Memorization, SelectiveCopy
from gsm.data.recall import Drawn
from gsm.data.synthetic import SyntheticData

RECALL, NOISY = InContextRecall(), InContextRecall(noise=0.5)
TASKS = {
    "recall": RECALL,
    "noisy": NOISY,
    "fuzzy": FuzzyRecall(),
    "copy": SelectiveCopy(),
    "compression": Compression(),
    "memorization": Memorization(),
}


def sequences(task, length: int, count: int = 40) -> list[Drawn]:
    return [task.draw(np.random.default_rng([1, number]), length) for number in range(count)]


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_sequences_have_their_length_their_ids_and_something_to_answer(task):
    for length in (task.least, task.least + 1, 129):
        for token_T, target_T in sequences(task, length):
            assert len(token_T) == len(target_T) == length and (target_T >= 0).any()
            assert 0 <= token_T.min() and max(token_T.max(), target_T.max()) < task.vocabulary
    with pytest.raises(ValueError, match=f"^context .*{task.least} "):
        task.check(task.least - 1)
    task.check(task.least)


@pytest.mark.parametrize("task", [RECALL, NOISY])
def test_a_value_is_asked_for_wherever_its_key_was_seen_and_nowhere_else(task: InContextRecall):
    shares = []
    for token_T, target_T in sequences(task, 128):
        told: dict[int, int] = {}
        pairs = [at for at in range(0, 128, 2) if token_T[at] < task.keys]
        for at in range(128):
            key, asked = token_T[at], target_T[at]
            assert asked == (told.get(key, -100) if at in pairs else -100)
            if at in pairs:
                assert told.setdefault(key, token_T[at + 1]) == token_T[at + 1], "a key keeps its value"
        shares.append(len(pairs) / 64)
        assert target_T[126] >= 0
    assert np.mean(shares) == pytest.approx(1 - task.noise, abs=0.05)


def test_fuzzy_values_are_asked_for_token_by_token_behind_a_whole_key_that_was_seen():
    task, lengths, asked = TASKS["fuzzy"], set(), 0
    for token_T, target_T in sequences(task, 128):
        is_value_T = (token_T >= task.keys) & (token_T < task.keys + task.values)
        text = token_T[token_T < task.vocabulary - 1]
        first = 128 - len(text)
        assert (token_T[:first] == task.vocabulary - 1).all() and first < 4 * task.longest
        starts = [first, *(at for at in range(first + 1, 128) if is_value_T[at - 1] and not is_value_T[at])]
        told: dict[tuple, tuple] = {}
        for at, end in pairwise([*starts, 128]):
            split = at + int(np.argmax(is_value_T[at:end]))
            key, value = tuple(token_T[at:split]), tuple(token_T[split:end])
            assert len(set(key)) == len(key) and len(set(value)) == len(value)
            lengths |= {len(key), len(value)}
            expected = value if key in told else (-100,) * len(value)
            assert tuple(target_T[split - 1 : end - 1]) == expected and told.setdefault(key, value) == value
            asked += key in told
    assert lengths == {1, 2, 3} and asked > 100


def test_what_is_copied_stands_among_blanks_in_its_order_before_the_mark():
    task, places = TASKS["copy"], set()
    for token_T, target_T in sequences(task, 256):
        mark = 256 - task.copied - 1
        assert token_T[mark] == task.symbols + 1 and (token_T[mark + 1 :] == task.symbols).all()
        told = token_T[:mark][token_T[:mark] < task.symbols]
        assert (target_T[mark + 1 :] == told).all() and (target_T[: mark + 1] == -100).all()
        places |= set(np.flatnonzero(token_T[:mark] < task.symbols))
    assert min(places) < 8 and max(places) > mark - 8


def test_a_compressed_text_is_asked_for_symbol_by_symbol():
    for token_T, target_T in sequences(TASKS["compression"], 33):
        assert (target_T[17:] == token_T[1:17]).all() and (token_T[17:] == 15).all() and (target_T[:17] == -100).all()


def test_what_is_memorised_is_the_same_in_all_sequences_and_told_in_none():
    task, values = TASKS["memorization"], {}
    for token_T, target_T in sequences(task, 64, 200):
        assert (token_T[1::2] == 254).all() and (target_T[::2] == -100).all()
        for key, value in zip(token_T[::2], target_T[1::2], strict=True):
            assert values.setdefault(int(key), int(value)) == value and 127 <= value < 254
    assert len(values) == 127 and len(set(values.values())) == 127


@pytest.mark.parametrize(
    "name", ["recall", "noisy_recall", "fuzzy_recall", "selective_copy", "compression", "memorization"]
)
def test_every_task_has_its_yaml(name: str):
    config = compose([f"data=mad_{name}", "size=pico"])
    assert config["data"]["task"]["_target_"].startswith("gsm.data.mad.")


def test_questions_are_counted_not_assumed():
    data = SyntheticData(task=NOISY, vocabulary=32, context=64, batch_size=4, validation_sequences=9)
    assert data.questions == sum(int((one["targets"] >= 0).sum()) for one in data.validation())
    assert (
        data.description()["validation_answers"] == data.questions and f"{data.questions:,}" in data.headline()["data"]
    )
