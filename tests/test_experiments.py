"""The experiments of `configs/experiment`: each composes and builds at every size, and compares what it says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hydra.utils import get_class
from omegaconf import OmegaConf
from small import mostly_slow

from gsm.config.address import differences
from gsm.config.compose import compose
from gsm.config.load import instantiate, instantiate_model
from gsm.evaluation.ruler import Ruler
from gsm.experiments.runs import Experiment
from gsm.paths import ROOT, variants
from gsm.training.optimizer import AdamW


@pytest.mark.parametrize("name", mostly_slow(variants("experiment"), "ablate_writer", "needle", "paper_long_context"))
@pytest.mark.parametrize(
    ("size", "arms"),
    [
        pytest.param(None, slice(-1, None), id="last arm"),
        pytest.param(None, slice(None), id="every arm", marks=pytest.mark.nightly),
        pytest.param("tiny", slice(-1, None), id="another size", marks=pytest.mark.nightly),
    ],
)
def test_every_experiment_composes_and_builds_at_any_size(name: str, size: str | None, arms: slice):
    """At the size that it is meant for, and at another, with all of its runs. Every configuration takes a second."""
    given = [f"experiment={name}", *([f"size={size}"] if size else [])]
    experiment = Experiment(compose(given), given)
    for arm in list(experiment.arms)[arms]:
        config = experiment.trial(arm, 0).config
        with torch.device("meta"):
            assert sum(p.numel() for p in instantiate_model(config).parameters())
        if "task" in config["data"]:
            instantiate(config["data"], "data").validation_set[0]


def test_the_sample_before_the_extension_is_outside_of_the_windows_behind_it():
    config: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "configs/experiment/paper_long_context.yaml"))
    runs = config["runs"]
    windows = runs["ppl"]["evaluate"]
    longest = windows["lengths"].rpartition(":")[2]
    assert runs["before"]["evaluate"]["outside"] == [windows["windows"], longest]


def test_the_papers_adaptations_take_the_optimizer_of_their_rates_at_any_size():
    given = compose(["experiment=paper_ablate_indexer", "size=nano"])
    assert get_class(given["optimizer"]["_target_"]) is AdamW, "its size has Muon"


def test_one_key_takes_rulers_own_texts_and_words_for_the_tuning_and_its_measurement():
    given = ["experiment=paper_cot", "size=nano", "recipe.ruler=ruler_original"]
    runs = Experiment(compose(given), given).trial("cot", 0).runs
    config: Any = runs["tune"].config
    assert isinstance(measure := runs["ruler"].measure, Ruler)
    asked = measure.adapted(cast(Any, SimpleNamespace(config=config, file="")))
    wanted = {"haystack": "PaulGrahamEssays.json", "keys": "wonderwords", "answers": "cot", "template": "ruler"}
    assert {name: config["data"][name] for name in wanted} == wanted
    assert {name: getattr(asked, name) for name in wanted} == wanted


@pytest.mark.parametrize("name", ["ablate_open_points", "ablate_open_points_recall"])
def test_open_points_are_compared_with_several_streams(name: str):
    """At nano the default had become a single stream, which is no reading of the paper."""
    experiment = Experiment(compose([f"experiment={name}"]), [f"experiment={name}"])
    kinds = [experiment.trial(arm, 0).config["model"]["residual"]["_target_"] for arm in experiment.chosen]
    assert [kind.rpartition(".")[2] for kind in kinds] == ["HyperConnection"] * 3 + ["TwoPassHyperConnection"]


def test_the_residual_ablation_compares_what_it_says():
    given = ["experiment=ablate_residual"]
    experiment = Experiment(compose(given), given)
    assert experiment.chosen == ["mhc", "mhc_two_pass", "plain", "plain_equal_time"] and experiment.seeds == [0, 1, 2]
    jobs = [experiment.trial(arm, 1) for arm in experiment.chosen]
    kinds = [job.config["model"]["residual"]["_target_"].rpartition(".")[2] for job in jobs]
    assert kinds == ["HyperConnection", "TwoPassHyperConnection", "Plain", "Plain"]
    assert jobs[3].config["trainer"]["max_steps"] > jobs[2].config["trainer"]["max_steps"]
    for job in jobs[1:3]:
        changes = differences(jobs[0].config, job.config)
        assert changes and all(change.startswith("model.") for change in changes), "nothing else differs"
