"""Bad values for every key."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from short_runs import TINY

from adversary import inside
from adversary.outcome import Case, Wrong
from adversary.world import World
from gsm.experiments import SEVERAL
from gsm.models.geometry import Geometry

SIZES = [word for word in TINY if word.startswith("size.")]
TRAINS = (
    "trainer=cpu trainer.max_steps=1 trainer.val_check_interval=1 ngrams=false sample=false data.batch_size=2".split()
)
TEXT = "data=folder data.tokenizer=bytes data.validation_sequences=2".split()
SYNTHETIC = ["size.context=64", "data.validation_sequences=2"]
# Choices that together have every group of parts in them.
CHOICES: tuple[list[str], ...] = (
    ["model/residual=plain", *TEXT],
    ["model=baseline", "model/residual=plain", *TEXT],
    ["model=transformer", *TEXT],
    ["model/feed_forward=moe", "model/residual=mhc", "model/writer=delta", *TEXT],
    ["model=gated_delta_net", "optimizer=muon", *TEXT],
    ["model=delta_product", *TEXT],
    ["model/writer=multi_slot", "model/retriever=random_topk", "model/residual=plain", *TEXT],
    ["model/writer=gated", "model/retriever=separate_indexer", "model/residual=plain", *TEXT],
    ["model/residual=plain", "data=needle", *SYNTHETIC],
    ["model/residual=plain", "data=recall", *SYNTHETIC],
    ["model/residual=plain", "data=state_tracking", *SYNTHETIC],
)
# test_adversary.py has bad places.
PLACES = {"name", "arm", "logs", "folder", "data.path", "data.cache_dir", "start_from"}
# Of several runs, or no value to type.
LEFT_OUT = ("choices.", "model.geometry.", "logger.", *SEVERAL, "runs", "jobs", "table")
UNTYPED = ("_target_", "_partial_", "path", "save_dir")
BAD_ANYWHERE = "null '' [] [1,2] {a:1} true abc größer '\u202e\u0000x' -1 0 nan 1.5 -0.0 [null] 1e400".split()
BAD_NUMBERS = "-1 0 -0.5 nan inf -inf 1e30 1e-30 0.5 -1e9 2 3 7 0x10 1_000 1e3".split()
BAD_LISTS = "[] [0] [-1] null abc [nan] 5 [1,1] [3,2,1] [999] [[1]] ['']".split()
BAD_WORDS = ["''", "null", "3", "[]", "größer", "'\u0000'", "x" * 5000, "true", "../x", "."]


def case(draw: random.Random, world: World) -> Case:
    """One or two keys with bad values; what is accepted has to be buildable and, of some, to train a step."""
    choice = draw.choice(CHOICES)
    given = [*SIZES, *TRAINS, *choice]
    known = _keys(tuple(given), str(world.home / "text"))
    keys = draw.sample(sorted(known), draw.choice([1, 1, 1, 1, 2]))
    bad = [f"{key}={_value(draw, known[key])}" for key in keys]
    trains = draw.random() < 0.25
    return _tried(world, given, bad, keys, trains)


@functools.cache
def _keys(given: tuple[str, ...], text: str) -> dict[str, Any]:
    """Every key of a composed configuration that has a value, with its value."""
    config = inside.compose([*given, *([f"data.path={text}"] if "data=folder" in given else [])])
    return {
        key: value
        for key, value in _flat(config, "").items()
        if not (key in PLACES or key.startswith(LEFT_OUT) or key.endswith(UNTYPED))
    }


def _flat(value: Mapping[str, Any], above: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, below in value.items():
        found |= _flat(below, f"{above}{key}.") if isinstance(below, Mapping) and below else {f"{above}{key}": below}
    return found


def _value(draw: random.Random, good: Any) -> str:
    """A bad one, by the type of the good one; now and then of any type."""
    if draw.random() < 0.35:
        return draw.choice(BAD_ANYWHERE)
    if isinstance(good, bool):
        return draw.choice(["2", "null", "yes", "''", "[]", "-1", "nan"])
    if isinstance(good, int | float):
        return draw.choice(BAD_NUMBERS)
    if isinstance(good, list):
        return draw.choice(BAD_LISTS)
    if isinstance(good, str):
        return draw.choice(BAD_WORDS)
    return draw.choice(["1", "-1", "x", "[]", "nan", "0.5", "true", "''", "{}"])


def _tried(world: World, given: list[str], bad: list[str], keys: list[str], trains: bool) -> Case:
    text = "data=folder" in given

    def run(folder: Path) -> None:
        places = [f"data.path={world.home / 'text'}", f"data.cache_dir={world.home / 'cache'}"] if text else []
        config = inside.compose([*given, *places, f"logs={folder / 'logs'}", f"folder={folder / 'run'}", *bad])
        try:
            inside.build(config)
            if trains and config["trainer"]["max_steps"] < 10:
                facts = inside.train(config)
                if facts.get("val_loss") is not None and not math.isfinite(facts["val_loss"]):
                    raise Wrong(f"it ended with a loss of {facts['val_loss']}")
        except (MemoryError, RuntimeError):
            with inside.errors_as_sentences():  # where memory runs out, train.py says so
                raise

    last = {word for key in keys for word in (key, *key.replace("/", ".").split("."))}
    if "muon_rate" in last:
        last.add("learning_rate")  # which is what it becomes
    if "size" in last:
        last |= Geometry.__dataclass_fields__.keys()  # which have to fit one another: either may be named
    chosen = [word for word in given if "/" in word or word.startswith(("model=", "data=", "optimizer="))]
    title = f"{' '.join(chosen)} with {' '.join(map(_shown, bad))}"
    return Case(run, title, tuple(sorted(last)), 20, (world.home / "cache",))


def _shown(word: str) -> str:
    """In one short line, whatever is in it."""
    return word.encode("unicode_escape").decode()[:60]
