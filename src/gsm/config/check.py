"""Misspelt keys and unknown variants become one sentence that names them, before anything is built.

There is no second description of the configuration to keep in step. For a mapping with a ``_target_`` the constructor's
signature is the schema. For one without, what counts is the same place in a reference, composed from the same group
choices without experiment and values.
"""

from __future__ import annotations

import collections.abc
import difflib
import importlib
import inspect
import math
import re
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gsm.errors import ConfigError

# Keys beside what a part's constructor takes: others read them.
CONTEXT = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, default=1, annotation=int)
BESIDE = {"trainer": {"context": CONTEXT}}
HYDRA_KEYS = {"_target_", "_partial_", "_convert_", "_recursive_", "_args_"}
NAMED_PARTS = {"callbacks", "logger"}  # groups whose mapping holds parts under names that anyone may add to
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
SEQUENCES = (list, tuple, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)

MOST_PROCESSES = 1024  # of one machine
MOST_LAYERS = 1000  # of an encoder or decoder: each is built in Python
LONGEST_NAME = 240  # bytes of the name of a folder, with room for what is added to it
PATHS = ("logs", "folder", "resume", "start_from")
PLACES = ("name", "arm", *PATHS)
WHOLE = 2**62  # the sizes of tensors that PyTorch can tell from its own marks are smaller

# From where to where a number may go, both included; by its key, or in the sizes by its name. What a part of ours
# refuses by itself is not here: these are numbers that no part of ours looks at, and ends beyond what machines can do.
# None: no end.
RANGES: dict[str, tuple[float, float | None]] = {
    "seed": (0, 2**32 - 1),
    "jobs": (1, None),
    "global_batch": (1, None),
    "data.seed": (0, 2**32 - 3),  # the two above are those of what is held out (gsm.data.synthetic)
    "data.validation_sequences": (1, 10**7),
    "data.num_workers": (0, MOST_PROCESSES),
    "data.prepare_workers": (1, MOST_PROCESSES),
    "data.task.power": (0, None),
    "model.indexer_weight": (0, None),
    "model.query_rank": (1, None),
    "trainer.context": (1, None),
    "model.scale": (0, 1e6),
    "model.indexer_training.dense_limit": (0, None),
    "model.indexer_training.sampled_rows": (1, None),
    "model.residual.sinkhorn_rounds": (1, 1000),
    "model.writer.slots": (1, 1024),
    "model.mixers.gated_delta_net.convolution": (1, 1024),
    "model.mixers.delta_product.convolution": (1, 1024),
    "model.mixers.delta_product.steps": (1, 64),
    "model.mixers.gsa.slots": (1, 65536),
    "model.mixers.gsa.convolution": (1, 1024),
    "model.mixers.raven.slots": (1, 65536),
    "model.mixers.nsa.block": (2, 65536),
    "model.mixers.nsa.blocks": (3, 65536),
    "model.retriever.seed": (0, 2**32 - 1),
    "model.feed_forward.balance_weight": (0, None),
    "model.feed_forward.bias_step": (0, None),
    "model.feed_forward.route_scale": (0, None),
    "encoder_layers": (1, MOST_LAYERS),
    "decoder_layers": (1, MOST_LAYERS),
    "rope_base": (1, None),
    "bank_rope_base": (1, None),
    "trainer.max_steps": (1, None),
    "trainer.devices": (1, MOST_PROCESSES),
    "trainer.num_nodes": (1, 100_000),
    "trainer.gradient_clip_val": (0, None),
    "trainer.log_every_n_steps": (1, None),
    "trainer.val_check_interval": (1, None),
    "trainer.check_val_every_n_epoch": (1, None),
    "trainer.num_sanity_val_steps": (-1, None),
}
SIZES = ("size.", "model.geometry.")


def check(config: Mapping[str, Any], reference: Mapping[str, Any], directories: Collection[Path]) -> None:
    """Checks a composed and resolved configuration.

    Args:
        config: plain containers.
        reference: the same groups, without experiment and overrides.
        directories: the folders that yaml files are taken from.

    Raises:
        ConfigError: a key that nothing takes, or a value of a type that its taker does not accept.
    """
    # What the others repeat comes first, so that an error names the place where it was made.
    ordered = sorted(config.items(), key=lambda item: (isinstance(item[1], Mapping), item[0] == "model"))
    numbers = flat(dict(ordered))
    # Data repeat numbers of the model (how far it reaches), which repeats those of its size.
    _check_numbers({key: numbers[key] for key in sorted(numbers, key=_repeats)})
    for key, part in reference.items():
        if isinstance(part, Mapping) and "_target_" in part and not isinstance(config.get(key), Mapping):
            raise ConfigError(f"{key} is {config.get(key)!r:.40}, but a run needs one")
    if not fits(config.get("global_batch"), int | None):
        raise ConfigError(f"global_batch is {config['global_batch']!r}, but takes a whole number of sequences, or null")
    for key, value in ordered:
        if key not in reference:
            raise unknown("key", key, reference, "the configuration", directories, _paths(reference))
        if isinstance(reference[key], int) and not fits(value, type(reference[key])):
            raise ConfigError(f"{key} is {value!r} ({type(value).__name__}), but takes {type(reference[key]).__name__}")
        if isinstance(value, Mapping):
            _check_mapping(value, reference[key], key, directories)


def check_readable(word: str) -> None:
    """Raises ConfigError for a word of a command line that no file could hold: the name of a file that is not UTF-8."""
    try:
        word.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{word!a:.200} is not UTF-8: give that file or folder another name") from error


def check_place(key: str, value: Any) -> None:
    """Checks where a run goes, and what it begins with: ``name`` and ``arm`` are one folder each, others are somewhere.

    Raises ConfigError.
    """
    is_path = key in PATHS
    if key == "start_from" and value is None:
        return
    if not (isinstance(value, str) or not is_path and type(value) in (int, float)):
        raise ConfigError(f"{key} is {value!r:.60}, but has to be {'a path' if is_path else 'the name of a folder'}")
    text = str(value)
    parts = Path(text).parts if is_path else (text,)
    if not (text.strip() and text.isprintable()) or any(len(part.encode()) > LONGEST_NAME for part in parts):
        raise ConfigError(
            f"{key} is {text!a:.60}, but has to be {'a path' if is_path else 'a name'} of letters that can be printed, "
            f"of at most {LONGEST_NAME} bytes{' between two slashes' if is_path else ''}"
        )
    if not is_path and ("/" in text or text.startswith(".")):
        raise ConfigError(
            f"{key} is '{text:.60}', but has to be the name of one folder below logs: without slashes, and with no dot "
            "at its beginning"
        )
    if is_path and Path(text).resolve() == Path(text).resolve().parent:
        raise ConfigError(f"{key} is '{text:.60}', which is the root of all disks: choose a folder")


def unknown(
    kind: str,
    name: str,
    known: Collection[str],
    place: str,
    directories: Collection[Path] = (),
    deeper: Iterable[str] = (),
) -> ConfigError:
    """The error for a name that is not ``known``: proposes the nearest, there or ``deeper``, and lists them all."""
    last = name.rsplit(".", 1)[-1]
    near = difflib.get_close_matches(last, known, n=3, cutoff=0.6)
    near = (
        near
        or [path for path in deeper if difflib.SequenceMatcher(None, last, path.rsplit(".", 1)[-1]).ratio() > 0.7][:3]
    )
    near = near or [option for option in sorted(known) if last in option][:3]
    meant = f"; did you mean {' or '.join(near)}?" if near else "."
    where = _file_with(
        rf":\s*{re.escape(last)}\s*$" if kind == "variant" else rf"^\s*{re.escape(last)}\s*:", directories
    )
    found = f" in {where}" if where else ""
    return ConfigError(
        f"unknown {kind} '{name}'{found}{meant} Known in {place}: {', '.join(sorted(known)) or 'nothing'}"
    )


def few(items: Sequence[str]) -> str:
    """The first three, and how many more there are."""
    return ", ".join(items[:3]) + (f" and {len(items) - 3} more" if len(items) > 3 else "")


def flat(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Every value of nested mappings under the path to it."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= flat(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return found


def contrast(there: Mapping[str, Any], here: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    """What stands otherwise in two flat configurations: ``data.batch_size (4 there, 8 here)``."""
    return [
        f"{key} ({there.get(key, 'nothing')} there, {here.get(key, 'nothing')} here)"
        for key in keys
        if there.get(key) != here.get(key)
    ]


def _paths(node: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Every key of a configuration, with the path to it; a recipe's numbers are set where they are used."""
    for name, below in node.items():
        if name not in ("hydra", "recipe"):
            yield f"{above}{name}"
            yield from _paths(below, f"{above}{name}.") if isinstance(below, Mapping) else ()


def parameters(target: str) -> dict[str, inspect.Parameter] | None:
    """Parameters of a ``_target_``, by name; None if it takes any. Raises ConfigError if it cannot be imported."""
    module, _, name = target.rpartition(".")
    try:
        taker = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"_target_ '{target}' cannot be imported: {error}") from error
    try:
        hints = typing.get_type_hints(taker.__init__ if inspect.isclass(taker) else taker)
    except (NameError, TypeError):
        hints = {}
    try:
        found = inspect.signature(taker).parameters
    except ValueError:  # written in C, without a signature to read
        return None
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in found.values()):
        return None
    return {name: p.replace(annotation=hints.get(name, Any)) for name, p in found.items()}


def fits(value: Any, hint: Any) -> bool:
    """Whether a value from a yaml can be what the type hint asks for; True where that is not plain to see."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return any(fits(value, option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return any(type(value) is type(option) for option in typing.get_args(hint))
    if hint in (None, type(None)):
        return value is None
    if hint in (bool, int, float, str):
        taken = (int, float) if hint is float else hint
        return isinstance(value, taken) and (hint is bool or not isinstance(value, bool))
    if inspect.isclass(hint) and hint.__module__.partition(".")[0] == "gsm":
        return isinstance(value, hint)
    if (typing.get_origin(hint) or hint) in SEQUENCES:
        inner = [option for option in typing.get_args(hint) if option is not ...]
        return isinstance(value, list | tuple) and (len(inner) != 1 or all(fits(item, inner[0]) for item in value))
    return True


def _repeats(key: str) -> int:
    """Whose numbers others repeat comes first."""
    group = key.partition(".")[0]
    return 3 if key.startswith("model.geometry.") else {key: 0, "size": 0, "model": 1}.get(group, 2)


def _check_numbers(values: Mapping[str, Any]) -> None:
    """Checks that numbers are finite, and where they are in `RANGES`. Raises ConfigError."""
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not math.isfinite(value):
            raise ConfigError(f"{key} is {value}, but has to be a finite number")
        if isinstance(value, int) and not -WHOLE <= value < WHOLE:
            raise ConfigError(f"{key} is {value:.3g}, but has to be a whole number of at most 62 bits")
        low, high = RANGES.get(key.rpartition(".")[2] if key.startswith(SIZES) else key, (-math.inf, None))
        if value < low or (high is not None and value > high):
            limits = f"{low:g} or more" if high is None else f"from {low:g} to {high:g}"
            raise ConfigError(f"{key} is {value}, but has to be {limits}")


def _check_mapping(node: Mapping[str, Any], reference: Any, path: str, directories: Collection[Path]) -> None:
    """Checks the keys of one mapping, then what lies below."""
    known_here = reference if isinstance(reference, Mapping) else {}
    if "_target_" in node:
        _check_arguments(node, path, directories)
    elif isinstance(reference, Mapping):
        for key, value in node.items():
            is_part = path in NAMED_PARTS and isinstance(value, Mapping) and "_target_" in value
            if key not in reference and not is_part:
                raise unknown("key", f"{path}.{key}", reference, path, directories)
    for key, value in node.items():
        if isinstance(value, Mapping):
            _check_mapping(value, known_here.get(key), f"{path}.{key}", directories)


def _check_arguments(node: Mapping[str, Any], path: str, directories: Collection[Path]) -> None:
    """Checks the keys and values of one mapping against the signature of its ``_target_``."""
    taken = parameters(node["_target_"])
    taken = taken if taken is None else {**taken, **BESIDE.get(path, {})}
    place = f"{path} ({node['_target_']})"
    for key, value in node.items():
        if key.startswith("_"):
            if key not in HYDRA_KEYS:
                raise unknown("key", f"{path}.{key}", HYDRA_KEYS, place, directories)
        elif taken is not None and key not in taken:
            raise unknown("key", f"{path}.{key}", taken, place, directories)
        elif taken is not None:
            _check_value(f"{path}.{key}", value, taken[key])
    if node.get("_partial_") or "_args_" in node:  # who makes the part gives it the rest
        return
    for key, parameter in (taken or {}).items():
        if parameter.default is inspect.Parameter.empty and parameter.kind in NAMED and key not in node:
            raise ConfigError(f"{path}.{key} has no value, but {node['_target_']} needs one")


def _check_value(path: str, value: Any, parameter: inspect.Parameter) -> None:
    """Checks the type of a value against the hint of the parameter that takes it."""
    hint = parameter.annotation
    is_part = isinstance(value, Mapping) and "_target_" in value
    if is_part or value is None and parameter.default is None or fits(value, hint):
        return
    name = hint.__name__ if inspect.isclass(hint) else re.sub(r"(typing|collections\.abc)\.", "", str(hint))
    raise ConfigError(f"{path} is {value!r} ({type(value).__name__}), but takes {name}")


def _file_with(pattern: str, directories: Collection[Path]) -> str | None:
    """The yaml with such a line, if just one has it: most misspellings are unique."""
    files = [file for folder in directories for file in folder.rglob("*.yaml")]
    found = [file for file in files if re.search(pattern, file.read_text(encoding="utf-8"), re.MULTILINE)]
    return f"{found[0].parent.name}/{found[0].name}" if len(found) == 1 else None
