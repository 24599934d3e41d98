"""The benchmark of data: what it counts, and that its table is made from its file alone. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_text

from gsm.data.corpus import Corpus
from gsm_benchmarks import data


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small text in place of the standard library."""
    (tmp_path / "text").mkdir()
    tiny_text.write(tmp_path / "text")
    monkeypatch.setattr(data, "standard_library", lambda: Corpus(tmp_path / "text"))
    return tmp_path


def test_every_source_is_counted_in_the_tokens_that_it_made(small: Path) -> None:
    pytest.importorskip("pyarrow", reason="the extra `data` is not installed")
    path = data.run(output=str(small / "a.json"), size="pico", tokens=5000, rounds=2)
    rows = json.loads(path.read_text())["rows"]
    assert rows["text"]["tokens"] == rows["parquet"]["tokens"] == 5000
    assert rows["cached"]["tokens"] == (5000 - 1) // 96 // 4 * 4 * 96, "whole batches of whole sequences"
    for row in rows.values():
        assert len(row["rates"]) == 2 and min(row["rates"]) <= row["tokens_per_second"] <= max(row["rates"])
    text = path.with_suffix(".md").read_text()
    assert "Need: 6,654 tokens/s" in text and "| cached |" in text
    path.with_suffix(".md").unlink()
    data.run(results=str(path))
    assert path.with_suffix(".md").read_text() == text


def test_an_unknown_source_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sources \['disk'\].*give some of text, parquet, cached, and 1 or more"):
        data.run(sources=["disk"])
