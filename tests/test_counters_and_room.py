"""What the benchmarks count, bytes and operations, and what they know of memory."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch

from gsm.costs import room
from gsm.costs.room import Room
from gsm_benchmarks import counters
from gsm_benchmarks.counters import Operations, counting
from gsm_benchmarks.machine import watching

CPU = torch.device("cpu")


def test_operations_count_what_is_read_and_no_views():
    table, index = torch.zeros(100, 3), torch.tensor([[1], [2]])
    with Operations() as seen:
        _ = table.T[:, :50].T + 1
    assert (seen.count, seen.bytes) == (1, 50 * 3 * 4)
    with Operations() as seen:
        torch.gather(table, 0, index.expand(2, 3))
    assert (seen.count, seen.bytes) == (1, 2 * 3 * 4)


def test_operations_count_what_is_written_and_not_where():
    table, some, index = torch.zeros(100, 3), torch.ones(2, 3), torch.tensor([1, 2])
    writes = {
        "copy_": lambda: table[:2].copy_(some),
        "index_copy_": lambda: table.index_copy_(0, index, some),
        "index_put_": lambda: table.index_put_((index,), some),
        "scatter_": lambda: table.scatter_(0, index[:, None].expand(2, 3), some),
    }
    for name, write in writes.items():
        with Operations() as seen:
            write()
        places = {"copy_": 0, "scatter_": 6 * 8}.get(name, 2 * 8)
        assert (seen.count, seen.bytes) == (1, 6 * 4 + places), name


def test_attention_counts_the_slots_that_were_chosen():
    meta = partial(torch.empty, device="meta")
    query, window, sink = meta(1, 1, 2, 4), meta(1, 8, 4), meta(2)
    bank, index, angles = meta(1, 1000, 4), meta(1, 1, 5, dtype=torch.int64), meta(1, 1, 1)
    position = meta(1, 1, dtype=torch.int64)
    given = (query, window, position, 8, sink, angles, angles, bank, index, None)
    read = counters._read("gsm_kernels::attend_few_rows", (*given, 2), {}, None)
    assert read == 4 * (8 + 32 + 2 + 5 * 4 + 2) + 8 * (5 + 1)


def test_only_what_happens_inside_a_module_is_counted():
    inside, outside = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 8, bias=False)
    with torch.no_grad(), counting(inside) as seen:
        outside(inside(torch.zeros(2, 4)))
        first = seen.count
        inside(torch.zeros(2, 4))
    assert 0 < first < seen.count == 2 * first


def test_room_knows_what_fits():
    some = Room(lambda tokens: 100 * tokens, chunk=10, batch=1, each=50.0)
    assert some.needed(20) == 2000 + 500 and some.needed(20, memories=2) == 4000 + 50
    most = some.fits(2500)
    assert some.needed(most) <= 2500 < some.needed(most + 1) and most == 20
    assert some.fits(100) == 0
    assert "would fit: 20 tokens at batch 1" in some.refusal(1000, 2500)


@pytest.mark.parametrize(("memories", "tokens"), [(1, 20), (1, 5), (2, 20)])
def test_what_was_tried_in_vain_is_not_said_to_fit(memories, tokens):
    some = Room(lambda tokens: 100 * tokens, chunk=10, batch=1, each=50.0)
    assert some.needed(tokens, memories) < 5000
    said = some.refusal(tokens, 5000, memories, tried=True)
    assert said.startswith("out of memory: more than ") and int(said.split("would fit: ")[1].split()[0]) < tokens
    assert some.each == 50  # another request may well find room


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
        torch.ones(1 << 26).sum()
    if peak.extra is None:
        pytest.skip("this system does not say how much memory a process takes")
    assert peak.extra > 0.7 * (1 << 28)  # what other threads and the allocator give back meanwhile is taken off
    with watching(CPU) as after:
        pass
    assert after.extra is not None and after.extra < 1 << 24


def garbage_then_as_much(said: Any) -> None:
    """In a child process, since a training in this one has the allocator keep what is freed."""

    class Holder:
        pass

    gc.disable()
    for _ in range(2):  # what holds itself goes when it is collected, and not before
        holder = Holder()
        holder.itself, holder.numbers = holder, torch.ones(1 << 26)
    del holder
    with watching(CPU) as peak:
        gc.collect()
        torch.ones(1 << 26).sum()
    said.put(peak.extra)


def test_garbage_from_before_is_not_taken_off_the_peak(processes: Any):
    said = processes.SimpleQueue()
    child = processes.Process(target=garbage_then_as_much, args=(said,))
    child.start()
    child.join()
    assert child.exitcode == 0
    extra = said.get()
    if extra is None:
        pytest.skip("this system does not say how much memory a process takes")
    assert extra > 0.7 * (1 << 28)


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
