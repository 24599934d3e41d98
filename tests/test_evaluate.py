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

from gsm.analysis.interventions import ablations
from gsm.checkpoint import newest
from gsm.config.address import TUNING
from gsm.config.compose import compose
from gsm.evaluation import commands, losses
from gsm.evaluation import held_out as script
from gsm.evaluation.checkpoints import checkpoints, progress
from gsm.evaluation.held_out import WHOLE, HeldOut
from gsm.evaluation.losses import buckets, distances, measure, token_losses
from gsm.evaluation.records import Measured, Record, by, by_arm, error, mean, read, where
from gsm.paths import ROOT
from gsm.span import document_positions
from gsm.tables import WIDTH
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


def loss_of(records: list[Record], quantity: str = "loss") -> float | None:
    return mean(where(records, by=None, quantity=quantity))


def weight(records: list[Record]) -> int:
    return sum(record["weight"] for record in records)


def run_of(records: list[Record], arm: str = "gsm", seed: int = 0, **asked: Any) -> Measured:
    """What `HeldOut.of` returns for these records."""
    questions = {"split": "validation", "documents": "", "context": 20, "sequences": 3, "of": 3, "data": {}, **asked}
    run = {"experiment": "x", "arm": arm, "seed": seed, "step": 1, "checkpoint": "none"}
    return Measured({"questions": questions}, run, [{"part": "text", **record} for record in records])


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
        whole = where(one, by=None)
        assert mean(whole) == pytest.approx(want, rel=1e-12)
        assert weight(whole) == int((batch["targets"] != -100).sum()) and len(whole) == 5
        assert {record["quantity"] for record in one} == {"loss"}, "no bits without bytes"
        for key in ("position", "bigram"):
            parts = where(one, by=key)
            assert weight(parts) == weight(whole) and mean(parts) == pytest.approx(want, rel=1e-12)
    values = HeldOut().metrics(run_of(found[0]))
    assert values["perplexity"] == math.exp(values["loss"]) and "bits_per_byte" not in values


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
    spans = by(where(measure(model, each(batch)), by="position"), "first", "last")
    assert [(*span, weight(records)) for span, records in spans.items()] == [
        (0, 0, 3),
        (1, 1, 3),
        (2, 3, 6),
        (4, 7, 9),
        (8, 15, 24),
        (16, 31, 12),
    ]


def test_a_bucket_holds_the_losses_at_its_positions():
    model, batch = build("gsm-writer=additive"), batch_of()
    loss_BT = token_losses(model, batch).detach()
    found = by(where(measure(model, each(batch)), by="position"), "first")
    early = torch.cat([loss_BT[:, 4:7], loss_BT[:, 12:16]], dim=1)
    for first, wanted in ((0, loss_BT[:, [0, 8]]), (4, early)):
        assert mean(found[first,]) == pytest.approx(float(wanted.mean()), rel=1e-12)


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
    values = HeldOut().metrics(run_of(text))
    for name, wanted_BT in (("new", counted_BT & ~seen_BT), ("seen", seen_BT)):
        part = where(text, by="bigram", seen=name == "seen")
        assert weight(part) == int(wanted_BT.sum()) > 0
        assert values[f"bigram/{name}"] == mean(part) == pytest.approx(float(loss_BT[wanted_BT].mean()), rel=1e-12)
    table = HeldOut().tables(by_arm([run_of(text)]))[2]
    assert [row[0] for row in table[:4]] == ["loss, tokens since its bigram", "new", "seen before", "1"]
    assert [row[-1] for row in table[1:3]] == [
        f"{int(part_BT.sum()):,}" for part_BT in (counted_BT & ~seen_BT, seen_BT)
    ]


def test_bits_per_byte_count_the_bytes_of_the_targets():
    model, batch = build("gsm-writer=additive"), batch_of()
    length_V = torch.arange(23) % 4
    wanted = batch["targets"][batch["targets"] >= 0]
    found = measure(model, each(batch), token_bytes_V=length_V)
    nats = float(token_losses(model, batch).detach().sum())
    bits = nats / math.log(2) / float(length_V[wanted].sum())
    assert loss_of(found, "bits") == pytest.approx(bits, rel=1e-12)
    assert HeldOut().metrics(run_of(found))["bits_per_byte"] == loss_of(found, "bits")


def test_a_sequence_without_bytes_counts_with_its_bits():
    model, batch = build("gsm-writer=additive"), batch_of()
    batch["targets"][0, :] = 0
    length_V = (torch.arange(23) > 0).long()
    found = measure(model, each(batch), token_bytes_V=length_V)
    nats = float(token_losses(model, batch).detach().sum())
    count = int((length_V[batch["targets"].clamp(min=0)] * (batch["targets"] >= 0)).sum())
    assert loss_of(found, "bits") == pytest.approx(nats / math.log(2) / count, rel=1e-12)
    assert not where(measure(model, each(batch), token_bytes_V=0 * length_V), quantity="bits")


def test_the_sums_of_documents_are_those_of_their_sequences():
    model, batch = build("gsm-writer=additive"), batch_of(5)
    length_V = torch.arange(23) % 4 + 1
    text = measure(model, each(batch), token_bytes_V=length_V, document_S=[0, 0, 3, 3, 7])
    found = HeldOut().metrics(run_of(text))["by_document"]
    loss_B = token_losses(model, batch).detach().sum(1)
    bytes_B = (length_V[batch["targets"].clamp(min=0)] * (batch["targets"] >= 0)).sum(1)
    wanted = [[float(part[rows].sum()) for part in (loss_B, bytes_B)] for rows in ([0, 1], [2, 3], [4])]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted))


def test_the_standard_error_is_the_spread_of_means_of_as_many_sequences():
    drawn = torch.Generator().manual_seed(3)
    repeats, count = 4000, 30
    weight = torch.randint(5, 15, (repeats, count), generator=drawn).double()
    value = weight * 2 + torch.randn(repeats, count, dtype=torch.float64, generator=drawn) * weight.sqrt()
    units = [
        [{"value": v, "weight": w} for v, w in zip(*row, strict=True)]
        for row in zip(value.tolist(), weight.tolist(), strict=True)
    ]
    means, errors = (torch.tensor([*map(of, units)]) for of in (mean, error))
    assert float(means.std()) == pytest.approx(float(errors.mean()), rel=0.05)


def test_one_sequence_has_no_error_and_the_mode_of_the_model_stays():
    model = build("gsm-writer=additive").train()
    found = measure(model, each(batch_of(1)))
    assert all(error(records) is None for records in by(found, "by", "first").values())
    assert model.training
    assert "+-" not in str(HeldOut().tables(by_arm([run_of(found)])))
    json.dumps(found, allow_nan=False)


def test_nothing_to_measure_is_said():
    model, batch = build("gsm-writer=additive"), batch_of()
    batch["targets"][:] = -100
    with pytest.raises(ValueError, match="target"):
        measure(model, each(batch))
    with pytest.raises(ValueError, match="sequences"):
        measure(model, [])
    with pytest.raises(ValueError, match="^batch_size"):
        measure(model, [], batch_size=0)


def test_it_finds_the_loss_that_the_run_found(
    runs: tuple[Path, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
):
    folder, summaries = runs
    commands.call([f"checkpoint={folder / 'gsm-seed1'}"])
    printed, run, summary = capsys.readouterr().out, folder_of(folder, "gsm-seed1"), summaries[1]
    (result,) = read(run / "evaluation.jsonl")
    values = HeldOut().metrics(result)
    assert values["loss"] == pytest.approx(summary["val_loss"], abs=1e-4)
    assert values["perplexity"] == pytest.approx(summary["val_perplexity"], rel=1e-4)
    assert values["bits_per_byte"] == pytest.approx(summary["bits_per_byte"], abs=1e-4)
    model, asked = result.settings["model"], result.settings["questions"]
    assert asked["data"]["digest"] == summary["data"]["digest"]
    assert (asked["split"], asked["context"]) == ("validation", 32)
    assert model["versions"] == summary["versions"] and model["device"] == "cpu"
    assert '"commit"' in (run / "evaluation.jsonl").read_text().partition("\n")[0]
    assert printed.isascii()
    for line in printed.splitlines():
        assert len(line) <= WIDTH or str(folder) in line, line
    assert "default/gsm-seed1, step 2: validation of" in printed and f"{values['loss']:.4f} +- " in printed
    assert f"{values['loss']:.4f} +- " in (run / "evaluation.md").read_text()


def test_a_folder_of_runs_becomes_one_table(
    runs: tuple[Path, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    folder, summaries = runs
    output = tmp_path / "found"
    found = HeldOut(str(folder), sequences=2, output=str(output)).evaluate()
    assert [(one.run["arm"], one.run["seed"]) for one in found] == [("baseline", 0), ("gsm", 0), ("gsm", 1)]
    assert all(len(one.where(**WHOLE)) == 2 for one in found)
    assert sorted(file.name for file in output.iterdir()) == ["evaluation.json", "evaluation.md"]
    assert [len(one.records) for one in read(folder_of(folder) / "evaluation.jsonl")][-1] == len(found[1].records)
    printed = capsys.readouterr().out
    assert all(len(line) <= WIDTH or str(output) in line for line in printed.splitlines())
    values = [mean(one.where(**WHOLE)) for one in found]
    spread = abs(values[1] - values[2]) / math.sqrt(2)
    head, loss, *_ = json.loads((output / "evaluation.json").read_text())["tables"][0]
    assert head[1:] == ["baseline", "gsm"] and loss[1] == f"{values[0]:.4f}", "a single run has no spread"
    assert loss[2] == f"{(values[1] + values[2]) / 2:.4f} +- {spread:.4f}" and loss[2] in printed
    assert "3 runs: 1 of baseline, 2 of gsm" in printed and len(summaries) == 3


def test_the_name_of_an_arm_stands_for_all_its_seeds(runs: tuple[Path, Any]):
    names = [step.parent.parent.name for step in checkpoints(str(runs[0] / "gsm"))]
    assert [name.rpartition("-")[0] for name in names] == ["gsm-seed0", "gsm-seed1"]
    assert len(checkpoints(str(runs[0] / "gsm-seed1"))) == 1


def test_an_attempt_of_tuning_is_not_measured_with_the_runs(runs: tuple[Path, Any], tmp_path: Path):
    shutil.copytree(runs[0], tmp_path / "mine")
    tuned = tmp_path / "mine" / TUNING
    shutil.copytree(folder_of(runs[0]), tuned / "gsm-seed0-1f3a9c07")
    assert (len(checkpoints(str(tuned.parent))), len(checkpoints(str(tuned)))) == (3, 1)


def test_context_split_and_text_may_be_others(runs: tuple[Path, list[dict[str, Any]]], tmp_path: Path):
    folder, _ = runs
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/letter.txt").write_text("Something else, and long enough to be cut in sequences. " * 40)
    (tmp_path / "texts/second.txt").write_text("Held out or not, it is text all the same, and it goes on. " * 40)
    run, output = str(folder / "gsm-seed0"), str(tmp_path / "out")
    text = {"path": str(tmp_path / "texts"), "split": "train", "sequences": 3}
    asked = ({}, {"context": 64, "batch_size": 1}, {"outside": (2, 64)}, text)
    own, longer, apart, other = (HeldOut(run, **each, output=output).evaluate()[0] for each in asked)
    of = [one.settings["questions"] for one in (own, longer, apart, other)]
    assert of[1]["context"] == 64 and max(record["last"] for record in longer.where(by="position")) == 63
    assert of[2]["outside"] == [2, 64] and len(apart.where(**WHOLE)) == of[2]["sequences"] > 1
    assert mean(apart.where(**WHOLE)) != mean(own.where(**WHOLE))
    assert of[3]["data"]["digest"] != of[0]["data"]["digest"] == of[1]["data"]["digest"]
    assert len(other.where(**WHOLE)) == of[3]["sequences"] == 3
    assert of[3]["data"]["tokenizer"] == "bytes", "the checkpoint's own"
    assert [one.settings["questions"] for one in read(tmp_path / "out/evaluation.jsonl")] == of


def test_a_checkpoint_alone_is_enough(runs: tuple[Path, list[dict[str, Any]]], tmp_path: Path):
    step = newest(folder_of(runs[0]))
    assert step is not None
    shutil.copytree(step, tmp_path / "mine")
    (found,) = HeldOut(str(tmp_path / "mine")).evaluate()
    assert found.run["checkpoint"].endswith("mine")
    assert HeldOut().read(tmp_path / "mine", {}).records == found.records


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
        (["output=/proc/nothing"], ".*/proc/nothing.* output="),
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
    folder, output = folder_of(runs[0]), str(runs[0].parent / "out")
    note = "not the text that the run validated on"
    HeldOut(str(folder), output=output).evaluate()
    assert note not in capsys.readouterr().out
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "data": {"digest": "of another machine"}}))
    HeldOut(str(folder), output=output).evaluate()
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
    measured = {"sequences": 10, "of": 120}
    (said,) = script._share(run_of([], **measured, data=data))
    for part in ("10 of the 120 sequences", "34,567 bytes", "2 of 12 files"):
        assert part in said
    assert script._share(run_of([], **measured, data={"task": "Needle"})) == []


def test_what_the_loss_is_without_the_state_or_its_stages_is_measured_when_asked_for(runs: tuple[Path, Any], capsys):
    """The numbers are those of the interventions; the model is whole again, and one without a state says so."""
    folder = folder_of(runs[0])
    (whole,) = HeldOut(str(folder), device="cpu").evaluate()
    commands.call([f"checkpoint={folder}", "ablate=true", "device=cpu"])
    assert "state, but a row's own z" in capsys.readouterr().out
    found = read(folder / "evaluation.jsonl")[-1]
    removed = {
        name: mean(records) for (name,), records in by(found.where(part="without", quantity="loss"), "removed").items()
    }
    assert list(removed) == ["state", "stage 1", "stage 2", "all stages"]
    loss = mean(found.where(**WHOLE))
    assert found.where(part="text") == whole.records, "it was there"
    assert HeldOut().metrics(found)["without/all_stages"] == removed["all stages"] != loss
    table = json.loads((folder / "evaluation.json").read_text())["tables"][3]
    assert [row[1:] for row in table[1:3]] == [
        [f"{value:.4f}", f"{value - loss:+.4f}"] for value in (loss, removed["state"])
    ]
    (again,) = HeldOut(str(folder), device="cpu").evaluate()
    assert again.records == whole.records, "nothing that was not asked for"
    HeldOut(str(runs[0]), ablate=True, device="cpu", output=str(runs[0].parent / "all")).evaluate()
    table = json.loads((runs[0].parent / "all/evaluation.json").read_text())["tables"][3]
    assert table[0][1:] == ["baseline", "gsm"] and [row[1] for row in table[2:]] == ["-"] * 4
    assert "baseline, zeros for parts of the model: none" in capsys.readouterr().out


def test_the_numbers_without_a_part_are_those_of_the_interventions():
    model, batch = build("gsm-writer=additive"), batch_of()
    for name, without in ablations(model).items():
        with without():
            out = model(batch["tokens"], documents=batch["documents"], targets=batch["targets"])
            assert loss_of(measure(model, each(batch))) == pytest.approx(float(out.loss.detach()), rel=1e-12), name


def test_the_overlap_of_stages_and_encoder_is_measured_when_asked_for(runs: tuple[Path, Any], capsys):
    checkpoint = f"checkpoint={runs[0] / 'gsm-seed0'}"
    commands.call([checkpoint, "overlap=true"])
    assert "overlap with the encoder, %" in capsys.readouterr().out
    found = read(folder_of(runs[0]) / "evaluation.jsonl")[-1]
    values = HeldOut().metrics(found)
    assert values["overlap"] == 1.0 and 0 < values["chance"] < 1, "its stages share the selection"
    assert [length for (length,) in by(found.where(quantity="overlap"), "length")] == [16, 32, 64], (
        "of 8 tokens no query has a choice"
    )
    assert values["overlap/16/2"] == 1.0
    assert 1 > values["chance/16"] > values["chance/32"] > values["chance/64"] > 0
    asked = HeldOut(checkpoint.partition("=")[2], overlap_lengths=[64, 16], documents="stream", device="cpu")
    (whole,) = asked.evaluate()
    questions = whole.settings["questions"]
    assert questions["documents"] == "stream"
    assert weight(whole.where(**WHOLE)) == questions["sequences"] * questions["context"]
    assert [length for (length,) in by(whole.where(part="overlap"), "length")] == [16, 64]
    for given in ("overlap_lengths=4k", "overlap=perhaps"):
        with pytest.raises(SystemExit, match=given.partition("=")[0]):
            commands.call([checkpoint, given])


def test_the_overlap_of_several_runs_stands_side_by_side():
    stages = [{"part": "overlap", "length": 8, "stage": n, "quantity": "overlap", "weight": 4} for n in (1, 2)]
    both = [run_of([{**one, "value": value} for one in stages], arm) for arm, value in (("a", 1.0), ("b", 3.0))]
    assert HeldOut().tables(by_arm(both))[-1] == [
        ["overlap with the encoder, %", "a", "b"],
        ["8 tokens, stage 1", "25.0", "75.0"],
        ["8 tokens, stage 2", "25.0", "75.0"],
    ]
