"""Configurations composed from Python, and those of the command line checked: what is wrong becomes one sentence."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from gsm import paths
from gsm.config import naming
from gsm.config.check import NAMED_PARTS, PLACES, ConfigError, check, check_place, check_readable, unknown
from gsm.config.options import groups_of, listing, scripts_of
from gsm.config.trust import vetted
from gsm.models.schedule import local_reach

# What the gap of a task may lie beyond, in place of a number: what is carried without a bank by GSM, by GSM with the
# writer `delta`, whose state carries more, and by GSM and the baseline alike.
REACHES = ("beyond_gsm", "beyond_delta", "beyond_baseline")
SEARCH = "hydra.searchpath="


def compose(overrides: Iterable[str] = (), directories: Sequence[Path] = (), script: str = "train") -> dict[str, Any]:
    """The configuration that ``python train.py`` would run with, resolved, as plain containers.

    Args:
        overrides: what would stand on the command line: ``["model=baseline", "size=tiny", "model.state_size=64"]``.
        directories: folders of yaml files besides ``configs/`` and those that GSM_CONFIGS names.
        script: whose configuration; it is the name of its yaml in ``configs/``.

    Raises:
        ConfigError: an unknown key or variant, or a value that does not fit.
    """
    overrides, folders = list(overrides), paths.config_folders(directories)
    groups = groups_of(folders)
    parsed = _check_choices(overrides, groups, script)
    try:
        composed = _hydra(tuple(overrides), folders, script)
    except ConfigError:
        _name_unknown(parsed, groups, folders, script)
        raise
    return _as_job(composed, folders, script)


def finish(config: DictConfig, folders: Sequence[Path], script: str = "train") -> dict[str, Any]:
    """Resolves a composed configuration, checks it, and notes the choice of every group under ``choices``.

    ``HydraConfig`` has to be set, as it is inside a job. Raises ConfigError.
    """
    job = HydraConfig.get()
    chosen = {group: choice for group, choice in job.runtime.choices.items() if not group.startswith("hydra/")}
    plain = _resolve(config)
    _fill_in(plain)
    groups = groups_of(folders)
    if not chosen.get("experiment") and all(one.key_or_group in groups for one in parse(job.overrides.task)):
        reference = config
    else:
        reference = _remembered(_variants_chosen(chosen), tuple(folders), paths.stamp(folders), script)
    if script == "train":
        plain = {**dict.fromkeys(NAMED_PARTS), **plain}
        plain |= {group: plain[group] or {} for group in NAMED_PARTS}  # which a run may do without
    known = {**cast(dict, OmegaConf.to_container(reference, resolve=False)), "choices": {}}
    check(plain, {**dict.fromkeys(NAMED_PARTS & plain.keys()), **known}, folders)
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
    script = HydraConfig.get().job.config_name or "train"
    finished = finish(config, _job_folders(), script)
    if script == "train":
        refuse_unnamed(finished, _job_folders())
    return finished


def _job_folders() -> list[Path]:
    """The folders of yaml files of the Hydra job that is running, the project's first."""
    return _folders_of(HydraConfig.get())


def _folders_of(job: HydraConf) -> list[Path]:
    found = [Path(one.path) for one in job.runtime.config_sources if one.schema == "file"]
    return list(dict.fromkeys([paths.configs(), *found]))


def check_overrides(overrides: Sequence[str], script: str = "train") -> None:
    """Checks a command line, before Hydra does anything; of a sweep, the first of its jobs. Raises ConfigError."""
    groups = groups_of(paths.config_folders())
    parsed = _check_choices(overrides, groups, script)
    compose([_first(one, groups) for one in parsed if not one.is_interval_sweep()], script=script)  # its sweeper's


def search(directories: Sequence[Path]) -> str:
    """What tells Hydra of the user's own folders: it takes but one by a flag, and knows of no GSM_CONFIGS."""
    return f"{SEARCH}[{','.join(f'file://{folder}' for folder in directories)}]"


def _check_choices(overrides: Sequence[str], groups: Mapping[str, set[str]], script: str) -> list[Override]:
    """The overrides, read, without those of Hydra itself; every group is the script's and has the chosen variant."""
    parsed = parse(overrides)
    for override in parsed:
        takers = scripts_of(override.key_or_group) if override.key_or_group in groups else [script]
        if script not in takers:
            raise ConfigError(
                f"{override.key_or_group} is a group of {takers[0]}.py: "
                f"{paths.called(f'{takers[0]}.py')} {override.input_line}"
            )
        _check_choice(override, groups)
    return parsed


def _name_unknown(
    parsed: Sequence[Override], groups: Mapping[str, set[str]], folders: Sequence[Path], script: str
) -> None:
    """Raises ConfigError for a key that does not exist, which says more than Hydra: what was meant, and what there is.

    Forced in, as a yaml could put it there, it is found by `check`.
    """
    forced = [
        _first(one, groups) if one.key_or_group in groups else f"++{one.key_or_group}={_value(one)}" for one in parsed
    ]
    try:
        composed = _hydra(forced, folders, script)
    except ConfigError:  # it is something else
        return
    _as_job(composed, folders, script)


def _as_job(composed: DictConfig, folders: Sequence[Path], script: str) -> dict[str, Any]:
    """The same configuration finished as inside of its job: it refers to Hydra's node. Raises ConfigError."""
    state = HydraConfig.instance()
    before = state.cfg
    try:
        state.set_config(composed)
        return finish(composed, folders, script)
    finally:
        state.cfg = before


def _hydra(overrides: Sequence[str], folders: Sequence[Path], script: str) -> DictConfig:
    """Hydra's composition, its own node included; what it changes globally is put back."""
    register_resolvers()
    own = [search(folders[1:])] if folders[1:] else []
    main = GlobalHydra.instance()
    before = main.hydra
    main.clear()  # inside a job Hydra is at work already, and there is only one
    try:
        with hydra.initialize_config_dir(str(paths.configs()), job_name=script, version_base="1.3"):
            return hydra.compose(script, [*overrides, *own], return_hydra_config=True)
    except MissingConfigException as error:
        raise _missing(error, folders) from error
    except HydraException as error:
        raise ConfigError(" ".join(str(error).split())) from error
    finally:
        GlobalHydra.set_instance(main)  # what initialize_config_dir leaves in its place is an empty copy
        main.hydra = before


@functools.lru_cache(maxsize=64)
def _remembered(overrides: tuple[str, ...], folders: tuple[Path, ...], stamp: float, script: str) -> DictConfig:
    """What other configurations are compared with, kept until a yaml changes: to compose takes a third of a second."""
    return _hydra(overrides, folders, script)


def _variants_chosen(choices: Mapping[str, str | None]) -> tuple[str, ...]:
    """The variants of a job as overrides, without its experiment."""
    theirs = {group: choice for group, choice in choices.items() if not group.startswith("hydra/") and choice}
    return tuple(f"{group}={choice}" for group, choice in theirs.items() if group != "experiment")


def register_resolvers() -> None:
    """What yaml files may ask for.

    * ``${root:}``: the folder of the repository, or the current one where there is none;
    * ``${named:experiment}``, ``${named:arm}``: what these are called by default, see ``gsm.config.naming``;
    * ``${variants:group,first,without,...}``: arms of an experiment, one for each variant of a group, so that a new
      yaml is one more arm; the first one named leads, the others named are left out;
    * ``${options:script}``: what can be chosen, for ``--help``.
    """
    OmegaConf.register_new_resolver("root", lambda: str(paths.runs_home()), replace=True)
    OmegaConf.register_new_resolver("variants", _variants, replace=True)
    OmegaConf.register_new_resolver("options", _options, replace=True)
    OmegaConf.register_new_resolver("named", _named, replace=True)


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
        task["gap"] = _gap(task["gap"], size, model)


def _gap(word: str, size: Mapping[str, Any], model: Mapping[str, Any]) -> int:
    """Positions back that nothing but a bank reaches beyond. Raises ConfigError for a word that is not known."""
    if word not in REACHES:
        raise ConfigError(f"data.task.gap is '{word}', but takes a number of tokens, or one of {', '.join(REACHES)}")
    entries = model.get("state_size") or size["window"] + size["top_k"]
    own = (model.get("state_reader") or {}).get("window", 1)  # of each layer of GSM's decoder, beside the state
    return local_reach(
        encoder_layers=size["encoder_layers"],
        decoder_layers=size["decoder_layers"] if word == "beyond_baseline" else 0,
        window=size["window"],
        state_size=entries,
        reach=(entries - 1 if word == "beyond_delta" else 0) + size["decoder_layers"] * (own - 1),
    )


def _named(what: str, _root_: DictConfig) -> str:
    """The default name of an experiment, or of its arm; what was overridden stands in that which tells apart what is
    trained: the arm's of one run, the experiment's where the runs are arms of its own."""
    job = _root_.get("hydra") or HydraConfig.get()  # a sweep is asked before it has a job
    choices = {str(group): str(choice) for group, choice in job.runtime.choices.items() if choice}
    several = _root_.get("arms") is not None
    first = choices["model"] if what == "arm" else choices.get("experiment", "default")
    if (what == "arm") == several:
        return first
    experiment = [f"experiment={choices['experiment']}"] if "experiment" in choices else []
    base = (*experiment, *([] if several else [f"model={first}"]))
    lines = cast(list, OmegaConf.to_container(job.overrides.task))  # one may refer to ${arm}
    divided = OmegaConf.select(_root_, "global_batch") is not None
    folders = tuple(_folders_of(job))
    stamp, script = paths.stamp(folders), str(job.job.config_name)
    told = (base, (*experiment, *_variants_chosen(choices)), tuple(lines), tuple(sorted(_set_by_arms(_root_.arms))))
    return _overridden(first, *told, divided, folders, stamp, script)


@functools.lru_cache(maxsize=64)
def _overridden(
    first: str,
    base: tuple[str, ...],
    chosen: tuple[str, ...],
    lines: tuple[str, ...],
    theirs: tuple[str, ...],
    divided: bool,
    folders: tuple[Path, ...],
    stamp: float,
    script: str,
) -> str:
    """What ``_named`` finds, kept: every path below a run's folder asks for it."""

    def composed(first: Sequence[str], more: Iterable[str]) -> DictConfig:
        return _remembered((*first, *more), folders, stamp, script)

    asked = [one for one in parse(lines) if f"{one.key_or_group}={one.value()}" not in base]
    with_base, with_chosen = partial(composed, base), partial(composed, chosen)
    return naming.name(first, asked, groups_of(folders), with_base, with_chosen, divided, theirs)


def _set_by_arms(arms: Any) -> set[str]:
    """The keys of arms' overrides as far as they can be read: what is wrong with them is said elsewhere."""
    arms = OmegaConf.to_container(arms) if OmegaConf.is_config(arms) else arms  # an override may refer to ${name}
    lists = arms.values() if isinstance(arms, Mapping) else ()
    return {str(line).partition("=")[0].lstrip("+~") for lines in lists if isinstance(lines, list) for line in lines}


def _variants(group: str, first: str, *without: str, _root_: DictConfig) -> dict[str, list[str]]:
    known = groups_of(_folders_of(_root_.get("hydra") or HydraConfig.get())).get(group, set())
    for name in (first, *without):
        if name not in known:
            raise unknown("variant", name, known, f"the group '{group}'")
    return {name: [f"{group}={name}"] for name in [first, *sorted(known - {first, *without})]}


def _options(script: str) -> str:
    """What ``--help`` lists; Hydra makes a template of it, in which a dollar has to stand twice."""
    return listing(script, _job_folders(), HydraConfig.get().runtime.choices).replace("$", "$$")


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


def parse(overrides: Iterable[str]) -> list[Override]:
    """Overrides, read one by one, without those of Hydra itself. Raises ConfigError for what is none."""
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


def _first(override: Override, groups: Mapping[str, set[str]]) -> str:
    """The override itself; of a sweep, what its first job gets."""
    if not override.is_sweep_override():
        return str(override.input_line)
    known = groups.get(override.key_or_group)
    choices = _choices(override, known) if known else list(override.sweep_string_iterator())
    return f"{override.get_key_element()}={choices[0]}" if choices else str(override.input_line)


def _value(override: Override) -> str:
    """The value of an override as it was written; null for one that deletes."""
    return str(override.input_line).partition("=")[2] or "null"


def _missing(error: MissingConfigException, folders: Sequence[Path]) -> ConfigError:
    """A variant that a yaml chose, but that does not exist."""
    group, _, choice = (error.missing_cfg_file or "").rpartition("/")
    groups = groups_of(folders)
    if group in groups:
        return unknown("variant", choice, groups[group], f"the group '{group}'", folders)
    return ConfigError(" ".join(str(error).split()))
