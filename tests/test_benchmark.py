"""The benchmarks: what they say is what was measured, and nothing is lost or measured twice."""

from __future__ import annotations

import gc
import re
from functools import partial

import pytest
import torch

import gsm_kernels
from gsm.config.compose import compose
from gsm.costs.model import cost
from gsm_benchmarks import kernels, machine, peers, timing, training, workloads
from gsm_benchmarks.results import Results, read

CPU = torch.device("cpu")
SMALL = {"heads": 2, "channels": 16, "width": 16}
TINY = (
    workloads.attend("attend tiny", 2, 128, picks=8, **SMALL),
    workloads.attend_band("attend_band tiny", 2, 128, **SMALL),
    workloads.index_top_k("index_top_k tiny", 1, 300),
    workloads.indexer_kl("indexer_kl tiny", 1, 64, heads=2, channels=16),
    workloads.mhc_boundary("mhc_boundary tiny", 4, width=16),
    workloads.rms_norm("rms_norm tiny", 4, width=16),
    workloads.swiglu("swiglu tiny", 4, width=16),
    workloads.linear_cross_entropy("linear_cross_entropy tiny", 8, width=16, vocabulary=32),
)
ROOF = timing.Ceilings(1e12, 1e11, "float32")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Nothing is compiled, no ceilings are measured and no garbage is collected: that takes longer than all tests."""
    monkeypatch.setattr(gc, "collect", lambda: 0)
    monkeypatch.setattr(timing, "ceilings", lambda device: ROOF)
    monkeypatch.setattr(peers, "compiled", lambda function: function)
    monkeypatch.setattr(peers, "ON_A_CPU", {"dense mask": peers.dense_mask})


def row(case="rms_norm 16K", direction="forward", share=0.5, ratio=2.0, extra=None):
    spread = timing.spread([1.0])._asdict()
    return {
        "case": case,
        "direction": direction,
        "implementation": "triton",
        "flops": 1e9,
        "bytes": 1e9,
        "floor_ms": 1.0,
        "ceilings": ROOF._asdict(),
        "peers": {"compile": {"ms": spread, "ratio": ratio}, "flex": {"absent": "a mask is too large"}},
        "ms": spread,
        "host_ms": 0.1,
        "share_of_floor": share,
        "extra_mib": extra,
    }


def test_a_spread_has_median_and_quartiles():
    assert timing.spread([5, 1, 3, 2, 4]) == (3, 2, 4, 1, 5)
    assert timing.spread([7]) == (7, 7, 7, 7, 1)


def test_all_take_turns_and_each_begins_as_often():
    order: list[str] = []
    runs = {name: lambda name=name: order.append(name) for name in "abc"}
    found = timing.take_turns(runs, CPU, rounds=6)
    assert [len(laps) for laps in found.values()] == [6, 6, 6]
    rounds = [order[start : start + 3] for start in range(0, 18, 3)]
    assert [first for first, *_ in rounds] == list("abcabc") and all(set(one) == set("abc") for one in rounds)


def test_time_that_is_over_ends_the_rounds_but_not_before_a_few():
    assert len(timing.take_turns({"a": lambda: None}, CPU, rounds=100, seconds=0)["a"]) == timing.FEWEST


def test_picked_slots_ascend_among_those_a_row_sees():
    index = workloads.picked(1, 101, 8, CPU)[0]
    for place, slots in enumerate(index.tolist(), 1):
        there = [slot for slot in slots if slot >= 0]
        assert there == sorted(set(there)) and len(there) == min(place // 2, 8)
        assert all(slot < place // 2 for slot in there)


def test_work_is_that_of_the_equations():
    forward = workloads.attend("", 2, 100, heads=4, channels=8, width=10, picks=6).work["forward"]
    seen = sum(min(t, 10) + min(t // 2, 6) for t in range(1, 101))
    assert forward.flops == 4 * 4 * 8 * 2 * seen
    norm = workloads.rms_norm("", 10, width=8).work
    assert (norm["forward"].bytes, norm["backward"].bytes) == (4 * 80, 6 * 80)
    assert norm["forward"].at(torch.float32) == (0, 8 * 80 + 4 * 8)


def test_a_decoded_token_reads_what_it_sees():
    band = workloads.attend_band("", 1, 100, heads=4, channels=8, width=10, rows=1)
    assert band.work["forward"].flops == 4 * 4 * 8 * 10
    assert band.work["forward"].bytes == 4 * 4 * 8 + 4 * 4 + 2 * 8 * 10
    search = workloads.index_top_k("", 1, 100, rows=1).work["forward"]
    assert search.flops == 2 * 8 * 64 * 50
    call = workloads.attend("", 1, 100, heads=4, channels=8, width=10, picks=6).make(CPU, torch.float32)
    last = {key: x[:, -1:] if "_BR" in key else x for key, x in call.items()}
    expected = gsm_kernels.attend(**call)[:, -1:]
    torch.testing.assert_close(gsm_kernels.attend(**last), expected)
    torch.testing.assert_close(gsm_kernels.attend(**{**last, "window_BEC": last["window_BEC"][:, -10:]}), expected)


@pytest.mark.parametrize("case", workloads.decoding(), ids=lambda case: case.name)
def test_every_call_of_a_decoded_token_is_measured_on_a_cpu(case):
    found = kernels.measure(case, "forward", CPU, lambda: ROOF, with_peers=False, rounds=1, seconds=0)
    assert found["ms"]["laps"] == 1 and 0 < found["floor_ms"]


def test_the_quick_benchmark_of_a_gpu_fits_ten_minutes(monkeypatch, capsys, tmp_path):
    """By the estimate that it prints; here nothing is measured."""
    monkeypatch.setattr(Results, "fill", lambda self, rows, protocol, show: self.path)
    options = compose(["benchmark=kernels_quick"], script="benchmark")["benchmark"]
    protocol = {key: options[key] for key in ("peers", "rounds", "seconds")}
    kernels.run(cases=workloads.gates(), **protocol, device="cpu", output=str(tmp_path / "a.json"))
    minutes = re.search(r"about (\d+) minutes", capsys.readouterr().out)
    assert minutes and int(minutes[1]) <= 10


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_every_case_is_measured_on_a_cpu(case):
    chosen, _ = getattr(gsm_kernels, case.op).explain()
    for direction in case.work:
        found = kernels.measure(case, direction, CPU, lambda: ROOF, rounds=1, seconds=0)
        assert found["ms"]["laps"] == 1 and found["implementation"] == chosen, found.get("failed")
        assert found["host_ms"] is None and found["extra_mib"] is None
        assert all(peer["ratio"] > 0 for peer in found["peers"].values())
        work = case.work[direction]
        assert found["share_of_floor"] == pytest.approx(ROOF.floor(*work.at(torch.float32)) / found["ms"]["median"])


@pytest.mark.parametrize("case", TINY[:2], ids=lambda case: case.name)
@pytest.mark.parametrize("maker", ["dense_mask", "sdpa_dense"])
def test_other_ways_to_attend_agree_with_ours(case, maker):
    call = case.make(CPU, torch.float64)
    ours, theirs = getattr(gsm_kernels, case.op)(**call), getattr(peers, maker)(call)(**call)
    torch.testing.assert_close(theirs, ours, rtol=1e-6, atol=1e-6)


def test_attention_without_a_sink_is_brought_to_what_it_is_with_one():
    logits, sink = torch.randn(1, 5, 2, 7), torch.randn(2)
    value = torch.randn(7, 3)
    with_sink = torch.softmax(torch.cat((logits, sink.expand(1, 5, 2)[..., None]), -1), -1)[..., :-1] @ value
    without = torch.softmax(logits, -1) @ value
    torch.testing.assert_close(peers.sunk(without, logits.logsumexp(-1), sink), with_sink)


@pytest.mark.parametrize("name", ["rms_norm", "swiglu", "linear_cross_entropy"])
def test_the_plain_forms_agree_with_ours(name):
    case = next(case for case in TINY if case.op == name)
    call = case.make(CPU, torch.float32)
    torch.testing.assert_close(peers._PLAIN[name](**call), getattr(gsm_kernels, name)(**call))


def test_who_computes_something_else_is_not_compared(monkeypatch):
    def wrong(call):
        return lambda **call: 1.1 * call["query_BRHC"]

    def gone(call):
        raise peers.Absent("it is not installed")

    def broken(call):
        raise RuntimeError("no such instruction\nat line 3")

    monkeypatch.setattr(peers, "ON_A_CPU", {"wrong": wrong, "gone": gone, "broken": broken})
    found = kernels.measure(TINY[1], "forward", CPU, lambda: ROOF, rounds=1)["peers"]
    assert found["wrong"]["absent"].startswith("its result differs by")
    assert found["gone"] == {"absent": "it is not installed"}
    assert found["broken"] == {"absent": "RuntimeError: no such instruction"}


def test_slots_are_compared_as_sets():
    assert workloads._other_slots(torch.tensor([[1, 2, 3, -1]]), torch.tensor([[1, 2, 3, -1]])) == 0
    assert workloads._other_slots(torch.tensor([[1, 2, 4, -1]]), torch.tensor([[0, 1, 2, -1]])) == 0.25


def test_the_table_and_the_picture_are_made_from_the_file_alone(tmp_path):
    facts = {**machine.facts(CPU), "device": "a GPU", "commit": "c0ffee"}
    file = Results(tmp_path / "a.json", facts)
    file.add("one", row())
    file.add("two", {"case": "rms_norm 16K", "direction": "backward", "failed": "out of memory"})
    text = kernels.run(results=str(tmp_path / "a.json")).with_suffix(".md").read_text()
    assert "a GPU, " in text and "commit c0ffee" in text
    measured = "1 (1 to 1) | 50% of 1 ms | 1 TFLOP/s, 1 TB/s |  | compile 2.00 x"
    assert f"| rms_norm 16K | forward | triton | {measured} |" in text
    assert "| failed: out of memory |" in text and "* flex: a mask is too large" in text
    pytest.importorskip("matplotlib")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_that_is_none_of_results_is_named(tmp_path):
    (tmp_path / "a.json").write_text("[]")
    for path in ("a.json", "b.json"):
        with pytest.raises(ValueError, match=path):
            kernels.run(results=str(tmp_path / path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("start", [kernels.run, training.run])
def test_a_gpu_that_is_not_there_is_refused(start):
    with pytest.raises(ValueError, match="^device "):
        start(device="cuda")


def test_training_is_measured_in_whole_steps(tmp_path, capsys):
    output = tmp_path / "a.json"
    options = {"models": ["gsm"], "size": "pico", "batch_size": 1, "context": 24, "warm_up": 0, "steps": 2}
    options["output"] = str(output)
    training.run(device="cpu", **options)
    found = read(output)["rows"]["gsm pico, 1 x 24"]
    assert found["ms"]["laps"] == 2
    assert found["tokens_per_second"] == pytest.approx(24e3 / found["ms"]["median"])
    from gsm import build_model

    assert found["flops"] == cost(build_model("gsm", "pico")).training_flops(24).total()
    assert found["mfu"] is None and found["share_of_product"] > 0
    training.run(device="cpu", **options)
    assert "measured already" in capsys.readouterr().out
    assert "| gsm pico, 1 x 24 |" in output.with_suffix(".md").read_text()


def results(path, **facts):
    return Results(path, {**machine.facts(CPU), **facts})


def fill(path, wrong=lambda name: None, names="abc", **facts):
    """Return the rows that one command measures; `wrong` may raise."""
    measured, file = [], results(path, **facts)

    def measure(name):
        measured.append(name)
        wrong(name)
        return {"value": name}

    file.fill({name: ({}, partial(measure, name)) for name in names}, {"rounds": 1}, show=lambda path: path)
    return "".join(measured)


def test_a_row_is_measured_once_and_again_where_facts_have_changed(tmp_path):
    path = tmp_path / "a.json"
    assert fill(path) == "abc"
    assert fill(path) == "" and fill(path, commit="another") == "", "a commit that changes no source changes no row"
    assert fill(path, sources="another") == "abc"


def test_an_interruption_leaves_the_rows_before_it_and_the_same_command_goes_on(tmp_path):
    def interrupted(name):
        if name == "b":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fill(tmp_path / "a.json", interrupted)
    assert list(read(tmp_path / "a.json")["rows"]) == ["a"]
    assert fill(tmp_path / "a.json") == "bc"


def test_an_error_of_one_row_is_raised_behind_the_others_and_the_row_comes_last_the_next_time(tmp_path, capsys):
    def broken(name):
        if name == "b":
            raise RuntimeError("mat1 and mat2")

    with pytest.raises(RuntimeError, match="mat1"):
        fill(tmp_path / "a.json", broken)
    rows = read(tmp_path / "a.json")["rows"]
    assert list(rows) == ["a", "b", "c"] and rows["b"]["failed"] == "RuntimeError: mat1 and mat2"
    assert "RuntimeError: mat1" in capsys.readouterr().err
    assert fill(tmp_path / "a.json", names="abcd") == "db"
