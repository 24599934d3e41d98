"""`benchmark=inference`: what it says is what was measured, and what does not fit is said before it hurts."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from gsm.benchmarks import inference, room, texts, turns
from gsm.benchmarks.counters import Operations, counting
from gsm.benchmarks.requests import Decode, Protocol, Read, Served
from gsm.benchmarks.room import Room, watching
from gsm.benchmarks.texts import Text
from gsm.benchmarks.turns import Case, take_turns
from gsm.models.base import LanguageModel
from gsm.models.cost import cost
from gsm.runs.load import build_model
from gsm_kernels.benchmark import ceilings
from gsm_kernels.benchmark.results import read

CPU = torch.device("cpu")
ROOF = ceilings.Ceilings(1e12, 1e11, "float32")
PROTOCOL = Protocol("pico", 1, 32, steps=2, warm_up=0, runs=1, seconds=60.0, dtype="float32", text="random")
QUICK = {"device": "cpu", "size": "pico", "chunk": 32, "steps": 2, "warm_up": 0, "runs": 1, "seconds": 60.0}
QUICK["text"] = "random"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No ceilings are measured: that takes longer than all tests."""
    monkeypatch.setattr(ceilings, "measure", lambda device: ROOF)


@functools.cache
def model_of(name: str) -> LanguageModel:
    return build_model(name, "pico", seed=0)


def served(name: str = "gsm", protocol: Protocol = PROTOCOL) -> Served:
    return Served(model_of(name), protocol, texts.text("random", model_of(name).vocabulary), ROOF)


def test_a_request_is_measured_as_it_was_asked_for(tmp_path, capsys):
    output = tmp_path / "a.json"
    asked = {**QUICK, "models": ["gsm"], "lengths": [40], "synthetic_lengths": [64], "unpruned": ["gsm"]}
    inference.run(**asked, output=str(output))
    rows, model = read(output)["rows"], model_of("gsm")
    assert list(rows) == ["gsm pico, 40, read", "gsm pico, 40, unpruned", "gsm pico, 64, decode"]
    whole, unpruned, decode = rows.values()
    assert whole["prefill"]["tokens_per_second"] == pytest.approx(40e3 / whole["prefill"]["ms"]["median"])
    assert whole["decode"]["tokens_per_second"] == pytest.approx(1e3 / whole["decode"]["ms"]["median"])
    assert 0 < whole["prefill"]["processor_ms"]["median"]
    assert whole["prefill"]["flops"] == cost(model).prefill_flops(40, 32).total() < unpruned["prefill"]["flops"]
    moved = cost(model).decode_bytes(40, torch.float32).total()
    assert whole["decode"]["share_of_floor"] == pytest.approx(
        moved / ROOF.bytes / whole["decode"]["ms"]["median"] * 1e3
    )
    assert whole["cache"]["bytes"] == whole["cache"]["formula"] == model.start(1, capacity=43).nbytes()
    assert (whole["synthetic"], decode["synthetic"], "prefill" in decode) == (False, True, False)
    inference.run(**asked, output=str(output))
    assert capsys.readouterr().out.count("measured already") == 3
    assert "| gsm pico, 64, decode |" in output.with_suffix(".md").read_text()


def test_what_was_measured_in_another_way_is_measured_again(tmp_path, monkeypatch):
    seen = []

    def fake(cases, served):
        seen.append(steps)
        yield from ((case, row_of(case, replace(PROTOCOL, steps=steps))) for case in cases)

    monkeypatch.setattr(inference, "take_turns", fake)
    asked: dict[str, Any] = {**QUICK, "models": ["gsm"], "lengths": [40], "synthetic_lengths": []}
    for steps, force in ((2, False), (2, False), (3, False), (3, True)):
        inference.run(**{**asked, "steps": steps, "force": force, "output": str(tmp_path / "a.json")})
    assert seen == [2, 3, 3]


def row_of(case: Case, protocol: Protocol = PROTOCOL) -> dict[str, Any]:
    """A row of which nothing was measured."""
    return {**vars(case), "protocol": vars(protocol), "failed": "nothing was measured"}


@pytest.mark.parametrize("name", ["gsm", "baseline"])
def test_gsm_s_decoder_does_and_reads_the_same_at_every_length(name):
    model, found = served(name), []
    for tokens in (1024, 65536):
        request = Decode(model, tokens)
        _, whole, decoder = request.counted()
        assert decoder["operations"] < whole["operations"]
        found.append(decoder)
    short, long = found
    assert short["operations"] == long["operations"] > 0
    assert (long["bytes"] == short["bytes"]) == (name == "gsm") and long["bytes"] >= short["bytes"]


def test_operations_count_what_is_read_and_no_views():
    table, index = torch.zeros(100, 3), torch.tensor([[1], [2]])
    with Operations() as seen:
        _ = table.T[:, :50].T + 1
    assert (seen.count, seen.bytes) == (1, 50 * 3 * 4)
    with Operations() as seen:
        torch.gather(table, 0, index.expand(2, 3))
    assert (seen.count, seen.bytes) == (1, 2 * 3 * 4)


def test_only_what_happens_inside_a_module_is_counted():
    inside, outside = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 8, bias=False)
    with torch.no_grad(), counting(inside) as seen:
        outside(inside(torch.zeros(2, 4)))
        first = seen.count
        inside(torch.zeros(2, 4))
    assert 0 < first < seen.count == 2 * first


def test_a_text_goes_round_where_it_is_too_short():
    text = Text(torch.arange(5), "five")
    assert text.cut(2, 4).tolist() == [[0, 1, 2, 3], [4, 0, 1, 2]]


def test_room_knows_what_fits():
    some = Room(lambda tokens: 100 * tokens, chunk=10, batch=1, each=50.0)
    assert some.needed(20) == 2000 + 500 and some.needed(20, memories=2) == 4000 + 50
    most = some.fits(2500)
    assert some.needed(most) <= 2500 < some.needed(most + 1) and most == 20
    assert some.fits(100) == 0
    assert "would fit: 20 tokens at batch 1" in some.refusal(1000, 2500)


def test_room_learns_from_what_was_measured():
    some = Room(lambda tokens: 100 * tokens, chunk=10, batch=1, each=50.0)
    some.learn(None, 20)
    assert some.each == 50
    some.learn(2000 + 10 * 7, 20)
    assert some.each == 7
    some.learn(1000 + 10 * 9, 10)
    assert some.each == 9 and some.needed(20) == 2090


def test_the_peak_is_that_of_what_happens_inside():
    with watching(CPU) as peak:
        torch.ones(1 << 24).sum()
    if peak.extra is None:
        pytest.skip("this system does not say how much memory a process takes")
    assert peak.extra > 0.9 * (1 << 26)
    with watching(CPU) as after:
        pass
    assert after.extra is not None and after.extra < 1 << 24


def test_what_does_not_fit_is_refused_beforehand_and_says_what_would(monkeypatch):
    model = served()
    monkeypatch.setattr(turns, "available_bytes", lambda device: model.room.needed(100))
    begun = []
    monkeypatch.setattr(Read, "prepare", lambda self: begun.append(self))
    ((_, row),) = take_turns([Case("gsm", 4096, "read")], lambda name: model)
    assert not begun and row["failed"].startswith("out of memory: about ")
    assert row["failed"].endswith(f"would fit: {model.room.fits(model.room.needed(100)):,} tokens at batch 1")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), RuntimeError("you tried: can't allocate memory")])
def test_memory_that_runs_out_leaves_a_row_and_the_others(monkeypatch, error):
    lap, calls = Read.lap, itertools.count()

    def broken(self):
        if next(calls) == 0:
            raise error
        return lap(self)

    monkeypatch.setattr(Read, "lap", broken)
    model = served()
    rows = [row for _, row in take_turns([Case("gsm", 24, "read"), Case("gsm", 24, "read")], lambda name: model)]
    assert "would fit" in rows[0]["failed"] and "failed" not in rows[1]


def test_an_error_that_has_nothing_to_do_with_memory_is_not_hidden(monkeypatch):
    def broken(self):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(Read, "lap", broken)
    with pytest.raises(RuntimeError, match="mat1"):
        list(take_turns([Case("gsm", 24, "read")], lambda name: served()))


def test_runs_alternate_and_what_finds_no_room_comes_after(monkeypatch):
    order, held = [], []
    models = {name: served(protocol=replace(PROTOCOL, runs=2)) for name in "abc"}
    need = models["a"].room.needed(24)

    class Fake(Read):
        def prepare(self):
            held.append(need)

        def lap(self):
            order.append(next(name for name, model in models.items() if model is self.served))
            return {}

        def row(self):
            if held:
                held.clear()
            return {}

    monkeypatch.setitem(turns.KINDS, "read", Fake)
    monkeypatch.setattr(turns, "available_bytes", lambda device: 2 * need + 1 - sum(held))
    cases = [Case(name, 24, "read") for name in "abc"]
    assert [case.model for case, _ in take_turns(cases, models.__getitem__)] == ["a", "b", "c"]
    assert "".join(order) == "abba" + "cc"


def test_a_case_that_takes_too_long_is_timed_once(monkeypatch):
    runs = []
    monkeypatch.setattr(Read, "run", lambda self, timed: runs.append(timed) or (timed and self.times.update(x=[1.0])))
    monkeypatch.setattr(Read, "row", lambda self: {})
    model = served(protocol=replace(PROTOCOL, warm_up=2, runs=3, seconds=0.0))
    list(take_turns([Case("gsm", 24, "read")], lambda name: model))
    assert runs == [False, True]


def test_an_interruption_leaves_the_rows_before_it_and_their_table(tmp_path, monkeypatch):
    def broken(cases, served):
        if cases[0].tokens > 40:
            raise KeyboardInterrupt
        yield from ((case, row_of(case)) for case in cases)

    monkeypatch.setattr(inference, "take_turns", broken)
    output = tmp_path / "a.json"
    with pytest.raises(KeyboardInterrupt):
        inference.run(**QUICK, models=["gsm", "yoco"], lengths=[40, 41], synthetic_lengths=[], output=str(output))
    assert list(read(output)["rows"]) == ["gsm pico, 40, read", "yoco pico, 40, read"]
    assert "| yoco pico, 40, read |" in output.with_suffix(".md").read_text()


def test_time_that_is_over_leaves_the_rest_to_the_next_call(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(inference, "take_turns", lambda cases, _: ((case, row_of(case)) for case in cases))
    clock = itertools.count(0, 40)
    monkeypatch.setattr(inference.time, "monotonic", lambda: next(clock))
    asked = {**QUICK, "models": ["gsm"], "lengths": [40, 41, 42], "synthetic_lengths": []}
    path = inference.run(**asked, output=str(tmp_path / "a.json"), minutes=1)
    assert len(read(path)["rows"]) == 1
    assert "the same command goes on with gsm pico, 41, read" in capsys.readouterr().out


def test_cases_with_goals_come_first_and_decoding_before_reading():
    cases = inference.plan(["gsm", "yoco", "baseline"], [256, 4096, 65536], [4096, 65536], first=True)
    assert [(case.tokens, case.kind) for case in cases[:8:2]] == [
        (4096, "decode"), (65536, "decode"), (4096, "read"), (65536, "read"),
    ]  # fmt: skip
    assert [case.model for case in cases[:8]] == ["gsm", "baseline"] * 4
    assert len(cases) == len(set(cases)) == 3 * 5
    plain = inference.plan(["gsm"], [512, 256], [256], unpruned=["gsm"])
    assert [(case.tokens, case.kind) for case in plain] == [
        (256, "decode"), (256, "read"), (256, "unpruned"), (512, "read"), (512, "unpruned"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"runs": 0}, "runs 0: give 1 or more"),
        ({"lengths": [0]}, "a length: give 1 or more"),
        ({"dtype": "float31"}, "dtype is 'float31'; say float32, bfloat16"),
    ],
)
def test_a_value_out_of_range_is_one_sentence(options, said):
    with pytest.raises(ValueError, match=said):
        inference.run(**{**QUICK, **options})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_one_sentence():
    with pytest.raises(ValueError, match="device is 'cuda', but PyTorch sees no GPU here"):
        inference.run(device="cuda")


def test_available_memory_is_that_of_the_container(tmp_path, monkeypatch):
    assert room.available_bytes(CPU) > 1 << 20
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    monkeypatch.setattr(room, "CGROUP", tmp_path)
    assert room.available_bytes(CPU) == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert room.available_bytes(CPU) > 1 << 20
