"""The models that a benchmark measures: variants, changed models and trained ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from stored import store

from gsm.config.compose import compose
from gsm.config.load import build_model, load_model
from gsm.errors import ConfigError
from gsm.models.baseline import Baseline
from gsm.models.gsm import GSM
from gsm_benchmarks import models
from gsm_benchmarks.models import Model

POOL = {"name": "no_pool", "overrides": ["model=baseline", "model.candidate_pool=false"]}


def trained(folder: Path, *overrides: str, seed: int = 7) -> Path:
    """The folder of a run of size pico that has ended."""
    model = build_model("gsm", "pico", overrides, seed=seed)
    config = compose(["model=gsm", "size=pico", *overrides])
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    store(folder, hyper_parameters={"config": config}, state_dict=state)
    return folder


def test_a_name_is_a_variant_and_a_mapping_may_be_another_one():
    plain, wide, pool = models.read(["gsm", {"name": "wide", "overrides": ["model.state_size=20"]}, POOL])
    assert plain == Model("gsm", "gsm") and plain.given == {}
    assert wide.given == {"variant": "gsm", "overrides": ["model.state_size=20"]}
    assert pool.given == {"variant": "baseline", "overrides": ["model.candidate_pool=false"]}
    first, second = wide.build("pico"), pool.build("pico")
    assert isinstance(first, GSM) and first.state_size == 20
    assert isinstance(second, Baseline) and models.known_cost(pool, "pico") is not models.known_cost(plain, "pico")
    assert pool.config("pico")["model"]["candidate_pool"] is False


def test_what_a_run_has_trained_is_measured_with_its_weights_values_and_size(tmp_path: Path):
    run = trained(tmp_path / "a/gsm-seed0-1f3a9c07", "model.state_size=20")
    (model,) = models.read([{"name": "gsm", "checkpoint": str(tmp_path / "a")}])
    built = model.build("pico", ["model.recompute=true"])
    assert isinstance(built, GSM) and built.state_size == 20 and built.encoder.recompute and built.training
    for name, value in load_model(run).state_dict().items():
        assert torch.equal(built.state_dict()[name], value), name
    assert models.one_size([model, Model("baseline", "baseline")], None, "nano") == "pico"
    (changed,) = models.read([{"name": "b", "checkpoint": str(run), "overrides": ["model.state_size=30"]}])
    other = changed.build("pico")
    assert isinstance(other, GSM) and other.state_size == 30 and changed.given != model.given


def test_a_size_that_is_not_the_checkpoint_s_is_refused(tmp_path: Path):
    known = models.read([{"name": "a", "checkpoint": str(trained(tmp_path))}])
    with pytest.raises(ConfigError, match="^size .*nano"):
        models.one_size(known, "nano", "nano")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (3, r"models\[0\] .*got 3"),
        ("gms", "model/gms"),
        ({"nam": "gsm"}, r"models\[0\].nam"),
        ({"overrides": []}, r"models\[0\] "),
        ({"name": "a b"}, r"models\[0\] .*'a b'"),
        ({"name": "a", "overrides": "model.state_size=2"}, r"models\[0\] .*state_size"),
        ({"name": "a", "overrides": ["model.state_sise=2"]}, "model.state_sise"),
        ({"name": "a", "overrides": ["size=tiny"]}, r"models\[0\].overrides .*size=tiny"),
        ({"name": "gsm", "overrides": ["model=baseline"]}, r"models\[0\].name .*baseline.*got gsm"),
        ({"name": "a", "checkpoint": 3}, r"models\[0\] "),
    ],
)
def test_an_entry_that_is_none_is_refused(entry: Any, said: str):
    with pytest.raises(ConfigError, match=said):
        models.read([entry])
    with pytest.raises(ConfigError, match="^models .*gsm, gsm"):
        models.read(["gsm", {"name": "gsm", "overrides": ["model.state_size=20"]}])


def test_a_checkpoint_is_one_run_of_the_model_that_its_name_says(tmp_path: Path):
    run = trained(tmp_path / "gsm-seed0-1f3a9c07")
    with pytest.raises(ConfigError, match=r"models\[0\].name .* gsm,.*got baseline"):
        models.read([{"name": "baseline", "checkpoint": str(run)}])
    trained(tmp_path / "gsm-seed1-77ab03e1")
    with pytest.raises(ConfigError, match=r"models\[0\].checkpoint .*seed0-.*, .*seed1-"):
        models.read([{"name": "a", "checkpoint": str(tmp_path)}])
    for word in ("model/writer=gated", "data.context=32", "model=baseline", "~model.state_size"):
        with pytest.raises(ConfigError, match=re.escape(word)):
            load_model(run, overrides=[word])
