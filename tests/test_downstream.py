"""Downstream tasks: log-likelihoods with shared contexts, task files, results that go on where they were."""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_tasks
import torch
from bag import Bag
from small import GEOMETRY, MEMORIES, SHALLOW, build

from gsm.data.tokenizer import Tokenizer
from gsm.evaluation import downstream, results, task_files
from gsm.evaluation.bootstrap import paired
from gsm.evaluation.loglikelihood import encode_pairs, loglikelihoods, plan
from gsm.evaluation.paper import published
from gsm.evaluation.task_files import load, read_task, samples

TASK = "documents: rows\nprompt: 'Q: {{q}}'\nchoices: '[a, b]'\ngold: right\nmetrics: [acc, acc_norm]\n"
ROW = {"q": "one?", "a": "x", "b": "yyy", "right": 1}


def ids(length: int, seed: int) -> list[int]:
    return torch.randint(GEOMETRY.vocabulary, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def some_pairs() -> list[tuple[list[int], list[int]]]:
    """Three questions with three choices, one with a single one, and two with contexts of a token."""
    pairs = [(ids(length, 1), ids(n, 10 * length + n)) for length in (9, 30, 31) for n in (1, 4, 2)]
    return [*pairs, (ids(17, 2), ids(5, 3)), (ids(1, 4), ids(7, 5)), (ids(1, 4), ids(3, 6))]


def one_by_one(model: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """From a single forward over everything."""
    with torch.no_grad():
        logprob_TV = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1].log_softmax(-1)
    target_T = torch.tensor(continuation)
    return float(logprob_TV.gather(1, target_T[:, None]).sum()), bool((logprob_TV.argmax(-1) == target_T).all())


def make(folder: Path, text: str = TASK, rows: list[dict[str, Any]] | None = None) -> Path:
    """A task file, with its documents beside it."""
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows or [ROW]))
    (folder / "mine.yaml").write_text(text)
    return folder / "mine.yaml"


@pytest.mark.parametrize("case", MEMORIES)
def test_a_shared_context_changes_no_loglikelihood(case: str):
    model, pairs = build(case, geometry=SHALLOW), [(ids(length, 1), ids(n, n)) for length in (9, 30) for n in (1, 4)]
    found = loglikelihoods(model, pairs, max_length=100, rows=7)
    for score, pair in zip(found, pairs, strict=True):
        want, greedy = one_by_one(model, *pair)
        assert score.loglikelihood == pytest.approx(want, abs=1e-9) and score.greedy == greedy and score.cut == 0


def test_questions_of_all_shapes_keep_their_places():
    model, pairs = Bag(), some_pairs()
    for rows in (1, 2, 7):
        for score, pair in zip(loglikelihoods(model, pairs, max_length=100, rows=rows), pairs, strict=True):
            assert score.loglikelihood == pytest.approx(one_by_one(model, *pair)[0], abs=1e-9)


def test_greedy_is_what_the_model_would_write():
    model, context, best = Bag(), ids(20, 1), []
    for _ in range(4):
        best.append(int(model(torch.tensor([context + best])).logits[0, -1].argmax()))
    found = loglikelihoods(model, [(context, best), (context, [*best[:3], best[3] + 1])], max_length=100)
    assert [score.greedy for score in found] == [True, False]


def test_a_context_is_read_once_for_all_its_choices():
    model = Bag()
    loglikelihoods(model, [(ids(30, 1), ids(4, n)) for n in range(5)], max_length=100)
    assert model.read == 30 + 5 * 3, "the last token of a choice is not read at all"


def test_what_is_too_long_is_cut_on_the_left_and_counted():
    model, context = Bag(), ids(30, 1)
    pairs = [(context, ids(n, n)) for n in (1, 4)]
    found = loglikelihoods(model, pairs, max_length=20)
    assert [score.cut for score in found] == [30 - 20, 30 - 17]
    for score, (_, choice) in zip(found, pairs, strict=True):
        assert score.loglikelihood == pytest.approx(one_by_one(model, context[score.cut :], choice)[0], abs=1e-9)


def test_long_continuations_are_scored_in_parts(monkeypatch: pytest.MonkeyPatch):
    model, pairs = Bag(), some_pairs()
    want = loglikelihoods(model, pairs, max_length=100)
    monkeypatch.setattr("gsm.evaluation.loglikelihood.SCRATCH", 257 * 4)
    for one, other in zip(loglikelihoods(model, pairs, max_length=100), want, strict=True):
        assert one.loglikelihood == pytest.approx(other.loglikelihood, abs=1e-9)


def test_a_continuation_that_is_too_long_is_scored_as_a_whole():
    model, context, text = Bag(), ids(30, 1), ids(25, 2)
    (score,) = loglikelihoods(model, [(context, text)], max_length=20)
    assert score.cut == 29 and score.loglikelihood == pytest.approx(one_by_one(model, context[-1:], text)[0], abs=1e-9)


def test_a_pair_that_cannot_be_scored_is_named():
    for pair in (([], [1]), ([1], [])):
        with pytest.raises(
            ValueError, match=r"pair 1 has \d tokens of context and \d to be scored, but needs at least 1"
        ):
            plan([([1], [2]), pair], max_length=20, rows=4)


def test_batches_hold_every_pair_once_and_no_more_than_asked_for():
    batches = plan(some_pairs(), max_length=100, rows=4)
    assert sorted(place for batch in batches for one in batch for place in one.places) == list(range(12))
    assert all(sum(len(one.places) for one in batch) <= 4 for batch in batches)
    assert all(len({len(one.places) for one in batch}) == 1 for batch in batches)


def test_a_blank_belongs_to_what_follows_it():
    encode = Tokenizer.plain_bytes().encode_batch
    texts = [("ab ", "c"), ("", " d"), ("  ", "e")]
    assert encode_pairs(encode, 256, texts) == [(list(b"ab"), list(b" c")), ([256], list(b" d")), ([256], list(b"  e"))]


@pytest.mark.parametrize("name", task_files.known())
def test_every_task_of_ours_makes_pairs_of_its_documents(name: str, tmp_path: Path):
    task = load(name)
    found = samples(task, tiny_tasks.write(tmp_path / "data"))
    assert len(found) == len(tiny_tasks.ROWS[task.documents])
    assert all(continuation.startswith(" ") for one in found for _, continuation in one.pairs)
    assert task.file.read_text().startswith("# ") and task.title != task.name


def test_prompts_are_as_the_harness_makes_them(tmp_path: Path):
    folder = tiny_tasks.write(tmp_path / "data")
    first = {name: samples(load(name), folder)[0] for name in task_files.known()}
    assert first["arc_easy"].pairs[1] == ("Question: What lights the night?\nAnswer:", " the old moon")
    assert first["sciq"].pairs[3] == ("Ice is water.\nQuestion: What is ice?\nAnswer:", " water")
    assert first["blimp"].pairs[0] == ("", " Mary sees herself.")
    assert first["hellaswag"].pairs[0] == ("Baking: She takes an egg. She", " sings. and goes.")
    assert first["hellaswag"].pairs[2][1] == " breaks it open."
    assert first["winogrande"].pairs == (("Bo fed Al so Bo", " was full."), ("Bo fed Al so Al", " was full."))
    assert first["lambada"].pairs == (("He lost the ring. All night he looked for the", " ring"),)
    assert first["boolq"].pairs[0] == ("Cats purr.\nQuestion: do cats purr?\nAnswer:", " no")
    assert first["openbookqa"].gold == 1 and first["winogrande"].gold == 1
    context, answer = first["mmlu"].pairs[1]
    shot = "Is it 1?\nA. yes\nB. no\nC. so\nD. lo\nAnswer: B\n\n"
    assert context.startswith(
        "The following are multiple choice questions (with answers) about simple sums.\n\nIs it 0"
    )
    assert shot in context and context.count("Answer:") == 6 and answer == " B"
    assert context.endswith("\n\nWhat is 1 + 1?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:")


def test_documents_may_be_compressed_and_limited(tmp_path: Path):
    path = make(tmp_path, rows=[{**ROW, "q": str(n)} for n in range(10)])
    with lzma.open(tmp_path / "packed.jsonl.xz", "wt") as file:
        file.write((tmp_path / "rows.jsonl").read_text())
    path.write_text(TASK.replace("rows", "packed"))
    assert [one.document for one in samples(read_task(path), tmp_path, limit=3)] == [0, 3, 6]
    assert len(samples(read_task(path), tmp_path, limit=99)) == 10


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TASK.replace("documents: rows\n", ""), "mine.yaml, line 1: the task has no field 'documents'"),
        ("# why\n" + TASK.replace("gold: right\n", ""), "mine.yaml, line 2: the task has no field 'gold'"),
        ("documents: rows\nmetrics: [acc]\n", r"no field 'continuation' \(or choices and gold\)"),
        (TASK + "shots: 5\n", "the task has no field 'shot_documents'"),
        (TASK + "shot: 5\n", "mine.yaml, line 6: unknown field 'shot'; known are title, "),
        (TASK + "shots: five\n", "mine.yaml, line 6: shots is 'five', but has to be a int"),
        (TASK.replace("acc_norm", "f1"), "mine.yaml, line 5: unknown metric 'f1'; known are acc, acc_norm, perplexity"),
        (TASK.replace("{{q}}", "{{q"), "mine.yaml, line 2: prompt is no template of Jinja"),
        (TASK.replace("[a, b]", "[a, b"), "mine.yaml, line 3: choices is no expression of Jinja"),
        (TASK + "  x: [\n", "mine.yaml, line 6: this is no yaml"),
        ("- a\n", "mine.yaml, line 1: a task is a mapping"),
    ],
)
def test_what_is_wrong_in_a_task_file_is_said(tmp_path: Path, text: str, said: str):
    with pytest.raises(ValueError, match=said):
        load(str(make(tmp_path, text)))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [ROW, {"a": "x", "b": "y", "right": 0}],
            "rows.jsonl, line 2: prompt of task mine, 'Q: {{q}}', .* 'q' is undef",
        ),
        ([{**ROW, "right": 2}], "rows.jsonl, line 1: gold of task mine is 2, .* one of the 2 choices, from 0"),
        ([ROW, {"q": "x", "a": "", "b": "y", "right": 0}], "rows.jsonl, line 2: a choice of task mine is empty"),
        ([{"q": "x", "b": "y", "right": 0}], "rows.jsonl, line 1: choices of task mine, .* 'a' is undefined"),
    ],
)
def test_what_is_wrong_with_a_document_is_said(tmp_path: Path, rows: list[dict[str, Any]], said: str):
    with pytest.raises(ValueError, match=said):
        samples(read_task(make(tmp_path, rows=rows)), tmp_path)


def test_broken_lines_and_missing_shots_are_said(tmp_path: Path):
    path = make(tmp_path, TASK + "shots: 2\nshot_documents: shots\nsubtask: kind\n", [{**ROW, "kind": "k"}])
    (tmp_path / "shots.jsonl").write_text(json.dumps({**ROW, "kind": "k"}) + "\n")
    with pytest.raises(ValueError, match="shots.jsonl has 1 documents of kind 'k', but task mine shows 2"):
        samples(read_task(path), tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "shots.jsonl").write_text("".join(json.dumps({**ROW, "kind": "k"}) + "\n" for _ in range(2)))
    with pytest.raises(ValueError, match="rows.jsonl, line 1: there is no field 'kind', which tells the subtasks"):
        samples(read_task(path), tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}\n{\n")
    with pytest.raises(ValueError, match="rows.jsonl, line 2: this is no JSON"):
        samples(read_task(path), tmp_path)


def test_an_unknown_task_is_answered_with_the_known_ones():
    with pytest.raises(
        ValueError, match=r"unknown task 'piqua'; did you mean piqa\? Known are arc_challenge, arc_easy,"
    ):
        load("piqua")


def test_all_files_that_a_folder_lacks_are_named(tmp_path: Path):
    folder = tiny_tasks.write(tmp_path / "data")
    (folder / "mmlu_dev.jsonl").unlink()
    (folder / "piqa_validation.jsonl").unlink()
    tasks = [load(name) for name in ("arc_easy", "piqa", "mmlu")]
    with pytest.raises(FileNotFoundError, match=r"data lacks piqa_validation \(of piqa\), mmlu_dev \(of mmlu\); each"):
        task_files.require(tasks, folder)


def test_acc_norm_divides_by_characters_and_perplexity_is_of_whole_words(tmp_path: Path):
    model, tokenizer = Bag(), Tokenizer.plain_bytes()
    rows = [{**ROW, "q": f"{n}?", "b": "ß€y" * n} for n in range(1, 9)]
    task = read_task(make(tmp_path, rows=rows))
    assert samples(task, tmp_path)[0].lengths == (1, 3), "characters, not bytes"
    found = downstream.measure(model, tokenizer, task, samples(task, tmp_path), max_length=100)
    norm = [
        (one["loglikelihoods"][1] / (3 * n) > one["loglikelihoods"][0]) for n, one in enumerate(found["samples"], 1)
    ]
    assert found["scores"]["acc_norm"] == sum(norm) / 8 != found["scores"]["acc"]
    word = read_task(make(tmp_path, "documents: rows\nprompt: '{{q}}'\ncontinuation: a\nmetrics: [acc, perplexity]\n"))
    found = downstream.measure(model, tokenizer, word, samples(word, tmp_path), max_length=100)
    (value,) = found["samples"][0]["loglikelihoods"]
    assert found["scores"] == {"acc": 0.0, "perplexity": math.exp(-value), "samples": 1, "cut": 0}
    assert value == pytest.approx(one_by_one(model, list(b"one?"), list(b" x"))[0], abs=1e-9)


def test_subtasks_count_by_their_samples():
    records = [
        {"subtask": name, "cut": 0, "acc": acc} for name, acc in (("a", 1.0), ("a", 1.0), ("a", 0.0), ("b", 0.0))
    ]
    found = results.conclude(["acc"], records)
    assert found["acc"] == 0.5
    assert found["subtasks"] == {"a": {"samples": 3, "acc": 2 / 3}, "b": {"samples": 1, "acc": 0.0}}


@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_evaluation_that_was_interrupted_ends_with_the_same_numbers(tmp_path: Path, after: int):
    model, tokenizer, task = Bag(), Tokenizer.plain_bytes(), load("piqa")
    folder, want, file = tiny_tasks.write(tmp_path / "data"), tmp_path / "want.json", tmp_path / "found.json"
    several = [one for _ in range(3) for one in samples(task, folder)]
    options: dict[str, Any] = {"max_length": 40, "rows": 2, "settings": {"context": 40}}
    downstream.measure(model, tokenizer, task, several, file=want, **options)
    whole = model.read

    def interrupted(batches: list[Any], count: int, note: str) -> Iterator[Any]:
        yield from batches[:after]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        downstream.measure(model, tokenizer, task, several, file=file, progress=interrupted, **options)
    begun, model.read = model.read - whole, 0
    downstream.measure(model, tokenizer, task, several, file=file, **options)
    assert file.read_bytes() == want.read_bytes()
    assert begun + model.read == whole, "nothing was computed twice"
    before = model.read
    downstream.measure(model, tokenizer, task, several, file=file, **options)
    assert model.read == before, "what is finished is not computed again"
    downstream.measure(model, tokenizer, task, several, file=file, **{**options, "settings": {"context": 41}})
    assert model.read == before + whole, "results of other settings are not gone on from"


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"task": "piqa", "settings": {}, "samples": [{}, {}]}'])
def test_a_damaged_file_of_results_is_begun_anew(tmp_path: Path, damage: str):
    model, tokenizer, task = Bag(), Tokenizer.plain_bytes(), load("piqa")
    file, two = tmp_path / "results.json", samples(task, tiny_tasks.write(tmp_path / "data"))
    file.write_text(damage)
    found = downstream.measure(model, tokenizer, task, two, max_length=100, file=file)
    assert json.loads(file.read_text()) == found and len(found["samples"]) == 2


@pytest.mark.parametrize("name", ["paper", "ablation"])
def test_the_papers_averages_are_those_of_its_rows(name: str):
    table = published(name)
    assert table and set(table.rows) <= set(task_files.known()) and len(table.average) == len(table.columns)
    for column, average in enumerate(table.average):
        values = [row["values"][column] for row in table.rows.values() if row["values"]]
        assert not values or sum(values) / len(values) == pytest.approx(average, abs=0.0051)


def test_the_bootstrap_finds_the_interval_that_drawing_questions_finds():
    drawn = torch.Generator().manual_seed(1)
    first = (torch.rand(200, generator=drawn) < 0.5).double()
    second = torch.where(torch.rand(200, generator=drawn) < 0.3, 1.0, first)
    found = paired({"a": first.tolist()}, {"a": second.tolist()})
    index = torch.randint(200, (10_000, 200), generator=drawn)
    low, high = (second - first)[index].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    assert found.difference == pytest.approx(float((second - first).mean())) and found.samples == 200
    assert found.low == pytest.approx(low, abs=0.006) and found.high == pytest.approx(high, abs=0.006)
    same = paired({"a": first.tolist()}, {"a": first.tolist()})
    assert (same.difference, same.low, same.high) == (0.0, 0.0, 0.0)


def test_the_bootstrap_weighs_tasks_alike_and_refuses_other_questions():
    found = paired({"a": [0.0], "b": [0.0] * 99}, {"a": [1.0], "b": [0.0] * 99})
    assert found.difference == 0.5 and str(found) == "+50.00 [+50.00, +50.00]"
    with pytest.raises(ValueError, match=r"not the same: \{'a': 1\} and \{'a': 2\}"):
        paired({"a": [0.0]}, {"a": [0.0, 1.0]})
