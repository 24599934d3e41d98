"""A model that is asked again and again takes no more memory than at first."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import gsm

pytestmark = pytest.mark.slow
CALLS, STEPS = 1_000, 10_000  # at night
CAPACITY, PROMPT, KEPT = 64, 8, 16
# After a tenth, PyTorch's own stores and the allocator's have filled: 1.6 MiB came after it in 1,000 calls, nothing
# in 10,000 steps. The bound is about twice that: 4.7 KiB for each call that is left, 470 bytes for each step. What
# keeps less than that of a call and is a tensor, such as the 2 KiB of a row of logits, is counted.
MOST_GROWN = 4 << 20


class Usage(NamedTuple):
    """The memory of a process: resident bytes, and number of live tensors."""

    resident: int
    tensors: int


def seen() -> Usage:
    """Return the usage of this process after garbage collection."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Usage(
        pages * os.sysconf("SC_PAGE_SIZE"), sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())
    )


def small() -> Any:
    """Size pico, no deeper than it takes to have a layer of every kind."""
    shallow = "size.encoder_layers=3 size.bank_layers=[2] size.stages=[2,3] size.decoder_layers=2 size.decoder_full=4"
    return gsm.build_model("gsm", "pico", [*shallow.split(), "size.decoder_reindex=[5]"], seed=0).eval()


def generates(count: int) -> Callable[[], None]:
    """One call of `generate` after another, with prompts of several lengths."""
    model, lengths = small(), iter(range(count))

    def step() -> None:
        prompt = torch.randint(model.vocabulary, (1, PROMPT + next(lengths) % 3))
        model.generate(prompt, max_new_tokens=2, temperature=1.0, top_p=0.9)

    return step


def decodes(count: int) -> Callable[[], None]:
    """Return one decoding step of an engine; with a full memory it continues from a saved prefix, or from the start."""
    model = small()
    engine = gsm.Engine(model, capacity=CAPACITY)
    prompt = torch.randint(model.vocabulary, (1, KEPT))
    engine.prefill(prompt)
    kept, number = engine.memory.clone(), [0]

    def step() -> None:
        number[0] += 1
        if engine.memory.used == CAPACITY and number[0] % 2:
            engine.load(kept)
        elif engine.memory.used == CAPACITY:
            engine.reset()
            engine.prefill(prompt)
        engine.decode(torch.randint(model.vocabulary, (1,)))

    return step


def watched(make: Callable[[int], Callable[[], None]], count: int, said: Any) -> None:
    """Report, from a child process, its usage after a tenth of the steps and at the end."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    step, marks = make(count), []
    for number in range(count):
        if number == count // 10:
            _, _, mark = seen(), seen(), seen()  # to look takes room itself, for a list of all objects, and keeps it
            marks.append(mark)
        step()
    said.put([*marks, seen()])


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("make", "count"),
    [
        (generates, CALLS // 4),
        (decodes, STEPS // 4),
        pytest.param(generates, CALLS, marks=pytest.mark.nightly),
        pytest.param(decodes, STEPS, marks=pytest.mark.nightly),
    ],
)
def test_memory_stays_flat(processes: Any, make: Callable[[int], Callable[[], None]], count: int):
    said = processes.SimpleQueue()
    child = processes.Process(target=watched, args=(make, count, said))
    child.start()
    child.join()
    assert child.exitcode == 0
    warm, last = said.get()
    assert last.tensors == warm.tensors
    assert last.resident - warm.resident <= MOST_GROWN, f"{warm} after a tenth, {last} in the end"
