"""The adapter against lm-evaluation-harness's own class for a model of the transformers library; its tasks on local
documents."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_tasks
import torch
from bag import Bag

lm_eval = pytest.importorskip("lm_eval", reason="the extra eval is not installed")
pytest.importorskip("accelerate", reason="the harness's own class for models of transformers needs it")
transformers = pytest.importorskip("transformers", reason="the extra eval is not installed")

from hugging_face import HuggingFace  # noqa: E402

from gsm.data.tokenizer import Tokenizer  # noqa: E402
from gsm.evaluation import harness, tasks  # noqa: E402
from gsm.evaluation.results import Results  # noqa: E402

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
def both(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> tuple[harness.Adapter, Any]:
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
    return harness.Adapter(HuggingFace(model), tokenizer, max_length=48, rows=5), theirs


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=each) for each in arguments]


def test_loglikelihoods_of_a_foreign_model_are_the_harness_own(both: tuple[harness.Adapter, Any]):
    ours, theirs = both
    contexts = ["", "The moon", TEXTS[2], TEXTS[1] * 3, "What is "]
    asked = requests(*((context, ending) for context in contexts for ending in (" sea", " old queen.", " the ring")))
    for one, other in zip(ours.loglikelihood(asked, True), theirs.loglikelihood(asked, True), strict=True):
        assert one[0] == pytest.approx(other[0], abs=1e-4) and one[1] == other[1]
    assert sum(score.cut > 0 for score in ours.scores) == 4, "the harness warns of the same number"


@pytest.mark.parametrize("kind", ["generate_until", "loglikelihood_rolling"])
def test_texts_are_written_and_scored_whole_by_the_harness_own_command(kind: str, tokenizer: Tokenizer):
    model = Bag(300)
    with pytest.raises(ValueError, match=f"{kind} is not allowed .* Use lm_eval itself, on a model that export.py has"):
        getattr(harness.Adapter(model, tokenizer, max_length=48), kind)(requests(("A", {})))
    assert model.read == 0


def test_a_context_of_blanks_begins_with_the_end_of_text(tokenizer: Tokenizer):
    adapter = harness.Adapter(Bag(300), tokenizer, max_length=48)
    assert adapter.loglikelihood(requests(("  ", "sea"))) == adapter.loglikelihood(requests(("", "  sea")))


def local(name: str, folder: Path) -> list[Any]:
    return harness.build(tasks.load(name), str(tiny_tasks.write(folder / "data")))


def texts_of(name: str, built: list[Any]) -> dict[str, list[list[tuple[str, str]]]]:
    """Contexts and continuations of every document, by the task of the harness."""
    adapter = harness.Adapter(Bag(), Tokenizer.plain_bytes(), max_length=4000)
    logged = harness.run(adapter, built, tasks.load(name).shots)
    return {part: [document["arguments"] for document in documents] for part, documents in logged.items()}


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


def test_acc_norm_divides_by_characters_and_perplexity_is_of_whole_words(tmp_path: Path):
    folder = tiny_tasks.write(tmp_path / "data")
    rows = [{"goal": f"{n}?", "sol1": "x", "sol2": ("ß€y", "ßyy")[n % 2] * n, "label": 1} for n in range(1, 9)]
    (folder / "piqa_validation.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = score("piqa", folder)
    norm = [
        (one["loglikelihoods"][1] / (3 * n) > one["loglikelihoods"][0]) for n, one in enumerate(found["samples"], 1)
    ]
    assert found["scores"]["acc_norm"] == sum(norm) / 8 != found["scores"]["acc"]
    word = score("lambada", folder)
    each = [one["loglikelihoods"][0] for one in word["samples"]]
    assert word["scores"]["perplexity"] == pytest.approx(math.exp(-sum(each) / 2)) and word["scores"]["acc"] == 0.0


def test_subtasks_count_by_their_samples(tmp_path: Path):
    found = score("blimp", tiny_tasks.write(tmp_path / "data"))
    each = [one["acc"] for one in found["samples"]]
    assert found["scores"]["acc"] == sum(each) / 3 and found["scores"]["samples"] == len(each) == 3


def test_a_limit_takes_the_first_documents_of_each_subtask(tmp_path: Path):
    found = score("blimp", tiny_tasks.write(tmp_path / "data"), limit=1)
    assert [(one["subtask"], one["document"]) for one in found["samples"]] == [("causative", 0), ("passive_1", 0)]


def score(name: str, folder: Path, **options: Any) -> dict[str, Any]:
    task = tasks.load(name)
    built = harness.build(task, str(folder))
    return harness.measure(Bag(), Tokenizer.plain_bytes(), task, built, max_length=100, **options)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_evaluation_that_was_interrupted_ends_with_the_same_numbers(tmp_path: Path, after: int):
    model, file = Bag(), tmp_path / "scores.json"
    questions = (tasks.load("hellaswag"), local("hellaswag", tmp_path))
    options: dict[str, Any] = {"max_length": 40, "rows": 2}

    def measure(context: int = 40, **more: Any) -> dict[str, Any]:
        kept = Results(file, {"context": context})
        return harness.measure(model, Tokenizer.plain_bytes(), *questions, results=kept, **options, **more)

    def interrupted(batches: list[Any], count: int, note: str) -> Iterator[Any]:
        yield from batches[:after]
        raise KeyboardInterrupt

    want = measure()
    whole, text = model.read, file.read_bytes()
    file.unlink()
    with pytest.raises(KeyboardInterrupt):
        measure(progress=interrupted)
    assert measure() == want and file.read_bytes() == text
    assert model.read == 2 * whole, "nothing was computed twice"
    measure(context=41)
    assert model.read == 3 * whole, "results of other settings are not gone on from"


@pytest.mark.parametrize(
    ("line", "words"),
    [(b"{", ""), (b"\xff\xfe", ""), (b'{"sentence_good": "She sees."}', "KeyError: 'UID'")],
)
def test_a_file_that_a_task_does_not_fit_is_named(line: bytes, words: str, tmp_path: Path):
    data = tiny_tasks.write(tmp_path / "data")
    (data / "blimp.jsonl").write_bytes(line)
    with pytest.raises(ValueError, match=rf"task blimp cannot be read from .*blimp\.jsonl: .*{words}"):
        harness.build(tasks.load("blimp"), str(data))
