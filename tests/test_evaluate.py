"""`python evaluate.py`: it finds what training found, and where in a text a model does well."""

from __future__ import annotations

import itertools
import json
import math
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from short_runs import NO_PICTURES, folder_of
from small import build, random_tokens
from test_train_cli import arguments

from gsm.checkpoint import newest
from gsm.config.address import TUNING
from gsm.config.compose import compose
from gsm.evaluation import commands, losses
from gsm.evaluation import held_out as script
from gsm.evaluation.checkpoints import checkpoints, progress
from gsm.evaluation.held_out import HeldOut
from gsm.evaluation.losses import buckets, distances, measure, token_losses
from gsm.paths import ROOT
from gsm.span import document_positions
from gsm.training.run import train

QUICK = ("trainer.max_steps=2", "ngrams=false", "sample=false", NO_PICTURES)


def batch_of(batch: int = 3, length: int = 20) -> dict[str, torch.Tensor]:
    """Random sequences of two documents; a few positions have no target."""
    tokens = random_tokens(batch, length)
    targets = random_tokens(batch, length, seed=2)
    targets[:, 7] = -100
    return {"tokens": tokens, "targets": targets, "documents": (torch.arange(length) > 7).long().expand(batch, -1)}


def each(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [dict(zip(batch, rows, strict=True)) for rows in zip(*batch.values(), strict=True)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Three short runs of two arms: the folder above them, and their summaries."""
    folder = tmp_path_factory.mktemp("runs")
    chosen = (("gsm", 0), ("gsm", 1), ("baseline", 0))
    given = [*arguments(folder), *QUICK]
    made = [train(compose([*given, f"model={model}", f"seed={seed}"])) for model, seed in chosen]
    return folder / "logs" / "default", made


def test_losses_are_the_models_own_whatever_the_size_of_a_chunk(monkeypatch: pytest.MonkeyPatch):
    model, batch = build("gsm-writer=additive"), batch_of()
    whole = model(batch["tokens"], documents=batch["documents"], targets=batch["targets"])
    counted = batch["targets"] != -100
    for scratch in (1 << 24, 23 * 4 + 5):
        monkeypatch.setattr(losses, "SCRATCH", scratch)
        loss_BT = token_losses(model, batch)
        assert loss_BT.dtype == torch.float64
        assert (loss_BT[~counted] == 0).all()
        torch.testing.assert_close(loss_BT.sum() / counted.sum(), whole.loss)


def test_the_mean_weighs_every_target_the_same_in_batches_of_any_size():
    model, batch = build("gsm-writer=additive"), batch_of(5)
    batch["targets"][0, :15] = -100
    want = model(batch["tokens"], documents=batch["documents"], targets=batch["targets"]).loss.item()
    found = [measure(model, each(batch), batch_size=size) for size in (1, 2, 5)]
    for one in found:
        assert math.isclose(one["loss"], want, rel_tol=1e-12)
        assert one["targets"] == int((batch["targets"] != -100).sum()) and one["sequences"] == 5
        assert one["perplexity"] == math.exp(one["loss"])
        assert one["bits_per_byte"] is None
        assert sum(bucket["targets"] for bucket in one["by_position"]) == one["targets"]
        total = sum(bucket["targets"] * bucket["loss"] for bucket in one["by_position"])
        assert math.isclose(total, one["loss"] * one["targets"], rel_tol=1e-12)


def test_positions_start_again_with_every_document():
    documents = torch.tensor([[4, 4, 4, 9, 9, 4, 4], [1, 1, 1, 1, 1, 1, 1]])
    assert document_positions(documents).tolist() == [[0, 1, 2, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5, 6]]


def test_buckets_double():
    assert buckets(torch.tensor([0, 1, 2, 3, 4, 7, 8, 15, 16, 65535, 65536])).tolist() == [
        0,
        1,
        2,
        2,
        3,
        3,
        4,
        4,
        5,
        16,
        17,
    ]
    model, batch = build("gsm-writer=additive"), batch_of()
    batch["documents"] = torch.zeros_like(batch["tokens"])
    spans = [(b["first"], b["last"], b["targets"]) for b in measure(model, each(batch))["by_position"]]
    assert spans == [(0, 0, 3), (1, 1, 3), (2, 3, 6), (4, 7, 9), (8, 15, 24), (16, 31, 12)]


def test_a_bucket_holds_the_losses_at_its_positions():
    model, batch = build("gsm-writer=additive"), batch_of()
    loss_BT = token_losses(model, batch).detach()
    found = {b["first"]: b["loss"] for b in measure(model, each(batch))["by_position"]}
    first_tokens = loss_BT[:, [0, 8]]
    assert math.isclose(found[0], float(first_tokens.mean()), rel_tol=1e-12)
    early = torch.cat([loss_BT[:, 4:7], loss_BT[:, 12:16]], dim=1)
    assert math.isclose(found[4], float(early.mean()), rel_tol=1e-12)


def test_distances_are_those_of_a_double_loop():
    drawn = torch.Generator().manual_seed(5)
    token_BT = torch.randint(4, (6, 50), generator=drawn)
    target_BT = torch.cat([token_BT[:, 1:], torch.randint(4, (6, 1), generator=drawn)], dim=1)
    documents_BT = (torch.rand(6, 50, generator=drawn) < 0.1).cumsum(1) + 7
    target_BT[:, :-1][documents_BT[:, 1:] != documents_BT[:, :-1]] = -100
    target_BT[0] = target_BT[0].where(torch.rand(50, generator=drawn) < 0.5, -100)
    found = distances(token_BT, target_BT, documents_BT)
    for token_T, target_T, document_T, found_T in zip(token_BT, target_BT, documents_BT, found, strict=True):
        for t in range(50):
            since = 0
            for s in range(t):
                same = document_T[s] == document_T[s + 1] == document_T[t]
                if same and (token_T[s], token_T[s + 1]) == (token_T[t], target_T[t]):
                    since = t - s
            assert found_T[t] == since, t
    assert (found > 16).any() and (found == 1).any() and (found == 0).any()


def test_tokens_that_complete_a_bigram_of_the_document_have_a_loss_of_their_own():
    model, batch = build("gsm-writer=additive"), batch_of(5)
    batch["tokens"] %= 3
    batch["targets"][:, :-1] = batch["tokens"][:, 1:].where(batch["targets"][:, :-1] >= 0, -100)
    text = measure(model, each(batch), batch_size=2)
    loss_BT, counted_BT = token_losses(model, batch).detach(), batch["targets"] >= 0
    seen_BT = distances(batch["tokens"], batch["targets"], batch["documents"]) > 0
    parts = script.bigrams(text)
    for name, wanted_BT in (("new", counted_BT & ~seen_BT), ("seen", seen_BT)):
        assert parts[name]["targets"] == int(wanted_BT.sum()) > 0
        assert math.isclose(parts[name]["loss"], float(loss_BT[wanted_BT].mean()), rel_tol=1e-12)
    assert HeldOut.metrics({"text": text})["bigram/seen"] == parts["seen"]["loss"]
    assert "seen before" in script.report({"text": text}) and "bigram/seen" not in HeldOut.metrics(
        {"text": {"loss": 1.0}}
    )


def test_bits_per_byte_count_the_bytes_of_the_targets():
    model, batch = build("gsm-writer=additive"), batch_of()
    length_V = torch.arange(23) % 4
    wanted = batch["targets"][batch["targets"] >= 0]
    found = measure(model, each(batch), token_bytes_V=length_V)
    nats = found["loss"] * found["targets"]
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / float(length_V[wanted].sum()), rel=1e-12)


def test_the_sums_of_documents_are_those_of_their_sequences():
    model, batch = build("gsm-writer=additive"), batch_of(5)
    length_V = torch.arange(23) % 4 + 1
    found = measure(model, each(batch), token_bytes_V=length_V, document_S=[0, 0, 3, 3, 7])["by_document"]
    loss_B = token_losses(model, batch).detach().sum(1)
    bytes_B = (length_V[batch["targets"].clamp(min=0)] * (batch["targets"] >= 0)).sum(1)
    wanted = [[float(part[rows].sum()) for part in (loss_B, bytes_B)] for rows in ([0, 1], [2, 3], [4])]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted))


def test_the_standard_error_is_the_spread_of_means_of_as_many_sequences():
    drawn = torch.Generator().manual_seed(3)
    repeats, count = 4000, 30
    weight = torch.randint(5, 15, (repeats, count), generator=drawn).double()
    value = weight * 2 + torch.randn(repeats, count, dtype=torch.float64, generator=drawn) * weight.sqrt()
    found = [losses._ratio(v, w) for v, w in zip(value, weight, strict=True)]
    means, errors = (torch.tensor(column) for column in zip(*found, strict=True))
    assert float(means.std()) == pytest.approx(float(errors.mean()), rel=0.05)


def test_one_sequence_has_no_error_and_the_mode_of_the_model_stays():
    model = build("gsm-writer=additive").train()
    found = measure(model, each(batch_of(1)))
    assert found["loss_error"] is None and all(bucket["error"] is None for bucket in found["by_position"])
    assert model.training
    assert "+-" not in script.report({"text": found}).splitlines()[0]
    json.dumps(found, allow_nan=False)


def test_nothing_to_measure_is_said():
    model, batch = build("gsm-writer=additive"), batch_of()
    batch["targets"][:] = -100
    with pytest.raises(ValueError, match="target"):
        measure(model, each(batch))
    with pytest.raises(ValueError, match="sequences"):
        measure(model, [])
    with pytest.raises(ValueError, match="^batch_size "):
        measure(model, [], batch_size=0)


def test_it_finds_the_loss_that_the_run_found(
    runs: tuple[Path, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
):
    folder, summaries = runs
    commands.call([f"checkpoint={folder / 'gsm-seed1'}"])
    printed, run = capsys.readouterr().out, folder_of(folder, "gsm-seed1")
    result = json.loads((run / "evaluation.json").read_text())
    summary = summaries[1]
    assert result["text"]["loss"] == pytest.approx(summary["val_loss"], abs=1e-4)
    assert result["text"]["perplexity"] == pytest.approx(summary["val_perplexity"], rel=1e-4)
    assert result["text"]["bits_per_byte"] == pytest.approx(summary["bits_per_byte"], abs=1e-4)
    assert result["data"]["digest"] == summary["data"]["digest"]
    assert {key: result[key] for key in ("experiment", "arm", "seed", "step", "split", "context")} == {
        "experiment": "default", "arm": "gsm", "seed": 1, "step": 2, "split": "validation", "context": 32,
    }  # fmt: skip
    assert result["versions"] == summary["versions"] and "commit" in result and result["device"].startswith("cpu")
    assert printed.isascii()
    for line in printed.splitlines():
        assert len(line) <= 80 or str(folder) in line, line
    assert "default/gsm-seed1, step 2: validation of" in printed and "#" in printed


def test_a_folder_of_runs_becomes_one_table(
    runs: tuple[Path, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    folder, summaries = runs
    output = tmp_path / "found" / "table.json"
    own = folder_of(folder) / "evaluation.json"
    own.unlink(missing_ok=True)
    HeldOut(str(folder), sequences=2, output=str(output)).evaluate()
    found = json.loads(output.read_text())["runs"]
    assert [(run["arm"], run["seed"]) for run in found] == [("baseline", 0), ("gsm", 0), ("gsm", 1)]
    assert all(run["text"]["sequences"] == 2 for run in found)
    assert not own.exists(), "output= says where"
    table = capsys.readouterr().out.partition("3 runs;")[2]
    assert all(len(line) <= 80 or str(output) in line for line in table.splitlines())
    values = [run["text"]["loss"] for run in found[1:]]
    spread = abs(values[0] - values[1]) / math.sqrt(2)
    assert f"{sum(values) / 2:.4f} +- {spread:.4f}" in table
    assert len(summaries) == 3


def test_an_attempt_of_tuning_is_not_measured_with_the_runs(runs: tuple[Path, Any], tmp_path: Path):
    shutil.copytree(runs[0], tmp_path / "mine")
    tuned = tmp_path / "mine" / TUNING
    shutil.copytree(folder_of(runs[0]), tuned / "gsm-seed0-1f3a9c07")
    assert (len(checkpoints(str(tuned.parent))), len(checkpoints(str(tuned)))) == (3, 1)


def test_context_split_and_text_may_be_others(runs: tuple[Path, list[dict[str, Any]]], tmp_path: Path):
    folder, _ = runs
    (tmp_path / "letter.txt").write_text("Something else, and long enough to be cut in sequences. " * 40)
    (tmp_path / "second.txt").write_text("Held out or not, it is text all the same, and it goes on. " * 40)
    run, output = str(folder / "gsm-seed0"), str(tmp_path / "out.json")
    own = HeldOut(run, output=output).evaluate()[0]
    longer = HeldOut(run, context=64, batch_size=1, output=output).evaluate()[0]
    assert longer["context"] == 64 and longer["text"]["by_position"][-1]["last"] == 63
    apart = HeldOut(run, outside=(2, 64), output=output).evaluate()[0]
    assert (
        apart["outside"] == [2, 64] and apart["text"]["sequences"] > 1 and apart["text"]["loss"] != own["text"]["loss"]
    )
    asked = {"path": str(tmp_path), "split": "train", "sequences": 3}
    other = HeldOut(run, **asked, output=output).evaluate()[0]
    assert other["data"]["digest"] != own["data"]["digest"] == longer["data"]["digest"]
    assert other["text"]["sequences"] == 3
    assert other["data"]["tokenizer"] == "bytes", "the checkpoint's own"


def test_a_checkpoint_alone_is_enough(runs: tuple[Path, list[dict[str, Any]]], tmp_path: Path):
    step = newest(folder_of(runs[0]))
    assert step is not None
    shutil.copytree(step, tmp_path / "mine")
    HeldOut(str(tmp_path / "mine")).evaluate()
    assert json.loads((tmp_path / "mine/evaluation.json").read_text())["checkpoint"].endswith("mine")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["split=test"], "split .*got test"),
        (["context=1"], "context .*got 1"),
        (["sequences=-1"], "sequences .*got -1"),
        (["outside=16"], "outside "),
        (["outside=1,99999999"], "data: context .*got 99999999"),
        (["context=999999"], "data: context .*got 999999"),
        (["device=abacus"], "device .*abacus"),
        (["data=stdlip"], ".*data/stdlip"),
        (["path=/nowhere/at/all"], "data: .*nowhere"),
        (["chekpoint=x"], ".*'chekpoint'.*checkpoint"),
        (["output=/proc/nothing/evaluation.json"], "/proc/nothing/evaluation.json"),
    ],
)
def test_it_explains_what_it_cannot_use(runs: tuple[Path, list[dict[str, Any]]], given: list[str], said: str):
    with pytest.raises(SystemExit, match=f"^error: {said}"):
        commands.call([f"checkpoint={runs[0] / 'gsm-seed0'}", *given])


def test_a_folder_without_runs_is_explained(tmp_path: Path):
    with pytest.raises(SystemExit, match="^error: .*checkpoint"):
        commands.call([f"checkpoint={tmp_path}"])


def test_a_log_has_a_bar_of_progress_every_thirty_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The last lines of a log were bars, ten a second."""
    monkeypatch.setattr("tqdm.std.time", itertools.count().__next__)  # a second later at every look
    assert list(progress(range(100), 100, "1 of 2: ")) == list(range(100))
    assert 1 <= capsys.readouterr().err.count("1 of 2: ") <= 4


def test_the_script_explains_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--help"])
    runpy.run_path(str(ROOT / "evaluate.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.startswith("python evaluate.py name=value") and "checkpoint:" in printed


def test_other_text_than_the_run_had_is_said(
    runs: tuple[Path, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
):
    folder, output = folder_of(runs[0]), runs[0].parent / "out.json"
    note = "not the text that the run validated on"
    HeldOut(str(folder), output=str(output)).evaluate()
    assert note not in capsys.readouterr().out
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "data": {"digest": "of another machine"}}))
    HeldOut(str(folder), output=str(output)).evaluate()
    (folder / "summary.json").write_text(json.dumps(summary))
    assert note in capsys.readouterr().out


def test_other_data_is_that_of_the_checkpoints_size():
    """Needles lay as far apart as windows of the default size reach, whatever the model's size was."""
    saved = compose(["size=pico", "size.window=5", "data=recall", "size.vocabulary=128"])
    want = compose(["size=pico", "size.window=5", "data=needle", "size.vocabulary=128"])["data"]
    default = compose(["data=needle", "size.vocabulary=128"])["data"]
    assert script._other(saved, "needle", "")["task"] == want["task"] != default["task"]


def test_it_is_said_how_much_of_other_text_was_measured():
    """Of a folder of one's own only what training would hold out was measured, and nothing said so."""
    data = {"validation_files": 2, "files": 12, "validation_bytes": 34567}
    result = {"split": "validation", "split_sequences": 120, "text": {"sequences": 10}, "data": data}
    assert script._share(result).startswith(
        "measured 10 of the 120 sequences of this split, which is 34,567 bytes of 2 of 12"
    )
    assert script._share({**result, "data": {"task": "Needle"}}) == ""


def test_what_the_loss_is_without_the_state_or_its_stages_is_measured_when_asked_for(runs: tuple[Path, Any], capsys):
    """The numbers are those of the interventions; the model is whole again, and one without a state says so."""
    folder = folder_of(runs[0])
    commands.call([f"checkpoint={folder}", "ablate=true"])
    assert "state, but a row's own z" in capsys.readouterr().out
    found = json.loads((folder / "evaluation.json").read_text())
    assert list(found["ablated"]) == ["state", "stage 1", "stage 2", "all stages"]
    for row in found["ablated"].values():
        assert row["added"] == pytest.approx(row["loss"] - found["text"]["loss"]) != 0
    assert HeldOut.metrics(found)["without/all_stages"] == found["ablated"]["all stages"]["loss"]
    (again,) = HeldOut(str(folder), device="cpu").evaluate()
    assert again["text"] == found["text"] and "ablated" not in again
    (baseline,) = HeldOut(str(runs[0] / "baseline-seed0"), ablate=True, device="cpu").evaluate()
    assert baseline["ablated"] is None


def test_the_overlap_of_stages_and_encoder_is_measured_when_asked_for(runs: tuple[Path, Any], capsys):
    checkpoint = f"checkpoint={runs[0] / 'gsm-seed0'}"
    commands.call([checkpoint, "overlap=true"])
    assert "overlap with the encoder, %" in capsys.readouterr().out
    found = json.loads((folder_of(runs[0]) / "evaluation.json").read_text())["overlap"]
    assert found["mean"] == 1.0, "its stages share the selection"
    assert [row["length"] for row in found["by_length"]] == [8, 16, 32, 64]
    asked = HeldOut(checkpoint.partition("=")[2], overlap_lengths=[64, 16], documents="stream", device="cpu")
    (whole,) = asked.evaluate()
    assert whole["documents"] == "stream" and whole["text"]["targets"] == whole["text"]["sequences"] * whole["context"]
    assert [row["length"] for row in whole["overlap"]["by_length"]] == [16, 64]
    with pytest.raises(SystemExit, match="overlap_lengths .*'4k'"):
        commands.call([checkpoint, "overlap_lengths=4k"])
    with pytest.raises(SystemExit, match="overlap .*'perhaps'"):
        commands.call([checkpoint, "overlap=perhaps"])
