"""Sequences that ranks divide among themselves: what they send each other, computed; how even their searches are,
computed and measured; and what a prompt takes of each of several processes here, measured.

What is sent is checked to the byte against collectives as they are called, in tests/test_pieces.py.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from gsm.cache.pieces import Context, owner
from gsm.costs import traffic
from gsm.models.base import CHUNK
from gsm.models.geometry import Geometry
from gsm_kernels import index_top_k

from . import entries, machine, results, workloads
from .entries import Entry, Model
from .results import FOLDER, read, table, write

SENT = ("size", "tokens", "ranks", "model", "windows and state, MB", "banks and index keys, MB", "recurrent states, MB",
        "a rank sends, MB", "of ring attention")  # fmt: skip
EVEN = ("ranks", "pieces of each", "busiest over mean, slots (computed)", "busiest over mean, seconds (measured)",
        "seconds of each rank")  # fmt: skip
READ = ("model", "size", "tokens", "chunk", "processes", "peak of each, MiB", "seconds")
BYTES = 2  # of a number in bfloat16
MB, MIB = 1e6, 2**20
WAYS = {"routed": "halos", "gathered": "banks", "passed_on": "states"}


def run(
    output: str = "",
    results: str = "",
    models: Sequence[Entry] = entries.ALL,
    sizes: Sequence[str] = ("0p5b", "1p5b"),
    contexts: Sequence[int] = (65536, 1048576),
    ranks: Sequence[int] = (2, 8, 64),
    searched: int = 32768,
    prompt: int = 65536,
    size: str = "nano",
    processes: Sequence[int] = (1, 2),
    chunks: Sequence[int] = (CHUNK, 65536),
) -> Path:
    """Compute and measure, print the tables and write them beside the JSON file; return that file.

    Args: as in configs/benchmark/context.yaml and configs/benchmark.yaml, which say what they mean.

    Raises:
        ValueError: no model, or a number below 1.
    """
    if results:
        return _show(Path(results))
    if not models or min([*contexts, *ranks, *processes, *chunks, searched, prompt], default=0) < 1:
        raise ValueError(
            f"models {list(models)}, contexts {list(contexts)}, ranks {list(ranks)}, searched {searched}, prompt "
            f"{prompt}, processes {list(processes)}, chunks {list(chunks)}: give one or more of each, of 1 or more"
        )
    if searched % (2 * max(ranks)):
        raise ValueError(
            f"searched is {searched}, but has to be a multiple of {2 * max(ranks)}: each rank has two pieces"
        )
    known = entries.read(models)
    sent = [_sent(model, size, tokens, world) for size, tokens, world, model in product(sizes, contexts, ranks, known)]
    even = [
        {"ranks": world, "each": each, "slots": busiest(world, each), "seconds": searches(world, each, searched)}
        for world, each in product(ranks, (1, 2))
    ]
    facts = machine.facts(torch.device("cpu"), models=True)
    path = Path(output) if output else FOLDER / f"context-{machine.in_file_names(size)}.json"
    measured = []
    for model, chunk, world in product(known[:2], chunks, processes):
        measured.append(_read_by(world, model, size, prompt, chunk))
        print(" ".join(f"{name} {value}" for name, value in measured[-1].items()), flush=True)
    write(
        path, {**facts, "searched": searched, "prompt": prompt, "rows": {"sent": sent, "even": even, "read": measured}}
    )
    return _show(path)


def busiest(ranks: int, each: int) -> float:
    """The slots that the rank scores which has most to search, over the mean, in a long sequence of one document."""
    pieces = each * ranks
    seen = [0] * ranks
    for piece in range(pieces):
        seen[owner(piece, ranks, each)[0]] += 2 * piece + 1  # times half a piece's square
    return max(seen) * ranks / sum(seen)


def searches(ranks: int, each: int, tokens: int) -> list[float]:
    """The seconds that each of so many ranks searches, one after the other here, on one thread: the least of three."""
    whole = workloads.index_top_k("", 1, tokens).make(torch.device("cpu"), torch.float32)
    pieces = torch.arange(tokens).chunk(each * ranks)
    threads, seconds = torch.get_num_threads(), []
    torch.set_num_threads(1)
    for rank in range(ranks):
        mine = torch.cat([rows for piece, rows in enumerate(pieces) if owner(piece, ranks, each)[0] == rank])
        call = {
            name: value[:, mine] if name.rpartition("_")[2].startswith("BR") else value for name, value in whole.items()
        }
        taken = []
        for _ in range(3):
            begun = time.perf_counter()
            index_top_k(**call)
            taken.append(time.perf_counter() - begun)
        seconds.append(min(taken))
    torch.set_num_threads(threads)
    return seconds


def _sent(model: Model, size: str, tokens: int, ranks: int) -> dict[str, Any]:
    """A row: bytes of a forward pass in bfloat16 for one sequence, of all ranks."""
    built = model.bare(size)
    how = {"batch": 1, "tokens": tokens, "ranks": ranks, "number_bytes": BYTES}
    found = dict.fromkeys(WAYS.values(), 0)
    for one in traffic.sent(built, **how):
        found[WAYS[one.how]] += one.bytes
    ring = traffic.ring(cast(Geometry, built.geometry), **how)
    return {"model": model.name, "size": size, "tokens": tokens, "ranks": ranks, **found, "ring": ring}


def _read_by(world: int, model: Model, size: str, prompt: int, chunk: int) -> dict[str, Any]:
    """A row: so many processes read a prompt together, which have as many threads together as this one."""
    threads = max(1, torch.get_num_threads() // world)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = multiprocessing.get_context("spawn")
    told: Any = start.SimpleQueue()
    arguments = [(rank, world, port, threads, model, size, prompt, chunk, told) for rank in range(world)]
    started = [start.Process(target=_read, args=one) for one in arguments]
    for process in started:
        process.start()
    while any(process.is_alive() for process in started) and not any(process.exitcode for process in started):
        time.sleep(0.1)
    if any(process.exitcode for process in started):
        for process in started:  # they would wait for the one that is gone
            process.kill()
        raise RuntimeError(f"{world} processes could not read {prompt} tokens: see above")
    found = sorted(told.get() for _ in started)
    row = {"model": model.name, "size": size, "tokens": prompt, "chunk": chunk, "processes": world, "threads": threads}
    return {**row, "peaks": [peak for _, peak, _ in found], "seconds": max(seconds for *_, seconds in found)}


def _read(
    rank: int, world: int, port: int, threads: int, model: Model, size: str, prompt: int, chunk: int, told: Any
) -> None:
    """A process: reads its pieces; tells by how much its memory grew, in bytes, and how long that took."""
    torch.set_num_threads(threads)
    context = None
    if world > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(minutes=30))
        assert dist.group.WORLD is not None
        context = Context(dist.group.WORLD)
    built = model.build(size).eval()
    tokens_BT = torch.randint(built.vocabulary, (1, prompt), generator=torch.Generator().manual_seed(0))
    built.prefill(tokens_BT[:, :256], built.start(1), context=context)  # what is compiled and allocated once
    before, begun = _peak(), time.perf_counter()
    built.prefill(tokens_BT, built.start(1), chunk=chunk, context=context)
    told.put((rank, _peak() - before, time.perf_counter() - begun))
    if world > 1:
        dist.destroy_process_group()


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _show(path: Path) -> Path:
    """Publish the tables of a file of results."""
    content = read(path)
    rows = content["rows"]
    sent = [
        (
            one["size"], f"{one['tokens']:,}", str(one["ranks"]), one["model"],
            *(f"{one[name] / one['ranks'] / MB:,.2f}" for name in WAYS.values()),
            f"{sum(one[name] for name in WAYS.values()) / one['ranks'] / MB:,.1f}",
            f"1 / {one['ring'] / sum(one[name] for name in WAYS.values()):,.1f}",
        )
        for one in rows["sent"]
    ]  # fmt: skip
    even = [
        (
            str(one["ranks"]), str(one["each"]), f"{one['slots']:.2f}",
            f"{max(one['seconds']) * one['ranks'] / sum(one['seconds']):.2f}",
            ", ".join(f"{seconds:.2f}" for seconds in one["seconds"][:8]) + (", ..." if one["ranks"] > 8 else ""),
        )
        for one in rows["even"]
    ]  # fmt: skip
    peaks = [
        (
            one["model"], one["size"], f"{one['tokens']:,}", f"{one['chunk']:,}",
            f"{one['processes']} ({one['threads']} threads)", ", ".join(f"{peak / MIB:,.0f}" for peak in one["peaks"]),
            f"{one['seconds']:.1f}",
        )
        for one in rows["read"]
    ]  # fmt: skip
    return results.publish(
        path,
        "What ranks send that divide a sequence among themselves: each of them, in a forward pass in bfloat16, for one "
        "sequence (computed; backward sends as much again, and recomputed layers twice). Ring attention: of a dense "
        f"Transformer of the same depth, heads and widths. Commit {content['commit']}, `{content['command']}`.",
        table(SENT, sent),
        "How even searches are in a long document: a row at the end sees more slots than one at the front. Measured: "
        f"`index_top_k` of {content['searched']:,} tokens, float32, the rows of one rank after those of another, "
        "on one thread.",
        table(EVEN, even),
        "A prompt that processes of this machine read together (measured): how much the memory of each grows at its "
        f"peak. {results.measured_on(content)}",
        table(READ, peaks),
    )
