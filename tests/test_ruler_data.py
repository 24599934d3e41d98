"""Adaptation to RULER: the same questions with direct answers and with a chain of thought, and nothing else learned."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from small import build

from gsm.data.adaptation import RulerData
from gsm.data.ruler import Questions
from gsm.data.tokenizer import Tokenizer

BYTES = Tokenizer.plain_bytes()
END = BYTES.end_of_text


def data(**options) -> RulerData:
    options = {"lengths": [360, 440], "context": 640, "batch_size": 3, "new_tokens": 120, "words": 4, **options}
    return RulerData(vocabulary=257, tokenizer=BYTES, template="short", validation_sequences=6, **options)


def trained(made: RulerData, done: int = 0, steps: int = 8, accumulated: int = 1, rank: int = 0, world: int = 1):
    """The batches as a trainer sees them that has finished so many."""
    made.trainer = SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]
        max_steps=steps,
        accumulate_grad_batches=accumulated,
        distributed_sampler_kwargs={"num_replicas": world, "rank": rank},
        global_step=done // accumulated,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )
    return list(made.train_dataloader())


def spelled(batch: dict[str, torch.Tensor], row: int) -> tuple[str, list[int]]:
    """The prompt of a row, and the ids that it is to learn."""
    target_T = batch["targets"][row]
    first = int(torch.nonzero(target_T >= 0)[0])
    return BYTES.decode(batch["tokens"][row, : first + 1].tolist()), target_T[target_T >= 0].tolist()


def test_both_forms_of_an_answer_come_by_turns_for_each_task_after_the_same_prompts():
    both, direct, cot = (data(answers=answers).train_set for answers in ("both", "direct", "cot"))
    for number, own in enumerate([direct] * 3 + [cot] * 3 + [direct] * 3):  # of three tasks
        prompt, answer = both.ids(number, 440)
        assert (prompt == direct.ids(number, 440)[0]).all() and (answer == own.ids(number, 440)[1]).all()


def test_only_the_answer_and_its_end_are_learned():
    batch = trained(data())[0]
    for row in range(3):
        sample = data().train_set.sample(row, 360)
        assert spelled(batch, row) == (sample.prompt, [*BYTES.encode(f" {sample.outputs[0]}"), END])


def test_a_chain_of_thought_retrieves_verifies_and_answers_the_same_question():
    direct, cot = trained(data())[0], trained(data(answers="cot"))[0]
    for row in range(3):
        sample = data().train_set.sample(row, 360)
        prompt, answer = spelled(cot, row)
        retrieved, verified, final = BYTES.decode(answer).split(". ")
        assert prompt == spelled(direct, row)[0] and answer[-1] == END
        assert retrieved == f" told here: {sample.needle}".rstrip(".") and sample.key in verified
        assert final == f"Final answer: {sample.outputs[0]}"


def test_what_follows_an_answer_is_padding_that_changes_nothing():
    batch = trained(data(lengths=[360], words=2, new_tokens=80))[0]
    rows = (batch["documents"] >= 0).sum(1)
    assert (batch["documents"] == torch.where(torch.arange(360) < rows[:, None], 0, -1)).all() and rows.max() < 360
    model = build("gsm-writer=additive")
    tokens, documents = batch["tokens"][:1] % 23, batch["documents"][:1]
    targets = torch.where(batch["targets"][:1] >= 0, tokens.roll(-1, 1), -100)
    whole = model(tokens, documents=documents, targets=targets).loss
    cut = int(rows[0])
    torch.testing.assert_close(whole, model(tokens[:, :cut], targets=targets[:, :cut]).loss)


def test_lengths_follow_one_another_step_by_step_and_the_context_is_left_to_evaluation():
    lengths = [batch["tokens"].shape[1] for batch in trained(data(), accumulated=2, steps=3)]
    assert lengths == [360, 360, 440, 440, 360, 360]
    assert data(lengths=None, context=65536).lengths == [4096, 8192, 16384, 32768]


def test_after_all_examples_they_come_again():
    batches = trained(data(examples=9), steps=7)
    assert all(torch.equal(batches[0][name], batches[6][name]) for name in batches[0])
    assert not torch.equal(batches[0]["tokens"], batches[2]["tokens"]), "others of the same length"


def test_training_goes_on_with_the_very_next_batch_and_ranks_share_a_step():
    whole = trained(data())
    rest = trained(data(), done=5)
    assert len(rest) == 3
    assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(rest, whole[5:], strict=True))
    ranks = [trained(data(batch_size=1), rank=rank, world=3)[0] for rank in range(3)]
    assert torch.equal(torch.cat([one["tokens"] for one in ranks]), whole[0]["tokens"])
    assert not torch.equal(trained(data(seed=1))[0]["tokens"], whole[0]["tokens"])


def test_tasks_take_turns():
    counts = [spelled(batch, row)[0].count("The number of ") for batch in trained(data())[:1] for row in range(3)]
    assert counts == [2, 2, 5], "the needles, and the prefix of the answer"


def test_no_pair_of_training_is_asked_in_evaluation_or_validation():
    made = data(examples=300, words=2)
    trained_on = {(sample.key, *sample.outputs) for sample in map(made.train_set.sample, range(300), [440] * 300)}
    asked = {
        (sample.key, *sample.outputs)
        for task in made.tasks
        for index in range(60)
        for sample in [Questions(task, BYTES, made.ingredients).sample(index, 440)]
    }
    asked |= {(s.key, *s.outputs) for s in (made.validation_set.sample(index, 440) for index in range(60))}
    assert len(trained_on) > 100 and len(asked) > 100 and not trained_on & asked


def test_validation_has_the_longest_length_and_is_the_same_for_every_seed():
    first, second = list(data(seed=0).validation()), list(data(seed=1).validation())
    assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(first, second, strict=True))
    assert len(first) == 6 and first[0]["tokens"].shape == (440,)
    assert torch.equal(torch.cat([b["tokens"] for b in data().val_dataloader()])[5], first[5]["tokens"])
    assert [row["tokens"].shape for row in data().of_length(500, 2)] == [(500,), (500,)]


def test_a_blank_example_asks_nothing():
    batch = data().train_set.batch([2, -1])
    assert (batch["targets"][0] >= 0).any() and (batch["targets"][1] == -100).all()


def test_the_fingerprint_tells_whatever_changes_the_examples():
    made = [data(), data(answers="cot"), data(lengths=[360]), data(words=5), data(examples=7)]
    found = [one.fingerprint() for one in made]
    assert data().fingerprint() == found[0] and len({tuple(one.items()) for one in found}) == len(made)
    assert all(type(value) in (str, int) for one in found for value in one.values())
