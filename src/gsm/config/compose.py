"""Configurations composed from Python, and those of the command line checked: what is wrong becomes one sentence."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, QuotedString
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from gsm import paths
from gsm.config.check import NAMED_PARTS, PLACES, ConfigError, check, check_place, check_readable, parameters, unknown
from gsm.config.trust import vetted
from gsm.models.schedule import local_reach

# What the gap of a task may lie beyond, in place of a number: what is carried without a bank by GSM, by GSM with the
# writer `delta`, whose state carries more, and by GSM and the baseline alike.
REACHES = ("beyond_gsm", "beyond_delta", "beyond_baseline")


def compose(overrides: Iterable[str] = (), directories: Sequence[Path] = (), script: str = "train") -> dict[str, Any]:
    """The configuration that ``python train.py`` would run with, resolved, as plain containers.

    Args:
        overrides: what would stand on the command line: ``["model=baseline", "size=tiny", "model.state_size=64"]``.
        directories: folders of yaml files besides ``configs/`` and those that GSM_CONFIGS names.
        script: whose configuration; it is the name of its yaml in ``configs/``.

    Raises:
        ConfigError: an unknown key or variant, or a value that does not fit.
    """
    overrides, directories = list(overrides), paths.config_folders(directories)[1:]
    groups = _groups(_folders(directories))
    parsed = _check_choices(overrides, groups)
    try:
        composed = _hydra(tuple(overrides), directories, script)
    except ConfigError:
        _check_keys(parsed, directories, script, groups)  # which says it better, and takes a composition of its own
        raise
    state = HydraConfig.instance()
    before = state.cfg
    only_groups = all(override.key_or_group in groups for override in parsed)
    try:
        state.set_config(composed)  # which the configuration refers to, as inside a job
        choices = composed.hydra.runtime.choices
        reference = composed if only_groups and not choices.get("experiment") else None
        return finish(composed, choices, directories, script, reference)
    finally:
        state.cfg = before


def finish(
    config: DictConfig,
    choices: Mapping[str, str],
    directories: Sequence[Path] = (),
    script: str = "train",
    reference: DictConfig | None = None,
) -> dict[str, Any]:
    """Resolves a composed configuration, checks it, and notes the choice of every group under ``choices``.

    ``HydraConfig`` has to be set, as it is inside a job. ``reference`` is the composition of the same groups without
    experiment and values, where it is at hand. Raises ConfigError.
    """
    chosen = {group: choice for group, choice in choices.items() if not group.startswith("hydra/")}
    plain = _resolve(config)
    _fill_in(plain)
    if reference is None:
        groups = tuple(f"{group}={choice}" for group, choice in chosen.items() if group != "experiment" and choice)
        reference = _remembered(groups, tuple(directories), paths.stamp(_folders(directories)), script)
    if script == "train":
        plain = {**dict.fromkeys(NAMED_PARTS), **plain}
        plain |= {group: plain[group] or {} for group in NAMED_PARTS}  # which a run may do without
    known = {**cast(dict, OmegaConf.to_container(reference, resolve=False)), "choices": {}}
    check(plain, {**dict.fromkeys(NAMED_PARTS & plain.keys()), **known}, _folders(directories))
    for key in PLACES if script == "train" else ():
        if not (key == "arm" and plain["arms"] is not None):  # of an experiment, it picks some
            check_place(key, plain[key])
    return {**plain, "choices": chosen}


def refuse_unnamed(config: Mapping[str, Any], directories: Sequence[Path] = ()) -> None:
    """Raises ConfigError for a model or data that could be trained, but not loaded from the checkpoint again."""
    for part in ("model", "data"):
        if not isinstance(config.get(part), Mapping):
            continue
        try:
            vetted(config[part], part, directories)
        except ConfigError as error:
            raise ConfigError(
                f"{error}; what is trained could not be loaded again: write a yaml of what has no name in one yet"
            ) from error


def from_job(config: DictConfig) -> dict[str, Any]:
    """The same for the configuration of the Hydra job that is running, which can be loaded again from what it trains.

    Raises ConfigError.
    """
    job, script = HydraConfig.get(), HydraConfig.get().job.config_name or "train"
    finished = finish(config, job.runtime.choices, job_directories(), script)
    if script == "train":
        refuse_unnamed(finished, job_directories())
    return finished


def job_directories() -> list[Path]:
    """The folders of yaml files besides ``configs/`` of the Hydra job that is running."""
    sources = HydraConfig.get().runtime.config_sources
    folders = [Path(source.path) for source in sources if source.schema == "file"]
    return [folder for folder in dict.fromkeys(folders) if folder != paths.configs()]


def check_overrides(overrides: Sequence[str], directories: Sequence[Path] = (), script: str = "train") -> None:
    """Checks a command line: every group has the chosen variant, every key exists. Raises ConfigError."""
    groups = _groups(_folders(directories))
    _check_keys(_check_choices(overrides, groups), directories, script, groups)


def _check_choices(overrides: Sequence[str], groups: Mapping[str, set[str]]) -> list[Override]:
    """The overrides, read, without those of Hydra itself; every group has the chosen variant."""
    parsed = _parse(overrides)
    for override in parsed:
        _check_choice(override, groups)
    return parsed


def _check_keys(
    parsed: Sequence[Override], directories: Sequence[Path], script: str, groups: Mapping[str, set[str]]
) -> None:
    """Every override of a value names a key that exists, unless it adds one."""
    first = tuple(line for override in parsed if (line := _first_choice(override, groups)))
    values = [
        override.key_or_group
        for override in parsed
        if override.key_or_group not in groups and not (override.is_add() or override.is_force_add())
    ]
    for key in values:
        _check_key(key, _remembered(first, tuple(directories), paths.stamp(_folders(directories)), script), groups)


def _hydra(overrides: Sequence[str], directories: Sequence[Path], script: str) -> DictConfig:
    """Hydra's composition, its own node included; what it changes globally is put back."""
    register_resolvers()
    search = [f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in directories)}]"] if directories else []
    main = GlobalHydra.instance()
    before = main.hydra
    main.clear()  # inside a job Hydra is at work already, and there is only one
    try:
        with hydra.initialize_config_dir(str(paths.configs()), job_name=script, version_base="1.3"):
            return hydra.compose(script, [*overrides, *search], return_hydra_config=True)
    except MissingConfigException as error:
        raise _missing(error, directories) from error
    except HydraException as error:
        raise ConfigError(" ".join(str(error).split())) from error
    finally:
        GlobalHydra.set_instance(main)  # what initialize_config_dir leaves in its place is an empty copy
        main.hydra = before


@functools.lru_cache(maxsize=64)
def _remembered(overrides: tuple[str, ...], directories: tuple[Path, ...], stamp: float, script: str) -> DictConfig:
    """What other configurations are compared with, kept until a yaml changes: to compose takes a third of a second."""
    return _hydra(overrides, directories, script)


def register_resolvers() -> None:
    """What yaml files may ask for.

    * ``${root:}``: the folder of the repository;
    * ``${variants:group,first,without,...}``: arms of an experiment, one for each variant of a group, so that a new
      yaml is one more arm; the first one named leads, the others named are left out.
    """
    OmegaConf.register_new_resolver("root", lambda: str(paths.ROOT), replace=True)
    OmegaConf.register_new_resolver("variants", _variants, replace=True)


def _fill_in(config: dict[str, Any]) -> None:
    """Puts numbers of the size and the model at hand in place of the words that stand for them.

    * ``model.stages=all``: the encoder layers that read a bank, on which a stage may stand;
    * ``data.task.gap``: ``beyond_gsm``, ``beyond_baseline`` or ``beyond_delta``, see `REACHES`.
    """
    size, model = config.get("size"), config.get("model")
    if not (isinstance(size, dict) and isinstance(model, dict)):
        return
    if model.get("stages") == "all":
        model["stages"] = list(range(min(size["bank_layers"]), size["encoder_layers"] + 1))
    task = (config.get("data") or {}).get("task")
    if isinstance(task, dict) and isinstance(task.get("gap"), str):
        task["gap"] = _gap(task["gap"], size, model.get("state_size"))


def _gap(word: str, size: Mapping[str, Any], state_size: int | None) -> int:
    """Positions back that nothing but a bank reaches beyond. Raises ConfigError for a word that is not known."""
    if word not in REACHES:
        raise ConfigError(f"data.task.gap is '{word}', but takes a number of tokens, or one of {', '.join(REACHES)}")
    entries = state_size or size["window"] + size["top_k"]
    return local_reach(
        encoder_layers=size["encoder_layers"],
        decoder_layers=size["decoder_layers"] if word == "beyond_baseline" else 0,
        window=size["window"],
        state_size=entries,
        reach=entries - 1 if word == "beyond_delta" else 0,
    )


def _variants(group: str, first: str, *without: str) -> dict[str, list[str]]:
    known = _groups(_folders(job_directories())).get(group, set())
    for name in (first, *without):
        if name not in known:
            raise unknown("variant", name, known, f"the group '{group}'")
    return {name: [f"{group}={name}"] for name in [first, *sorted(known - {first, *without})]}


def _resolve(config: DictConfig) -> dict[str, Any]:
    """Plain containers without Hydra's own node. Raises ConfigError for a reference to nothing, or a value left out."""
    config = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    try:
        plain = cast(dict, OmegaConf.to_container(config, resolve=True, throw_on_missing=True))
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} has no value: say {error.full_key}=... on the command line") from error
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(f"{error.full_key or 'the configuration'} has no value: {reason}") from error
    return {str(key): value for key, value in plain.items()}


def _parse(overrides: Sequence[str]) -> list[Override]:
    parser = OverridesParser.create()
    parsed = []
    for line in overrides:
        check_readable(line)
        try:
            parsed.append(parser.parse_override(line))
        except HydraException as error:
            raise ConfigError(
                f"cannot read '{line}': arguments look like key=value or group=option, for example seed=1"
            ) from error
    return [override for override in parsed if override.key_or_group.split(".")[0].split("/")[0] != "hydra"]


def _folders(directories: Sequence[Path]) -> list[Path]:
    return [paths.configs(), *directories]


def _groups(folders: Sequence[Path]) -> dict[str, set[str]]:
    """Every group with its variants: the folders below the configs, and the yaml files in them."""
    groups: dict[str, set[str]] = {}
    for folder in folders:
        for file in folder.rglob("*.yaml"):
            group = file.parent.relative_to(folder).as_posix()
            if group.split("/")[0] not in (".", "hydra"):
                groups.setdefault(group, set()).add(file.stem)
    return groups


def _check_choice(override: Override, groups: Mapping[str, set[str]]) -> None:
    """An override of a group names variants that exist."""
    key = override.key_or_group
    if key not in groups:
        if "/" in key:
            raise unknown("group", key, groups, "the configuration")
        if key.replace(".", "/") in groups:
            group = key.replace(".", "/")
            raise ConfigError(
                f"{key} is a group: write {group}= with a slash. Known variants: {', '.join(sorted(groups[group]))}"
            )
        if key in PLACES and not override.is_sweep_override() and "${" not in str(override.value()):
            # Hydra makes the folder before the configuration is looked at as a whole.
            if not (key == "arm" and isinstance(override.value(), list)):
                check_place(key, _plain(override))
        return
    if override.is_delete() or override.value() is None:
        _check_left_out(override, groups[key])
    for choice in _choices(override, groups[key]):
        if choice not in groups[key]:
            raise unknown("variant", choice, groups[key], f"the group '{key}'")


def _check_left_out(override: Override, known: Collection[str]) -> None:
    """Raises ConfigError for a group that cannot be left out; below another one, who takes it says so."""
    key = override.key_or_group
    if override.is_delete() and (key in NAMED_PARTS or "/" in key):
        return
    said = f"{key} is left out" if override.is_delete() else f"{key} is null"
    if key in NAMED_PARTS:
        raise ConfigError(f"{said}: write ~{key} to do without")
    if key == "experiment":
        raise ConfigError(f"{said}: leave the word out to do without")
    raise ConfigError(f"{said}, but a run needs one of {', '.join(sorted(known))}")


def _plain(override: Override) -> Any:
    """The value of an override, without its quotes."""
    value = override.value()
    return value.text if isinstance(value, QuotedString) else value


def _choices(override: Override, known: Collection[str]) -> list[str]:
    """The variants that an override of a group names: one, several in a sweep, or those that fit a pattern."""
    value = override.value()
    if value is None or override.is_delete():
        return []
    if isinstance(value, Glob):
        return value.filter(sorted(known))
    return (
        [str(choice) for choice in override.sweep_string_iterator()] if override.is_sweep_override() else [str(value)]
    )


def _first_choice(override: Override, groups: Mapping[str, set[str]]) -> str | None:
    """The override of a group with one choice, for composing what the other overrides are checked against."""
    choices = _choices(override, groups.get(override.key_or_group, ()))
    if override.key_or_group not in groups or not choices:
        return None
    return f"{override.get_key_element()}={choices[0]}"


def _check_key(key: str, composed: DictConfig, groups: Mapping[str, set[str]]) -> None:
    """An override of a value names a key that exists."""
    node: Any = composed
    path: list[str] = []
    for part in key.split("."):
        if not OmegaConf.is_dict(node):
            return
        if part not in node.keys() or (not path and part == "hydra"):  # `in node` denies what still lacks a value
            raise _unknown_key(key, part, path, node, composed, groups)
        path.append(part)
        node = node._get_node(part)


def _unknown_key(
    key: str, part: str, path: Sequence[str], node: DictConfig, composed: DictConfig, groups: Mapping[str, set[str]]
) -> ConfigError:
    """The error for ``part`` below ``path``; what a constructor takes is known, whether it has a value yet or not."""
    target = node.get("_target_")
    taken = (parameters(target) if target else None) or {}
    if part in taken:
        return ConfigError(f"{key} is taken by {target} but has no value yet: write +{key}=")
    if path:
        known = {str(name) for name in node if not str(name).startswith("_")} | set(taken)
        return unknown("key", ".".join([*path, part]), known, ".".join(path))
    known = {str(name) for name in node if name != "hydra"} | set(groups)
    return unknown("key", part, known, "the configuration", deeper=_paths(composed))


def _paths(node: DictConfig, above: str = "") -> Iterator[str]:
    """Every key of a configuration, with the path to it; a recipe's numbers are set where they are used."""
    for name in node:
        if name in ("hydra", "recipe"):
            continue
        below = node._get_node(name)
        yield f"{above}{name}"
        if isinstance(below, DictConfig):
            yield from _paths(below, f"{above}{name}.")


def _missing(error: MissingConfigException, directories: Sequence[Path]) -> ConfigError:
    """A variant that a yaml chose, but that does not exist."""
    group, _, choice = (error.missing_cfg_file or "").rpartition("/")
    groups = _groups(_folders(directories))
    if group in groups:
        return unknown("variant", choice, groups[group], f"the group '{group}'", _folders(directories))
    return ConfigError(" ".join(str(error).split()))
