"""The checkpoints that come with the package: small, known by name wherever a checkpoint is asked for, trusted no more
than a stranger's, and as good as what they were made of."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from stored import store_model

import gsm
from gsm import paths
from gsm.analysis import needles
from gsm.analysis.interventions import answers
from gsm.config.load import load_tokenizer
from gsm.config.stored import checkpoint_folder, read_checkpoint
from gsm.evaluation.checkpoints import checkpoints, home
from gsm.evaluation.generate import generate
from gsm.evaluation.held_out import WHOLE, HeldOut
from gsm.evaluation.records import mean
from gsm.notebook import finished_runs, load, text, trained

NAMES = tuple(paths.trained())
SOURCE = "def wrap(text, width=70, **kwargs):\n    return TextWrapper(width=width, **kwargs).wrap(text)\n"


def test_they_are_small_and_said_to_be_there():
    assert NAMES == ("nano", "needle_delta_net", "needle_gsm", "needle_handed_on", "needle_separate_indexer")
    assert sum(file.stat().st_size for folder in paths.trained().values() for file in folder.iterdir()) < 10e6
    listed = re.findall(r"^\| `(\w+)` \|", (paths.TRAINED / "README.md").read_text(), re.M)
    assert sorted(listed) == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_one_holds_what_builds_it_and_neither_optimiser_nor_places(name: str):
    """What is read passes the checks of any checkpoint: shapes, checksums, names that a yaml names."""
    content = read_checkpoint(name)
    assert not {"optimizer_states", "loops", "callbacks", "training_state"} & content.keys()
    assert {x.dtype for x in content["state_dict"].values() if x.is_floating_point()} == {torch.bfloat16}
    others = {key: value for key, value in content.items() if key not in ("state_dict", "tokenizer")}
    assert "'/" not in str(others), "a place on the machine that it was trained on"
    model = gsm.load_model(name)
    assert not model.training and next(model.parameters()).dtype == torch.float32


@torch.no_grad()
def test_a_model_of_text_reads_and_writes_text():
    model = gsm.load_model("nano")
    assert model.tokenizer is not None and model.tokenizer.digest == load_tokenizer("nano").digest
    ids = model.tokenizer.encode(SOURCE)
    assert torch.equal(model(SOURCE).logits, model(torch.tensor([ids])).logits)
    want = model.generate(ids, 8)[0].tolist()
    assert model.generate(SOURCE, 8) == model.tokenizer.decode(want)
    assert model.generate([SOURCE, "import"], 8) == [model.generate(text, 8) for text in (SOURCE, "import")]
    assert torch.equal(model.generate([model.tokenizer.end_of_text], 4), torch.stack(list(model.stream("", 4)), 1))
    assert "".join(gsm.tokens(model, SOURCE)) == SOURCE and gsm.tokens(model, ids) == gsm.tokens(model, SOURCE)
    model.tokenizer.end_of_text = want[3]
    assert model.generate(SOURCE, 8) == model.tokenizer.decode(want[: want.index(want[3])])


def test_a_model_without_a_tokenizer_takes_ids_alone():
    model = gsm.load_model("needle_gsm")
    assert model.tokenizer is None
    for call in (model, model.generate):
        with pytest.raises(ValueError, match="^prompt "):
            call("text")
    with pytest.raises(ValueError, match="^source "):
        gsm.tokens(model, "text")
    assert gsm.tokens(model, [1, 2]) == ["1", "2"]
    model.tokenizer = load_tokenizer("nano")
    assert gsm.tokens(model, "import os") == ["import", " os"]


def test_a_call_prints_as_one_line():
    model = gsm.load_model("nano")
    out = model(torch.ones(1, 8, dtype=torch.long), targets=torch.ones(1, 8, dtype=torch.long), memory=model.start())
    assert "loss=" in repr(out) and repr(out.memory) in repr(out) and "used=8" in repr(out.memory)
    page = gsm.explore(model, "def wrap(text, width=70):")
    assert all("\n" not in repr(each) and len(repr(each)) < 150 for each in (out, page))


@torch.no_grad()
def test_nano_has_learned_to_read_python():
    model, token_T = gsm.load_model("nano"), text("nano", SOURCE, 100)
    loss = model(token_T[None, :-1], targets=token_T[None, 1:]).loss
    bits = float(loss) * (len(token_T) - 1) / len(SOURCE.encode()) / torch.log(torch.tensor(2.0))
    assert load_tokenizer("nano").decode(token_T.tolist()) == SOURCE
    assert bits < 2.2, "a uniform guess is 12 bits a token, 3.3 a byte"


def test_needles_are_answered():
    model, data = trained("gsm")
    questions = needles.ask(data.task, data.context, sequences=4)
    assert answers(model, questions.token_BT, questions.target_BT).accuracy > 0.95
    assert load(paths.trained()["needle_gsm"])[1].task == data.task


def test_a_name_is_looked_for_after_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert checkpoint_folder("nano") == paths.TRAINED / "nano" and checkpoints("nano") == [paths.TRAINED / "nano"]
    with pytest.raises(FileNotFoundError, match="nanno.*nano, needle_delta_net"):
        gsm.load_model("nanno")
    (tmp_path / "nano").mkdir()
    assert checkpoint_folder("nano") == Path("nano")
    with pytest.raises(FileNotFoundError, match="nano"):
        gsm.load_model("nano")


@pytest.mark.parametrize(("documents", "learned"), [("isolated", False), ("isolated_all_targets", True)])
def test_an_empty_prompt_is_noted_where_the_model_has_not_learned_to_begin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], documents: str, learned: bool
):
    content = read_checkpoint("nano")
    content["hyper_parameters"]["config"]["data"]["documents"] = documents
    generate(str(store_model(tmp_path / "mine", **content)), prompt="", max_new_tokens=1, device="cpu")
    assert ("documents=isolated" in capsys.readouterr().err) != learned


def test_commands_take_a_name_and_write_nothing_into_the_package(capsys: pytest.CaptureFixture[str]):
    generate("nano", prompt="def ", max_new_tokens=3, device="cpu")
    said = capsys.readouterr()
    assert said.out.startswith("def ") and not said.err
    relative = Path(os.path.relpath(paths.TRAINED / "nano"))
    for file in (*checkpoints("nano"), *checkpoints(str(relative)), relative.parent / "../trained/nano"):
        assert home(file) == Path("logs/trained/nano"), file


def test_where_nothing_was_trained_there_are_runs_to_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    runs = finished_runs()
    assert [run.arm for run in runs] == ["gsm", "delta_net", "separate_indexer"]
    assert all((run.folder / "metrics.jsonl").is_file() for run in runs)


def test_the_loss_of_a_model_of_needles_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (result,) = HeldOut(checkpoint="needle_gsm", device="cpu", sequences=4).evaluate()
    loss = result.where(**WHOLE)
    assert mean(loss) < 0.1 and [record["weight"] for record in loss] == [10] * 4, "ten needles a sequence"
    assert result.settings["questions"]["of"] == 4, "as many as were drawn"
