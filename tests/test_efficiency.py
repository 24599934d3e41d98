"""`benchmark=paper`: the paper's settings go to the benchmarks that measure, and its numbers stand beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gsm_benchmarks import efficiency, inference, machine, paper, timing, training
from gsm_benchmarks.results import Results, read


def spread(*each: float) -> dict[str, Any]:
    return {**timing.spread(each)._asdict(), "each": each}


def results(output: str) -> Results:
    return Results(Path(output), machine.facts(torch.device("cpu"), models=True))


def trained(model: str, seconds: float, **others: Any) -> dict[str, Any]:
    row = {"model": model, "size": "1p5b", "batch_size": 4, "context": 4096, "recompute": True, "devices": 1}
    speed = {"tokens_per_second": 4 * 4096 / seconds, "ms": spread(1e3 * seconds), "peak_gib": None}
    return {**row, **speed, "compiled": False, **others}


def served(model: str, tokens: int, prefill: float, decode: float, cache: int) -> dict[str, Any]:
    speed = {"prefill": tokens / prefill, "decode": 1 / decode}
    times = {"prefill": (prefill, 2 * prefill), "decode": (decode, 3 * decode)}
    found = {
        what: {"ms": spread(wall), "processor_ms": spread(own), "tokens_per_second": speed[what]}
        for what, (wall, own) in times.items()
    }
    protocol = {"size": "1p5b"}
    return {
        "model": model, "tokens": tokens, "kind": "read", "protocol": protocol, **found, "cache": {"bytes": cache},
        "turn": "a",
    }  # fmt: skip


@pytest.fixture
def measured(monkeypatch) -> list[tuple[str, dict[str, Any]]]:
    """What the two benchmarks are asked for; they find GSM twice as fast, and no training row of the baseline."""
    asked = []

    def train(**given: Any) -> None:
        asked.append(("training", given))
        file = results(given["output"])
        file.add("gsm", trained("gsm", 2.0))
        file.add("of another size", trained("baseline", 1.0, size="nano"))

    def serve(**given: Any) -> None:
        asked.append(("inference", given))
        file = results(given["output"])
        for model, times in (("gsm", 1), ("baseline", 2)):
            file.add(model, served(model, 512, 4.0 * times, 2.0 * times, times << 20))

    monkeypatch.setattr(training, "run", train)
    monkeypatch.setattr(inference, "run", serve)
    return asked


def test_the_settings_are_the_paper_s(measured, tmp_path: Path):
    efficiency.run(size="1p5b", lengths=[512], device="cpu", output=str(tmp_path / "a.json"), minutes=3)
    (_, steps), (_, requests) = measured
    assert (steps["batch_size"], steps["warm_up"], steps["steps"], steps["devices"]) == (4, 5, 12, 1)
    assert "context" not in steps and steps["recompute"] is True, "the size's own context, which is 4,096 at 1p5b"
    assert (requests["batch_size"], requests["warm_up"], requests["runs"], requests["steps"]) == (1, 2, 3, 64)
    assert requests["lengths"] == [512] and requests["synthetic_lengths"] == []
    assert 2.9 < requests["minutes"] <= steps["minutes"] <= 3
    efficiency.run(device="cpu", output=str(tmp_path / "a.json"))
    assert measured[-1][1]["lengths"] == [256, 512, 1024, 2048, 4096, 8192, 16384] and measured[-1][1]["size"] == "nano"
    assert paper.INFERENCE["lengths"][0] == 256 and paper.INFERENCE["lengths"][-1] == 256 * 1024


def test_the_paper_s_numbers_stand_beside_ours_at_its_size_alone(measured, tmp_path: Path):
    path = efficiency.run(size="1p5b", lengths=[512], device="cpu", output=str(tmp_path / "a.json"))
    text = path.with_suffix(".md").read_text()
    steps = "| training, 4 x 4,096 tokens on each of 1: s a step | not measured | 2 |  |  | 2.578 | 2.462 | 0.955 |"
    prefill = "| prefill, 512 tokens: tokens/s | 64 | 128 | 2 | 2 |  |  | above 1 |"
    cache = "| cache after 512 tokens: MiB | 2 | 1 | 0.5 |  |  |  | below 1 |"
    assert all(line in text for line in (steps, prefill, cache)), text
    before = path.with_suffix(".md").read_text()
    path.with_suffix(".md").unlink()
    efficiency.run(results=str(path))
    assert path.with_suffix(".md").read_text() == before
    other = efficiency.run(size="nano", lengths=[512], device="cpu", output=str(tmp_path / "b.json"))
    assert "paper" not in other.with_suffix(".md").read_text().split("\n\n", 2)[2]


def test_rows_of_other_models_are_left_out(measured, tmp_path: Path):
    models = ["gsm", {"name": "baseline", "overrides": ["model.candidate_pool=false"]}]
    path = efficiency.run(models=models, size="1p5b", lengths=[512], device="cpu", output=str(tmp_path / "a.json"))
    assert {row["baseline"] for row in read(path)["rows"].values()} == {"not measured"}


def test_an_error_of_one_half_leaves_the_other_and_is_raised(measured, monkeypatch, tmp_path: Path):
    def broken(**_: Any) -> None:
        raise RuntimeError("mat1 and mat2")

    monkeypatch.setattr(training, "run", broken)
    with pytest.raises(RuntimeError, match="mat1"):
        efficiency.run(size="1p5b", lengths=[512], device="cpu", output=str(tmp_path / "a.json"))
    assert list(read(tmp_path / "a.json", "quantity")["rows"]) == [
        "prefill, 512 tokens: tokens/s", "decoding after 512 tokens: tokens/s", "cache after 512 tokens: MiB",
    ]  # fmt: skip


def test_others_than_gsm_and_the_baseline_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="models are gsm, yoco: the paper holds gsm against baseline, so name two"):
        efficiency.run(models=["gsm", "yoco"], device="cpu", output=str(tmp_path / "a.json"))


@pytest.mark.slow
def test_both_halves_are_measured_and_not_again(monkeypatch, tmp_path: Path, capsys):
    monkeypatch.setattr(timing, "ceilings", lambda device: timing.Ceilings(1e12, 1e11, "float32"))
    monkeypatch.setitem(paper.TRAINING, "how", {"batch_size": 1, "warm_up": 0, "steps": 1})
    monkeypatch.setitem(paper.INFERENCE, "how", {"batch_size": 1, "warm_up": 0, "runs": 1, "steps": 2})
    asked: dict[str, Any] = {"size": "pico", "lengths": [40], "device": "cpu", "text": "random"}
    path = efficiency.run(**asked, output=str(tmp_path / "a.json"))
    rows = read(path)["rows"].values()
    assert all(row["ratio"] > 0 for row in rows if "peak" not in row["quantity"]) and len(rows) == 6
    capsys.readouterr()
    efficiency.run(**asked, output=str(tmp_path / "a.json"))
    assert capsys.readouterr().out.count("measured already") == 4


def test_requests_of_other_lengths_or_another_text_are_left_out(measured, monkeypatch, tmp_path: Path):
    output = str(tmp_path / "a.json")

    def prefills(**given: Any) -> list[str]:
        rows = read(efficiency.run(size="1p5b", device="cpu", output=output, **given))["rows"]
        return [row["quantity"] for row in rows.values() if "prefill" in row["quantity"]]

    assert prefills(lengths=[512]) == ["prefill, 512 tokens: tokens/s"]
    assert prefills(lengths=[1024]) == []
    monkeypatch.setattr(inference, "run", lambda **given: None)
    file = results(str(next(tmp_path.glob("*inference*.json"))))
    for row in [*file.rows.values()]:
        file.add(row["model"], {**row, "protocol": {**row["protocol"], "text": "docs"}})
    assert prefills(lengths=[512]) == [] and prefills(lengths=[512], text="docs") != []


def test_rows_that_were_not_measured_in_turns_say_so():
    pair = [served("gsm", 512, 4.0, 2.0, 1 << 20), {**served("baseline", 512, 8.0, 4.0, 2 << 20), "turn": "b"}]
    names = [one["quantity"] for one in efficiency._requests(pair, "1p5b")]
    assert [name.endswith("(not in turns)") for name in names] == ["cache" not in name for name in names]


def test_training_of_one_model_alone_is_measured_again_with_the_other(measured, tmp_path: Path):
    """A ratio is of one run of the command; this benchmark finds no row of the baseline."""
    output = str(tmp_path / "a.json")
    for _ in range(2):
        efficiency.run(size="1p5b", lengths=[512], device="cpu", output=output)
    assert [given["force"] for name, given in measured if name == "training"] == [False, True]
