"""Our models in lm-evaluation-harness: log-likelihoods with shared contexts, against its own class for models of the
transformers library; its tasks on local documents."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_tasks
import torch
from bag import Bag
from small import GEOMETRY, MEMORIES, SHALLOW, build

lm_eval = pytest.importorskip("lm_eval", reason="the extra eval is not installed")
pytest.importorskip("accelerate", reason="the harness's own class for models of transformers needs it")
transformers = pytest.importorskip("transformers", reason="the extra eval is not installed")

from hugging_face import HuggingFace  # noqa: E402

import gsm  # noqa: E402
from gsm.config.load import load_tokenizer  # noqa: E402
from gsm.data.tokenizer import Tokenizer  # noqa: E402
from gsm.errors import ConfigError  # noqa: E402
from gsm.evaluation import harness, tasks  # noqa: E402
from gsm.evaluation.records import where  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of libraries that this extra brings
TEXTS = [
    "The moon pulls the sea, and the sea pulls back.",
    "Bo fed Al so Al was full. All night he looked for the ring.",
    "What is 1 + 1? It is 2, said the old queen; nobody heard herself say it.",
] * 4
CONFIGS = {
    "gpt2": lambda v: transformers.GPT2Config(vocab_size=v, n_positions=64, n_embd=32, n_layer=2, n_head=4),
    "llama": lambda v: transformers.LlamaConfig(
        vocab_size=v, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, 300)


@pytest.fixture(scope="module", params=list(CONFIGS))
def both(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> tuple[harness.LM, Any]:
    """One random model in our adapter, and in the harness's own class for models of transformers."""
    from lm_eval.models.huggingface import HFLM

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param](300)).eval()
    for parameter in model.parameters():  # far from the start, where all tokens are equally likely
        parameter.data.mul_(4.0)
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._bpe, eos_token="<|endoftext|>")
    wrapped.pad_token = wrapped.eos_token
    make: Any = HFLM  # its package declares no parameters
    theirs = make(pretrained=model, tokenizer=wrapped, max_length=48, batch_size=3, device="cpu")
    return harness.LM(HuggingFace(model), tokenizer, 48, batch_size=5), theirs


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=each) for each in arguments]


def test_loglikelihoods_of_a_foreign_model_are_the_harness_own(both: tuple[harness.LM, Any]):
    ours, theirs = both
    contexts = ["", "The moon", TEXTS[2], TEXTS[1] * 3, "What is "]
    asked = requests(*((context, ending) for context in contexts for ending in (" sea", " old queen.", " the ring")))
    for one, other in zip(ours.loglikelihood(asked, True), theirs.loglikelihood(asked, True), strict=True):
        assert one[0] == pytest.approx(other[0], abs=1e-4) and one[1] == other[1]


def test_loglikelihoods_of_whole_texts_are_the_harness_own(both: tuple[harness.LM, Any]):
    ours, theirs = both
    asked = requests(*((text,) for text in ("", "The moon", TEXTS[1] * 20)))
    found = ours.loglikelihood_rolling(asked), theirs.loglikelihood_rolling(asked, True)
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_a_text_is_written_up_to_a_stop():
    model, tokenizer = gsm.load_model("nano"), load_tokenizer("nano")
    prompt = "def add(self, x):\n"
    whole = tokenizer.decode(model.generate(tokenizer.encode(prompt), 12)[0].tolist())
    stop = whole[5:7]
    asked = [(prompt, {"until": until, "max_gen_toks": 12}) for until in ([], [stop], "no such text")]
    texts = harness.LM(model, tokenizer, max_length=256).generate_until(requests(*asked))
    assert texts == [whole, whole[: whole.index(stop)], whole]


def test_a_context_of_blanks_begins_with_the_end_of_text(tokenizer: Tokenizer):
    lm = harness.LM(Bag(300), tokenizer, 48)
    assert lm.loglikelihood(requests(("  ", "sea"))) == lm.loglikelihood(requests(("", "  sea")))


Pair = tuple[list[int], list[int]]  # token ids of a context and of an answer


def ids(length: int, seed: int) -> list[int]:
    return torch.randint(GEOMETRY.vocabulary, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def some_pairs() -> list[Pair]:
    """Three questions with three choices, one with a single one, and two with contexts of a token."""
    pairs = [(ids(length, 1), ids(n, 10 * length + n)) for length in (9, 30, 31) for n in (1, 4, 2)]
    return [*pairs, (ids(17, 2), ids(5, 3)), (ids(1, 4), ids(7, 5)), (ids(1, 4), ids(3, 6))]


def scores(model: Any, pairs: list[Pair], max_length: int = 100, batch_size: int = 32) -> list[tuple[float, bool]]:
    lm = harness.LM(model, Tokenizer.plain_bytes(), max_length, batch_size)
    return lm._loglikelihood_tokens([(None, *pair) for pair in pairs])


def one_by_one(model: Any, context: list[int], answer: list[int]) -> tuple[float, bool]:
    """From a single forward over everything."""
    with torch.no_grad():
        logprob_TV = model(torch.tensor([context + answer])).logits[0, len(context) - 1 : -1].log_softmax(-1)
    target_T = torch.tensor(answer)
    return float(logprob_TV.gather(1, target_T[:, None]).sum()), bool((logprob_TV.argmax(-1) == target_T).all())


@pytest.mark.parametrize("case", MEMORIES)
def test_a_shared_context_changes_no_loglikelihood(case: str):
    model, pairs = build(case, geometry=SHALLOW), [(ids(length, 1), ids(n, n)) for length in (9, 30) for n in (1, 4)]
    for score, pair in zip(scores(model, pairs, batch_size=7), pairs, strict=True):
        assert score == pytest.approx(one_by_one(model, *pair), abs=1e-9)


@pytest.mark.parametrize("batch_size", [1, 2, 7])
def test_questions_of_all_shapes_keep_their_places(batch_size: int):
    model, pairs = Bag(), some_pairs()
    for score, pair in zip(scores(model, pairs, batch_size=batch_size), pairs, strict=True):
        assert score == pytest.approx(one_by_one(model, *pair), abs=1e-9)


def test_a_model_that_diverged_answers_nothing():
    """Each of its NaNs was taken for the likeliest of all choices."""
    model = build("gsm", geometry=SHALLOW)
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="log-probabilities"):
        scores(model, [(ids(9, 1), ids(4, 1))])


def test_greedy_is_what_the_model_would_write():
    model, context, best = Bag(), ids(20, 1), []
    for _ in range(4):
        best.append(int(model(torch.tensor([context + best])).logits[0, -1].argmax()))
    found = scores(model, [(context, best), (context, [*best[:3], best[3] + 1])])
    assert [greedy for _, greedy in found] == [True, False]


def test_a_context_is_read_once_for_all_its_choices():
    model = Bag()
    scores(model, [(ids(30, 1), ids(4, n)) for n in range(5)])
    assert model.read == 30 + 5 * 3, "the last token of a choice is not read at all"


def test_what_is_too_long_is_cut_on_the_left():
    model, context = Bag(), ids(30, 1)
    pairs = [(context, ids(n, n)) for n in (1, 4, 25)]
    kept = [context[-20:], context[-17:], context[-1:]]
    for score, (_, answer), read in zip(scores(model, pairs, max_length=20), pairs, kept, strict=True):
        assert score == pytest.approx(one_by_one(model, read, answer), abs=1e-9)


def local(name: str, folder: Path) -> list[Any]:
    return harness.build(tasks.load(name), str(tiny_tasks.write(folder / "data")))


def texts_of(name: str, built: list[Any]) -> dict[str, list[list[tuple[str, str]]]]:
    """Contexts and answers of every document, by the task of the harness."""
    found: dict[str, list[list[tuple[str, str]]]] = {}
    for one in built:
        one.build_all_requests()
        for instance in one.instances:
            documents = found.setdefault(one.config.task, [])
            documents += [[] for _ in range(instance.doc_id + 1 - len(documents))]
            documents[instance.doc_id].append(instance.args)
    return found


FIRST = {
    "arc_challenge": ("Question: Which one is made of rock, and why?\nAnswer:", " a star"),
    "arc_easy": ("Question: What lights the night?\nAnswer:", " a star"),
    "blimp": ("", " Mary sees herself."),
    "boolq": ("Cats purr.\nQuestion: do cats purr?\nAnswer:", " no"),
    "hellaswag": ("Baking: She takes an egg. She", " sings. and goes."),
    "lambada": ("He lost the ring. All night he looked for the", " ring"),
    "openbookqa": ("The tides are pulled by", " a star"),
    "piqa": ("Question: open a jar\nAnswer:", " turn the lid"),
    "sciq": ("Ice is water.\nQuestion: What is ice?\nAnswer:", " salt"),
    "winogrande": ("Bo fed Al so Bo", " was full."),
}


@pytest.mark.parametrize("name", FIRST)
def test_local_documents_become_the_harness_own_questions(name: str, tmp_path: Path):
    texts = [text for part in texts_of(name, local(name, tmp_path)).values() for text in part]
    assert len(texts) == len(tiny_tasks.ROWS[tasks.load(name).files["test"]])
    assert texts[0][0] == FIRST[name]


def test_subtasks_of_one_file_are_shown_their_own_answers(tmp_path: Path):
    texts = texts_of("mmlu", local("mmlu", tmp_path))
    assert {name: len(part) for name, part in texts.items()} == {"mmlu_astronomy": 2, "mmlu_anatomy": 1}
    context, answer = texts["mmlu_astronomy"][0][1]
    assert context.startswith("The following are multiple choice questions (with answers) about astronomy.\n\nIs it 0")
    assert "Is it 1?\nA. yes\nB. no\nC. so\nD. lo\nAnswer: B\n\n" in context and context.count("Answer:") == 6
    assert context.endswith("\n\nWhat is 1 + 1?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:") and answer == " B"


def test_every_task_of_ours_has_its_first_question_here():
    assert {*FIRST, "mmlu"} == set(tasks.known())


def score(name: str, folder: Path, limit: int = 0, **options: Any) -> list[dict[str, Any]]:
    lm = harness.LM(Bag(), Tokenizer.plain_bytes(), **{"max_length": 100, **options})
    return harness.measure(lm, harness.build(tasks.load(name), str(folder)), limit)


def test_acc_norm_divides_by_characters(tmp_path: Path):
    folder = tiny_tasks.write(tmp_path / "data")
    rows = [{"goal": f"{n}?", "sol1": "x", "sol2": ("ß€y", "ßyy")[n % 2] * n, "label": 1} for n in range(1, 9)]
    (folder / "piqa_validation.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = score("piqa", folder)
    plain, norm = (where(found, quantity=quantity) for quantity in ("acc", "acc_norm"))
    want = [(one["loglikelihoods"][1] / (3 * n) > one["loglikelihoods"][0]) for n, one in enumerate(norm, 1)]
    assert [record["value"] for record in norm] == want != [record["value"] for record in plain]


def test_a_limit_takes_the_first_documents_of_each_subtask(tmp_path: Path):
    folder = tiny_tasks.write(tmp_path / "data")
    assert [(one["subtask"], one["document"]) for one in score("blimp", folder)] == [
        ("blimp_causative", 0), ("blimp_causative", 1), ("blimp_passive_1", 0)
    ]  # fmt: skip
    found = score("blimp", folder, limit=1)
    assert [(one["subtask"], one["document"]) for one in found] == [("blimp_causative", 0), ("blimp_passive_1", 0)]


def test_any_other_task_of_the_harness_is_scored_by_its_own_call():
    rows = [{"question": "def add(", "answer": "self"}, {"question": "import ", "answer": "os"}]
    documents = {"test": harness.datasets.Dataset.from_list(rows)}
    common = {"custom_dataset": lambda **_: documents, "test_split": "test", "doc_to_text": "{{question}}"}
    writes = {"task": "writes", "output_type": "generate_until", "doc_to_target": "{{answer}}"}
    writes |= {"metric_list": [{"metric": "exact_match"}], "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4}}
    rolls = {"task": "rolls", "output_type": "loglikelihood_rolling", "doc_to_target": "{{question}}"}
    rolls |= {"metric_list": [{"metric": "byte_perplexity"}]}
    lm = harness.LM(gsm.load_model("nano"), load_tokenizer("nano"), max_length=256)
    given = [{**common, **writes}, {**common, **rolls}]
    none = harness.TaskManager(include_defaults=False)
    found = lm_eval.simple_evaluate(model=lm, tasks=given, task_manager=none, bootstrap_iters=0)
    assert 0 <= found["results"]["writes"]["exact_match,none"] <= 1
    asked = requests(*((row["question"], writes["generation_kwargs"]) for row in rows))
    assert [document["resps"][0][0] for document in found["samples"]["writes"]] == lm.generate_until(asked)
    nats = sum(lm.loglikelihood_rolling(requests(*((row["question"],) for row in rows))))
    number = sum(len(row["question"]) for row in rows)
    assert found["results"]["rolls"]["byte_perplexity,none"] == pytest.approx(math.exp(-nats / number))


@pytest.mark.parametrize(
    ("task", "kind"),
    [
        ({"output_type": "loglikelihood_rolling", "metric_list": [{"metric": "word_perplexity"}]}, "word_perplexity"),
        ({"output_type": "generate_until", "metric_list": [{"metric": "acc"}]}, "acc by log-likelihoods"),
    ],
)
def test_a_task_that_our_table_cannot_hold_is_refused(
    task: dict[str, Any], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    documents = {"test": harness.datasets.Dataset.from_list([{"a": "b"}])}
    common = {"task": "piqa", "custom_dataset": lambda **_: documents, "test_split": "test"}
    common |= {"doc_to_text": "{{a}}", "doc_to_target": "{{a}}"}
    monkeypatch.setattr(harness, "_local", lambda *_: {**common, **task})
    with pytest.raises(ConfigError, match=f"^tasks must .*{kind}"):
        harness.build(tasks.load("piqa"), str(tiny_tasks.write(tmp_path / "data")))


def test_samples_that_do_not_fit_are_counted(tmp_path: Path):
    found = score("hellaswag", tiny_tasks.write(tmp_path / "data"), max_length=32)
    assert [one["cut"] for one in where(found, quantity="acc")] == [True, False]


@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_evaluation_that_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int):
    """Through the harness's `use_cache`. The batches that are left are others than without an interruption."""
    model, cache, built = Bag(), tmp_path / "cache" / "key", local("hellaswag", tmp_path)
    lm = harness.LM(model, Tokenizer.plain_bytes(), 40, batch_size=2)
    want, whole = harness.measure(lm, built), model.read

    def interrupted(parts: list[Any], *_: Any) -> Any:
        yield from parts[:after]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(harness, "progress", interrupted)
        harness.measure(lm, built, cache=cache)
    found = harness.measure(lm, built, cache=cache)
    assert model.read == 2 * whole, "nothing was computed twice"
    for one, other in zip(found, want, strict=True):
        assert one["value"] == other["value"]
        assert one["loglikelihoods"] == pytest.approx(other["loglikelihoods"], abs=1e-9)
    assert not list(cache.parent.iterdir()), "it is needed no more"


@pytest.mark.parametrize("line", [b"{", b"\xff\xfe", b'{"sentence_good": "She sees."}'])
def test_a_file_that_a_task_does_not_fit_is_named(line: bytes, tmp_path: Path):
    data = tiny_tasks.write(tmp_path / "data")
    (data / "blimp.jsonl").write_bytes(line)
    with pytest.raises(ConfigError, match=r"blimp\.jsonl"):
        harness.build(tasks.load("blimp"), str(data))
