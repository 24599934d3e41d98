"""Every Triton kernel of the shipped sizes compiles for a Hopper GPU, whether there is one or not."""

from __future__ import annotations

import collections
import json
import subprocess
import sys
from pathlib import Path

import hazards
import pytest
import torch
from check import ASSEMBLERS, assembled_by
from small import mostly_nightly

import gsm_kernels
from gsm_kernels import device, launch, using

MOST_SHARED = 227 << 10  # bytes that a program can have
MOST_SPILLED = {"ptxas": 168, device.ASSEMBLER: 352}  # bytes of a thread of the query's gradient with 64 heads
STEP = {  # kernels of a step of training of gsm, forward and backward, by operation
    **{"attend": 7, "index_top_k": 2, "indexer_kl": 6, "inverse_kernels": 2, "linear_cross_entropy": 1, "mhc": 5},
    **{"rms_norm": 12, "rotate": 4, "swiglu": 2},
}
TILED = {  # kernels of such a step that have a second candidate for their tile
    **{"attend.forward": 2, "index_top_k.best_of_groups": 1, "mhc.forward": 1, "mhc.products": 1},
    "mhc.stream_gradients": 1,
}
SIZES = ("nano", "tiny", "0p5b", "1p5b")  # 8b_a1p5b has the widths of 1p5b


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["gsm", "baseline"])
@pytest.mark.parametrize("size", SIZES)
def test_every_kernel_of_a_shipped_size_compiles(size, name, tmp_path):
    rows = compiled(tmp_path, size, name)
    failed = [row for row in rows if "failed" in row or row["shared"] > MOST_SHARED]
    assert not failed
    assert all(row["registers"] >= 16 for row in rows)
    assert sum(row["wgmma"] for row in rows) and not racing(rows)
    operations = {row["module"].split(".")[1] for row in rows}
    assert {"attend", "index_top_k", "indexer_kl", "mhc", "rms_norm", "swiglu"} <= operations


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("assembler", mostly_nightly(ASSEMBLERS, device.ASSEMBLER))
def test_no_product_of_attention_races_with_its_operands(assembler, tmp_path):
    """With Triton 3.6.0 two of these kernels of three lack the fence; see `hazards` for the other two faults."""
    rows = compiled(tmp_path, "1p5b", "gsm", "attend", "index_top_k", assembler=assembler)
    assert sum(row["wgmma"] for row in rows) > 50 and sum(row["from_registers"] for row in rows) > 30
    assert not racing(rows)
    assert max(row["stack"] for row in rows) <= MOST_SPILLED[assembler]


@pytest.mark.slow
def test_a_step_of_training_compiles_few_kernels_and_other_batches_add_none(tmp_path):
    """Shapes are multiples of 16; each doubling of the slots adds two kernels of the search, and 64 tokens or fewer two
    of the hyper-connections."""
    rows = compiled(tmp_path, "steps", "0p5b", "gsm")
    first = collections.Counter(row["module"].split(".")[1] for row in rows if row["step"] == 0)
    assert first == STEP
    names = collections.Counter(f"{row['module'].split('.')[1]}.{row['kernel']}" for row in rows if row["step"] == 0)
    assert {name: names[name] for name in TILED} == TILED
    assert not [row for row in rows if row["step"]]


@pytest.mark.slow
@pytest.mark.parametrize(("assembler", "wrong"), [(ASSEMBLERS[0], True), (ASSEMBLERS[1], False)])
def test_a_kernel_that_is_compiled_wrongly_is_seen(assembler, wrong, tmp_path):
    """CUDA 12.8 lets it read a register that nothing writes (triton-lang/triton#11366), CUDA 13.1 does not."""
    (row,) = compiled(tmp_path, "control", assembler=assembler)
    assert bool(row["unwritten"]) == wrong and row["wgmma"]


def racing(rows: list[dict]) -> list[dict]:
    """Return the kernels whose results may depend on timing."""
    return [row for row in rows if row["unfenced"] or row["unwritten"] or row["overwritten"]]


LOOP = """.visible .entry kernel() {
$start:
  cp.async.cg.shared.global [%r1], [%rd1], 16;
  cp.async.wait_group 0;
  FENCE
  wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {}, %rd2, %rd3;
  @%p1 bra $start;
  ret;
}"""


@pytest.mark.parametrize(("fence", "unfenced"), [("fence.proxy.async;", 0), ("bar.sync 0;", 1)])
def test_a_copy_without_a_fence_is_seen(fence, unfenced):
    assert hazards.unfenced(LOOP.replace("FENCE", fence)) == (1, unfenced)


def sass(*lines: str) -> str:
    """Return the disassembler's text for instructions that wait on nothing."""
    texts = [f"        /*{16 * n:04x}*/  {line} ;  /* 0x{7 << 49:016x} */" for n, line in enumerate(lines)]
    return "\n".join(f"{text}\n  /* 0x{7 << 49:016x} */" for text in texts)


PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0"
DESCRIPTOR = ("UMOV UR10, 0x1", "UMOV UR11, 0x2")


@pytest.mark.parametrize(
    ("lines", "early"),
    [
        (("MOV R4, R9", "WARPGROUP.DEPBAR.LE gsb0, 0x0"), True),
        (("LDS.128 R4, [R9]", "WARPGROUP.DEPBAR.LE gsb0, 0x0"), True),
        (("WARPGROUP.DEPBAR.LE gsb0, 0x0", "MOV R4, R9"), False),
        (("MOV R9, R4", "WARPGROUP.DEPBAR.LE gsb0, 0x0"), False),
    ],
)
def test_an_operand_that_is_overwritten_before_it_was_read_is_seen(lines, early):
    products, errors = hazards.overwritten(sass(*DESCRIPTOR, PRODUCT, *lines, "EXIT"))
    assert products == 1 and bool(errors) == early


def test_a_descriptor_from_a_register_that_one_path_leaves_unwritten_is_seen():
    assert hazards.unwritten(sass(*DESCRIPTOR, PRODUCT, "EXIT")) == []
    skipped = sass(DESCRIPTOR[0], "BRA.U !UP0, 0x30", DESCRIPTOR[1], PRODUCT, "EXIT")
    assert ["UR11" in line for line in hazards.unwritten(skipped)] == [True]


def compiled(folder: Path, *words: str, assembler: str = device.ASSEMBLER) -> list[dict]:
    """Run the script in a process that compiles and does not interpret, with one of Triton's assemblers."""
    environment = assembled_by(assembler, folder)
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(Path(__file__).with_name("compiling.py")), *words]
    done = subprocess.run(command, env=environment, text=True, check=True, stdout=subprocess.PIPE)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_where_nothing_is_launched_no_gpu_is_needed():
    seen = []
    gate = torch.randn(8, 16, requires_grad=True)
    with using("triton"), launch.launching(lambda kernel, *_: seen.append(kernel.__name__)):
        gsm_kernels.swiglu(gate, torch.randn(8, 16), 1.0).sum().backward()
    assert seen == ["forward", "backward"]
