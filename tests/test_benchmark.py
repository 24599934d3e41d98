"""The benchmarks: what they say is what was measured, and nothing is lost or measured twice."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

import gsm_kernels
from gsm.costs.model import cost
from gsm.paths import ROOT
from gsm_benchmarks import compiled, kernels, kernels_report, machine, peers, timing, training, workloads
from gsm_benchmarks.__main__ import main
from gsm_benchmarks.results import Results, read
from gsm_kernels import launch, using

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
    workloads.pool_groups("pool_groups tiny", 16, channels=8),
    workloads.linear_cross_entropy("linear_cross_entropy tiny", 8, width=16, vocabulary=32),
    workloads.score_slots("score_slots tiny", 1, 64),
    workloads.candidate_pool("candidate_pool tiny", 1, 64, blocks=2),
)
ROOF = timing.Ceilings(1e12, 1e11, "float32")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No ceilings are measured and nothing is compiled: that takes longer than all tests."""
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
        "peers": {"compile": {"ms": spread, "ratio": ratio}, "liger": {"absent": "liger_kernel is not installed"}},
        "ms": spread,
        "timed": "events",
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


class FakeGPU:
    """Launches take as long as a run says; some runs cannot be captured."""

    clock_khz = 2_000_000.0

    def __init__(self, capturable=True):
        self.capturable, self.asked = capturable, 0

    def host_ms(self, run):
        return run()

    def captured(self, run):
        self.asked += 1
        return (lambda: "replayed") if self.capturable else None


@pytest.mark.parametrize(
    ("host_ms", "capturable", "how", "pause_ms"),
    [
        (0.3, True, "events", 0.5),
        (0.4, True, "replay", 0.5),
        (7.0, False, "long pause", 10.0),
        (900.0, False, "long pause", timing.LONGEST),
    ],
)
def test_launches_that_take_longer_than_a_pause_are_replayed_or_get_a_longer_one(host_ms, capturable, how, pause_ms):
    gpu = FakeGPU(capturable)
    found = timing.prepare(lambda: host_ms, gpu)
    assert (found.how, found.host_ms) == (how, host_ms) and found.pause / gpu.clock_khz == pytest.approx(pause_ms)
    assert found.run() == ("replayed" if how == "replay" else host_ms) and gpu.asked == (how != "events")


class FakeGraph:
    def __init__(self):
        self.replayed, self.gone = 0, False

    def replay(self):
        self.replayed += 1

    def reset(self):
        self.gone = True


@contextlib.contextmanager
def a_gpu(monkeypatch, captures):
    """As much of `torch.cuda` as graphs need; yields what it was asked for."""
    said, mode = [], ["default"]

    def allowed(mode_now):
        mode[0] = mode_now
        said.append(mode_now)

    @contextlib.contextmanager
    def graph(graph, pool=None, stream=None):
        said.append("capture")
        yield
        if not captures:
            raise RuntimeError("operation not permitted when stream is capturing")

    class Stream:
        def __init__(self, device=None):
            pass

        def wait_stream(self, other):
            pass

    default = Stream()
    fakes = {
        "get_device_properties": lambda device: SimpleNamespace(clock_rate=1_980_000),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: said.append("empty"),
        "current_stream": lambda device: default,
        "default_stream": lambda device: default,
        "current_device": lambda: 0,
        "Stream": Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "CUDAGraph": FakeGraph,
        "graph_pool_handle": lambda: (0, 1),
        "graph": graph,
        "get_sync_debug_mode": lambda: mode[0],
        "set_sync_debug_mode": allowed,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda index, pool: said.append("ended"), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda index, pool: said.append("released"), raising=False)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: None)
    monkeypatch.setattr(torch, "rand", lambda *shape, device: said.append("drawn"))
    timing._stream.cache_clear()
    yield said
    timing._stream.cache_clear()


def test_a_graph_is_captured_after_a_run_that_may_not_wait_and_is_freed(monkeypatch):
    with a_gpu(monkeypatch, captures=True) as said:
        modes = []
        with timing.Graphs(torch.device("cuda")) as gpu:
            replay = gpu.captured(lambda: modes.append(torch.cuda.get_sync_debug_mode()))
            assert replay is not None
            replay()
            (graph,) = gpu.graphs
        assert isinstance(graph, FakeGraph)
        assert modes == ["error", "default"] and graph.replayed == 1 and graph.gone
        assert said == ["error", "default", "capture", "empty"] and gpu.clock_khz == 1_980_000


@pytest.mark.parametrize("waits", [True, False])
def test_what_cannot_be_captured_leaves_nothing_behind(monkeypatch, waits):
    def run():
        if waits and torch.cuda.get_sync_debug_mode() == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    with a_gpu(monkeypatch, captures=False) as said, timing.Graphs(torch.device("cuda")) as gpu:
        assert gpu.captured(run) is None and not gpu.graphs
        assert torch.cuda.get_sync_debug_mode() == "default"
        mended = ["ended", "released", "capture", "drawn"]
        assert said == ["error", "default", *([] if waits else ["capture"]), *mended]


def test_a_process_whose_random_numbers_a_failed_capture_has_spoilt_ends(monkeypatch):
    """All rows after it would fail, one by one; another process goes on with them."""

    def spoilt(*shape, device):
        raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")

    with a_gpu(monkeypatch, captures=False), timing.Graphs(torch.device("cuda")) as gpu:
        monkeypatch.setattr(torch, "rand", spoilt)
        with pytest.raises(machine.Lost, match="a capture that failed .* has spoilt this process"):
            gpu.captured(lambda: None)


def test_only_ours_becomes_a_graph():
    """A capture that fails, as other people's code may make it, can spoil what comes after it."""
    gpu = FakeGPU()
    assert timing.prepare(lambda: 7.0, gpu, may_replay=False).how == "long pause" and gpu.asked == 0


def test_launches_are_measured_three_times_or_less_where_they_are_slow(monkeypatch):
    with a_gpu(monkeypatch, captures=True), timing.Graphs(torch.device("cuda")) as gpu:
        clock = itertools.chain([0.0, 0.002, 0.1, 0.101, 0.2, 0.204, 1.0, 1.9])
        monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
        calls = []
        assert gpu.host_ms(lambda: calls.append(0)) == pytest.approx(1.0) and len(calls) == 3
        assert gpu.host_ms(lambda: calls.append(0)) == pytest.approx(900.0) and len(calls) == 4


def test_on_a_cpu_the_clock_is_read_and_nothing_is_launched():
    found = timing.kernel_turns({"a": lambda: None}, CPU, rounds=3)["a"]
    assert (found.spread.laps, found.how, found.host_ms) == (3, "clock", None)


def test_the_floor_is_the_slower_of_products_and_bytes():
    assert ROOF.floor(1e12, 1e9) == 1000 and ROOF.floor(1e9, 1e11) == 1000


def test_ceilings_are_rates(monkeypatch):
    monkeypatch.undo()
    found = timing.ceilings(CPU, size=64, copied=1 << 16)
    assert found.flops > 1e6 and found.bytes > 1e6 and found.dtype == "float32"


@pytest.mark.parametrize(
    ("length", "most", "ratio"), [(1, 4, 2), (7, 2, 3), (9, 2, 3), (50, 4, 2), (5, 100, 2), (9, 3, 1)]
)
def test_entries_are_counted_as_rows_see_them(length, most, ratio):
    assert workloads.seen_entries(length, most, ratio) == sum(min(t // ratio, most) for t in range(1, length + 1))


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
    assert norm["forward"].at(torch.float32).bytes == 8 * 80


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_every_case_is_measured_on_a_cpu(case):
    chosen, _ = getattr(gsm_kernels, case.op).explain()
    for direction in case.work:
        found = kernels.measure(case, direction, CPU, ROOF, rounds=1, seconds=0)
        assert found["ms"]["laps"] == 1 and found["implementation"] == chosen, found.get("failed")
        assert (found["timed"], found["host_ms"]) == ("clock", None)
        assert all(peer["ratio"] > 0 for peer in found["peers"].values())
        work = case.work[direction]
        assert found["share_of_floor"] == pytest.approx(ROOF.floor(work.flops, 2 * work.bytes) / found["ms"]["median"])


@pytest.mark.parametrize("case", TINY[:2], ids=lambda case: case.name)
@pytest.mark.parametrize("maker", ["dense_mask", "sdpa_dense", "sdpa_gathered"])
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
    found = kernels.measure(TINY[1], "forward", CPU, ROOF, rounds=1)["peers"]
    assert found["wrong"]["absent"].startswith("its result differs by")
    assert found["gone"] == {"absent": "it is not installed"}
    assert found["broken"] == {"absent": "RuntimeError: no such instruction"}


def test_slots_are_compared_as_sets():
    assert workloads._other_slots(torch.tensor([[1, 2, 3, -1]]), torch.tensor([[1, 2, 3, -1]])) == 0
    assert workloads._other_slots(torch.tensor([[1, 2, 4, -1]]), torch.tensor([[0, 1, 2, -1]])) == 0.25


def test_every_goal_is_that_of_a_row_and_a_peer_that_there_are():
    cases = {case.name: case for case in (*workloads.gates(), *workloads.on_a_cpu())}
    always = {"floor", "memory", "best peer", "eager", "compile", "dense mask"}
    for name, goals in kernels_report.GOALS.items():
        case, direction = name.rsplit(", ", 1)
        assert direction in cases[case].work, name
        known = always | {*peers._OTHERS.get(cases[case].op, {})}
        assert {goal.peer for goal in goals} <= known, name


def test_a_verdict_names_goal_and_measurement():
    assert kernels_report.verdicts(row(share=0.85)) == [
        "must 1 x compile: 2.00 x, met",
        "aim 1.2 x liger: not measured",
        "aim 90% of the floor: 85%, missed",
    ]
    memory = kernels_report.verdicts(row("index_top_k 256K", extra=70.0))[0]
    assert memory == "must at most 64 MiB more: 70 MiB, missed"
    best = kernels_report.verdicts(row("attend 4 x 4K", ratio=0.5))[0]
    assert best == "must 1 x best peer: 0.50 x, missed"


def test_what_is_in_the_file_is_not_measured_again(tmp_path, monkeypatch):
    measured = fake_measure(monkeypatch)
    options = {"cases": TINY[2:4], "output": str(tmp_path / "a.json")}
    kernels.run(**options)
    kernels.run(**options)
    assert measured == [("index_top_k", None), ("indexer_kl", None), ("index_top_k", ()), ("indexer_kl", ())]
    kernels.run(**options, force=True, only="indexer")
    assert measured[4:] == [("indexer_kl", ())]
    monkeypatch.setattr(machine, "commit", lambda: "another")
    kernels.run(**options)
    assert len(measured) == 5
    monkeypatch.setattr(machine, "fingerprint", lambda files: "another")
    kernels.run(**options, peers=False)
    assert measured[5:] == [("index_top_k", None), ("indexer_kl", None)]


def fake_measure(monkeypatch, wrong=lambda op, without: None):
    """Nothing is measured; returns what would be: the operation, and the peers that are left out (None: all). What
    `wrong` raises or returns, if anything, is what comes of a row."""
    measured = []

    def measure(case, direction, device, roof, without, *_):
        measured.append((case.op, without))
        return wrong(case.op, without) or row(case.name, direction)

    monkeypatch.setattr(kernels, "measure", measure)
    return measured


def test_all_rows_are_measured_alone_before_any_with_its_peers(tmp_path, monkeypatch, capsys):
    def killed(op, without):
        if without is not None:
            assert all(found["alone"] and not found["peers"] for found in read(path)["rows"].values())
            assert len(read(path)["rows"]) == 2
            raise KeyboardInterrupt

    path = tmp_path / "a.json"
    fake_measure(monkeypatch, killed)
    options = {"cases": TINY[2:4], "output": str(path)}
    with pytest.raises(KeyboardInterrupt):
        kernels.run(**options)
    assert "| measured alone so far |" in path.with_suffix(".md").read_text()
    measured = fake_measure(monkeypatch)
    kernels.run(**options, peers=False)
    assert measured == []
    kernels.run(**options)
    assert measured == [("index_top_k", ()), ("indexer_kl", ())]
    assert all(found["peers"] and not found.get("alone") for found in read(path)["rows"].values())
    assert "of 2 rows, 0 to measure alone, 2 with their peers" in capsys.readouterr().out


def test_what_goes_wrong_with_the_peers_leaves_what_was_measured_alone(tmp_path, monkeypatch):
    def broken(op, without):
        if op == "index_top_k" and without is not None:
            raise ZeroDivisionError("division by zero")

    path = tmp_path / "a.json"
    measured = fake_measure(monkeypatch, broken)
    options = {"cases": TINY[2:4], "output": str(path)}
    with pytest.raises(ZeroDivisionError):
        kernels.run(**options)
    found = read(path)["rows"]["index_top_k tiny, forward"]
    assert found["ms"] and found["unfinished"] == "ZeroDivisionError: division by zero" and "failed" not in found
    assert "measured alone, since with its peers: ZeroDivisionError" in path.with_suffix(".md").read_text()
    kernels.run(**options)
    assert measured[4:] == [("index_top_k", None)]
    assert read(path)["rows"]["index_top_k tiny, forward"]["unfinished"].startswith("ZeroDivisionError")
    kernels.run(**options)
    assert len(measured) == 5


def test_an_interruption_leaves_the_rows_before_it(tmp_path, monkeypatch):
    def measure(op, without):
        if interrupted and op == "indexer_kl":
            raise KeyboardInterrupt

    fake_measure(monkeypatch, measure)
    path, interrupted = tmp_path / "a.json", True
    with pytest.raises(KeyboardInterrupt):
        kernels.run(cases=TINY[2:5], output=str(path))
    assert list(read(path)["rows"]) == ["index_top_k tiny, forward"]
    interrupted = False
    kernels.run(cases=TINY[2:4], output=str(path))
    assert list(read(path)["rows"]) == ["index_top_k tiny, forward", "indexer_kl tiny, both"]


def test_a_row_that_ended_its_process_is_tried_again_behind_the_others_and_without_peers(tmp_path, monkeypatch):
    def ends_twice(op, without):
        if len(measured) in (1, 4):
            raise SystemExit  # as good as a process that was killed: nobody gets to say anything

    measured = fake_measure(monkeypatch, ends_twice)
    options = {"cases": TINY[2:4], "output": str(tmp_path / "a.json")}
    with pytest.raises(SystemExit):
        kernels.run(**options)
    assert read(tmp_path / "a.json")["tried"] == {"index_top_k tiny, forward": 1}
    with pytest.raises(SystemExit):
        kernels.run(**options)
    assert measured[1:] == [("indexer_kl", None), ("index_top_k", None), ("index_top_k", ())]
    assert read(tmp_path / "a.json")["tried"] == {"index_top_k tiny, forward": 1}
    kernels.run(**options)
    assert measured[4:] == [("indexer_kl", ()), ("index_top_k", None)]
    assert "tried" not in read(tmp_path / "a.json")


def test_what_goes_wrong_in_a_row_leaves_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "take_turns", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        kernels.run(cases=TINY[2:4], output=str(tmp_path / "a.json"))
    failed = [found["failed"] for found in read(tmp_path / "a.json")["rows"].values()]
    assert failed == ["ZeroDivisionError: division by zero"] * 2
    assert "failed: ZeroDivisionError" in (tmp_path / "a.md").read_text()


def lose_the_gpu(monkeypatch):
    """What PyTorch says to everything once a kernel has run astray."""

    def synchronize():
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nand advice")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)


def test_a_gpu_that_is_lost_ends_the_process_and_the_row_says_who_did_it(tmp_path, monkeypatch):
    def astray(call):
        lose_the_gpu(monkeypatch)
        return gsm_kernels.index_top_k

    monkeypatch.setattr(peers, "peers_of", lambda op, call: {"astray": astray})
    said = "after astray the GPU reports 'CUDA error: an illegal memory access was encountered'"
    with pytest.raises(machine.Lost, match="after index_top_k tiny, forward the GPU reports"):
        kernels.run(cases=TINY[2:4], output=str(tmp_path / "a.json"))
    content = read(tmp_path / "a.json")
    assert [said in found.get("unfinished", "") for found in content["rows"].values()] == [True, False]
    assert all(found["ms"] for found in content["rows"].values())


def results(path, **facts):
    return Results(path, {**machine.facts(CPU), **facts})


def test_an_interruption_counts_only_against_what_a_process_began_with(tmp_path):
    def interrupted(*names):
        file = results(tmp_path / "a.json")
        for name in names[:-1]:
            with file.trying(name):
                file.add(name, {})
        with pytest.raises(KeyboardInterrupt), file.trying(names[-1]):
            raise KeyboardInterrupt
        return file.times(names[-1])

    assert (interrupted("a", "b"), interrupted("b"), interrupted("b")) == (0, 1, 2)
    assert results(tmp_path / "a.json").times("b") == 2
    assert results(tmp_path / "a.json", sources="other").times("b") == 0


def test_an_error_of_one_row_is_raised_when_the_others_are_measured(tmp_path, capsys):
    def measure(name):
        seen.append(name)
        if name == "b":
            raise RuntimeError("mat1 and mat2")
        return {}

    seen, file = [], results(tmp_path / "a.json")
    rows = {name: lambda name=name: measure(name) for name in "abc"}
    how = {"force": False, "show": lambda path: None}
    with pytest.raises(RuntimeError, match="mat1"):
        file.fill(rows, {}, **how)
    assert list(file.rows) == ["a", "c"] and "RuntimeError: mat1" in capsys.readouterr().err
    rows["d"] = lambda: measure("d")
    with pytest.raises(RuntimeError, match="mat1"):
        results(tmp_path / "a.json").fill(rows, {}, **how)
    assert "".join(seen) == "abc" + "db"


def test_time_that_is_over_leaves_the_rest_to_the_next_call(tmp_path, monkeypatch, capsys):
    fake_measure(monkeypatch)
    clock = itertools.count(0, 40)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    path = kernels.run(cases=TINY[4:7], output=str(tmp_path / "a.json"), minutes=1)
    assert len(read(path)["rows"]) == 1
    assert "1 minutes are over, 5 left: the same command goes on" in capsys.readouterr().out


def test_the_table_and_the_picture_are_made_from_the_file_alone(tmp_path):
    facts = {**machine.facts(CPU), "device": "a GPU", "commit": "c0ffee"}
    file = Results(tmp_path / "a.json", facts)
    file.add("one", row() | {"clocks": {"sm_mhz": 1980.0, "power_w": 650.0}})
    file.add("two", {**row(direction="backward"), "ms": None, "failed": "out of memory"})
    text = kernels.run(results=str(tmp_path / "a.json")).with_suffix(".md").read_text()
    assert "a GPU, " in text and "commit c0ffee" in text and "SM clocks 1980 to 1980 MHz" in text
    measured = "1 (1 to 1) | events, launched in 0.1 ms | 50% of 1 ms | 1 TFLOP/s, 1 TB/s"
    assert f"| rms_norm 16K | forward | triton | {measured} | compile 2.00 x |" in text
    assert "| failed: out of memory |" in text and "* liger: liger_kernel is not installed" in text
    pytest.importorskip("matplotlib")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_that_is_none_of_results_is_named(tmp_path):
    (tmp_path / "a.json").write_text("[]")
    for path, said in (("a.json", "holds no rows"), ("b.json", "cannot be read")):
        with pytest.raises(ValueError, match=f"{path} .*{said}"):
            kernels.run(results=str(tmp_path / path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("start", [kernels.run, training.run])
def test_a_gpu_that_is_not_there_is_one_sentence(start):
    with pytest.raises(ValueError, match="device is 'cuda', but PyTorch sees no GPU here"):
        start(device="cuda")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["kernels", "device=gpu"], "device is 'gpu'; say cpu, cuda or auto"),
        (["kernels", "onyl=attend"], "cannot read 'onyl=attend'; there are device=, output="),
        (["kernels", "rounds=x"], "rounds is 'x', but takes int"),
        (["kernels", "device=cpu", "only=nothing"], "no case begins with 'nothing'; there are attend 4K"),
    ],
)
def test_the_command_line_says_what_is_wrong(words, said):
    with pytest.raises(SystemExit, match=f"error: {said}"):
        main(words)


def test_training_is_measured_in_whole_steps(tmp_path, capsys):
    output = tmp_path / "a.json"
    options = {"models": ["gsm"], "batch_size": 1, "context": 24, "warm_up": 0, "steps": 2, "output": str(output)}
    training.run(device="cpu", **options)
    found = read(output)["rows"]["gsm nano, 1 x 24"]
    assert found["ms"]["laps"] == 2
    assert found["tokens_per_second"] == pytest.approx(24e3 / found["ms"]["median"])
    from gsm import build_model

    assert found["flops"] == cost(build_model("gsm", "nano")).training_flops(24).total()
    assert found["mfu"] is None and found["share_of_product"] > 0
    training.run(device="cpu", **options)
    assert "measured already" in capsys.readouterr().out
    assert "| gsm nano, 1 x 24 |" in output.with_suffix(".md").read_text()


def test_where_nothing_is_launched_no_gpu_is_asked_for():
    seen = []
    gate = torch.randn(8, 16, requires_grad=True)
    with using("triton"), launch.launching(lambda kernel, *_: seen.append(kernel.__name__)):
        gsm_kernels.swiglu(gate, torch.randn(8, 16), 1.0).sum().backward()
    assert seen == ["forward", "backward"]


@pytest.mark.skipif(not launch.INTERPRETED, reason="kernels are compiled here")
def test_the_interpreter_compiles_nothing_and_says_so():
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1 is set"):
        compiled.run()


def test_every_operation_has_a_call_to_compile():
    triton = {op.name for op in gsm_kernels.OPS if any(impl.name == "triton" for impl in op.fast)}
    assert triton <= {case.op for case in compiled.samples()}


@pytest.mark.slow
def test_kernels_are_compiled_for_hopper_without_a_gpu(tmp_path):
    pytest.importorskip("triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": f"{ROOT}/kernels:{ROOT}/benchmarks", "TRITON_CACHE_DIR": str(tmp_path)}
    words = ["-m", "gsm_benchmarks", "compiled", "only=swiglu", f"output={tmp_path}/a.json"]
    subprocess.run([sys.executable, *words], env=environment, check=True, capture_output=True, cwd=tmp_path)
    rows = list(json.loads((tmp_path / "a.json").read_text())["rows"].values())
    named = [(found["case"], found["kernel"]) for found in rows]
    assert named == [(dtype, name) for dtype in ("", "float16", "float32") for name in ("forward", "backward")]
    for found in rows:
        assert found["seconds"] > 0 and "failed" not in found
        assert 16 <= found["registers"] <= 128 and found["stack"] == 0 and found["wgmma"] == 0
        assert found["loads"] == found["wide_loads"] > 0 and found["constants"] == {"BLOCK": 2048}
    assert "| swiglu | forward | 4 |" in (tmp_path / "a.md").read_text()
