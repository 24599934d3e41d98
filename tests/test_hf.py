"""Hugging Face: what transformers loads, generates and trains is our model, for every variant."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from short_runs import SIZES
from small import cases, mostly_nightly

import gsm
from gsm.config.check import ConfigError
from gsm.config.load import CheckpointError, load_tokenizer
from gsm.config.stored import digest, read_checkpoint
from gsm.data.tokenizer import Tokenizer
from gsm.training import weights

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from gsm.hf import GSMConfig, GSMForCausalLM  # noqa: E402
from gsm.hf.export import card, export, of_transformers  # noqa: E402

TEXTS = ["def f(", "class Foo:\n    def __init__(self, a, b):\n        self."]
SMALL = [*SIZES, "size.bank_layers=[2]", "size.stages=[2,3]"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that comes along, exported."""
    return export("nano", str(tmp_path_factory.mktemp("hf") / "exported"))


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def ours() -> Any:
    return gsm.load_model("nano")


def tokens(batch: int = 2, length: int = 70) -> torch.Tensor:
    return torch.randint(5, 400, (batch, length), generator=torch.Generator().manual_seed(1))


def test_logits_of_the_loaded_model_are_those_of_the_checkpoint(theirs: Any, ours: Any):
    with torch.no_grad():
        whole = ours(tokens())
        torch.testing.assert_close(theirs(tokens()).logits, whole.logits, rtol=0, atol=1e-6)
        assert theirs(tokens(), logits_to_keep=3).logits.shape[1] == 3
        some = theirs(tokens(), logits_to_keep=torch.tensor([0, 5])).logits
        # A product of two rows alone is rounded otherwise than one of all rows.
        torch.testing.assert_close(some, whole.head(whole.hidden_BRD[:, [0, 5]]), rtol=0, atol=1e-6)


def test_greedy_tokens_are_ours(theirs: Any, ours: Any):
    written = theirs.generate(tokens(), max_new_tokens=40, do_sample=False, eos_token_id=None)
    assert torch.equal(written[:, 70:], ours.generate(tokens(), 40))


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"num_beams": 3}, {"prefill_chunk_size": 5}], ids=str)
def test_left_padded_texts_are_continued_as_each_alone(theirs: Any, tokenizer: Any, options: dict):
    how = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, **options}
    together = theirs.generate(**tokenizer(TEXTS, return_tensors="pt", padding=True), **how)
    for text, row in zip(TEXTS, together, strict=True):
        alone = theirs.generate(**tokenizer(text, return_tensors="pt"), **how)[0]
        assert torch.equal(alone[-16:], row[-16:])


def test_beam_search_goes_on_with_the_beams_that_it_keeps(theirs: Any, tokenizer: Any):
    """With and without a cache, which it has to reorder."""
    how = {"max_new_tokens": 24, "num_beams": 4, "do_sample": False, "eos_token_id": None}
    prompt = tokenizer(TEXTS[1], return_tensors="pt")
    assert torch.equal(theirs.generate(**prompt, **how), theirs.generate(**prompt, **how, use_cache=False))


def test_a_conversation_goes_on_from_its_cache(theirs: Any, tokenizer: Any):
    how = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    first = theirs.generate(**tokenizer(TEXTS[0], return_tensors="pt"), **how, return_dict_in_generate=True)
    ids = torch.cat([first.sequences, tokens(1, 5)], dim=1)
    on = theirs.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=first.past_key_values, **how)
    assert torch.equal(on, theirs.generate(ids, attention_mask=torch.ones_like(ids), **how))


def test_a_pipeline_draws_several_texts_of_a_prompt(folder: Path):
    write = transformers.pipeline("text-generation", model=str(folder), device="cpu")
    texts = [row["generated_text"] for row in write("def ", max_new_tokens=8, do_sample=True, num_return_sequences=3)]
    assert len(set(texts)) > 1 and len(texts) == 3 and all(text.startswith("def ") for text in texts)


def test_half_precision_is_that_of_the_model_converted(folder: Path, ours: Any):
    half = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        mine = gsm.load_model("nano").to(torch.bfloat16)(tokens()).logits
        assert torch.equal(half(tokens()).logits, mine)


@pytest.mark.parametrize("case", mostly_nightly(cases(), "gsm", "baseline", "hybrid", "gsm-feed_forward=moe"))
def test_every_model_comes_back_as_it_was_saved(case: str, tmp_path: Path):
    config = GSMConfig.of_variant(*overrides(case))
    model = GSMForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.model == config.model
    ids = torch.randint(0, 257, (2, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
        written = again.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        assert torch.equal(written[:, 40:], model.model.generate(ids, 6))


def overrides(case: str) -> tuple[str, str, list[str]]:
    """The words of a case of ``small``, as the command line has them."""
    family, _, choice = case.partition("-")
    slot, _, name = choice.partition("=")
    words = {
        "stages": ["model.stages=[]"],
        "ratio": [f"size.encoder_ratio={name}"],
        "pool": ["model.candidate_pool=true"],
    }
    if (slot, name) == ("encoder_reading", "window_only"):
        words["encoder_reading"] = ["model/encoder_reading=window_only", "model/retriever=separate_indexer"]
    return family, "pico", [*SIZES, *(words.get(slot) or [f"model/{slot}={name}"] if slot else [])]


@pytest.mark.parametrize(
    "text",
    ["def f(x):\n    return <|endoftext|> x", " naïve — 日本 \x00\t", "", "a\r\nb"],
    ids=["code", "odd", "empty", "lines"],
)
@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_a_tokenizer_has_the_same_ids_for_the_same_text(text: str, kind: str):
    mine = Tokenizer.plain_bytes() if kind == "bytes" else load_tokenizer("nano")
    made = of_transformers(mine)
    assert made(text).input_ids == mine.encode(text)
    assert made.decode(mine.encode(text)) == text
    assert made.eos_token_id == made.pad_token_id == mine.end_of_text and len(made) == mine.vocabulary


def test_a_trainer_takes_a_step_and_learns_what_indexers_lose_too(folder: Path, tmp_path: Path):
    pytest.importorskip("accelerate")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    before = {name: value.clone() for name, value in model.named_parameters()}
    rows = [{"input_ids": row, "labels": row} for row in tokens(4, 32)]
    how = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=4, learning_rate=1e-3, report_to=[],
        use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=how, train_dataset=rows)
    assert trainer.train().training_loss > 0
    changed = [name for name, value in model.named_parameters() if not torch.equal(value, before[name])]
    assert any(".indexer." in name for name in changed) and len(changed) > 0.9 * len(before)


def test_a_step_of_four_batches_has_the_loss_of_one_batch(folder: Path, tmp_path: Path):
    """transformers passes the number of targets of a whole step. The indexers' loss was added once a batch."""
    pytest.importorskip("accelerate")
    rows, losses = [{"input_ids": row, "labels": row} for row in tokens(4, 32)], []
    for size, batches in ((4, 1), (1, 4)):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        how = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=size, learning_rate=0.0, report_to=[],
            gradient_accumulation_steps=batches, use_cpu=True, save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        losses.append(transformers.Trainer(model=model, args=how, train_dataset=rows).train().training_loss)
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


def test_the_loss_of_labels_is_ours_of_the_next_token(theirs: Any, ours: Any):
    ids = tokens()
    target_BT = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], dim=1)
    with torch.no_grad():
        torch.testing.assert_close(
            theirs(ids, labels=ids).loss, ours(ids, targets=target_BT).loss, rtol=1e-5, atol=1e-5
        )


def test_a_folder_is_a_checkpoint_wherever_one_is_asked_for(folder: Path, ours: Any):
    again = gsm.load_model(folder)
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), again.state_dict().values(), strict=True))
    assert load_tokenizer(folder).digest == load_tokenizer("nano").digest
    saved, before = read_checkpoint(folder), read_checkpoint("nano")
    assert saved["global_step"] == before["global_step"]
    assert saved["hyper_parameters"]["config"]["data"] == before["hyper_parameters"]["config"]["data"]


def test_folders_that_transformers_writes_are_read(folder: Path, theirs: Any, ours: Any, tmp_path: Path):
    """Weights in shards; and a model without its tokenizer, which only text needs."""
    theirs.save_pretrained(tmp_path, max_shard_size="500KB")
    assert not (tmp_path / "model.safetensors").exists() and (tmp_path / "modeling_gsm.py").exists()
    again = gsm.load_model(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), again.state_dict().values(), strict=True))
    with pytest.raises(CheckpointError, match="tokenizer.json"):
        load_tokenizer(tmp_path)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    before = digest(tmp_path)
    shutil.copy(shards[0], shards[1])
    assert digest(tmp_path) != before
    for place in ("../other.safetensors", str(shards[1])):
        index = {"weight_map": {"model.norm.weight": shards[0].name, "model.embedding.weight": place}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=str(tmp_path)):
            gsm.load_model(tmp_path)


def test_a_model_in_parts_on_several_devices_is_refused(folder: Path, theirs: Any, tmp_path: Path):
    accelerate = pytest.importorskip("accelerate")
    places = {name: "cpu" for name, _ in theirs.model.named_children()}
    options: dict[str, Any] = {"device_map": {f"model.{name}": place for name, place in places.items()}}
    assert transformers.AutoModelForCausalLM.from_pretrained(folder, **options)(tokens(1, 4)).logits.isfinite().all()
    options["device_map"]["model.encoder"] = "disk"
    with pytest.raises(ValueError, match="^device_map .*cpu and disk"):
        transformers.AutoModelForCausalLM.from_pretrained(folder, **options, offload_folder=tmp_path)
    model = accelerate.cpu_offload(GSMForCausalLM(GSMConfig.of_variant("gsm", "pico", SMALL)), torch.device("cpu"))
    with pytest.raises(ValueError, match="^device_map .*offloaded"):
        model(tokens(1, 4) % 257)


def damaged(folder: Path, place: Path, **changes: Any) -> Path:
    copy = shutil.copytree(folder, place / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **changes}))
    return copy


@pytest.mark.parametrize(
    "changes",
    [{"model": {"_target_": "os.system", "command": "true"}}, {"model": None}, {"run": None}, {"model_type": "llama"}],
    ids=["foreign part", "no model", "no run", "another model"],
)
def test_a_folder_is_trusted_as_little_as_a_checkpoint(folder: Path, tmp_path: Path, changes: dict):
    copy = damaged(folder, tmp_path, **changes)
    with pytest.raises(CheckpointError, match="model"):
        gsm.load_model(copy)
    if changes.get("model"):
        with pytest.raises(ConfigError, match="model._target_"):
            GSMForCausalLM.from_pretrained(copy)


def test_weights_that_are_cut_off_or_of_another_model_are_an_error(folder: Path, tmp_path: Path):
    copy = damaged(folder, tmp_path)
    (copy / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="model.safetensors"):
        gsm.load_model(copy)
    other = GSMForCausalLM(GSMConfig.of_variant(overrides="size.dim=64 size.vocabulary=500".split()))
    other.save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other/model.safetensors", copy)
    with pytest.raises(CheckpointError, match="embedding.weight"):
        gsm.load_model(copy)
    with pytest.raises((ValueError, RuntimeError)):
        transformers.AutoModelForCausalLM.from_pretrained(copy)


def test_weights_that_are_missing_are_an_error_and_no_warning(folder: Path, tmp_path: Path):
    from safetensors.torch import load_file, save_file

    copy = damaged(folder, tmp_path)
    weights = load_file(copy / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="model.norm.weight"):
        transformers.AutoModelForCausalLM.from_pretrained(copy)


def test_a_number_out_of_range_is_refused_by_transformers_too(folder: Path, tmp_path: Path):
    model = json.loads((folder / "config.json").read_text())["model"]
    copy = damaged(folder, tmp_path, model={**model, "geometry": {**model["geometry"], "window": -1}})
    with pytest.raises(ConfigError, match="window"):
        GSMForCausalLM.from_pretrained(copy)


def test_a_run_starts_from_a_folder(folder: Path):
    from gsm.config.compose import compose

    config = compose([f"start_from={folder}", "size=nano"])
    model = gsm.build_model()
    weights.take(model, str(folder), config)
    assert torch.equal(model.state_dict()["norm.weight"], gsm.load_model("nano").state_dict()["norm.weight"])
    assert weights.describe_start(str(folder)).endswith("step 480.") and digest(folder) != digest("nano")


def test_the_card_has_the_numbers_of_the_run(folder: Path, tmp_path: Path):
    assert "library_name: transformers" in (folder / "README.md").read_text()
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 480, "val_loss": 1.625}))
    text = card({"choices": {"size": "nano"}}, tmp_path / "checkpoints/step_00000480", tmp_path)
    assert "| optimiser steps | 480 |" in text and "| held-out loss, nats per token | 1.625 |" in text
    assert "size=nano" in text


@pytest.mark.slow
def test_the_folder_names_its_code_for_those_who_do_not_import_it(folder: Path):
    """As lm-eval's own backend loads it: a process that has not heard of this project."""
    code = (
        "import sys, torch; from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)\n"
        "print(type(model).__name__, tuple(model(torch.arange(5)[None]).logits.shape))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/").stdout
    assert said.split() == ["GSMForCausalLM", "(1,", "5,", "4096)"]


@pytest.mark.parametrize(
    ("key", "value"), [("weights", "int8"), ("to", __file__), ("to", str(Path(__file__).parent))], ids=str
)
def test_what_cannot_be_exported_is_refused(key: str, value: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=f"^{key} .*{value}"):
        export(**{"checkpoint": "nano", "to": str(tmp_path), key: value})


def test_the_folder_of_another_model_is_not_replaced(folder: Path, tmp_path: Path):
    copy = damaged(folder, tmp_path, model_type="llama")
    before = {file: file.read_bytes() for file in copy.iterdir()}
    with pytest.raises(ConfigError, match="^to "):
        export("nano", str(copy))
    assert before == {file: file.read_bytes() for file in copy.iterdir()}
    assert export("nano", str(shutil.copytree(folder, tmp_path / "earlier")), "bfloat16").is_dir()


def test_lm_evals_own_backend_scores_as_ours(folder: Path):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from gsm.evaluation.harness import LM

    make: Any = HFLM  # its package declares no parameters
    theirs = make(pretrained=str(folder), device="cpu", dtype="float32", batch_size=2)
    mine = LM(gsm.load_model("nano"), load_tokenizer("nano"), max_length=256)
    pairs = [("def f(x):\n", "    return x"), ("import ", "os"), ("", "class Foo:")]
    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    for (a, greedy_a), (b, greedy_b) in zip(theirs.loglikelihood(asked), mine.loglikelihood(asked), strict=True):
        assert abs(a - b) < 1e-4 and greedy_a == greedy_b


def test_a_fresh_model_is_drawn_as_ours(ours: Any):
    torch.manual_seed(3)
    theirs = transformers.AutoModelForCausalLM.from_config(GSMConfig.of_variant())
    mine = gsm.build_model(seed=3)
    for (name, a), b in zip(mine.state_dict().items(), theirs.model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
