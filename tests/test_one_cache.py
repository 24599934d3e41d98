"""Many processes that want the same text at once, with one cache: one of them makes it, all of them read it."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from short_runs import no_death

from gsm.data import ids, tokens
from gsm.data.module import TextData

pytestmark = pytest.mark.slow
PROCESSES, KILLED = 8, 3
MADE = ("Training a BPE", "Encoding the train split", "Encoding the validation split")  # what is logged when it is done
OPTIONS: dict[str, Any] = {"vocabulary": 300, "context": 512, "batch_size": 4}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough that all of them have opened it before one has encoded it."""
    folder, draw = tmp_path_factory.mktemp("text"), random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 9))) for _ in range(500)]
    for number in range(8):
        (folder / f"part{number}.txt").write_text("\n".join(" ".join(draw.choices(words, k=12)) for _ in range(600)))
    return folder


def read(text: Path, cache: Path) -> str:
    """SHA-256 of the ids of both splits, in order."""
    data, digest = TextData(**OPTIONS, path=str(text), cache_dir=str(cache)), hashlib.sha256()
    data.prepare_data()
    for split in (data.train_set, data.validation_set):
        for number in range(len(split)):
            digest.update(split[number]["tokens"].numpy().tobytes())
    return digest.hexdigest()


def reader(text: Path, cache: Path, together: Any, said: Any, death: Callable[[], None]) -> None:
    """What each process does, at the same moment; it tells what it has read, and what it has made for that."""
    made: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: made.append(record.getMessage())
    logging.getLogger("gsm.data").addHandler(handler)
    logging.getLogger("gsm.data").setLevel(logging.INFO)
    ids.PARCEL = 1 << 12  # characters: there are many parcels
    death()
    together.wait()
    said.put((read(text, cache), [start for start in MADE for line in made if line.startswith(start)]))


def killed_while_encoding(deaths: Any) -> None:
    """Kill the first processes that write, after their first parcel; the next one begins again."""
    whole = tokens.write_ids

    def write_ids(*arguments: Any, report: Callable[[int], object], **facts: Any) -> dict[str, Any]:
        def die(count: int) -> None:
            with deaths.get_lock():
                deaths.value -= 1
                dies = deaths.value >= 0
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            report(count)

        return whole(*arguments, report=die, **facts)

    tokens.write_ids = write_ids


def all_at_once(
    processes: Any, count: int, text: Path, cache: Path, death: Callable[[], None] = no_death
) -> tuple[list[int], list[Any]]:
    """Exit codes of so many, and what those who came to their end have told."""
    together, said = processes.Barrier(count), processes.SimpleQueue()
    started = [processes.Process(target=reader, args=(text, cache, together, said, death)) for _ in range(count)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    codes = [process.exitcode for process in started]
    return codes, [said.get() for _ in range(codes.count(0))]


def files_in(cache: Path) -> set[str]:
    """What lies in a cache, but for locks, which nobody holds any more."""
    return {str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"}


@pytest.fixture(scope="module")
def alone(processes: Any, text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, set[str]]:
    """What a process reads that nobody disturbs, and the files of its cache."""
    cache = tmp_path_factory.mktemp("alone")
    _, [(ids, made)] = all_at_once(processes, 1, text, cache)
    assert sorted(made) == sorted(MADE)
    return ids, files_in(cache)


def test_eight_processes_encode_a_text_once(processes: Any, text: Path, tmp_path: Path, alone: tuple[str, set[str]]):
    codes, said = all_at_once(processes, PROCESSES, text, tmp_path)
    assert codes == [0] * PROCESSES
    assert ({ids for ids, _ in said}, files_in(tmp_path)) == ({alone[0]}, alone[1])
    assert Counter(made for _, all_made in said for made in all_made) == dict.fromkeys(MADE, 1)


def test_those_that_are_killed_while_they_encode_leave_it_to_the_next(
    processes: Any, text: Path, tmp_path: Path, alone: tuple[str, set[str]]
):
    death = partial(killed_while_encoding, processes.Value("i", KILLED))
    codes, said = all_at_once(processes, PROCESSES, text, tmp_path, death)
    assert Counter(codes) == {0: PROCESSES - KILLED, -signal.SIGKILL: KILLED}
    assert ({ids for ids, _ in said}, files_in(tmp_path)) == ({alone[0]}, alone[1]), "nothing half written is left"
    made = Counter(made for _, all_made in said for made in all_made)
    assert all(made[split] == 1 for split in MADE[1:]), "of those that live one encodes; the others died of it"
