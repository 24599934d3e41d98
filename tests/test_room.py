"""Memory: how much there is, how much a request needs, and the peak of a call."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import gsm
from gsm.costs import room
from gsm_benchmarks import machine
from gsm_benchmarks.machine import watching

CPU = torch.device("cpu")


def test_the_largest_number_of_tokens_that_fits_is_named():
    needed = room.needs(gsm.build_model("gsm", "pico"), chunk=10)
    for free in (needed(40), needed(40) - 1, needed(999)):
        most = int(room.refusal(needed, 1000, free).split()[-4])
        assert needed(most) <= free and (most == 999 or free < needed(most + 1))
    assert room.refusal(needed, 1000, needed(1000)).endswith("; 999 tokens would fit"), "1000 were tried in vain"
    assert room.refusal(needed, 1000, -1).endswith("; 0 tokens would fit")


def peaks(results: Any) -> None:
    """Put the peaks of an allocation, of nothing, and of an allocation that garbage makes room for.

    Runs in a child process: after a training the allocator keeps freed memory, and an allocation adds nothing then.
    """

    class Holder:
        pass

    with watching(CPU) as peak:
        torch.ones(1 << 26).sum()
    with watching(CPU) as after:
        pass
    gc.disable()
    for _ in range(2):  # an object that holds itself goes when it is collected, and not before
        holder = Holder()
        holder.itself, holder.numbers = holder, torch.ones(1 << 26)
    del holder
    with watching(CPU) as beside:
        gc.collect()
        torch.ones(1 << 26).sum()
    results.put((peak.extra, after.extra, beside.extra))


def test_the_peak_is_that_of_what_happens_inside(processes: Any):
    results = processes.SimpleQueue()
    child = processes.Process(target=peaks, args=(results,))
    child.start()
    child.join()
    assert child.exitcode == 0
    peak, after, beside = results.get()
    if peak is None:
        pytest.skip("this system does not say how much memory a process takes")
    assert peak > 0.7 * (1 << 28)  # memory that other threads and the allocator give back meanwhile is taken off
    assert after < 1 << 24
    assert beside > 0.7 * (1 << 28), "garbage from before is not taken off"


def test_available_memory_is_that_of_the_container(tmp_path, monkeypatch):
    assert machine.available_bytes(CPU) > 1 << 20
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 70\nactive_file 30\n")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert machine.available_bytes(CPU) == 670
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.available_bytes(CPU) > 1 << 20


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
        (Exception("-- Process 1 terminated with\ntorch.OutOfMemoryError: CUDA"), True),
        (RuntimeError("out of resource: shared memory"), False),
    ],
)
def test_memory_that_runs_out_is_known_wherever_it_does(error, is_memory):
    assert room.out_of_memory(error) == is_memory
