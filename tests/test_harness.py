"""The built-in scorer and the adapter against lm-evaluation-harness itself, and against its own scoring of a model of
the transformers library."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_tasks
import torch
import yaml
from bag import Bag

lm_eval = pytest.importorskip("lm_eval", reason="the extra eval is not installed")
pytest.importorskip("accelerate", reason="the harness's own class for models of transformers needs it")
transformers = pytest.importorskip("transformers", reason="the extra eval is not installed")

from hugging_face import HuggingFace  # noqa: E402

from gsm.data.tokenizer import Tokenizer  # noqa: E402
from gsm.evaluation import downstream, harness, task_files  # noqa: E402
from gsm.evaluation.task_files import load, samples  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of libraries that this extra brings
THEIRS = {
    **{"arc_easy": "arc/arc_easy", "arc_challenge": "arc/arc_challenge", "piqa": "piqa/piqa", "sciq": "sciq/sciq"},
    **{"blimp": "blimp/_template_yaml", "hellaswag": "hellaswag/hellaswag", "winogrande": "winogrande/default"},
    **{"mmlu": "mmlu/default/mmlu_abstract_algebra", "openbookqa": "openbookqa/openbookqa"},
    **{"lambada": "lambada/lambada_openai", "boolq": "super_glue/boolq/default"},
}
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
    theirs = HFLM(pretrained=model, tokenizer=wrapped, max_length=48, batch_size=3, device="cpu")
    return harness.Adapter(HuggingFace(model), tokenizer, max_length=48, rows=5), theirs


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=each) for each in arguments]


def test_loglikelihoods_of_a_foreign_model_are_the_harness_own(both: tuple[harness.Adapter, Any]):
    ours, theirs = both
    contexts = ["", "The moon", TEXTS[2], TEXTS[1] * 3, "What is "]
    asked = requests(*((context, ending) for context in contexts for ending in (" sea", " old queen.", " the ring")))
    for one, other in zip(ours.loglikelihood(asked, True), theirs.loglikelihood(asked, True), strict=True):
        assert one[0] == pytest.approx(other[0], abs=1e-4) and one[1] == other[1]
    assert ours.cut == 4, "as many as the harness warns of"


def test_rolling_loglikelihoods_of_a_foreign_model_are_the_harness_own(both: tuple[harness.Adapter, Any]):
    ours, theirs = both
    asked = requests((TEXTS[0],), ("".join(TEXTS),), ("x",))
    want = theirs.loglikelihood_rolling(asked, disable_tqdm=True)
    assert ours.loglikelihood_rolling(asked) == pytest.approx(want, abs=1e-3, rel=1e-6)


def test_a_foreign_model_writes_what_it_writes_in_the_harness(both: tuple[harness.Adapter, Any]):
    ours, theirs = both
    options = {"until": ["\n", "q"], "max_gen_toks": 12, "do_sample": False}
    asked = requests(*((text, options) for text in ("The moon", TEXTS[1] * 4, "Bo fed Al")), ("A", {"max_gen_toks": 3}))
    assert ours.generate_until(asked) == theirs.generate_until(asked, disable_tqdm=True)


@pytest.mark.parametrize("name", ["arc_easy", "winogrande", "lambada", "mmlu", "blimp"])
def test_the_built_in_scorer_and_the_harness_agree(name: str, tmp_path: Path, tokenizer: Tokenizer):
    """A question of each kind: choices, gaps, last words, shots with subtasks, empty contexts."""
    task, data = load(name), tiny_tasks.write(tmp_path / "data")
    asked = samples(task, data)
    ours = downstream.measure(Bag(300), tokenizer, task, asked, max_length=60)
    model, file = Bag(300), tmp_path / "theirs.json"
    theirs = harness.measure(harness.Adapter(model, tokenizer, max_length=60), task, asked, file=file)
    read = model.read
    assert harness.measure(harness.Adapter(model, tokenizer, max_length=60), task, asked, file=file) == theirs
    assert read == model.read > 0, "what is finished is not computed again"
    agree(ours["samples"], theirs["samples"])
    assert theirs["scores"] == {**ours["scores"], **perplexity(theirs["scores"])}
    assert bool(ours["scores"]["cut"]) == (name == "mmlu")


@pytest.mark.parametrize("name", list(THEIRS))
def test_our_task_files_say_what_the_harness_own_say(name: str, tmp_path: Path, tokenizer: Tokenizer):
    """The harness's own file, with nothing but its documents taken from here."""
    task, data = load(name), tiny_tasks.write(tmp_path / "data")
    asked = [one for one in samples(task, data) if name != "mmlu" or one.subtask == "simple_sums"]
    rows = {"test": [one.row for one in asked]}
    rows["dev"] = [row for row in tiny_tasks.ROWS["mmlu_dev"] if row["subject"] == "simple_sums"]
    for split, documents in rows.items():
        (tmp_path / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in documents))
    files = {split: str(tmp_path / "test.jsonl") for split in ("train", "validation", "test")}
    files |= {"dev": str(tmp_path / "dev.jsonl")} if task.shots else {}
    file = Path(lm_eval.__file__).parent / "tasks" / THEIRS[name]
    described = {
        "include": str(file if file.is_file() else file.with_name(f"{file.name}.yaml")),
        **{"task": "theirs", "dataset_path": "json", "dataset_name": None},
        "dataset_kwargs": {"data_files": files, "cache_dir": str(tmp_path / "cache")},
    }
    if name == "mmlu":  # theirs: a file for each subject
        described["description"] = "The following are multiple choice questions (with answers) about simple sums.\n\n"
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/theirs.yaml").write_text(yaml.safe_dump(described))
    adapter = harness.Adapter(Bag(300), tokenizer, max_length=400)
    manager = harness.TaskManager(include_path=str(tmp_path / "theirs"), include_defaults=False)
    logged = harness.run(adapter, ["theirs"], manager, shots=task.shots)["theirs"]
    theirs = [
        harness.record(adapter, task, one, asked[one["doc_id"]].document, asked[one["doc_id"]].subtask)
        for one in logged
    ]
    ours = downstream.measure(Bag(300), tokenizer, task, asked, max_length=400)["samples"]
    agree(ours, sorted(theirs, key=lambda one: one["document"]))


def test_a_task_file_runs_no_code_in_the_harness(tmp_path: Path, tokenizer: Tokenizer):
    """What its templates say in a sandbox, they may say otherwise outside; and a name may be a path."""
    (tmp_path / "rows.jsonl").write_text('{"q": "?"}\n')
    prompt = "{% if cycler.__init__ is defined %}{{ cycler.__init__.__globals__.os.getcwd() }}{% else %}safe{% endif %}"
    described = {"documents": "rows", "prompt": prompt, "continuation": "q", "metrics": ["acc"]}
    (tmp_path / "evil.yaml").write_text("task: evil\ndoc_to_text: !function os.getcwd\n")
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**described, "harness": str(tmp_path / "evil.yaml")}))
    task, read = load(str(tmp_path / "mine.yaml")), []
    adapter = harness.Adapter(Bag(300), tokenizer, max_length=400)
    adapter.tok_encode = lambda string, *a, **k: read.append(string) or tokenizer.encode(string)
    harness.measure(adapter, task, samples(task, tmp_path))
    assert read and all(text.startswith("safe") for text in read)
    with pytest.raises(ValueError, match="lm-evaluation-harness has no task '.*evil.yaml'"):
        harness.measure(adapter, task)


def perplexity(scores: dict[str, Any]) -> dict[str, Any]:
    """Of log-likelihoods that are equal up to rounding."""
    return {name: pytest.approx(value) for name, value in scores.items() if name == "perplexity"}


def agree(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one["loglikelihoods"] == pytest.approx(other["loglikelihoods"], abs=1e-9)
        assert {**one, "loglikelihoods": 0} == {**other, "loglikelihoods": 0}


def test_every_task_of_ours_is_held_against_theirs():
    assert set(THEIRS) == set(task_files.known())
