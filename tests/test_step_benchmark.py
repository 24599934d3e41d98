"""`benchmark=step`: our models and transformers' Llama take turns."""

from __future__ import annotations

import pytest

from gsm.config.compose import compose
from gsm.config.load import instantiate
from gsm_benchmarks import step
from gsm_benchmarks.results import read

pytest.importorskip("transformers")


def test_every_model_has_a_row_and_llama_the_parameters_of_the_first(tmp_path):
    output = tmp_path / "a.json"
    quick = {"device": "cpu", "size": "pico", "batch_size": 1, "context": 24, "rounds": 1}
    step.run(**quick, models=["gsm", "transformer"], output=str(output))
    rows = read(output)["rows"].values()
    assert [(row["model"], row["dtype"]) for row in rows] == [
        (name, dtype) for dtype in ("float32", "bfloat16") for name in ("gsm", "transformer", "llama")
    ]
    for row in rows:
        for part in ("step", "decode"):
            assert row[part]["ms"]["median"] > 0 and row[part]["ratio"]["laps"] == 1
            assert row["model"] != "llama" or row[part]["ratio"]["median"] == 1
    page = output.with_suffix(".md").read_text()
    assert "pico, float32" in page and "pico, bfloat16" in page


def test_llama_has_the_number_of_parameters_up_to_a_channel_of_its_feed_forwards():
    geometry = instantiate(compose(["size=nano"])["size"], "size")
    made = sum(p.numel() for p in step.llama(geometry, 2_100_000).parameters())
    assert abs(made - 2_100_000) <= 3 * geometry.depth * geometry.dim / 2
    with pytest.raises(ValueError, match="parameters"):
        step.llama(geometry, 1000)
