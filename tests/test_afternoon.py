"""`experiment=afternoon`, and `paper_main` at its size: what their comments count is what the cost model says."""

from __future__ import annotations

import pytest
import torch

from gsm.config.compose import compose
from gsm.config.load import instantiate_model
from gsm.costs.model import cost
from gsm.training.trainer import batches_a_step
from gsm_benchmarks.models import Model
from gsm_benchmarks.plan import kept
from gsm_kernels.device import triton_version

FLOPS, BYTES = 790e12, 3.0e12  # of an H100, in a second
GIVEN = ["experiment=afternoon"]


def trainings(arm: str) -> list[dict]:
    """The configurations of its two runs that train."""
    extend = compose(GIVEN)["runs"]["extend"]
    lines = [f"{name}={value}" for name, value in extend.items() if name != "after"]
    return [compose([*GIVEN, f"model={arm}", "runs=null", *more]) for more in ([], lines)]


def seconds(config: dict) -> float:
    """Of a run on an H100, at the roof."""
    with torch.device("meta"):
        counted = cost(instantiate_model(config))
    context, batch = config["data"]["context"], config["data"]["batch_size"]
    batches = batches_a_step(config, 1)
    times = config["trainer"]["max_steps"] * batches
    flops, moved = batch * counted.training_flops(context).total(), counted.training_bytes(context, batch)
    moved["optimizer"] //= batches
    return times * (flops / FLOPS + moved.total() / BYTES)


def test_at_half_of_the_roof_both_arms_train_for_an_hour_and_forty_minutes():
    train_gsm, extend_gsm, train_baseline, extend_baseline = (
        2 * seconds(config) for arm in ("gsm", "baseline") for config in trainings(arm)
    )
    told = [2679, 332, 2683, 334]  # in the table of the yaml
    assert [train_gsm, extend_gsm, train_baseline, extend_baseline] == pytest.approx(told, rel=0.01)
    assert 1.6 < (train_gsm + extend_gsm + train_baseline + extend_baseline) / 3600 < 1.75


@pytest.mark.parametrize("arm", ["gsm", "baseline"])
def test_the_main_training_at_size_tiny_takes_seconds_at_half_of_the_roof(arm: str):
    given = ["experiment=paper_main", "size=tiny", f"model={arm}", "runs=null"]
    assert 2 * seconds(compose(given)) == pytest.approx(21, abs=0.5), "in the comment of paper_main"
    longer = ["data=fineweb", "trainer.max_steps=34000"]
    config = compose([*given, *longer])
    assert 2 * seconds(config) / 60 == pytest.approx(15, abs=0.5)
    tokens = config["global_batch"] * config["data"]["context"] * config["trainer"]["max_steps"]
    assert 20 * 27.7e6 < tokens < config["data"]["max_tokens"]


def test_no_token_of_the_main_training_comes_twice_and_the_extension_takes_the_papers_steps():
    train, extend = trainings("gsm")
    sizes = [one["global_batch"] for one in (train, extend)]
    assert sizes[0] * train["data"]["context"] * train["trainer"]["max_steps"] < train["data"]["max_tokens"]
    assert (sizes[1] * extend["data"]["context"], extend["trainer"]["max_steps"]) == (2_097_152, 100)
    assert extend["data"]["context"] == 65536 == 16 * train["data"]["context"]
    assert train["data"]["max_tokens"] == extend["data"]["max_tokens"], "the same text, encoded once"


@pytest.mark.skipif(triton_version() is None, reason="needs Triton, whose operations say what they keep")
@pytest.mark.parametrize("arm", ["gsm", "baseline"])
def test_a_batch_leaves_a_third_of_80_gb_to_everything_else(arm: str):
    for config in trainings(arm):
        data = config["data"]
        assert kept(Model(arm, arm), "tiny", False, data["context"]).total(data["batch_size"] * data["context"]) < 53e9
