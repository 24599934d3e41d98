"""Numbers out of range are one sentence before anything is built: none trains uphill, or for ever, without a word."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from gsm.config.check import ConfigError, check, flat
from gsm.config.compose import compose
from gsm.config.load import instantiate, instantiate_model
from gsm.training import trainer as trainers
from gsm.training.callbacks.checkpoints import Best

# One of every part that has numbers of its own.
CHOICES = (
    ["data=needle"],
    ["model=baseline", "data=stdlib"],
    ["model=transformer", "data=recall"],
    ["model/feed_forward=moe", "model/residual=mhc", "model/writer=delta", "data=state_tracking"],
    ["model=gated_delta_net", "data=ruler", "optimizer=muon"],
    ["model=delta_product", "data=needle"],
    ["model=gsa", "data=recall"],
    ["model=raven", "data=needle"],
    ["model=nsa", "data=needle"],
    ["model=yoco_plus", "data=needle"],
    ["model/writer=multi_slot", "model/retriever=random_topk", "data=needle"],
    ["model/writer=gated", "model/residual=mhc", "data=needle"],
)
# Below 0, and yet sound: no limit, or the start of a number that is learned.
MAY_BE_NEGATIVE = {
    "model.residual.gate",
    "model.writer.bias",
    "model.geometry.decoder_full",
    "trainer.num_sanity_val_steps",
}


def numbers(config: dict[str, Any]) -> dict[str, float]:
    elsewhere = ("choices", "size", "recipe", "global_batch")  # these are refused where they are used
    found = {key: value for key, value in flat(config).items() if key.split(".")[0] not in elsewhere}
    return {k: v for k, v in found.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def changed(config: dict[str, Any], key: str, value: float) -> dict[str, Any]:
    config = copy.deepcopy(config)
    *above, last = key.split(".")
    node = config
    for name in above:
        node = node[name]
    node[last] = value
    return config


def build(config: dict[str, Any], part: str) -> object:
    """What is made of this part of a configuration, checked first, as before a run."""
    check({part: config[part]}, {part: config[part]})
    if part == "model":
        return instantiate_model(config)
    if part == "callbacks":
        return [instantiate(node, f"callbacks.{name}") for name, node in config["callbacks"].items() if node]
    if part == "trainer":
        return instantiate(trainers.trainer_arguments(config), "trainer")
    if not isinstance(config[part], dict):
        return config[part]
    return instantiate(config[part], part)


@pytest.fixture(scope="module")
def configs() -> dict[str, dict[str, Any]]:
    """A configuration for every key that holds a number in one of them."""
    found: dict[str, dict[str, Any]] = {}
    for choice in CHOICES:
        config = compose(["size=pico", "trainer=cpu", *choice])
        found = {**dict.fromkeys(numbers(config), config), **found}
    return found


def test_no_number_of_any_yaml_may_be_below_what_it_means(configs: dict[str, dict[str, Any]]):
    """Built as before a run, with -1 in its place; those are named that mean something there."""
    accepted = []
    for key, config in configs.items():
        part = key.split(".")[0]
        if part == "data" and "tokenizer" in config["data"]:
            continue  # of text, which would be looked for: its numbers are tested with it
        try:
            build(changed(config, key, -1), part)
        except ConfigError as error:
            assert "\n" not in str(error)
        else:
            accepted.append(key)
    assert set(accepted) <= MAY_BE_NEGATIVE


OUTSIDE = (
    "model.indexer_weight=-1",
    "size.rope_base=0",
    "size.encoder_layers=2000",
    "model/writer=multi_slot model.writer.slots=0",
    "data=recall data.task.power=-1",
    "data=needle data.batch_size=0",
    "model/residual=mhc model.residual.sinkhorn_rounds=1000000000000",
)


@pytest.mark.parametrize("words", OUTSIDE)
def test_a_number_out_of_range_is_refused_with_its_path_before_an_experiment_trains(words: str):
    with pytest.raises(ConfigError) as error:
        trainers.refuse_early(compose(["size=pico", "data=needle", *words.split()]))
    assert str(error.value).startswith(words.rpartition(" ")[2].partition("=")[0])


@pytest.mark.parametrize(("monitor", "mode"), [("nothing", None), ("val/f1", None), ("val/loss", "low")])
def test_the_direction_of_a_monitored_metric_is_known_or_given(tmp_path, monitor, mode):
    with pytest.raises(ConfigError, match="mode"):
        Best(tmp_path, monitor, mode)
