"""The stage that answers first: what it says of a kernel is so, what it builds is what is launched, nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

import gsm_kernels
from gsm.paths import ROOT
from gsm_benchmarks import micro, smoke, timing
from gsm_benchmarks.__main__ import main
from gsm_kernels import launch
from gsm_kernels.dispatch import Impl, Op
from gsm_kernels.swiglu import reference

CPU = torch.device("cpu")
ROOF = timing.Ceilings(1e12, 1e11, "float32")
interpreted = pytest.mark.skipif(not launch.INTERPRETED, reason="kernels run on the GPU here")


@pytest.fixture
def nothing_built(monkeypatch):
    """Nothing is compiled: that takes longer than the other pieces."""
    monkeypatch.setattr(smoke, "built", lambda of, *_: {"of": of, **smoke.summary([]), "capability": 90, "workers": 1})


@interpreted
@pytest.mark.parametrize("one", micro.MICROS, ids=lambda one: one.name)
def test_micro_kernels_compute_what_they_say(one):
    for name, run in one.runs(CPU, micro.TOY).items():
        assert name in ("torch.topk", "plain") or not run.right()  # nothing has been computed yet
        run.launch()
        assert run.right(), name


@interpreted
def test_a_row_says_what_ran_how_long_and_how_far_it_is_from_the_oracle(tmp_path, nothing_built, capsys):
    arguments = {"device": "cpu", "only": "rms_norm, one", "output": str(tmp_path / "a.json")}
    path = smoke.run(**arguments)
    rows = json.loads(path.read_text())["rows"]
    row = rows["rms_norm, one token, forward"]
    assert row["verdict"] == "right" and row["implementation"] == "triton, interpreted at toy size"
    assert 0 < row["errors"]["out"][0] < row["limit"] and row["ms"]["median"] > 0 and row["seconds"] > 0
    assert list(rows) == ["build", "ceilings", "rms_norm, one token, forward"]  # what it needs goes before it
    text = path.with_suffix(".md").read_text()
    assert "| rms_norm, one token, forward | right |" in text and "0 pieces" not in capsys.readouterr().out
    smoke.run(**arguments)
    assert "0 pieces to do, 1 in all" in capsys.readouterr().out
    smoke.run(**arguments, force=True)
    assert "1 pieces to do, 1 in all" in capsys.readouterr().out


@interpreted
@pytest.mark.parametrize("name", [piece.gate.name for piece in smoke.pieces()])
def test_every_operation_can_be_rehearsed(name):
    piece = next(piece for piece in smoke.pieces() if piece.gate.name == name)
    assert set(piece.gate.work) == set(piece.toy.work) == set(piece.built.work)
    direction = list(piece.toy.work)[-1]
    row = smoke.operation(piece.toy, direction, CPU, ROOF)
    ran = "triton" if piece.gate.has_kernels else ("sdpa", "chunked", "reference")
    assert row["verdict"] == "right" and row["implementation"].startswith(ran), row


@interpreted
def test_fewer_rows_are_compared_where_the_oracle_is_slow(monkeypatch):
    monkeypatch.setattr(smoke, "EAGER_SECONDS", 0.0)
    toy = smoke.workloads.attend("", 1, 16, heads=2, channels=16, width=4, picks=2)
    row = smoke.operation(toy, "backward", CPU, ROOF, fewer=True)
    assert (row["verdict"], row["compared"]) == ("right", "the last 1/16 of the rows")
    assert "d bank_BFC" in row["errors"]


@interpreted
@pytest.mark.parametrize(
    ("spoil", "verdict"),
    [
        (lambda out: out * 1.01, "wrong: out"),
        (lambda out: out.index_fill(0, torch.tensor(0), torch.nan), "out has 64 NaN"),
    ],
)
def test_wrong_results_are_named(spoil, verdict, monkeypatch):
    def broken(gate: Tensor, up: Tensor, limit: float) -> Tensor:
        return spoil(reference.swiglu(gate, up, limit))

    monkeypatch.setattr(gsm_kernels, "swiglu", Op("swiglu", reference.swiglu, (Impl("triton", broken),)))
    row = smoke.operation(smoke.workloads.swiglu("", 4, 64), "forward", CPU, ROOF)
    assert verdict in row["verdict"] and row["verdict"].startswith("wrong")


@interpreted
def test_a_failed_piece_is_a_row_and_is_done_again(tmp_path, nothing_built, monkeypatch):
    works = gsm_kernels.swiglu

    def fails(gate: Tensor, up: Tensor, limit: float) -> Tensor:
        raise RuntimeError("no luck")

    monkeypatch.setattr(gsm_kernels, "swiglu", Op("swiglu", reference.swiglu, (Impl("triton", fails),)))
    arguments = {"device": "cpu", "only": "swiglu", "output": str(tmp_path / "a.json")}
    path = smoke.run(**arguments)
    content = json.loads(path.read_text())
    assert content["rows"]["swiglu 16K, forward"]["failed"] == "RuntimeError: no luck"
    assert content["tried"] == {"swiglu 16K, forward": 1, "swiglu 16K, backward": 1}
    monkeypatch.setattr(gsm_kernels, "swiglu", works)
    smoke.run(**arguments)
    content = json.loads(path.read_text())
    assert content["rows"]["swiglu 16K, forward"]["verdict"] == "right" and "tried" not in content


def test_without_a_gpu_it_says_so_in_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="error: device is 'cuda', but PyTorch sees no GPU here"):
        main(["smoke", "device=cuda", f"output={tmp_path}/a.json"])
    with pytest.raises(SystemExit, match="error: no piece begins with 'x'"):
        main(["smoke", "device=cpu", "only=x", f"output={tmp_path}/a.json"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_killed_goes_on_behind_what_was_finished(tmp_path):
    """Kernels are really compiled, in two processes; without the interpreter the reference runs."""
    path, last = tmp_path / "a.json", "swiglu 16K, backward"
    words = ["-m", "gsm_benchmarks", "smoke", "device=cpu", "only=s", "workers=2", "minutes=8", f"output={path}"]
    process = started(words, tmp_path, stdout=subprocess.DEVNULL)
    end = time.monotonic() + 240
    while last not in rows_of(path) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = rows_of(path)
    kernels = {(row["of"], row["kernel"]) for row in before["build"]["kernels"]}
    assert ("swiglu 16K", "forward") in kernels and ("score_slots 4 x 4K", "add_parts") in kernels
    assert all(row["registers"] > 0 and not row.get("failed") for row in before["build"]["kernels"])
    assert list(before)[:3] == ["build", "ceilings", "swiglu 16K, forward"] and last in before
    done = started(words, tmp_path, stdout=subprocess.PIPE)
    said, _ = done.communicate(timeout=240)
    after = rows_of(path)
    assert done.returncode == 0 and all(after[name] == row for name, row in before.items())
    assert {name for name in after if "right" in after[name].get("verdict", "")} == set(after) - {"build", "ceilings"}
    measured = {line.split(":")[0] for line in said.split("# a")[0].splitlines() if ": right (" in line}
    assert measured == set(after) - set(before) and "score_slots 4 x 4K, backward" in measured


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_micro_kernels_compile_for_hopper(tmp_path, monkeypatch):
    """ProductCost of 16 and 32 rows by one instruction, of 64 and 128 by the other. What takes too long is given up."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    names = [one.name for one in micro.MICROS if one.name != "choose alone"]
    row = smoke.built(names, 90, 2, 240.0)
    assert not row["unbuilt"] and not row.get("failed") and row["processor"] > 0
    matrix = sorted(kernel["matrix"] for kernel in row["kernels"] if kernel["kernel"] == "multiply")
    assert matrix == ["mma"] * 4 + ["wgmma"] * 4
    again = smoke.built(names, 90, 2, 240.0)
    assert all(kernel["found"] for kernel in again["kernels"]) and len(again["kernels"]) == len(row["kernels"])
    late = smoke.built(names, 90, 2, 0.0)
    assert late["failed"] == f"{len(row['kernels'])} kernels took too long"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_built_is_what_is_launched(tmp_path):
    """Few rows, which a CPU can hold, are specialised in the same way as those that are measured."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from gsm_benchmarks import smoke, workloads\n"
        "from gsm_benchmarks.build import requests\n"
        "torch.randn = lambda *size, generator=None, **how: torch.empty(*size, **how)\n"
        "for piece in filter(lambda piece: piece.gate.has_kernels, smoke.pieces()):\n"
        "    name, gate = piece.gate.name, piece.gate\n"
        "    if piece.gate.op == 'linear_cross_entropy':\n"
        "        gate = workloads.linear_cross_entropy('', 8192, width=16)  # the width is the BLAS's\n"
        "    if piece.gate.op == 'indexer_kl':\n"
        "        gate = smoke.last_rows(gate, 1024)\n"
        "    wanted, built = ({*requests(case.launch, 90)} for case in (gate, piece.built))\n"
        "    assert wanted and wanted <= built, (name, [one.kernel for one in wanted - built])\n"
        "print('the same')\n"
    )
    done = started([str(script)], tmp_path, stdout=subprocess.PIPE)
    said, _ = done.communicate(timeout=590)
    assert said.strip() == "the same"


def started(words: list[str], folder: Path, **how) -> subprocess.Popen[str]:
    """A process that compiles into a folder of its own, and does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": f"{ROOT}/kernels:{ROOT}/benchmarks"}
    return subprocess.Popen([sys.executable, *words], env=environment, cwd=folder, text=True, **how)


def rows_of(path: Path) -> dict:
    return json.loads(path.read_text())["rows"] if path.exists() else {}
