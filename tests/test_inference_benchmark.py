"""`benchmark=inference`: what it says is what was measured, and what does not fit is said before it hurts."""

from __future__ import annotations

import gc
import itertools
import shutil
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from gsm.config.load import build_model
from gsm.costs.model import cost
from gsm.files import write_json
from gsm.models.base import LanguageModel
from gsm.paths import ROOT
from gsm_benchmarks import inference, kernels, machine, timing
from gsm_benchmarks.inference import Case, Protocol, Request, Served, Text, prompts, take_turns
from gsm_benchmarks.results import read

CPU = torch.device("cpu")
ROOF = timing.Ceilings(1e12, 1e11, "float32")
PROTOCOL = Protocol("pico", 1, 32, steps=2, warm_up=0, runs=1, seconds=60.0, dtype="float32", text="random")
QUICK = {"device": "cpu", "size": "pico", "chunk": 32, "steps": 2, "warm_up": 0, "runs": 1, "seconds": 60.0}
QUICK["text"] = "random"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No ceilings are measured and no garbage is collected: that takes longer than all tests."""
    monkeypatch.setattr(gc, "collect", lambda: 0)
    monkeypatch.setattr(timing, "ceilings", lambda device: ROOF)


@cache
def model_of(name: str) -> LanguageModel:
    return build_model(name, "pico", seed=0)


def served(name: str = "gsm", protocol: Protocol = PROTOCOL) -> Served:
    return Served(model_of(name), protocol, prompts("random", model_of(name).vocabulary), ROOF)


def test_a_request_is_measured_as_it_was_asked_for(tmp_path, capsys):
    output = tmp_path / "a.json"
    asked = {**QUICK, "models": ["gsm"], "lengths": [40, 64]}
    inference.run(**asked, output=str(output))
    rows, model = read(output)["rows"], model_of("gsm")
    assert list(rows) == ["gsm pico, 40", "gsm pico, 64"]
    whole, longer = rows.values()
    assert whole["prefill"]["tokens_per_second"] == pytest.approx(40e3 / whole["prefill"]["ms"]["median"])
    assert whole["decode"]["tokens_per_second"] == pytest.approx(1e3 / whole["decode"]["ms"]["median"])
    assert 0 < whole["prefill"]["processor_ms"]["median"]
    assert whole["prefill"]["flops"] == cost(model).prefill_flops(40, 32).total()
    moved = cost(model).decode_bytes(40, torch.float32).total()
    assert whole["decode"]["share_of_floor"] == pytest.approx(
        moved / ROOF.bytes / whole["decode"]["ms"]["median"] * 1e3
    )
    prefill = cost(model).prefill_flops(40, 32).total(), cost(model).prefill_bytes(40, 32, torch.float32).total()
    assert whole["prefill"]["share_of_floor"] == pytest.approx(ROOF.floor(*prefill) / whole["prefill"]["ms"]["median"])
    assert whole["turn"] != longer["turn"] and len(whole["decode"]["ms"]["each"]) == 1
    assert whole["runs"] == {"warm_up": 0, "runs": 1}
    assert whole["cache"]["bytes"] == whole["cache"]["formula"] == model.start(1, capacity=42).nbytes()
    inference.run(**asked, output=str(output))
    assert capsys.readouterr().out.count("measured already") == 2
    assert "| gsm pico, 64 |" in output.with_suffix(".md").read_text()


def test_a_request_reads_the_prompt_and_every_given_token(monkeypatch):
    request = Request(served(), 40)
    logits, decode = [], request.engine.decode
    monkeypatch.setattr(request.engine, "decode", lambda token_B: logits.append(decode(token_B)))
    for _ in range(2):
        request.run(timed=True)
    assert request.engine.memory.used == 40 + PROTOCOL.steps and len(logits) == 2 * PROTOCOL.steps
    tokens_BT = torch.cat([request.prompt_BT, *(token_B[:, None] for token_B in request.given)], dim=1)
    torch.testing.assert_close(logits[-1], model_of("gsm")(tokens_BT).logits[:, -1], rtol=1e-4, atol=1e-4)


def test_a_text_goes_round_where_it_is_too_short():
    text = Text(torch.arange(5), "five")
    assert text.cut(2, 4).tolist() == [[0, 1, 2, 3], [4, 0, 1, 2]]


def test_what_does_not_fit_is_refused_beforehand_and_says_what_would(monkeypatch):
    model = served()
    monkeypatch.setattr(machine, "available_bytes", lambda device: model.needed(100))
    begun = []
    monkeypatch.setattr(Served, "engine", lambda self, tokens: begun.append(tokens))
    ((_, row),) = take_turns([Case("gsm", 4096)], lambda name: model)
    assert not begun and model.needed(int(row["failed"].split()[-4])) == model.needed(100)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), RuntimeError("you tried: can't allocate memory")])
def test_memory_that_runs_out_leaves_a_row_and_the_others(monkeypatch, error):
    lap, calls = Request.lap, itertools.count()

    def broken(self):
        if next(calls) == 0:
            raise error
        return lap(self)

    monkeypatch.setattr(Request, "lap", broken)
    model = served()
    rows = [row for _, row in take_turns([Case("gsm", 24), Case("gsm", 25)], lambda name: model)]
    assert rows[0]["failed"].endswith("; 23 tokens would fit") and "failed" not in rows[1], (
        "fewer than were tried in vain"
    )


def test_runs_alternate_and_what_finds_no_room_comes_after(monkeypatch):
    order, held = [], []
    models = {name: served(protocol=replace(PROTOCOL, runs=2)) for name in "abc"}
    need = models["a"].needed(24)

    class Fake(Request):
        def __init__(self, served, tokens):
            super().__init__(served, tokens)
            held.append(need)

        def lap(self):
            order.append(next(name for name, model in models.items() if model is self.served))
            return {}

        def row(self):
            if held:
                held.clear()
            return {}

    monkeypatch.setattr(inference, "Request", Fake)
    monkeypatch.setattr(machine, "available_bytes", lambda device: 2 * need + 1 - sum(held))
    cases = [Case(name, 24) for name in "abc"]
    assert [case.model for case, _ in take_turns(cases, models.__getitem__)] == ["a", "b", "c"]
    assert "".join(order) == "abba" + "cc"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"runs": 0}, "^runs .*got 0"),
        ({"lengths": [0]}, "^lengths .*got 0"),
        ({"dtype": "float31"}, "^dtype .*got float31"),
    ],
)
def test_a_value_out_of_range_is_one_sentence(options, said):
    with pytest.raises(ValueError, match=said):
        inference.run(**{**QUICK, **options})


def request(model: str, tokens: int, prefill: float, decode: float, **others: Any) -> dict[str, Any]:
    """A row: milliseconds of a prompt, and of a token."""
    parts = {"prefill": prefill, "decode": decode}
    times = {
        name: {
            "ms": timing.spread([ms])._asdict(), "processor_ms": None, "flops": 2 * ms, "bytes": 3 * ms,
            "tokens_per_second": 1e3 / ms, "share_of_product": 0.1, "share_of_floor": 0.2,
        }
        for name, ms in parts.items()
    }  # fmt: skip
    facts = {"device": "a CPU", "threads": 1, "versions": {"torch": "2"}, "sources": "s", "commit": "c"}
    about = {"model": model, "tokens": tokens, "kind": "read", "protocol": vars(PROTOCOL), "turn": "a"}
    ran = {"runs": {"warm_up": 0, "runs": 1}, "text": "t", "ceilings": ROOF._asdict(), "peak_gib": None}
    return {**facts, **about, **ran, **times, "cache": {"bytes": 1 << 20, "parts": {"decoder_bank": 3 << 10}}, **others}


def test_gsm_is_compared_with_the_others(tmp_path):
    rows = [
        request("gsm", 1024, 10, 2),
        request("baseline", 1024, 25, 3, turn="b"),
    ]
    text = inference.against(rows)
    assert "| baseline (not in turns) | 1K | 2.50 |  | 2.50 | 1.50 |  | 1.50 | 1.000 |" in text
    write_json(tmp_path / "a.json", {**rows[0], "command": "x", "rows": {str(n): row for n, row in enumerate(rows)}})
    inference.run(results=str(tmp_path / "a.json"))
    assert text in (tmp_path / "a.md").read_text()
    assert "| 1.000 | 3.0 | not known |" in (tmp_path / "a.md").read_text(), "of the memory, the decoder's part in KiB"
    pytest.importorskip("matplotlib")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("other", [{"protocol": vars(replace(PROTOCOL, steps=3))}, {"threads": 2}, {"sources": "t"}])
def test_rows_that_were_measured_in_another_way_are_not_compared(other):
    assert len(inference.groups([request("gsm", 64, 1, 1), request("baseline", 64, 1, 1, **other)])) == 2


COMMITTED = {name: inference.run for name in ("cpu-paper-inference", "cpu-crossing", "cpu-locality", "cpu-pruning")}
COMMITTED["cpu-kernels"] = kernels.run


@pytest.mark.parametrize("name", COMMITTED)
def test_committed_results_are_still_read(name, tmp_path, monkeypatch):
    shutil.copy(ROOT / "benchmarks/results" / f"{name}.json", tmp_path)
    monkeypatch.setattr(inference, "picture", lambda rows: b"")
    monkeypatch.setattr(kernels, "shares", lambda rows: b"")
    path = COMMITTED[name](results=str(tmp_path / f"{name}.json"))
    assert path.with_suffix(".md").read_text().count("\n| ") > 2
