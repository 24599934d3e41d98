"""Numbers out of range are one sentence before anything is built: none trains uphill, or for ever, without a word."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

from gsm.config.check import RANGES, SIZES, ConfigError, check, flat
from gsm.config.compose import compose
from gsm.config.load import instantiate, instantiate_model
from gsm.experiments import trainers
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
MAY_BE_NEGATIVE = {"model.residual.gate", "model.writer.bias", "trainer.num_sanity_val_steps"}


def numbers(config: dict[str, Any]) -> dict[str, float]:
    elsewhere = ("choices", "size", "recipe")  # these are refused where they are used
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
    check({part: config[part]}, {part: config[part]}, [])
    if part == "model":
        return instantiate_model(config)
    if part == "callbacks":
        return [instantiate(node, f"callbacks.{name}") for name, node in config["callbacks"].items() if node]
    if part == "trainer":
        return instantiate(trainers.settings(config), "trainer")
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


def test_no_number_of_any_yaml_may_be_infinite_or_none_at_all(configs):
    for key, config in configs.items():
        for value in (math.nan, math.inf, -math.inf):
            part = key.split(".")[0]
            with pytest.raises(ConfigError, match=f"^{key} is {value}, but has to be a finite number|takes int"):
                check({part: changed(config, key, value)[part]}, {part: config[part]}, [])


def test_no_number_of_any_yaml_may_be_below_what_it_means(configs):
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
    assert set(accepted) <= MAY_BE_NEGATIVE | {"model.geometry.decoder_full"}, "and that one is the baseline's alone"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.gradient_clip_val=-1", "trainer.gradient_clip_val is -1, but has to be 0 or more"),
        ("model.indexer_weight=-1", "model.indexer_weight is -1, but has to be 0 or more"),
        ("callbacks.latest.minutes=nan", "callbacks.latest.minutes is nan, but has to be a finite number"),
        ("trainer.max_steps=0", "trainer.max_steps is 0, but has to be 1 or more"),
        ("seed=-1", "seed is -1, but has to be from 0 to 4.29497e"),
        ("jobs=0", "jobs is 0, but has to be 1 or more"),
        ("global_batch=0", "global_batch is 0, but has to be 1 or more"),
        ("trainer.val_check_interval=0", "trainer.val_check_interval is 0, but has to be 1 or more"),
        ("trainer.context=0", "trainer.context is 0, but has to be 1 or more"),
        ("trainer.devices=0", "trainer.devices is 0, but has to be from 1 to 1024"),
        ("size.rope_base=0", "size.rope_base is 0, but has to be 1 or more"),
    ],
)
def test_common_slips_are_named_with_what_is_meant(override, said):
    with pytest.raises(ConfigError, match=said):
        compose(["size=pico", override])


def test_what_is_monitored_is_what_validations_find(tmp_path):
    with pytest.raises(ValueError, match="callbacks.best.monitor is 'nothing', but has to be what validations find"):
        Best(tmp_path / "best.ckpt", "nothing")


def test_every_range_is_of_a_key_that_exists(configs):
    found = {key for config in configs.values() for key in flat(config)}  # also what has no number by default
    keys = {key.rpartition(".")[2] if key.startswith(SIZES) else key for key in found}
    keys |= {key for key in flat(compose(["size=pico", "trainer=context"])) if key.startswith("trainer.")}
    assert RANGES.keys() <= keys
