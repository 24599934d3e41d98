"""`benchmark=paper`: the paper's settings, and its numbers beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gsm.config.load import build_model
from gsm.costs.model import cost, paper_cache, paper_decode
from gsm.files import write_json
from gsm.models.baseline import Baseline
from gsm.models.gsm import GSM
from gsm_benchmarks import inference, paper, training
from gsm_benchmarks.results import read

FACTS = {"device": "a CPU", "threads": 1, "versions": {"torch": "2"}, "sources": "s", "commit": "c", "command": "x"}


@pytest.fixture
def measured(monkeypatch) -> dict[str, dict[str, Any]]:
    """The settings of the two benchmarks; they find GSM twice as fast."""
    asked = {}

    def train(**given: Any) -> None:
        asked["training"] = given
        about = {"size": given["size"], "batch_size": 4, "recompute": True, "peak_gib": None, "devices": 1}
        rows = {
            name: {**FACTS, **about, "model": name, "ms": {"median": ms}, "tokens_per_second": 1e3 / ms}
            for name, ms in (("gsm", 2000.0), ("baseline", 4000.0))
        }
        write_json(Path(given["output"]), {**FACTS, "rows": rows})

    def serve(**given: Any) -> None:
        asked["inference"] = given
        protocol = {"size": given["size"], "text": given["text"], "batch": 1, "steps": 64, "dtype": "float32"}
        rows = {}
        for name, ms in (("gsm", 1.0), ("baseline", 2.0)):
            part = {"ms": {"median": ms}, "processor_ms": {"median": 3 * ms}, "tokens_per_second": 1e3 / ms}
            about = {
                "model": name,
                "tokens": 512,
                "kind": "read",
                "protocol": protocol,
                "cache": {"bytes": int(ms) << 20, "parts": {"encoder_bank": 1 << 20, "shared_state": int(ms) << 10}},
                "runs": {"warm_up": 2, "runs": int(4 - ms)},
            }
            rows[name] = {**FACTS, **about, "prefill": part, "decode": part}
        write_json(Path(given["output"]), {**FACTS, "rows": rows})

    monkeypatch.setattr(training, "run", train)
    monkeypatch.setattr(inference, "run", serve)
    return asked


def test_the_settings_are_the_papers_and_its_numbers_stand_beside_ours(measured, tmp_path: Path):
    path = paper.run(size="1p5b", lengths=[512], device="cpu", output=str(tmp_path / "a.json"))
    steps, requests = measured["training"], measured["inference"]
    assert (steps["batch_size"], steps["warm_up"], steps["steps"]) == (4, 5, 12)
    assert "context" not in steps and steps["recompute"] is True, "the size's own context, which is 4,096 at 1p5b"
    assert (requests["batch_size"], requests["warm_up"], requests["runs"], requests["steps"]) == (1, 2, 3, 64)
    assert requests["lengths"] == [512]
    assert requests["seconds"] is None, "nothing cuts the runs"
    text = path.with_suffix(".md").read_text()
    assert "| s a step, 1 device | 4 | 2 | 0.5 |  | 2.578 | 2.462 | 0.955 |" in text
    assert "| tokens/s, 1 device (paper's x 1/8) | 0.25 | 0.5 | 2 |  | 6,354 | 6,654 | 1.047 |" in text
    assert "| 512 tokens (2 of 3 runs) | 500 | 1,000 | 2 | 2 |  |  | above 1 |" in text
    assert read(path)["rows"]["cache, 512 tokens (2 of 3 runs)"]["ratio"] == 0.5


def test_the_equations_stand_beside_what_was_counted(measured, tmp_path: Path):
    path = paper.run(size="pico", lengths=[512], device="cpu", output=str(tmp_path / "a.json"))
    gsm, baseline = (build_model(name, "pico") for name in ("gsm", "baseline"))
    assert isinstance(gsm, GSM) and isinstance(baseline, Baseline)
    rows = {row["model"]: row for row in read(path)["equations"]}
    assert rows["gsm"]["attention"][0] == paper_decode(gsm, 512)
    parts = cost(baseline).decode_flops(511)
    assert rows["baseline"]["attention"][1] == parts["decoder/attention"] + parts["decoder/index scores"]
    assert rows["baseline"]["entries"] == [paper_cache(baseline, 576, torch.float32) / 1024, 2.0], (
        "of the decoder alone"
    )
    pytest.importorskip("matplotlib")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_the_papers_numbers_stand_at_its_size_alone(measured, tmp_path: Path):
    path = paper.run(device="cpu", output=str(tmp_path / "a.json"))
    assert measured["inference"]["lengths"] == [256 << n for n in range(9)] and measured["training"]["size"] == "nano"
    assert "2.578" not in path.with_suffix(".md").read_text()


def test_other_models_than_gsm_and_the_baseline_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="^models .*yoco"):
        paper.run(models=["gsm", "yoco"], output=str(tmp_path / "a.json"))
