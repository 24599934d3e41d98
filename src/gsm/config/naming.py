"""The default name of a run's folder: its model, or its experiment, then the overrides that change training.

``python train.py model/writer=gated seed=1`` goes to ``logs/default/gsm-writer_gated/seed1``. So variants stand side by
side, and the same command finds its run again. Two runs may share a name: ``gsm.training.folder`` compares their
configurations. Names hold lower-case letters, digits, dots, hyphens and underscores. Neither a shell nor Hydra wants
quotes for these, and no disk confuses them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from gsm.config.decisive import DECISIVE, decides

LONGEST, LONGEST_KEY, LONGEST_VALUE, LONGEST_END = 128, 48, 24, 18  # letters
# A value without a hash. A word behind a hyphen has no underscore, or it would read as another override.
PLAIN = re.compile(r"[a-z0-9_.]*(?:-[a-z0-9.]+)*")


@functools.lru_cache(maxsize=256)  # every path below a run's folder asks for its name
def name(first: str, overrides: tuple[str, ...]) -> str:
    """Return ``first`` with the overrides that change training: variants before values, the model's before others.

    The order is fixed, so that the same words in another order name the same folder.

    Args:
        first: the model, or the experiment.
        overrides: as they were typed; the last one of a key counts. Devices and batches only divide a step: they do
            not enter.
    """
    parser = OverridesParser.create()
    parsed = [parser.parse_override(word) for word in overrides]
    by_key = {_key(override): override for override in parsed if _enters(override, first)}
    return _joined([first, *(_word(key, _value(by_key[key])) for key in sorted(by_key, key=_place))])


def label(values: Mapping[str, Any]) -> str:
    """Return the name of a folder for these values of a configuration by key."""
    return _joined([_word(key, value) for key, value in values.items()])


def _enters(override: Override, first: str) -> bool:
    """Return whether an override may change training. A sweep does not: each of its jobs has its own name."""
    head, *rest = key = re.split(r"[./]", override.key_or_group)
    if override.is_sweep_override() or (key == ["model"] and override.value() == first):
        return False
    if head == "runs":
        return _value(override) is not None and "evaluate" not in rest
    if head in ("recipe", "start_from", "start_fresh"):
        return True
    return head != "seed" and decides(".".join(key), divided=head != "global_batch")


def _key(override: Override) -> str:
    return f"{override.key_or_group}@{override.package}" if override.package else override.key_or_group


def _place(key: str) -> tuple[bool, bool, bool, str]:
    """Return by which to sort the keys of a name."""
    is_value = "." in key.partition("@")[0] or key in ("global_batch", "start_from", "start_fresh")
    return is_value, not key.startswith("model"), key != "start_from", key


def _value(override: Override) -> Any:
    """Return the value; None for a key that is deleted."""
    return None if override.is_delete() else override.value()


def _word(key: str, value: Any) -> str:
    """Return one override as a part of the name, without ``model`` in front, as the name begins with it."""
    short = re.sub(r"^model[./]", "", key)
    short = key if short.partition(".")[0] in DECISIVE else short
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    if isinstance(value, list) and all(type(number) is int and number >= 0 for number in value):
        text = ".and.".join(map(str, value)) if len(value) > 1 else f"only.{value[0]}" if value else "none"
    exact = json.dumps(value, sort_keys=True, default=str)
    return f"{_shortened(short.replace('/', '.'), key, LONGEST_KEY)}_{_shortened(text, exact, LONGEST_VALUE)}"


def _shortened(text: str, exact: str, longest: int) -> str:
    """Return a plain short text as it is, and the end of any other with a hash of the exact value."""
    if 0 < len(text) <= longest and PLAIN.fullmatch(text):
        return text
    end = re.sub(r"[^a-z0-9_]+", ".", text.lower()).strip(".")
    end = end if len(end) <= LONGEST_END else end[-LONGEST_END:].partition(".")[2] or end[-LONGEST_END:]
    return f"{end}.{_hash(exact)}".removeprefix(".")


def _joined(words: list[str]) -> str:
    """Return the words with hyphens between; where they are too long, their beginning with a hash of all."""
    whole = "-".join(words)
    return whole if len(whole) <= LONGEST else f"{whole[: LONGEST - 10].rstrip('.-_')}.{_hash(whole)}"


def _hash(text: str) -> str:
    return f"x{hashlib.sha256(text.encode()).hexdigest()[:8]}"
