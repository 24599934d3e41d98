"""The projection: what is drawn and said is what the cost model computes, and crossings are where they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gsm.config.load import build_model
from gsm.costs.model import cost
from gsm_benchmarks import projection
from gsm_benchmarks.timing import Ceilings

LENGTHS = [64, 256, 1024]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("projection") / "a.json"
    models = ["gsm", "baseline", "transformer"]
    return projection.run(output=str(output), models=models, size="nano", lengths=LENGTHS, chunk=200)


def test_rows_are_the_cost_models(path: Path):
    rows, model = json.loads(path.read_text())["rows"], cost(build_model("transformer", "nano"))
    assert len(rows) == 3 * len(LENGTHS)
    row = rows["transformer nano, 256"]
    assert row["prefill_flops"] == sum(model.forward_flops(*call).total() for call in ((200, 1 - 56, 0), (56, 1, 200)))
    assert row["decode_bytes"] == model.decode_bytes(256).total()
    assert row["cache_bytes"] == model.cache_bytes(256).total()


def test_a_crossing_is_where_one_stops_being_cheaper(path: Path):
    crossings = json.loads(path.read_text())["crossings"]["transformer"]
    gsm, transformer = (cost(build_model(name, "nano")) for name in ("gsm", "transformer"))
    ((first, last),) = crossings["decode bytes"]
    assert last == max(LENGTHS)
    assert gsm.decode_bytes(first).total() < transformer.decode_bytes(first).total()
    assert gsm.decode_bytes(first - 1).total() >= transformer.decode_bytes(first - 1).total()


def test_ranges_are_found_by_bisection():
    assert projection.below(lambda n: 1000, lambda n: 3 * n, 5000) == [(334, 5000)]
    assert projection.below(lambda n: n, lambda n: 777, 5000) == [(1, 776)]
    assert projection.below(lambda n: abs(n - 1500), lambda n: 1000, 5000) == [(501, 2499)]
    assert projection.below(lambda n: 1000, lambda n: abs(n - 1500), 5000) == [(1, 499), (2501, 5000)]
    assert projection.below(lambda n: n, lambda n: n, 5000) == []


def test_the_tables_and_the_picture_are_made_from_the_file_alone(path: Path, monkeypatch: pytest.MonkeyPatch):
    text = path.with_suffix(".md").read_text()
    assert "nothing measured" in text and "| gsm needs less than | prefill FLOPs |" in text
    assert "| gsm | 1,024 |" in text and "the paper's terms" in text
    pytest.importorskip("matplotlib")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    path.with_suffix(".md").unlink()
    monkeypatch.setattr(projection, "known_cost", None)
    projection.run(results=str(path))
    assert path.with_suffix(".md").read_text() == text


def test_impossible_lengths_are_refused():
    with pytest.raises(ValueError, match=r"lengths \[0\], chunk 4096: give one or more, of 1 or more"):
        projection.run(models=["gsm"], lengths=[0])


def test_rates_are_fitted_to_what_was_measured():
    roof = Ceilings(2e9, 5e8, "float32")
    work = [(10**9, 10**8), (4 * 10**9, 10**8), (10**7, 10**8), (10**7, 4 * 10**8), (10**9, 10**9)]
    points = [(*one, roof.floor(*one) / 1e3) for one in work]
    assert projection.fitted(points)[:2] == pytest.approx(roof[:2])
    slow = [*points, (10**9, 10**8, 100.0)]
    assert projection.fitted(slow)[:2] == pytest.approx(roof[:2]), "one slow point moves nothing"


def test_measured_points_are_drawn_over_the_curves():
    pytest.importorskip("matplotlib")
    model = cost(build_model("gsm", "nano"))
    rows = [
        {"model": "gsm", "size": "nano", "tokens": tokens, "prefill_seconds": seconds, "decode_seconds": None}
        for tokens in LENGTHS
        for seconds in [model.prefill_flops(tokens).total() / 2e10]
    ]
    assert projection.against(rows).startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no row holds prefill_seconds or decode_seconds"):
        projection.against([{"model": "gsm", "size": "nano", "tokens": 256}])
