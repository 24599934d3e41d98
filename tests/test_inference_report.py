"""What is made of a file of inference results: ratios, where GSM gets ahead, goals, the paper's claims, the picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gsm.evaluation import plots
from gsm_benchmarks import clients, inference, inference_report, kernels, machine, projection, timing, training
from gsm_benchmarks.inference_report import crossing
from gsm_benchmarks.pictures import _steps, short
from gsm_benchmarks.results import Results

K = 1024
PROTOCOL = {"size": "pico", "batch": 1, "chunk": 4096, "steps": 64, "warm_up": 2, "runs": 3, "dtype": "bfloat16"}
SPEEDS = {"gsm": 2.0, "baseline": 1.0}  # tokens a millisecond


def row(model="gsm", tokens=4 * K, kind="read", prefill=None, decode=2.0, cache=100, **others) -> dict[str, Any]:
    """A row in which prefill and a token took so many milliseconds."""
    made: dict[str, Any] = {"model": model, "tokens": tokens, "kind": kind, "protocol": PROTOCOL, "text": "a text"}
    made["ceilings"] = timing.Ceilings(1e12, 1e11, "bfloat16")._asdict()
    prefill = tokens / SPEEDS.get(model, 1.0) if prefill is None else prefill
    if kind != "decode":
        rate = {"tokens_per_second": 1e3 * tokens / prefill, "flops": 100 * tokens, "share_of_product": 0.5}
        rate["share_of_floor"] = 0.25
        clocks = {"ms": spread(prefill), "processor_ms": spread(prefill**2)}
        made["prefill"] = {**clocks, **rate}
    if kind != "unpruned":
        rate = {"tokens_per_second": 1e3 / decode, "flops": 10, "bytes": 10, "share_of_floor": 0.5, "operations": 300}
        made["decode"] = {"ms": spread(decode), "processor_ms": None, "kernels": 200, **rate}
        made["decoder"] = {"operations": 7, "bytes": 1000}
        made["cache"] = {"bytes": cache, "formula": cache, "parts": {"shared_state": 4096} if model == "gsm" else {}}
    runs = {"warm_up": 2, "runs": 3}
    return {
        **made,
        "synthetic": kind == "decode",
        "peak_gib": 1.5,
        "runs": runs,
        "device": "a GPU",
        "turn": "a",
        **others,
    }


def spread(*each: float) -> dict[str, Any]:
    return {**timing.spread(each)._asdict(), "each": each}


def file_of(folder: Path, *rows: dict[str, Any], device: str = "a GPU") -> Path:
    facts = {**machine.facts(torch.device("cpu")), "device": device, "commit": "c0ffee"}
    results = Results(folder / "a.json", facts)
    for number, one in enumerate(rows):
        results.add(f"{one['model']} {short(one['tokens'])} {number}", one)
    return results.path


def test_gsm_is_held_against_the_others_of_the_same_length():
    rows = [row(), row("baseline", decode=3.0, cache=150), row("baseline", 8 * K), row("yoco", failed="out of memory")]
    lines = inference_report.against(rows).splitlines()[2:]
    assert lines == ["| baseline, read | 4K | 2.00 | 4.00 | 1.00 | 1.50 |  | 1.00 | 0.667 | 0.667 |"]


def test_pruning_is_held_against_the_same_model_s_every_row():
    whole = row(kind="unpruned", prefill=5000.0)
    lines = inference_report.pruning([row(), whole, row("baseline", kind="unpruned")]).splitlines()[2:]
    assert lines == ["| gsm | 4K | 2.44 | 5.96 | 1.00 |"]


def test_a_ratio_is_that_of_the_medians_in_the_table():
    ours, other = row(), row("baseline")
    ours["prefill"]["ms"], other["prefill"]["ms"] = spread(1.0, 10.0, 100.0), spread(3.0, 20.0, 300.0, 9e9)
    assert inference_report.speed_up(ours, other, "prefill") == 16
    assert "(not in turns)" not in inference_report.against([ours, other])
    apart = {**other, "turn": "b"}
    assert inference_report.speed_up(ours, apart, "prefill") == 16
    assert "| baseline, read (not in turns) | 4K | 16.00 |" in inference_report.against([ours, apart])


def test_growth_is_from_the_shortest_to_the_longest():
    rows = [row(tokens=n * K, kind="decode", decode=1 + n / 64, cache=n) for n in (64, 1, 4)]
    lines = inference_report.growth(rows).splitlines()[2:]
    assert lines == ["| gsm | synthetic, 1K to 64K | 1.97 | 1 | 1 | 64 | 4,096 |"]
    lines = inference_report.growth([row("yoco"), row("yoco", 8 * K)]).splitlines()[2:]
    assert lines == ["| yoco | 4K to 8K | 1 | 1 | 1 | 1 |  |"]


def times(model: str, seconds: dict[int, float]) -> list[dict[str, Any]]:
    return [row(model, tokens, prefill=ms) for tokens, ms in seconds.items()]


def test_a_crossing_between_lengths_is_measured():
    rows = times("gsm", {1000: 2.0, 4000: 4.0}) + times("transformer", {1000: 1.0, 4000: 8.0})
    assert crossing(rows, "transformer", "prefill") == "GSM is ahead of transformer from about 2,000 tokens (measured)"


def test_whoever_is_ahead_at_all_lengths_crosses_nowhere():
    ahead = times("gsm", {1000: 1.0, 2000: 2.0}) + times("transformer", {1000: 2.0, 2000: 4.0})
    said = crossing(ahead, "transformer", "prefill")
    assert said == "GSM is ahead of transformer at every length measured, from 1,000 tokens"
    behind = times("transformer", {1000: 1.0, 2000: 2.0}) + times("gsm", {1000: 2.0, 2000: 4.0})
    said = crossing(behind, "transformer", "prefill")
    assert said == "GSM is behind transformer at the longest length measured, 2,000 tokens"
    assert crossing(times("gsm", {1000: 1.0}), "transformer", "prefill") == "not measured"


def test_sizes_of_one_file_are_not_mixed(tmp_path):
    pytest.importorskip("matplotlib")
    tiny = {**PROTOCOL, "size": "nano"}
    rows = [row(), row(protocol=tiny, prefill=1.0), row("baseline", protocol=tiny)]
    path = inference.run(results=str(file_of(tmp_path, *rows)))
    first, second = path.with_suffix(".md").read_text().split("\n## ")[1:]
    assert first.startswith("pico, bfloat16, batch 1, a GPU, commit c0ffee\n")
    assert second.startswith("nano, bfloat16, batch 1, a GPU, commit c0ffee\n")
    assert "GSM against" not in first and "| baseline, read | 4K | 4096.00 |" in second
    assert {file.name for file in tmp_path.glob("*.png")} == {
        "a-pico.png", "a-pico-computed.png", "a-nano.png", "a-nano-computed.png",
    }  # fmt: skip


@pytest.mark.parametrize(
    "other", [{"commit": "another"}, {"sources": "others"}, {"threads": 7}, {"protocol": {**PROTOCOL, "chunk": 32}}]
)
def test_rows_measured_in_another_way_are_not_mixed(other):
    assert len(inference_report.groups([row(), row("baseline")])) == 1
    assert len(inference_report.groups([row(), {**row("baseline"), **other}])) == 2


def test_a_name_that_has_come_to_stand_for_another_model_is_not_mixed():
    changed = {**row(tokens=8 * K), "given": {"overrides": ["model.state_size=20"]}}
    whole, other = inference_report.groups([row(), row("baseline"), changed, row("baseline", 8 * K)])
    assert [(one["model"], one["tokens"]) for one in whole] == [
        ("gsm", 4 * K),
        ("baseline", 4 * K),
        ("baseline", 8 * K),
    ]
    assert other == [changed]


def test_a_file_of_another_benchmark_is_one_sentence(tmp_path):
    path = str(file_of(tmp_path, row()))
    for start in (training.run, clients.run, projection.run):
        with pytest.raises(ValueError, match="a.json is a file of another benchmark: its row 'gsm 4K 0' has no"):
            start(results=path)
    with pytest.raises(ValueError, match="a.json is a file of another benchmark: no row of it has a case"):
        kernels.run(results=path)
    Results(tmp_path / "b.json", machine.facts(torch.device("cpu"))).add("a", {"compiled": False})
    with pytest.raises(ValueError, match="b.json is a file of another benchmark: its row 'a' has no kind"):
        inference.run(results=str(tmp_path / "b.json"))


def test_speed_is_held_against_the_ratio_of_flops():
    near, far = row("baseline", prefill=2048.0 * 1.1), row("baseline", 8 * K, prefill=4096.0 * 1.3)
    assert inference_report.by_flops([row(), near]).endswith("at 1 of 1 lengths, 10.0% off at most, met")
    assert inference_report.by_flops([row(), near, row(tokens=8 * K), far]).endswith(
        "1 of 2 lengths, 30.0% off at most, missed"
    )
    assert inference_report.by_flops([row()]) == ""


def test_runs_that_did_not_happen_show():
    assert inference_report._cells({**row(), "name": "a"})[0] == "a"
    assert inference_report._cells({**row(), "name": "a", "runs": {"warm_up": 1, "runs": 1}})[0] == "a (1 + 1 runs)"


def test_a_verdict_names_goal_and_measurement():
    rows = [row(prefill=10.0, decode=1.6), row(tokens=256 * K, kind="decode", decode=2.0)]
    rows += [row(tokens=64 * K, prefill=200.0), row("baseline", 64 * K, prefill=250.0)]
    assert inference_report.verdicts(rows) == []
    lines = inference_report.verdicts([{**one, "protocol": {**PROTOCOL, "size": "1p5b"}} for one in rows])
    assert "aim 4K decode: 620 tokens/s: 625, met" in lines
    assert "aim 256K decode: 600 tokens/s: 500, missed" in lines
    assert "must 256K decode over 4K: 0.97: 0.8, missed" in lines
    assert "must 4K kernels: at most 240: 200, met" in lines
    assert "must 64K prefill over baseline: 1.3: 1.25, missed" in lines
    assert "aim 4K prefill: 250,000 tokens/s: 4.096e+05 (25% of the floor), met" in lines
    assert "aim 256K prefill: 260,000 tokens/s: not measured" in lines


def test_every_goal_is_that_of_a_case_that_the_gpu_measures():
    cases = inference.plan(["gsm", "baseline"], inference.LENGTHS["cuda"], inference.SYNTHETIC["cuda"])
    there = {case.tokens for case in cases if case.kind == "read"}
    assert {goal.tokens for goal in inference_report.GOALS} <= there


def test_the_paper_s_table_of_training_stands_beside_ours():
    ours = {"size": "1p5b", "batch_size": 4, "context": 4096, "compiled": False, "recompute": True, "devices": 8}
    ours |= {"ms": {"median": 2000.0}, "tokens_per_second": 300.0, "peak_gib": 40.0}
    other = {**ours, "model": "baseline", "tokens_per_second": 200.0}
    content = {"device": "a GPU", "rows": {"a": {**ours, "model": "gsm"}, "b": other}}
    text = training.paper_table(content)
    assert "| paper: tokens/s | 50,833 | 53,231 | 1.047 |" in text and "| a: tokens/s | 200 | 300 | 1.500 |" in text
    assert (
        training.paper_table({**content, "rows": {"a": content["rows"]["a"], "b": {**other, "recompute": False}}}) == ""
    )


def test_the_table_and_the_picture_are_made_from_the_file_alone(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [row(model, n * K, kind) for n in (1, 64) for model in SPEEDS for kind in ("read", "decode", "unpruned")]
    failed = {"model": "yoco", "tokens": K, "kind": "read", "protocol": PROTOCOL, "failed": "out of memory: would fit"}
    path = inference.run(results=str(file_of(tmp_path, *rows, failed)))
    for picture in (path.with_suffix(".png"), path.with_name("a-computed.png")):
        assert picture.read_bytes().startswith(b"\x89PNG")
    text = path.with_suffix(".md").read_text()
    assert "a GPU, " in text and "64 given tokens, 2 runs to warm up and 3 timed; a text." in text
    assert "| 50.0% | 25.0% |" in text
    assert "failed: out of memory: would fit" in text


def test_a_prompt_that_was_read_counts_before_a_synthetic_memory():
    pytest.importorskip("matplotlib")
    rows = [row(decode=1.0), row(kind="decode", decode=3.0), row(tokens=8 * K, kind="decode", decode=4.0)]
    figure, (axes,) = plots.figure()
    inference_report._draw(rows, axes, "decode", "gsm", plots.styles(["gsm"])["gsm"])
    line, *marks = axes.lines
    assert torch.as_tensor(line.get_ydata()).tolist() == [1000.0, 250.0]
    assert [mark.get_markerfacecolor() == "white" for mark in marks] == [False, True]


def test_a_picture_shows_the_rates_of_the_table():
    one = row(prefill=4.0, threads=1)
    assert inference_report.value(one, "prefill") == one["prefill"]["tokens_per_second"]


@pytest.mark.parametrize(("low", "high"), [(9.7, 28.0), (99.0, 130.0), (0.06, 45.0), (3.0, 3e6), (480.0, 1020.0)])
def test_an_axis_has_at_least_three_ticks(low, high):
    steps = _steps(low, high)
    there = [step * 10.0**ten for ten in range(-3, 8) for step in steps if low <= step * 10.0**ten <= high]
    assert 3 <= len(there) <= 12


def test_rows_without_measurements_have_no_picture():
    with pytest.raises(ValueError, match="there is no request that was measured"):
        inference_report.picture([row(failed="out of memory")])
