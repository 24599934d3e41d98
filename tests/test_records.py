"""Records: what is measured is kept part by part, gone on from, and never mixed with what was measured otherwise."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gsm.config.check import ConfigError
from gsm.evaluation.records import Measured, by_arm, mean, minus, over_arms, pivot, points, read, silent


def squares(numbers: range, file: Path | None, progress: Any = silent, **settings: Any) -> tuple[Measured, list[int]]:
    """The squares of numbers, and the numbers that were computed now."""
    found, computed = Measured.begun(file, {"of": "squares", **settings}), []

    def compute(part: dict[str, int]) -> list[dict[str, Any]]:
        computed.append(part["number"])
        return [{"quantity": "square", "value": part["number"] ** 2, "weight": 1}, {"quantity": "n", "value": 1}]

    found.fill([{"number": number} for number in numbers], compute, progress)
    return found, computed


def interrupted(parts: list[Any], count: int, note: str) -> Iterator[Any]:
    yield from parts[:2]
    raise KeyboardInterrupt


@pytest.mark.parametrize(("cut", "parts"), [(0, 2), (1, 1), (100, 1), (150, 0)])
def test_an_interrupted_measure_goes_on_after_its_last_whole_part(tmp_path: Path, cut: int, parts: int):
    file = tmp_path / "a.jsonl"
    with pytest.raises(KeyboardInterrupt):
        squares(range(4), file, interrupted)
    file.write_bytes(file.read_bytes()[: -cut or None])  # a process that was killed while it wrote
    found, computed = squares(range(4), file)
    assert computed == list(range(parts, 4))
    whole, _ = squares(range(4), tmp_path / "b.jsonl")
    assert found.records == whole.records == read(file)[-1].records
    assert file.read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_other_settings_have_records_of_their_own_in_the_same_file(tmp_path: Path):
    file = tmp_path / "a.jsonl"
    squares(range(2), file)
    _, computed = squares(range(2), file, digits=(1, 2))
    assert computed == [0, 1] and read(file)[-1].settings == {"of": "squares", "digits": [1, 2]}
    found, computed = squares(range(3), file)
    assert computed == [2] and len(found.records) == 6
    assert [one.settings for one in read(file)] == [{"of": "squares", "digits": [1, 2]}, {"of": "squares"}]
    found, computed = squares(range(1, 2), file)
    assert not computed and [record["value"] for record in found.where(quantity="square")] == [1]


def test_a_measure_that_fails_leaves_its_file_as_it_was(tmp_path: Path):
    squares(range(2), tmp_path / "a.jsonl")
    found = Measured.begun(tmp_path / "a.jsonl", {"of": "squares"})
    before = (tmp_path / "a.jsonl").read_bytes()
    with pytest.raises(ZeroDivisionError):
        found.fill([{"number": 5}], lambda part: [{"value": 1 / 0}])
    assert (tmp_path / "a.jsonl").read_bytes() == before


@pytest.mark.parametrize("settings", [{}, {"digits": 1}])
def test_two_measures_of_one_file_wait_for_each_other(tmp_path: Path, settings: dict[str, int]):
    file = tmp_path / "a.jsonl"
    other = threading.Thread(target=squares, args=(range(4), file), kwargs=settings)

    def while_the_other_begins(parts: list[Any], count: int, note: str) -> Iterator[Any]:
        for number, part in enumerate(parts):
            if number == 1:
                other.start()
                other.join(0.2)
            yield part

    squares(range(4), file, while_the_other_begins)
    other.join()
    assert [len(one.records) for one in read(file)] == [8] * (1 + len(settings)), "each part once, below its settings"


def test_a_part_that_is_named_twice_counts_once(tmp_path: Path):
    found, computed = Measured.begun(tmp_path / "a.jsonl", {}), []
    found.fill([{"number": 1}, {"number": 1}], lambda part: [{"value": len(computed) or computed.append(part) or 0}])
    assert len(found.records) == len(computed) == 1


@pytest.mark.parametrize("line", ["x", "[1]", '{"value": 1'])
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str):
    squares(range(1), tmp_path / "a.jsonl")
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write(f"{line}\n\n")
    with pytest.raises(ConfigError, match=r"a\.jsonl, line \d"):
        read(tmp_path / "a.jsonl")


@pytest.mark.parametrize("text", ["x", '{"value": 1}\n', '{"value": 1}\n\n'])
def test_the_file_of_another_program_stays_as_it_is(tmp_path: Path, text: str):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 1"):
        squares(range(1), tmp_path / "a.jsonl")
    assert (tmp_path / "a.jsonl").read_text() == text


def test_the_lines_are_those_that_other_readers_read(tmp_path: Path):
    pandas = pytest.importorskip("pandas")
    squares(range(3), tmp_path / "a.jsonl")
    frame = pandas.read_json(tmp_path / "a.jsonl", lines=True)
    assert frame[frame.quantity == "square"].value.tolist() == [0, 1, 4]


def test_without_a_file_nothing_is_written(tmp_path: Path):
    found, _ = squares(range(1), None, pair=(1, 2))
    assert found.settings == {"of": "squares", "pair": [1, 2]} and not any(tmp_path.iterdir())


def run(arm: str, seed: int, right: list[int], weight: int = 1, experiment: str = "e") -> Measured:
    """A run with a question for each number, of two tasks in turn."""
    records = [
        {"task": "xy"[n % 2], "question": n, "quantity": "right", "value": value, "weight": weight}
        for n, value in enumerate(right)
    ]
    return Measured({}, {"experiment": experiment, "arm": arm, "seed": seed}, records)


def test_a_mean_weighs_every_thing_alike_or_every_stratum():
    records = [*run("a", 0, [1, 0, 1]).records, {"task": "y", "value": 6, "weight": 3}]
    assert mean(records) == pytest.approx((1 + 0 + 1 + 6) / (1 + 1 + 1 + 3))
    assert mean(records, ["task"]) == pytest.approx(((1 + 1) / 2 + (0 + 6) / 4) / 2)
    assert mean([]) is None


def test_arms_stand_side_by_side_over_their_seeds():
    runs = [run("a", 0, [0, 1]), run("b", 0, [1, 1]), run("a", 1, [1, 1])]
    arms = by_arm([*runs, runs[0]])
    assert [len(seeds) for seeds in arms.values()] == [3, 1], "a second run of a seed counts too"
    assert list(by_arm([runs[0], run("b", 0, [1], experiment="f")])) == ["e/a", "f/b"]
    grid = pivot(
        "x", by_arm(runs), {"X": {"task": "x"}, "Z": {"task": "z"}}, over_arms(1, 100), ["theirs"], {"X": ["9.00"]}
    )
    assert grid == [["x", "a", "b", "theirs"], ["X", "50.0 +- 70.7", "100.0", "9.00"], ["Z", "-", "-", "-"]]
    assert points(by_arm(runs), "task", 100) == {
        "a": [{"x": 0, "y": 100}, {"x": 100, "y": 100}],
        "b": [{"x": 100, "y": 100}],
    }


def test_a_difference_is_over_the_seeds_and_units_of_both():
    arms = by_arm([run("a", 0, [0, 0, 1]), run("b", 0, [1, 1, 1]), run("b", 1, [0, 0, 0])])
    (grid,) = minus("minus ", arms, {"all": {}, "z": {"task": "z"}}, ["question"])
    assert grid[0] == ["minus a, with 95 % interval", "b"] and grid[1][1].startswith("+66.67 [") and grid[2][1] == "-"
    assert minus("", by_arm([run("a", 0, [1])]), {"all": {}}, ["question"]) == []
    assert minus("", by_arm([run("a", 0, [1]), run("b", 1, [1])]), {"all": {}}, ["question"])[0][1] == ["all", "-"]
    for strata in ([], ["task"]):
        for fewer, more in (("a", "b"), ("b", "a")):
            arms = by_arm(sorted([run(fewer, 0, [1]), run(more, 0, [1, 1, 1])], key=lambda one: one.run["arm"]))
            with pytest.raises(ConfigError, match="question"):
                minus("", arms, {"all": {}}, ["question"], strata)
