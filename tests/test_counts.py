"""What is counted of a call, and the times that are predicted from it."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

import gsm_kernels
from gsm.paths import ROOT
from gsm_benchmarks import counts, workloads
from gsm_benchmarks.counting import Counts, _Torch, count
from gsm_benchmarks.counts import ASSUMED, prediction, rates_of, residents, times
from gsm_benchmarks.results import Results
from gsm_benchmarks.smoke import Piece, pieces
from gsm_benchmarks.timing import Ceilings
from gsm_kernels.launch import INTERPRETED

interpreted = pytest.mark.skipif(not INTERPRETED, reason="counting needs Triton's interpreter")


def piece(case: workloads.Case) -> Piece:
    return Piece(case, case, case)


def kernel(**others: Any) -> dict[str, Any]:
    """Two programs on every multiprocessor, and a tenth of a second of everything."""
    own = {"module": "a", "kernel": "forward", "constants": {}, "launches": 1, "programs": 264, "products": {}}
    own |= {"loaded": 0.0, "stored": 0.0, "memory": 0.0, "numbers": 0.0, "steps": 0.0}
    return {**own, "registers": 128, "shared": 1000, "warps": 8, "matrix": "wgmma", **others}


@interpreted
def test_an_elementwise_kernel_is_counted_to_the_byte():
    """Of 5,000 rows 32 programs run, and stand for all: two inputs are read and one output written, once."""
    found = count(piece(workloads.swiglu("", 5000, width=1024)), "forward")
    (one,) = found.kernels.values()
    whole = 2 * 5000 * 1024
    assert (one.kernel, one.launches, one.programs) == ("forward", 1, 2500)
    assert (one.loaded, one.stored, one.memory) == (2 * whole, whole, 3 * whole)
    assert not one.products and not found.torch


@interpreted
def test_products_are_counted_as_they_are_executed():
    """Two queries with 32 heads fill a tile: their window of 64 and one entry are a tile and an edge of 16, and the
    picks of each are multiplied with both."""
    call = workloads.attend("", 1, 4096, width=64, picks=64)
    (one,) = count(piece(call), "forward").kernels.values()
    tiles = 64 + 16 + 2 * 64
    wanted = 4 * 64 * 128 * tiles * 2048
    assert one.products == {"bf16": pytest.approx(wanted, rel=0.05)}  # the first rows see less
    assert one.products["bf16"] <= wanted


def test_operations_in_place_read_and_write():
    torches, x = _Torch(Counts()), torch.ones(1000)
    with torches:
        x.add_(torch.ones(1000)).expand(7, 1000).sum()
    assert torches.counts.torch["add_"]["bytes"] == 12_000
    assert torches.counts.torch["sum"]["bytes"] == 4_004


@interpreted
def test_operations_of_pytorch_are_counted_inside_of_ours():
    """A selection's places are sorted once, and large products are not computed."""
    found = count(piece(workloads.attend("", 1, 64, heads=2, channels=16, picks=4)), "backward").torch
    assert found["sort"]["launches"] == 1 and found["sort"]["bytes"] > 0
    assert "empty" not in found and "new_zeros" not in found
    head = count(piece(workloads.linear_cross_entropy("", 64, width=32, vocabulary=96)), "both").torch
    assert sum(one["flops"] for one in head.values()) == 3 * 2 * 64 * 32 * 96


@pytest.mark.parametrize(
    ("used", "programs"),
    [
        ({"registers": 255, "warps": 4}, 2),  # registers
        ({"registers": 32, "warps": 4, "shared": 113 << 10}, 2),  # shared memory
        ({"registers": 32, "warps": 4, "shared": 227 << 10}, 1),
        ({"registers": 32, "warps": 8}, 8),  # threads
        ({"registers": 16, "warps": 1}, 32),  # programs
        ({"registers": 255, "warps": 16}, 1),
    ],
)
def test_so_many_programs_share_a_multiprocessor(used, programs):
    assert residents(kernel(**used)) == programs


def test_the_slowest_of_what_a_kernel_asks_for_is_what_it_takes():
    """And what else it asks for, as far as the programs beside it do not hide that."""
    moved = kernel(memory=ASSUMED.memory, numbers=ASSUMED.numbers / 2)
    row = {"kernels": [moved], "torch": {}}
    assert times(moved, ASSUMED)["memory"] == 1 and times(moved, ASSUMED)["arithmetic"] == 0.5
    assert prediction(row, ASSUMED) == pytest.approx(1e3 * (1 + 0.5 / 2 + ASSUMED.launch))
    alone = {"kernels": [kernel(**{**moved, "registers": 255, "warps": 8})], "torch": {}}
    assert prediction(alone, ASSUMED) == pytest.approx(1e3 * (1.5 + ASSUMED.launch))


def test_a_last_round_that_is_not_full_costs_a_whole_one():
    assert times(kernel(programs=396, products={"bf16": ASSUMED.wgmma}), ASSUMED)["products"] == pytest.approx(4 / 3)
    assert times(kernel(programs=33, products={"bf16": ASSUMED.wgmma}), ASSUMED)["products"] == 4
    alone = kernel(programs=132, products={"bf16": ASSUMED.wgmma}, memory=ASSUMED.memory)
    assert prediction({"kernels": [alone], "torch": {}}, ASSUMED) == pytest.approx(1e3 * (2 + ASSUMED.launch))
    assert times(kernel(products={"fp32 tf32": ASSUMED.wgmma}), ASSUMED)["products"] == 2
    assert times(kernel(products={"bf16": ASSUMED.mma}, matrix="mma"), ASSUMED)["products"] == 1


def test_measured_rates_take_the_place_of_assumed_ones(tmp_path):
    facts = {"device": "a GPU", "versions": {}, "threads": 1, "commit": "c0ffee", "command": "x"}
    file = Results(tmp_path / "smoke.json", facts)
    file.add("L2 reads", {"seconds": 1, "found": {"8 MB": {"rate": 4e12}, "24 MB": {"rate": 3e12}}})
    file.add("launch gap", {"seconds": 1, "found": {"graph, plain": {"us": 2.0}, "eager, plain": {"us": 9.0}}})
    file.add("ceilings", {"seconds": 1, "ceilings": {"flops": 7e14, "bytes": 2.8e12, "dtype": "bfloat16"}})
    rates = rates_of(str(file.path))
    assert (rates.cache, rates.launch, rates.memory, rates.wgmma) == (4e12, 2e-6, 2.8e12, ASSUMED.wgmma)
    assert rates.product == 7e14
    assert "cache, launch, product, memory as in smoke.json" in rates.source and rates_of("") == ASSUMED


def test_the_floor_is_what_the_device_reaches_and_not_what_a_small_tile_does():
    """As in `benchmark=kernels`: measured, the rate of a tile once also was the roof, and that of the BLAS."""
    rates = replace(ASSUMED, wgmma=ASSUMED.product / 2, memory=2.5e12)
    roof = Ceilings(rates.product, rates.memory, "bfloat16")
    for flops, moved in ((1e12, 1e8), (1e9, 1e9)):
        row = {"case": "a", "direction": "forward", "flops": flops, "bytes": moved, "torch": {}}
        row["kernels"] = [kernel(products={"bf16": flops}, memory=moved)]
        assert counts._summary(row, rates, {})[5] == f"{roof.floor(flops, moved):.3g}"
    assert times(kernel(products={"bf16": 1e12}), rates)["products"] == 1e12 / rates.wgmma
    head = {"kernels": [], "torch": {"mm": {"launches": 1, "bytes": 0, "flops": 1e12}}}
    assert prediction(head, rates) == pytest.approx(roof.floor(1e12, 0) + 1e3 * rates.launch)


def test_a_prediction_that_is_far_off_asks_for_its_reason(tmp_path):
    facts = {"device": "a CPU", "versions": {}, "threads": 1, "commit": "c0ffee", "command": "x", "capability": 90}
    file = Results(tmp_path / "counts.json", facts)
    for case in ("near", "far"):
        work = {"case": case, "direction": "forward", "flops": 0, "bytes": 1e9}
        file.add(f"{case}, forward", {**work, "kernels": [kernel(memory=3e9)], "torch": {}})
    there = {"near, forward": {"ms": {"median": 1.2}}, "far, forward": {"ms": {"median": 2.0}}}
    (tmp_path / "gpu.json").write_text(json.dumps({"rows": there}))
    text = counts.run(results=str(file.path), measured=str(tmp_path / "gpu.json")).with_suffix(".md").read_text()
    assert "* far, forward: measured 2.00 times what was predicted: to be explained" in text
    assert "* near" not in text and "| near, forward | 1 | none | 3.00 x 1 G | 1 | 0.333 | 33% | none | 1.2 |" in text


@interpreted
def test_the_interpreter_compiles_nothing_and_says_so():
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1 is set"):
        counts.run()


def test_a_call_that_is_not_there_is_one_sentence(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match="no call with Triton kernels begins with 'nothing'"):
        counts.run(only="nothing")


def test_every_operation_with_kernels_of_ours_is_counted():
    own = {op.name for op in gsm_kernels.OPS if any(impl.name == "triton" for impl in op.fast)}
    assert own <= {one.gate.op for one in pieces()}


@pytest.mark.slow
def test_a_row_holds_what_was_counted_and_what_was_compiled(tmp_path):
    """In processes of their own: counting needs the interpreter, and compiling needs it not to be there."""
    pytest.importorskip("triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    words = ["benchmark=counts", 'only="rms_norm, one"', f"output={tmp_path}/a.json"]
    command = [sys.executable, str(ROOT / "benchmark.py"), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (
        "measured already"
        in subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout
    )
    (row,) = json.loads((tmp_path / "a.json").read_text())["rows"].values()
    (one,) = row["kernels"]
    assert one["programs"] == 1 and one["loaded"] == 2048 * (2 + 4) and one["stored"] == 2048 * 2
    assert one["registers"] >= 16 and one["warps"] == one["constants"]["num_warps"] and not one.get("failed")
