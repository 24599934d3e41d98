"""Configurations composed from Python, and those of the command line checked: what is wrong becomes one sentence."""

from __future__ import annotations

import copy
import functools
import os
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from gsm import paths
from gsm.config import naming
from gsm.config.check import NAMED_PARTS, PLACES, ConfigError, Guide, check, check_place, check_readable, few, unknown
from gsm.config.options import groups_of, listing, mapping, parts, scripts_of, setting, unreadable
from gsm.config.trust import vetted
from gsm.files import refuse_pipes
from gsm.models.schedule import local_reach

# What the gap of a task may lie beyond, in place of a number: what is carried without a bank by GSM, by GSM with the
# writer `delta`, whose state carries more, and by GSM and the baseline alike.
REACHES = ("beyond_gsm", "beyond_delta", "beyond_baseline")
SEARCH = "hydra.searchpath="
PLAIN = re.compile(r"[A-Za-z_/][\w./-]*", re.ASCII)  # one word of Hydra's grammar, which knows no letters beyond ASCII
COMPOSING = (HydraException, YAMLError, OSError, ValueError, RecursionError)  # raised by a composition; see `explain`
WORDS = {"null", "true", "false", "nan", "inf"}  # values of that grammar rather than names


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
    _check_choices(overrides, groups_of(folders), script)
    try:
        composed = _hydra(overrides, folders, script)
    except COMPOSING as error:
        if sentence := explain(error, overrides, folders, script):
            raise ConfigError(sentence) from error
        raise
    return _as_job(composed, folders, script)


def finish(config: DictConfig, folders: Sequence[Path], script: str = "train") -> dict[str, Any]:
    """Resolve a composed configuration, check it, and note the choice of every group under ``choices``.

    ``HydraConfig`` has to be set, as it is inside a job. Raises ConfigError.
    """
    job = HydraConfig.get()
    chosen = {group: choice for group, choice in job.runtime.choices.items() if not group.startswith("hydra/")}
    plain = _resolve(config)
    _fill_in(plain)
    groups, overrides = groups_of(folders), parse(job.overrides.task)
    adds = any((one.is_add() or one.is_force_add()) and one.key_or_group not in groups for one in overrides)
    reference = config
    if chosen.get("experiment") or adds:  # which may set keys that do not exist; Hydra refuses them elsewhere
        reference = _composed(_variants_chosen(chosen), tuple(folders), paths.stamp(folders), script, os.getcwd())
    if script == "train":
        plain = {**dict.fromkeys(NAMED_PARTS), **plain}
        plain |= {group: plain[group] or {} for group in NAMED_PARTS}  # which a run may do without
    numbers = {
        key: value for key, value in mapping(paths.configs() / f"{script}.yaml").items() if type(value) in (int, bool)
    }
    known = {**cast(dict, OmegaConf.to_container(reference, resolve=False)), **numbers, "choices": {}}
    for group in groups.keys() & plain.keys() - known.keys():
        if chosen.get(group) is None:  # removed with ~
            continue
        raise ConfigError(
            f"{group}/{chosen.get(group)}.yaml has to begin with the line '# @package _global_': save it so, as UTF-8 "
            "without a byte-order mark"
        )
    typed = {one.key_or_group for one in overrides} - groups.keys()

    def source(key: str) -> str | None:
        on_command_line = any(key == one or key.startswith(f"{one}.") for one in typed)
        return None if on_command_line else setting(key, {f"./{script}": None, **chosen}, folders)

    try:
        check(plain, {**dict.fromkeys(NAMED_PARTS & plain.keys()), **known}, Guide(groups, source))
    except ConfigError as error:
        _refuse_foreign_parts(overrides, groups, folders, str(error))
        raise
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


def check_overrides(overrides: Sequence[str], script: str = "train", sweeps: bool = True) -> None:
    """Raise ConfigError for words, groups and variants that Hydra should not see.

    Hydra composes the configuration later, and `explain` translates its errors. Of a command line that ``sweeps``, the
    first job is composed here, so that a sweep of wrong values ends with one sentence before any job.
    """
    groups = groups_of(paths.config_folders())
    parsed = _check_choices(overrides, groups, script)
    for one in parsed:
        if one.is_sweep_override() and not sweeps:
            key = {"seed": "seeds"}.get(one.key_or_group, one.key_or_group)
            listed = "" if key in groups else f", or use {key}=[{_value(one)}] for a list"
            raise ConfigError(f"{one.input_line} has several values: add -m for one run of each{listed}")
    if sweeps:
        compose([_first(one, groups) for one in parsed if not one.is_interval_sweep()], script=script)  # its sweeper's


def search(directories: Sequence[Path]) -> str:
    """What tells Hydra of the user's own folders: it takes but one by a flag, and knows of no GSM_CONFIGS."""
    return SEARCH + quoted([f"file://{folder}" for folder in directories])


def quoted(value: Any) -> str:
    """Return a value as an override on the command line has it."""
    if isinstance(value, list):
        return f"[{','.join(map(quoted, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = str(value)
    plain = not isinstance(value, str | Path) or (PLAIN.fullmatch(text) and text not in WORDS)
    return text if plain else QuotedString(text=text, quote=Quote.single).with_quotes()


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


def _refuse_foreign_parts(
    parsed: Sequence[Override], groups: Mapping[str, set[str]], folders: Sequence[Path], said: str
) -> None:
    """Raises ConfigError for a part that the chosen variant does not have; it names those that have one."""
    chosen = {one.key_or_group: str(one.value()) for one in parsed if one.key_or_group in groups}
    for one in parsed:
        group = one.key_or_group
        head, _, part = group.rpartition("/")
        if not head or group not in groups or one.package:
            continue
        known = {name: parts(folder / head / f"{name}.yaml") for folder in folders for name in groups[head]}
        places = {place for its in known.values() for place in its if place.startswith(f"{part}@")}
        if places:
            examples = " or ".join(f"{head}/{part}@{head}.{place.partition('@')[2]}" for place in sorted(places)[:3])
            raise ConfigError(f"{one.input_line} is not allowed because it names no place: use {examples}")
        takers = sorted(name for name, its in known.items() if part in its)
        if f"'{group}'" in said or (head in chosen and chosen[head] not in takers):
            which = f"{head}={chosen[head]}" if head in chosen else f"the chosen {head}"
            raise ConfigError(
                f"{one.input_line} is not allowed because {which} has no {part}: use {head}={few(takers, ' or ')}"
            )


def explain(error: BaseException, overrides: Sequence[str], folders: Sequence[Path], script: str) -> str | None:
    """Return one sentence for an error of Hydra's composition; None for an error that is not Hydra's.

    Args:
        error: raised while Hydra composed.
        overrides: that it composed from.
        folders: of yaml files.
        script: the name of the yaml that was composed.
    """
    if not isinstance(error, HydraException):
        if isinstance(error, ConfigError) or str(error).startswith("Invalid defaults list"):
            return str(error)
        is_of_yaml = isinstance(error, YAMLError | UnicodeDecodeError | OSError | RecursionError)
        return "; ".join(unreadable(folders)) or None if is_of_yaml else None
    text, groups = " ".join(str(error).split()), groups_of(folders)
    if "raised while composing" in text:
        return "; ".join(unreadable(folders)) or text
    try:
        parsed = parse(overrides)
        _refuse_foreign_parts(parsed, groups, folders, text)
        if isinstance(error, MissingConfigException):
            raise _missing(error, folders)
        # Forced in, as a yaml can put it there, an unknown key reaches `check`, which proposes the likeliest one.
        forced = [
            _first(one, groups) if one.key_or_group in groups else f"++{one.key_or_group}={_value(one)}"
            for one in parsed
        ]
        try:
            composed = _hydra(forced, folders, script)
        except COMPOSING:  # another override is wrong
            pass
        else:
            _as_job(composed, folders, script)
    except ConfigError as refusal:
        return str(refusal)
    if match := re.match(r"Could not override '(.+?)'\. To append .* use (\+\S+)", text):
        return f"{match[1]} is not set in any yaml that was chosen: use {match[2]} to add it"
    if match := re.match(r"Multiple values for (\S+?)\. ", text):
        return f"{match[1]} is chosen already: use {match[1]}=... without a plus"
    return text


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
    """Compose as Hydra does, with its own node. Raises errors of `COMPOSING`.

    Hydra reads some thirty files for the variants that are chosen, so each choice is composed once. Values are then set
    in a copy of it, by Hydra's own function.
    """
    read, groups = OverridesParser.create().parse_overrides(list(overrides)), groups_of(folders)
    values = [one for one in read if not (one.key_or_group in groups or one.is_hydra_override() or one.package)]
    if any(one.is_sweep_override() for one in values):
        values = []  # Hydra refuses them
    choices = tuple(str(one.input_line) for one in read if one not in values)
    composed = copy.deepcopy(_composed(choices, tuple(folders), paths.stamp(folders), script, os.getcwd()))
    ConfigLoaderImpl._apply_overrides_to_config(values, composed)
    composed.hydra.overrides.task = [one.input_line for one in read if not one.is_hydra_override()]
    return composed


@functools.lru_cache(maxsize=64)
def _composed(choices: tuple[str, ...], folders: tuple[Path, ...], stamp: float, script: str, here: str) -> DictConfig:
    """Compose the variants that are chosen; again when a yaml has changed. Restore the global state of Hydra."""
    register_resolvers()
    refuse_pipes(*{file.parent for folder in folders[1:] for file in folder.rglob("*.yaml")})
    own = [search(folders[1:])] if folders[1:] else []
    main = GlobalHydra.instance()
    before = main.hydra
    main.clear()  # inside a job Hydra is at work already, and there is only one
    try:
        with hydra.initialize_config_dir(str(paths.configs()), job_name=script, version_base="1.3"):
            return hydra.compose(script, [*choices, *own], return_hydra_config=True)
    finally:
        GlobalHydra.set_instance(main)  # what initialize_config_dir leaves in its place is an empty copy
        main.hydra = before


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
    OmegaConf.register_new_resolver("home", paths.at_home, replace=True)
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
    """Return the default name of an experiment, or of its arm. Overrides enter the arm's name for one run, and the
    experiment's name where its runs are arms of its own."""
    job = _root_.get("hydra") or HydraConfig.get()  # a sweep asks before it has a job
    first = str(job.runtime.choices.get("model" if what == "arm" else "experiment") or "default")
    if (what == "arm") == (_root_.get("arms") is not None):
        return first
    typed = cast(list, OmegaConf.to_container(job.overrides.task))  # an override may refer to ${arm}
    return naming.name(first, tuple(typed), OmegaConf.select(_root_, "global_batch") is not None)


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
    return {str(key): paths.at_home(value) for key, value in plain.items()}


def parse(overrides: Iterable[str]) -> list[Override]:
    """Overrides, read one by one, without those of Hydra itself. Raises ConfigError for what is none."""
    parser = OverridesParser.create()
    parsed = []
    for line in overrides:
        check_readable(line)
        try:
            parsed.append(parser.parse_override(line))
        except HydraException as error:
            raise ConfigError(f"cannot read '{line}': {_how_to_type(line)}") from error
    return [override for override in parsed if override.key_or_group.split(".")[0].split("/")[0] != "hydra"]


def _how_to_type(line: str) -> str:
    """The remedy for an override that Hydra's grammar does not take."""
    key, equals, value = line.partition("=")
    if not (equals and key):
        return "arguments look like key=value or group=option, for example seed=1"
    if value[:1] in ("[", "{"):
        return f"close its brackets, and put quotes around all of it where it has blanks, '{key}=...'"
    quoted = f"{key}={QuotedString(text=value, quote=Quote.single).with_quotes()}"
    typed = shlex.quote(quoted) if set(value) & set('"$`\\!') else f'"{quoted}"'
    return f"its value needs quotes of its own, type {typed}"


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
            if key == "data" and "/" in choice:
                raise ConfigError(
                    f"data={choice} is not allowed because it is a path: use data=folder data.path={choice}"
                )
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
        line = re.compile(rf":\s*{re.escape(choice)}\s*(#.*)?$", re.MULTILINE)
        files = [file for folder in folders for file in paths.yamls(folder)]
        naming = [one for one in files if line.search(one.read_text(encoding="utf-8", errors="replace"))]
        where = f"{naming[0].parent.name}/{naming[0].name}" if len(naming) == 1 else None
        return unknown("variant", choice, groups[group], f"the group '{group}'", where)
    return ConfigError(" ".join(str(error).split()))
