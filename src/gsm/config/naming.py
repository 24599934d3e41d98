"""What a run's folder is called by default: after its model, or its experiment, and what was overridden.

``python train.py model/writer=gated seed=1`` goes to ``logs/default/gsm-writer_gated/seed1``. What enters is what was
asked for, decides what is trained, and is not so by default; so variants stand side by side, and the same command finds
its run again. Other values never share a name. Names hold lower-case letters, digits, dots, hyphens and underscores,
which neither a shell nor Hydra wants quotes for, and which no disk confuses.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from gsm.config.check import ConfigError, flat
from gsm.config.decisive import DECISIVE, decides

LONGEST = 100  # letters of all that was overridden
LONGEST_KEY, LONGEST_VALUE, LONGEST_END = 48, 24, 18
# A value as it is written; what follows a hyphen has no underscore, so that it cannot be taken for another override.
PLAIN = re.compile(r"[a-z0-9_.]*(?:-[a-z0-9.]+)*")
LISTED = re.compile(r"none|only\.\d+|\d+(\.and\.\d+)+")  # see `_listed`
HASHED = re.compile(r"(?:.*\.)?x[0-9a-f]{8}")
# A recipe's numbers that are used under these keys; a run is only measured with the others.
RECIPE = {"recipe.batch_size": "data.batch_size", "recipe.val_check_interval": "trainer.val_check_interval"}
MEASURING = ("recipe.standard", "recipe.extension.lengths")

Compose = Callable[[Iterable[str]], DictConfig]
Holds = Callable[[Override, DictConfig], bool]


def name(
    first: str,
    overrides: Sequence[Override],
    groups: Iterable[str],
    base: Compose,
    chosen: Compose,
    divided: bool = False,
    overruled: Collection[str] = (),
) -> str:
    """``first``, then the overrides that it takes to train what they all train.

    Args:
        first: what the name begins with.
        overrides: read; the last one counts of those with one key.
        groups: the keys of those that choose a variant.
        base: composes what ``first`` stands for, with more overrides, and Hydra's own node.
        chosen: the same with all variants that were chosen.
        divided: a step has as many sequences however it is divided, as ``global_batch`` says.
        overruled: keys that arms of an experiment set by themselves, so that even their default changes something.
    """
    asked = {_key(one): one for one in overrides if _enters(one, divided)}
    variants = {key: one for key, one in asked.items() if one.key_or_group in groups}
    values = {key: one for key, one in asked.items() if key not in variants}

    def is_variant(one: Override, composed: DictConfig) -> bool:
        if composed.hydra.runtime.choices.get(_key(one)) == _plain(one):
            return _key(one) not in overruled
        return one.key_or_group == "trainer" and _train_alike(composed, chosen(()), divided)

    def is_value(one: Override, composed: DictConfig) -> bool:
        return _value_in(composed, one.key_or_group) == _plain(one) and _key(one) not in overruled

    found = [*_needed(variants, base, is_variant), *_needed(values, chosen, is_value)]
    said = [_said(key, _plain(asked[key])) for key in found]
    return "-".join([first, *_cut(said)])


def label(values: Mapping[str, Any]) -> str:
    """The name of a folder for what these keys are set to, as they stand in a run's."""
    return "-".join(_cut([_said(key, value) for key, value in values.items()]))


def _enters(one: Override, divided: bool) -> bool:
    """Whether an override may decide what is trained. Of ``runs.<name>``, what decides its training."""
    key = one.key_or_group.replace("/", ".")
    if one.is_sweep_override():  # of several jobs, each of which has its own name
        return False
    if key.startswith("runs.") or key == "runs":
        rest = key.split(".", 2)[2:]
        return not one.is_delete() and one.value() is not None and (not rest or rest[0] == "after" or decides(rest[0]))
    if key.startswith(MEASURING):
        return False
    if key in ("recipe", "start_from", "start_fresh") or key.startswith("recipe.") and key not in RECIPE:
        return True
    return key != "seed" and decides(RECIPE.get(key, key), divided=divided and key != "global_batch")


def _needed(asked: Mapping[str, Override], compose: Compose, holds: Holds) -> list[str]:
    """The keys of those overrides without which some would not hold; what the others say is so without them.

    One may be so by default only as long as another is not given (``size=tiny recipe=nano``), so all are looked at
    again with those that are needed. Where nothing can be composed without the others, all are. First come the
    model's, then what the run starts from, which are the last to be cut.
    """
    needed: dict[str, Override] = {}
    while len(needed) < len(asked):
        try:
            composed = compose(str(one.input_line) for one in needed.values())
        except ConfigError:
            needed = dict(asked)
            break
        more = {key: one for key, one in asked.items() if key not in needed and not holds(one, composed)}
        if not more:
            break
        needed |= more
    return sorted(needed, key=lambda key: (not key.startswith("model"), key != "start_from", key))


def _value_in(composed: DictConfig, key: str) -> Any:
    there = OmegaConf.select(composed, key, throw_on_resolution_failure=False)
    return OmegaConf.to_container(there) if OmegaConf.is_config(there) else there


def _train_alike(one: DictConfig, two: DictConfig, divided: bool) -> bool:
    """Whether two choices of the trainer differ only in how they divide a step."""
    first, second = (flat(OmegaConf.to_container(each.trainer), "trainer.") for each in (one, two))  # type: ignore
    keys = (key for key in first.keys() | second.keys() if first.get(key) != second.get(key))
    return not any(decides(key, divided=divided) for key in keys)


def _key(one: Override) -> str:
    return f"{one.key_or_group}@{one.package}" if one.package else one.key_or_group


def _plain(one: Override) -> Any:
    """The value, None where the key is deleted: that is how runs are compared."""
    return None if one.is_delete() else one.value()


def _said(key: str, value: Any) -> str:
    """One override in the name; the model's are its own, as the name begins with it."""
    short = re.sub(r"^model[./]", "", key)
    short = key if short.partition(".")[0] in DECISIVE else short
    numbers = isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)
    text = value if isinstance(value, str) else _listed(value) if numbers else json.dumps(value, default=str)
    exact = json.dumps(value, sort_keys=True, default=str)
    is_clear = not (isinstance(value, str) and _reads_as_other(text))
    return f"{_safe(short.replace('/', '.'), key, LONGEST_KEY)}_{_safe(text, exact, LONGEST_VALUE if is_clear else 0)}"


def _listed(numbers: Sequence[int]) -> str:
    """A list of whole numbers in words: none, only.2, 2.and.5."""
    return ".and.".join(map(str, numbers)) if len(numbers) > 1 else f"only.{numbers[0]}" if numbers else "none"


def _reads_as_other(text: str) -> bool:
    """Whether a word looks like a number, true, false, null or a list, which it is not."""
    if LISTED.fullmatch(text):
        return True
    try:
        return not isinstance(json.loads(text), str)
    except ValueError:
        return False


def _safe(text: str, exact: str, longest: int) -> str:
    """A text as it is where it is short and can be; else the end of it, with a hash of what it stands for."""
    if 0 < len(text) <= longest and PLAIN.fullmatch(text) and not HASHED.fullmatch(text):
        return text
    end = re.sub(r"[^a-z0-9_]+", ".", text.lower()).strip(".")
    end = end if len(end) <= LONGEST_END else end[-LONGEST_END:].partition(".")[2] or end[-LONGEST_END:]
    return f"{end}.{_hash(exact)}".removeprefix(".")


def _cut(words: list[str]) -> list[str]:
    """Those that fit, and how many more there are, with a hash of all."""
    if len("-".join(words)) <= LONGEST:
        return words
    kept = [word for number, word in enumerate(words, 1) if len("-".join(words[:number])) <= LONGEST - 18]
    return [*kept, f"{len(words) - len(kept)}_more.{_hash('-'.join(words))}"]


def _hash(text: str) -> str:
    return f"x{hashlib.sha256(text.encode()).hexdigest()[:8]}"
