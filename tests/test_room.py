"""Memory: how much there is, how much a request needs, and the peak of a call."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from gsm.costs import room
from gsm.costs.room import Room
from gsm_benchmarks.machine import watching

CPU = torch.device("cpu")


def test_room_knows_what_fits():
    some = Room(lambda tokens: 100 * tokens, chunk=10, batch=1, each=50.0)
    assert some.needed(20) == 2000 + 500
    most = some.fits(2500)
    assert some.needed(most) <= 2500 < some.needed(most + 1) and most == 20
    assert some.fits(100) == 0
    assert "would fit: 20 tokens at batch 1" in some.refusal(1000, 2500)


@pytest.mark.parametrize("tokens", [20, 5])
def test_what_was_tried_in_vain_is_not_said_to_fit(tokens):
    some = Room(lambda tokens: 100 * tokens, chunk=10, batch=1, each=50.0)
    assert some.needed(tokens) < 5000
    said = some.refusal(tokens, 5000)
    assert said.startswith("out of memory: more than ") and int(said.split("would fit: ")[1].split()[0]) < tokens
    assert some.each == 50  # another request may well find room


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
    assert room.available_bytes(CPU) > 1 << 20
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 70\nactive_file 30\n")
    monkeypatch.setattr(room, "CGROUP", tmp_path)
    assert room.available_bytes(CPU) == 670
    (tmp_path / "memory.max").write_text("max\n")
    assert room.available_bytes(CPU) > 1 << 20


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
