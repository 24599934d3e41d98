"""`benchmark=inference`: what it says is what was measured, and what does not fit is said before it hurts."""

from __future__ import annotations

import itertools
import time
import weakref
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from gsm.cache.memory import Memory
from gsm.config.load import build_model
from gsm.costs.model import cost
from gsm.models.base import LanguageModel
from gsm_benchmarks import entries, inference, inference_report, timing
from gsm_benchmarks.inference import Case, Decode, Protocol, Read, Served, Text, Unpruned, prompts, take_turns
from gsm_benchmarks.results import read

CPU = torch.device("cpu")
ROOF = timing.Ceilings(1e12, 1e11, "float32")
PROTOCOL = Protocol("pico", 1, 32, steps=2, warm_up=0, runs=1, seconds=60.0, dtype="float32", text="random")
QUICK = {"device": "cpu", "size": "pico", "chunk": 32, "steps": 2, "warm_up": 0, "runs": 1, "seconds": 60.0}
QUICK["text"] = "random"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No ceilings are measured: that takes longer than all tests."""
    monkeypatch.setattr(timing, "ceilings", lambda device: ROOF)


@cache
def model_of(name: str) -> LanguageModel:
    return build_model(name, "pico", seed=0)


def served(name: str = "gsm", protocol: Protocol = PROTOCOL) -> Served:
    return Served(model_of(name), protocol, prompts("random", model_of(name).vocabulary), ROOF)


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
    prefill = cost(model).prefill_flops(40, 32).total(), cost(model).prefill_bytes(40, 32, torch.float32).total()
    assert whole["prefill"]["share_of_floor"] == pytest.approx(ROOF.floor(*prefill) / whole["prefill"]["ms"]["median"])
    assert whole["turn"] == unpruned["turn"] != decode["turn"] and len(whole["decode"]["ms"]["each"]) == 1
    assert whole["runs"] == {"warm_up": 0, "runs": 1}
    assert whole["cache"]["bytes"] == whole["cache"]["formula"] == model.start(1, capacity=43).nbytes()
    assert (whole["synthetic"], decode["synthetic"], "prefill" in decode) == (False, True, False)
    inference.run(**asked, output=str(output))
    assert capsys.readouterr().out.count("measured already") == 3
    assert "| gsm pico, 64, decode |" in output.with_suffix(".md").read_text()


def test_a_request_reads_the_prompt_and_every_given_token(monkeypatch):
    request = Read(served(), 40)
    logits, decode = [], request.engine.decode
    monkeypatch.setattr(request.engine, "decode", lambda token_B: logits.append(decode(token_B)))
    for _ in range(2):
        request.run(timed=True)
    assert request.engine.memory.used == 40 + PROTOCOL.steps and len(logits) == 2 * PROTOCOL.steps
    tokens_BT = torch.cat([request.prompt_BT, *(token_B[:, None] for token_B in request.given)], dim=1)
    torch.testing.assert_close(logits[-1], model_of("gsm")(tokens_BT).logits[:, -1], rtol=1e-4, atol=1e-4)


def test_an_unpruned_prompt_is_read_again_from_the_same_memory_no_further_than_it_reaches(monkeypatch):
    request, model = Unpruned(served(), 40), model_of("gsm")
    made, read_to, start, narrow = [], [], model.start, Memory.narrow
    monkeypatch.setattr(model, "start", lambda *args, **given: made.append(given) or start(*args, **given))
    monkeypatch.setattr(Memory, "narrow", lambda self, tokens: read_to.append(tokens) or narrow(self, tokens))
    for _ in range(2):
        request.run(timed=True)
    assert made == [{"capacity": 1}] * 2 and read_to == [32, 40] * 2 and request.memory.used == 40


def test_what_was_measured_in_another_way_is_measured_again(tmp_path, monkeypatch):
    seen = []

    def fake(cases, served):
        seen.append((steps, threads))
        yield from ((case, unmeasured(case)) for case in cases)

    monkeypatch.setattr(inference, "take_turns", fake)
    monkeypatch.setattr(inference_report, "show", lambda path: path)
    asked: dict[str, Any] = {**QUICK, "models": ["gsm"], "lengths": [40], "synthetic_lengths": []}
    for steps, force, threads in ((2, False, 1), (2, False, 1), (3, False, 1), (3, True, 1), (3, False, 2)):
        monkeypatch.setattr(torch, "get_num_threads", partial(int, threads))
        inference.run(**{**asked, "steps": steps, "force": force, "output": str(tmp_path / "a.json")})
    assert seen == [(2, 1), (3, 1), (3, 1), (3, 2)]


def test_what_failed_is_measured_again(tmp_path, monkeypatch):
    seen = []
    fails = {"failed": "out of memory"}
    monkeypatch.setattr(
        inference,
        "take_turns",
        lambda cases, _: ((case, seen.append(case) or {**vars(case), **fails}) for case in cases),
    )
    for _ in range(2):
        inference.run(**QUICK, models=["gsm"], lengths=[40], synthetic_lengths=[], output=str(tmp_path / "a.json"))
    assert len(seen) == 2


def unmeasured(case: Case) -> dict[str, Any]:
    """A row of which nothing was measured."""
    return {**vars(case), "failed": None}


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


def test_a_text_goes_round_where_it_is_too_short():
    text = Text(torch.arange(5), "five")
    assert text.cut(2, 4).tolist() == [[0, 1, 2, 3], [4, 0, 1, 2]]


def test_what_does_not_fit_is_refused_beforehand_and_says_what_would(monkeypatch):
    model = served()
    monkeypatch.setattr(inference, "available_bytes", lambda device: model.room.needed(100))
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
    most = rows[0]["failed"].split("would fit: ")[1].split()[0]
    assert int(most.replace(",", "")) < 24 and "failed" not in rows[1]


def test_what_ran_out_is_free_again_before_it_is_said_what_would_fit(monkeypatch):
    requests, held = [], []

    def broken(self):
        requests.append(weakref.ref(self))
        raise torch.OutOfMemoryError("CUDA")

    def available(device):
        held.append([request() is not None for request in requests])
        return 1 << 40

    monkeypatch.setattr(Read, "lap", broken)
    monkeypatch.setattr(inference, "available_bytes", available)
    list(take_turns([Case("gsm", 24, "read")], lambda name: served()))
    assert held == [[], [False]]


def test_weights_that_find_no_room_leave_a_row_and_the_others():
    def made(name: str) -> Served:
        if name == "large":
            raise torch.OutOfMemoryError("CUDA")
        return served()

    rows = [row for _, row in take_turns([Case("large", 24, "read"), Case("gsm", 24, "read")], made)]
    assert rows[0]["failed"].startswith("out of memory: the weights do not fit") and "failed" not in rows[1]


def test_weights_are_made_in_the_type_that_was_asked_for(monkeypatch):
    asked = []

    def build(name, size, overrides, seed):
        asked.append(torch.get_default_dtype())
        return build_model(name, size, overrides, seed)

    monkeypatch.setattr(entries, "build_model", build)
    model = inference._served([entries.Model("gsm")], replace(PROTOCOL, dtype="bfloat16"), CPU)("gsm").model
    assert asked == [torch.bfloat16] and {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32


def test_an_error_that_has_nothing_to_do_with_memory_is_raised_when_the_others_are_measured(monkeypatch):
    def broken(self):
        if self.tokens == 24:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
        return lap(self)

    lap, rows = Read.lap, []
    monkeypatch.setattr(Read, "lap", broken)
    with pytest.raises(RuntimeError, match="mat1"):
        rows += (row for _, row in take_turns([Case("gsm", n, "read") for n in (24, 25)], lambda name: served()))
    assert rows[0]["failed"].startswith("RuntimeError: mat1 and mat2") and "failed" not in rows[1]


def test_a_model_that_cannot_be_made_leaves_a_row_and_the_others():
    def made(name):
        if name == "baseline":
            raise ValueError("size is odd")
        return served()

    rows = {}
    with pytest.raises(ValueError, match="size is odd"):
        for case, row in take_turns([Case(name, 24, "read") for name in ("baseline", "gsm")], made):
            rows[case.model] = row
    assert "could not be made" in rows["baseline"]["failed"] and "failed" not in rows["gsm"]


def test_what_has_not_ended_is_measured_by_itself_behind_the_others():
    cases = [Case(name, tokens, "read") for tokens in (24, 25) for name in "abc"]
    times = {cases[0]: 2, cases[4]: 1}
    groups = inference._groups(cases, lambda case: times.get(case, 0))
    assert groups == [cases[1:3], [cases[3], cases[5]], [cases[0]], [cases[4]]]


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

    monkeypatch.setitem(inference.KINDS, "read", Fake)
    monkeypatch.setattr(inference, "available_bytes", lambda device: 2 * need + 1 - sum(held))
    cases = [Case(name, 24, "read") for name in "abc"]
    assert [case.model for case, _ in take_turns(cases, models.__getitem__)] == ["a", "b", "c"]
    assert "".join(order) == "abba" + "cc"


def test_what_is_done_is_free_before_the_next_turn_begins(monkeypatch):
    requests, held = [], []

    def noted(self):
        held.append([request() is not None for request in requests])
        requests.append(weakref.ref(self))
        return prepare(self)

    prepare, model = Read.prepare, served()
    monkeypatch.setattr(Read, "prepare", noted)
    monkeypatch.setattr(inference.Entrant, "fits", lambda self: not any(request() for request in requests))
    list(take_turns([Case("gsm", 24, "read"), Case("gsm", 24, "read")], lambda name: model))
    assert held == [[], [False]]


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
        yield from ((case, {**unmeasured(case), "failed": "out of memory"}) for case in cases)

    monkeypatch.setattr(inference, "take_turns", broken)
    output = tmp_path / "a.json"
    with pytest.raises(KeyboardInterrupt):
        inference.run(**QUICK, models=["gsm", "yoco"], lengths=[40, 41], synthetic_lengths=[], output=str(output))
    assert list(read(output)["rows"]) == ["gsm pico, 40, read", "yoco pico, 40, read"]
    assert "| yoco pico, 40, read |" in output.with_suffix(".md").read_text()


def test_time_that_is_over_leaves_the_rest_to_the_next_call(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(inference, "take_turns", lambda cases, _: ((case, unmeasured(case)) for case in cases))
    monkeypatch.setattr(inference_report, "show", lambda path: path)
    clock = itertools.count(0, 40)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    asked = {**QUICK, "models": ["gsm"], "lengths": [40, 41, 42], "synthetic_lengths": []}
    path = inference.run(**asked, output=str(tmp_path / "a.json"), minutes=1)
    assert len(read(path)["rows"]) == 1
    assert "1 minutes are over, 2 left: the same command goes on" in capsys.readouterr().out


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
