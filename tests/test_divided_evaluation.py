"""`torchrun evaluate.py`: ranks divide the parts of a measure, and find what one rank finds."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_text
from ranks import together

from gsm.evaluation import commands
from gsm.evaluation.divided import Ranks, join
from gsm.evaluation.records import Record, read

# Batches of held-out text, windows, sequences of a task, and cells of RULER: of none has each rank as many.
CASES = {
    "evaluation": "checkpoint=nano path={text} context=32 sequences=5 batch_size=2 ablate=true",
    "lengths": "checkpoint=nano path={text} lengths=16,32 windows=3 documents=stream",
    "answers": "checkpoint=needle_gsm answers=96,384 sequences=3",
    "ruler": "checkpoint=nano ruler.lengths=160 ruler.template=short ruler.examples=2",
}


def measured(folder: Path, text: Path) -> None:
    """In a process of one rank or of several."""
    rank = join().rank
    folder.mkdir(exist_ok=True)
    with (folder / f"printed-{rank}").open("w") as output, contextlib.redirect_stdout(output):
        for words in CASES.values():
            commands.parse([*words.format(text=text).split(), "device=cpu", f"output={folder}"]).evaluate()


def records(file: Path) -> tuple[dict[str, Any], list[Record]]:
    """The settings and the records, without times."""
    (found,) = read(file)
    return found.settings, [record for record in found.records if record["quantity"] != "seconds"]


@pytest.mark.timeout(600)
def test_two_ranks_find_what_one_finds_to_the_bit_and_one_of_them_writes(processes: Any, tmp_path: Path):
    (tmp_path / "text").mkdir()
    text = tiny_text.write(tmp_path / "text")
    for world in (1, 2):
        assert together(processes, world, measured, tmp_path / str(world), text) == [0] * world
    for name in CASES:
        one, two = (records(tmp_path / world / f"{name}.jsonl") for world in "12")
        assert one == two and one[1]
    assert (tmp_path / "2/printed-0").read_text() and not (tmp_path / "2/printed-1").read_text()


def reciprocals(folder: Path, numbers: Sequence[int]) -> None:
    ranks = join()
    try:
        text = str(ranks.divided(numbers, lambda number: 1 / number))
    except ZeroDivisionError as error:
        text = str(error)
    (folder / str(ranks.rank)).write_text(text)


@pytest.mark.parametrize(
    ("numbers", "found"), [([1, 2, 4], "[1.0, 0.5, 0.25]"), ([], "[]"), ([1, 0, 4], "division by zero")]
)
def test_all_ranks_get_every_part_in_order_or_the_error_of_any_rank(
    processes: Any, tmp_path: Path, numbers: list[int], found: str
):
    assert together(processes, 2, reciprocals, tmp_path, numbers) == [0, 0]
    assert [(tmp_path / rank).read_text() for rank in "01"] == [found] * 2


def test_a_process_that_was_started_alone_computes_all():
    assert join() == Ranks() and Ranks().divided(range(3), lambda number: number) == [0, 1, 2]
