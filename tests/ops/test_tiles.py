"""The choice among a kernel's tiles, with a timer and a GPU that are not real."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calls import attention, band, cast, hyper_connection, scoring, selection
from check import assert_agrees, assert_as_good_as_eager

import gsm_kernels
from gsm_kernels import launch, tiles

LIKE: Any = SimpleNamespace(is_cuda=True, device="cuda:0", dtype=torch.bfloat16)
MANY = tiles.PROCESSORS


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """The candidates that are timed, in order. A candidate is a pair: its milliseconds and a number."""
    seen = []

    def milliseconds(run):
        run()
        return seen[-1][0]

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(tiles, "folder", lambda: tmp_path)
    monkeypatch.setattr(tiles, "milliseconds", milliseconds)
    monkeypatch.setattr(tiles, "_choices", {})
    return seen


def choose(timed, *candidates, programs=MANY, like: Any = LIKE):
    return tiles.fastest("toy", candidates, timed.append, like, programs, 64)


SLOW, FAST = (2.0, 0), (1.0, 0)


def test_the_fastest_is_timed_once_and_kept_for_the_next_process(timed, tmp_path):
    assert [choose(timed, SLOW, FAST) for _ in range(2)] == [FAST, FAST] and timed == [SLOW, FAST]
    tiles._choices.clear()
    assert choose(timed, SLOW, FAST) == FAST and len(timed) == 2 and len(list(tmp_path.iterdir())) == 1
    tiles._choices.clear()
    assert choose(timed, FAST, SLOW) == FAST and len(timed) == 4, "other candidates are timed again"


@pytest.mark.parametrize(
    ("candidates", "taken", "number"),
    [
        (((2.0, 0), (math.inf, 0)), (2.0, 0), 2),
        (((math.inf, 0), (1.0, 0)), (1.0, 0), 2),
        (((2.0, 0), (1.99, 0)), (2.0, 0), 2),
    ],
    ids=["cannot be built", "the first cannot be built", "hardly faster"],
)
def test_what_is_timed_and_taken(timed, candidates, taken, number):
    assert choose(timed, *candidates) == taken and len(timed) == number


def test_small_calls_and_calls_without_a_gpu_take_the_first(timed, tmp_path):
    assert choose(timed, SLOW, FAST, programs=MANY - 1) == SLOW
    assert choose(timed, SLOW, FAST, like=torch.empty(1)) == SLOW
    assert not timed and not list(tmp_path.iterdir())


def test_while_kernels_are_built_or_a_graph_is_captured_nothing_is_timed(timed, monkeypatch):
    with launch.launching(lambda *_: None):
        assert choose(timed, SLOW, FAST) == SLOW
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert choose(timed, SLOW, FAST) == SLOW
    assert not timed and choose(timed, SLOW, FAST) == FAST
    with launch.launching(lambda *_: None):
        assert choose(timed, SLOW, FAST) == FAST, "the backward is built as it will run"


@pytest.mark.parametrize("damage", [b"", b"seven", b"7 a sentence", b"-1 a sentence", b"\xff"])
def test_a_damaged_file_decides_nothing(timed, tmp_path, damage):
    choose(timed, SLOW, FAST)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage)
    tiles._choices.clear()
    assert choose(timed, SLOW, FAST) == FAST and len(timed) == 4


def test_the_first_process_to_finish_decides(timed, tmp_path, monkeypatch):
    """Ranks of one machine would compute other bits with other tiles."""

    def while_another_finishes(run):
        monkeypatch.setattr(tiles, "milliseconds", lambda run: run.args[0][0])
        tiles.fastest("toy", (SLOW, FAST), lambda _: None, LIKE, MANY, 64)
        tiles._choices.clear()
        return 0.1

    monkeypatch.setattr(tiles, "milliseconds", while_another_finishes)
    assert choose(timed, SLOW, FAST) == FAST, "this process found the first faster"


def test_a_folder_that_cannot_be_written_keeps_nothing(timed, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(tiles, "folder", lambda: tmp_path / "file" / "tiles")
    assert choose(timed, SLOW, FAST) == FAST


def test_models_of_other_widths_have_choices_of_their_own(timed):
    """The candidates of mHC depend on the width, which is not among the sizes."""
    assert choose(timed, SLOW, FAST) == FAST and choose(timed, FAST, SLOW) == FAST and len(timed) == 4


def test_the_choices_are_told_with_their_times(timed, monkeypatch):
    assert "every kernel takes its first tile" in tiles.describe()[0] or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tiles, "missing", lambda: None)
    monkeypatch.setattr(tiles, "triton_version", lambda: "3.7.1")
    assert "none is timed yet" in tiles.describe()[0]
    choose(timed, SLOW, FAST, (math.inf, 0))
    (sentence,) = tiles.describe()
    assert sentence.startswith("toy on a GPU, Triton 3.7.1, torch.bfloat16, (64,), ((2.0, 0), ")
    assert sentence.endswith(": number 2 is taken, after 2.000, 1.000, inf ms")


def test_a_tile_that_cannot_be_built_takes_for_ever():
    def run():
        raise RuntimeError("too little shared memory")

    assert tiles.milliseconds(run) == math.inf


SIZES = {"heads": 16, "channels": 32, "rows": 5, "entries": 90, "width": 70}
CALLS = {
    "attend": lambda: attention(**SIZES, k=40)[0],
    "attend_band": lambda: band(**SIZES),
    "score_slots": lambda: scoring(rows=3, k=70),
    "mhc_boundary": lambda: hyper_connection(width=96, batch=1, rows=70, like_a_model=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_last_candidate_computes_the_same_as_the_first(name, monkeypatch):
    """In float16, because float32 has fewer candidates."""
    taken = []

    def last(kernel, candidates, *_):
        taken.append(len(candidates))
        return candidates[-1]

    monkeypatch.setattr(tiles, "fastest", last)
    assert_as_good_as_eager(getattr(gsm_kernels, name), CALLS[name](), torch.float16)
    assert taken and min(taken) > 1


def test_the_last_candidate_of_the_search_finds_the_same_slots(monkeypatch):
    monkeypatch.setattr(tiles, "fastest", lambda kernel, candidates, *_: candidates[-1])
    call = selection(ratio=1, k=5, entries=80, rows=66, heads=3, batch=1)
    assert_agrees(gsm_kernels.index_top_k, call, torch.float16)


@pytest.mark.gpu
def test_on_a_gpu_the_choice_is_kept_and_two_calls_agree_to_the_bit(monkeypatch, tmp_path):
    monkeypatch.setattr(tiles, "folder", lambda: tmp_path)
    monkeypatch.setattr(tiles, "_choices", {})
    call = {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in cast(
            hyper_connection(width=512, batch=4, rows=1024, like_a_model=True), torch.bfloat16
        ).items()
    }
    first = gsm_kernels.mhc_boundary(**call)
    assert list(tmp_path.iterdir()) and "is taken, after" in tiles.describe()[0]
    tiles._choices.clear()
    assert all(torch.equal(*pair) for pair in zip(first, gsm_kernels.mhc_boundary(**call), strict=True))
