"""The address of a run: what decides training decides the folder, and nothing else does."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from short_runs import TINY, composed

from gsm.config.address import address, address_of_all_seeds, decisive, differences, find
from gsm.config.check import ConfigError, parameters
from gsm.config.naming import name
from gsm.paths import ROOT

PLACES = ["data.path=/texts", "logs=/logs"]


def composed_with(*words: str) -> dict[str, Any]:
    return composed((*TINY, *PLACES, *words))


BASE = composed_with()
# Words that change the training, and words that do not.
DECIDES = """seed=1 model/writer=gated model.state_size=6 data.context=16 data.seed=7 data.documents=stream
optimizer.learning_rate=1e-4 optimizer=adamw global_batch=16 trainer.max_steps=31 trainer.precision=bf16-true
trainer.gradient_clip_val=null trainer.limit_val_batches=1 data.path=/other data.tokenizer=bpe
+callbacks.ema={_target_:lightning.pytorch.callbacks.EMAWeightAveraging}""".split()
MEANS_NOTHING = """
data.batch_size=2 trainer=ddp trainer.devices=2 data.cache_dir=/cache logs=/elsewhere name=other arm=other
jobs=2 ngrams=true sample=true logger=jsonl callbacks.latest.minutes=3 callbacks.progress=null
trainer.val_check_interval=3
trainer.log_every_n_steps=1 data.path=/disk2/texts trainer.gradient_clip_val=1 table=[val_loss] labels={gsm:GSM}
trainer.enable_progress_bar=true""".split()


@settings(deadline=None, max_examples=40)
@given(
    decides=some.lists(some.sampled_from(DECIDES), unique=True, max_size=3),
    others=some.lists(some.sampled_from(MEANS_NOTHING), unique=True, max_size=3),
)
def test_two_configurations_have_one_address_exactly_if_they_train_the_same(decides: list[str], others: list[str]):
    keys = {word.partition("=")[0] for word in decides}
    others = [word for word in others if word.partition("=")[0] not in keys]
    if any(word.startswith("+callbacks.") for word in decides):  # it may train by a validation
        others = [word for word in others if not word.startswith("trainer.val_check_interval=")]
    made, alone = composed_with(*decides, *others), composed_with(*decides)
    assert address(made) == address(alone)
    assert (address(made) == address(BASE)) is not bool(decides)
    assert made["folder"].endswith(f"-{address(made)}"), "its place names it"


@pytest.mark.parametrize("word", DECIDES)
def test_every_value_that_trains_counts_and_is_named(word: str):
    made, key = composed_with(word), word.lstrip("+").partition("=")[0].partition(".")[0].partition("/")[0]
    assert any(line.startswith(key) for line in differences(BASE, made)), differences(BASE, made)


@pytest.mark.parametrize("word", MEANS_NOTHING)
def test_what_only_watches_or_is_the_machines_has_no_part(word: str):
    assert not differences(BASE, composed_with(word))


def test_a_validation_counts_where_a_callback_may_train_by_it():
    stop = "+callbacks.stop={_target_:lightning.pytorch.callbacks.EarlyStopping,monitor:val/loss}"
    often = address(composed_with(stop, "trainer.val_check_interval=3"))
    assert often != address(composed_with(stop))


def test_fsdp_trains_the_same_unless_numbers_travel_in_another_precision():
    one = composed_with("optimizer=adamw")
    sharded = composed_with("trainer=fsdp", "trainer.devices=2")
    assert address(one) == address(sharded)
    assert address(composed_with("trainer=fsdp", "trainer.strategy.reduced=bfloat16")) != address(one)


def test_seeds_of_an_arm_have_the_same_settings():
    assert address_of_all_seeds(BASE) == address_of_all_seeds(composed_with("seed=3"))
    assert address_of_all_seeds(BASE) != address_of_all_seeds(composed_with("seed=3", "optimizer.weight_decay=0.5"))


def test_a_key_that_older_runs_did_not_have_moves_none_of_them():
    """The entry `absent` has the value that stands for a key that is not there."""
    newer = copy.deepcopy(BASE)
    newer["model"]["added"] = 3
    assert address(newer) != address(BASE)
    newer["address"] = {**newer["address"], "absent": {**newer["address"]["absent"], "model.added": 3}}
    assert address(newer) == address(BASE)
    newer["model"]["added"] = 4
    assert address(newer) != address(BASE)


def test_a_run_is_found_by_its_address_whatever_it_is_called(tmp_path: Path):
    words = ("data.path=/texts", f"logs={tmp_path}", "name=x")
    digits = address(composed((*TINY, *words)))
    assert find(tmp_path / "x", digits) is None
    (tmp_path / f"x/first-seed0-{digits}").mkdir(parents=True)
    again = composed((*TINY, *words, "arm=second"))
    assert Path(again["folder"]) == tmp_path / f"x/first-seed0-{digits}"
    assert again["logger"]["jsonl"]["path"] == f"{again['folder']}/metrics.jsonl", "all of its paths are there"


@pytest.mark.parametrize("word", ["folder=/x", "origin={run: x}"])
def test_what_follows_from_the_configuration_is_not_given(word: str):
    with pytest.raises(ConfigError, match=f"^{word.partition('=')[0]} "):
        composed_with(word)


def test_the_seed_of_a_run_is_no_setting_of_its_parents(tmp_path: Path):
    config = {**BASE, "origin": {"run": "1" * 8, "settings": "2" * 8, "step": None}, "start_from": str(tmp_path)}
    other = {**config, "origin": {**config["origin"], "run": "3" * 8}}
    assert address(config) != address(other) and address_of_all_seeds(config) == address_of_all_seeds(other)
    assert "start_from" not in decisive(config), "a path is no content"


def test_a_default_name_has_the_model_and_what_changes_training():
    rule = BASE["address"]
    words = [
        "seed=3",
        "optimizer.learning_rate=3e-3",
        "model/writer=gated",
        "trainer=ddp",
        "trainer.devices=2",
        "logger=jsonl",
    ]
    assert name("gsm", words, rule) == "gsm-writer_gated-optimizer.learning_rate_3e-3"
    assert name("gsm", ["model=gsm", "+callbacks.stop={_target_: a.B}"], rule) == "gsm-callbacks.stop_target_a.b"
    continued = ["start_from=/logs/default/gsm-seed0", "start_fresh=false", "trainer.max_steps=9"]
    assert name("gsm", continued, rule) == "gsm-trainer.max_steps_9-continues_gsm-seed0"
    origin = f"start_from=logs/default/gsm-{'a' * 90}-seed0"
    assert "max_steps_9" in name("gsm", [origin, "trainer.max_steps=9"], rule), "a long origin hides no other value"
    step = "start_from=logs/x/gsm-seed0/checkpoints/step_00000002"
    assert name("gsm", [step], rule) == "gsm-start_from_gsm-seed0-step_00000002"
    assert len(name("gsm", [f"model.very_long_key_{n}={n}" for n in range(20)], rule)) <= 80


def test_no_default_of_a_part_changes_unnoticed():
    """A key that a configuration leaves out has its part's default, which no address holds: another default would make
    other runs of old addresses. Where one has to change, name the key in the yaml, with the old value under `absent` in
    configs/train.yaml if old runs shall keep their addresses; then write `defaults()` into the file.
    """
    known = json.loads(DEFAULTS.read_text())
    assert defaults() == known


DEFAULTS = Path(__file__).with_name("defaults.json")


def defaults() -> dict[str, dict[str, str]]:
    """The defaults of everything that a yaml of the training part can build."""
    groups = [ROOT / "configs" / group for group in ("model", "data", "optimizer", "size")]
    text = "\n".join(file.read_text() for group in groups for file in sorted(group.rglob("*.yaml")))
    found = {}
    for target in sorted(set(re.findall(r"_target_: (gsm\.[\w.]+)", text))):
        taken = parameters(target) or {}
        found[target] = {
            name: re.sub(r" at 0x\w+", "", repr(one.default))
            for name, one in taken.items()
            if one.default is not one.empty
        }
    return found
